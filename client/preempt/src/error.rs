//! Reasons why a process tree cannot be suspended or shrunk.

use std::io;
use std::path::PathBuf;

use permafrost_criu::origin::OriginError;

use crate::cgroup::CgroupError;
use crate::record::RecordError;

/// Failure of suspending, resuming, shrinking or growing.
#[derive(Debug, thiserror::Error)]
pub enum PreemptError {
    /// The target cannot be read, or there is none.
    #[error(transparent)]
    Origin(#[from] OriginError),
    /// The control group has no process.
    #[error("no process is in {path}")]
    Empty {
        /// Path of the group.
        path: PathBuf,
    },
    /// The target contains this command, or an ancestor of it.
    #[error("{path} contains this command or an ancestor of it")]
    ContainsOneself {
        /// Path of the group.
        path: PathBuf,
    },
    /// A process of the target belongs to another user. Nothing was changed.
    #[error("process {pid} ({name}) is not yours to signal")]
    NotYours {
        /// Pid of the process.
        pid: u32,
        /// Command name of the process.
        name: String,
    },
    /// A process that could not be signalled.
    #[error("signal process {pid}: {source}")]
    Signal {
        /// Pid of the process.
        pid: u32,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Some processes neither stopped nor could be frozen in time. The others go on again.
    #[error(
        "{running} processes still ran {waited_s} s after the signal, process {pid} ({name}) among them"
    )]
    StillRunning {
        /// Number of processes that still run.
        running: usize,
        /// Pid of one of them.
        pid: u32,
        /// Command name of that one.
        name: String,
        /// Time since the first signal, seconds.
        waited_s: u64,
    },
    /// The tree has no memory group of its own, and the kernel does not move charged memory to another group.
    #[error("its memory is charged to {path}, which other processes share")]
    SharedGroup {
        /// Path of the shared group.
        path: PathBuf,
    },
    /// A control group could not be used.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The record of what is to be put back could not be used.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The user interrupted the command.
    #[error("interrupted")]
    Interrupted,
}

/// The first error of actions that are all tried.
#[derive(Debug, Default)]
pub(crate) struct Failures(Option<PreemptError>);

impl Failures {
    /// Keeps the error of an action, if it is the first.
    pub(crate) fn note<E: Into<PreemptError>>(&mut self, done: Result<(), E>) {
        if let Err(error) = done {
            self.0.get_or_insert_with(|| error.into());
        }
    }

    /// Returns the first error, if there was one.
    pub(crate) fn first(self) -> Result<(), PreemptError> {
        self.0.map_or(Ok(()), Err)
    }
}
