//! `cargo xtask bench queues`: compares a node's predictions of the wait in its queue with the measured waits.
//!
//! More tasks than may run at once are dumped together, over and over. While the queue empties, `permafrost nodes` is
//! asked how long whoever came now would wait; measured is when a place is free that nobody waits for. The first
//! round teaches the node what turns take, and is left out.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use permafrost_tests::daemon::{self, Daemon};
use permafrost_tests::workload::{self, Workload};
use serde_json::{Value, json};

use super::figures::{Compared, median, percentile};
use crate::rig::{self, Interrupt};
use crate::{table, ui};

/// Pause between two requests.
const PERIOD: Duration = Duration::from_millis(40);

/// Shortest wait that counts: a shorter one is below the refresh period of the node's snapshot.
const SHORTEST: Duration = Duration::from_millis(200);

/// Options of the bench.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Numbers of dumps that run at once, measured one after the other.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8])]
    at_once: Vec<usize>,
    /// Tasks that are dumped together.
    #[arg(long, default_value_t = 20)]
    tasks: u64,
    /// Size of a task, MiB; every third has a quarter of it.
    #[arg(long, default_value_t = 192)]
    size: u64,
    /// Rounds, the first of which is left out.
    #[arg(long, default_value_t = 6)]
    rounds: usize,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// Wait that a node predicted while its queue emptied.
#[derive(Clone, Copy, Debug)]
struct Said {
    /// Time of the node's snapshot.
    at: Instant,
    wait_s: f64,
}

/// Runs it and prints what it found.
///
/// # Errors
/// Fails when a dump fails, or a task is not sound afterwards.
pub(crate) fn run(options: &Options) -> Result<()> {
    let most = options.at_once.iter().max().copied().unwrap_or(0);
    if options.at_once.contains(&0) || most == 0 || options.rounds < 2 {
        bail!("--at-once takes 1 and more, --rounds 2 and more");
    }
    if options.tasks <= most as u64 + 1 {
        bail!(
            "with {most} at once nobody waits: give --tasks more than {}",
            most + 1
        );
    }
    super::criu()?;
    rig::build_release()?;
    let interrupt = Interrupt::catch()?;
    let images_mib = options.size * options.tasks;
    let dir = rig::memory_dir(images_mib * 5 / 2 + 512)?;
    let mut tasks = Vec::new();
    for task in 0..options.tasks {
        let work = dir.path().join(format!("task-{task}"));
        std::fs::create_dir(&work).context("create a work directory")?;
        let wanted = workload::Options {
            size_mib: if task % 3 == 0 {
                options.size.div_ceil(4)
            } else {
                options.size
            },
            seed: task + 1,
            ..workload::Options::default()
        };
        tasks.push(Workload::start(&work, &wanted)?);
    }
    let mut lines = Vec::new();
    for &at_once in &options.at_once {
        let compared = measure(options, at_once, dir.path(), &tasks, &interrupt)?;
        lines.push((at_once, Line::of(&compared)));
    }
    for mut task in tasks {
        if !task.verify()?.is_sound() {
            bail!("a task is not sound");
        }
        task.kill();
    }
    super::show(options.json, || json(options, &lines), || text(&lines))
}

fn measure(
    options: &Options,
    at_once: usize,
    dir: &Path,
    tasks: &[Workload],
    interrupt: &Interrupt,
) -> Result<Vec<Compared>> {
    let dir = dir.join(format!("at-once-{at_once}"));
    std::fs::create_dir(&dir).context("create the daemon's directory")?;
    let region = daemon::Options {
        region_mib: options.size * options.tasks * 5 / 4 + 256,
        extra: vec![format!("--dumps-at-once={at_once}")],
        ..daemon::Options::default()
    };
    let daemon = Daemon::start(&dir, &region)?;
    super::settle(&daemon)?;
    let mut all = Vec::new();
    for round in 0..options.rounds {
        interrupt.check()?;
        let compared = one_round(&daemon, at_once, tasks)?;
        let line = Line::of(&compared);
        ui::say(&format!(
            "{at_once} at once, round {} of {}: {line}",
            round + 1,
            options.rounds
        ));
        if round > 0 {
            all.extend(compared);
        }
    }
    daemon.stop()?;
    // The next one's region needs the room.
    std::fs::remove_dir_all(&dir).context("remove the daemon's directory")?;
    Ok(all)
}

/// Dumps all tasks together.
fn one_round(daemon: &Daemon, at_once: usize, tasks: &[Workload]) -> Result<Vec<Compared>> {
    let jobs: Vec<String> = (0..tasks.len())
        .map(|task| format!("queued-{task}"))
        .collect();
    let ended = AtomicBool::new(false);
    let compared = std::thread::scope(|scope| {
        let dumps = jobs.iter().zip(tasks).map(|(job, task)| {
            let pid = task.pid().to_string();
            scope.spawn(move || {
                daemon.json(&["dump", "--leave-running", "--job", job, "--pid", &pid])
            })
        });
        let dumps: Vec<_> = dumps.collect();
        let watching = scope.spawn(|| watch(daemon, at_once, &ended));
        let dumped: Vec<_> = dumps.into_iter().map(joined).collect();
        ended.store(true, Ordering::Relaxed);
        let compared = joined(watching);
        dumped.into_iter().collect::<Result<Vec<_>>>()?;
        compared
    })?;
    for job in &jobs {
        daemon.run(&["rm", job, "--all"])?;
    }
    Ok(compared)
}

fn joined<T>(thread: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    let end = thread.join();
    end.unwrap_or_else(|_| bail!("a thread panicked"))
}

/// Records the node's predictions until no dump waits any more and a slot is free.
fn watch(daemon: &Daemon, at_once: usize, ended: &AtomicBool) -> Result<Vec<Compared>> {
    let mut said: Vec<Said> = Vec::new();
    let mut last = None;
    while !ended.load(Ordering::Relaxed) {
        std::thread::sleep(PERIOD);
        let asked = Instant::now();
        let nodes = daemon.json(&["nodes"])?;
        let age = rig::field(&nodes, "age_s").and_then(Value::as_f64);
        let age = Duration::try_from_secs_f64(age.unwrap_or_default()).unwrap_or_default();
        let at = asked.checked_sub(age).unwrap_or(asked);
        let queue = rig::field(&nodes, "write_queue").context("a queue of dumps")?;
        let count = |name| rig::number(queue, name);
        let (running, waiting) = (count("running"), count("waiting"));
        if !said.is_empty() && running + waiting < at_once as u64 {
            return Ok(compared(&said, at));
        }
        let wait_s = queue["time_s"]["p50"].as_f64();
        let state = (running, waiting, wait_s.map(f64::to_bits));
        if waiting > 0 && last != Some(state) {
            said.extend(wait_s.map(|wait_s| Said { at, wait_s }));
            last = Some(state);
        }
    }
    // The last dumps ended between two questions: now.
    Ok(compared(&said, Instant::now()))
}

fn compared(said: &[Said], free: Instant) -> Vec<Compared> {
    let waits = said
        .iter()
        .map(|said| (said.wait_s, free.saturating_duration_since(said.at)));
    waits
        .filter(|(_, wait)| *wait >= SHORTEST)
        .map(|(predicted_s, wait)| Compared {
            predicted_s,
            measured_s: wait.as_secs_f64(),
        })
        .collect()
}

/// Results for one number of concurrent dumps.
struct Line {
    count: usize,
    measured_s: f64,
    /// Ratios of predicted to measured wait: the 5th percentile, the median and the 95th.
    ratios: [f64; 3],
}

impl Line {
    fn of(compared: &[Compared]) -> Self {
        let middle = |values: &[f64]| median(values).unwrap_or(f64::NAN);
        let ratios = Compared::sorted(compared, Compared::ratio);
        let at = |percent| percentile(&ratios, percent).unwrap_or(f64::NAN);
        Self {
            count: compared.len(),
            measured_s: middle(&Compared::sorted(compared, |one| one.measured_s)),
            ratios: [at(5), middle(&ratios), at(95)],
        }
    }
}

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [low, middle, high] = self.ratios;
        let count = self.count;
        write!(
            f,
            "{count} waits, predicted/measured {middle:.2} ({low:.2} to {high:.2})"
        )
    }
}

fn text(lines: &[(usize, Line)]) -> String {
    let heads = [
        "at once",
        "waits",
        "median",
        "predicted/measured",
        "5 %",
        "95 %",
    ];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    rows.extend(lines.iter().map(|(at_once, line)| {
        let [low, middle, high] = line.ratios.map(|ratio| format!("{ratio:.2}"));
        let median = format!("{:.2} s", line.measured_s);
        vec![
            at_once.to_string(),
            line.count.to_string(),
            median,
            middle,
            low,
            high,
        ]
    }));
    table::render(&rows)
}

fn json(options: &Options, lines: &[(usize, Line)]) -> Value {
    let lines = lines.iter().map(|(at_once, line)| {
        let [low, middle, high] = line.ratios;
        json!({
            "at_once": at_once,
            "waits": line.count,
            "median_s": line.measured_s,
            "predicted_to_measured_p5": low,
            "predicted_to_measured_p50": middle,
            "predicted_to_measured_p95": high,
        })
    });
    json!({
        "tasks": options.tasks,
        "size_mib": options.size,
        "rounds": options.rounds,
        "queues": lines.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_compared_from_when_they_were_said_to_a_free_place() {
        let free = Instant::now();
        let before = |seconds: f64, wait_s| Said {
            at: free.checked_sub(Duration::from_secs_f64(seconds)).unwrap(),
            wait_s,
        };
        // The last one is over too soon.
        let said = [before(2.0, 3.0), before(1.0, 1.0), before(0.1, 5.0)];
        let line = Line::of(&compared(&said, free));
        assert_eq!(line.count, 2);
        assert!((line.measured_s - 1.5).abs() < 1e-9);
        assert!((line.ratios[1] - 1.25).abs() < 1e-9);
        assert!(Line::of(&[]).ratios[2].is_nan());
    }
}
