//! A client's connection to the daemon's control socket.
//!
//! One request at a time: [`Connection::call`] sends it, passes progress to the caller as it comes, and returns
//! the typed reply. [`Call`] fixes the reply for each request.

use std::io;
use std::net::Shutdown;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use permafrost_protocol::control::{
    self, Checkpoint, CheckpointContents, Checkpoints, Denials, Detail, Done, ErrorCode, Exported,
    GcReport, KeyList, LazyServed, NodeList, Progress, Pruned, Rebuilt, RegionMedia, Reply,
    ReportedError, Request, Reserved, RetentionRules, Scrubbed, ServerStatus, SessionOpened,
    Verified, reply, request,
};

use crate::framing::{self, FramingError};

/// Default path of the daemon's control socket.
pub const DEFAULT_SOCKET: &str = "/run/permafrost/control.sock";

/// Name of the daemon's page-server socket, which lies beside the control socket.
const PAGE_SERVER_SOCKET: &str = "page-server.sock";

/// Environment variable that names the control socket.
pub const SOCKET_VARIABLE: &str = "PERMAFROST_SOCKET";

/// A request that got no reply.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No process listens on the control socket, or the caller may not open it.
    ///
    /// Cure: start permafrostd, or name its control socket with `--socket` or `PERMAFROST_SOCKET`.
    #[error("cannot reach permafrostd at {}: {source}", path.display())]
    Unreachable {
        /// Path of the control socket.
        path: PathBuf,
        /// Error of the connection attempt.
        source: io::Error,
    },
    /// The request could not be sent.
    ///
    /// Cure: permafrostd has stopped meanwhile: its log says why; run the command again.
    #[error("send control request: {0}")]
    Send(#[source] io::Error),
    /// The reply could not be received.
    #[error(transparent)]
    Receive(#[from] FramingError),
    /// The daemon closed the connection before it replied.
    ///
    /// Cure: permafrostd has stopped meanwhile: its log says why; run the command again.
    #[error("permafrostd closed the connection without an answer")]
    Closed,
    /// The daemon refused the request.
    #[error("{message}")]
    Refused {
        /// Kind of the refusal.
        code: ErrorCode,
        /// Description of the error.
        message: String,
        /// Advice on how to correct it; may be empty.
        hint: String,
    },
    /// The daemon's reply does not fit the request: another version.
    ///
    /// Cure: use the same version of `permafrost` and `permafrostd` (`permafrost status`).
    #[error("unexpected answer from permafrostd, {expected} was due")]
    Unexpected {
        /// Name of the expected reply.
        expected: &'static str,
    },
}

impl ReportedError for ControlError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Refused { code, .. } => *code,
            _ => ErrorCode::Unavailable,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Refused { hint, .. } => hint,
            _ => "",
        }
    }
}

/// A request, and the type of its reply.
pub trait Call {
    /// Type of the reply.
    type Answer: ReplyBody;
    /// Returns the request's body on the wire.
    fn into_body(self) -> request::Body;
}

/// A reply to a request.
pub trait ReplyBody: Sized {
    /// Name of the reply in messages.
    const NAME: &'static str;
    /// Returns the reply, if `body` is one of this type.
    fn from_body(body: reply::Body) -> Option<Self>;
}

macro_rules! answers {
    ($($variant:ident($message:ident)),* $(,)?) => {$(
        impl ReplyBody for $message {
            const NAME: &'static str = stringify!($message);
            fn from_body(body: reply::Body) -> Option<Self> {
                match body {
                    reply::Body::$variant(message) => Some(message),
                    _ => None,
                }
            }
        }
    )*};
}

macro_rules! calls {
    ($($request:ident -> $answer:ident),* $(,)?) => {$(
        impl Call for request::$request {
            type Answer = $answer;
            fn into_body(self) -> request::Body {
                request::Body::$request(self)
            }
        }
    )*};
}

answers! {
    SessionOpened(SessionOpened),
    Checkpoint(Checkpoint),
    Checkpoints(Checkpoints),
    Detail(Detail),
    Done(Done),
    Verified(Verified),
    Exported(Exported),
    LazyServed(LazyServed),
    Status(ServerStatus),
    Nodes(NodeList),
    Rebuilt(Rebuilt),
    Scrubbed(Scrubbed),
    GcReport(GcReport),
    Retention(RetentionRules),
    Pruned(Pruned),
    Reserved(Reserved),
    RegionMedia(RegionMedia),
    KeyList(KeyList),
    Denials(Denials),
    Contents(CheckpointContents),
}

calls! {
    Open -> SessionOpened,
    Seal -> Checkpoint,
    Abort -> Done,
    Adopt -> Checkpoint,
    List -> Checkpoints,
    Show -> Detail,
    Remove -> Done,
    Pin -> Checkpoint,
    Verify -> Verified,
    Export -> Exported,
    Import -> Checkpoint,
    Stream -> Exported,
    Lend -> LazyServed,
    Thaw -> LazyServed,
    TakeSpace -> Done,
    EndPages -> Done,
    Place -> LazyServed,
    Status -> ServerStatus,
    Nodes -> NodeList,
    SetNode -> NodeList,
    Rebuild -> Rebuilt,
    SetLevel -> NodeList,
    Scrub -> Scrubbed,
    Gc -> GcReport,
    SetRetention -> RetentionRules,
    ShowRetention -> RetentionRules,
    Prune -> Pruned,
    Reserve -> Reserved,
    CancelReservation -> Done,
    Took -> Done,
    Media -> RegionMedia,
    Keys -> KeyList,
    Describe -> CheckpointContents,
    Deny -> Denials,
}

/// A connection to the daemon.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
}

impl Connection {
    /// Connects to the control socket at `path`.
    ///
    /// # Errors
    /// [`ControlError::Unreachable`].
    pub fn connect(path: &Path) -> Result<Self, ControlError> {
        let unreachable = |source| ControlError::Unreachable {
            path: path.to_owned(),
            source,
        };
        if path
            .file_name()
            .is_some_and(|name| name == PAGE_SERVER_SOCKET)
        {
            // The page server would take the request for the beginning of a dump, and wait for more.
            let source = io::Error::new(
                io::ErrorKind::InvalidInput,
                "that socket is for CRIU; the control socket is control.sock beside it",
            );
            return Err(unreachable(source));
        }
        UnixStream::connect(path)
            .map(Self::from_stream)
            .map_err(unreachable)
    }

    /// Returns a connection over a stream that is connected already.
    pub fn from_stream(stream: UnixStream) -> Self {
        Self { stream }
    }

    /// Returns a handle that ends the connection from another thread: a call that waits returns
    /// [`ControlError::Closed`], and the daemon drops the sessions that are bound to the connection.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn canceller(&self) -> io::Result<Canceller> {
        self.stream.try_clone().map(Canceller)
    }

    /// Makes every wait for the daemon end after `limit`, for callers that go on without a reply. The
    /// connection is not usable after such an end.
    ///
    /// # Errors
    /// The kernel refuses the time limit.
    pub fn limit_waits(&self, limit: Duration) -> io::Result<()> {
        self.stream.set_read_timeout(Some(limit))?;
        self.stream.set_write_timeout(Some(limit))
    }

    /// Returns the pid of the process at the other end, if it is visible in this pid namespace.
    pub fn peer_pid(&self) -> Option<u32> {
        let peer = rustix::net::sockopt::socket_peercred(&self.stream).ok()?;
        u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
    }

    /// Sends a request without a directory and waits for its reply, skipping progress.
    ///
    /// # Errors
    /// See [`ControlError`]; a refusal leaves the connection usable.
    pub fn call<C: Call>(&mut self, request: C) -> Result<C::Answer, ControlError> {
        self.call_with(request, None, &mut |_| {})
    }

    /// Sends a request, with its descriptor, and waits for its reply. Progress goes to `on_progress` as it
    /// comes.
    ///
    /// # Errors
    /// See [`ControlError`]; a refusal leaves the connection usable.
    pub fn call_with<C: Call>(
        &mut self,
        request: C,
        descriptor: Option<BorrowedFd<'_>>,
        on_progress: &mut dyn FnMut(&Progress),
    ) -> Result<C::Answer, ControlError> {
        self.begin(request, descriptor)?;
        self.finish::<C>(on_progress)
    }

    /// Sends a request whose reply [`Connection::finish`] waits for: in between, the caller does the part that
    /// the daemon needs before it can reply.
    ///
    /// # Errors
    /// [`ControlError::Send`].
    pub fn begin<C: Call>(
        &mut self,
        request: C,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), ControlError> {
        self.begin_with_all(request, descriptor.as_slice())
    }

    /// Sends a request with several descriptors, at most [`framing::MAX_FDS`], and waits for its reply.
    ///
    /// # Errors
    /// See [`ControlError`]; a refusal leaves the connection usable.
    pub fn call_with_all<C: Call>(
        &mut self,
        request: C,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<C::Answer, ControlError> {
        self.begin_with_all(request, descriptors)?;
        self.finish::<C>(&mut |_| {})
    }

    /// Sends a request with several descriptors as [`Connection::begin`] does, at most [`framing::MAX_FDS`].
    ///
    /// # Errors
    /// [`ControlError::Send`].
    pub fn begin_with_all<C: Call>(
        &mut self,
        request: C,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), ControlError> {
        let request = Request::new(request.into_body());
        framing::send(&self.stream, &request, descriptors).map_err(ControlError::Send)
    }

    /// Announces that no other request follows; the reply that is due still comes.
    pub fn end_requests(&self) {
        // NotConnected is the only failure here: the daemon is gone, which the read of the reply will report.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Waits until the daemon reports that the current request is admitted; `on_progress` receives its place in
    /// the queue. A request that is answered before it begins is refused.
    ///
    /// # Errors
    /// See [`ControlError`]; a refusal leaves the connection usable.
    pub fn await_turn(
        &mut self,
        on_progress: &mut dyn FnMut(&Progress),
    ) -> Result<(), ControlError> {
        loop {
            let (reply, _fds) =
                framing::recv::<Reply>(&self.stream)?.ok_or(ControlError::Closed)?;
            match reply.body {
                Some(reply::Body::Progress(progress)) => {
                    on_progress(&progress);
                    if progress.waiting.is_none() {
                        return Ok(());
                    }
                }
                Some(reply::Body::Error(error)) => return Err(refused(error)),
                _ => {
                    let expected = "Progress";
                    return Err(ControlError::Unexpected { expected });
                }
            }
        }
    }

    /// Waits for the reply to the request that [`Connection::begin`] sent.
    ///
    /// # Errors
    /// See [`ControlError`]; a refusal leaves the connection usable.
    pub fn finish<C: Call>(
        &mut self,
        on_progress: &mut dyn FnMut(&Progress),
    ) -> Result<C::Answer, ControlError> {
        self.finish_with::<C>(&mut |progress, _fds| on_progress(progress))
    }

    /// Waits for the reply as [`Connection::finish`] does, and passes on the descriptors that progress carries.
    ///
    /// # Errors
    /// Those of [`Connection::finish`].
    pub fn finish_with<C: Call>(
        &mut self,
        on_progress: &mut dyn FnMut(&Progress, Vec<OwnedFd>),
    ) -> Result<C::Answer, ControlError> {
        loop {
            let (reply, fds) = framing::recv::<Reply>(&self.stream)?.ok_or(ControlError::Closed)?;
            match reply.body {
                Some(reply::Body::Progress(progress)) => on_progress(&progress, fds),
                Some(reply::Body::Error(error)) => return Err(refused(error)),
                other => {
                    return other
                        .and_then(C::Answer::from_body)
                        .ok_or(ControlError::Unexpected {
                            expected: C::Answer::NAME,
                        });
                }
            }
        }
    }
}

fn refused(error: control::Error) -> ControlError {
    ControlError::Refused {
        code: error.code(),
        message: error.message,
        hint: error.hint,
    }
}

/// Handle that ends a [`Connection`] from another thread.
#[derive(Debug)]
pub struct Canceller(UnixStream);

impl Canceller {
    /// Ends the connection, in both directions. A connection that has already ended is not an error.
    pub fn cancel(&self) {
        // NotConnected is the only failure here: the daemon was faster.
        let _ = self.0.shutdown(Shutdown::Both);
    }

    /// Announces that no other request follows, as [`Connection::end_requests`] does.
    pub fn end_requests(&self) {
        let _ = self.0.shutdown(Shutdown::Write);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::thread;

    use super::*;

    fn daemon(
        answers: Vec<reply::Body>,
    ) -> (Connection, thread::JoinHandle<Vec<(Request, usize)>>) {
        let (here, there) = UnixStream::pair().unwrap();
        let serving = thread::spawn(move || {
            let mut seen = Vec::new();
            if let Some((request, fds)) = framing::recv::<Request>(&there).unwrap() {
                seen.push((request, fds.len()));
                for body in answers {
                    framing::send(&there, &Reply { body: Some(body) }, &[]).unwrap();
                }
            }
            seen
        });
        (Connection::from_stream(here), serving)
    }

    #[test]
    fn progress_precedes_the_answer_and_the_directory_rides_along() {
        let (mut connection, serving) = daemon(vec![
            reply::Body::Progress(Progress {
                done_bytes: 1,
                total_bytes: 2,
                ..Progress::default()
            }),
            reply::Body::Progress(Progress {
                done_bytes: 2,
                total_bytes: 2,
                ..Progress::default()
            }),
            reply::Body::Exported(Exported {
                files: 7,
                ..Exported::default()
            }),
        ]);
        let directory = tempfile::tempdir().unwrap();
        let directory = std::fs::File::open(directory.path()).unwrap();
        let mut seen = Vec::new();
        let exported = connection
            .call_with(
                request::Export {
                    checkpoint: "job@1".to_owned(),
                    ..request::Export::default()
                },
                Some(directory.as_fd()),
                &mut |progress| seen.push(progress.done_bytes),
            )
            .unwrap();
        assert_eq!((exported.files, seen), (7, vec![1, 2]));
        let requests = serving.join().unwrap();
        assert_eq!(requests.len(), 1);
        assert_eq!(requests[0].0.version, 1);
        assert_eq!(requests[0].1, 1);
    }

    #[test]
    fn refusals_keep_code_and_hint() {
        let (mut connection, _serving) = daemon(vec![reply::Body::Error(control::Error {
            code: ErrorCode::NoSpace.into(),
            message: "region is full".to_owned(),
            hint: "remove a checkpoint".to_owned(),
        })]);
        match connection.call(request::Status {}) {
            Err(ControlError::Refused {
                code: ErrorCode::NoSpace,
                message,
                hint,
            }) => {
                assert_eq!(
                    (message.as_str(), hint.as_str()),
                    ("region is full", "remove a checkpoint")
                );
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_wrong_answer_and_a_vanished_daemon_are_errors() {
        let (mut connection, _serving) = daemon(vec![reply::Body::Done(Done { count: 1 })]);
        assert!(matches!(
            connection.call(request::Status {}),
            Err(ControlError::Unexpected {
                expected: "ServerStatus"
            })
        ));
        let (mut connection, serving) = daemon(vec![]);
        assert!(matches!(
            connection.call(request::Status {}),
            Err(ControlError::Closed)
        ));
        serving.join().unwrap();
        assert!(matches!(
            Connection::connect(Path::new("/nonexistent/control.sock")),
            Err(ControlError::Unreachable { .. })
        ));
    }

    #[test]
    fn cancelling_wakes_a_waiting_call() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut connection = Connection::from_stream(here);
        let canceller = connection.canceller().unwrap();
        let waiting = thread::spawn(move || connection.call(request::Status {}).unwrap_err());
        framing::recv::<Request>(&there).unwrap().unwrap();
        canceller.cancel();
        assert!(matches!(waiting.join().unwrap(), ControlError::Closed));
    }
}
