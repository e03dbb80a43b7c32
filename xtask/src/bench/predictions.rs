//! `cargo xtask bench predictions`: compares the predictions of `permafrost cost` and `permafrost plan resume` with
//! the times that the dump and the restore then take.
//!
//! Workers dump and restore processes of mixed size and dirtiness at the same time, over and over, so that each
//! prediction has to count with the others. Predicted is the median of what the API answers just before; measured is
//! the command's own time: the wait in the queue, CRIU's start, the freeze, the seal. The first dumps of a node that
//! has measured nothing teach it, and are left out.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use parking_lot::Mutex;
use permafrost_tests::contents::Contents;
use permafrost_tests::daemon::{self, Daemon};
use permafrost_tests::random::Random;
use permafrost_tests::workload::{self, Workload};
use serde_json::{Value, json};

use super::figures::{Compared, median, percentile};
use crate::rig::{self, Interrupt};
use crate::{table, ui};

/// Number of dumps of one process, each after it has modified its memory.
const DUMPS_OF_A_PROCESS: u64 = 5;

/// Shares of their memory that processes modify between dumps, percent.
const DIRTY_PERCENT: [u64; 4] = [1, 10, 50, 100];

/// Exit code of a request that no measurement can answer yet.
const UNKNOWN: i32 = 11;

/// Options of the bench.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Dumps, each followed by a restore, whose predictions are compared.
    #[arg(long, default_value_t = 200)]
    dumps: usize,
    /// Dumps before those, from which the node learns.
    #[arg(long, default_value_t = 20)]
    learn: usize,
    /// Processes that are dumped and restored at the same time.
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// Least and largest size of a process, MiB.
    #[arg(long, value_delimiter = ',', default_values_t = [16, 512])]
    sizes: Vec<u64>,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Default)]
struct Results {
    /// Number of dumps begun, including those from which the node learns.
    begun: usize,
    full: Vec<Compared>,
    incremental: Vec<Compared>,
    restores: Vec<Compared>,
    failed: Option<anyhow::Error>,
}

struct Bench<'a> {
    options: &'a Options,
    daemon: &'a Daemon,
    dir: &'a Path,
    interrupt: &'a Interrupt,
    results: Mutex<Results>,
}

/// Runs it and prints what it found.
///
/// # Errors
/// Fails when a dump or a restore fails, or a restored process is not sound.
pub(crate) fn run(options: &Options) -> Result<()> {
    let (least, largest) = match options.sizes[..] {
        [least, largest] if 0 < least && least <= largest => (least, largest),
        _ => bail!("--sizes takes the least and the largest size, as in 16,512"),
    };
    super::criu()?;
    rig::build_release()?;
    let interrupt = Interrupt::catch()?;
    let region_mib = largest * (options.workers as u64) * 2 + 512;
    let dir = rig::memory_dir(region_mib + largest)?;
    let region = daemon::Options {
        region_mib,
        ..daemon::Options::default()
    };
    let daemon = Daemon::start(dir.path(), &region)?;
    super::settle(&daemon)?;
    let bench = Bench {
        options,
        daemon: &daemon,
        dir: dir.path(),
        interrupt: &interrupt,
        results: Mutex::default(),
    };
    std::thread::scope(|scope| {
        for worker in 0..options.workers {
            let bench = &bench;
            let random = Random::of(worker as u64 + 1);
            scope.spawn(move || bench.work(worker, random, (least, largest)));
        }
    });
    let results = bench.results.into_inner();
    daemon.stop()?;
    if let Some(error) = results.failed {
        return Err(error);
    }
    let report = [
        ("full dumps", &results.full),
        ("incremental dumps", &results.incremental),
        ("restores", &results.restores),
    ]
    .map(|(what, compared)| Line::of(what, compared));
    super::show(options.json, || json(options, &report), || text(&report))
}

impl Bench<'_> {
    fn work(&self, worker: usize, mut random: Random, sizes: (u64, u64)) {
        let mut process = 0;
        while self.goes_on() {
            process += 1;
            let job = format!("predicted-{worker}-{process}");
            let one = self.one_process(&job, &mut random, sizes);
            if let Err(error) = one.with_context(|| format!("job {job}")) {
                self.results().failed.get_or_insert(error);
            }
        }
    }

    fn goes_on(&self) -> bool {
        let results = self.results();
        results.failed.is_none() && results.begun < self.options.learn + self.options.dumps
    }

    /// Runs one process from its start to its end: it is dumped and restored several times.
    fn one_process(
        &self,
        job: &str,
        random: &mut Random,
        (least, largest): (u64, u64),
    ) -> Result<()> {
        let work = tempfile::tempdir_in(self.dir).context("create a work directory")?;
        let wanted = workload::Options {
            size_mib: least + random.below(largest - least + 1),
            contents: Contents::ALL[random.index(Contents::ALL.len())],
            modify_percent: DIRTY_PERCENT[random.index(DIRTY_PERCENT.len())],
            ..workload::Options::default()
        };
        let mut workload = Workload::start(work.path(), &wanted)?;
        for dump in 0..DUMPS_OF_A_PROCESS {
            self.interrupt.check()?;
            let counts = {
                let mut results = self.results();
                results.begun += 1;
                results.begun > self.options.learn
            };
            let incremental = dump > 0;
            let dumped = self.dump(job, &mut workload, incremental)?;
            let restored = self.restore(job)?;
            ui::say(&format!(
                "{job}, {} MiB, {} % modified: dump {}, restore {}",
                wanted.size_mib,
                wanted.modify_percent,
                said(dumped),
                said(restored)
            ));
            if counts {
                let mut results = self.results();
                let dumps = if incremental {
                    &mut results.incremental
                } else {
                    &mut results.full
                };
                dumps.extend(dumped);
                results.restores.extend(restored);
            }
            workload.modify()?;
            if !self.goes_on() {
                break;
            }
        }
        if !workload.verify()?.is_sound() {
            bail!("the restored process is not sound");
        }
        workload.kill();
        self.daemon.run(&["rm", job, "--all"])?;
        Ok(())
    }

    /// Dumps, and records the prediction and the measured time; nothing if the node had no measurements to predict
    /// from.
    fn dump(
        &self,
        job: &str,
        workload: &mut Workload,
        incremental: bool,
    ) -> Result<Option<Compared>> {
        let pid = workload.pid().to_string();
        let mechanism = if incremental {
            "incremental_dump"
        } else {
            "full_dump"
        };
        let cost = self.ask(&[
            "cost",
            "--pid",
            &pid,
            "--job",
            job,
            "--mechanism",
            mechanism,
        ])?;
        let predicted = cost.and_then(|cost| spread(&cost, "delay_s"));
        let dumped = self.daemon.json(&["dump", "--pid", &pid, "--job", job])?;
        workload.wait_until_gone()?;
        Ok(compared(predicted, &dumped))
    }

    fn restore(&self, job: &str) -> Result<Option<Compared>> {
        let plan = self.ask(&["plan", "resume", job])?;
        let predicted = plan.and_then(|plan| spread(&plan, "until_running_s"));
        let restored = self.daemon.json(&["restore", job])?;
        Ok(compared(predicted, &restored))
    }

    /// Runs a `permafrost` command and returns its JSON output, or `None` if the answer is not known yet.
    fn ask(&self, arguments: &[&str]) -> Result<Option<Value>> {
        let mut all = vec!["--json"];
        all.extend(arguments);
        let output = self.daemon.try_run(&all)?;
        match output.status.code() {
            Some(0) => {}
            Some(UNKNOWN) => return Ok(None),
            _ => bail!(
                "`permafrost {}`: {}: {}",
                all.join(" "),
                output.status,
                String::from_utf8_lossy(&output.stderr)
            ),
        }
        serde_json::from_slice(&output.stdout)
            .map(Some)
            .context("read the answer")
    }

    fn results(&self) -> parking_lot::MutexGuard<'_, Results> {
        self.results.lock()
    }
}

/// Returns the median of the first cost in an answer.
fn spread(answer: &Value, sum: &str) -> Option<f64> {
    rig::field(answer, sum)?.get("p50")?.as_f64()
}

fn compared(predicted_s: Option<f64>, done: &Value) -> Option<Compared> {
    // Until the pid of the last life is free is the parent's affair.
    let own = rig::number(done, "total_us").saturating_sub(rig::number(done, "wait_us"));
    let measured = Duration::from_micros(own);
    predicted_s.map(|predicted_s| Compared {
        predicted_s,
        measured_s: measured.as_secs_f64(),
    })
}

fn said(compared: Option<Compared>) -> String {
    compared.map_or_else(
        || "not predicted".to_owned(),
        |one| {
            format!(
                "{:.0} ms, predicted {:.0}",
                one.measured_s * 1e3,
                one.predicted_s * 1e3
            )
        },
    )
}

/// Results for one kind of transfer.
struct Line {
    what: &'static str,
    count: usize,
    measured_s: f64,
    error_p50: f64,
    error_p95: f64,
    bias: f64,
}

impl Line {
    fn of(what: &'static str, compared: &[Compared]) -> Self {
        let errors = Compared::sorted(compared, Compared::error);
        let middle = |values: &[f64]| median(values).unwrap_or(f64::NAN);
        Self {
            what,
            count: compared.len(),
            measured_s: middle(&Compared::sorted(compared, |one| one.measured_s)),
            error_p50: middle(&errors),
            error_p95: percentile(&errors, 95).unwrap_or(f64::NAN),
            bias: middle(&Compared::sorted(compared, Compared::ratio)),
        }
    }
}

fn text(report: &[Line]) -> String {
    let mut rows = vec![
        [
            "",
            "number",
            "median time",
            "error p50",
            "error p95",
            "predicted/measured",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    rows.extend(report.iter().map(|line| {
        vec![
            line.what.to_owned(),
            line.count.to_string(),
            format!("{:.0} ms", line.measured_s * 1e3),
            format!("{:.1} %", line.error_p50 * 1e2),
            format!("{:.1} %", line.error_p95 * 1e2),
            format!("{:.2}", line.bias),
        ]
    }));
    table::render(&rows)
}

fn json(options: &Options, report: &[Line]) -> Value {
    let lines = report.iter().map(|line| {
        json!({
            "what": line.what,
            "number": line.count,
            "median_s": line.measured_s,
            "error_p50": line.error_p50,
            "error_p95": line.error_p95,
            "predicted_to_measured": line.bias,
        })
    });
    json!({
        "workers": options.workers,
        "learnt_from": options.learn,
        "sizes_mib": options.sizes,
        "predictions": lines.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_parts_of_what_was_measured() {
        let compared: Vec<_> = (1..=100)
            .map(|n| Compared {
                predicted_s: 1.0 + f64::from(n) / 100.0,
                measured_s: 1.0,
            })
            .collect();
        let line = Line::of("dumps", &compared);
        assert!((line.error_p95 - 0.95).abs() < 1e-9);
        assert!((line.error_p50 - 0.505).abs() < 1e-9);
        assert!((line.bias - 1.505).abs() < 1e-9);
        assert!(Line::of("none", &[]).error_p95.is_nan());
    }
}
