//! Requests the inventories of nodes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_protocol::control::NodeProbe;
use permafrost_protocol::wire::message::{self, Held, HeldCopy, reply, request};
use permafrost_store::{Holding, Store, StoreError};
use permafrost_transport::peer::Network;
use prost::Message as _;

use super::probe;
use super::rebuild::{Copy, NodeInventory};
use super::scrub::Scrubber;
use crate::error::InventoryError;

/// Size of a part of an inventory. A message may have 16 MiB.
const PART_BYTES: usize = 8 << 20;

/// Longest time for a node to report the state of its copies, which it has in memory: a caller waits.
const VERIFY_DEADLINE: Duration = Duration::from_secs(5);

/// Requests the inventories of nodes, and the state of their copies.
pub trait Inventories: Send + Sync {
    /// Returns everything that a node holds. Blocks.
    ///
    /// # Errors
    /// The node cannot be asked, or does not answer.
    fn inventory(&self, node: &str) -> Result<NodeInventory, StoreError>;

    /// Returns the state of copies of a node. The node reads those that it has not read lately; the call does not
    /// wait for that.
    ///
    /// # Errors
    /// Those of [`Inventories::inventory`].
    fn verify(&self, node: &str, asked: request::Verify) -> Result<message::Verified, StoreError>;

    /// Asks a node for its time. Blocks, for a few seconds at most.
    fn probe(&self, node: &str) -> NodeProbe;
}

/// Requests inventories from other nodes over QUIC, and from the store here.
pub struct PeerInventories {
    /// Name of this node.
    pub node: String,
    /// Store of this node.
    pub store: Arc<Store>,
    /// Scrub of that store.
    pub scrubber: Arc<Scrubber>,
    /// Connection to the other nodes.
    pub network: Network,
    /// Longest time for one node to return a part of its inventory: it reads a manifest for each checkpoint.
    pub deadline: Duration,
}

impl Inventories for PeerInventories {
    fn inventory(&self, node: &str) -> Result<NodeInventory, StoreError> {
        collect(node, |after| {
            if node == self.node {
                return Ok(held(&self.store, &after));
            }
            let body = request::Body::Inventory(after);
            let until = Instant::now() + self.deadline;
            match self.network.call(node, body, until) {
                Ok(reply::Body::Held(part)) => Ok(part),
                Ok(_) => Err(InventoryError::OtherAnswer.of(node).into()),
                Err(error) => Err(InventoryError::from(error).of(node).into()),
            }
        })
    }

    fn verify(&self, node: &str, asked: request::Verify) -> Result<message::Verified, StoreError> {
        if node == self.node {
            return self.scrubber.verified(&asked);
        }
        let body = request::Body::Verify(asked);
        match self
            .network
            .call(node, body, Instant::now() + VERIFY_DEADLINE)
        {
            Ok(reply::Body::Verified(verified)) => Ok(verified),
            Ok(_) => Err(InventoryError::OtherAnswer.of(node).into()),
            Err(error) => Err(InventoryError::from(error).of(node).into()),
        }
    }

    fn probe(&self, node: &str) -> NodeProbe {
        if node == self.node {
            return NodeProbe {
                clock_ahead_ms: Some(0),
                ..NodeProbe::default()
            };
        }
        probe::of_peer(&self.network, node)
    }
}

/// Answers a [`request::Inventory`]: returns the next part of what this node holds.
#[must_use]
pub fn held(store: &Store, asked: &request::Inventory) -> Held {
    part_of(store.held(), &asked.after)
}

fn part_of(mut holdings: Vec<Holding>, after: &str) -> Held {
    holdings.retain(|holding| holding.checkpoint.id.as_str() > after);
    holdings.sort_by(|a, b| a.checkpoint.id.cmp(&b.checkpoint.id));
    let mut part = Held::default();
    let mut bytes = 0;
    for holding in holdings {
        let copy = HeldCopy {
            content_digest: holding.content_digest.to_vec(),
            published: holding.published,
            provisional: holding.provisional,
            damaged: holding.damaged,
        };
        // Includes the field numbers and lengths of both.
        bytes += holding.checkpoint.encoded_len() + copy.encoded_len() + 16;
        if bytes > PART_BYTES && !part.checkpoints.is_empty() {
            part.more = true;
            break;
        }
        part.checkpoints.push(holding.checkpoint);
        part.copies.push(copy);
    }
    part
}

/// Requests one part after the other.
fn collect(
    node: &str,
    mut ask: impl FnMut(request::Inventory) -> Result<Held, StoreError>,
) -> Result<NodeInventory, StoreError> {
    let mut copies: Vec<Copy> = Vec::new();
    loop {
        let after = copies
            .last()
            .map_or_else(String::new, |copy| copy.checkpoint.id.clone());
        let message::Held {
            checkpoints,
            copies: states,
            more,
        } = ask(request::Inventory {
            after: after.clone(),
        })?;
        if checkpoints.len() != states.len() {
            return Err(InventoryError::NoHealth.of(node).into());
        }
        let before = copies.len();
        for (checkpoint, state) in checkpoints.into_iter().zip(states) {
            let content_digest = state
                .content_digest
                .try_into()
                .map_err(|_| InventoryError::DigestLength.of(node))?;
            // The ids must ascend, so that the parts come to an end.
            if copies.last().map_or("", |last| last.checkpoint.id.as_str())
                >= checkpoint.id.as_str()
            {
                return Err(InventoryError::Unordered.of(node).into());
            }
            copies.push(Copy {
                checkpoint,
                content_digest,
                is_published: state.published,
                is_damaged: state.damaged,
            });
        }
        if !more {
            return Ok(NodeInventory {
                node: node.to_owned(),
                copies,
            });
        }
        if copies.len() == before {
            return Err(InventoryError::EmptyPart.of(node).into());
        }
    }
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::control::Checkpoint;

    use super::*;

    fn holdings(count: usize) -> Vec<Holding> {
        let holding = |number: usize| Holding {
            checkpoint: Checkpoint {
                id: format!("{number:032x}"),
                job: "j".repeat(1000),
                ..Checkpoint::default()
            },
            content_digest: [7; 32],
            published: number.is_multiple_of(2),
            provisional: false,
            damaged: number.is_multiple_of(5),
        };
        // In another order than that of the ids.
        (1..=count).rev().map(holding).collect()
    }

    #[test]
    fn a_long_inventory_comes_in_parts_and_whole() {
        let mut parts = 0;
        let inventory = collect("n", |asked| {
            parts += 1;
            let part = part_of(holdings(20_000), &asked.after);
            assert!(part.encoded_len() < 16 << 20);
            Ok(part)
        })
        .unwrap();
        assert!(parts > 1, "all in one part: nothing was shown");
        assert_eq!(inventory.copies.len(), 20_000);
        let published = inventory.copies.iter().filter(|copy| copy.is_published);
        assert_eq!(published.count(), 10_000);
        let damaged = inventory.copies.iter().filter(|copy| copy.is_damaged);
        assert_eq!(damaged.count(), 4_000);
    }

    #[test]
    fn nonsense_of_a_peer_is_an_error_and_never_an_endless_loop() {
        let whole = part_of(holdings(3), "");
        let mut endless = whole.clone();
        endless.more = true;
        let mut short = whole.clone();
        short.copies.pop();
        let mut digest = whole.clone();
        digest.copies[0].content_digest.pop();
        let empty = Held {
            more: true,
            ..Held::default()
        };
        for bad in [endless, short, digest, empty] {
            assert!(collect("n", |_| Ok(bad.clone())).is_err());
        }
        assert_eq!(collect("n", |_| Ok(whole.clone())).unwrap().copies.len(), 3);
    }
}
