//! Page-server endpoints: the well-known port and socket for anonymous dumps, and a pair for each session.

use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use permafrost_client::frontend::{self, Outcome};
use permafrost_protocol::control::ErrorCode;
use tokio::net::{TcpListener, UnixListener};

use super::{Shared, bind_unix, remove_socket};
use crate::store::{Session, SessionRequest};

/// Pause after an accept that failed, so that a lack of descriptors does not become a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A connection that may bring a dump.
pub(super) enum Connection {
    Unix(StdUnixStream),
    Tcp(std::net::TcpStream),
}

impl Connection {
    fn prepare(&self, idle: Duration) -> io::Result<()> {
        match self {
            Self::Unix(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(idle))?;
                stream.set_write_timeout(Some(idle))
            }
            Self::Tcp(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(idle))?;
                stream.set_write_timeout(Some(idle))
            }
        }
    }
}

pub(super) async fn accept_tcp(shared: Arc<Shared>, listener: TcpListener) {
    loop {
        match listener
            .accept()
            .await
            .and_then(|(stream, peer)| Ok((stream.into_std()?, peer)))
        {
            Ok((stream, peer)) => anonymous(&shared, Connection::Tcp(stream), &peer.to_string()),
            Err(error) => accept_failed(&error).await,
        }
    }
}

pub(super) async fn accept_unix(shared: Arc<Shared>, listener: UnixListener) {
    loop {
        match accept_owner(&listener).await {
            Ok(stream) => anonymous(&shared, Connection::Unix(stream), "unix"),
            Err(error) => accept_failed(&error).await,
        }
    }
}

/// Accepts on an AF_UNIX socket; only root and the daemon's own user are let in, whatever the file's mode says.
pub(super) async fn accept_owner(listener: &UnixListener) -> io::Result<StdUnixStream> {
    let stream = listener.accept().await?.0.into_std()?;
    let peer = rustix::net::sockopt::socket_peercred(&stream)?;
    if peer.uid.is_root() || peer.uid == rustix::process::geteuid() {
        return Ok(stream);
    }
    let message = format!("uid {} refused", peer.uid.as_raw());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
}

pub(super) async fn accept_failed(error: &io::Error) {
    tracing::warn!(%error, "connection not accepted");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

/// A dump that names nothing: it gets a session of its own, which is parked at CLOSE.
fn anonymous(shared: &Arc<Shared>, connection: Connection, peer: &str) {
    let request = SessionRequest {
        job: String::new(),
        pre_dump: false,
        seal_follows: false,
        origin: None,
        no_parent: true,
        parent_images: false,
    };
    match shared.store.open_session(request) {
        Ok(session) => {
            tracing::debug!(session = %session.id, peer, "anonymous session");
            serve(shared, session, connection, true);
        }
        Err(error) => tracing::warn!(%error, peer, "anonymous session not opened"),
    }
}

/// Serves one connection on a thread of its own. `once`: the session is over when the connection is.
fn serve(shared: &Arc<Shared>, session: Arc<Session>, connection: Connection, once: bool) {
    let store = Arc::clone(&shared.store);
    let idle = shared.config.idle_connection;
    let spawned = std::thread::Builder::new()
        .name("page-server".to_owned())
        .spawn(move || {
            let mut sink = match session.start(&store) {
                Ok(sink) => sink,
                Err(error) => {
                    tracing::warn!(session = %session.id, %error, "connection refused");
                    return;
                }
            };
            let outcome =
                connection
                    .prepare(idle)
                    .map_err(Into::into)
                    .and_then(|()| match connection {
                        Connection::Unix(mut stream) => frontend::serve(&mut stream, &mut sink),
                        Connection::Tcp(mut stream) => frontend::serve(&mut stream, &mut sink),
                    });
            match outcome {
                Ok(Outcome::Closed) => tracing::debug!(session = %session.id, "pages complete"),
                Ok(Outcome::Empty) => {
                    session.reopen();
                    if once {
                        store.forget_session(&session.id);
                    }
                }
                // The sink has noted why.
                Ok(Outcome::Refused(_)) => {}
                Err(error) => session.fail(ErrorCode::SessionFailed, &error.to_string()),
            }
        });
    if let Err(error) = spawned {
        tracing::error!(%error, "no thread for a connection");
    }
}

/// Listens for the one dump of a named session, until the session takes no more pages.
///
/// # Errors
/// The socket or the port cannot be bound.
pub(super) fn listen_for(
    shared: &Arc<Shared>,
    session: &Arc<Session>,
) -> io::Result<(PathBuf, SocketAddr)> {
    let path = shared
        .config
        .run_dir
        .join("sessions")
        .join(format!("{}.sock", session.id));
    let _runtime = shared.runtime.enter();
    let unix = bind_unix(&path)?;
    let tcp = std::net::TcpListener::bind((shared.config.listen.ip(), 0))?;
    tcp.set_nonblocking(true)?;
    let tcp = TcpListener::from_std(tcp)?;
    let address = tcp.local_addr()?;
    shared.runtime.spawn(endpoint(
        Arc::clone(shared),
        Arc::clone(session),
        unix,
        tcp,
        path.clone(),
    ));
    Ok((path, address))
}

async fn endpoint(
    shared: Arc<Shared>,
    session: Arc<Session>,
    unix: UnixListener,
    tcp: TcpListener,
    path: PathBuf,
) {
    let mut ended = session.ended();
    loop {
        let connection = tokio::select! {
            accepted = accept_owner(&unix) => accepted.map(Connection::Unix),
            accepted = tcp.accept() => accepted.and_then(|(stream, _)| stream.into_std()).map(Connection::Tcp),
            _ = ended.wait_for(|ended| *ended) => break,
        };
        match connection {
            Ok(connection) => serve(&shared, Arc::clone(&session), connection, false),
            Err(error) => accept_failed(&error).await,
        }
    }
    remove_socket(&path);
}
