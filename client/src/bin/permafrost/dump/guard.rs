//! `permafrost freeze-guard`: the process between `permafrost dump` and CRIU that keeps the freeze limit.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use clap::Args;
use permafrost_criu::{FreezeLimit, Guarded};
use permafrost_terminal::failure::{Code, Failure};

#[derive(Debug, Args)]
pub(crate) struct GuardArguments {
    /// Root of the tree that CRIU freezes.
    #[arg(long)]
    pid: u32,
    /// Freeze limit, milliseconds.
    #[arg(long)]
    limit_ms: u64,
    /// CRIU takes memory only.
    #[arg(long)]
    pre_dump: bool,
    /// File that the report is written to.
    #[arg(long)]
    report: PathBuf,
    /// CRIU and its arguments.
    #[arg(last = true, required = true)]
    criu: Vec<OsString>,
}

/// Returns the command line of a guard, up to CRIU's.
pub(super) fn command(guarded: &Guarded) -> Result<Command, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::new(Code::Internal, format!("find this program: {error}")))?;
    let mut command = Command::new(program);
    command
        .args(["freeze-guard", "--pid", &guarded.pid.to_string()])
        .args(["--limit-ms", &guarded.limit.time().as_millis().to_string()])
        .arg("--report")
        .arg(&guarded.report);
    if guarded.pre_dump {
        command.arg("--pre-dump");
    }
    command.arg("--");
    Ok(command)
}

pub(crate) fn guard(arguments: GuardArguments) -> Result<ExitCode, Failure> {
    let limit = FreezeLimit::new(Duration::from_millis(arguments.limit_ms))
        .ok_or_else(|| Failure::new(Code::Invalid, "the freeze limit is too short"))?;
    let (program, rest) = arguments
        .criu
        .split_first()
        .ok_or_else(|| Failure::new(Code::Invalid, "no program"))?;
    let mut command = Command::new(program);
    command.args(rest);
    let guarded = Guarded {
        pid: arguments.pid,
        limit,
        pre_dump: arguments.pre_dump,
        report: arguments.report,
    };
    let status = permafrost_criu::guard(&guarded, command)
        .map_err(|error| Failure::new(Code::Internal, format!("guard the freeze: {error}")))?;
    // The client reads the whole status in the report.
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.unwrap_or(Code::Internal as u8)))
}
