//! `cargo xtask bench suspension`: the experiments of paper 001 (§IV, Figures 2 to 4) and the one that motivates paper
//! 004 (§2.2, Figure 3), on real processes that the commands suspend, kill, shrink and grow.
//!
//! Two tasks share a control group with a limit of memory, as the papers' share a machine. The second one arrives when
//! the first has done a part of its work, and the first waits, is killed and begins again, or is suspended meanwhile.
//! What the group has no memory for is paged out to a swap file that the bench makes and removes.

mod group;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use self::group::{BatchTask, Limited, Swap};
use crate::rig::{Interrupt, build_release};
use crate::{paths, table, ui};

/// Memory of a task whose figures are of suspension alone, MiB.
const LIGHT_MIB: u64 = 16;

/// Memory of both tasks of Figure 3, MiB (paper 001, §IV-C).
const HUNGRY_MIB: u64 = 2048;

/// Memory of the suspended task of Figure 4, MiB (paper 001, §IV-C).
const VICTIM_MIB: u64 = 2560;

/// Memory of the task that is shrunk, MiB, and number of its threads (paper 004, §2.2; it names no number).
const SHRUNK_MIB: u64 = 1024;
const SHRUNK_THREADS: u64 = 4;

/// Options of the bench.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Options {
    /// Figures to measure.
    #[arg(long, value_delimiter = ',', default_values = ["001-F2", "001-F3", "001-F4", "004-F3"])]
    figures: Vec<String>,
    /// Memory of the group that both tasks run in, MiB.
    #[arg(long, default_value_t = 4096)]
    memory_mib: u64,
    /// Work of a task, seconds; the time to fill and read its memory comes on top.
    #[arg(long, default_value_t = 80)]
    work_s: u64,
    /// Parts of its work that the first task has done when the second arrives, percent.
    #[arg(long, value_delimiter = ',', default_values_t = [10, 50, 90])]
    progress: Vec<u64>,
    /// Memory of the second task in 001-F4, MiB.
    #[arg(long, value_delimiter = ',', default_values_t = [512, 1024, 1536, 2048, 2560])]
    arrivals: Vec<u64>,
    /// Runs of each case, in turn.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Directory of the swap file, on a disk [default: target/].
    #[arg(long, value_name = "DIR")]
    swap_dir: Option<PathBuf>,
    /// Print JSON instead of tables.
    #[arg(long)]
    json: bool,
}

/// Way in which the second task gets its resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Primitive {
    Wait,
    Kill,
    Suspend,
}

impl Primitive {
    const ALL: [Self; 3] = [Self::Wait, Self::Kill, Self::Suspend];

    fn name(self) -> &'static str {
        match self {
            Self::Wait => "wait",
            Self::Kill => "kill",
            Self::Suspend => "suspend",
        }
    }
}

/// Two tasks, and when the second arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    first_mib: u64,
    second_mib: u64,
    progress: u64,
    primitive: Primitive,
}

/// Times of one run, seconds (paper 001, §IV-B), and what the first task had in swap when the second ended.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    /// From the arrival of the second task to its end.
    sojourn_s: f64,
    /// From the start of the first task to the end of both.
    makespan_s: f64,
    swapped_mib: f64,
}

/// Times of one task that is shrunk at once, and grown again (paper 004, Figure 3).
#[derive(Clone, Copy, Debug, Default)]
struct Shrunk {
    /// Until the command has taken the memory.
    shrink_s: f64,
    /// Memory that it has taken, MiB.
    taken_mib: f64,
    /// Until the command has given everything back.
    grow_s: f64,
    /// From then until the task writes at nine tenths of its rate before.
    recovery_s: f64,
}

pub(super) fn run(options: &Options) -> Result<()> {
    let known = ["001-F2", "001-F3", "001-F4", "004-F3"];
    for figure in &options.figures {
        ensure!(
            known.contains(&figure.as_str()),
            "figure {figure:?} is not measured here: {}",
            known.join(", ")
        );
    }
    ensure!(
        options.progress.iter().all(|part| *part <= 100),
        "--progress is a percentage: at most 100"
    );
    ensure!(options.runs > 0, "--runs is at least 1");
    build_release()?;
    let interrupt = Interrupt::catch()?;
    let dir = tempfile::tempdir().context("create a temporary directory")?;
    let swap_dir = options.swap_dir.clone().unwrap_or_else(paths::target);
    // Both tasks of Figure 4, and what the kernel takes of it for itself.
    let _swap = Swap::make(&swap_dir, 2 * VICTIM_MIB)?;
    let limited = Limited::make(options.memory_mib, dir.path())?;

    let measures = |figure: &str| options.figures.iter().any(|name| name == figure);
    let mut cases = Vec::new();
    for (figure, mib) in [("001-F2", LIGHT_MIB), ("001-F3", HUNGRY_MIB)] {
        if measures(figure) {
            let parts = options.progress.iter();
            cases.extend(parts.map(|progress| (mib, mib, *progress)));
        }
    }
    if measures("001-F4") {
        let arrivals = options.arrivals.iter();
        cases.extend(arrivals.map(|second| (VICTIM_MIB, *second, 50)));
    }
    let mut samples: BTreeMap<Case, Vec<Sample>> = BTreeMap::new();
    let mut shrunk = Vec::new();
    for round in 1..=options.runs {
        for &(first_mib, second_mib, progress) in &cases {
            for primitive in Primitive::ALL {
                let case = Case {
                    first_mib,
                    second_mib,
                    progress,
                    primitive,
                };
                let task = ui::Task::begin(&format!(
                    "{round} of {}: {first_mib} and {second_mib} MiB at {progress} %, {}",
                    options.runs,
                    primitive.name()
                ));
                let sample = measure(&limited, case, options.work_s, &interrupt)?;
                task.done(&format!(
                    "sojourn {:.1} s, makespan {:.1} s, {:.0} MiB in swap",
                    sample.sojourn_s, sample.makespan_s, sample.swapped_mib
                ));
                samples.entry(case).or_default().push(sample);
            }
        }
        if measures("004-F3") {
            let task = ui::Task::begin(&format!("{round} of {}: shrink at once", options.runs));
            let sample = shrink(&limited, &interrupt)?;
            task.done(&format!(
                "{:.0} MiB taken in {:.2} s",
                sample.taken_mib, sample.shrink_s
            ));
            shrunk.push(sample);
        }
    }
    let rows: Vec<(Case, Sample)> = samples
        .iter()
        .map(|(case, runs)| (*case, medians(runs)))
        .collect();
    super::show(
        options.json,
        || to_json(&rows, &shrunk),
        || text(options, &rows, &shrunk),
    )
}

/// Runs two tasks.
fn measure(limited: &Limited, case: Case, work_s: u64, interrupt: &Interrupt) -> Result<Sample> {
    let work = Duration::from_secs(work_s);
    let begin = Instant::now();
    let first = BatchTask::start(limited, "first", case.first_mib, work)?;
    first.wait_for_work(work.mul_f64(case.progress as f64 / 100.0), interrupt)?;
    let arrival = Instant::now();
    let mut swapped_mib = 0.0;
    let (sojourn, first) = match case.primitive {
        Primitive::Wait => {
            first.finish(interrupt)?;
            let second = BatchTask::start(limited, "second", case.second_mib, work)?;
            second.finish(interrupt)?;
            (arrival.elapsed(), None)
        }
        Primitive::Kill => {
            first.kill()?;
            let second = BatchTask::start(limited, "second", case.second_mib, work)?;
            second.finish(interrupt)?;
            let sojourn = arrival.elapsed();
            let again = BatchTask::start(limited, "first", case.first_mib, work)?;
            (sojourn, Some(again))
        }
        Primitive::Suspend => {
            first.command(&["suspend", "--freeze"])?;
            let second = BatchTask::start(limited, "second", case.second_mib, work)?;
            second.finish(interrupt)?;
            let sojourn = arrival.elapsed();
            swapped_mib = first.swapped_mib()?;
            first.command(&["resume"])?;
            (sojourn, Some(first))
        }
    };
    if let Some(first) = first {
        first.finish(interrupt)?;
    }
    Ok(Sample {
        sojourn_s: sojourn.as_secs_f64(),
        makespan_s: begin.elapsed().as_secs_f64(),
        swapped_mib,
    })
}

/// Shrinks a task that writes to all of its memory, at once and to the least, and grows it again.
fn shrink(limited: &Limited, interrupt: &Interrupt) -> Result<Shrunk> {
    /// Time over which the rate of writes is taken.
    const OVER: Duration = Duration::from_secs(1);
    const LIMIT: Duration = Duration::from_secs(600);
    let task = BatchTask::touching(limited, SHRUNK_MIB, SHRUNK_THREADS)?;
    // All pages are written to several times.
    task.wait_for_writes(SHRUNK_MIB << 12, interrupt)?;
    let before = task.rate(OVER)?;
    let begin = Instant::now();
    let memory_before = task.resident_mib()?;
    // It takes less than everything where the task swaps meanwhile; the report says how much.
    task.command_that_may_take_less(&["shrink", "--immediate"])?;
    let shrink_s = begin.elapsed().as_secs_f64();
    let taken_mib = memory_before - task.resident_mib()?;
    let begin = Instant::now();
    task.command(&["grow"])?;
    let grow_s = begin.elapsed().as_secs_f64();
    let begin = Instant::now();
    // The beginning of the first window in which it has the rate.
    let recovery_s = loop {
        let window = begin.elapsed();
        if task.rate(OVER)? >= 0.9 * before {
            break window.as_secs_f64();
        }
        interrupt.check()?;
        ensure!(window < LIMIT, "the task does not reach its rate again");
    };
    task.kill()?;
    Ok(Shrunk {
        shrink_s,
        taken_mib,
        grow_s,
        recovery_s,
    })
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

fn medians(runs: &[Sample]) -> Sample {
    Sample {
        sojourn_s: median(runs.iter().map(|run| run.sojourn_s)),
        makespan_s: median(runs.iter().map(|run| run.makespan_s)),
        swapped_mib: median(runs.iter().map(|run| run.swapped_mib)),
    }
}

fn medians_of_shrunk(runs: &[Shrunk]) -> Shrunk {
    Shrunk {
        shrink_s: median(runs.iter().map(|run| run.shrink_s)),
        taken_mib: median(runs.iter().map(|run| run.taken_mib)),
        grow_s: median(runs.iter().map(|run| run.grow_s)),
        recovery_s: median(runs.iter().map(|run| run.recovery_s)),
    }
}

fn to_json(rows: &[(Case, Sample)], shrunk: &[Shrunk]) -> Value {
    let rows = rows.iter().map(|(case, sample)| {
        json!({
            "first_mib": case.first_mib,
            "second_mib": case.second_mib,
            "progress_percent": case.progress,
            "primitive": case.primitive.name(),
            "sojourn_s": sample.sojourn_s,
            "makespan_s": sample.makespan_s,
            "swapped_mib": sample.swapped_mib,
        })
    });
    let mut object = json!({ "two_tasks": rows.collect::<Vec<_>>() });
    if !shrunk.is_empty() {
        let of = medians_of_shrunk(shrunk);
        object["shrunk"] = json!({
            "shrink_s": of.shrink_s,
            "taken_mib": of.taken_mib,
            "grow_s": of.grow_s,
            "recovery_s": of.recovery_s,
        });
    }
    object
}

fn text(options: &Options, rows: &[(Case, Sample)], shrunk: &[Shrunk]) -> String {
    let head = [
        "first and second, MiB; progress",
        "wait: sojourn, makespan, s",
        "kill",
        "suspend",
        "sojourn on kill",
        "makespan on wait",
        "in swap, MiB",
    ];
    let mut cells = vec![head.map(str::to_owned).to_vec()];
    let all: BTreeMap<Case, Sample> = rows.iter().copied().collect();
    for (case, waits) in rows {
        let of = |primitive| all.get(&Case { primitive, ..*case }).copied();
        let (Primitive::Wait, Some(kills), Some(suspends)) =
            (case.primitive, of(Primitive::Kill), of(Primitive::Suspend))
        else {
            continue;
        };
        let both = |of: &Sample| format!("{:.1}, {:.1}", of.sojourn_s, of.makespan_s);
        let on = |ours: f64, theirs: f64| format!("{:+.1} %", (ours / theirs - 1.0) * 100.0);
        cells.push(vec![
            format!(
                "{} and {}; {} %",
                case.first_mib, case.second_mib, case.progress
            ),
            both(waits),
            both(&kills),
            both(&suspends),
            on(suspends.sojourn_s, kills.sojourn_s),
            on(suspends.makespan_s, waits.makespan_s),
            format!("{:.0}", suspends.swapped_mib),
        ]);
    }
    let mut out = format!(
        "Tasks of {} s in {} MiB, medians of {} runs\n",
        options.work_s, options.memory_mib, options.runs
    );
    if cells.len() > 1 {
        out += &table::render(&cells);
    }
    if !shrunk.is_empty() {
        let of = medians_of_shrunk(shrunk);
        out += &format!(
            "shrink --immediate took {:.0} MiB in {:.2} s, grow {:.2} s; the task has its rate again after {:.1} s\n",
            of.taken_mib, of.shrink_s, of.grow_s, of.recovery_s
        );
    }
    out
}
