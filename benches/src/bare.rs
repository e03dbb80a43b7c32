//! Bare quinn pair: nothing but bytes on one stream, with the transport parameters, sockets and certificates of the
//! peers. Its time is a lower bound for the transfer between two nodes.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use permafrost_identity::{ReloadingIdentity, server_name};
use permafrost_transport::peer::{PeerOptions, quic_endpoint};
use quinn::{ConnectionError, Endpoint, VarInt};

/// Number of bytes written at once.
pub const RUN_BYTES: usize = 256 << 10;

/// Returns transport options for a path that is known to carry UDP payloads of `packet_bytes`.
#[must_use]
pub fn options(packet_bytes: u16) -> PeerOptions {
    PeerOptions {
        packet_bytes,
        assured_packet_bytes: packet_bytes,
        tls_bulk: false,
        ..PeerOptions::default()
    }
}

/// Returns [`RUN_BYTES`] that do not compress, equal in each run.
#[must_use]
pub fn run() -> Bytes {
    crate::noise(RUN_BYTES / permafrost_pmem::PAGE_SIZE).into()
}

/// Makes the end that accepts a connection. Must be called within a tokio runtime.
///
/// # Panics
/// If the socket cannot be opened, or the identity is not a node's.
#[must_use]
pub fn receiver(bind: SocketAddr, identity: &ReloadingIdentity, options: &PeerOptions) -> Endpoint {
    let mut config = identity.quic_server_config(options.wire).expect("server");
    config.transport_config(options.transport());
    quic_endpoint(bind, Some(config), options).expect("bind")
}

/// Makes the end that opens a connection. Must be called within a tokio runtime.
///
/// # Panics
/// If the socket cannot be opened.
#[must_use]
pub fn sender(bind: SocketAddr, identity: &ReloadingIdentity, options: &PeerOptions) -> Endpoint {
    let mut endpoint = quic_endpoint(bind, None, options).expect("bind");
    let mut config = identity.quic_client_config();
    config.transport_config(options.transport());
    endpoint.set_default_client_config(config);
    endpoint
}

/// Accepts one connection, copies the bytes on its one stream into a buffer of [`RUN_BYTES`], again and again, and
/// closes it after the last byte. Returns the number of bytes. The copy puts packets together, as the receiver of a dump
/// needs it.
///
/// # Panics
/// If the connection fails or the sender breaks off.
pub async fn receive(endpoint: &Endpoint) -> usize {
    let connecting = endpoint.accept().await.expect("peer");
    let connection = connecting.await.expect("handshake");
    let mut stream = connection.accept_uni().await.expect("stream");
    let (mut taken, mut buffer) = (0, Vec::with_capacity(RUN_BYTES));
    let mut chunks: [Bytes; 32] = std::array::from_fn(|_| Bytes::new());
    while let Some(count) = stream.read_chunks(&mut chunks).await.expect("read") {
        for chunk in &chunks[..count] {
            if buffer.len() + chunk.len() > RUN_BYTES {
                std::hint::black_box(&buffer);
                buffer.clear();
            }
            buffer.extend_from_slice(chunk);
            taken += chunk.len();
        }
    }
    connection.close(VarInt::from_u32(0), b"all read");
    endpoint.wait_idle().await;
    taken
}

/// Connects to node `name`, and sends it `bytes` of `run` again and again. From after the handshake until the
/// receiver has read everything.
///
/// # Panics
/// If the connection fails, or the receiver has not read everything.
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
