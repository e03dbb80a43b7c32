//! The task: the process that COMMAND became, and its descendants.

use std::ffi::OsString;
use std::fs;
use std::process::{Command, Stdio};

use permafrost_criu::origin::ProcessStat;
use permafrost_criu::processes;
use permafrost_terminal::failure::{Code, Failure};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};

use super::inside;
use super::streams::Streams;

/// A task, which is a child of this process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    pid: Pid,
}

/// End of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Exited(u8),
    Signalled(i32),
}

impl End {
    /// Returns the exit code that a shell reports.
    pub(super) fn code(self) -> u8 {
        match self {
            Self::Exited(code) => code,
            Self::Signalled(signal) => code_of_signal(signal),
        }
    }
}

/// Returns the exit code by which shells report a signal.
pub(super) fn code_of_signal(signal: i32) -> u8 {
    u8::try_from(signal.saturating_add(128)).unwrap_or(u8::MAX)
}

impl Task {
    /// Starts COMMAND in a session of its own: CRIU dumps no tree whose session is led from outside.
    pub(super) fn start(command: &[OsString], streams: Streams) -> Result<Self, Failure> {
        // The child is not the leader of a process group, so that setsid(1) becomes COMMAND without a fork.
        let child = Command::new("setsid")
            .args(command)
            .env_remove(inside::VARIABLE)
            .stdin(Stdio::null())
            .stdout(streams.output)
            .stderr(streams.error)
            .spawn()
            .map_err(|error| {
                Failure::new(Code::Internal, format!("start setsid: {error}"))
                    .hint("it is in the package util-linux")
            })?;
        Self::of(child.id())
    }

    /// Returns the task for a process that was restored as a child of this one.
    pub(super) fn of(pid: u32) -> Result<Self, Failure> {
        i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .map(|pid| Self { pid })
            .ok_or_else(|| Failure::new(Code::Internal, format!("{pid} is no pid")))
    }

    pub(super) fn pid(self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Returns true if the task has not ended.
    pub(super) fn is_running(self) -> bool {
        matches!(ProcessStat::read(self.pid()), Ok(stat) if stat.state != 'Z')
    }

    /// Returns the end of the task, if it has ended. Returned only once.
    pub(super) fn ended(self) -> Result<Option<End>, Failure> {
        let waited = rustix::process::waitpid(Some(self.pid), WaitOptions::NOHANG);
        match waited {
            Ok(None) | Err(rustix::io::Errno::INTR) => Ok(None),
            Ok(Some((_, status))) => Ok(end_of(status)),
            Err(error) => Err(Failure::new(
                Code::Internal,
                format!("wait for process {}: {error}", self.pid()),
            )),
        }
    }

    /// Returns the task and all its descendants, as far as they have not left the tree.
    fn tree(self) -> Vec<u32> {
        processes::tree(self.pid())
    }

    /// Returns the memory that a dump of the task takes, bytes, as far as `/proc` shows it.
    pub(super) fn resident_bytes(self) -> u64 {
        processes::usage(&self.tree()).map_or(0, |usage| usage.resident_bytes)
    }

    /// Passes a signal on to the root of the task.
    pub(super) fn signal(self, number: i32) {
        if let Some(signal) = Signal::from_named_raw(number) {
            // The process may have just ended.
            let _ = rustix::process::kill_process(self.pid, signal);
        }
    }

    /// Signals all processes of the task to end, as Slurm does: SIGCONT, SIGTERM.
    pub(super) fn end(self) {
        for signal in [Signal::CONT, Signal::TERM] {
            for pid in self.tree() {
                if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                    let _ = rustix::process::kill_process(pid, signal);
                }
            }
        }
    }

    /// Returns the processes of the job that are no longer the task's descendants, because their parent has
    /// ended: no dump of the tree contains them.
    pub(super) fn strays(self) -> Vec<u32> {
        children_of_ours()
            .filter(|(pid, stat)| *pid != self.pid() && stat.state != 'Z')
            .map(|(pid, _)| pid)
            .collect()
    }

    /// Reaps those of them that have ended, as process 1 has to.
    pub(super) fn reap_strays(self) {
        for (pid, stat) in children_of_ours() {
            let Some(process) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
                continue;
            };
            if process != self.pid && stat.state == 'Z' {
                let _ = rustix::process::waitpid(Some(process), WaitOptions::NOHANG);
            }
        }
    }
}

fn end_of(status: WaitStatus) -> Option<End> {
    if let Some(code) = status.exit_status() {
        return Some(End::Exited(u8::try_from(code & 0xff).unwrap_or(u8::MAX)));
    }
    status.terminating_signal().map(End::Signalled)
}

fn children_of_ours() -> impl Iterator<Item = (u32, ProcessStat)> {
    let own = std::process::id();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| Some((pid, ProcessStat::read(pid).ok()?)))
        .filter(move |(_, stat)| stat.parent == own)
}
