//! A listener: accepts connections on one socket or port, makes the handshake, and serves them.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use permafrost_identity::{Peer, ReloadingIdentity, Tenure};
use permafrost_transport::peer::{ApiServer, ApiStream};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::answer::{Conversation, Known, Shared};
use super::patient::Patient;
use super::remove_socket;
use super::strangers::{Stranger, Strangers};
use crate::caller::Caller;
use crate::shares::Share;

/// Pause after an accept that failed for lack of a descriptor.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Maximum number of surplus connections that get an answer; further ones are closed without one.
const TURNED_AWAY: usize = 64;

/// Largest head of a request, bytes: a token, a name, and whatever proxies add.
const HEAD_BYTES: usize = 64 << 10;

/// First byte of a TLS connection: a handshake record (RFC 8446, section 5.1).
const TLS_HANDSHAKE: u8 = 0x16;

/// Answer to a client that speaks HTTP to a port that speaks TLS.
const SPEAK_TLS: &str = "{\"type\":\"urn:permafrost:problem:tls\",\"title\":\"This port speaks TLS\",\"status\":400,\
\"detail\":\"use https://, and trust the CA of the cluster\"}";

/// Listener for connections.
pub(super) enum Door {
    Socket(UnixListener),
    Port {
        listener: TcpListener,
        tls: Option<Guard>,
    },
}

/// TLS configuration of a port.
#[derive(Clone)]
pub(super) struct Guard {
    pub(super) acceptor: TlsAcceptor,
    /// Identity that reports when a certificate is no longer valid.
    pub(super) identity: ReloadingIdentity,
}

/// A caller's certificate, while it is valid.
struct Admission {
    /// Resolves when the certificate is no longer valid.
    ended: oneshot::Receiver<()>,
    _tenure: Tenure,
}

/// Place of a connection among all connections.
pub(super) enum Place {
    /// A connection to the socket.
    Local(#[expect(dead_code, reason = "held for its drop")] OwnedSemaphorePermit),
    /// A connection to the port, before its caller is authenticated.
    Stranger(#[expect(dead_code, reason = "held for its drop")] Stranger),
    /// A connection of an authenticated caller to the port.
    Known(#[expect(dead_code, reason = "held for its drop")] Share),
    /// A surplus connection: there are too many.
    Crowded(#[expect(dead_code, reason = "held for its drop")] OwnedSemaphorePermit),
}

/// An accepted connection.
enum Arrival {
    Local(UnixStream, Arc<Caller>),
    Remote(TcpStream, SocketAddr),
}

impl Door {
    /// Binds a socket that only its owner may connect to. A socket that a dead daemon left behind is replaced.
    pub(super) fn socket(path: &Path) -> io::Result<Self> {
        remove_socket(path);
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Ok(Self::Socket(listener))
    }

    pub(super) const fn port(listener: TcpListener, tls: Option<Guard>) -> Self {
        Self::Port { listener, tls }
    }

    /// Serves connections until the server stops; then finishes the current requests, for a limited time.
    pub(super) async fn attend(self, shared: Arc<Shared>) {
        let places = Arc::new(Semaphore::new(shared.limits.connections));
        let turned_away = Arc::new(Semaphore::new(TURNED_AWAY));
        let strangers = Strangers::new(shared.limits.strangers);
        let mut serving = JoinSet::new();
        loop {
            let arrival = tokio::select! {
                arrival = self.accept() => arrival,
                Some(_) = serving.join_next() => continue,
                () = stopped(&shared) => break,
            };
            let arrival = match arrival {
                Ok(arrival) => arrival,
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    tracing::warn!(event = "api-connection-refused", %error, "API connection refused");
                    continue;
                }
                Err(error) => {
                    tracing::warn!(event = "api-connection-not-accepted", %error, "API connection not accepted");
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                    continue;
                }
            };
            let tls = self.tls();
            let place = match &arrival {
                Arrival::Remote(_, address) => {
                    let stranger = strangers.enter(address.ip().to_canonical());
                    let (address, number) = stranger.place();
                    let place = Place::Stranger(stranger);
                    let welcomed = welcome(Arc::clone(&shared), arrival, tls, place);
                    strangers.ended_by(address, number, serving.spawn(welcomed));
                    continue;
                }
                Arrival::Local(..) => match Arc::clone(&places).try_acquire_owned() {
                    Ok(place) => Place::Local(place),
                    Err(_) => match Arc::clone(&turned_away).try_acquire_owned() {
                        Ok(place) => Place::Crowded(place),
                        Err(_) => continue,
                    },
                },
            };
            serving.spawn(welcome(Arc::clone(&shared), arrival, tls, place));
        }
        // The listener is closed while the current connections are served.
        drop(self);
        let all = async { while serving.join_next().await.is_some() {} };
        if tokio::time::timeout(shared.limits.grace, all)
            .await
            .is_err()
        {
            tracing::debug!("API connections ended while they were being answered");
        }
    }

    fn tls(&self) -> Option<Guard> {
        match self {
            Self::Socket(_) => None,
            Self::Port { tls, .. } => tls.clone(),
        }
    }

    async fn accept(&self) -> io::Result<Arrival> {
        match self {
            Self::Socket(listener) => {
                let (stream, _) = listener.accept().await?;
                let caller = owner(&stream)?;
                Ok(Arrival::Local(stream, Arc::new(caller)))
            }
            Self::Port { listener, .. } => {
                let (stream, address) = listener.accept().await?;
                Ok(Arrival::Remote(stream, address))
            }
        }
    }
}

/// Returns the caller for root or the daemon's own user; all others are refused, whatever the file's mode.
fn owner(stream: &UnixStream) -> io::Result<Caller> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?;
    if peer.uid.is_root() {
        return Ok(Caller::local("root"));
    }
    let uid = peer.uid.as_raw();
    if peer.uid == rustix::process::geteuid() {
        return Ok(Caller::local(format!("uid {uid}")));
    }
    let message = format!("uid {uid} refused");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
}

/// Serves one connection, which keeps its place until it ends.
async fn welcome(shared: Arc<Shared>, arrival: Arrival, tls: Option<Guard>, place: Place) {
    match arrival {
        Arrival::Local(stream, caller) => {
            converse(shared, stream, Known::Local(caller), None, place).await;
        }
        Arrival::Remote(stream, address) => {
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%address, %error, "API connection gone");
                return;
            }
            let Some(tls) = tls else {
                converse(shared, stream, Known::Remote(None), None, place).await;
                return;
            };
            let patience = shared.limits.handshake;
            match tokio::time::timeout(patience, shake_hands(stream, &tls)).await {
                Ok(Ok((stream, caller, admission))) => {
                    let known = Known::Remote(caller.map(Arc::new));
                    converse(shared, stream, known, admission, place).await;
                }
                Ok(Err(error)) => tracing::debug!(%address, %error, "API connection refused"),
                Err(_) => tracing::debug!(%address, "API connection refused: no TLS handshake"),
            }
        }
    }
}

type Encrypted = tokio_rustls::server::TlsStream<TcpStream>;

/// Makes the TLS handshake. Returns the encrypted stream, and the caller if it has shown a certificate.
async fn shake_hands(
    mut stream: TcpStream,
    tls: &Guard,
) -> io::Result<(Encrypted, Option<Caller>, Option<Admission>)> {
    let mut first = [0; 1];
    if stream.peek(&mut first).await? == 1 && first != [TLS_HANDSHAKE] {
        speak_tls(&mut stream).await?;
        return Err(io::Error::new(io::ErrorKind::InvalidData, "no TLS"));
    }
    let stream = tls.acceptor.accept(stream).await?;
    let chain = stream.get_ref().1.peer_certificates();
    let refused = |error| io::Error::new(io::ErrorKind::PermissionDenied, error);
    let peer = Peer::of_chain(chain).map_err(refused)?;
    let caller = peer.as_ref().map(Caller::certified);
    let admit = |chain| {
        let (end, ended) = oneshot::channel();
        let tenure = tls.identity.admit(chain, move |_| {
            let _ = end.send(());
        })?;
        Ok(Admission {
            ended,
            _tenure: tenure,
        })
    };
    let admission = chain.map(admit).transpose().map_err(refused)?;
    Ok((stream, caller, admission))
}

async fn speak_tls(stream: &mut TcpStream) -> io::Result<()> {
    // Bytes unread when a connection ends would discard the answer.
    let _ = stream.read(&mut [0; 4096]).await?;
    let length = SPEAK_TLS.len();
    let head = format!(
        "HTTP/1.1 400 Bad Request\r\nContent-Type: application/problem+json\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(SPEAK_TLS.as_bytes()).await?;
    stream.shutdown().await
}

/// Waits until the server is to stop.
async fn stopped(shared: &Shared) {
    // A dropped server counts as a stop, too.
    let _ = shared.stop.clone().wait_for(|stop| *stop).await;
}

/// Entry point for peers, whose certificates were verified when they connected.
pub(super) struct PeerDoor {
    pub(super) shared: Arc<Shared>,
    pub(super) places: Arc<Semaphore>,
    /// Handle of the API's own runtime.
    pub(super) runtime: Handle,
}

impl fmt::Debug for PeerDoor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerDoor").finish_non_exhaustive()
    }
}

impl ApiServer for PeerDoor {
    fn serve(
        self: Arc<Self>,
        peer: &Peer,
        stream: ApiStream,
    ) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let known = Known::Remote(Some(Arc::new(Caller::certified(peer))));
        Box::pin(async move {
            let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
                tracing::debug!("API connection of a peer refused: there are too many");
                return;
            };
            let conversation = converse(
                Arc::clone(&self.shared),
                stream,
                known,
                // The stream ends with the peer's connection.
                None,
                Place::Local(place),
            );
            let served = self.runtime.spawn(conversation).await;
            if served.is_err() {
                tracing::debug!("API connection of a peer ended with the API");
            }
        })
    }
}

async fn converse<S>(
    shared: Arc<Shared>,
    stream: S,
    known: Known,
    admission: Option<Admission>,
    place: Place,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let limits = shared.limits;
    let conversation = Arc::new(Conversation {
        shared,
        known,
        introduced: Notify::new(),
        place: Mutex::new(place),
    });
    let answering = Arc::clone(&conversation);
    let service = service_fn(move |request| Arc::clone(&answering).answer(request));
    let stream = TokioIo::new(Patient::new(stream, limits.stall));
    let mut serving = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.idle)
            .max_buf_size(HEAD_BYTES)
            .serve_connection(stream, service)
    );
    let unknown = async {
        let introduced = conversation.introduced.notified();
        if tokio::time::timeout(limits.introduction, introduced)
            .await
            .is_ok()
        {
            std::future::pending::<()>().await;
        }
    };
    let ended = async {
        match admission {
            // The tenure lives as long as this future.
            Some(mut admission) => drop((&mut admission.ended).await),
            None => std::future::pending().await,
        }
    };
    let served = tokio::select! {
        () = ended => {
            tracing::debug!("API connection ended: its certificate counts no longer");
            return;
        }
        served = serving.as_mut() => served,
        () = unknown => {
            tracing::debug!("API connection ended: nobody said who asks");
            return;
        }
        () = stopped(&conversation.shared) => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = served {
        tracing::debug!(%error, "API connection ended");
    }
}
