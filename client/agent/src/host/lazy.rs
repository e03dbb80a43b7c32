//! Pages of a checkpoint for processes that CRIU hands over while it restores them: for those that already run (Thaw), or
//! before they run (Place); and for `criu lazy-pages` (Lend).

use std::convert::Infallible;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use permafrost_criu::frontend::{self, LentCheckpoint, StreamError};
use permafrost_criu::source::LazySource;
use permafrost_lazy::{
    LazyBrought, LazyEvent, LazyFailure, LazyOrder, OrphanedRestore, PlacingSockets, TouchedPages,
};
use permafrost_protocol::control::{self, Reply, ReportedError as _, reply, request};
use permafrost_protocol::manifest::JobName;
use permafrost_transport::framing;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::AddressFamily;
use tokio::sync::Semaphore;

use super::backend::{Lent, PlacingEvent};
use super::control::Caller;
use super::endpoints::{self, Connection, Standing};
use super::error::{DeniedError, RequestError};
use super::lazy_restores::LazyRestore;
use super::{Backend, Client, Shared};

/// Interval at which a source on other nodes is held.
const HOLD_PERIOD: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

/// Pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Most connections to one lent checkpoint at once: each has a thread.
const CONNECTIONS: usize = 256;

/// Brings the pages of a checkpoint to the processes that CRIU hands over on `criu`. `restore` is under way until the
/// caller has its reply.
pub(super) fn thaw<B: Backend>(
    shared: &Shared<B>,
    stream: &UnixStream,
    thaw: &request::Thaw,
    fds: Vec<OwnedFd>,
    restore: &mut Option<LazyRestore>,
) -> Result<control::LazyServed, control::Error> {
    let mut fds = fds.into_iter();
    let criu = fds.next().ok_or(RequestError::NoDescriptor)?;
    let takeover = match &thaw.takeover {
        None => None,
        Some(takeover) => Some(OrphanedRestore {
            pids: &takeover.pids,
            forks: takeover.forks,
            log: fds.next().ok_or(RequestError::NoDescriptor)?,
        }),
    };
    let takeover = takeover.as_ref();
    let backend = &*shared.backend;
    let restore = restore.insert(shared.lazy_restores.begin());
    let criu = UnixStream::from(criu);
    let wanted = Lent {
        checkpoint: &thaw.checkpoint,
        queued: (!thaw.touched_only).then_some(thaw),
    };
    backend.lend(&wanted, &mut Caller(stream), &mut |source, gate| {
        restore.waits_at(gate);
        source.hold();
        let begun = has_begun(&criu, stream, &HOLD_PERIOD, &mut || source.hold());
        if !begun.map_err(endpoints::failed("wait for CRIU"))? {
            return Err(RequestError::NobodyCame.into());
        }
        let known = backend.touched(source.record());
        let none = TouchedPages::default();
        let order = LazyOrder {
            touched_only: thaw.touched_only,
            first: if thaw.hybrid { &known } else { &none },
            gate,
        };
        let brought = permafrost_lazy::bring(&criu, takeover, source, order, &mut |event| {
            tell(stream, &event);
        });
        match brought {
            Ok(LazyBrought {
                faults,
                bytes,
                touched,
                rest,
            }) => {
                // Where everything is brought, most accesses come too late to be seen, and a daemon that has ended has told
                // nobody.
                let is_all = thaw.touched_only && takeover.is_none();
                let mut order = if is_all { none } else { known };
                order.extend(&touched);
                backend.record_touched(source.record(), &order);
                let (rest_bytes, rest) = rest.unwrap_or_default();
                Ok(control::LazyServed {
                    rest_bytes,
                    rest_us: u64::try_from(rest.as_micros()).unwrap_or(u64::MAX),
                    ..served(source, faults, bytes)
                })
            }
            Err(failure) => {
                let error = failure.error.to_reply();
                tracing::error!(
                    event = "lazy-pages-missing",
                    checkpoint = thaw.checkpoint,
                    error = error.message,
                    "processes lack pages"
                );
                // The caller has duplicates, and ends the processes, unless it was killed.
                hold(failure);
                Err(error)
            }
        }
    })
}

/// Time for CRIU to connect after the restore was admitted.
const CRIU_PATIENCE: Duration = Duration::from_secs(60);

/// Places the pages of a checkpoint in the processes that CRIU hands over, before they run. CRIU and its action script
/// connect to `listener`.
pub(super) fn place<B: Backend>(
    backend: &B,
    stream: &UnixStream,
    place: &request::Place,
    listener: OwnedFd,
) -> Result<control::LazyServed, control::Error> {
    let listener = UnixListener::from(listener);
    backend.place(place, &mut Caller(stream), &mut |source, gate, told| {
        source.hold();
        let criu = frontend::accept::<Infallible>(&listener, stream, CRIU_PATIENCE);
        let criu = criu.map_err(|error| match error {
            StreamError::NobodyCame => RequestError::NobodyCame,
            other => endpoints::failed("accept CRIU")(std::io::Error::other(other.to_string())),
        })?;
        told(PlacingEvent::Begun);
        let sockets = PlacingSockets {
            criu: &criu,
            listener: &listener,
            caller: stream,
        };
        let placed = permafrost_lazy::place(sockets, source, gate, &mut |bytes| {
            told(PlacingEvent::Placed(bytes));
        });
        placed
            .map(|brought| served(source, brought.faults, brought.bytes))
            .map_err(|failure| {
                let error = failure.error.to_reply();
                tracing::error!(
                    event = "pages-not-placed",
                    checkpoint = place.checkpoint,
                    error = error.message,
                    "the restore is given up"
                );
                hold(failure);
                error
            })
    })
}

/// Keeps processes that lack pages waiting until they have ended: they must not go on with zeros in place of their memory.
fn hold(failure: LazyFailure) {
    if !failure.held.is_empty() {
        std::thread::spawn(move || failure.hold_until_gone());
    }
}

/// Waits until CRIU hands something over, or has gone. Returns false if the caller goes before. CRIU restores files,
/// mappings and shared memory first, which has no time limit: calls `hold` once a `period`.
fn has_begun(
    criu: &UnixStream,
    caller: &UnixStream,
    period: &Timespec,
    hold: &mut dyn FnMut(),
) -> std::io::Result<bool> {
    loop {
        let mut fds = [
            PollFd::new(criu, PollFlags::IN),
            PollFd::new(caller, PollFlags::RDHUP | PollFlags::HUP),
        ];
        match poll(&mut fds, Some(period)) {
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
            Ok(0) => hold(),
            Ok(_) => return Ok(fds[0].revents().contains(PollFlags::IN)),
        }
    }
}

/// Tells the caller what happens. One that has gone is told nothing, and the transfer goes on.
fn tell(stream: &UnixStream, event: &LazyEvent<'_>) {
    let mut progress = control::Progress::default();
    let descriptor = match event {
        LazyEvent::Progress {
            done_bytes,
            total_bytes,
        } => {
            progress.done_bytes = *done_bytes;
            progress.total_bytes = *total_bytes;
            None
        }
        LazyEvent::Forked(userfault) => Some(userfault.as_fd()),
        LazyEvent::Logged(log) => {
            progress.is_log = true;
            Some(*log)
        }
    };
    let body = Some(reply::Body::Progress(progress));
    if let Err(error) = framing::send(stream, &Reply { body }, descriptor.as_slice()) {
        tracing::debug!(%error, "progress not sent");
    }
}

fn served(source: &dyn LazySource, requests: u64, bytes: u64) -> control::LazyServed {
    control::LazyServed {
        checkpoint: Some(source.record().clone()),
        requests,
        bytes,
        ..control::LazyServed::default()
    }
}

/// Serves the pages of a checkpoint to each `criu lazy-pages` that connects to `listener`, until the caller hangs up
/// and the connections have ended.
pub(super) fn lend<B: Backend>(
    shared: &Shared<B>,
    stream: &UnixStream,
    lend: &request::Lend,
    listener: OwnedFd,
) -> Result<control::LazyServed, control::Error> {
    let listener = Listener::new(listener).map_err(endpoints::failed("listen for CRIU"))?;
    let wanted = Lent {
        checkpoint: &lend.checkpoint,
        queued: None,
    };
    shared
        .backend
        .lend(&wanted, &mut Caller(stream), &mut |source, _| {
            let lent = LentCheckpoint::new(source)?;
            source.hold();
            let places = Arc::new(Semaphore::new(CONNECTIONS));
            std::thread::scope(|scope| {
                while let Some(connection) = listener.accept_until_gone(stream, &|| source.hold()) {
                    let connection = match connection {
                        Ok(connection) => connection,
                        Err(error) => {
                            tracing::warn!(event = "connection-not-accepted", %error, "connection not accepted");
                            if error.kind() == std::io::ErrorKind::InvalidInput {
                                break;
                            }
                            // No descriptors are left, for example.
                            std::thread::sleep(ACCEPT_PAUSE);
                            continue;
                        }
                    };
                    let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                        shared.places.refused("too many connections at once");
                        continue;
                    };
                    let (lent, name) = (&lent, &lend.checkpoint);
                    let serving = std::thread::Builder::new().spawn_scoped(scope, move || {
                        let _place = place;
                        serve(shared, source, lent, name, connection);
                    });
                    if let Err(error) = serving {
                        tracing::warn!(event = "lazy-thread-failed", %error, "no thread for a connection");
                    }
                }
            });
            let (requests, bytes) = lent.served();
            Ok(served(source, requests, bytes))
        })
}

/// Serves one connection, if its remote end may read the checkpoint.
fn serve<B: Backend>(
    shared: &Shared<B>,
    source: &dyn LazySource,
    lent: &LentCheckpoint<'_>,
    name: &str,
    connection: Connection,
) {
    let mut client = connection.client(None);
    let job = &source.record().job;
    let outcome = admit(shared, job, connection, &mut client).and_then(|connection| {
        // CRIU's daemon brings everything by itself.
        let _restore = shared.lazy_restores.begin();
        converse(connection, lent)
    });
    if let Err(error) = &outcome {
        shared.places.refused(&error.message);
    }
    if let Some(client) = client {
        shared
            .backend
            .lent(&client, name, outcome.as_ref().copied());
    }
}

fn converse(connection: Connection, lent: &LentCheckpoint<'_>) -> Result<(), control::Error> {
    let outcome = match connection {
        Connection::Unix(mut stream) => frontend::lend(&mut stream, lent),
        Connection::Tcp(mut stream) => frontend::lend(&mut stream, lent),
        Connection::Tls(mut stream) => {
            let outcome = frontend::lend(&mut *stream, lent);
            if let Err(error) = stream.close() {
                tracing::debug!(%error, "end of TLS not told");
            }
            outcome
        }
    };
    outcome.map_err(|error| {
        let reason = error.to_string();
        RequestError::Conversation { reason }.into()
    })
}

/// Decides whether a connection may read a job's pages, by its user or its certificate, which `client` gets to know.
fn admit<B: Backend>(
    shared: &Shared<B>,
    job: &str,
    connection: Connection,
    client: &mut Option<Client>,
) -> Result<Connection, control::Error> {
    let options = &shared.options;
    let idle = options.idle_connection;
    if let Connection::Unix(stream) = &connection {
        // The caller has made the socket: its mode says nothing about who may read the job.
        let peer = rustix::net::sockopt::socket_peercred(stream);
        let uid = peer.map_err(|error| endpoints::failed("find out the user")(error.into()))?;
        let uid = uid.uid.as_raw();
        if !options.admits(uid) {
            let reason =
                format!("user {uid} may not read pages (--listen-uid {uid} admits this user)");
            return Err(RequestError::Conversation { reason }.into());
        }
    }
    let (standing, uid) = endpoints::admit(shared, &connection)
        .map_err(|reason| RequestError::Conversation { reason })?;
    *client = connection.client(uid);
    // Whoever reaches the port of a dump can store pages; nobody may read memory for that reason alone.
    if standing == Standing::Stranger && options.tls.is_none() {
        return Err(DeniedError::Plaintext.into());
    }
    let came = connection.first_byte(idle, idle);
    if !came.map_err(endpoints::failed("wait for CRIU"))? {
        return Err(RequestError::NobodyCame.into());
    }
    let admitted = standing == Standing::Admitted;
    let connection = connection.secure(options.tls.as_ref(), admitted, idle)?;
    *client = connection.client(uid);
    let job: JobName = job.parse().map_err(DeniedError::from)?;
    connection.authorize_read(&job)?;
    Ok(connection)
}

/// Socket on which `criu lazy-pages` is awaited.
enum Listener {
    Unix(UnixListener),
    Tcp(std::net::TcpListener),
}

impl Listener {
    fn new(fd: OwnedFd) -> std::io::Result<Self> {
        let address = rustix::net::getsockname(&fd)?;
        let listener = match address.address_family() {
            AddressFamily::UNIX => Self::Unix(fd.into()),
            AddressFamily::INET | AddressFamily::INET6 => Self::Tcp(fd.into()),
            _ => return Err(std::io::ErrorKind::Unsupported.into()),
        };
        match &listener {
            Self::Unix(listener) => listener.set_nonblocking(true)?,
            Self::Tcp(listener) => listener.set_nonblocking(true)?,
        }
        Ok(listener)
    }

    /// Accepts the next connection; `None` once `caller` has hung up. Calls `hold` now and then.
    fn accept_until_gone(
        &self,
        caller: &UnixStream,
        hold: &dyn Fn(),
    ) -> Option<std::io::Result<Connection>> {
        let fd = match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        };
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(fd, PollFlags::IN),
                PollFd::new(caller, PollFlags::RDHUP | PollFlags::HUP),
            ];
            match poll(&mut fds, Some(&HOLD_PERIOD)) {
                Err(rustix::io::Errno::INTR) => continue,
                Ok(0) => {
                    hold();
                    continue;
                }
                Err(errno) => {
                    tracing::error!(event = "listener-not-watched", %errno, "listener not watched");
                    return None;
                }
                Ok(_) => {}
            }
            if !fds[1].revents().is_empty() {
                return None;
            }
            let accepted = match self {
                Self::Unix(listener) => listener.accept().map(|(s, _)| Connection::Unix(s)),
                Self::Tcp(listener) => listener.accept().map(|(s, _)| Connection::Tcp(s)),
            };
            match accepted {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                accepted => return Some(accepted),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_criu_that_hands_nothing_over_yet_is_waited_for_and_its_pages_are_held() {
        let (criu, mut its_end) = UnixStream::pair().unwrap();
        let (caller, its_caller) = UnixStream::pair().unwrap();
        let period = Timespec {
            tv_sec: 0,
            tv_nsec: 1_000_000,
        };
        let mut holds = 0;
        let begun = has_begun(&criu, &caller, &period, &mut || {
            holds += 1;
            if holds == 3 {
                its_end.write_all(&[0]).unwrap();
            }
        });
        assert!(begun.unwrap());
        assert_eq!(holds, 3);

        let (criu, _its_end) = UnixStream::pair().unwrap();
        let mut its_caller = Some(its_caller);
        let begun = has_begun(&criu, &caller, &period, &mut || {
            drop(its_caller.take());
        });
        assert!(!begun.unwrap());
    }
}
