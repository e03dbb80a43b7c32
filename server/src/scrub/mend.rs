//! Who mends.

use std::sync::Arc;

use permafrost_protocol::control;
use permafrost_protocol::wire::message::request;

use crate::repair::Puller;
use crate::store::{Store, StoreError};

/// Puts a whole copy in the place of a damaged one.
pub trait Mend: Send + Sync {
    /// Fetches a fresh copy of a checkpoint from the first of its other `holders` that has it whole, and puts it in the
    /// place of the damaged one. Blocks for as long as the transfer takes.
    ///
    /// # Errors
    /// None of them gives it; the region is full or fails. The damaged copy is as it was.
    fn mend(&self, checkpoint: &control::Checkpoint, holders: &[String]) -> Result<(), StoreError>;
}

/// Mends by pulling again from other nodes.
pub struct MendByPull {
    store: Arc<Store>,
    puller: Arc<Puller>,
}

impl MendByPull {
    /// `puller` is `store`'s.
    #[must_use]
    pub fn new(store: Arc<Store>, puller: Arc<Puller>) -> Self {
        Self { store, puller }
    }
}

impl Mend for MendByPull {
    fn mend(&self, checkpoint: &control::Checkpoint, holders: &[String]) -> Result<(), StoreError> {
        let content_digest = match self.store.listed_digest(checkpoint) {
            Ok(digest) => digest.map_or_else(Vec::new, |digest| digest.to_vec()),
            // A parked one has no number to be found by: its holders' word is taken.
            Err(StoreError::NotFound { .. }) if checkpoint.generation == 0 => Vec::new(),
            Err(error) => return Err(error),
        };
        let pull = request::Pull {
            checkpoint: checkpoint.id.clone(),
            from: holders.to_vec(),
            parent: String::new(),
            published: true,
            content_digest,
            background: true,
        };
        self.puller.pull_again(&pull).map(drop)
    }
}
