//! Shrinking (paper 004, §3.3 and §4.3): takes processors, then memory, a step at a time; and gives them back.
//!
//! ```text
//!  each round: quota − step ─▶ limit − step ─▶ swaps? ── yes ──▶ quota to 1 %, no more is taken
//!                                               │ no
//!                                               └─▶ wait for the interval, until the target is reached
//! ```
//!
//! Processors go first: a container that still runs dirties its memory again while it is reclaimed (§3.2). Immediate
//! preemption is one round with a step as large as everything, and goes on when the container swaps.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use permafrost_scheduling::bigc::{GRACEFUL_STEP, MINIMAL_FOOTPRINT};
use permafrost_scheduling::cost::TaskResources;
use permafrost_scheduling::quantity::Bytes;
use serde::Serialize;

use crate::Interrupted;
use crate::cgroup::{self, CgroupError, Controller, Group, Hierarchies, Version};
use crate::error::{Failures, PreemptError};
use crate::memory::{self, Limited, MemoryUse};
use crate::quota;
use crate::record::{Entry, Record, RecordKind, Records};
use crate::target::{Process, Target};

/// Interval at which a wait checks for an interrupt.
const TICK: Duration = Duration::from_millis(20);

/// Most readings of a tree that is moved into a group: children of members that were moved are born there, so each
/// reading leaves fewer outside.
const MOST_READINGS: u32 = 1_000;

/// Options of shrinking.
#[derive(Clone, Copy, Debug)]
pub struct ShrinkOptions {
    /// Resources to leave. Default: 1 % of a processor and 64 MB (004, §3.2), which are also the least.
    pub to: TaskResources,
    /// Resources to take in each round. Default: 2 processors and 4 GB (004, §5.3).
    pub step: TaskResources,
    /// Time between two rounds. Default 3 s, the interval of the resource monitor (004, §4.2): a container needs time
    /// to show whether it swaps.
    pub interval: Duration,
    /// True to take everything in one round, and to go on when the target swaps (immediate preemption). Default false.
    pub immediate: bool,
}

impl Default for ShrinkOptions {
    fn default() -> Self {
        Self {
            to: MINIMAL_FOOTPRINT,
            step: GRACEFUL_STEP,
            interval: Duration::from_secs(3),
            immediate: false,
        }
    }
}

/// State after a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ShrinkStep {
    /// Processors that the target may use, thousandths.
    pub cpu_millis: u64,
    /// Memory limit, bytes; 0 where memory is not limited.
    pub memory_limit_bytes: u64,
    /// Memory in use, bytes.
    pub memory_bytes: u64,
    /// Memory in swap, bytes.
    pub swapped_bytes: u64,
    /// Time since the beginning, µs.
    pub elapsed_us: u64,
}

/// Reason why no more was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ShrinkEnd {
    /// Everything that was to be taken is taken.
    Reached,
    /// The target swaps: it keeps the rest of its memory, and 1 % of a processor.
    Swapping,
    /// The kernel could not reclaim more memory.
    NotReclaimable,
    /// The target has no memory group of its own: processors alone were taken.
    NoMemoryGroup,
    /// The user interrupted the command. What was taken stays taken.
    Interrupted,
}

/// Result of shrinking.
#[derive(Clone, Debug)]
pub struct ShrinkOutcome {
    /// State before the first step.
    pub before: ShrinkStep,
    /// State after each round.
    pub steps: Vec<ShrinkStep>,
    /// Reason why no more was taken.
    pub end: ShrinkEnd,
    /// Explanation where the target was not reached.
    pub why: Option<String>,
}

/// Result of giving back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grown {
    /// The settings are as they were before.
    Whole,
    /// Some resources were given back; others are still taken.
    Part,
    /// There is no record of the target: it was not shrunk by this user, or was given everything back already.
    NotShrunk,
}

/// Takes processors and memory of a target. `report` is called after each round. A target that was shrunk before is
/// shrunk further.
///
/// # Errors
/// [`PreemptError`]. What was taken by then stays taken; [`grow`] gives it back.
pub fn shrink(
    hierarchies: &Hierarchies,
    records: &Records,
    target: &Target,
    options: ShrinkOptions,
    interrupted: Interrupted<'_>,
    report: &mut dyn FnMut(&ShrinkStep),
) -> Result<ShrinkOutcome, PreemptError> {
    let started = Instant::now();
    let members = target.members(&[])?;
    if members.is_empty()
        && let Target::Group { path, .. } = target
    {
        return Err(PreemptError::Empty { path: path.clone() });
    }
    target.check(&members)?;
    let mut record = records.open(RecordKind::Shrunk, target)?;
    let groups = match groups(hierarchies, target, &members, &mut record) {
        Ok(groups) => groups,
        Err(error) => {
            let is_shrunk =
                (record.entries().iter()).any(|entry| matches!(entry, Entry::Setting { .. }));
            // Nothing was taken: at most a group was made. What an earlier command has taken stays taken.
            if !is_shrunk && let Err(also) = put_back(record) {
                tracing::warn!(event = "cgroup-not-removed", %also, processes = %target, "a group that was made could not be removed");
            }
            return Err(error);
        }
    };
    let shrinking = Shrinking {
        groups,
        options: floored(options),
        started,
    };
    shrinking.run(&mut record, interrupted, report)
}

/// Raises the target to the minimal footprint.
fn floored(options: ShrinkOptions) -> ShrinkOptions {
    let ShrinkOptions { to, .. } = options;
    ShrinkOptions {
        to: TaskResources {
            cpu_millis: to.cpu_millis.max(MINIMAL_FOOTPRINT.cpu_millis),
            memory: to.memory.max(MINIMAL_FOOTPRINT.memory),
        },
        ..options
    }
}

/// Groups by which a target is limited.
struct Groups {
    cpu: Group,
    /// The memory group, or the reason why it cannot be limited.
    memory: Result<Group, PreemptError>,
}

struct Shrinking {
    groups: Groups,
    options: ShrinkOptions,
    started: Instant,
}

impl Shrinking {
    fn run(
        &self,
        record: &mut Record,
        interrupted: Interrupted<'_>,
        report: &mut dyn FnMut(&ShrinkStep),
    ) -> Result<ShrinkOutcome, PreemptError> {
        let before = self.state()?;
        // Without that, whatever goes to swap meanwhile goes there for another reason.
        let takes_memory = held(&before).less(self.options.to).memory > Bytes::ZERO;
        let mut now = before;
        let mut steps = Vec::new();
        let done = |steps, end, why| {
            Ok(ShrinkOutcome {
                before,
                steps,
                end,
                why,
            })
        };
        loop {
            if interrupted() {
                return done(steps, ShrinkEnd::Interrupted, None);
            }
            let spare = held(&now).less(self.options.to);
            if spare.is_none() {
                break;
            }
            let taken = match self.options.immediate {
                true => spare,
                false => spare.least(self.options.step),
            };
            if taken.is_none() {
                break;
            }
            if taken.cpu_millis > 0 {
                quota::set(&self.groups.cpu, now.cpu_millis - taken.cpu_millis, record)?;
            }
            let mut limited = Limited::Reached;
            if taken.memory > Bytes::ZERO
                && let Ok(group) = &self.groups.memory
            {
                let to = held(&now).less(taken).memory.count();
                limited = memory::limit(group, to, record)?;
            }
            now = self.state()?;
            let swaps = now.swapped_bytes > before.swapped_bytes;
            let freezes = swaps && takes_memory && !self.options.immediate;
            if freezes && now.cpu_millis > MINIMAL_FOOTPRINT.cpu_millis {
                quota::set(&self.groups.cpu, MINIMAL_FOOTPRINT.cpu_millis, record)?;
                now = self.state()?;
            }
            report(&now);
            steps.push(now);
            if limited == Limited::NotReclaimable {
                // Processors are taken to the end all the same: they need no reclaim.
                if now.cpu_millis > self.options.to.cpu_millis {
                    quota::set(&self.groups.cpu, self.options.to.cpu_millis, record)?;
                    now = self.state()?;
                    report(&now);
                    steps.push(now);
                }
                return done(
                    steps,
                    ShrinkEnd::NotReclaimable,
                    Some(not_reclaimable(&now)),
                );
            }
            if freezes {
                let why = "it swaps: it has 1 % of a processor, and no more memory is taken of it";
                return done(steps, ShrinkEnd::Swapping, Some(why.to_owned()));
            }
            if !held(&now).less(self.options.to).is_none() {
                self.wait(interrupted);
            }
        }
        // A target that uses less than it is left could grow again.
        let to = self.options.to.memory;
        if let Ok(group) = &self.groups.memory
            && now.memory_limit_bytes > to.count()
            && Bytes::new(now.memory_bytes) <= to
        {
            memory::limit(group, to.count(), record)?;
            now = self.state()?;
            report(&now);
            steps.push(now);
        }
        match &self.groups.memory {
            Ok(_) => done(steps, ShrinkEnd::Reached, None),
            Err(why) => done(steps, ShrinkEnd::NoMemoryGroup, Some(why.to_string())),
        }
    }

    fn wait(&self, interrupted: Interrupted<'_>) {
        let until = Instant::now() + self.options.interval;
        while Instant::now() < until && !interrupted() {
            thread::sleep(TICK.min(self.options.interval));
        }
    }

    fn state(&self) -> Result<ShrinkStep, PreemptError> {
        let used = match &self.groups.memory {
            Ok(group) => memory::read(group)?,
            Err(_) => MemoryUse {
                used_bytes: 0,
                swapped_bytes: 0,
                limit_bytes: 0,
            },
        };
        let all = processors()? * 1_000;
        let quota = quota::read(&self.groups.cpu)?;
        Ok(ShrinkStep {
            cpu_millis: quota.map_or(all, |quota| quota.min(all)),
            memory_limit_bytes: used.limit_bytes,
            memory_bytes: used.used_bytes,
            swapped_bytes: used.swapped_bytes,
            elapsed_us: u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX),
        })
    }
}

/// Returns the resources that the target holds: its quota, and the memory that it uses or may use.
fn held(state: &ShrinkStep) -> TaskResources {
    TaskResources {
        cpu_millis: state.cpu_millis,
        memory: Bytes::new(state.memory_bytes.min(state.memory_limit_bytes)),
    }
}

/// Returns the number of processors of the machine that are online, whichever of them this command may use itself.
fn processors() -> Result<u64, CgroupError> {
    let path = Path::new("/proc/stat");
    let stat = fs::read_to_string(path).map_err(|error| CgroupError::io("read", path, error))?;
    Ok(count_processors(&stat).max(1))
}

/// Counts the lines `cpuN` of `/proc/stat` (proc(5)); `cpu` is the sum of them.
fn count_processors(stat: &str) -> u64 {
    let numbers = stat.lines().filter_map(|line| line.strip_prefix("cpu"));
    numbers
        .filter(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
        .count() as u64
}

fn not_reclaimable(state: &ShrinkStep) -> String {
    let free_swap = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = |name: &str| {
        let line = free_swap.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':')
            .split_whitespace()
            .next()?
            .parse::<u64>()
            .ok()
    };
    let swap = match (total("SwapTotal"), total("SwapFree")) {
        (Some(0), _) => "this machine has no swap".to_owned(),
        (_, Some(0)) => "no swap is free".to_owned(),
        _ => "the rest is in use or locked".to_owned(),
    };
    format!(
        "the kernel cannot reclaim more: {} MiB are left, and {swap}",
        state.memory_bytes >> 20
    )
}

/// Finds the groups by which a target can be limited, and makes one for the processors of a tree that shares its group.
fn groups(
    hierarchies: &Hierarchies,
    target: &Target,
    members: &[Process],
    record: &mut Record,
) -> Result<Groups, PreemptError> {
    if let Target::Group { path, .. } = target {
        let cpu = hierarchies.group_at(Controller::Cpu, path)?;
        // Read once, so that a controller that is not enabled is found before anything is changed.
        quota::read(&cpu)?;
        let memory = hierarchies.group_at(Controller::Memory, path);
        let memory = memory.and_then(|group| memory::read(&group).map(|_| group));
        return Ok(Groups {
            cpu,
            memory: memory.map_err(Into::into),
        });
    }
    let Target::Tree { pid, start_ticks } = target else {
        return Err(PreemptError::SharedGroup {
            path: PathBuf::new(),
        });
    };
    let pids: Vec<u32> = members.iter().map(|member| member.pid).collect();
    let cpu = hierarchies.group_of(Controller::Cpu, *pid)?;
    let cpu = if cpu.is_exclusive_to(&pids)? {
        cpu
    } else {
        move_tree(&cpu, target, &format!("shrunk-{pid}-{start_ticks}"), record)?
    };
    quota::read(&cpu)?;
    let own = hierarchies.group_of(Controller::Memory, *pid)?;
    let memory = match own.is_exclusive_to(&pids)? {
        true => memory::read(&own).map(|_| own).map_err(Into::into),
        // The kernel does not move what was charged to one group to another.
        false => Err(PreemptError::SharedGroup { path: own.path }),
    };
    Ok(Groups { cpu, memory })
}

/// Moves a tree into a group that is made below its own, until a reading finds no member outside.
fn move_tree(
    own: &Group,
    target: &Target,
    name: &str,
    record: &mut Record,
) -> Result<Group, PreemptError> {
    let made = match own.path.ends_with(format!("permafrost-{name}")) {
        true => own.clone(),
        false => own.child(name),
    };
    record.push(Entry::Made {
        path: made.path.clone(),
    })?;
    made.make()?;
    if made.version == Version::V2 && !made.path.join("cpu.max").exists() {
        return Err(CgroupError::NotEnabled {
            path: made.path,
            file: "cpu.max",
        }
        .into());
    }
    for _ in 0..MOST_READINGS {
        let inside = made.members()?;
        let outside: Vec<Process> = (target.members(&[])?.into_iter())
            .filter(|member| !inside.contains(&member.pid))
            .collect();
        if outside.is_empty() {
            break;
        }
        for process in outside {
            made.add(process.pid)?;
        }
    }
    Ok(made)
}

/// Gives back what [`shrink`] has taken: everything, or up to `to`. Repeating it does nothing.
///
/// # Errors
/// [`PreemptError`]; the record stays, so that it can be repeated.
pub fn grow(
    hierarchies: &Hierarchies,
    records: &Records,
    target: &Target,
    to: Option<TaskResources>,
) -> Result<Grown, PreemptError> {
    let Some(mut record) = records.find(RecordKind::Shrunk, target)? else {
        return Ok(Grown::NotShrunk);
    };
    let Some(to) = to else {
        put_back(record)?;
        return Ok(Grown::Whole);
    };
    let members = target.members(&[])?;
    let groups = groups(hierarchies, target, &members, &mut record)?;
    if let Ok(group) = &groups.memory
        && memory::read(group)?.limit_bytes < to.memory.count()
    {
        memory::limit(group, to.memory.count(), &mut record)?;
    }
    if quota::read(&groups.cpu)?.is_some_and(|quota| quota < to.cpu_millis) {
        quota::set(&groups.cpu, to.cpu_millis, &mut record)?;
    }
    Ok(Grown::Part)
}

/// Puts the settings of a record back, the last first, and removes the groups that were made. What fails does not keep
/// the rest from being put back; the first error is returned then, and the record stays.
fn put_back(record: Record) -> Result<(), PreemptError> {
    let mut failures = Failures::default();
    for entry in record.entries().iter().rev() {
        let Entry::Setting { path, value } = entry else {
            continue;
        };
        match cgroup::write(path, value) {
            // The group was removed: its processes have ended.
            Err(_) if !path.exists() => {}
            done => failures.note(done),
        }
    }
    for path in record.made() {
        failures.note(cgroup::dissolve(path));
    }
    failures.first()?;
    Ok(record.remove()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted_without_their_sum() {
        let stat = "cpu  9 0 9\ncpu0 4 0 4\ncpu1 3 0 3\ncpu10 2 0 2\nintr 5\ncpus 1\n";
        assert_eq!(count_processors(stat), 3);
        assert!(processors().unwrap() >= 1);
    }
}
