//! Connections to the other nodes: the sockets, and one connection to each node in use.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_identity::{Peer, ReloadingIdentity, Role, Tenure, server_name};
use permafrost_protocol::wire::message::{Hello, Reply, reply, request};
use quinn::{Connection, Endpoint, EndpointConfig, TokioRuntime, VarInt};
use tokio::runtime::Handle;

use super::reset::{Ids, ResetKey};
use super::router::Router;
use super::stream::{self, within};
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

/// A connection in use, and its bulk streams. Closed when its last clone is dropped: each conversation keeps
/// one.
#[derive(Clone)]
pub(crate) struct Link {
    pub(crate) connection: Connection,
    pub(crate) router: Router,
    hold: Arc<Hold>,
}

/// Ends a connection when it is dropped.
struct Hold {
    connection: Connection,
    /// Serial number of the own certificate that the peer was shown.
    shown: String,
    _tenure: Tenure,
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
}

struct Inner {
    runtime: Handle,
    endpoints: Vec<Endpoint>,
    region: String,
    options: PeerOptions,
    identity: Arc<ReloadingIdentity>,
    addresses: Arc<dyn Addresses>,
    ways: parking_lot::Mutex<HashMap<String, Arc<tokio::sync::Mutex<Way>>>>,
}

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
    /// of the runtime. The request is not sent again after a lost connection if it may have arrived.
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
        let link = self.link(node, deadline).await?;
        let timeout = deadline.saturating_duration_since(Instant::now());
        let answer = within(node, "a request", timeout, async {
            let (mut send, mut receive) =
                stream::converse(&link.connection, node, self.hello(), body).await?;
            let _ = send.finish();
            stream::read(&mut receive, node, "reply", stream::MAX_REPLY_BYTES).await
        });
        answered(node, answer.await?)
    }

    /// Opens a connection of HTTP to the API of `node`.
    ///
    /// # Errors
    /// [`PeerError::Refused`] with the peer's error, or no reply by `deadline`.
    pub async fn api(&self, node: &str, deadline: Instant) -> Result<ApiStream, PeerError> {
        let link = self.link(node, deadline).await?;
        let timeout = deadline.saturating_duration_since(Instant::now());
        let body = request::Body::Api(request::Api::default());
        let (send, receive, answer) = within(node, "a request", timeout, async {
            let (send, mut receive) =
                stream::converse(&link.connection, node, self.hello(), body).await?;
            let answer = stream::read(&mut receive, node, "reply", stream::MAX_REPLY_BYTES).await?;
            Ok((send, receive, answer))
        })
        .await?;
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

    /// Returns the Hello that this node introduces itself with.
    pub fn hello(&self) -> Hello {
        stream::hello(self.0.identity.current().name(), &self.0.region)
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
                    Err(error @ (PeerError::WrongPeer { .. } | PeerError::Identity { .. })) => {
                        return Err(error);
                    }
                    Err(error) => {
                        let pause = FIRST_PAUSE * 2u32.saturating_pow(way.failures.min(10));
                        let now = Instant::now();
                        way.not_before = Some(now + pause.min(MAX_PAUSE));
                        way.failures += 1;
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
        let mut config = own.quic_client_config();
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
            .map_err(|error| unreachable(error.to_string()))?;
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
        let router = Router::spawn(connection.clone(), inner.options.request_timeout);
        let hold = Arc::new(Hold {
            connection: connection.clone(),
            shown: own.subject().serial.clone(),
            _tenure: tenure,
        });
        Ok(Link {
            connection,
            router,
            hold,
        })
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
