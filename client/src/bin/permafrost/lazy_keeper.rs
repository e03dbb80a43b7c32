//! `permafrost lazy-keeper`: the process between `permafrost restore --lazy`, CRIU and the daemon that keeps the
//! userfaultfds of the restored processes.
//!
//! The command's end of the connection is its standard input: it takes one Thaw, with the socket to which CRIU connects,
//! and passes on the daemon's replies. It goes on without the command. If the daemon goes away, it ends the processes,
//! and replies with an empty message.

use std::convert::Infallible;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use permafrost_agent::host;
use permafrost_criu::frontend;
use permafrost_criu::lazy::LazyKeeper;
use permafrost_protocol::control::{
    LazyServed, Reply, ReportedError as _, Request, reply, request,
};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_transport::control::{Connection, ControlError};
use permafrost_transport::framing;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Interval at which children of the processes are looked for, and processes that have ended.
const TICK: Duration = Duration::from_millis(250);

/// Time limit for CRIU to connect.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time for CRIU to end by itself when its processes were killed.
const GRACE: Duration = Duration::from_secs(2);

/// Interval at which the end of CRIU is polled.
const GRACE_TICK: Duration = Duration::from_millis(10);

/// Starts a keeper. Returns a connection to it, which takes a Thaw as the daemon would.
pub(crate) fn start(context: &Context) -> Result<(Connection, Child), Failure> {
    let failed =
        |error: io::Error| Failure::new(Code::Internal, format!("start a lazy keeper: {error}"));
    let (here, there) = UnixStream::pair().map_err(failed)?;
    let socket = std::path::absolute(&context.socket).map_err(failed)?;
    let program = std::env::current_exe().map_err(failed)?;
    let mut command = Command::new(program);
    command.arg("--socket").arg(socket).arg("lazy-keeper");
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
    let internal = |what: &str| Failure::new(Code::Internal, format!("lazy keeper: {what}"));
    let failed = |error: io::Error| internal(&error.to_string());
    let command = io::stdin().as_fd().try_clone_to_owned();
    let command = UnixStream::from(command.map_err(failed)?);
    let received = framing::recv::<Request>(&command);
    let Ok(Some((request, mut fds))) = received else {
        return Err(internal("no request"));
    };
    let (Some(request::Body::Thaw(thaw)), Some(listener)) = (request.body, fds.pop()) else {
        return Err(internal("another request"));
    };
    let (criu, theirs) = UnixStream::pair().map_err(failed)?;
    let mut connection = context.connect()?;
    connection.begin(thaw, Some(theirs.as_fd()))?;
    drop(theirs);

    let keeper = LazyKeeper::default();
    let (over, ticks) = mpsc::channel::<()>();
    let is_complete = thread::scope(|scope| {
        let (keeper, command) = (&keeper, &command);
        let relaying = scope.spawn(move || {
            relay(
                keeper,
                &UnixListener::from(listener),
                command,
                &criu,
                parent,
            );
        });
        scope.spawn(move || {
            while ticks.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                keeper.refresh();
            }
        });
        let served = connection.finish_with::<request::Thaw>(&mut |progress, fds| {
            match fds.is_empty() {
                // A command that does not read must not keep this process from reading.
                true if keeper.has_criu() && !is_ready(command) => {}
                true => tell(command, Some(reply::Body::Progress(progress.clone()))),
                false => fds.into_iter().for_each(|fd| keep_fork(keeper, fd)),
            }
        });
        drop(over);
        let is_complete = served.is_ok();
        let answer = answer_of(served);
        if is_complete {
            tell(command, answer);
            return true;
        }
        keeper.begin_end();
        if keeper.has_criu() {
            // It undoes its work when the processes end that it has handed over, and those that it still hands over.
            let since = Instant::now();
            while !keeper.has_criu_ended() && since.elapsed() < GRACE {
                thread::sleep(GRACE_TICK);
            }
            keeper.kill_criu();
            let _ = relaying.join();
            keeper.end();
            tell(command, answer);
        } else {
            // The command may wait for the answer before it starts CRIU.
            tell(command, answer);
            let _ = relaying.join();
            keeper.end();
        }
        false
    });
    if !is_complete {
        keeper.hold_until_gone();
    }
    Ok(())
}

/// Passes on what the CRIU that connects to `listener` says, unless `command` hangs up before.
fn relay(
    keeper: &LazyKeeper,
    listener: &UnixListener,
    command: &UnixStream,
    daemon: &UnixStream,
    parent: u32,
) {
    match frontend::accept::<Infallible>(listener, command, PATIENCE) {
        Ok(criu) => {
            if let Err(error) = keeper.relay(&criu, daemon, parent) {
                tracing::debug!(%error, "CRIU's processes are not passed on");
            }
        }
        Err(error) => tracing::debug!(%error, "CRIU has not come"),
    }
    // The daemon gives up, unless it knows that all processes run.
    let _ = daemon.shutdown(Shutdown::Both);
}

fn keep_fork(keeper: &LazyKeeper, userfault: OwnedFd) {
    if let Err(error) = keeper.add_fork(userfault) {
        tracing::warn!(%error, "forked process not kept");
    }
}

/// Returns the reply to the command; `None` if the daemon went away.
fn answer_of(served: Result<LazyServed, ControlError>) -> Option<reply::Body> {
    match served {
        Ok(served) => Some(reply::Body::LazyServed(served)),
        Err(refused @ ControlError::Refused { .. }) => Some(reply::Body::Error(refused.to_reply())),
        Err(_) => None,
    }
}

fn tell(command: &UnixStream, body: Option<reply::Body>) {
    if let Err(error) = framing::send(command, &Reply { body }, &[]) {
        tracing::debug!(%error, "the command has gone");
    }
}

/// Returns true if a small message can be sent at once.
fn is_ready(command: &UnixStream) -> bool {
    let mut fds = [PollFd::new(command, PollFlags::OUT)];
    matches!(poll(&mut fds, Some(&Timespec::default())), Ok(ready) if ready > 0)
}
