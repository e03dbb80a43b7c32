//! Suspension in memory (paper 001, §III): SIGTSTP to every process, the freezer for those that do not stop, and back.
//!
//! SIGTSTP and not SIGSTOP, so that handlers run: they may close connections, or keep the process from stopping for a
//! while. The kernel ignores SIGTSTP in a process group that is orphaned (no member has a parent in another group of the
//! same session; `get_signal` in kernel/signal.c). That is so of most processes that a scheduler starts, so the freezer
//! is no exception: it takes every process that still runs after the grace time.
//!
//! ```text
//!   read members ─▶ record, then SIGTSTP ─▶ all stopped? ── twice in a row ──▶ suspended
//!        ▲                                   │ no: after the grace time of each
//!        └───────────────────────────────────┴─▶ record, then freeze its group, or one that is made for it
//! ```
//!
//! The members are read again until two readings find nothing new and nothing that runs. A running member may fork, a
//! stopped or frozen one cannot, so what is suspended then stays complete.

use std::collections::HashMap;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::Serialize;

use crate::Interrupted;
use crate::cgroup::{self, CgroupError, Controller, Freezing, Group, Hierarchies, Version};
use crate::error::{Failures, PreemptError};
use crate::record::{Entry, Record, RecordKind, Records};
use crate::target::{Process, ProcessState, Target};

/// Interval at which the members are read.
const TICK: Duration = Duration::from_millis(5);

/// Time beyond the grace time after which processes that neither stop nor freeze are given up: a frozen group waits for
/// those in the kernel, for a disk for example.
const PATIENCE: Duration = Duration::from_secs(30);

/// Time for which resumed processes are watched: a handler of SIGTSTP that was frozen may stop its process only now.
const SETTLE: Duration = Duration::from_millis(100);

/// Time for which those that were frozen are watched.
const SETTLE_FROZEN: Duration = Duration::from_secs(1);

/// Options of a suspension.
#[derive(Clone, Copy, Debug)]
pub struct SuspendOptions {
    /// Time that each process is given to stop after SIGTSTP. Default 5 s: 001 names none; handlers that close
    /// connections take less, and whoever ignores the signal delays the preempting task by as much.
    pub grace: Duration,
    /// True to freeze at once, without a signal: handlers do not run. Default false.
    pub freeze_at_once: bool,
}

impl Default for SuspendOptions {
    fn default() -> Self {
        Self {
            grace: Duration::from_secs(5),
            freeze_at_once: false,
        }
    }
}

/// The way by which a process is kept from running.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HeldBy {
    /// It stopped on SIGTSTP.
    Stopped,
    /// It was stopped before, and stays so on resumption.
    StoppedBefore,
    /// Its control group is frozen.
    Frozen,
    /// It ran on after SIGTSTP, its group could not be frozen, and it got SIGSTOP.
    StoppedHard,
}

/// A process that was suspended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SuspendedProcess {
    /// Pid of the process.
    pub pid: u32,
    /// Command name of the process.
    pub name: String,
    /// The way by which it is kept from running.
    pub held: HeldBy,
}

/// Result of a suspension.
#[derive(Clone, Debug)]
pub enum SuspendOutcome {
    /// No process of the target runs.
    Suspended {
        /// Its processes, parents before their children.
        processes: Vec<SuspendedProcess>,
        /// Reason why a group could not be frozen, if one could not.
        freezer_error: Option<String>,
        /// Time from the first reading to the last.
        elapsed: Duration,
    },
    /// All its processes ended meanwhile.
    Ended,
}

/// Result of a resumption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumeOutcome {
    /// Processes go on.
    Resumed {
        /// Number of processes that were continued or thawed.
        processes: usize,
    },
    /// The processes ended while they were suspended; only the record was left.
    Ended,
    /// There is no record of the target: it was not suspended by this user, or was resumed already.
    NotSuspended,
}

/// Suspends a target. One that is suspended already is completed: processes that run in spite of it are stopped.
///
/// # Errors
/// [`PreemptError`]. What was done is undone, unless that fails as well, or the target was suspended before: then it
/// stays as it is, and its record too, by which [`resume`] undoes all of it.
pub fn suspend(
    hierarchies: &Hierarchies,
    records: &Records,
    target: &Target,
    options: SuspendOptions,
    interrupted: Interrupted<'_>,
) -> Result<SuspendOutcome, PreemptError> {
    let members = target.members(&[])?;
    target.check(&members)?;
    let record = records.open(RecordKind::Suspended, target)?;
    let was_suspended = record.processes().next().is_some();
    let frozen = record
        .frozen()
        .filter(|group| group.path.is_dir())
        .collect();
    let mut suspension = Suspending {
        hierarchies,
        target,
        options,
        record,
        signalled: HashMap::new(),
        frozen,
        stopped_hard: Vec::new(),
        freezer_error: None,
    };
    match suspension.run(interrupted) {
        Ok(SuspendOutcome::Ended) => {
            put_back(suspension.record)?;
            Ok(SuspendOutcome::Ended)
        }
        Ok(outcome) => Ok(outcome),
        // An earlier command suspended it: a repetition that fails does not let it run.
        Err(error) if was_suspended => Err(error),
        Err(error) => {
            if let Err(also) = put_back(suspension.record) {
                tracing::warn!(event = "suspension-not-undone", %also, processes = %target, "a suspension that failed could not be undone");
            }
            Err(error)
        }
    }
}

/// A suspension under way.
struct Suspending<'a> {
    hierarchies: &'a Hierarchies,
    target: &'a Target,
    options: SuspendOptions,
    record: Record,
    /// Time at which each process was signalled, by this command.
    signalled: HashMap<Process, Instant>,
    /// Groups that are frozen.
    frozen: Vec<Group>,
    /// Processes that got SIGSTOP.
    stopped_hard: Vec<Process>,
    freezer_error: Option<CgroupError>,
}

impl Suspending<'_> {
    fn run(&mut self, interrupted: Interrupted<'_>) -> Result<SuspendOutcome, PreemptError> {
        let started = Instant::now();
        let mut calm = false;
        loop {
            if interrupted() {
                return Err(PreemptError::Interrupted);
            }
            let known: Vec<Process> = self
                .record
                .processes()
                .map(|(process, _)| process)
                .collect();
            let members = self.target.members(&known)?;
            if members.is_empty() {
                return Ok(SuspendOutcome::Ended);
            }
            self.target.check(&members)?;
            let held = self.frozen_members()?;
            let is_new = self.signal(&members, &known, &held)?;
            let running: Vec<Process> = (members.iter().copied())
                .filter(|process| !held.contains(&process.pid))
                .filter(|process| process.state() == ProcessState::Running)
                .collect();
            if !is_new && running.is_empty() {
                if calm {
                    return Ok(self.report(&members, &held, started));
                }
                calm = true;
                continue;
            }
            calm = false;
            for process in &running {
                let since = self.signalled.get(process).map(Instant::elapsed);
                if self.options.freeze_at_once
                    || since.is_some_and(|since| since >= self.options.grace)
                {
                    self.freeze(*process, &members)?;
                }
            }
            if started.elapsed() > self.options.grace + PATIENCE
                && let Some(one) = running.first()
            {
                return Err(PreemptError::StillRunning {
                    running: running.len(),
                    pid: one.pid,
                    name: one.name(),
                    waited_s: started.elapsed().as_secs(),
                });
            }
            thread::sleep(TICK);
        }
    }

    /// Records members that were not seen before, and signals those that this command has not signalled. Returns true if
    /// there was one.
    fn signal(
        &mut self,
        members: &[Process],
        known: &[Process],
        held: &[u32],
    ) -> Result<bool, PreemptError> {
        let fresh = |process: &&Process| !self.signalled.contains_key(*process);
        let fresh: Vec<Process> = members.iter().filter(fresh).copied().collect();
        // Later members were started during the suspension: whatever has stopped them, resumption has to continue them.
        let is_first = known.is_empty();
        for &process in &fresh {
            if !known.contains(&process) {
                let was_stopped = is_first && process.state() == ProcessState::Stopped;
                self.record.push(Entry::Process {
                    process,
                    was_stopped,
                })?;
            }
        }
        for &process in &fresh {
            self.signalled.insert(process, Instant::now());
            let runs = !held.contains(&process.pid) && process.state() == ProcessState::Running;
            if runs
                && !self.options.freeze_at_once
                && let Some(handle) = process.open()
            {
                handle
                    .signal(Signal::TSTP)
                    .map_err(|source| PreemptError::Signal {
                        pid: process.pid,
                        source,
                    })?;
            }
        }
        Ok(!fresh.is_empty())
    }

    /// Returns the processes whose groups are frozen entirely.
    fn frozen_members(&self) -> Result<Vec<u32>, PreemptError> {
        let mut held = Vec::new();
        for group in &self.frozen {
            if group.freezing()? == Freezing::Frozen {
                held.extend(group.members()?);
            }
        }
        Ok(held)
    }

    /// Freezes the group of a process, or stops the process where that is not possible.
    fn freeze(&mut self, process: Process, members: &[Process]) -> Result<(), PreemptError> {
        if self.freezer_error.is_none() {
            match self.freeze_group(process, members) {
                Ok(()) => return Ok(()),
                Err(PreemptError::Cgroup(error)) => {
                    // The process may have ended, and its files with it.
                    if process.state() == ProcessState::Ended {
                        return Ok(());
                    }
                    self.freezer_error = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        if !self.stopped_hard.contains(&process) {
            self.stopped_hard.push(process);
        }
        // Again if somebody continued it.
        match process.open().map(|handle| handle.signal(Signal::STOP)) {
            Some(Err(source)) => Err(PreemptError::Signal {
                pid: process.pid,
                source,
            }),
            _ => Ok(()),
        }
    }

    fn freeze_group(&mut self, process: Process, members: &[Process]) -> Result<(), PreemptError> {
        let pids: Vec<u32> = members.iter().map(|member| member.pid).collect();
        let has_freezer = |group: &Group| {
            group.version == Version::V2 || group.path.join("freezer.state").exists()
        };
        let whole = self.target.as_group().filter(has_freezer);
        let is_whole = whole.is_some();
        let own = match whole {
            Some(group) => group,
            None => self
                .hierarchies
                .group_of(Controller::Freezer, process.pid)?,
        };
        if let Some(frozen) = self.frozen.iter().find(|group| **group == own) {
            return Ok(frozen.set_frozen(true)?);
        }
        let group = if is_whole || own.is_exclusive_to(&pids)? {
            own
        } else {
            // Beside it in the same group, so that whoever freezes or limits that one still does so to the process.
            let name = match self.target {
                Target::Tree { pid, start_ticks } => format!("suspended-{pid}-{start_ticks}"),
                Target::Group { .. } => format!("suspended-{}", process.pid),
            };
            let made = own.child(&name);
            self.record.push(Entry::Made {
                path: made.path.clone(),
            })?;
            made.make()?;
            made.add(process.pid)?;
            made
        };
        if !self.frozen.contains(&group) {
            // A group that others have frozen stays frozen on resumption; below one that is, it is thawed.
            if !group.is_frozen_itself()? {
                self.record.push(Entry::Frozen {
                    path: group.path.clone(),
                    version_2: group.version == Version::V2,
                })?;
            }
            self.frozen.push(group.clone());
        }
        Ok(group.set_frozen(true)?)
    }

    fn report(&self, members: &[Process], frozen: &[u32], started: Instant) -> SuspendOutcome {
        let held = |process: &Process| {
            let was_stopped = |(one, was_stopped)| one == *process && was_stopped;
            if self.record.processes().any(was_stopped) {
                HeldBy::StoppedBefore
            } else if frozen.contains(&process.pid) {
                HeldBy::Frozen
            } else if self.stopped_hard.contains(process) {
                HeldBy::StoppedHard
            } else {
                HeldBy::Stopped
            }
        };
        let processes = members.iter().map(|process| SuspendedProcess {
            pid: process.pid,
            name: process.name(),
            held: held(process),
        });
        SuspendOutcome::Suspended {
            processes: processes.collect(),
            freezer_error: self.freezer_error.as_ref().map(ToString::to_string),
            elapsed: started.elapsed(),
        }
    }
}

/// Resumes a target: thaws what was frozen, continues what was stopped, and removes the groups that were made. Processes
/// that were stopped before the suspension stay stopped. Repeating it does nothing.
///
/// # Errors
/// [`PreemptError`]; the record stays, so that it can be repeated.
pub fn resume(records: &Records, target: &Target) -> Result<ResumeOutcome, PreemptError> {
    match records.find(RecordKind::Suspended, target)? {
        None => Ok(ResumeOutcome::NotSuspended),
        Some(record) => put_back(record),
    }
}

/// Puts back what a record says, and removes it. What fails does not keep the rest from being put back; the first
/// error is returned then, and the record stays.
fn put_back(record: Record) -> Result<ResumeOutcome, PreemptError> {
    let mut failures = Failures::default();
    // Children first: a parent that watches its children does not find them stopped.
    let left: Vec<(Process, bool)> = (record.processes().rev())
        .filter(|(process, _)| process.state() != ProcessState::Ended)
        .collect();
    let suspended = left.iter().filter(|(_, was_stopped)| !was_stopped);
    let suspended: Vec<Process> = suspended.map(|(process, _)| *process).collect();
    // Before it is thawed: SIGCONT withdraws a SIGTSTP that was not delivered yet.
    go_on(&suspended, &mut failures);
    let frozen: Vec<Group> = record.frozen().collect();
    for group in frozen.iter().rev() {
        match group.set_frozen(false) {
            Err(_) if !group.path.is_dir() => {}
            thawed => failures.note(thawed),
        }
    }
    for path in record.made() {
        failures.note(cgroup::dissolve(path));
    }
    let watch = match frozen.is_empty() {
        true => SETTLE,
        false => SETTLE_FROZEN,
    };
    let started = Instant::now();
    while !suspended.is_empty() && started.elapsed() < watch {
        let stopped = suspended.iter().copied();
        let stopped = stopped.filter(|process| process.state() == ProcessState::Stopped);
        go_on(&stopped.collect::<Vec<_>>(), &mut failures);
        thread::sleep(TICK * 4);
    }
    failures.first()?;
    record.remove()?;
    Ok(match left.len() {
        0 => ResumeOutcome::Ended,
        _ => ResumeOutcome::Resumed {
            processes: suspended.len(),
        },
    })
}

fn go_on(processes: &[Process], failures: &mut Failures) {
    for process in processes {
        if let Some(handle) = process.open() {
            let continued = handle.signal(Signal::CONT);
            failures.note(continued.map_err(|source| PreemptError::Signal {
                pid: process.pid,
                source,
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_cannot_be_thawed_does_not_keep_the_rest_frozen() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::within(&dir.path().join("records")).unwrap();
        let target = Target::Tree {
            pid: 5_000_000,
            start_ticks: 1,
        };
        let [sound, broken] = ["sound", "broken"].map(|name| dir.path().join(name));
        let mut record = records.open(RecordKind::Suspended, &target).unwrap();
        for path in [&sound, &broken] {
            fs::create_dir(path).unwrap();
            record
                .push(Entry::Frozen {
                    path: path.clone(),
                    version_2: true,
                })
                .unwrap();
        }
        fs::write(sound.join("cgroup.freeze"), "1").unwrap();
        // The later one is thawed first: its file is missing.
        drop(record);
        let failed = resume(&records, &target).unwrap_err();
        assert!(failed.to_string().contains("broken"), "{failed}");
        let state = fs::read_to_string(sound.join("cgroup.freeze")).unwrap();
        assert_eq!(state, "0");
        assert_eq!(
            records.targets(RecordKind::Suspended).unwrap(),
            std::slice::from_ref(&target)
        );
        fs::remove_dir(&broken).unwrap();
        assert_eq!(resume(&records, &target).unwrap(), ResumeOutcome::Ended);
        assert!(records.targets(RecordKind::Suspended).unwrap().is_empty());
    }
}
