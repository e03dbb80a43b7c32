//! Accepts the bulk streams of dumps over TLS.
//!
//! A connection brings the frames of one dump, whose conversation over QUIC the same peer has begun, and waits for them.
//! It authorises nothing by itself.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use permafrost_identity::{IdentityError, Peer, ReloadingIdentity};
use permafrost_protocol::wire::BULK_ALPN;
use permafrost_protocol::wire::frame::{PREAMBLE_BYTES, Preamble};
use rustix::net::{Shutdown, shutdown};
use tokio::io::{AsyncReadExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::{Inner, key};
use crate::peer::bulk::{BulkReceiver, tune};
use crate::peer::{PeerError, PeerOptions};
use crate::shares::Share;

/// Pause after a connection could not be accepted, for instance because no descriptor is left.
const PAUSE: Duration = Duration::from_millis(100);

/// Bytes read from a socket at once: rustls reads 4 KiB at a time, and its records have 16.
const READ_BYTES: usize = 128 << 10;

/// Reason why a connection brings no frames.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("it speaks another protocol")]
    OtherProtocol,
    #[error("too many bulk streams")]
    Busy,
    #[error("no dump of this peer waits for it")]
    Unwanted,
    #[error("it took too long")]
    Late,
}

/// The socket on which bulk streams arrive.
pub(super) struct Listener {
    listener: TcpListener,
    acceptor: TlsAcceptor,
}

impl Listener {
    /// Listens on the TCP port that has the number of the endpoint's UDP port. If another program has that, bulk streams
    /// come over QUIC.
    pub(super) fn beside(
        endpoint: &quinn::Endpoint,
        identity: &ReloadingIdentity,
        options: &PeerOptions,
    ) -> Result<Option<Self>, PeerError> {
        if !options.tls_bulk {
            return Ok(None);
        }
        let config = identity.bulk_server_config();
        let config = config.map_err(|error| PeerError::identity(&error))?;
        let bound = endpoint.local_addr().and_then(|address| {
            let listener = std::net::TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            TcpListener::from_std(listener)
        });
        let listener = match bound {
            Ok(listener) => listener,
            Err(error) => {
                tracing::warn!(
                    event = "bulk-not-served", %error,
                    "pages of dumps come over QUIC only, as the TCP port of the peers' address cannot be bound"
                );
                return Ok(None);
            }
        };
        Ok(Some(Self {
            listener,
            acceptor: TlsAcceptor::from(Arc::new(config)),
        }))
    }

    /// Accepts connections until the endpoint is closed.
    pub(super) async fn accept(self, inner: Arc<Inner>) {
        let mut closed = inner.closed.subscribe();
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                _ = closed.changed() => return,
            };
            let (stream, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::debug!(%error, "no bulk stream accepted");
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            let from = address.ip().to_canonical().to_string();
            let Some(handshake) = inner.handshakes.take(&from) else {
                continue;
            };
            let (inner, acceptor) = (Arc::clone(&inner), self.acceptor.clone());
            tokio::spawn(async move {
                if let Err(error) = take(&inner, stream, &acceptor, handshake).await {
                    tracing::debug!(%address, %error, "bulk stream refused");
                }
            });
        }
    }
}

/// Completes the handshake, and hands the stream to the conversation that its preamble names.
async fn take(
    inner: &Inner,
    stream: TcpStream,
    acceptor: &TlsAcceptor,
    handshake: Share,
) -> Result<(), Refused> {
    let opened = tokio::time::timeout(inner.options.handshake_timeout, async {
        tune(&stream)?;
        let stream = BufReader::with_capacity(READ_BYTES, stream);
        let mut stream = acceptor.accept(stream).await?;
        let mut preamble = [0; PREAMBLE_BYTES];
        stream.read_exact(&mut preamble).await?;
        Ok::<_, io::Error>((stream, Preamble::decode(&preamble)))
    });
    let (stream, Preamble { id }) = opened.await.map_err(|_| Refused::Late)??;
    drop(handshake);
    let (socket, connection) = stream.get_ref();
    if connection.alpn_protocol() != Some(BULK_ALPN) {
        return Err(Refused::OtherProtocol);
    }
    let chain = connection.peer_certificates();
    let (chain, peer) = chain
        .zip(Peer::of_chain(chain)?)
        .ok_or(IdentityError::NoCertificate)?;
    let key = key(&peer);
    let share = inner.bulks.take(&key).ok_or(Refused::Busy)?;
    let session = inner.sessions.find(&key, id).ok_or(Refused::Unwanted)?;
    let ended = socket_of(socket.get_ref())?;
    let tenure = inner.identity.admit(chain, move |_| {
        // It may have ended already.
        let _ = shutdown(&ended, Shutdown::Both);
    })?;
    match session.deliver(BulkReceiver::over_tls(stream, tenure, share)) {
        true => Ok(()),
        false => Err(Refused::Unwanted),
    }
}

/// Returns another descriptor of a socket.
fn socket_of(stream: &TcpStream) -> io::Result<std::os::fd::OwnedFd> {
    use std::os::fd::AsFd as _;
    stream.as_fd().try_clone_to_owned()
}
