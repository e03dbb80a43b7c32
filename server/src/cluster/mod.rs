//! The cluster: which nodes there are, and which checkpoint is where.
//!
//! On one machine there is none. With `--catalog etcd://…` the *registry* in etcd says what exists and who holds it;
//! each node's own catalog (sled) stays the index over its own region.

use std::any::Any;

use permafrost_protocol::control::Checkpoint;

use crate::replication::ContentDigest;
use crate::store::StoreError;

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

    /// Removes a checkpoint from the list.
    ///
    /// # Errors
    /// Unavailable.
    fn withdraw(&self, checkpoint: &Checkpoint) -> Result<(), StoreError>;

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
}
