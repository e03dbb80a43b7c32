//! Page-server endpoints: the well-known port and socket for anonymous dumps, and a pair for each session.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use permafrost_criu::frontend::{self, ConversationEnd, PipeRoom};
use permafrost_identity::{Action, CriuTls, TlsStream, begins_with_tls};
use permafrost_protocol::control::{self, ReportedError, request};
use permafrost_protocol::manifest::JobName;
use rustix::net::RecvFlags;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;

use super::error::{DeniedError, RequestError};
use super::limits::{self, FIRST_BYTE};
use super::owner::peer_uid;
use super::{Backend, Client, DumpSession, Patiently, Shared, bind_unix, remove_socket};

/// Pause after an accept that failed, so that a lack of descriptors does not become a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time limit of a TLS handshake: the task is frozen meanwhile.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);

/// A connection that may bring a dump.
pub(super) enum Connection {
    Unix(StdUnixStream),
    Tcp(std::net::TcpStream),
    Tls(Box<TlsStream>),
}

impl Connection {
    /// Waits for the peer's first byte, `limit` at most. Returns false if the peer leaves without one.
    pub(super) fn first_byte(&self, limit: Duration, idle: Duration) -> io::Result<bool> {
        match self {
            Self::Unix(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(limit))?;
                stream.set_write_timeout(Some(idle))?;
            }
            Self::Tcp(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(limit))?;
                stream.set_write_timeout(Some(idle))?;
            }
            // The peer has identified itself, and has sent more than a byte.
            Self::Tls(_) => return Ok(true),
        }
        loop {
            match rustix::net::recv(self, &mut [0_u8; 1], RecvFlags::PEEK) {
                Err(rustix::io::Errno::INTR) => {}
                peeked => {
                    let came = peeked?.1 > 0;
                    match self {
                        Self::Unix(stream) => stream.set_read_timeout(Some(idle))?,
                        Self::Tcp(stream) => stream.set_read_timeout(Some(idle))?,
                        Self::Tls(_) => {}
                    }
                    return Ok(came);
                }
            }
        }
    }

    /// Completes the TLS handshake if the peer begins one. A connection without TLS is accepted only if it is
    /// `admitted` or the host uses no certificates.
    pub(super) fn secure(
        self,
        tls: Option<&CriuTls>,
        admitted: bool,
        idle: Duration,
    ) -> Result<Self, control::Error> {
        let (Self::Tcp(stream), Some(tls)) = (&self, tls) else {
            return Ok(self);
        };
        let io = failed("look for TLS");
        let begins = begins_with_tls(stream, HANDSHAKE_PATIENCE).map_err(io)?;
        match self {
            Self::Tcp(stream) if begins => {
                let secured = tls
                    .accept(stream, HANDSHAKE_PATIENCE)
                    .map_err(DeniedError::from)?;
                let tcp = secured.tcp();
                tcp.set_read_timeout(Some(idle))
                    .and_then(|()| tcp.set_write_timeout(Some(idle)))
                    .map_err(io)?;
                Ok(Self::Tls(Box::new(secured)))
            }
            Self::Tcp(stream) if admitted => {
                stream.set_read_timeout(Some(idle)).map_err(io)?;
                Ok(Self::Tcp(stream))
            }
            _ => Err(DeniedError::Plaintext.into()),
        }
    }

    /// Checks that the certificate of the connection, if it had to show one, allows it to dump into a job.
    fn authorize(&self, job: &str) -> Result<(), control::Error> {
        let Self::Tls(stream) = self else {
            return Ok(());
        };
        let peer = stream.peer();
        let name = peer.name().to_owned();
        if job.is_empty() {
            if peer.may(Action::Park) {
                return Ok(());
            }
            return Err(DeniedError::Park { name }.into());
        }
        let job: JobName = job.parse().map_err(DeniedError::from)?;
        if peer.may(Action::DumpInto(&job)) {
            return Ok(());
        }
        let namespace = job.namespace().to_owned();
        Err(DeniedError::Namespace { name, namespace }.into())
    }

    /// Checks that the certificate of the connection, if it had to show one, allows it to read a job's pages.
    pub(super) fn authorize_read(&self, job: &JobName) -> Result<(), control::Error> {
        match self {
            Self::Tls(stream) if !stream.peer().may(Action::Read(job)) => Err(DeniedError::Read {
                name: stream.peer().name().to_owned(),
                namespace: job.namespace().to_owned(),
            }
            .into()),
            _ => Ok(()),
        }
    }

    /// Returns the remote end, as far as it is known by now; `None` if the peer has left already. `uid` is the
    /// user of a TCP connection from this machine.
    pub(super) fn client(&self, uid: Option<u32>) -> Option<Client> {
        match self {
            Self::Unix(stream) => user_of(stream).ok(),
            Self::Tcp(stream) => {
                let address = stream.peer_addr().ok()?;
                Some(Client::Tcp { address, uid })
            }
            Self::Tls(stream) => Some(Client::Certificate(stream.peer().clone())),
        }
    }

    /// Returns a function that ends the connection from another thread.
    fn hang_up(&self) -> io::Result<Box<dyn FnOnce() + Send>> {
        // The connection may have ended already; the error is of no interest.
        Ok(match self {
            Self::Unix(stream) => {
                let stream = stream.try_clone()?;
                Box::new(move || drop(stream.shutdown(Shutdown::Both)))
            }
            Self::Tcp(stream) => {
                let stream = stream.try_clone()?;
                Box::new(move || drop(stream.shutdown(Shutdown::Both)))
            }
            Self::Tls(stream) => {
                let stream = stream.tcp().try_clone()?;
                Box::new(move || drop(stream.shutdown(Shutdown::Both)))
            }
        })
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
            Self::Tls(stream) => stream.tcp().as_fd(),
        }
    }
}

pub(super) async fn accept_tcp<B: Backend>(shared: Arc<Shared<B>>, listener: TcpListener) {
    loop {
        match listener
            .accept()
            .await
            .and_then(|(stream, peer)| Ok((stream.into_std()?, peer)))
        {
            Ok((stream, peer)) => {
                tracing::debug!(%peer, "page-server connection");
                serve(&shared, &Target::Anonymous, Connection::Tcp(stream));
            }
            Err(error) => accept_failed(&error).await,
        }
    }
}

pub(super) async fn accept_unix<B: Backend>(shared: Arc<Shared<B>>, listener: UnixListener) {
    loop {
        match accept_owner(&listener).await {
            Ok(stream) => serve(&shared, &Target::Anonymous, Connection::Unix(stream)),
            Err(error) => accept_failed(&error).await,
        }
    }
}

/// Accepts on an AF_UNIX socket; only root and the daemon's own user are let in, whatever the file's mode says.
pub(crate) async fn accept_owner(listener: &UnixListener) -> io::Result<StdUnixStream> {
    let stream = listener.accept().await?.0.into_std()?;
    let peer = rustix::net::sockopt::socket_peercred(&stream)?;
    if peer.uid.is_root() || peer.uid == rustix::process::geteuid() {
        return Ok(stream);
    }
    let message = format!("uid {} refused", peer.uid.as_raw());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
}

/// Returns the user and process at the remote end of an AF_UNIX connection.
pub(super) fn user_of(stream: &StdUnixStream) -> io::Result<Client> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?;
    Ok(Client::User {
        uid: peer.uid.as_raw(),
        pid: peer.pid.as_raw_nonzero().get(),
    })
}

pub(crate) async fn accept_failed(error: &io::Error) {
    tracing::warn!(event = "connection-not-accepted", %error, "connection not accepted");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

/// Opens a session for a dump without a name; the session is parked at CLOSE.
fn anonymous<B: Backend>(backend: &B) -> Result<Arc<B::Session>, control::Error> {
    let open = request::Open {
        no_parent: true,
        ..request::Open::default()
    };
    backend.open(open, &mut Patiently)
}

/// Destination of a connection's pages.
enum Target<S> {
    /// A new anonymous session, which is parked at CLOSE.
    Anonymous,
    /// A named session, with the limit on its connections.
    Session(Arc<S>, Arc<Semaphore>),
}

/// Trust in a connection, by the user who made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// A user of this machine who is admitted.
    Admitted,
    /// Any other peer: certificates decide, if the host uses them.
    Stranger,
}

/// Decides by user and address whether a connection may go on, before it costs anything. Also returns the user of a TCP
/// connection from this machine.
pub(super) fn admit<B: Backend>(
    shared: &Shared<B>,
    connection: &Connection,
) -> Result<(Standing, Option<u32>), String> {
    let stream = match connection {
        Connection::Tcp(stream) => stream,
        // The user was checked when it was accepted.
        Connection::Unix(_) | Connection::Tls(_) => return Ok((Standing::Admitted, None)),
    };
    let owner = peer_uid(stream);
    let uid = owner.as_ref().ok().copied().flatten();
    let refused = match owner {
        Ok(Some(uid)) if shared.options.admits(uid) => {
            return Ok((Standing::Admitted, Some(uid)));
        }
        Ok(Some(uid)) => {
            format!("user {uid} may not store pages (--listen-uid {uid} admits this user)")
        }
        // Another machine, or another network namespace of this one.
        Ok(None) => match stream.peer_addr() {
            Ok(peer) if !peer.ip().to_canonical().is_loopback() => {
                return Ok((Standing::Stranger, None));
            }
            _ => "nobody knows whose connection it is".to_owned(),
        },
        Err(error) => format!("whose connection it is cannot be found out: {error}"),
    };
    // The certificate of `criu --tls` identifies the peer better than a user id.
    if shared.options.tls.is_some() {
        return Ok((Standing::Stranger, uid));
    }
    Err(refused)
}

/// Serves one connection on a thread of its own.
fn serve<B: Backend>(shared: &Arc<Shared<B>>, target: &Target<B::Session>, connection: Connection) {
    let (standing, uid) = match admit(shared, &connection) {
        Ok(admitted) => admitted,
        Err(reason) => return shared.places.refused(&reason),
    };
    let admitted = standing == Standing::Admitted;
    let (place, session) = match target {
        Target::Anonymous => (shared.places.arriving(admitted), None),
        Target::Session(session, places) => (
            Arc::clone(places).try_acquire_owned().ok(),
            Some(Arc::clone(session)),
        ),
    };
    let Some(place) = place else {
        return shared.places.refused("too many connections at once");
    };
    let shared = Arc::clone(shared);
    let thread = std::thread::Builder::new().name("page-server".to_owned());
    let spawned = thread.spawn(move || {
        let options = &shared.options;
        let idle = options.idle_connection;
        let patience = match (&session, standing) {
            // The session's opener has identified itself, and waits for its tasks to freeze.
            (Some(_), Standing::Admitted) => idle,
            (None, Standing::Admitted) => FIRST_BYTE.min(idle),
            (_, Standing::Stranger) => HANDSHAKE_PATIENCE.min(idle),
        };
        // A connection that sends nothing must not take the session.
        match connection.first_byte(patience, idle) {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => {
                tracing::debug!(%error, "connection given up");
                return;
            }
        }
        let backend = &*shared.backend;
        let client = connection.client(uid);
        // Before a session is begun: a refused connection must not take the session.
        let served = match connection.secure(options.tls.as_ref(), admitted, idle) {
            Ok(connection) => {
                let client = connection.client(uid);
                let place = match &session {
                    Some(_) => Ok(place),
                    None => shared.places.anonymous().ok_or_else(crowded),
                };
                let served = place
                    .and_then(|_place| converse(backend, session, connection, client.as_ref()));
                served.map_err(|error| (client, error))
            }
            Err(error) => Err((client, error)),
        };
        if let Err((client, error)) = served {
            shared.places.refused(&error.message);
            if let Some(client) = client {
                backend.received(&client, "", Err(&error));
            }
        }
    });
    if let Err(error) = spawned {
        tracing::error!(event = "connection-thread-failed", %error, "no thread for a connection");
    }
}

fn crowded() -> control::Error {
    RequestError::Crowded.into()
}

fn converse<B: Backend>(
    backend: &B,
    session: Option<Arc<B::Session>>,
    connection: Connection,
    client: Option<&Client>,
) -> Result<(), control::Error> {
    connection.authorize(session.as_ref().map_or("", |session| session.job()))?;
    let hang_up = connection
        .hang_up()
        .map_err(failed("duplicate a descriptor"))?;
    let session = session.map_or_else(|| anonymous(backend), Ok)?;
    let mut sink = backend.start(&session, client, hang_up)?;
    let outcome = match connection {
        Connection::Unix(mut stream) => frontend::serve(&mut stream, &mut sink),
        Connection::Tcp(mut stream) => frontend::serve(&mut stream, &mut sink),
        Connection::Tls(mut stream) => {
            let outcome = frontend::serve(&mut *stream, &mut sink);
            if let Err(error) = stream.close() {
                tracing::debug!(%error, "end of TLS not told");
            }
            outcome
        }
    };
    // The sink was informed of every error, and the session has recorded it.
    tracing::debug!(session = session.id(), ?outcome, "conversation over");
    if let Some(client) = client {
        let name = match session.job() {
            "" => session.id(),
            job => job,
        };
        let failed = |reason| RequestError::Conversation { reason }.to_reply();
        match outcome {
            Ok(ConversationEnd::Closed) => backend.received(client, name, Ok(())),
            Ok(ConversationEnd::Refused(refusal)) => {
                backend.received(client, name, Err(&failed(refusal.message)));
            }
            Err(error) => backend.received(client, name, Err(&failed(error.to_string()))),
            // The connection brought nothing.
            Ok(ConversationEnd::Empty) => {}
        }
    }
    Ok(())
}

/// Returns a function that wraps a system error with the failed action.
pub(super) fn failed(action: &'static str) -> impl Fn(io::Error) -> RequestError + Copy {
    move |source| RequestError::Io { action, source }
}

/// Listeners of a session.
pub(super) struct Endpoints {
    pub(super) socket: PathBuf,
    /// Address for a CRIU that is run by hand; `permafrost dump` uses the socket.
    pub(super) address: Option<SocketAddr>,
}

/// Listens for the one dump of a named session, until the session takes no more pages. Until then it has `room` in pipes.
///
/// # Errors
/// The socket or the port cannot be bound.
pub(super) fn listen_for<B: Backend>(
    shared: &Arc<Shared<B>>,
    session: &Arc<B::Session>,
    tcp: bool,
    room: Option<PipeRoom>,
) -> io::Result<Endpoints> {
    let _runtime = shared.runtime.enter();
    let tcp = match shared.address.filter(|_| tcp) {
        Some(address) => {
            let listener = std::net::TcpListener::bind((address.ip(), 0))?;
            listener.set_nonblocking(true)?;
            Some(TcpListener::from_std(listener)?)
        }
        None => None,
    };
    let address = tcp.as_ref().map(TcpListener::local_addr).transpose()?;
    let socket = shared
        .options
        .run_dir
        .join("sessions")
        .join(format!("{}.sock", session.id()));
    let unix = bind_unix(&socket)?;
    if let Some(room) = room {
        let id = session.id().to_owned();
        shared.pipe_rooms.lock().insert(id, Arc::new(room));
    }
    shared.runtime.spawn(endpoint(
        Arc::clone(shared),
        Arc::clone(session),
        unix,
        tcp,
        socket.clone(),
    ));
    Ok(Endpoints { socket, address })
}

async fn endpoint<B: Backend>(
    shared: Arc<Shared<B>>,
    session: Arc<B::Session>,
    unix: UnixListener,
    tcp: Option<TcpListener>,
    path: PathBuf,
) {
    let mut ended = session.ended();
    let id = session.id().to_owned();
    let target = Target::Session(session, limits::of_session());
    loop {
        let connection = tokio::select! {
            accepted = accept_owner(&unix) => accepted.map(Connection::Unix),
            accepted = accept_if_any(tcp.as_ref()) => accepted.map(Connection::Tcp),
            _ = ended.wait_for(|ended| *ended) => break,
        };
        match connection {
            Ok(connection) => serve(&shared, &target, connection),
            Err(error) => accept_failed(&error).await,
        }
    }
    shared.pipe_rooms.lock().remove(&id);
    remove_socket(&path);
}

async fn accept_if_any(listener: Option<&TcpListener>) -> io::Result<std::net::TcpStream> {
    match listener {
        Some(listener) => listener.accept().await?.0.into_std(),
        None => std::future::pending().await,
    }
}
