//! What exists in a cluster, and who holds it.

use std::any::Any;

use permafrost_protocol::control::Checkpoint;

use crate::{ContentDigest, StoreError};

/// A checkpoint that the cluster lists.
#[derive(Clone, Debug, PartialEq)]
pub struct Registered {
    /// Its line of the listing.
    pub checkpoint: Checkpoint,
    /// What it holds, wherever it is stored.
    pub content_digest: ContentDigest,
    /// Nodes that hold a copy, by name.
    pub nodes: Vec<String>,
    /// How many copies there should be.
    pub wanted_copies: u32,
    /// Those of the holders whose copy is known to be damaged. It counts for nothing until it is healed.
    pub damaged: Vec<String>,
}

impl Registered {
    /// Whether the copy of a node is known to be damaged.
    #[must_use]
    pub fn is_damaged_on(&self, node: &str) -> bool {
        self.damaged.iter().any(|damaged| damaged == node)
    }

    /// Holders whose copy is not known to be damaged.
    pub fn good(&self) -> impl Iterator<Item = &String> {
        self.nodes.iter().filter(|node| !self.is_damaged_on(node))
    }

    /// Adds or removes a holder; whether that changes anything.
    pub fn set_holder(&mut self, node: &str, holds: bool) -> bool {
        if self.nodes.iter().any(|holder| holder == node) == holds {
            return false;
        }
        if holds {
            self.nodes.push(node.to_owned());
        } else {
            self.nodes.retain(|holder| holder != node);
            self.damaged.retain(|holder| holder != node);
        }
        true
    }

    /// Marks the copy of a holder as damaged, or as whole; whether that changes anything. Of a node that holds none
    /// nothing is remembered.
    pub fn set_damaged(&mut self, node: &str, damaged: bool) -> bool {
        let holds = self.nodes.iter().any(|holder| holder == node);
        if self.is_damaged_on(node) == damaged || (damaged && !holds) {
            return false;
        }
        if damaged {
            self.damaged.push(node.to_owned());
        } else {
            self.damaged.retain(|holder| holder != node);
        }
        true
    }
}

/// Released when dropped.
pub type JobLock = Box<dyn Any + Send + Sync>;

/// What exists in the cluster. All methods block, each for a bounded time; without the registry they fail with
/// [`StoreError::Unavailable`], and nothing is half done.
pub trait Registry: Send + Sync {
    /// Keeps other dumps of a job away, on every node, while the lock is held and this node's lease lives.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] names who has it.
    fn lock_job(&self, job: &str) -> Result<JobLock, StoreError>;

    /// A generation number of the job that was never used, and never will be by anybody else.
    ///
    /// # Errors
    /// Unavailable.
    fn reserve_generation(&self, job: &str) -> Result<u64, StoreError>;

    /// Lists a checkpoint, and moves its job's head, in one transaction; fails if this node's lease was lost or the
    /// number is taken. `replaces` is a parked checkpoint's id that goes in the same step.
    ///
    /// # Errors
    /// Unavailable; then whether it was listed is unknown, and [`Registry::find`] tells once it is back.
    fn publish(&self, entry: &Registered, replaces: Option<&str>) -> Result<(), StoreError>;

    /// Removes a checkpoint from the list, and says so for a month ([`Registry::is_withdrawn`]).
    ///
    /// # Errors
    /// Unavailable.
    fn withdraw(&self, checkpoint: &Checkpoint) -> Result<(), StoreError>;

    /// Returns true if a node of the cluster has taken a checkpoint off the list: it was not merely lost with the
    /// registry's data, nor deleted by somebody who can write there. Only so may a copy go that was published. Of a checkpoint whose manifest
    /// cannot be read no more than the id is given.
    ///
    /// # Errors
    /// Unavailable.
    fn is_withdrawn(&self, checkpoint: &Checkpoint) -> Result<bool, StoreError>;

    /// One checkpoint; a job's newest when `generation` is 0.
    ///
    /// # Errors
    /// Unavailable.
    fn find(&self, job: &str, generation: u64) -> Result<Option<Registered>, StoreError>;

    /// All of a job's checkpoints, or all with an empty name.
    ///
    /// # Errors
    /// Unavailable.
    fn list(&self, job: &str) -> Result<Vec<Registered>, StoreError>;

    /// Pins a checkpoint, or unpins it, for all nodes.
    ///
    /// # Errors
    /// Unavailable, or it is not listed.
    fn set_pinned(&self, checkpoint: &Checkpoint, pinned: bool) -> Result<(), StoreError>;

    /// Adds or removes a node as a holder of a checkpoint.
    ///
    /// # Errors
    /// Unavailable, or it is not listed.
    fn set_holder(
        &self,
        checkpoint: &Checkpoint,
        node: &str,
        holds: bool,
    ) -> Result<(), StoreError>;

    /// Marks the copy of a holder as damaged, or as whole again.
    ///
    /// # Errors
    /// Unavailable, or it is not listed.
    fn set_damaged(
        &self,
        checkpoint: &Checkpoint,
        node: &str,
        damaged: bool,
    ) -> Result<(), StoreError>;
}
