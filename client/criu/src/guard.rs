//! The guard of a dump: a process of its own that starts CRIU, waits for it, and ends a freeze that reaches its
//! limit.
//!
//! It depends neither on the daemon nor on the client: it is in a session of its own, holds CRIU's page socket,
//! and sends no requests. Its report to the client goes into a file, which the client reads after the guard has
//! ended:
//!
//! ```text
//! limit                    the rollback began because the limit was reached
//! ended STATUS MICROS      CRIU's wait status, and how long it ran
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::freeze::{FreezeLimit, Step, Steps};
use crate::origin::ProcessStat;
use crate::processes::{self, signal, tree};

/// Offset that shells which wrap CRIU add to a signal's number.
const SHELL_SIGNAL_BASE: i32 = 128;

/// Exit code for a CRIU that could not be started, as shells use it.
const NOT_STARTED: i32 = 127;

/// A dump to guard.
#[derive(Clone, Debug)]
pub struct Guarded {
    /// Root of the tree that CRIU freezes.
    pub pid: u32,
    /// Longest time for which the tree may be frozen.
    pub limit: FreezeLimit,
    /// True for a pre-dump: CRIU transfers pages while the tree runs, for as long as that takes.
    pub pre_dump: bool,
    /// Path of the report.
    pub report: PathBuf,
}

/// Report of a guard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Report {
    /// True if the freeze was ended because it reached its limit.
    pub(super) limit_reached: bool,
    /// CRIU's exit status and running time; `None` if the guard was ended before CRIU.
    pub(super) ended: Option<(ExitStatus, Duration)>,
}

impl Report {
    pub(super) fn read(path: &Path) -> Self {
        let mut report = Self::default();
        for line in fs::read_to_string(path).unwrap_or_default().lines() {
            let mut words = line.split(' ');
            match words.next() {
                Some("limit") => report.limit_reached = true,
                Some("ended") => {
                    let raw = words.next().and_then(|word| word.parse().ok());
                    let micros = words.next().and_then(|word| word.parse().ok());
                    report.ended = raw.zip(micros).map(|(raw, micros)| {
                        (ExitStatus::from_raw(raw), Duration::from_micros(micros))
                    });
                }
                _ => {}
            }
        }
        report
    }
}

/// An event that the guard reacts to.
enum Event {
    Ended(io::Result<ExitStatus>),
    Interrupted,
}

/// Starts `criu` and waits for it; at the limit, makes sure that the tree runs again. The page socket is the
/// standard input of this process and of CRIU. SIGTERM, SIGINT and SIGHUP begin the rollback; a second signal
/// ends the seal.
///
/// # Errors
/// The kernel refuses an operation that the guard needs, or the report could not be written.
pub fn guard(guarded: &Guarded, mut criu: Command) -> io::Result<ExitStatus> {
    // A signal to the client's process group or from its terminal must not end this process. The call is
    // refused to the leader of a group, which is then outside of the client's group already.
    let _ = rustix::process::setsid();
    // Children of a CRIU that dies come here, and do not go on alone.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let report = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(&guarded.report)?;
    let (events, received) = mpsc::channel();
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let interrupted = events.clone();
    thread::spawn(move || {
        for _ in signals.forever() {
            // The receiver is gone only at the very end.
            let _ = interrupted.send(Event::Interrupted);
        }
    });
    let mut freeze = Freeze {
        guarded,
        stopped_before: Vec::new(),
        pages: io::stdin().as_fd().try_clone_to_owned()?,
        report,
        criu: 0,
    };
    let started = Instant::now();
    let mut child = match criu.spawn() {
        Ok(child) => child,
        Err(error) => {
            // The client reads this message in the place of CRIU's own.
            eprintln!("Error: start CRIU: {error}");
            writeln!(freeze.report, "ended {} 0", NOT_STARTED << 8)?;
            return Ok(ExitStatus::from_raw(NOT_STARTED << 8));
        }
    };
    freeze.criu = child.id();
    // While CRIU gets ready: it has not begun to freeze.
    freeze.stopped_before = stopped(&tree(guarded.pid));
    thread::spawn(move || {
        let _ = events.send(Event::Ended(child.wait()));
    });
    let status = freeze.watch(started, &received)?;
    if was_killed(status) {
        freeze.end_orphans();
    }
    let micros = started.elapsed().as_micros();
    writeln!(freeze.report, "ended {} {micros}", status.into_raw())?;
    Ok(status)
}

/// Returns true if a signal ended CRIU, or the command by which a shell started it.
fn was_killed(status: ExitStatus) -> bool {
    let by_shell = |code: i32| (SHELL_SIGNAL_BASE + 1..=SHELL_SIGNAL_BASE + 31).contains(&code);
    status.signal().is_some() || status.code().is_some_and(by_shell)
}

/// A freeze under way.
struct Freeze<'a> {
    guarded: &'a Guarded,
    /// Tasks that were stopped by others before the dump.
    stopped_before: Vec<u32>,
    pages: OwnedFd,
    report: File,
    /// Pid of CRIU, or of the script that starts it.
    criu: u32,
}

impl Freeze<'_> {
    /// Waits for CRIU's end, and takes the steps that are due meanwhile.
    fn watch(
        &mut self,
        started: Instant,
        received: &mpsc::Receiver<Event>,
    ) -> io::Result<ExitStatus> {
        let mut steps = Steps::new(self.guarded.limit);
        // A pre-dump that has let its tasks go may take its time.
        let mut limited = true;
        loop {
            let event = if limited {
                received.recv_timeout(steps.wait(started.elapsed()))
            } else {
                received
                    .recv()
                    .map_err(|mpsc::RecvError| RecvTimeoutError::Disconnected)
            };
            let step = match event {
                Ok(Event::Ended(status)) => return status,
                Ok(Event::Interrupted) => {
                    limited = true;
                    steps.interrupt(started.elapsed())
                }
                Err(RecvTimeoutError::Disconnected) => return Err(io::ErrorKind::BrokenPipe.into()),
                Err(RecvTimeoutError::Timeout) if self.guarded.pre_dump && !self.is_frozen() => {
                    limited = false;
                    None
                }
                Err(RecvTimeoutError::Timeout) => {
                    let step = steps.due(started.elapsed());
                    if step == Some(Step::RollBack) {
                        // Said if it can be, done in any case.
                        let _ = writeln!(self.report, "limit");
                    }
                    step
                }
            };
            match step {
                Some(Step::RollBack) => self.roll_back(),
                Some(Step::EndChildren) => self.end_children(),
                Some(Step::EndCriu) => self.end_criu(),
                None => {}
            }
        }
    }

    /// Ends the conversation with the page server, whatever the daemon does: CRIU fails and rolls back. The
    /// action script keeps the same time limit by itself. Stopped processes are continued, so that they notice.
    fn roll_back(&self) {
        if let Ok(pages) = self.pages.try_clone() {
            // Not connected is the only failure here: the daemon is gone, and CRIU has noticed.
            let _ = UnixStream::from(pages).shutdown(Shutdown::Both);
        }
        for pid in self.of_criu() {
            signal(pid, Signal::CONT);
        }
    }

    /// Ends the processes that CRIU waits for, above all the action script: CRIU takes that for a failure.
    fn end_children(&self) {
        // Without a tracer nothing is frozen, and it is unknown which descendant is CRIU.
        let Some(tracer) = self.tracer() else { return };
        let ours = self.of_criu();
        if ours.contains(&tracer) {
            for pid in processes::descendants(tracer) {
                if ours.contains(&pid) {
                    signal(pid, Signal::KILL);
                }
            }
        }
    }

    /// Ends CRIU. When a tracer dies, the kernel lets its tasks go, and the parasite in a task ends when its
    /// socket closes.
    fn end_criu(&self) {
        for pid in self.of_criu() {
            signal(pid, Signal::KILL);
        }
        for pid in stopped(&tree(self.guarded.pid)) {
            if !self.stopped_before.contains(&pid) {
                signal(pid, Signal::CONT);
            }
        }
    }

    /// Ends the children that a killed CRIU has left: an action script would seal a dump that is rolled back.
    fn end_orphans(&self) {
        let frozen = tree(self.guarded.pid);
        for pid in processes::descendants(std::process::id()) {
            if !frozen.contains(&pid) {
                signal(pid, Signal::KILL);
            }
        }
    }

    /// Returns CRIU and its descendants, without the frozen tree.
    fn of_criu(&self) -> Vec<u32> {
        let frozen = tree(self.guarded.pid);
        let mut ours = processes::descendants(self.criu);
        ours.push(self.criu);
        ours.retain(|pid| !frozen.contains(pid));
        ours
    }

    /// Returns the process that traces the root.
    fn tracer(&self) -> Option<u32> {
        let path = format!("/proc/{}/status", self.guarded.pid);
        let status = fs::read_to_string(path).ok()?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("TracerPid:"))?;
        line.trim().parse().ok().filter(|pid| *pid != 0)
    }

    fn is_frozen(&self) -> bool {
        self.tracer().is_some()
    }
}

/// Returns those of `pids` that a signal has stopped.
fn stopped(pids: &[u32]) -> Vec<u32> {
    let is_stopped = |pid: &u32| matches!(ProcessStat::read(*pid), Ok(stat) if stat.state == 'T');
    pids.iter().copied().filter(is_stopped).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_as_far_as_it_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("report");
        assert_eq!(Report::read(&path), Report::default());
        fs::write(&path, "limit\n").unwrap();
        let report = Report::read(&path);
        assert!(report.limit_reached && report.ended.is_none());
        fs::write(&path, "limit\nended 9 1500\n").unwrap();
        let (status, elapsed) = Report::read(&path).ended.unwrap();
        assert_eq!(status.signal(), Some(9));
        assert_eq!(elapsed, Duration::from_micros(1500));
        fs::write(&path, "ended 256 7\n").unwrap();
        let report = Report::read(&path);
        assert!(!report.limit_reached);
        assert_eq!(report.ended.unwrap().0.code(), Some(1));
    }

    #[test]
    fn a_signal_is_seen_through_a_shell() {
        assert!(was_killed(ExitStatus::from_raw(9)));
        assert!(was_killed(ExitStatus::from_raw(137 << 8)));
        for code in [0, 1, 128, 255] {
            assert!(!was_killed(ExitStatus::from_raw(code << 8)), "{code}");
        }
    }
}
