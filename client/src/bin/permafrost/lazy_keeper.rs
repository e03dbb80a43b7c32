//! `permafrost lazy-keeper`: the process between `permafrost restore --lazy`, CRIU and the daemon that keeps the
//! userfaultfds of the restored processes.
//!
//! The command's end of the connection is its standard input. It goes on without the command.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use permafrost_agent::host;
use permafrost_criu::lazy;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_transport::control::Connection;

/// This program, also if another version has replaced its file.
const OWN_PROGRAM: &str = "/proc/self/exe";

/// Starts a keeper. Returns a connection to it, which takes a Thaw as the daemon would.
pub(crate) fn start(context: &Context) -> Result<(Connection, Child), Failure> {
    let failed =
        |error: io::Error| Failure::new(Code::Internal, format!("start a lazy keeper: {error}"));
    let (here, there) = UnixStream::pair().map_err(failed)?;
    let socket = std::path::absolute(&context.socket).map_err(failed)?;
    let mut command = Command::new(OWN_PROGRAM);
    command.arg0("permafrost").arg("--socket").arg(socket);
    command.arg("lazy-keeper");
    // It may outlive the command, whose output somebody waits for, and whose directory somebody unmounts.
    command.stdin(Stdio::from(OwnedFd::from(there)));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let keeper = command.current_dir("/").spawn().map_err(failed)?;
    Ok((Connection::from_stream(here), keeper))
}

/// Runs as a keeper, until the processes lack no pages or have ended.
pub(crate) fn keep(context: &Context) -> Result<(), Failure> {
    let parent = std::os::unix::process::parent_id();
    // Signals to the command's group and from its terminal are not for this process, which leads no group.
    let _ = rustix::process::setsid();
    host::raise_descriptor_limit();
    let failed = |error: io::Error| Failure::new(Code::Internal, format!("lazy keeper: {error}"));
    let command = io::stdin().as_fd().try_clone_to_owned();
    let command = UnixStream::from(command.map_err(failed)?);
    let connect = || Connection::connect(&context.socket);
    lazy::keep(&command, parent, connect).map_err(failed)
}
