//! `permafrost bench guard`: becomes a program that the kernel ends when its parent ends, `kill -9` included.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use clap::Args;
use permafrost_terminal::failure::{Code, Failure};
use rustix::process::Signal;

#[derive(Debug, Args)]
pub(super) struct GuardArguments {
    /// Pid of the process with whose end the program ends.
    #[arg(long)]
    parent: u32,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    program: Vec<OsString>,
}

pub(super) fn guard(arguments: &GuardArguments) -> Result<(), Failure> {
    // The setting survives execve. The end of the thread that started this process counts: that is the
    // main thread of the benchmark or playground.
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))
        .map_err(|errno| Failure::new(Code::Internal, format!("set the death signal: {errno}")))?;
    let parent = rustix::process::getppid().map(rustix::process::Pid::as_raw_nonzero);
    if parent.and_then(|pid| u32::try_from(pid.get()).ok()) != Some(arguments.parent) {
        // The parent ended before the signal was requested.
        return Err(Failure::interrupted("the parent has ended"));
    }
    let Some((program, rest)) = arguments.program.split_first() else {
        return Err(Failure::new(Code::Invalid, "no program"));
    };
    let error = Command::new(program).args(rest).exec();
    Err(Failure::io("start", Path::new(program), &error))
}
