//! A node's peers, where it has no others than agents, readers and operators.

use std::sync::Arc;

use permafrost_client::identity::Peer;
use permafrost_client::peer::{FrameSink, FrameSource, Handler, Replies};
use permafrost_protocol::control::{self, ErrorCode};
use permafrost_protocol::wire::message::{Done, reply, request};

use super::{Agents, serve_fetch};
use crate::store::Store;

/// Serves everybody but nodes.
pub struct AgentHandler {
    store: Arc<Store>,
    agents: Agents,
}

impl AgentHandler {
    /// Over a store and what agents are served from.
    #[must_use]
    pub fn new(store: Arc<Store>, agents: Agents) -> Self {
        Self { store, agents }
    }
}

impl Handler for AgentHandler {
    fn call(&self, peer: &Peer, body: request::Body) -> reply::Body {
        match body {
            request::Body::Control(request) => {
                reply::Body::Control(self.agents.call(peer, request))
            }
            request::Body::Ping(_) => reply::Body::Done(Done {
                free_bytes: self.store.region_status().free_bytes,
            }),
            _ => reply::Body::Error(control::Error {
                code: ErrorCode::Invalid.into(),
                message: "this node is in no cluster".to_owned(),
                hint: String::new(),
            }),
        }
    }

    fn dump(
        &self,
        peer: &Peer,
        request: request::Dump,
        frames: &mut dyn FrameSource,
        replies: &mut dyn Replies,
    ) -> Result<(), control::Error> {
        self.agents.dump(peer, request, frames, replies)
    }

    fn fetch(
        &self,
        peer: &Peer,
        request: request::Fetch,
        frames: &mut dyn FrameSink,
    ) -> Result<(), control::Error> {
        serve_fetch(&self.store, peer, &request, frames)
    }
}
