//! The other nodes: which are to have a copy, and what they are told of it afterwards.

use std::time::{Duration, Instant};

use permafrost_protocol::control::ErrorCode;
use permafrost_protocol::wire::message::request;
use permafrost_transport::peer::PeerError;

use super::Shared;
use crate::LiveNode;
use crate::placement::{Wanted, place};

/// How long one attempt at a word that nobody waits for may take.
const ATTEMPT: Duration = Duration::from_secs(10);

/// How long such a word is tried: a node that restarts, or asks a registry that elects, takes it after that. Where it is
/// lost all the same, the node's sweep finds out.
const AFTERWARDS: Duration = Duration::from_secs(60);

/// Between two attempts.
const PAUSE: Duration = Duration::from_secs(1);

/// Whether the same may succeed in a moment: the node does not answer, or lacks something.
fn may_pass(error: &PeerError) -> bool {
    match error {
        PeerError::Refused { error, .. } => error.code() == ErrorCode::Unavailable,
        _ => true,
    }
}

impl Shared {
    /// Nodes for so many copies besides those that hold one, without those that have failed.
    pub(super) fn choose(
        &self,
        more: usize,
        holders: &[String],
        without: &[String],
    ) -> Vec<LiveNode> {
        let live = self.view.live();
        let mut taken = vec![self.node.clone()];
        taken.extend_from_slice(holders);
        let placement = place(
            &live,
            &Wanted {
                local: &self.node,
                copies: taken.len() + more,
                size_bytes: 0,
                holders: &taken,
                without,
            },
        );
        let chosen = placement.nodes.into_iter().take(more);
        chosen
            .filter_map(|name| live.iter().find(|node| node.facts.name == name).cloned())
            .collect()
    }

    /// Says something to nodes without waiting.
    pub(super) fn tell(&self, nodes: &[String], body: &request::Body) {
        for node in nodes {
            let (network, node, body) = (self.network.clone(), node.clone(), body.clone());
            self.runtime.spawn(async move {
                let until = Instant::now() + AFTERWARDS;
                loop {
                    let attempt = Instant::now() + ATTEMPT;
                    let told = network.call_async(&node, body.clone(), attempt.min(until)).await;
                    let Err(error) = told else { return };
                    if Instant::now() + PAUSE >= until || !may_pass(&error) {
                        tracing::info!(node, %error, "not told; it finds out when it asks what is listed");
                        return;
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            });
        }
    }

    pub(super) fn roll_back(&self, checkpoint: &str, nodes: &[String]) {
        let checkpoint = checkpoint.to_owned();
        let body = request::Body::Rollback(request::Rollback { checkpoint });
        self.tell(nodes, &body);
    }
}
