//! Registry of the checkpoints that exist in a cluster, and of their holders.

use std::any::Any;

use permafrost_protocol::control::{Checkpoint, ColdCopy};

use permafrost_store::{ContentDigest, SealingError, StoreError, checkpoint_name};

/// A checkpoint that the cluster lists.
#[derive(Clone, Debug, PartialEq)]
pub struct Registered {
    /// Line of the listing.
    pub checkpoint: Checkpoint,
    /// Digest of the contents, independent of where they are stored.
    pub content_digest: ContentDigest,
    /// Nodes that hold a copy, by name.
    pub nodes: Vec<String>,
    /// Number of copies that there should be.
    pub wanted_copies: u32,
    /// Holders with a part of their copy in an object store.
    pub cold: Vec<ColdCopy>,
    /// Holders whose copy is known to be damaged. Such a copy does not count until it is healed.
    pub damaged: Vec<String>,
}

impl Registered {
    /// Returns true if the copy of a node is known to be damaged.
    #[must_use]
    pub fn is_damaged_on(&self, node: &str) -> bool {
        self.damaged.iter().any(|damaged| damaged == node)
    }

    /// Returns the holders whose copy is not known to be damaged.
    pub fn good(&self) -> impl Iterator<Item = &String> {
        self.nodes.iter().filter(|node| !self.is_damaged_on(node))
    }

    /// Returns the listing's record. Holders whose copy is damaged come last, so that they are asked last.
    #[must_use]
    pub fn into_record(self) -> Checkpoint {
        let damaged = self.nodes.iter().filter(|node| self.is_damaged_on(node));
        Checkpoint {
            nodes: self.good().chain(damaged).cloned().collect(),
            copies_wanted: self.wanted_copies,
            damaged_nodes: self.damaged,
            cold: self.cold,
            ..self.checkpoint
        }
    }

    /// Adds or removes a holder. Returns true if that changes anything.
    pub fn set_holder(&mut self, node: &str, holds: bool) -> bool {
        if self.nodes.iter().any(|holder| holder == node) == holds {
            return false;
        }
        if holds {
            self.nodes.push(node.to_owned());
        } else {
            self.nodes.retain(|holder| holder != node);
            self.damaged.retain(|holder| holder != node);
            self.cold.retain(|copy| copy.node != node);
        }
        true
    }

    /// Returns the bytes of a holder's copy that are in an object store.
    #[must_use]
    pub fn cold_bytes_on(&self, node: &str) -> u64 {
        let cold = self.cold.iter().find(|copy| copy.node == node);
        cold.map_or(0, |copy| copy.bytes)
    }

    /// Sets how many bytes of a holder's copy are in an object store. Returns true if that changes anything. For a
    /// node that holds no copy nothing is recorded.
    pub fn set_cold(&mut self, node: &str, bytes: u64) -> bool {
        let holds = self.nodes.iter().any(|holder| holder == node);
        if self.cold_bytes_on(node) == bytes || !holds {
            return false;
        }
        self.cold.retain(|copy| copy.node != node);
        if bytes > 0 {
            self.cold.push(ColdCopy {
                node: node.to_owned(),
                bytes,
            });
        }
        true
    }

    /// Marks the copy of a holder as damaged, or as whole. Returns true if that changes anything. For a node that
    /// holds no copy nothing is recorded.
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

/// Returns the error for a checkpoint that is not removed because what was to stay has gone.
#[must_use]
pub fn no_other(checkpoint: &Checkpoint) -> StoreError {
    SealingError::NoOther {
        checkpoint: checkpoint_name(checkpoint),
    }
    .into()
}

/// Lock on a job, released when dropped.
pub type JobLock = Box<dyn Any + Send + Sync>;

/// The registry of a cluster. All methods block, each for a bounded time. If the registry cannot be reached,
/// they fail with the code [`ErrorCode::Unavailable`], and nothing is half done.
pub trait Registry: Send + Sync {
    /// Locks a job against other dumps, on every node, while the lock is held and this node's lease lives.
    ///
    /// # Errors
    /// A conflict names the holder of the lock.
    fn lock_job(&self, job: &str) -> Result<JobLock, StoreError>;

    /// Returns a generation number of the job that was never used, and that no other node will get.
    ///
    /// # Errors
    /// The registry is unavailable.
    fn reserve_generation(&self, job: &str) -> Result<u64, StoreError>;

    /// Lists a checkpoint, and moves its job's head, in one transaction; fails if this node's lease was lost or the
    /// number is taken. `replaces` is a parked checkpoint's id that goes in the same step.
    ///
    /// # Errors
    /// The registry is unavailable; then it is unknown if the checkpoint was listed, and [`Registry::find`] returns
    /// the outcome once the registry is back.
    fn publish(&self, entry: &Registered, replaces: Option<&str>) -> Result<(), StoreError>;

    /// Removes a checkpoint from the list, and records that for a month ([`Registry::is_withdrawn`]).
    ///
    /// # Errors
    /// The registry is unavailable.
    fn withdraw(&self, checkpoint: &Checkpoint) -> Result<(), StoreError>;

    /// Removes a checkpoint from the list, as [`Registry::withdraw`] does, while `other` is on it.
    ///
    /// # Errors
    /// `other` is not on the list any more; the registry is unavailable.
    fn withdraw_while(
        &self,
        checkpoint: &Checkpoint,
        other: &Checkpoint,
    ) -> Result<(), StoreError> {
        let found = self.find(&other.job, other.generation)?;
        if found.is_none_or(|found| found.checkpoint.id != other.id) {
            return Err(no_other(checkpoint));
        }
        self.withdraw(checkpoint)
    }

    /// Returns true if a node of the cluster has taken a checkpoint off the list. This excludes a checkpoint that
    /// was merely lost with the registry's data, or deleted by a client with write access to it. Only a withdrawn
    /// checkpoint may be dropped once it was published. If its manifest cannot be read, only its id is given.
    ///
    /// # Errors
    /// The registry is unavailable.
    fn is_withdrawn(&self, checkpoint: &Checkpoint) -> Result<bool, StoreError>;

    /// Returns one checkpoint; a job's newest when `generation` is 0.
    ///
    /// # Errors
    /// The registry is unavailable.
    fn find(&self, job: &str, generation: u64) -> Result<Option<Registered>, StoreError>;

    /// Lists all of a job's checkpoints, or all checkpoints with an empty name.
    ///
    /// # Errors
    /// The registry is unavailable.
    fn list(&self, job: &str) -> Result<Vec<Registered>, StoreError>;

    /// Pins a checkpoint, or unpins it, for all nodes.
    ///
    /// # Errors
    /// The registry is unavailable, or the checkpoint is not listed.
    fn set_pinned(&self, checkpoint: &Checkpoint, pinned: bool) -> Result<(), StoreError>;

    /// Adds or removes a node as a holder of a checkpoint.
    ///
    /// # Errors
    /// The registry is unavailable, or the checkpoint is not listed.
    fn set_holder(
        &self,
        checkpoint: &Checkpoint,
        node: &str,
        holds: bool,
    ) -> Result<(), StoreError>;

    /// Marks the copy of a holder as damaged, or as whole again.
    ///
    /// # Errors
    /// The registry is unavailable, or the checkpoint is not listed.
    fn set_damaged(
        &self,
        checkpoint: &Checkpoint,
        node: &str,
        damaged: bool,
    ) -> Result<(), StoreError>;

    /// Records how many bytes of a holder's copy are in an object store.
    ///
    /// # Errors
    /// The registry is unavailable, or the checkpoint is not listed.
    fn set_cold(&self, checkpoint: &Checkpoint, node: &str, bytes: u64) -> Result<(), StoreError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_the_copies_that_are_damaged_or_cold() {
        let names = ["a", "b", "c"].map(str::to_owned);
        let mut entry = Registered {
            checkpoint: Checkpoint::default(),
            content_digest: [0; 32],
            nodes: names.to_vec(),
            wanted_copies: 2,
            damaged: vec!["a".to_owned()],
            cold: Vec::new(),
        };
        assert!(entry.set_cold("c", 7));
        assert!(!entry.set_cold("c", 7));
        assert!(!entry.set_cold("d", 7), "no holder");
        let cold = ColdCopy {
            node: "c".to_owned(),
            bytes: 7,
        };
        let listed = entry.clone().into_record();
        assert_eq!(listed.nodes, ["b", "c", "a"]);
        assert_eq!(listed.damaged_nodes, ["a"]);
        assert_eq!(listed.cold, [cold]);
        assert!(entry.set_cold("c", 0));
        assert_eq!(entry.cold, []);
        entry.set_cold("b", 1);
        entry.set_holder("b", false);
        assert_eq!(entry.cold, []);
    }
}
