//! One suspend and one resume, by the commands that a user gives.

use std::path::Path;
use std::time::Duration;

use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::interrupt::Interrupts;
use serde_json::Value;

use super::child;

/// Node and job of the dumps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target<'a> {
    /// Control socket of the node.
    pub(super) socket: &'a Path,
    pub(super) job: &'a str,
    pub(super) criu: Option<&'a Path>,
}

/// Options of a dump.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct How {
    /// Durability of the dump: `all`, `local`; the node's default if `None`.
    pub(super) durability: Option<&'static str>,
    /// True to use soft-dirty bits, which the kernel must support.
    pub(super) track: bool,
}

/// A finished dump and its measurements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Suspended {
    /// Time from the start to the end of the command.
    pub(super) total: Duration,
    /// Time for which the task was frozen, as CRIU measured it.
    pub(super) frozen: Duration,
    /// Memory of the task, bytes.
    pub(super) memory_bytes: u64,
    /// Bytes of that memory that were stored.
    pub(super) stored_bytes: u64,
}

/// Dumps process `pid`, which ends with the dump.
pub(super) fn suspend(
    target: &Target<'_>,
    pid: u32,
    how: How,
    interrupts: &Interrupts,
) -> Result<Suspended, Failure> {
    let pid = pid.to_string();
    let mut arguments = vec!["dump", "--pid", &pid, "--job", target.job];
    if let Some(durability) = how.durability {
        arguments.extend(["--durability", durability]);
    }
    let criu = target.criu.map(|criu| criu.to_string_lossy());
    if let Some(criu) = &criu {
        arguments.extend(["--criu", criu]);
    }
    if how.track {
        arguments.extend(["--", "--track-mem"]);
    }
    let report = child::permafrost(interrupts, target.socket, arguments)
        .map_err(|failure| failure.during("suspend"))?;
    Ok(Suspended {
        total: micros(&report, "/total_us")?,
        frozen: micros(&report, "/stats/frozen_time")?,
        memory_bytes: number(&report, "/checkpoint/memory_bytes")?,
        stored_bytes: number(&report, "/checkpoint/added_bytes")?,
    })
}

/// Restores the job's newest checkpoint. Returns the duration of the command.
pub(super) fn resume(target: &Target<'_>, interrupts: &Interrupts) -> Result<Duration, Failure> {
    let mut arguments = vec!["restore", target.job];
    let criu = target.criu.map(|criu| criu.to_string_lossy());
    if let Some(criu) = &criu {
        arguments.extend(["--criu", criu]);
    }
    let report = child::permafrost(interrupts, target.socket, arguments)
        .map_err(|failure| failure.during("resume"))?;
    micros(&report, "/total_us")
}

/// Removes all checkpoints of the job.
pub(super) fn remove(target: &Target<'_>, interrupts: &Interrupts) -> Result<(), Failure> {
    let arguments = ["rm", "--all", "--force", target.job];
    child::permafrost(interrupts, target.socket, arguments).map(drop)
}

fn number(report: &Value, pointer: &str) -> Result<u64, Failure> {
    report
        .pointer(pointer)
        .and_then(Value::as_u64)
        .ok_or_else(|| {
            Failure::new(
                Code::Internal,
                format!("permafrost's report has no number at {pointer}"),
            )
        })
}

fn micros(report: &Value, pointer: &str) -> Result<Duration, Failure> {
    number(report, pointer).map(Duration::from_micros)
}
