//! The other nodes: which are to have a copy, and what they are told of it afterwards.

use std::time::{Duration, Instant};

use permafrost_protocol::wire::message::request;

use super::Shared;
use crate::cluster::LiveNode;
use crate::cluster::placement::{Wanted, place};

/// How long a word that nobody waits for is tried.
const AFTERWARDS: Duration = Duration::from_secs(10);

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
                if let Err(error) = network.call_async(&node, body, until).await {
                    tracing::info!(node, %error, "not told; it finds out when it asks what is listed");
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
