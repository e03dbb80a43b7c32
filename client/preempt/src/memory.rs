//! The memory limit of a control group.
//!
//! Version 1: `memory.limit_in_bytes`. The kernel reclaims as it is written, and answers EBUSY if it cannot reclaim
//! enough; a process that then needs more than the limit would be killed, so the group's OOM killer is off
//! (`memory.oom_control`): the process waits until the limit is raised. Version 2: `memory.reclaim` and `memory.high`.
//! Not `memory.max`, below which the kernel kills; at `memory.high` it reclaims and slows the processes down.

use std::thread;
use std::time::{Duration, Instant};

use crate::cgroup::{CgroupError, Group, Version};
use crate::error::PreemptError;
use crate::quota::remember;
use crate::record::Record;

/// Granularity of limits: a page more than what is used would be exceeded by the next fault.
const SLACK_BYTES: u64 = 1 << 20;

/// Time for which a group of version 2 is watched while it shrinks to its limit.
const RECLAIM_PATIENCE: Duration = Duration::from_secs(5);

/// Attempts to set a limit at what is used: more may be used by the time it is set.
const ATTEMPTS: u64 = 8;

/// Memory of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryUse {
    /// Bytes in memory, with the page cache that is charged to the group.
    pub(crate) used_bytes: u64,
    /// Bytes in swap.
    pub(crate) swapped_bytes: u64,
    /// The limit; `u64::MAX` and nearly so for none.
    pub(crate) limit_bytes: u64,
}

/// Result of setting a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limited {
    /// The limit is set, and not exceeded.
    Reached,
    /// The kernel could not reclaim as much: the limit is at what is used.
    NotReclaimable,
}

pub(crate) fn read(group: &Group) -> Result<MemoryUse, CgroupError> {
    match group.version {
        Version::V1 => {
            let stat = group.read("memory.stat")?;
            let swapped = stat
                .lines()
                .find_map(|line| line.strip_prefix("total_swap "));
            Ok(MemoryUse {
                used_bytes: group.read_number("memory.usage_in_bytes")?,
                swapped_bytes: swapped
                    .and_then(|bytes| bytes.trim().parse().ok())
                    .unwrap_or(0),
                limit_bytes: group.read_number("memory.limit_in_bytes")?,
            })
        }
        Version::V2 => Ok(MemoryUse {
            used_bytes: group.read_number("memory.current")?,
            swapped_bytes: group.read_number("memory.swap.current").unwrap_or(0),
            limit_bytes: group
                .read_number("memory.high")?
                .min(group.read_number("memory.max")?),
        }),
    }
}

/// Lowers the limit of a group; the settings before are recorded first. Blocks while the kernel reclaims.
pub(crate) fn limit(
    group: &Group,
    bytes: u64,
    record: &mut Record,
) -> Result<Limited, PreemptError> {
    match group.version {
        Version::V1 => {
            // Settings are put back in reverse: the limit before the OOM killer.
            stop_oom_killer(group, record)?;
            remember(group, "memory.limit_in_bytes", record)?;
            Ok(limit_v1(group, bytes)?)
        }
        Version::V2 => {
            remember(group, "memory.high", record)?;
            Ok(limit_v2(group, bytes)?)
        }
    }
}

/// Turns the OOM killer of a group of version 1 off: its processes wait for memory instead.
fn stop_oom_killer(group: &Group, record: &mut Record) -> Result<(), PreemptError> {
    let text = match group.read("memory.oom_control") {
        Err(CgroupError::NotEnabled { .. }) => return Ok(()),
        text => text?,
    };
    if text.lines().any(|line| line == "oom_kill_disable 0") {
        record.push(crate::record::Entry::Setting {
            path: group.path.join("memory.oom_control"),
            value: "0".to_owned(),
        })?;
        group.write("memory.oom_control", "1")?;
    }
    Ok(())
}

fn limit_v1(group: &Group, bytes: u64) -> Result<Limited, CgroupError> {
    let set = |bytes: u64| group.write("memory.limit_in_bytes", &bytes.to_string());
    match set(bytes) {
        Err(error) if error.is_busy() => {}
        done => return done.map(|()| Limited::Reached),
    }
    for attempt in 1..=ATTEMPTS {
        let used = read(group)?.used_bytes;
        match set(used.saturating_add(SLACK_BYTES * attempt).max(bytes)) {
            Err(error) if error.is_busy() => {}
            done => return done.map(|()| Limited::NotReclaimable),
        }
    }
    Ok(Limited::NotReclaimable)
}

fn limit_v2(group: &Group, bytes: u64) -> Result<Limited, CgroupError> {
    let used = read(group)?.used_bytes;
    if used > bytes {
        // EAGAIN: less was reclaimed than asked. Kernels before 5.19 have no such file; memory.high reclaims as well.
        match group.write("memory.reclaim", &(used - bytes).to_string()) {
            Err(error) if error.is_denied() => return Err(error),
            _ => {}
        }
    }
    group.write("memory.high", &bytes.to_string())?;
    let started = Instant::now();
    loop {
        let used = read(group)?.used_bytes;
        if used <= bytes {
            return Ok(Limited::Reached);
        }
        if started.elapsed() >= RECLAIM_PATIENCE {
            // Above memory.high its processes are slowed down for nothing.
            group.write("memory.high", &used.saturating_add(SLACK_BYTES).to_string())?;
            return Ok(Limited::NotReclaimable);
        }
        thread::sleep(Duration::from_millis(20));
    }
}
