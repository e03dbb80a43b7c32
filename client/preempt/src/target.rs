//! The processes that are to be suspended or shrunk: a tree, or a control group.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::PathBuf;

use permafrost_criu::handles::ProcessHandle;
use permafrost_criu::origin::{OriginError, ProcessStat};
use permafrost_criu::processes;
use rustix::io::Errno;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use crate::cgroup::{CgroupError, Group, Version};
use crate::error::PreemptError;

/// Processes that are preempted together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Target {
    /// A process and its descendants.
    Tree {
        /// Pid of the root.
        pid: u32,
        /// Start time of the root, clock ticks since boot: distinguishes a reused pid.
        start_ticks: u64,
    },
    /// The members of a control group and of those below it.
    Group {
        /// Directory of the group.
        path: PathBuf,
        /// True if it is of version 2.
        version_2: bool,
    },
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tree { pid, .. } => write!(formatter, "process {pid}"),
            Self::Group { path, .. } => write!(formatter, "{}", path.display()),
        }
    }
}

/// A process, distinguished from a later one with its pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) start_ticks: u64,
}

impl Target {
    /// Returns the tree of a process.
    ///
    /// # Errors
    /// There is no such process; it is a zombie, a kernel thread, this command or an ancestor of it.
    pub fn tree(pid: u32) -> Result<Self, PreemptError> {
        let origin = permafrost_criu::origin::collect(pid)?;
        Ok(Self::Tree {
            pid,
            start_ticks: origin.start_ticks,
        })
    }

    /// Returns the members of a control group.
    #[must_use]
    pub fn group(group: &Group) -> Self {
        Self::Group {
            path: group.path.clone(),
            version_2: group.version == Version::V2,
        }
    }

    pub(crate) fn as_group(&self) -> Option<Group> {
        match self {
            Self::Tree { .. } => None,
            Self::Group { path, version_2 } => Some(Group {
                version: if *version_2 { Version::V2 } else { Version::V1 },
                path: path.clone(),
                is_root: false,
            }),
        }
    }

    /// Returns the living processes of the target, parents before their children; those that started while they were
    /// read may be missing. `known` are members that were seen before: they, and their descendants, stay members when
    /// their parents end.
    pub(crate) fn members(&self, known: &[Process]) -> Result<Vec<Process>, PreemptError> {
        let mut found: BTreeMap<u32, u64> = BTreeMap::new();
        let mut ordered = Vec::new();
        let mut add = |pid: u32, of: Option<u64>| {
            if found.contains_key(&pid) {
                return false;
            }
            match ProcessStat::read(pid) {
                Ok(stat)
                    if !matches!(stat.state, 'Z' | 'X')
                        && of.is_none_or(|start| start == stat.start_ticks) =>
                {
                    found.insert(pid, stat.start_ticks);
                    ordered.push(Process {
                        pid,
                        start_ticks: stat.start_ticks,
                    });
                    true
                }
                _ => false,
            }
        };
        match self {
            Self::Tree { pid, start_ticks } => {
                if add(*pid, Some(*start_ticks)) {
                    processes::descendants(*pid)
                        .into_iter()
                        .for_each(|pid| _ = add(pid, None));
                }
                for process in known {
                    if add(process.pid, Some(process.start_ticks)) {
                        let below = processes::descendants(process.pid);
                        below.into_iter().for_each(|pid| _ = add(pid, None));
                    }
                }
            }
            Self::Group { path, .. } => {
                let group = self.as_group();
                match group.map(|group| group.members()).transpose() {
                    Ok(pids) => pids
                        .into_iter()
                        .flatten()
                        .for_each(|pid| _ = add(pid, None)),
                    // The group was removed: its processes have ended.
                    Err(CgroupError::Io { .. }) if !path.is_dir() => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(ordered)
    }

    /// Refuses members that contain this command or an ancestor of it, or belong to another user. An ancestor, too: a
    /// shell that stands still can neither be interrupted nor resume anything.
    pub(crate) fn check(&self, members: &[Process]) -> Result<(), PreemptError> {
        let own = own_line();
        if members.iter().any(|member| own.contains(&member.pid)) {
            return Err(match self {
                Self::Tree { pid, .. } => OriginError::Oneself { pid: *pid }.into(),
                Self::Group { path, .. } => PreemptError::ContainsOneself { path: path.clone() },
            });
        }
        for member in members {
            let pid = i32::try_from(member.pid).ok().and_then(Pid::from_raw);
            let refused = pid.map(rustix::process::test_kill_process);
            if refused == Some(Err(Errno::PERM)) {
                return Err(PreemptError::NotYours {
                    pid: member.pid,
                    name: member.name(),
                });
            }
        }
        Ok(())
    }
}

/// Returns the pids of this command and of its ancestors.
fn own_line() -> Vec<u32> {
    let mut line = Vec::new();
    let mut next = std::process::id();
    // The first process of a pid namespace has the parent 0.
    while next > 0 && !line.contains(&next) {
        line.push(next);
        next = ProcessStat::read(next).map_or(0, |stat| stat.parent);
    }
    line
}

/// State of a process, of all its threads together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessState {
    /// Some thread may run.
    Running,
    /// Every thread is stopped by a signal.
    Stopped,
    /// The process has ended.
    Ended,
}

impl Process {
    /// Reads the state of all threads: on a busy machine they run on for a while after the signal.
    pub(crate) fn state(self) -> ProcessState {
        match ProcessStat::read(self.pid) {
            Ok(stat) if stat.start_ticks == self.start_ticks && stat.state != 'X' => {}
            _ => return ProcessState::Ended,
        }
        let Ok(threads) = fs::read_dir(format!("/proc/{}/task", self.pid)) else {
            return ProcessState::Ended;
        };
        let mut stopped = false;
        for thread in threads.flatten() {
            let Ok(line) = fs::read(thread.path().join("stat")) else {
                continue;
            };
            let line = String::from_utf8_lossy(&line);
            let state = line
                .rsplit_once(") ")
                .and_then(|(_, rest)| rest.chars().next());
            match state {
                Some('T' | 't') => stopped = true,
                Some('Z' | 'X') | None => {}
                Some(_) => return ProcessState::Running,
            }
        }
        match stopped {
            true => ProcessState::Stopped,
            false => ProcessState::Ended,
        }
    }

    /// Opens the process; `None` if it has ended.
    pub(crate) fn open(self) -> Option<ProcessHandle> {
        let handle = ProcessHandle::open(self.pid).ok()?;
        // The pid may have passed to another process before it was opened.
        let stat = ProcessStat::read(self.pid).ok()?;
        (stat.start_ticks == self.start_ticks).then_some(handle)
    }

    /// Returns the command name; empty if it has ended.
    pub(crate) fn name(self) -> String {
        ProcessStat::read(self.pid).map_or_else(|_| String::new(), |stat| stat.name)
    }
}
