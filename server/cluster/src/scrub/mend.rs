//! Interface for healing damaged copies.

use std::sync::Arc;

use permafrost_clustered::ClusteredStore;
use permafrost_protocol::control;
use permafrost_protocol::wire::message::request;
use permafrost_store::{DamagedPage, Object, StoreError};

use crate::repair::Puller;

/// Heals damaged copies from those of other nodes.
pub trait Mend: Send + Sync {
    /// Fetches pages of a checkpoint from its other `holders`, and rewrites the damaged ones in their places.
    /// Returns how many were damaged. Blocks for as long as that takes.
    ///
    /// # Errors
    /// None of the holders delivers one of the pages; the medium takes no write there. Other pages may be healed.
    fn heal(
        &self,
        checkpoint: &control::Checkpoint,
        holders: &[String],
        pages: &[DamagedPage],
    ) -> Result<u64, StoreError>;

    /// Fetches a fresh copy of a checkpoint from the first of its other `holders` that has it whole, and puts it in
    /// the place of the damaged one. Blocks for as long as the transfer takes.
    ///
    /// # Errors
    /// None of the holders delivers it; the region is full or fails. The damaged copy is unchanged.
    fn mend(&self, checkpoint: &control::Checkpoint, holders: &[String]) -> Result<(), StoreError>;
}

/// Heals by pulling from other nodes.
pub struct MendByPull {
    store: Arc<ClusteredStore>,
    puller: Arc<Puller>,
}

impl MendByPull {
    /// Creates the healer; `puller` must belong to `store`.
    #[must_use]
    pub fn new(store: Arc<ClusteredStore>, puller: Arc<Puller>) -> Self {
        Self { store, puller }
    }

    /// Returns the id of the checkpoint's parent; empty if that is not here, or not listed.
    fn parent_of(&self, checkpoint: &control::Checkpoint) -> String {
        let generation = checkpoint.parent_generation;
        let held =
            (generation > 0).then(|| self.store.local().id_here(&checkpoint.job, generation));
        held.flatten().unwrap_or_default()
    }
}

impl Mend for MendByPull {
    fn heal(
        &self,
        checkpoint: &control::Checkpoint,
        holders: &[String],
        pages: &[DamagedPage],
    ) -> Result<u64, StoreError> {
        let mut healed = 0;
        let mut holders = holders.to_vec();
        let mut left = pages;
        while let Some(first) = left.first() {
            // Neighbouring pages of one address space are fetched together; an image is fetched whole.
            let is_next = |(page, index): &(&DamagedPage, u64)| {
                let follows = matches!(page.object, Object::Image(_)) || page.index == *index;
                page.object == first.object && follows
            };
            let together = left.iter().zip(first.index..).take_while(is_next).count();
            let (now, later) = left.split_at(together);
            left = later;
            let wanted: Vec<u64> = now.iter().map(|page| page.index).collect();
            let heal = |fetched: &[_]| {
                let healed = self
                    .store
                    .local()
                    .heal_pages(&checkpoint.id, &first.object, fetched);
                healed.map_err(|error| error.to_string())
            };
            healed +=
                self.puller
                    .pages(&checkpoint.id, &mut holders, &first.object, &wanted, heal)?;
        }
        Ok(healed)
    }

    fn mend(&self, checkpoint: &control::Checkpoint, holders: &[String]) -> Result<(), StoreError> {
        let content_digest = match self.store.listed_digest(checkpoint) {
            Ok(digest) => digest.map_or_else(Vec::new, |digest| digest.to_vec()),
            // A parked checkpoint has no number to be found by: its holders' digest is accepted.
            Err(StoreError::NotFound { .. }) if checkpoint.generation == 0 => Vec::new(),
            Err(error) => return Err(error),
        };
        let pull = request::Pull {
            checkpoint: checkpoint.id.clone(),
            from: holders.to_vec(),
            // Pages that it shared with a whole parent are shared again, so that generations hit by one damaged page
            // are not each stored in full. The parent's pages are read and verified first.
            parent: self.parent_of(checkpoint),
            published: true,
            content_digest,
            background: true,
        };
        self.puller.pull_again(&pull).map(drop)
    }
}
