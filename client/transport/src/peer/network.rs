//! Connections to the other nodes: the sockets, and one connection to each node in use.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use permafrost_identity::{Identity, Peer, ReloadingIdentity, Role, Tenure, server_name};
use permafrost_protocol::access::Access;
use permafrost_protocol::versions;
use permafrost_protocol::wire::agreed;
use permafrost_protocol::wire::conversation::SESSION_BYTES;
use permafrost_protocol::wire::frame::Preamble;
use permafrost_protocol::wire::message::{Hello, Reply, reply, request};
use quinn::crypto::rustls::HandshakeData;
use quinn::{
    Connection, ConnectionError, Endpoint, EndpointConfig, RecvStream, SendStream, TokioRuntime,
    VarInt,
};
use tokio::runtime::Handle;

use super::bulk::{self, BulkSender};
use super::pool::Pool;
use super::reset::{Ids, ResetKey};
use super::router::Router;
use super::stream::{self, Asking, within};
use super::{ApiStream, PeerError, PeerOptions, code, socket};

/// Addresses of the nodes.
pub trait Addresses: Send + Sync + 'static {
    /// Returns the address of a node; `None` while it is unknown. Must not block.
    fn address(&self, node: &str) -> Option<SocketAddr>;
}

impl<F: Fn(&str) -> Option<SocketAddr> + Send + Sync + 'static> Addresses for F {
    fn address(&self, node: &str) -> Option<SocketAddr> {
        self(node)
    }
}

/// Pause after a first failed attempt; it doubles up to [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause between two attempts.
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// Time limit for a bulk stream over TLS: between nodes of one site it takes some milliseconds, unless a firewall drops
/// its packets.
const DIAL_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for which bulk streams go over QUIC after one over TLS has failed.
const DIAL_PAUSE: Duration = Duration::from_secs(60);
/// Error of QUIC for the alert no_application_protocol of TLS (RFC 9001, 4.8; RFC 7301, 3.2).
const NO_APPLICATION_PROTOCOL: u64 = 0x100 + 120;

/// A connection in use, and its bulk streams. Closed when its last clone is dropped: each conversation keeps
/// one.
#[derive(Clone)]
pub(crate) struct Link {
    pub(crate) connection: Connection,
    /// Version of the wire that both ends have agreed on.
    pub(crate) version: u32,
    pub(crate) router: Router,
    hold: Arc<Hold>,
}

impl Link {
    /// Begins a conversation; returns true if it is not the first one. A connection on which another conversation was
    /// held may have died since.
    pub(crate) fn begin(&self) -> bool {
        self.hold.used.swap(true, Ordering::AcqRel)
    }

    /// Opens the stream for the frames of conversation `id`: over TLS, if the node takes such streams and
    /// can be reached on its TCP port, else over QUIC.
    pub(crate) async fn open_bulk(
        &self,
        node: &str,
        identity: &Identity,
        tls_bulk: bool,
        id: [u8; SESSION_BYTES],
    ) -> Result<BulkSender, PeerError> {
        let preamble = Preamble { id };
        if tls_bulk && self.hold.may_dial() {
            let address = self.connection.remote_address();
            let dialed = bulk::dial(identity, node, address, &preamble);
            match tokio::time::timeout(DIAL_TIMEOUT, dialed).await {
                Ok(Ok(bulk)) => return Ok(bulk),
                Ok(Err(error)) => self.bulk_failed(node, &error),
                Err(_) => self.bulk_failed(node, &"no answer"),
            }
        }
        let opened = self.connection.open_uni().await;
        let stream = opened.map_err(|source| PeerError::lost(node, source))?;
        let mut bulk = BulkSender::Quic(stream);
        let mut chunks = [Bytes::copy_from_slice(&preamble.encode())];
        bulk.write(node, &mut chunks).await?;
        Ok(bulk)
    }

    /// Records that a bulk stream over TLS could not be opened, or was lost: those of the next time go over QUIC.
    pub(crate) fn bulk_failed(&self, node: &str, why: &dyn std::fmt::Display) {
        tracing::warn!(
            event = "bulk-over-quic", node, %why,
            "pages go over QUIC, as the node's TCP port does not take them"
        );
        *self.hold.dial_at.lock() = Some(Instant::now() + DIAL_PAUSE);
    }
}

/// Ends a connection when it is dropped.
struct Hold {
    connection: Connection,
    /// Serial number of the own certificate that the peer was shown.
    shown: String,
    /// True if a conversation was begun.
    used: AtomicBool,
    /// Earliest time of the next bulk stream over TLS, after one has failed.
    dial_at: parking_lot::Mutex<Option<Instant>>,
    /// Time of the last reply.
    answered: parking_lot::Mutex<Option<Instant>>,
    _tenure: Tenure,
}

impl Hold {
    fn may_dial(&self) -> bool {
        self.dial_at.lock().is_none_or(|at| Instant::now() >= at)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.connection.close(VarInt::from_u32(code::DONE), b"");
    }
}

/// State of the connection to one node.
#[derive(Default)]
struct Way {
    link: Option<Link>,
    failures: u32,
    /// Earliest time of the next attempt.
    not_before: Option<Instant>,
    /// Refusal for the versions, which is returned until then.
    refused: Option<PeerError>,
}

impl Way {
    /// Counts a failed attempt, and puts the next one off.
    fn put_off(&mut self) {
        let pause = FIRST_PAUSE * 2u32.saturating_pow(self.failures.min(10));
        self.not_before = Some(Instant::now() + pause.min(MAX_PAUSE));
        self.failures += 1;
    }
}

struct Inner {
    runtime: Handle,
    endpoints: Vec<Endpoint>,
    region: String,
    options: PeerOptions,
    identity: Arc<ReloadingIdentity>,
    addresses: Arc<dyn Addresses>,
    /// Payloads of the dumps that are sent.
    buffers: Pool,
    ways: parking_lot::Mutex<HashMap<String, Arc<tokio::sync::Mutex<Way>>>>,
}

/// Terms of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// This side's part of the conversation ends with it.
    pub(crate) is_whole: bool,
    /// It is sent once more over a new connection if that is lost, where [`Network::call`] does so. Otherwise others can
    /// be asked, and a connection is not waited for as long as the reply.
    pub(crate) repeats: bool,
}

/// Longest wait for a node where others can be asked.
const REACH: Duration = Duration::from_secs(3);

/// Returns the time by which a node is to show that it can be reached, for a request that has until `deadline` and that
/// others can be asked, too: at least half of the time is theirs.
#[must_use]
pub fn reached_by(deadline: Instant) -> Instant {
    let now = Instant::now();
    now + REACH.min(deadline.saturating_duration_since(now) / 2)
}

/// Terms of most requests.
pub(crate) const WHOLE: Terms = Terms {
    is_whole: true,
    repeats: true,
};

/// Connections to the other nodes. Cheap to clone; the last clone closes all connections.
#[derive(Clone)]
pub struct Network(Arc<Inner>);

impl Network {
    /// Opens `options.sockets` sockets on `bind` (port 0; any other port would be the same for all sockets).
    /// `region` is this node's, for [`Hello`]; empty for an agent.
    ///
    /// # Errors
    /// A socket cannot be bound.
    pub fn new(
        runtime: Handle,
        bind: SocketAddr,
        identity: Arc<ReloadingIdentity>,
        region: &str,
        addresses: Arc<dyn Addresses>,
        options: PeerOptions,
    ) -> Result<Self, PeerError> {
        let entered = runtime.enter();
        let endpoints = (0..options.sockets.max(1))
            .map(|_| quic_endpoint(bind, None, &options))
            .collect::<Result<_, _>>()?;
        drop(entered);
        Ok(Self(Arc::new(Inner {
            buffers: Pool::lasting(&runtime),
            runtime,
            endpoints,
            region: region.to_owned(),
            options,
            identity,
            addresses,
            ways: parking_lot::Mutex::default(),
        })))
    }

    /// Sends `node` any request but a dump or a fetch, and waits for the reply. Must not be called on a thread
    /// of the runtime. If the connection turns out to be lost, the request is sent once more over a new one, unless it
    /// may have arrived and is none that can be [repeated](Access::is_repeatable).
    ///
    /// # Errors
    /// [`PeerError::Refused`] with the peer's error, or no reply by `deadline`.
    pub fn call(
        &self,
        node: &str,
        body: request::Body,
        deadline: Instant,
    ) -> Result<reply::Body, PeerError> {
        self.runtime()
            .block_on(self.call_async(node, body, deadline))
    }

    /// Calls a node like [`Self::call`], for use in async tasks.
    ///
    /// # Errors
    /// The same as for [`Self::call`].
    pub async fn call_async(
        &self,
        node: &str,
        body: request::Body,
        deadline: Instant,
    ) -> Result<reply::Body, PeerError> {
        let (_, _, _, answer) = self.ask(node, body, deadline, WHOLE).await?;
        answered(node, answer)
    }

    /// Sends a request and waits for its first reply, as [`Self::call`] does.
    pub(crate) async fn ask(
        &self,
        node: &str,
        body: request::Body,
        deadline: Instant,
        terms: Terms,
    ) -> Result<(Link, SendStream, RecvStream, Reply), PeerError> {
        let is_repeatable = Access::of_wire(&body).is_ok_and(|access| access.is_repeatable());
        let mut repeated = false;
        loop {
            let connected_by = match terms.repeats {
                true => deadline,
                false => reached_by(deadline),
            };
            let link = self.link(node, connected_by).await?;
            let may_be_dead = link.begin();
            let asking = Asking {
                body: body.clone(),
                after_answer: may_be_dead && !is_repeatable,
            };
            let timeout = deadline.saturating_duration_since(Instant::now());
            let mut sent = false;
            let taken = within(node, "a request", timeout, async {
                let hello = self.hello_on(&link);
                let opened = stream::converse(&link, node, hello, asking, &mut sent).await?;
                let (mut send, mut receive) = (opened.send, opened.receive);
                if terms.is_whole {
                    let _ = send.finish();
                }
                let limit = stream::MAX_REPLY_BYTES;
                let reply: Reply = stream::read(&mut receive, node, "reply", limit).await?;
                Ok((send, receive, reply))
            });
            match taken.await {
                Ok((send, receive, reply)) => {
                    *link.hold.answered.lock() = Some(Instant::now());
                    return Ok((link, send, receive, reply));
                }
                Err(PeerError::Lost { source, .. })
                    if terms.repeats && may_be_dead && !repeated && (is_repeatable || !sent) =>
                {
                    tracing::debug!(node, %source, "request sent once more over a new connection");
                    repeated = true;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns true if `node` has answered a request within the last `period`, over the connection that is there.
    #[must_use]
    pub fn has_answered(&self, node: &str, period: Duration) -> bool {
        let Some(way) = self.ways().get(node).cloned() else {
            return false;
        };
        // Locked while a connection is being made.
        let Ok(way) = way.try_lock() else {
            return false;
        };
        way.link.as_ref().is_some_and(|link| {
            let answered = *link.hold.answered.lock();
            link.connection.close_reason().is_none()
                && answered.is_some_and(|at| at.elapsed() < period)
        })
    }

    /// Opens a connection of HTTP to the API of `node`.
    ///
    /// # Errors
    /// [`PeerError::Refused`] with the peer's error, or no reply by `deadline`.
    pub async fn api(&self, node: &str, deadline: Instant) -> Result<ApiStream, PeerError> {
        let body = request::Body::Api(request::Api::default());
        let terms = Terms {
            is_whole: false,
            ..WHOLE
        };
        let (_, send, receive, answer) = self.ask(node, body, deadline, terms).await?;
        answered(node, answer)?;
        Ok(ApiStream::new(send, receive))
    }

    /// Closes every connection, and informs the peers.
    pub fn close(&self) {
        for endpoint in &self.0.endpoints {
            endpoint.close(VarInt::from_u32(code::DONE), b"shutting down");
        }
    }

    /// Returns quinn's statistics of the connection to `node`, if there is one and it is not being made.
    #[must_use]
    pub fn stats(&self, node: &str) -> Option<quinn::ConnectionStats> {
        let way = self.ways().get(node).cloned()?;
        let way = way.try_lock().ok()?;
        way.link.as_ref().map(|link| link.connection.stats())
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.0.runtime
    }

    pub(crate) fn options(&self) -> &PeerOptions {
        &self.0.options
    }

    /// Returns the buffers for payloads of dumps.
    pub(crate) fn buffers(&self) -> Pool {
        self.0.buffers.clone()
    }

    /// Returns the identity that the nodes are shown now.
    pub(crate) fn identity(&self) -> Identity {
        self.0.identity.current()
    }

    /// Returns the name of this end: that of its certificate.
    #[must_use]
    pub fn name(&self) -> String {
        self.0.identity.current().name().to_owned()
    }

    /// Returns the Hello that this end introduces itself with on a connection.
    pub(crate) fn hello_on(&self, link: &Link) -> Hello {
        self.hello(link.version)
    }

    fn hello(&self, version: u32) -> Hello {
        let wire = self.0.options.wire;
        stream::hello(&self.name(), &self.0.region, version, wire)
    }

    fn ways(&self) -> parking_lot::MutexGuard<'_, HashMap<String, Arc<tokio::sync::Mutex<Way>>>> {
        self.0.ways.lock()
    }

    /// Returns the connection to `node`; a lost connection is made anew, by `deadline`.
    pub(crate) async fn link(&self, node: &str, deadline: Instant) -> Result<Link, PeerError> {
        let way = Arc::clone(self.ways().entry(node.to_owned()).or_default());
        let connected = async {
            // Callers that come while a connection is being made wait for it here.
            let mut way = way.lock().await;
            loop {
                // A connection made with an older certificate ends when that expires: conversations under way
                // finish on it, new ones do not begin there.
                if let Some(link) = &way.link
                    && link.connection.close_reason().is_none()
                    && link.hold.shown == self.0.identity.current().subject().serial
                {
                    return Ok(link.clone());
                }
                way.link = None;
                if let Some(not_before) = way.not_before {
                    if let Some(refused) = &way.refused
                        && Instant::now() < not_before
                    {
                        return Err(refused.clone());
                    }
                    tokio::time::sleep_until(not_before.into()).await;
                }
                match self.connect(node).await {
                    Ok(link) => {
                        *way = Way {
                            link: Some(link.clone()),
                            ..Way::default()
                        };
                        return Ok(link);
                    }
                    // None of these changes within the deadline.
                    Err(error @ (PeerError::WrongPeer { .. } | PeerError::Identity { .. })) => {
                        return Err(error);
                    }
                    // Nor does this. Each attempt costs both ends a handshake, and the node a conversation.
                    Err(error @ PeerError::Versions { .. }) => {
                        way.refused = Some(error.clone());
                        way.put_off();
                        return Err(error);
                    }
                    Err(error) => {
                        way.refused = None;
                        way.put_off();
                        tracing::debug!(node, %error, "no connection");
                        if way.not_before >= Some(deadline) {
                            return Err(error);
                        }
                    }
                }
            }
        };
        match tokio::time::timeout_at(deadline.into(), connected).await {
            Ok(link) => link,
            Err(_) => Err(PeerError::Unreachable {
                node: node.to_owned(),
                reason: "no connection in time".to_owned(),
            }),
        }
    }

    async fn connect(&self, node: &str) -> Result<Link, PeerError> {
        let inner = &self.0;
        let address = inner
            .addresses
            .address(node)
            .ok_or_else(|| PeerError::NoAddress {
                node: node.to_owned(),
            })?;
        let unreachable = |reason: String| PeerError::Unreachable {
            node: node.to_owned(),
            reason,
        };
        let own = inner.identity.current();
        let wire = inner.options.wire;
        let mut config = own
            .quic_client_config_speaking(wire)
            .map_err(|error| PeerError::identity(&error))?;
        config.transport_config(inner.options.transport());
        // The same socket for the same node, so that several are of use.
        let place = node.bytes().fold(0usize, |sum, byte| {
            sum.wrapping_mul(31).wrapping_add(byte.into())
        });
        let connecting = inner.endpoints[place % inner.endpoints.len()]
            .connect_with(config, address, &server_name(node))
            .map_err(|error| unreachable(error.to_string()))?;
        let connection = tokio::time::timeout(inner.options.handshake_timeout, connecting)
            .await
            .map_err(|_| unreachable(format!("no handshake with {address} in time")))?
            .map_err(|error| match &error {
                // A peer that could say more takes the connection, and refuses the conversation.
                ConnectionError::ConnectionClosed(closed)
                    if u64::from(closed.error_code) == NO_APPLICATION_PROTOCOL =>
                {
                    PeerError::Versions {
                        node: node.to_owned(),
                        reason: format!(
                            "it speaks none of the versions {wire} of the wire that release {} here speaks; \
                             upgrade it (docs/upgrading.md)",
                            versions::RELEASE
                        ),
                    }
                }
                error => unreachable(error.to_string()),
            })?;
        let peer = Peer::of(&connection).map_err(|error| PeerError::identity(&error))?;
        if peer.name() != node || peer.role() != Role::Node {
            connection.close(VarInt::from_u32(code::UNWANTED), b"not who was called");
            return Err(PeerError::WrongPeer {
                node: node.to_owned(),
                found: format!("{} {}", peer.role(), peer.name()),
            });
        }
        let refused = VarInt::from_u32(code::REFUSED);
        let tenure = inner.identity.admit_quic(&connection, refused);
        let tenure = tenure.map_err(|error| PeerError::identity(&error))?;
        let agreed = connection
            .handshake_data()
            .and_then(|data| data.downcast::<HandshakeData>().ok())
            .and_then(|data| agreed(&data.protocol?, wire));
        let Some(version) = agreed else {
            let refusal = self.refusal(&connection, node);
            let refused = tokio::time::timeout(inner.options.request_timeout, refusal).await;
            return Err(refused.unwrap_or_else(|_| PeerError::deadline(node, "a refusal")));
        };
        let router = Router::spawn(connection.clone(), inner.options.request_timeout);
        let hold = Arc::new(Hold {
            connection: connection.clone(),
            shown: own.subject().serial.clone(),
            used: AtomicBool::new(false),
            dial_at: parking_lot::Mutex::default(),
            answered: parking_lot::Mutex::default(),
            _tenure: tenure,
        });
        Ok(Link {
            connection,
            version,
            router,
            hold,
        })
    }

    /// Returns what a node says of the versions, on a connection that has none in common.
    async fn refusal(&self, connection: &Connection, node: &str) -> PeerError {
        let wire = self.0.options.wire;
        let asked = async {
            let (mut send, mut receive) = connection
                .open_bi()
                .await
                .map_err(|source| PeerError::lost(node, source))?;
            let hello = Hello {
                versions: Some(stream::spoken(wire)),
                ..self.hello(wire.newest)
            };
            stream::write(&mut send, node, "hello", &hello).await?;
            let answer = stream::read(&mut receive, node, "refusal", stream::MAX_REQUEST_BYTES);
            answered(node, answer.await?)
        };
        let reason = match asked.await {
            Ok(_) => "it answers a connection without a version".to_owned(),
            Err(PeerError::Refused { error, .. }) => error.message,
            Err(error) => return error,
        };
        connection.close(VarInt::from_u32(code::DONE), b"no common version");
        PeerError::Versions {
            node: node.to_owned(),
            reason,
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        for endpoint in &self.endpoints {
            endpoint.close(VarInt::from_u32(code::DONE), b"");
        }
    }
}

/// Returns the body of a reply, or the refusal in it.
pub(crate) fn answered(node: &str, answer: Reply) -> Result<reply::Body, PeerError> {
    match answer.body {
        Some(reply::Body::Error(error)) => Err(PeerError::refused(node, error)),
        Some(body) => Ok(body),
        None => Err(PeerError::protocol(node, "an empty reply")),
    }
}

/// Returns a quinn endpoint on a socket of its own, configured like those for peers: large buffers, batches
/// that fit. Must be called within a tokio runtime.
///
/// # Errors
/// The socket cannot be bound.
pub fn quic_endpoint(
    bind: SocketAddr,
    server: Option<quinn::ServerConfig>,
    options: &PeerOptions,
) -> Result<Endpoint, PeerError> {
    endpoint_with(EndpointConfig::default(), bind, server, options)
}

/// Returns an endpoint like [`quic_endpoint`] whose connections its successor can reset.
pub(super) fn resettable_endpoint(
    key: ResetKey,
    bind: SocketAddr,
    server: quinn::ServerConfig,
    options: &PeerOptions,
) -> Result<Endpoint, PeerError> {
    let mut config = EndpointConfig::new(Arc::new(key));
    config.cid_generator(|| Box::new(Ids));
    endpoint_with(config, bind, Some(server), options)
}

fn endpoint_with(
    mut config: EndpointConfig,
    bind: SocketAddr,
    server: Option<quinn::ServerConfig>,
    options: &PeerOptions,
) -> Result<Endpoint, PeerError> {
    let failed = |error: std::io::Error| PeerError::Bind {
        address: bind,
        kind: error.kind(),
    };
    let socket =
        socket::bind(bind, options.socket_buffer_bytes, options.packet_bytes).map_err(failed)?;
    config
        .max_udp_payload_size(options.packet_bytes.max(options.assured_packet_bytes))
        .map_err(|error| failed(std::io::Error::other(error)))?;
    Endpoint::new_with_abstract_socket(config, server, socket, Arc::new(TokioRuntime))
        .map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_is_away_leaves_half_of_the_time_to_others_and_takes_three_seconds_at_most() {
        let of = |seconds| {
            let now = Instant::now();
            let by = reached_by(now + Duration::from_secs(seconds));
            by.saturating_duration_since(now).as_secs_f64().round()
        };
        assert_eq!([of(0), of(2), of(6), of(40)], [0.0, 1.0, 3.0, 3.0]);
    }
}
