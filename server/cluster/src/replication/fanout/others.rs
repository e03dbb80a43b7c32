//! The other nodes: chooses those that get a copy, and notifies them afterwards.

use std::time::{Duration, Instant};

use permafrost_protocol::control::ErrorCode;
use permafrost_protocol::wire::message::request;
use permafrost_transport::peer::PeerError;

use super::Shared;
use crate::LiveNode;
use crate::placement::{CopiesWanted, place};

/// Time limit of one attempt to send a notification that no caller waits for.
const ATTEMPT: Duration = Duration::from_secs(10);

/// Time for which such a notification is retried: a node that restarts, or whose registry is electing, takes it
/// after that. If it is lost all the same, the node's sweep finds out.
const AFTERWARDS: Duration = Duration::from_secs(60);

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_secs(1);

/// Returns true if a retry may succeed in a moment: the node does not answer, or lacks something.
fn may_pass(error: &PeerError) -> bool {
    match error {
        PeerError::Refused { error, .. } => error.code() == ErrorCode::Unavailable,
        _ => true,
    }
}

impl Shared {
    /// Chooses nodes for `others` copies besides those that hold one, without those that have failed.
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
            &CopiesWanted {
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

    /// Sends a notification to nodes without waiting.
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
                        tracing::info!(event = "replication-outcome-not-told", node, %error, "not told; it finds out when it asks what is listed");
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
