//! Handler of the requests that other nodes and agents send to this node.

use std::sync::{Arc, OnceLock};

use permafrost_audit::{Audit, AuditedRequest, Who, name_of};
use permafrost_cluster::held;
use permafrost_cluster::repair::{Puller, Throttle, ThrottledSink};
use permafrost_clustered::ClusteredStore;
use permafrost_identity::{Action, Peer, Role};
use permafrost_protocol::access::Access;
use permafrost_protocol::control;
use permafrost_protocol::manifest::Manifest;
use permafrost_protocol::wire::frame::Kind;
use permafrost_protocol::wire::message::{Closed, Committed, Done, Prepared, reply, request};
use permafrost_store::StoreError;
use permafrost_transport::peer::{ApiServer, FrameSink, FrameSource, Handler, PeerError, Replies};

use super::replica::take_copy;
use crate::agents::{Agents, authorize, serve_fetch};
use crate::error::{DeniedError, RequestError};

/// Handler that serves each peer according to its certificate.
pub struct NodeHandler {
    node: String,
    serving: OnceLock<Serving>,
    api: OnceLock<Arc<dyn ApiServer>>,
    audit: Arc<Audit>,
}

struct Serving {
    agents: Agents,
    copying: Option<Copying>,
}

impl Serving {
    fn store(&self) -> &ClusteredStore {
        self.agents.store()
    }

    fn done(&self) -> reply::Body {
        reply::Body::Done(Done {
            free_bytes: self.store().local().region_status().free_bytes,
            unix_ms: permafrost_store::clock::unix_ms(),
        })
    }
}

/// State that serving other nodes of a cluster needs in addition.
pub struct Copying {
    /// Puller of checkpoints from other nodes.
    pub puller: Arc<Puller>,
    /// Throttle for transfers that no request waits for.
    pub throttle: Arc<Throttle>,
}

impl NodeHandler {
    /// Makes the handler of the node of that name. Until [`Self::begin`] it asks every peer to come again.
    #[must_use]
    pub fn new(node: &str) -> Self {
        Self {
            node: node.to_owned(),
            serving: OnceLock::new(),
            api: OnceLock::new(),
            audit: Arc::new(Audit::off()),
        }
    }

    /// Records the requests of peers in an audit log.
    #[must_use]
    pub fn with_audit(self, audit: Arc<Audit>) -> Self {
        Self { audit, ..self }
    }

    /// Begins to serve peers; other nodes only with `copying`. A node must listen before it joins a cluster, as it
    /// publishes its address there, and must serve only after it has joined.
    pub fn begin(&self, agents: Agents, copying: Option<Copying>) {
        let serving = Serving { agents, copying };
        let first = self.serving.set(serving).is_ok();
        debug_assert!(first, "a handler begins once");
    }

    /// Begins to serve the HTTP API to peers.
    pub fn begin_api(&self, api: Arc<dyn ApiServer>) {
        let first = self.api.set(api).is_ok();
        debug_assert!(first, "an API begins once");
    }

    fn serving(&self) -> Result<&Serving, RequestError> {
        self.serving.get().ok_or_else(|| self.starting())
    }

    /// Handles requests that only nodes may send to each other.
    fn between_nodes(
        &self,
        serving: &Serving,
        copying: &Copying,
        body: request::Body,
    ) -> Result<reply::Body, StoreError> {
        Ok(match body {
            request::Body::Publish(publish) => {
                serving.store().local().publish(&publish.checkpoint)?;
                serving.done()
            }
            request::Body::Rollback(rollback) => {
                roll_back(serving.store(), &rollback.checkpoint)?;
                serving.done()
            }
            request::Body::Inventory(inventory) => {
                reply::Body::Held(held(serving.store().local(), &inventory))
            }
            request::Body::Pull(pull) => {
                let record = copying.puller.pull(&pull)?;
                reply::Body::Committed(Committed {
                    checkpoint: Some(record),
                    nodes: vec![self.node.clone()],
                })
            }
            request::Body::Verify(verify) => {
                reply::Body::Verified(serving.agents.scrubber("verifies")?.verified(&verify)?)
            }
            _ => {
                return Err(RequestError::Unknown.into());
            }
        })
    }

    fn answer(&self, peer: &Peer, body: request::Body) -> Result<reply::Body, control::Error> {
        let serving = self.serving()?;
        if let request::Body::Control(request) = body {
            return Ok(reply::Body::Control(serving.agents.call(peer, request)));
        }
        authorize(peer, &Access::of_wire(&body)?)?;
        match (body, &serving.copying) {
            (request::Body::Ping(_), _) => Ok(serving.done()),
            (body, Some(copying)) => {
                let answer = self.between_nodes(serving, copying, body);
                answer.map_err(control::Error::from)
            }
            (_, None) => Err(self.no_copies(peer)),
        }
    }

    fn no_copies(&self, peer: &Peer) -> control::Error {
        DeniedError::NoCopies {
            role: peer.role(),
            peer: peer.name().to_owned(),
            node: self.node.clone(),
        }
        .into()
    }

    fn starting(&self) -> RequestError {
        RequestError::Starting {
            node: self.node.clone(),
        }
    }

    /// Receives a dump: an agent's, or a copy of another node's dump.
    fn take_dump(
        &self,
        peer: &Peer,
        request: request::Dump,
        frames: &mut dyn FrameSource,
        replies: &mut dyn Replies,
    ) -> Result<(), control::Error> {
        let serving = self.serving()?;
        if peer.role() != Role::Node {
            return serving.agents.dump(peer, request, frames, replies);
        }
        authorize(peer, &Access::of_dump(&request)?)?;
        if serving.copying.is_none() {
            return Err(self.no_copies(peer));
        }
        take_copy(
            serving.store().local(),
            &self.node,
            request,
            frames,
            replies,
        )
    }

    /// Sends a checkpoint; slowly if it is for a copy that no request waits for.
    fn give(
        &self,
        peer: &Peer,
        request: &request::Fetch,
        frames: &mut dyn FrameSink,
    ) -> Result<(), control::Error> {
        let serving = self.serving()?;
        match &serving.copying {
            Some(copying) if request.background && peer.may(Action::Replicate) => {
                let mut slow = ThrottledSink::new(&copying.throttle, frames);
                serve_fetch(serving.store(), peer, request, &mut slow)
            }
            _ => serve_fetch(serving.store(), peer, request, frames),
        }
    }

    /// Records the outcome of a request.
    fn record(&self, peer: &Peer, event: AuditedRequest, answered: &reply::Body) {
        let refused = match answered {
            reply::Body::Error(error) => Some(error),
            reply::Body::Control(control::Reply { body }) => match body {
                Some(control::reply::Body::Error(error)) => Some(error),
                Some(told) => match event.told_by(told) {
                    Some(event) => {
                        return self.audit.record(&Who::peer(peer), &event, Ok(()));
                    }
                    None => return,
                },
                None => None,
            },
            _ => None,
        };
        let outcome = refused.map_or(Ok(()), Err);
        self.audit.record(&Who::peer(peer), &event, outcome);
    }
}

/// Drops a copy that the registry does not list on this node. The registry, not the caller, decides: a copy that
/// it lists here stays. A copy that it does not list at all is dropped if it was never published, or was
/// removed, and is kept if the registry may have lost it. While the registry does not answer, nothing is
/// dropped.
fn roll_back(store: &ClusteredStore, checkpoint: &str) -> Result<(), StoreError> {
    let withdrawn = store.may_go(checkpoint)?;
    if store.local().roll_back(checkpoint, withdrawn)? {
        tracing::info!(
            event = "unlisted-copy-dropped",
            checkpoint,
            "dropped: not listed"
        );
    }
    Ok(())
}

/// Sink of the replies to a dump that records the name of the resulting checkpoint.
struct Overheard<'a> {
    replies: &'a mut dyn Replies,
    committed: Option<String>,
}

impl Replies for Overheard<'_> {
    fn opened(&mut self, has_parent: bool) {
        self.replies.opened(has_parent);
    }

    fn closed(&mut self, closed: Closed) {
        self.replies.closed(closed);
    }

    fn prepared(&mut self, prepared: Prepared) {
        self.replies.prepared(prepared);
    }

    fn committed(&mut self, committed: Committed) {
        self.committed = committed.checkpoint.as_ref().map(name_of);
        self.replies.committed(committed);
    }
}

/// Frames of a fetch, from which the name of the checkpoint is recorded.
struct Watched<'a> {
    frames: &'a mut dyn FrameSink,
    opened: Option<String>,
}

impl FrameSink for Watched<'_> {
    fn opened(&mut self, manifest: Manifest, content_digest: Vec<u8>) -> Result<(), PeerError> {
        self.opened = Some(if manifest.generation > 0 {
            format!("{}@{}", manifest.job, manifest.generation)
        } else {
            manifest.session.clone()
        });
        self.frames.opened(manifest, content_digest)
    }

    fn push(
        &mut self,
        kind: Kind,
        flags: u16,
        pages: u32,
        index: u64,
        payload: &[u8],
    ) -> Result<(), PeerError> {
        self.frames.push(kind, flags, pages, index, payload)
    }
}

impl Handler for NodeHandler {
    fn call(&self, peer: &Peer, body: request::Body) -> reply::Body {
        let event = AuditedRequest::of_peer(&body);
        let answered = self.answer(peer, body).unwrap_or_else(|error| {
            tracing::info!(
                event = "peer-request-refused",
                peer = peer.name(),
                error = error.message,
                "request refused"
            );
            reply::Body::Error(error)
        });
        self.record(peer, event, &answered);
        answered
    }

    fn dump(
        &self,
        peer: &Peer,
        request: request::Dump,
        frames: &mut dyn FrameSource,
        replies: &mut dyn Replies,
    ) -> Result<(), control::Error> {
        let mut event = AuditedRequest::of_dump(&request);
        if peer.role() == Role::Node {
            event = AuditedRequest::change("copy", &request.job);
        }
        let mut overheard = Overheard {
            replies,
            committed: None,
        };
        let taken = self.take_dump(peer, request, frames, &mut overheard);
        if let Some(name) = overheard.committed {
            event = event.on(name);
        }
        self.audit
            .record(&Who::peer(peer), &event, taken.as_ref().copied());
        taken
    }

    fn fetch(
        &self,
        peer: &Peer,
        request: request::Fetch,
        frames: &mut dyn FrameSink,
    ) -> Result<(), control::Error> {
        let mut event = AuditedRequest::of_fetch(&request);
        let mut watched = Watched {
            frames,
            opened: None,
        };
        let fetched = self.give(peer, &request, &mut watched);
        if let Some(name) = watched.opened {
            event = event.on(name);
        }
        self.audit
            .record(&Who::peer(peer), &event, fetched.as_ref().copied());
        fetched
    }

    fn api(&self, peer: &Peer) -> Result<Arc<dyn ApiServer>, control::Error> {
        authorize(peer, &Access::Inspect).inspect_err(|denied| {
            self.audit.record(
                &Who::peer(peer),
                &AuditedRequest::api_of_peer(),
                Err(denied),
            );
        })?;
        let api = self.api.get().cloned();
        Ok(api.ok_or_else(|| self.starting())?)
    }
}
