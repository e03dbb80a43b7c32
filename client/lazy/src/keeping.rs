//! Conversation of a keeper with the command that has started it, with CRIU and with the daemon.

use std::convert::Infallible;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use permafrost_protocol::control::{
    ErrorCode, LazyServed, Progress, Reply, ReportedError as _, Request, reply, request,
};
use permafrost_transport::control::{Connection, ControlError};
use permafrost_transport::framing::{self, FramingError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::LazyKeeper;
use super::keeper::RelayedRestore;
use permafrost_criu::frontend;

/// Interval at which children of the processes are looked for, and processes that have ended.
const TICK: Duration = Duration::from_millis(250);

/// Time limits of a keeper.
struct Limits {
    /// Time for CRIU to connect after the restore was admitted.
    connect: Duration,
    /// Time for CRIU to end by itself when its processes were killed.
    grace: Duration,
    /// Time for a daemon that has ended to come back.
    daemon: Duration,
}

impl Limits {
    fn new(daemon: Duration) -> Self {
        Self {
            connect: Duration::from_secs(60),
            grace: Duration::from_secs(2),
            daemon,
        }
    }
}

/// Interval at which a keeper tries to reach a daemon that has ended.
const DAEMON_TICK: Duration = Duration::from_millis(100);

/// Takes one Thaw from `command`, with the socket to which CRIU connects, sends it to the daemon and passes on the
/// replies. Keeps the processes until they lack no pages or have ended, also without the command. If the daemon ends, hands
/// the processes over to the one that comes back within `daemon_timeout`. If none does, ends the processes, and replies
/// with an empty message. CRIU restores from the directory `images`, and descends from process `parent`, or is its child's
/// sibling.
///
/// # Errors
/// The command sends something else; the daemon cannot be reached, which the command learns; no descriptor is left.
pub fn keep(
    command: &UnixStream,
    parent: u32,
    images: &Path,
    daemon_timeout: Duration,
    connect: impl Fn() -> Result<Connection, ControlError>,
) -> io::Result<()> {
    let limits = Limits::new(daemon_timeout);
    keep_within(&limits, command, parent, images, connect)
}

fn keep_within(
    limits: &Limits,
    command: &UnixStream,
    parent: u32,
    images: &Path,
    connect: impl Fn() -> Result<Connection, ControlError>,
) -> io::Result<()> {
    let received = framing::recv::<Request>(command).map_err(io::Error::other)?;
    let (request, mut fds) = received.ok_or(io::ErrorKind::UnexpectedEof)?;
    let (Some(request::Body::Thaw(thaw)), Some(listener)) = (request.body, fds.pop()) else {
        return Err(io::Error::other("another request"));
    };
    tracing::info!(
        event = "lazy-restore-begun",
        checkpoint = thaw.checkpoint,
        touched_only = thaw.touched_only,
        "lazy restore begins"
    );
    let (daemon, theirs) = UnixStream::pair()?;
    let begun = connect().and_then(|mut connection| {
        connection.begin(thaw.clone(), Some(theirs.as_fd()))?;
        let canceller = connection.canceller().map_err(ControlError::Send)?;
        Ok((connection, canceller))
    });
    drop(theirs);
    let (mut connection, canceller) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            tracing::error!(event = "lazy-restore-refused", %error, "no lazy restore");
            tell(command, Some(reply::Body::Error(error.to_reply())));
            return Err(io::Error::other(error));
        }
    };

    let keeper = LazyKeeper::default();
    let (admitted, admission) = UnixStream::pair()?;
    let mut admitted = Some(admitted);
    let (over, ticks) = mpsc::channel::<()>();
    let is_complete = thread::scope(|scope| {
        let keeper = &keeper;
        // The log says which keeper it is.
        let span = tracing::Span::current();
        let relaying = scope.spawn(move || {
            let _entered = span.enter();
            let listener = UnixListener::from(listener);
            let mut relayed = Ok(());
            match await_criu(&admission, &listener, command, limits.connect) {
                Some(criu) => {
                    relayed = keeper.relay(RelayedRestore {
                        criu: &criu,
                        listener: &listener,
                        daemon: &daemon,
                        images,
                        command: parent,
                    });
                    if let Err(error) = &relayed {
                        tracing::error!(event = "lazy-processes-not-passed", %error, "CRIU's processes are not passed on");
                    }
                }
                // The restore leaves the queue, or its slot. The daemon's reply still comes.
                None => canceller.end_requests(),
            }
            // The daemon gives up, unless it knows that all processes run.
            let _ = daemon.shutdown(Shutdown::Both);
            relayed
        });
        scope.spawn(move || {
            while ticks.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                keeper.refresh();
            }
        });
        let mut on_progress = |progress: &Progress, fds: Vec<OwnedFd>| {
            if progress.waiting.is_none() {
                admitted = None;
            }
            match fds.is_empty() {
                // A command that does not read must not keep this process from reading.
                true if keeper.has_criu() && !is_ready(command) => {}
                true => tell(command, Some(reply::Body::Progress(progress.clone()))),
                false if progress.is_log => fds.into_iter().for_each(|fd| keeper.set_log(fd)),
                false => fds.into_iter().for_each(|fd| keep_fork(keeper, fd)),
            }
        };
        let mut served = connection.finish_with::<request::Thaw>(&mut on_progress);
        let mut successors = Successors {
            keeper,
            thaw: &thaw,
            connect: &connect,
            timeout: limits.daemon,
            awaited: None,
        };
        while let Err(error) = &served
            && is_lost(error)
            && let Some(mut connection) = successors.next(error, &mut on_progress)
        {
            served = connection.finish_with::<request::Thaw>(&mut on_progress);
        }
        drop(admitted);
        drop(over);
        match &served {
            Ok(served) => tracing::info!(
                event = "lazy-restore-complete",
                bytes = served.bytes,
                faults = served.requests,
                "the restore is complete, or its processes have ended"
            ),
            Err(error) => {
                tracing::error!(event = "lazy-memory-stopped", %error, "the daemon brings no more memory")
            }
        }
        let is_complete = served.is_ok();
        let answer = answer_of(served);
        if is_complete {
            tell(command, answer);
            return true;
        }
        keeper.begin_end();
        // A command that has not started CRIU may wait for the answer first.
        let is_early = !keeper.has_criu();
        if is_early {
            tell(command, answer.clone());
        }
        keeper.end_criu(&|| relaying.is_finished(), limits.grace);
        let relayed = relaying.join();
        keeper.end();
        if !is_early {
            // The daemon only knows that CRIU's connection has ended.
            let answer = match relayed {
                Ok(Err(error)) => Some(reply::Body::Error(error.to_reply())),
                _ => answer,
            };
            tell(command, answer);
        }
        false
    });
    if !is_complete {
        keeper.hold_until_gone();
    }
    Ok(())
}

/// The daemons that come in the place of one that has ended.
struct Successors<'a, C> {
    keeper: &'a LazyKeeper,
    thaw: &'a request::Thaw,
    connect: C,
    /// Time for one to come. One that finds no pages for as long has not come.
    timeout: Duration,
    /// Time until which one may come, and time at which the last one came.
    awaited: Option<(Instant, Instant)>,
}

impl<C: Fn() -> Result<Connection, ControlError>> Successors<'_, C> {
    /// Waits for the next daemon, and hands the processes over to it; `None` if they cannot be, or none comes in time.
    /// `told` learns that the processes wait.
    fn next(
        &mut self,
        lost: &ControlError,
        told: &mut dyn FnMut(&Progress, Vec<OwnedFd>),
    ) -> Option<Connection> {
        let now = Instant::now();
        let has_ended = !matches!(lost, ControlError::Refused { .. });
        let until = match self.awaited {
            Some((until, came)) if !has_ended && now - came < self.timeout => until,
            _ if self.keeper.can_be_taken_over() => {
                tracing::warn!(
                    event = "lazy-daemon-awaited",
                    error = %lost,
                    seconds = self.timeout.as_secs(),
                    "the daemon brings no more memory: the processes wait for it to come back"
                );
                let awaited = Progress {
                    daemon_ended: true,
                    ..Progress::default()
                };
                told(&awaited, Vec::new());
                now + self.timeout
            }
            _ => return None,
        };
        while Instant::now() < until && self.keeper.can_be_taken_over() {
            thread::sleep(DAEMON_TICK);
            match self.hand_over() {
                Ok(connection) => {
                    self.awaited = Some((until, Instant::now()));
                    return Some(connection);
                }
                Err(error) => tracing::debug!(%error, "the daemon is not back"),
            }
        }
        None
    }

    fn hand_over(&self) -> Result<Connection, ControlError> {
        let taken = self.keeper.takeover().map_err(ControlError::Send)?;
        let (takeover, log) = taken.ok_or(ControlError::Closed)?;
        let (daemon, theirs) = UnixStream::pair().map_err(ControlError::Send)?;
        let thaw = request::Thaw {
            takeover: Some(takeover),
            ..self.thaw.clone()
        };
        let mut connection = (self.connect)()?;
        connection.begin_with_all(thaw, &[theirs.as_fd(), log.as_fd()])?;
        drop(theirs);
        // A daemon that does not take them says why.
        if let Err(error) = self.keeper.hand_over(&daemon) {
            tracing::debug!(%error, "the daemon does not take the processes");
        }
        Ok(connection)
    }
}

/// Returns true if the daemon has ended, or has given up as pages cannot be had now. One that lives and has not given up
/// reads events, which another would miss.
fn is_lost(error: &ControlError) -> bool {
    match error {
        ControlError::Closed | ControlError::Receive(FramingError::Truncated { .. }) => true,
        ControlError::Receive(FramingError::Io(error)) => {
            error.kind() == io::ErrorKind::ConnectionReset
        }
        ControlError::Refused { code, .. } => *code == ErrorCode::Unavailable,
        _ => false,
    }
}

/// Waits for CRIU to connect: as long as the restore is queued, and then for `patience`. Returns `None` if it does not,
/// or `command` hangs up before. `admission` ends when the restore is not queued any more.
fn await_criu(
    admission: &UnixStream,
    listener: &UnixListener,
    command: &UnixStream,
    patience: Duration,
) -> Option<UnixStream> {
    loop {
        let mut fds = [
            PollFd::new(admission, PollFlags::IN),
            PollFd::new(command, PollFlags::RDHUP | PollFlags::HUP),
        ];
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(_) if !fds[0].revents().is_empty() => break,
            _ => return None,
        }
    }
    match frontend::accept::<Infallible>(listener, command, patience) {
        Ok(criu) => Some(criu),
        Err(error) => {
            tracing::error!(event = "lazy-criu-absent", %error, "CRIU has not come");
            None
        }
    }
}

fn keep_fork(keeper: &LazyKeeper, userfault: OwnedFd) {
    if let Err(error) = keeper.add_fork(userfault) {
        tracing::warn!(event = "lazy-fork-not-kept", %error, "forked process not kept");
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

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::path::PathBuf;

    use parking_lot::Mutex;

    use permafrost_protocol::control::{self, ErrorCode, Progress, Waiting};

    use super::*;

    /// Time limit for what does not come if the keeper is wrong.
    const LIMIT: Duration = Duration::from_secs(20);

    /// CRIU must be there when the restore is admitted. It is this process, and not killed.
    const IMPATIENT: Limits = Limits {
        connect: Duration::ZERO,
        grace: Duration::MAX,
        daemon: Duration::ZERO,
    };

    /// A keeper with a Thaw, and both of its peers.
    struct Rig {
        command: UnixStream,
        daemon: UnixStream,
        /// Sends nothing, and ends with the keeper.
        ended: mpsc::Receiver<()>,
        socket: PathBuf,
        _work: tempfile::TempDir,
    }

    fn no_daemon() -> ControlError {
        ControlError::Unreachable {
            path: PathBuf::from("/nowhere"),
            source: io::ErrorKind::NotFound.into(),
        }
    }

    impl Rig {
        fn start(is_reachable: bool) -> Self {
            let work = tempfile::tempdir().unwrap();
            let socket = work.path().join("lazy-pages.socket");
            let listener = UnixListener::bind(&socket).unwrap();
            let (command, own) = UnixStream::pair().unwrap();
            let (daemon, to_daemon) = UnixStream::pair().unwrap();
            command.set_read_timeout(Some(LIMIT)).unwrap();
            daemon.set_read_timeout(Some(LIMIT)).unwrap();
            let request = Request {
                version: 1,
                body: Some(request::Body::Thaw(request::Thaw::default())),
            };
            framing::send(&command, &request, &[listener.as_fd()]).unwrap();
            let (sender, ended) = mpsc::channel();
            thread::spawn(move || {
                let _sender = sender;
                let daemon = Mutex::new(is_reachable.then_some(to_daemon));
                let connect = || {
                    let daemon = daemon.lock().take();
                    daemon.map(Connection::from_stream).ok_or_else(no_daemon)
                };
                let _ = keep_within(
                    &IMPATIENT,
                    &own,
                    std::process::id(),
                    Path::new("/"),
                    connect,
                );
            });
            Self {
                command,
                daemon,
                ended,
                socket,
                _work: work,
            }
        }

        /// Receives the Thaw as the daemon does. Returns the connection on which CRIU's messages are passed on.
        fn take(&self) -> UnixStream {
            let (_, mut fds) = framing::recv::<Request>(&self.daemon).unwrap().unwrap();
            UnixStream::from(fds.pop().unwrap())
        }

        /// Sends a reply as the daemon does, and returns what the command receives.
        fn pass_on(&self, body: reply::Body) -> Option<reply::Body> {
            framing::send(&self.daemon, &Reply { body: Some(body) }, &[]).unwrap();
            self.receive()
        }

        fn receive(&self) -> Option<reply::Body> {
            let (reply, _) = framing::recv::<Reply>(&self.command).unwrap().unwrap();
            reply.body
        }

        fn wait_for_the_end(&self) {
            let ended = self.ended.recv_timeout(LIMIT);
            assert_eq!(ended, Err(RecvTimeoutError::Disconnected));
        }
    }

    fn queued() -> reply::Body {
        reply::Body::Progress(Progress {
            waiting: Some(Waiting::default()),
            ..Progress::default()
        })
    }

    fn connect(socket: &Path) -> UnixStream {
        UnixStream::connect(socket).unwrap()
    }

    #[test]
    fn the_time_limit_for_criu_begins_when_the_restore_is_admitted() {
        let rig = Rig::start(true);
        let daemon = rig.take();
        for _ in 0..3 {
            assert_eq!(rig.pass_on(queued()), Some(queued()));
        }
        let mut criu = connect(&rig.socket);
        let admitted = reply::Body::Progress(Progress::default());
        assert_eq!(rig.pass_on(admitted.clone()), Some(admitted));
        let zombie = (-7_i32).to_ne_bytes();
        io::Write::write_all(&mut criu, &zombie).unwrap();
        let mut word = [0; 4];
        daemon.set_read_timeout(Some(LIMIT)).unwrap();
        (&daemon).read_exact(&mut word).unwrap();
        assert_eq!(word, zombie);
        drop(criu);
        assert_eq!((&daemon).read(&mut word).unwrap(), 0);
        let served = reply::Body::LazyServed(LazyServed::default());
        assert_eq!(rig.pass_on(served.clone()), Some(served));
        rig.wait_for_the_end();
    }

    #[test]
    fn a_restore_given_up_in_the_queue_leaves_it() {
        let mut rig = Rig::start(true);
        let _daemon = rig.take();
        assert_eq!(rig.pass_on(queued()), Some(queued()));
        rig.command.shutdown(Shutdown::Write).unwrap();
        // The daemon's queue sees the end of the connection, and its reply still comes.
        assert_eq!(rig.daemon.read(&mut [0]).unwrap(), 0);
        let error = reply::Body::Error(control::Error {
            code: ErrorCode::Conflict.into(),
            message: "given up".to_owned(),
            hint: String::new(),
        });
        assert_eq!(rig.pass_on(error.clone()), Some(error));
        rig.wait_for_the_end();
    }

    #[test]
    fn a_daemon_that_cannot_be_reached_is_reported() {
        let rig = Rig::start(false);
        let Some(reply::Body::Error(error)) = rig.receive() else {
            panic!("no error");
        };
        assert_eq!(error.message, no_daemon().to_string());
        rig.wait_for_the_end();
    }
}
