//! A bare quinn pair: nothing but bytes on one stream, with the transport parameters, sockets and certificates of the
//! peers. What it takes is what the way between two nodes could take at best.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use permafrost_identity::{ReloadingIdentity, server_name};
use permafrost_transport::peer::{Options, quic_endpoint};
use quinn::{ConnectionError, Endpoint, VarInt};

/// Number of bytes written at once.
pub const RUN_BYTES: usize = 256 << 10;

/// Transport options for a path that is known to carry UDP payloads of `packet_bytes`.
#[must_use]
pub fn options(packet_bytes: u16) -> Options {
    Options {
        packet_bytes,
        assured_packet_bytes: packet_bytes,
        ..Options::default()
    }
}

/// [`RUN_BYTES`] that do not compress, the same in each run.
#[must_use]
pub fn run() -> Bytes {
    crate::noise(RUN_BYTES / permafrost_pmem::PAGE_SIZE).into()
}

/// The end that takes a connection. Must be called within a tokio runtime.
///
/// # Panics
/// If there is no such socket, or the identity is none of a node.
#[must_use]
pub fn receiver(bind: SocketAddr, identity: &ReloadingIdentity, options: &Options) -> Endpoint {
    let mut config = identity.quic_server_config().expect("server");
    config.transport_config(options.transport());
    quic_endpoint(bind, Some(config), options).expect("bind")
}

/// The end that makes one. Must be called within a tokio runtime.
///
/// # Panics
/// If there is no such socket.
#[must_use]
pub fn sender(bind: SocketAddr, identity: &ReloadingIdentity, options: &Options) -> Endpoint {
    let mut endpoint = quic_endpoint(bind, None, options).expect("bind");
    let mut config = identity.quic_client_config();
    config.transport_config(options.transport());
    endpoint.set_default_client_config(config);
    endpoint
}

/// Takes one connection, drops what comes on its one stream, and hangs up after the last byte. How many there were.
///
/// # Panics
/// If the sender does not do its part.
pub async fn receive(endpoint: &Endpoint) -> usize {
    let connecting = endpoint.accept().await.expect("peer");
    let connection = connecting.await.expect("handshake");
    let mut stream = connection.accept_uni().await.expect("stream");
    let mut taken = 0;
    let mut chunks: [Bytes; 32] = std::array::from_fn(|_| Bytes::new());
    while let Some(count) = stream.read_chunks(&mut chunks).await.expect("read") {
        taken += chunks[..count].iter().map(Bytes::len).sum::<usize>();
    }
    connection.close(VarInt::from_u32(0), b"all read");
    endpoint.wait_idle().await;
    taken
}

/// Connects to node `name`, and sends it `bytes` of `run` again and again. From after the handshake until the
/// receiver has read everything.
///
/// # Panics
/// If it has not.
pub async fn send(
    endpoint: &Endpoint,
    to: SocketAddr,
    name: &str,
    run: &Bytes,
    bytes: usize,
) -> Duration {
    let connecting = endpoint.connect(to, &server_name(name)).expect("connect");
    let connection = connecting.await.expect("handshake");
    let start = Instant::now();
    let mut stream = connection.open_uni().await.expect("stream");
    let mut left = bytes;
    while left > 0 {
        // Two at a time, as there are frames behind each other.
        let mut chunks = [run.clone(), run.clone()];
        for chunk in &mut chunks {
            chunk.truncate(left);
            left -= chunk.len();
        }
        stream.write_all_chunks(&mut chunks).await.expect("write");
    }
    stream.finish().expect("finish");
    let end = connection.closed().await;
    assert!(
        matches!(end, ConnectionError::ApplicationClosed(_)),
        "the receiver is gone: {end}"
    );
    start.elapsed()
}
