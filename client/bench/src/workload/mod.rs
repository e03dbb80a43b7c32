//! `permafrost bench workload`: a process to be frozen.
//!
//! The process fills memory with contents that it can generate again from a seed, so that it can check after a
//! restore whether every page is unchanged. On a signal it acts and then replaces its report:
//!
//! - SIGHUP: reports
//! - SIGUSR1: writes some of its pages anew, reports
//! - SIGUSR2: checks every page, reports
//!
//! With work to do, the process meanwhile computes over its memory, a fixed number of steps, and ends when they
//! are done.
//!
//! The process can be dumped as it is: it has a session of its own, standard streams on /dev/null, no open file
//! between reports, and no further thread. It ends by itself when the benchmark that started it is gone.

mod compute;
mod memory;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

use clap::{Args, ValueEnum};
use permafrost_terminal::failure::{Code, Failure};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGHUP, SIGUSR1, SIGUSR2};

use self::compute::Compute;
use self::memory::Memory;

/// Name of the report in the workload's directory.
pub(super) const REPORT: &str = "workload.json";
/// Interval at which an idle workload checks for signals.
const IDLE: Duration = Duration::from_millis(1);
/// Interval at which the workload checks that the benchmark still lives.
const GUARD_EVERY: Duration = Duration::from_millis(500);

/// Contents of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Contents {
    /// Incompressible: nothing can be saved on the way
    Random,
    /// As the heap of an interpreter: objects, text, numbers, zeros
    Heap,
}

#[derive(Debug, Args)]
pub(super) struct WorkloadArguments {
    /// Directory of the report.
    #[arg(long)]
    dir: PathBuf,
    /// Memory to fill, bytes.
    #[arg(long)]
    size_bytes: u64,
    #[arg(long, value_enum, default_value = "random")]
    contents: Contents,
    /// Seed of the contents.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The process without which this one ends.
    #[arg(long)]
    guardian: i32,
    /// Steps of computation, after which it ends; none: it waits for signals.
    #[arg(long)]
    steps: Option<u64>,
    /// Compute for so long, report the steps done, and end.
    #[arg(long)]
    calibrate_ms: Option<u64>,
}

/// Report of a workload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Report {
    /// Description of an error, if one occurred.
    pub(super) error: Option<String>,
    /// Number of times that pages were rewritten.
    pub(super) generation: u32,
    /// Number of pages filled.
    pub(super) pages: u64,
    /// True if this is the report of a check.
    pub(super) checked: bool,
    /// Number of pages with wrong contents.
    pub(super) bad_pages: u64,
    /// Number of steps of computation done.
    pub(super) steps: u64,
    /// True if all steps are done.
    pub(super) finished: bool,
    /// Result of the computation, which is the same for the same memory and number of steps, however often the
    /// process was frozen.
    pub(super) result: u64,
    /// Processor time of a calibration, nanoseconds: the time that it would have taken with the machine for
    /// itself.
    pub(super) used_ns: u64,
}

impl Report {
    fn write(&self, dir: &Path) -> std::io::Result<()> {
        let new = dir.join("workload.new");
        fs::write(&new, serde_json::to_vec(self)?)?;
        fs::rename(new, dir.join(REPORT))
    }
}

pub(super) fn workload(arguments: &WorkloadArguments) -> Result<(), Failure> {
    let done = Workload::start(arguments).and_then(Workload::run);
    if let Err(error) = &done {
        // Reports the error in the report, as standard error is /dev/null.
        let report = Report {
            error: Some(error.to_string()),
            ..Report::default()
        };
        let _ = report.write(&arguments.dir);
    }
    done.map_err(|error| Failure::new(Code::Internal, format!("workload: {error}")))
}

/// Returns the processor time that this process has used.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

struct Workload<'a> {
    arguments: &'a WorkloadArguments,
    guardian: Option<Pid>,
    told: [Arc<AtomicBool>; 3],
    memory: Memory,
    compute: Compute,
}

impl<'a> Workload<'a> {
    fn start(arguments: &'a WorkloadArguments) -> std::io::Result<Self> {
        // CRIU refuses a process whose session's leader is outside of the tree.
        rustix::process::setsid()?;
        let told = [SIGHUP, SIGUSR1, SIGUSR2].map(|signal| {
            let told = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register(signal, Arc::clone(&told)).map(|_| told)
        });
        let [report, dirty, check] = told;
        Ok(Self {
            arguments,
            guardian: Pid::from_raw(arguments.guardian),
            told: [report?, dirty?, check?],
            memory: Memory::filled(arguments.size_bytes, arguments.contents, arguments.seed)?,
            compute: Compute::new(),
        })
    }

    fn run(mut self) -> std::io::Result<()> {
        if let Some(limit_ms) = self.arguments.calibrate_ms {
            return self.calibrate(Duration::from_millis(limit_ms));
        }
        self.report(Report::default())?;
        let mut guarded = Instant::now();
        while !self.is_finished() {
            if self.arguments.steps.is_some() {
                self.compute.step(self.memory.bytes());
            } else {
                thread::sleep(IDLE);
            }
            self.obey()?;
            if guarded.elapsed() >= GUARD_EVERY {
                guarded = Instant::now();
                if self.is_forsaken() {
                    return Ok(());
                }
            }
        }
        self.report(Report {
            finished: true,
            ..Report::default()
        })
    }

    fn is_finished(&self) -> bool {
        let steps = self.arguments.steps;
        steps.is_some_and(|steps| self.compute.steps() >= steps)
    }

    fn is_forsaken(&self) -> bool {
        let alive = |pid: Pid| rustix::process::test_kill_process(pid).is_ok();
        !self.guardian.is_some_and(alive)
    }

    fn obey(&mut self) -> std::io::Result<()> {
        let [report, dirty, check] = self
            .told
            .each_ref()
            .map(|told| told.swap(false, Ordering::Relaxed));
        if dirty {
            let percent = fs::read_to_string(self.arguments.dir.join("percent"))?;
            let percent = percent.trim().parse().map_err(std::io::Error::other)?;
            self.memory.dirty(percent);
        }
        if check {
            let bad_pages = self.memory.bad_pages();
            self.report(Report {
                checked: true,
                bad_pages,
                ..Report::default()
            })?;
        } else if report || dirty {
            self.report(Report::default())?;
        }
        Ok(())
    }

    fn calibrate(&mut self, limit: Duration) -> std::io::Result<()> {
        let start = Instant::now();
        let before = processor_time();
        while start.elapsed() < limit {
            self.compute.step(self.memory.bytes());
        }
        let used = processor_time().saturating_sub(before);
        self.report(Report {
            finished: true,
            used_ns: u64::try_from(used.as_nanos()).unwrap_or(u64::MAX),
            ..Report::default()
        })
    }

    fn report(&self, report: Report) -> std::io::Result<()> {
        Report {
            generation: self.memory.generation(),
            pages: self.memory.pages(),
            steps: self.compute.steps(),
            result: self.compute.result(),
            ..report
        }
        .write(&self.arguments.dir)
    }
}
