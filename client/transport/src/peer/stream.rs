//! Messages on a quinn stream.

use std::time::Duration;

use permafrost_protocol::control::framing;
use permafrost_protocol::versions::{self, SpokenVersions, VersionRange};
use permafrost_protocol::wire::HELLO_ANSWERED;
use permafrost_protocol::wire::conversation::hello_answered;
use permafrost_protocol::wire::message::{Hello, Reply, Request, reply, request};
use prost::Message;
use quinn::{RecvStream, SendStream};

use super::PeerError;
use super::network::Link;

/// Longest first message of a peer, bytes: the names in a pull, a control request.
pub(crate) const MAX_REQUEST_BYTES: usize = 1 << 20;
/// Longest other message, bytes: the limit of the framing.
pub(crate) const MAX_REPLY_BYTES: usize = permafrost_protocol::control::MAX_MESSAGE_BYTES as usize;

/// Most bytes requested from a stream at once, so that an announced length costs no memory before its bytes
/// come.
const READ_BYTES: usize = 64 << 10;
/// Time limit for a peer to receive a message: the longest message at 2 Mbit/s. A peer that reads nothing still
/// keeps its connection alive.
const WRITE_PATIENCE: Duration = Duration::from_secs(60);
/// Time for a peer that reads no more to report the reason.
pub(crate) const LAST_WORDS: Duration = Duration::from_secs(5);

/// Reads one message of at most `max_bytes`.
pub(crate) async fn read<M: Message + Default>(
    stream: &mut RecvStream,
    node: &str,
    doing: &'static str,
    max_bytes: usize,
) -> Result<M, PeerError> {
    let message = |source| PeerError::Message {
        node: node.to_owned(),
        source,
    };
    let mut prefix = [0; framing::LENGTH_BYTES];
    stream
        .read_exact(&mut prefix)
        .await
        .map_err(|error| PeerError::read_exact(node, doing, error))?;
    let length = framing::length(prefix).map_err(message)?;
    if length > max_bytes {
        return Err(PeerError::protocol(
            node,
            "a message too long for its place",
        ));
    }
    let mut body = Vec::new();
    while body.len() < length {
        let start = body.len();
        body.resize(length.min(start + READ_BYTES), 0);
        stream
            .read_exact(&mut body[start..])
            .await
            .map_err(|error| PeerError::read_exact(node, doing, error))?;
    }
    M::decode(body.as_slice()).map_err(|error| message(error.into()))
}

/// Writes one message, within [`WRITE_PATIENCE`].
pub(crate) async fn write(
    stream: &mut SendStream,
    node: &str,
    doing: &'static str,
    message: &impl Message,
) -> Result<(), PeerError> {
    let bytes = framing::encode(message).map_err(|source| PeerError::Message {
        node: node.to_owned(),
        source,
    })?;
    within(node, doing, WRITE_PATIENCE, async {
        let written = stream.write_chunk(bytes.into()).await;
        written.map_err(|error| PeerError::write(node, doing, error))
    })
    .await
}

/// A request on its way.
pub(crate) struct Asking {
    pub(crate) body: request::Body,
    /// True to send it only once the node has answered the Hello: a connection that is dead is noticed before. Where the
    /// connection's version has no such answer, it is sent at once.
    pub(crate) after_answer: bool,
}

/// A conversation that was opened.
pub(crate) struct Opened {
    pub(crate) send: SendStream,
    pub(crate) receive: RecvStream,
    /// True if the node takes bulk streams over TLS.
    pub(crate) tls_bulk: bool,
}

/// Opens a conversation: a stream with the Hello and the request on it. Sets `sent` once the request may arrive.
pub(crate) async fn converse(
    link: &Link,
    node: &str,
    hello: Hello,
    asking: Asking,
    sent: &mut bool,
) -> Result<Opened, PeerError> {
    let (mut send, mut receive) = link
        .connection
        .open_bi()
        .await
        .map_err(|source| PeerError::lost(node, source))?;
    let is_answered = link.version >= HELLO_ANSWERED;
    write(&mut send, node, "hello", &hello).await?;
    let mut tls_bulk = false;
    if is_answered && asking.after_answer {
        tls_bulk = await_hello(&mut receive, node, link.version).await?;
    }
    *sent = true;
    let request = Request {
        body: Some(asking.body),
    };
    match write(&mut send, node, "request", &request).await {
        // It reads no more of a request that it refuses.
        Err(error @ PeerError::Ended { .. }) => {
            return Err(refusal(&mut receive, node).await.unwrap_or(error));
        }
        written => written?,
    }
    if is_answered && !asking.after_answer {
        tls_bulk = await_hello(&mut receive, node, link.version).await?;
    }
    Ok(Opened {
        send,
        receive,
        tls_bulk,
    })
}

/// Returns the refusal that a node has sent, perhaps after its Hello.
async fn refusal(stream: &mut RecvStream, node: &str) -> Option<PeerError> {
    let read = async {
        loop {
            let answer: Reply = read(stream, node, "refusal", MAX_REQUEST_BYTES)
                .await
                .ok()?;
            if let Some(reply::Body::Error(error)) = answer.body {
                return Some(PeerError::refused(node, error));
            }
        }
    };
    tokio::time::timeout(LAST_WORDS, read).await.ok()?
}

/// Waits for the node's Hello. Returns true if the node takes bulk streams over TLS.
async fn await_hello(stream: &mut RecvStream, node: &str, version: u32) -> Result<bool, PeerError> {
    let answer: Reply = read(stream, node, "hello", MAX_REQUEST_BYTES).await?;
    let hello = hello_answered(answer, version, node);
    let hello = hello.map_err(|error| PeerError::conversation(node, error))?;
    let release = hello.versions.map(|versions| versions.release);
    tracing::trace!(node, version, ?release, "conversation begun");
    Ok(hello.tls_bulk)
}

/// Returns the Hello of `name` on a connection of this version, for an end that speaks `wire`.
pub(crate) fn hello(name: &str, region: &str, version: u32, wire: VersionRange) -> Hello {
    Hello {
        version,
        name: name.to_owned(),
        region: region.to_owned(),
        versions: (version >= HELLO_ANSWERED).then(|| spoken(wire)),
        tls_bulk: false,
    }
}

/// Returns what this process speaks, with these versions of the wire.
pub(crate) fn spoken(wire: VersionRange) -> SpokenVersions {
    SpokenVersions {
        wire: Some(wire),
        ..versions::own().clone()
    }
}

/// Waits for `work`, at most for `timeout`.
pub(crate) async fn within<T>(
    node: &str,
    doing: &'static str,
    timeout: Duration,
    work: impl Future<Output = Result<T, PeerError>>,
) -> Result<T, PeerError> {
    match tokio::time::timeout(timeout, work).await {
        Ok(done) => done,
        Err(_) => Err(PeerError::deadline(node, doing)),
    }
}
