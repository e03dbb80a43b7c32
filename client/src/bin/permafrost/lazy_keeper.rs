//! `permafrost lazy-keeper`: the process between `permafrost restore --lazy`, CRIU and the daemon that keeps the
//! userfaultfds of the restored processes.
//!
//! The command's end of the connection is its standard input. It goes on without the command.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use permafrost_agent::host;
use permafrost_agent::host::arguments::{LogFormat, init_log};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_transport::control::Connection;
use rustix::fs::OFlags;

/// This program, also if another version has replaced its file.
const OWN_PROGRAM: &str = "/proc/self/exe";

/// Name of the log of all keepers, beside the socket of their daemon. It outlives the daemon.
const LOG: &str = "lazy-keeper.log";

/// Size from which on the log is renamed to `lazy-keeper.log.1`, and begun anew.
const LOG_BYTES: u64 = 1 << 20;

/// Returns the path of the keepers' log.
pub(crate) fn log_path(context: &Context) -> PathBuf {
    let directory = context.socket.parent().unwrap_or(Path::new("."));
    directory.join(LOG)
}

/// Opens the log for another keeper, which shares it with others.
fn open_log(path: &Path) -> io::Result<File> {
    let full = |metadata: fs::Metadata| metadata.len() >= LOG_BYTES;
    let is_full = || fs::symlink_metadata(path).is_ok_and(full);
    let nofollow = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or_default();
    let mut options = File::options();
    options
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(nofollow);
    if is_full() {
        // Of two keepers that find it full, the second would replace the old log by the new one.
        let lock = options.open(path.with_extension("log.lock"))?;
        lock.lock()?;
        if is_full() {
            fs::rename(path, path.with_extension("log.1"))?;
        }
    }
    options.open(path)
}

/// Starts a keeper of processes that CRIU restores from `images`. Returns a connection to it, which takes a Thaw as the
/// daemon would. If that one ends, another has `daemon_timeout` to come in its place.
pub(crate) fn start(
    context: &Context,
    images: &Path,
    daemon_timeout: Duration,
) -> Result<(Connection, Child), Failure> {
    let failed =
        |error: io::Error| Failure::new(Code::Internal, format!("start a lazy keeper: {error}"));
    let (here, there) = UnixStream::pair().map_err(failed)?;
    let socket = std::path::absolute(&context.socket).map_err(failed)?;
    let mut command = Command::new(OWN_PROGRAM);
    command.arg0("permafrost").arg("--socket").arg(socket);
    command.arg("lazy-keeper").arg(images);
    command.arg(format!("{}ms", daemon_timeout.as_millis()));
    // It may outlive the command, whose output somebody waits for, and whose directory somebody unmounts.
    command.stdin(Stdio::from(OwnedFd::from(there)));
    let log = open_log(&log_path(context));
    let log = log.map_or_else(|_| Stdio::null(), Stdio::from);
    command.stdout(Stdio::null()).stderr(log);
    let keeper = command.current_dir("/").spawn().map_err(failed)?;
    Ok((Connection::from_stream(here), keeper))
}

/// Runs as a keeper, until the processes lack no pages or have ended.
pub(crate) fn keep(
    context: &Context,
    images: &Path,
    daemon_timeout: Duration,
) -> Result<(), Failure> {
    let parent = std::os::unix::process::parent_id();
    // Signals to the command's group and from its terminal are not for this process, which leads no group.
    let _ = rustix::process::setsid();
    init_log(LogFormat::Text, None);
    let span = tracing::info_span!("keeper", pid = std::process::id());
    let _entered = span.enter();
    host::raise_descriptor_limit();
    let failed = |error: io::Error| Failure::new(Code::Internal, format!("lazy keeper: {error}"));
    let command = io::stdin().as_fd().try_clone_to_owned();
    let command = UnixStream::from(command.map_err(failed)?);
    let connect = || Connection::connect(&context.socket);
    permafrost_lazy::keep(&command, parent, images, daemon_timeout, connect).map_err(failed)
}
