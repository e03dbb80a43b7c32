//! Controls a workload process from the benchmark.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use permafrost_terminal::descriptors::without_inherited;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::interrupt::Interrupts;
use rustix::process::Signal;

use super::workload::{Contents, REPORT, Report};
use super::{child, machine};

/// Interval at which a report is polled.
const POLL: Duration = Duration::from_millis(2);

/// Work of a task.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub(super) size_bytes: u64,
    pub(super) contents: Contents,
    pub(super) seed: u64,
    /// Number of steps to compute, after which the task ends.
    pub(super) steps: Option<u64>,
    /// Time for which the task computes before it ends.
    pub(super) calibrate: Option<Duration>,
}

impl Work {
    /// Returns the work of a task that only holds memory.
    pub(super) fn idle(size_bytes: u64, contents: Contents, seed: u64) -> Self {
        Self {
            size_bytes,
            contents,
            seed,
            steps: None,
            calibrate: None,
        }
    }
}

/// A workload that runs, or was dumped; killed when dropped, also if it was restored in between.
#[derive(Debug)]
pub(super) struct Task {
    dir: PathBuf,
    child: Child,
    limit: Duration,
}

impl Task {
    /// Starts a task, without waiting for its memory to be filled. `dir` is the task's own directory.
    pub(super) fn start(dir: &Path, work: &Work) -> Result<Self, Failure> {
        fs::create_dir_all(dir).map_err(|error| Failure::io("create", dir, &error))?;
        // A restored process is reparented to this process, and not to init: a dead one holds its pid until
        // its parent waits for it.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .map_err(|errno| Failure::new(Code::Internal, format!("adopt orphans: {errno}")))?;
        remove(&dir.join(REPORT))?;
        let program = child::own_program()?;
        let mut command = without_inherited(program);
        let contents = match work.contents {
            Contents::Random => "random",
            Contents::Heap => "heap",
        };
        command
            .args(["bench", "workload", "--contents", contents, "--dir"])
            .arg(dir)
            .args(["--size-bytes", &work.size_bytes.to_string()])
            .args(["--seed", &work.seed.to_string()])
            .args(["--guardian", &std::process::id().to_string()]);
        if let Some(steps) = work.steps {
            command.args(["--steps", &steps.to_string()]);
        }
        if let Some(limit) = work.calibrate {
            command.args(["--calibrate-ms", &limit.as_millis().to_string()]);
        }
        let child = command
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| Failure::new(Code::Internal, format!("start a workload: {error}")))?;
        Ok(Self {
            dir: dir.to_owned(),
            child,
            // A page takes microseconds; a machine that swaps takes long.
            limit: Duration::from_secs(60 + (work.size_bytes >> 23)),
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a report; the first comes when the memory is filled.
    pub(super) fn await_report(&mut self, interrupts: &Interrupts) -> Result<Report, Failure> {
        let start = Instant::now();
        loop {
            if let Some(report) = self.report()? {
                return Ok(report);
            }
            interrupts.check()?;
            if !self.is_there() {
                // The last report of the task.
                return self.report()?.ok_or_else(|| {
                    Failure::new(Code::Internal, format!("workload {} has ended", self.pid()))
                });
            }
            if start.elapsed() > self.limit {
                let seconds = self.limit.as_secs();
                return Err(Failure::new(
                    Code::Internal,
                    format!("workload {} did not report within {seconds} s", self.pid()),
                ));
            }
            thread::sleep(POLL);
        }
    }

    /// Returns the current report, if there is one.
    fn report(&self) -> Result<Option<Report>, Failure> {
        let path = self.dir.join(REPORT);
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            bytes => bytes.map_err(|error| Failure::io("read", &path, &error))?,
        };
        let report: Report = serde_json::from_slice(&bytes)
            .map_err(|error| Failure::new(Code::Internal, format!("read a report: {error}")))?;
        match report.error {
            Some(error) => Err(Failure::new(Code::Internal, format!("workload: {error}"))),
            None => Ok(Some(report)),
        }
    }

    /// Waits until the task's computation is done; `None` if the task ended before.
    pub(super) fn await_end(&mut self, interrupts: &Interrupts) -> Result<Option<Report>, Failure> {
        loop {
            let there = self.is_there();
            if let Some(report) = self.report()?
                && report.finished
            {
                return Ok(Some(report));
            }
            if !there {
                return Ok(None);
            }
            interrupts.check()?;
            thread::sleep(POLL);
        }
    }

    fn ask(&mut self, signal: Signal, interrupts: &Interrupts) -> Result<Report, Failure> {
        // The old report goes first: a restored workload knows nothing of those made after its dump.
        remove(&self.dir.join(REPORT))?;
        machine::signal(self.pid(), signal);
        self.await_report(interrupts)
    }

    /// Makes the task rewrite `percent` of its pages.
    pub(super) fn dirty(&mut self, percent: u64, interrupts: &Interrupts) -> Result<(), Failure> {
        let path = self.dir.join("percent");
        fs::write(&path, percent.to_string())
            .map_err(|error| Failure::io("write", &path, &error))?;
        self.ask(Signal::USR1, interrupts).map(drop)
    }

    /// Makes the task check its memory.
    pub(super) fn check(&mut self, interrupts: &Interrupts) -> Result<(), Failure> {
        let report = self.ask(Signal::USR2, interrupts)?;
        if report.checked && report.bad_pages == 0 {
            return Ok(());
        }
        Err(Failure::new(
            Code::Corrupt,
            format!(
                "{} of {} pages of the restored process are not what they were",
                report.bad_pages, report.pages
            ),
        )
        .hint("this is an error of Permafrost's or of CRIU's: keep the log and report it"))
    }

    /// Returns true if the task exists; reaps it if it has ended.
    fn is_there(&mut self) -> bool {
        // The first is our child by birth, restored ones by adoption.
        let _ = self.child.try_wait();
        machine::reap(self.pid());
        machine::is_own_child(self.pid())
    }

    /// Waits until the task's pid is free, as after a dump.
    pub(super) fn await_gone(&mut self) -> Result<(), Failure> {
        let start = Instant::now();
        while self.is_there() {
            if start.elapsed() > Duration::from_secs(20) {
                let pid = self.pid();
                return Err(Failure::new(
                    Code::Internal,
                    format!("process {pid} is still there after its dump"),
                ));
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Kills the task and waits for its end.
    pub(super) fn kill(&mut self) {
        if self.is_there() {
            machine::signal(self.pid(), Signal::KILL);
            let _ = self.await_gone();
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.kill();
    }
}

fn remove(path: &Path) -> Result<(), Failure> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Failure::io("remove", path, &error))
        }
        _ => Ok(()),
    }
}
