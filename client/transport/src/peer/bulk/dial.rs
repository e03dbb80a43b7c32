//! Opens a bulk stream over TLS.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use permafrost_identity::{Identity, IdentityError, Peer, Role, server_name};
use permafrost_protocol::wire::BULK_ALPN;
use permafrost_protocol::wire::frame::Preamble;
use rustls::pki_types::ServerName;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::{BulkSender, tune};

/// Most bytes of encrypted frames that wait for the socket.
const BUFFERED_BYTES: usize = 96 << 10;

/// Reason why no bulk stream over TLS could be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("{0} answers")]
    WrongPeer(String),
    #[error("something else than a node of Permafrost answers")]
    OtherProtocol,
}

/// Connects to `node` at `address`, and names the conversation that the frames belong to.
pub(crate) async fn dial(
    identity: &Identity,
    node: &str,
    address: SocketAddr,
    preamble: &Preamble,
) -> Result<BulkSender, DialError> {
    let config = identity.bulk_client_config()?;
    let name = ServerName::try_from(server_name(node)).map_err(io::Error::other)?;
    let stream = TcpStream::connect(address).await?;
    tune(&stream)?;
    let connector = TlsConnector::from(Arc::new(config));
    let mut stream = connector.connect(name, stream).await?;
    let connection = stream.get_mut().1;
    connection.set_buffer_limit(Some(BUFFERED_BYTES));
    if connection.alpn_protocol() != Some(BULK_ALPN) {
        return Err(DialError::OtherProtocol);
    }
    match Peer::of_chain(connection.peer_certificates())? {
        Some(peer) if peer.name() == node && peer.role() == Role::Node => {}
        Some(peer) => {
            let found = format!("{} {}", peer.role(), peer.name());
            return Err(DialError::WrongPeer(found));
        }
        None => return Err(IdentityError::NoCertificate.into()),
    }
    stream.write_all(&preamble.encode()).await?;
    stream.flush().await?;
    Ok(BulkSender::Tls(Box::new(stream)))
}
