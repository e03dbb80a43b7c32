//! The processor quota of a control group: `cpu.cfs_quota_us` and its period (version 1), `cpu.max` (version 2).

use crate::cgroup::{CgroupError, Group, Version};
use crate::error::PreemptError;
use crate::record::{Entry, Record};

/// Period that quotas are set with, µs: the kernel's default.
const PERIOD_US: u64 = 100_000;

/// Shortest quota that the kernel takes, µs (`min_cfs_quota_period` in kernel/sched/core.c): 1 % of a processor.
const MIN_QUOTA_US: u64 = 1_000;

/// Returns the quota of a group, thousandths of a processor; `None` if it has none.
pub(crate) fn read(group: &Group) -> Result<Option<u64>, CgroupError> {
    let (quota, period) = match group.version {
        Version::V1 => (
            group.read("cpu.cfs_quota_us")?,
            group.read("cpu.cfs_period_us")?,
        ),
        Version::V2 => {
            let text = group.read("cpu.max")?;
            match text.split_once(' ') {
                Some((quota, period)) => (quota.to_owned(), period.to_owned()),
                None => return Err(group.not_understood("cpu.max", text)),
            }
        }
    };
    if quota == "max" || quota.starts_with('-') {
        return Ok(None);
    }
    let wrong = || group.not_understood("the processor quota", format!("{quota} {period}"));
    let number = |text: &str| text.parse::<u64>().map_err(|_| wrong());
    let millis = number(&quota)?
        .saturating_mul(1_000)
        .checked_div(number(&period)?);
    millis.map(Some).ok_or_else(wrong)
}

/// Sets the quota of a group, thousandths of a processor, at least [`MIN_QUOTA_US`] in [`PERIOD_US`]; the settings
/// before are recorded first.
pub(crate) fn set(group: &Group, cpu_millis: u64, record: &mut Record) -> Result<(), PreemptError> {
    let quota_us = (cpu_millis.saturating_mul(PERIOD_US) / 1_000).max(MIN_QUOTA_US);
    match group.version {
        Version::V1 => {
            // The kernel refuses a quota below the burst (since 5.14), and a period with which a quota is too large.
            for file in ["cpu.cfs_burst_us", "cpu.cfs_quota_us", "cpu.cfs_period_us"] {
                remember(group, file, record)?;
            }
            if group
                .read("cpu.cfs_burst_us")
                .is_ok_and(|burst| burst != "0")
            {
                group.write("cpu.cfs_burst_us", "0")?;
            }
            if group.read_number("cpu.cfs_period_us")? != PERIOD_US {
                group.write("cpu.cfs_quota_us", "-1")?;
                group.write("cpu.cfs_period_us", &PERIOD_US.to_string())?;
            }
            group.write("cpu.cfs_quota_us", &quota_us.to_string())?;
        }
        Version::V2 => {
            for file in ["cpu.max.burst", "cpu.max"] {
                remember(group, file, record)?;
            }
            if group.read("cpu.max.burst").is_ok_and(|burst| burst != "0") {
                group.write("cpu.max.burst", "0")?;
            }
            group.write("cpu.max", &format!("{quota_us} {PERIOD_US}"))?;
        }
    }
    Ok(())
}

/// Records the contents of a file, the first time. A file that this kernel does not have is left out.
pub(crate) fn remember(
    group: &Group,
    file: &'static str,
    record: &mut Record,
) -> Result<(), PreemptError> {
    let path = group.path.join(file);
    let is_known =
        |entry: &Entry| matches!(entry, Entry::Setting { path: known, .. } if *known == path);
    if record.entries().iter().any(is_known) {
        return Ok(());
    }
    match group.read(file) {
        Ok(value) => Ok(record.push(Entry::Setting { path, value })?),
        Err(CgroupError::NotEnabled { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
