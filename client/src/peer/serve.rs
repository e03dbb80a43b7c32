//! Serving peers: a socket, its connections, and their conversations.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use permafrost_protocol::control;
use permafrost_protocol::wire::conversation::{check_hello, check_request};
use permafrost_protocol::wire::message::{Hello, Reply, Request, reply, request};
use quinn::{Connection, Incoming, RecvStream, SendStream, VarInt};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::intake::{FrameSource, Replies, Sessions};
use super::network::resettable_endpoint;
use super::outflow::{FrameSink, outflow};
use super::reset::ResetKey;
use super::router::Router;
use super::stream::{self, within};
use super::{Options, PeerError, code};
use crate::identity::{Peer, ReloadingIdentity};

/// What a node does for its peers. Every method may block; each runs on a thread of its own. What the peer may do
/// is the handler's to check ([`Peer::may`]).
pub trait Handler: Send + Sync + 'static {
    /// Anything but a dump or a fetch.
    fn call(&self, peer: &Peer, body: request::Body) -> reply::Body;

    /// Takes a dump in: [`Replies::opened`], then frames up to `Prepare`, then the commit.
    ///
    /// # Errors
    /// What the peer is told.
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
    /// What the peer is told.
    fn fetch(
        &self,
        peer: &Peer,
        request: request::Fetch,
        frames: &mut dyn FrameSink,
    ) -> Result<(), control::Error>;
}

struct Inner {
    endpoint: quinn::Endpoint,
    identity: Arc<ReloadingIdentity>,
    handler: Arc<dyn Handler>,
    options: Options,
    sessions: Sessions,
    handshakes: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    calls: Arc<Semaphore>,
    dumps: Arc<Semaphore>,
    fetches: Arc<Semaphore>,
    /// Counts how often all connections were ended.
    disconnects: watch::Sender<u64>,
    /// Connections of each peer.
    peers: Mutex<HashMap<String, usize>>,
}

/// A socket that serves peers. Dropped, it says goodbye and serves nobody.
pub struct Endpoint(Arc<Inner>);

impl Endpoint {
    /// Listens on `address`.
    ///
    /// # Errors
    /// The socket cannot be had, or the identity cannot be used.
    pub fn serve(
        runtime: &Handle,
        address: SocketAddr,
        identity: Arc<ReloadingIdentity>,
        handler: Arc<dyn Handler>,
        options: Options,
    ) -> Result<Self, PeerError> {
        let _entered = runtime.enter();
        let mut config = identity
            .quic_server_config()
            .map_err(|error| PeerError::identity(&error))?;
        config
            .transport_config(options.transport())
            .max_incoming(options.handshakes * 2);
        let key = ResetKey(identity.current().reset_key());
        let endpoint = resettable_endpoint(key, address, config, &options)?;
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        let inner = Arc::new(Inner {
            endpoint,
            identity,
            handler,
            sessions: Sessions::default(),
            handshakes: semaphore(options.handshakes),
            connections: semaphore(options.connections),
            calls: semaphore(options.conversations),
            dumps: semaphore(options.conversations),
            fetches: semaphore(options.conversations),
            disconnects: watch::Sender::new(0),
            peers: Mutex::default(),
            options,
        });
        let accepting = Arc::clone(&inner);
        runtime.spawn(async move {
            while let Some(incoming) = accepting.endpoint.accept().await {
                accept(&accepting, incoming);
            }
        });
        Ok(Self(inner))
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The socket does not say.
    pub fn local_address(&self) -> std::io::Result<SocketAddr> {
        self.0.endpoint.local_addr()
    }

    /// The identity that peers see.
    #[must_use]
    pub fn identity(&self) -> &ReloadingIdentity {
        &self.0.identity
    }

    /// Connections that are open.
    #[must_use]
    pub fn open_connections(&self) -> usize {
        self.0.endpoint.open_connections()
    }

    /// Ends every connection; peers may come back, and resume dumps within their grace.
    pub fn disconnect(&self) {
        self.0.disconnects.send_modify(|count| *count += 1);
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.0
            .endpoint
            .close(VarInt::from_u32(code::DONE), b"shutting down");
        self.0.sessions.fail_all();
    }
}

/// A connection's place among those of its peer.
struct Place {
    inner: Arc<Inner>,
    peer: String,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut peers = self
            .inner
            .peers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = peers.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                peers.remove(&self.peer);
            }
        }
    }
}

/// Who a session belongs to: names are unique within a role.
fn key(peer: &Peer) -> String {
    format!("{} {}", peer.role(), peer.name())
}

fn accept(inner: &Arc<Inner>, incoming: Incoming) {
    let handshake = Arc::clone(&inner.handshakes).try_acquire_owned();
    let place = Arc::clone(&inner.connections).try_acquire_owned();
    let (Ok(handshake), Ok(place)) = (handshake, place) else {
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
            tracing::warn!(%error, address = %connection.remote_address(), "peer refused");
            return connection.close(VarInt::from_u32(code::UNWANTED), b"who are you?");
        }
    };
    let Some(_place) = place(inner, key(&peer)) else {
        return connection.close(VarInt::from_u32(code::BUSY), b"too many connections");
    };
    let refused = VarInt::from_u32(code::REFUSED);
    let _tenure = match inner.identity.admit_quic(connection, refused) {
        Ok(tenure) => tenure,
        Err(error) => {
            tracing::warn!(%error, peer = peer.name(), "peer refused");
            return connection.close(refused, error.to_string().as_bytes());
        }
    };
    let router = Router::spawn(connection.clone(), inner.options.request_timeout);
    let mut disconnects = inner.disconnects.subscribe();
    loop {
        // quinn bounds how many streams a peer may have open, and so these tasks.
        let (send, receive) = tokio::select! {
            opened = connection.accept_bi() => match opened {
                Ok(streams) => streams,
                Err(_) => return,
            },
            _ = disconnects.changed() => {
                return connection.close(VarInt::from_u32(code::DONE), b"disconnected");
            }
        };
        let conversation = Conversation {
            inner: Arc::clone(inner),
            connection: connection.clone(),
            peer: Arc::clone(&peer),
            router: router.clone(),
        };
        tokio::spawn(async move {
            if let Err(error) = conversation.run(send, receive).await {
                tracing::debug!(peer = conversation.peer.name(), %error, "conversation ended");
            }
        });
    }
}

/// One peer's share of the connections is a quarter.
fn place(inner: &Arc<Inner>, peer: String) -> Option<Place> {
    let mut peers = inner.peers.lock().unwrap_or_else(PoisonError::into_inner);
    let count = peers.entry(peer.clone()).or_default();
    if *count >= inner.options.connections.div_ceil(4) {
        return None;
    }
    *count += 1;
    drop(peers);
    Some(Place {
        inner: Arc::clone(inner),
        peer,
    })
}

struct Conversation {
    inner: Arc<Inner>,
    connection: Connection,
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
            let request: Request =
                stream::read(&mut receive, name, "request", stream::MAX_REQUEST_BYTES).await?;
            Ok((hello, request))
        });
        let (hello, request) = match asked.await {
            Ok(asked) => asked,
            Err(error) => {
                let misbehaved = VarInt::from_u32(code::MISBEHAVED);
                let _ = send.reset(misbehaved);
                let _ = receive.stop(misbehaved);
                return Err(error);
            }
        };
        if let Err(error) = check_hello(&hello).and_then(|()| check_request(&request).map(drop)) {
            let invalid = control::ErrorCode::Invalid;
            return self.refuse(send, invalid, error.to_string()).await;
        }
        if hello.name != name {
            let message = format!("the certificate is of {name}, not of {}", hello.name);
            return self.refuse(send, control::ErrorCode::Denied, message).await;
        }
        match request.body {
            // Checked above.
            None => Ok(()),
            Some(request::Body::Dump(dump)) => self.dump(dump, send, receive).await,
            Some(request::Body::Fetch(fetch)) => self.fetch(fetch, send).await,
            Some(body) => self.call(body, send).await,
        }
    }

    async fn refuse(
        &self,
        mut send: SendStream,
        error: control::ErrorCode,
        message: String,
    ) -> Result<(), PeerError> {
        let answer = Reply {
            body: Some(reply::Body::Error(failure(error, message))),
        };
        stream::write(&mut send, self.peer.name(), "reply", &answer).await?;
        let _ = send.finish();
        Ok(())
    }

    async fn busy(&self, send: SendStream) -> Result<(), PeerError> {
        let message = "too many conversations at once".to_owned();
        self.refuse(send, control::ErrorCode::Unavailable, message)
            .await
    }

    async fn call(&self, body: request::Body, mut send: SendStream) -> Result<(), PeerError> {
        let Some(permit) = permit(&self.inner.calls) else {
            return self.busy(send).await;
        };
        let (handler, peer) = (Arc::clone(&self.inner.handler), Arc::clone(&self.peer));
        let called = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            handler.call(&peer, body)
        });
        let body = called.await.unwrap_or_else(|_| {
            let message = "the request ended in a panic".to_owned();
            reply::Body::Error(failure(control::ErrorCode::Internal, message))
        });
        let answer = Reply { body: Some(body) };
        stream::write(&mut send, self.peer.name(), "reply", &answer).await?;
        let _ = send.finish();
        Ok(())
    }

    async fn dump(
        &self,
        dump: request::Dump,
        send: SendStream,
        receive: RecvStream,
    ) -> Result<(), PeerError> {
        let Ok(id) = <[u8; 16]>::try_from(dump.session.as_slice()) else {
            let message = "a session has 16 bytes".to_owned();
            return self
                .refuse(send, control::ErrorCode::Invalid, message)
                .await;
        };
        let sessions = &self.inner.sessions;
        let session = if dump.resume {
            let Some(session) = sessions.find(&key(&self.peer), id) else {
                let message = "no such session here".to_owned();
                return self
                    .refuse(send, control::ErrorCode::NotFound, message)
                    .await;
            };
            session
        } else {
            let Some(permit) = permit(&self.inner.dumps) else {
                return self.busy(send).await;
            };
            let Some((session, mut intake, mut answers)) = sessions.begin(&key(&self.peer), id)
            else {
                let message = "this session is here already, or there are too many".to_owned();
                return self
                    .refuse(send, control::ErrorCode::Conflict, message)
                    .await;
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
        let options = &self.inner.options;
        sessions
            .serve(id, session, &self.router, send, receive, options)
            .await;
        Ok(())
    }

    async fn fetch(&self, fetch: request::Fetch, send: SendStream) -> Result<(), PeerError> {
        let Some(permit) = permit(&self.inner.fetches) else {
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

fn permit(semaphore: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
    Arc::clone(semaphore).try_acquire_owned().ok()
}

fn settled(
    handled: Result<Result<(), control::Error>, tokio::task::JoinError>,
) -> Result<(), control::Error> {
    handled.unwrap_or_else(|_| {
        let message = "the request ended in a panic".to_owned();
        Err(failure(control::ErrorCode::Internal, message))
    })
}

fn failure(code: control::ErrorCode, message: String) -> control::Error {
    control::Error {
        code: code.into(),
        message,
        hint: String::new(),
    }
}
