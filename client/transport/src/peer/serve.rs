//! Serves peers: a socket, its connections, and their conversations.

mod bulk;

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use permafrost_identity::{Peer, ReloadingIdentity};
use permafrost_protocol::control::{self, ErrorCode, ReportedError};
use permafrost_protocol::versions::{Interface, SpokenVersions};
use permafrost_protocol::wire::conversation::{
    ConversationError, check_dump, check_hello, check_request,
};
use permafrost_protocol::wire::message::{Done, Hello, Reply, Request, reply, request};
use permafrost_protocol::wire::{HELLO_ANSWERED, agreed};
use quinn::crypto::rustls::HandshakeData;
use quinn::{Connection, Incoming, RecvStream, SendStream, VarInt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};

use super::intake::{FrameSource, Replies, Sessions};
use super::network::resettable_endpoint;
use super::outflow::{FrameSink, outflow};
use super::reset::ResetKey;
use super::router::Router;
use super::stream::{self, within};
use super::{PeerError, PeerOptions, code};
use crate::shares::Shares;

/// A stream on which a peer speaks HTTP.
pub struct ApiStream(tokio::io::Join<RecvStream, SendStream>);

impl ApiStream {
    pub(super) fn new(send: SendStream, receive: RecvStream) -> Self {
        Self(tokio::io::join(receive, send))
    }
}

impl AsyncRead for ApiStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for ApiStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

/// Server of a node's HTTP API, for its peers.
pub trait ApiServer: Send + Sync {
    /// Serves one connection to its end; the server has to check what the peer may request.
    fn serve(
        self: Arc<Self>,
        peer: &Peer,
        stream: ApiStream,
    ) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// Services of a node for its peers. Every method may block; each call runs on a thread of its own. The handler
/// has to check what the peer may do ([`Peer::may`]).
pub trait Handler: Send + Sync + 'static {
    /// Handles every request but a dump or a fetch.
    fn call(&self, peer: &Peer, body: request::Body) -> reply::Body;

    /// Receives a dump: [`Replies::opened`], then frames up to `Prepare`, then the commit.
    ///
    /// # Errors
    /// The error that is sent to the peer.
    fn dump(
        &self,
        peer: &Peer,
        request: request::Dump,
        frames: &mut dyn FrameSource,
        replies: &mut dyn Replies,
    ) -> Result<(), control::Error>;

    /// Sends a checkpoint: [`FrameSink::opened`], then its frames, `Prepare` the last.
    ///
    /// # Errors
    /// The error that is sent to the peer.
    fn fetch(
        &self,
        peer: &Peer,
        request: request::Fetch,
        frames: &mut dyn FrameSink,
    ) -> Result<(), control::Error>;

    /// Returns the server of the HTTP API for a peer.
    ///
    /// # Errors
    /// The peer may not use the API, or the API is not served to peers.
    fn api(&self, peer: &Peer) -> Result<Arc<dyn ApiServer>, control::Error> {
        let peer = peer.name().to_owned();
        Err(RefusedConversation::NoApi { peer }.into())
    }
}

/// Shares of a node's limits that one peer may use. A node passes on the dumps of many, and a restore reads a
/// file for each process of its tree.
struct PartOf {
    connections: usize,
    streams: usize,
    calls: usize,
    dumps: usize,
    fetches: usize,
}

impl PartOf {
    fn new(options: &PeerOptions) -> Self {
        let (connections, conversations) = (options.connections, options.conversations);
        Self {
            connections: connections.div_ceil(4),
            streams: conversations * 4,
            calls: conversations.div_ceil(2),
            dumps: conversations.div_ceil(2),
            fetches: conversations.div_ceil(4) * 3,
        }
    }
}

struct Inner {
    endpoint: quinn::Endpoint,
    identity: Arc<ReloadingIdentity>,
    handler: Arc<dyn Handler>,
    options: PeerOptions,
    sessions: Sessions,
    /// Handshakes under way, counted by address.
    handshakes: Arc<Shares>,
    /// Limit on the connections of all peers. Each of the following counters has a limit in all and one by
    /// peer.
    connections: Arc<Semaphore>,
    streams: Arc<Shares>,
    calls: Arc<Shares>,
    dumps: Arc<Shares>,
    fetches: Arc<Shares>,
    apis: Arc<Shares>,
    /// Counter of the times that all connections were ended.
    disconnects: watch::Sender<u64>,
    /// Connections of each peer.
    peers: Arc<Shares>,
    /// Bulk streams over TLS.
    bulks: Arc<Shares>,
    /// True if these are taken.
    tls_bulk: bool,
    /// Changed when the endpoint is closed.
    closed: watch::Sender<()>,
}

/// A socket that serves peers. Dropping it closes the connections and ends the service.
pub struct Endpoint(Arc<Inner>);

impl Endpoint {
    /// Listens on `address`.
    ///
    /// # Errors
    /// The socket cannot be bound, or the identity cannot be used.
    pub fn serve(
        runtime: &Handle,
        address: SocketAddr,
        identity: Arc<ReloadingIdentity>,
        handler: Arc<dyn Handler>,
        options: PeerOptions,
    ) -> Result<Self, PeerError> {
        let _entered = runtime.enter();
        let mut config = identity
            .quic_server_config(options.wire)
            .map_err(|error| PeerError::identity(&error))?;
        config
            .transport_config(options.transport())
            .max_incoming(options.handshakes * 2);
        let key = ResetKey(identity.current().reset_key());
        let endpoint = resettable_endpoint(key, address, config, &options)?;
        let bulk = bulk::Listener::beside(&endpoint, &identity, &options)?;
        let part = PartOf::new(&options);
        let all = options.conversations;
        let inner = Arc::new(Inner {
            endpoint,
            identity,
            handler,
            sessions: Sessions::default(),
            handshakes: Shares::new(options.handshakes.div_ceil(2), options.handshakes),
            connections: Arc::new(Semaphore::new(options.connections)),
            streams: Shares::new(part.streams, usize::MAX),
            calls: Shares::new(part.calls, all),
            dumps: Shares::new(part.dumps, all),
            fetches: Shares::new(part.fetches, all),
            apis: Shares::new(part.calls, all),
            disconnects: watch::Sender::new(0),
            peers: Shares::new(part.connections, usize::MAX),
            bulks: Shares::new(part.dumps, all),
            tls_bulk: bulk.is_some(),
            closed: watch::Sender::new(()),
            options,
        });
        if let Some(listener) = bulk {
            runtime.spawn(listener.accept(Arc::clone(&inner)));
        }
        let accepting = Arc::clone(&inner);
        runtime.spawn(async move {
            while let Some(incoming) = accepting.endpoint.accept().await {
                accept(&accepting, incoming);
            }
        });
        Ok(Self(inner))
    }

    /// Returns the address that the endpoint listens on.
    ///
    /// # Errors
    /// The socket does not report its address.
    pub fn local_address(&self) -> std::io::Result<SocketAddr> {
        self.0.endpoint.local_addr()
    }

    /// Returns the identity that peers see.
    #[must_use]
    pub fn identity(&self) -> &ReloadingIdentity {
        &self.0.identity
    }

    /// Returns the number of open connections.
    #[must_use]
    pub fn open_connections(&self) -> usize {
        self.0.endpoint.open_connections()
    }

    /// Ends every connection; peers may reconnect, and resume dumps within their grace period.
    pub fn disconnect(&self) {
        self.0.disconnects.send_modify(|count| *count += 1);
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.0
            .endpoint
            .close(VarInt::from_u32(code::DONE), b"shutting down");
        self.0.closed.send_replace(());
        self.0.sessions.fail_all();
    }
}

/// Returns the key that identifies a session's owner: names are unique within a role.
fn key(peer: &Peer) -> String {
    format!("{} {}", peer.role(), peer.name())
}

fn accept(inner: &Arc<Inner>, incoming: Incoming) {
    // Under load an address has to be shown to be the sender's own: handshakes are counted by it.
    let many = inner.options.handshakes.div_ceil(4);
    if inner.handshakes.taken() >= many && incoming.may_retry() {
        if let Err(error) = incoming.retry() {
            tracing::debug!(%error, "no retry sent");
        }
        return;
    }
    let address = incoming.remote_address().ip().to_canonical().to_string();
    let handshake = inner.handshakes.take(&address);
    let place = Arc::clone(&inner.connections).try_acquire_owned();
    let (Some(handshake), Ok(place)) = (handshake, place) else {
        return incoming.refuse();
    };
    let inner = Arc::clone(inner);
    tokio::spawn(async move {
        let timeout = inner.options.handshake_timeout;
        let connecting = match incoming.accept() {
            Ok(connecting) => connecting,
            Err(error) => return tracing::debug!(%error, "handshake refused"),
        };
        let connection = match tokio::time::timeout(timeout, connecting).await {
            Ok(Ok(connection)) => connection,
            Ok(Err(error)) => return tracing::debug!(%error, "handshake failed"),
            Err(_) => return,
        };
        drop(handshake);
        serve_connection(&inner, &connection).await;
        drop(place);
    });
}

async fn serve_connection(inner: &Arc<Inner>, connection: &Connection) {
    let peer = match Peer::of(connection) {
        Ok(peer) => Arc::new(peer),
        Err(error) => {
            tracing::warn!(event = "peer-refused", %error, address = %connection.remote_address(), "peer refused");
            return connection.close(VarInt::from_u32(code::UNWANTED), b"who are you?");
        }
    };
    let Some(_place) = inner.peers.take(&key(&peer)) else {
        return connection.close(VarInt::from_u32(code::BUSY), b"too many connections");
    };
    let version = connection
        .handshake_data()
        .and_then(|data| data.downcast::<HandshakeData>().ok())
        .and_then(|data| agreed(&data.protocol?, inner.options.wire));
    let refused = VarInt::from_u32(code::REFUSED);
    let _tenure = match inner.identity.admit_quic(connection, refused) {
        Ok(tenure) => tenure,
        Err(error) => {
            tracing::warn!(event = "peer-refused", %error, peer = peer.name(), "peer refused");
            return connection.close(refused, error.to_string().as_bytes());
        }
    };
    let router = Router::spawn(connection.clone(), inner.options.request_timeout);
    let mut disconnects = inner.disconnects.subscribe();
    loop {
        // quinn bounds how many streams a connection may have open; a peer may have several connections.
        let (mut send, mut receive) = tokio::select! {
            opened = connection.accept_bi() => match opened {
                Ok(streams) => streams,
                Err(_) => return,
            },
            _ = disconnects.changed() => {
                return connection.close(VarInt::from_u32(code::DONE), b"disconnected");
            }
        };
        let Some(share) = inner.streams.take(&key(&peer)) else {
            let busy = VarInt::from_u32(code::BUSY);
            let _ = send.reset(busy);
            let _ = receive.stop(busy);
            continue;
        };
        let conversation = Conversation {
            inner: Arc::clone(inner),
            connection: connection.clone(),
            version,
            peer: Arc::clone(&peer),
            router: router.clone(),
        };
        tokio::spawn(async move {
            let _share = share;
            if let Err(error) = conversation.run(send, receive).await {
                tracing::debug!(peer = conversation.peer.name(), %error, "conversation ended");
            }
        });
    }
}

struct Conversation {
    inner: Arc<Inner>,
    connection: Connection,
    /// Version of the wire that both ends have agreed on; `None` if they have none in common.
    version: Option<u32>,
    peer: Arc<Peer>,
    router: Router,
}

impl Conversation {
    async fn run(&self, mut send: SendStream, mut receive: RecvStream) -> Result<(), PeerError> {
        let name = self.peer.name();
        let timeout = self.inner.options.request_timeout;
        let asked = within(name, "a request", timeout, async {
            let hello: Hello =
                stream::read(&mut receive, name, "hello", stream::MAX_REQUEST_BYTES).await?;
            if let Err(refused) = self.check_hello(&hello) {
                return Ok(Err(refused));
            }
            if let Some(version) = self.version.filter(|version| *version >= HELLO_ANSWERED) {
                let own = self.inner.identity.current();
                let hello = Hello {
                    tls_bulk: self.inner.tls_bulk,
                    ..stream::hello(own.name(), "", version, self.inner.options.wire)
                };
                let body = Some(reply::Body::Hello(hello));
                stream::write(&mut send, name, "hello", &Reply { body }).await?;
            }
            let limit = stream::MAX_REQUEST_BYTES;
            let request: Request = match stream::read(&mut receive, name, "request", limit).await {
                Err(PeerError::Protocol { .. }) => {
                    return Ok(Err(RefusedConversation::TooLong { limit }));
                }
                read => read?,
            };
            let checked = check_request(&request).map(drop);
            Ok(checked
                .map(|()| request)
                .map_err(RefusedConversation::Begun))
        });
        let request = match asked.await {
            Ok(Ok(request)) => request,
            Ok(Err(refused)) => return self.refuse(send, refused).await,
            Err(error) => {
                let misbehaved = VarInt::from_u32(code::MISBEHAVED);
                let _ = send.reset(misbehaved);
                let _ = receive.stop(misbehaved);
                return Err(error);
            }
        };
        match request.body {
            // Checked above.
            None => Ok(()),
            Some(request::Body::Dump(dump)) => self.dump(dump, send, receive).await,
            Some(request::Body::Fetch(fetch)) => self.fetch(fetch, send).await,
            Some(request::Body::Api(_)) => self.api(send, receive).await,
            Some(body) => self.call(body, send).await,
        }
    }

    /// Checks a peer's Hello: its version is the connection's, its name the certificate's.
    fn check_hello(&self, hello: &Hello) -> Result<(), RefusedConversation> {
        let certificate = self.peer.name();
        let Some(version) = self.version else {
            let own = self.inner.identity.current();
            let spoken = stream::spoken(self.inner.options.wire);
            let theirs = hello.versions.clone().unwrap_or_default();
            theirs.check().map_err(ConversationError::from)?;
            let (own, theirs) = ((own.name(), &spoken), (certificate, &theirs));
            let common = SpokenVersions::common(Interface::Wire, own, theirs);
            let version = common.map_err(ConversationError::from)?;
            return Err(ConversationError::Version {
                found: hello.version,
                version,
            }
            .into());
        };
        check_hello(hello, version)?;
        if hello.name != certificate {
            return Err(RefusedConversation::Name {
                certificate: certificate.to_owned(),
                name: hello.name.clone(),
            });
        }
        Ok(())
    }

    async fn refuse(
        &self,
        mut send: SendStream,
        refused: impl Into<control::Error>,
    ) -> Result<(), PeerError> {
        let answer = Reply {
            body: Some(reply::Body::Error(refused.into())),
        };
        stream::write(&mut send, self.peer.name(), "reply", &answer).await?;
        let _ = send.finish();
        Ok(())
    }

    async fn busy(&self, send: SendStream) -> Result<(), PeerError> {
        self.refuse(send, RefusedConversation::Busy).await
    }

    async fn call(&self, body: request::Body, mut send: SendStream) -> Result<(), PeerError> {
        let Some(permit) = self.inner.calls.take(&key(&self.peer)) else {
            return self.busy(send).await;
        };
        let (handler, peer) = (Arc::clone(&self.inner.handler), Arc::clone(&self.peer));
        let called = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            handler.call(&peer, body)
        });
        let body = called
            .await
            .unwrap_or_else(|_| reply::Body::Error(RefusedConversation::Panic.into()));
        let answer = Reply { body: Some(body) };
        stream::write(&mut send, self.peer.name(), "reply", &answer).await?;
        let _ = send.finish();
        Ok(())
    }

    async fn api(&self, mut send: SendStream, receive: RecvStream) -> Result<(), PeerError> {
        let Some(_permit) = self.inner.apis.take(&key(&self.peer)) else {
            return self.busy(send).await;
        };
        let server = match self.inner.handler.api(&self.peer) {
            Ok(server) => server,
            Err(refused) => return self.refuse(send, refused).await,
        };
        let answer = Reply {
            body: Some(reply::Body::Done(Done::default())),
        };
        stream::write(&mut send, self.peer.name(), "reply", &answer).await?;
        let stream = ApiStream::new(send, receive);
        server.serve(&self.peer, stream).await;
        Ok(())
    }

    async fn dump(
        &self,
        dump: request::Dump,
        send: SendStream,
        receive: RecvStream,
    ) -> Result<(), PeerError> {
        let (key, sessions) = (key(&self.peer), &self.inner.sessions);
        let options = &self.inner.options;
        let Ok(id) = check_dump(&dump) else {
            return self.refuse(send, RefusedConversation::SessionLength).await;
        };
        let session = if let Some(session) = sessions.find(&key, id) {
            if let Err(error) = session.check_resume(&dump) {
                return self.refuse(send, RefusedConversation::Resume(error)).await;
            }
            session
        } else if dump.resume {
            return self.refuse(send, RefusedConversation::NoSession).await;
        } else {
            let Some(permit) = self.inner.dumps.take(&key) else {
                return self.busy(send).await;
            };
            let Some((session, mut intake, mut answers)) = sessions.begin(&key, id, &dump, options)
            else {
                return self.refuse(send, RefusedConversation::SessionTaken).await;
            };
            let (handler, peer) = (Arc::clone(&self.inner.handler), Arc::clone(&self.peer));
            let finished = Arc::clone(&session);
            let handled = tokio::task::spawn_blocking(move || {
                let _permit = permit;
                handler.dump(&peer, dump, &mut intake, &mut answers)
            });
            tokio::spawn(async move { finished.finish(settled(handled.await)) });
            session
        };
        sessions
            .serve(id, session, &self.router, send, receive, options)
            .await;
        Ok(())
    }

    async fn fetch(&self, fetch: request::Fetch, send: SendStream) -> Result<(), PeerError> {
        let Some(permit) = self.inner.fetches.take(&key(&self.peer)) else {
            return self.busy(send).await;
        };
        let (mut out, tap) = outflow(self.peer.name(), &self.inner.options);
        let (handler, peer) = (Arc::clone(&self.inner.handler), Arc::clone(&self.peer));
        let handled = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            handler.fetch(&peer, fetch, &mut out)
        });
        let result = async { settled(handled.await) };
        let options = &self.inner.options;
        tap.run(self.peer.name(), &self.connection, send, result, options)
            .await
    }
}

fn settled(
    handled: Result<Result<(), control::Error>, tokio::task::JoinError>,
) -> Result<(), control::Error> {
    handled.unwrap_or_else(|_| Err(RefusedConversation::Panic.into()))
}

/// Reason why a conversation is refused, or ended, without a word of the handler.
#[derive(Debug, thiserror::Error)]
enum RefusedConversation {
    #[error(transparent)]
    Begun(#[from] ConversationError),
    /// Cure: call the node by the name in its certificate (`permafrost pki show`).
    #[error("the certificate is of {certificate}, not of {name}")]
    Name { certificate: String, name: String },
    /// Cure: ask for fewer names at once.
    #[error("the request is longer than {limit} bytes")]
    TooLong { limit: usize },
    /// Cure: try again when fewer requests of this certificate are under way.
    #[error("too many conversations at once")]
    Busy,
    /// Cure: use the same version of Permafrost everywhere; if it is, it is a defect: `permafrost report` collects
    /// what a report needs.
    #[error("a session has 16 bytes")]
    SessionLength,
    #[error(transparent)]
    Resume(ConversationError),
    /// Cure: dump again: the node was restarted, or the session's time was over. The task goes on.
    #[error("no such session here")]
    NoSession,
    /// Cure: dump again when fewer dumps are under way.
    #[error("this session is here already, or there are too many")]
    SessionTaken,
    /// Cure: ask another node, or one that runs the same version.
    #[error("no API is served to {peer}")]
    NoApi { peer: String },
    /// Cure: report it, with the node's log: `permafrost report` collects it. Other requests go on.
    #[error("the request ended in a panic")]
    Panic,
}

impl ReportedError for RefusedConversation {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Begun(_) | Self::TooLong { .. } | Self::SessionLength => ErrorCode::Invalid,
            Self::Name { .. } => ErrorCode::Denied,
            Self::Busy | Self::NoApi { .. } => ErrorCode::Unavailable,
            Self::Resume(_) | Self::SessionTaken => ErrorCode::Conflict,
            Self::NoSession => ErrorCode::NotFound,
            Self::Panic => ErrorCode::Internal,
        }
    }
}
