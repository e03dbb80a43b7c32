//! Settles checkpoints that were sealed for the cluster, and are not known to be listed.

use std::time::Duration;

use permafrost_protocol::control;
use permafrost_store::StoreError;

use crate::{ClusteredStore, Registered};

/// Result of [`ClusteredStore::settle`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settled {
    /// Ids of checkpoints that the cluster lists, and that are now published here.
    pub published: Vec<String>,
    /// Ids of checkpoints that the cluster does not list, and that were dropped.
    pub dropped: Vec<String>,
}

impl ClusteredStore {
    /// Returns the checkpoints that have been provisional for at least `older_than`: see
    /// [`Store::unpublished`](permafrost_store::Store::unpublished). A node whose deadline is longer than this one's
    /// may list its dumps for longer.
    #[must_use]
    pub fn unpublished(&self, older_than: Duration) -> Vec<control::Checkpoint> {
        let services = self.services.as_ref();
        let deadline = services.map_or(Duration::ZERO, |services| services.deadline);
        self.local.unpublished(older_than, deadline)
    }

    /// Settles every checkpoint that has been provisional for at least `older_than`: those that the registry lists
    /// are published here, the others are dropped. `older_than` must exceed the deadline of a dump and the lease of
    /// a node together: then the node that sealed it has given up, or cannot publish any more.
    ///
    /// # Errors
    /// The registry does not answer, then nothing is done; the journal cannot be written. Without a registry
    /// nothing is ever dropped.
    pub fn settle(&self, older_than: Duration) -> Result<Settled, StoreError> {
        let candidates = self.unpublished(older_than);
        let Some(registry) = self.registry().filter(|_| !candidates.is_empty()) else {
            return Ok(Settled::default());
        };
        // Requested after the candidates were found, so that the list contains all earlier publications.
        let listed = registry.list("")?;
        self.settle_against(candidates, &listed)
    }

    /// Settles candidates that were found before the list was made, as [`ClusteredStore::settle`] does.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn settle_against(
        &self,
        candidates: Vec<control::Checkpoint>,
        listed: &[Registered],
    ) -> Result<Settled, StoreError> {
        let mut settled = Settled::default();
        for candidate in candidates {
            let id = candidate.id;
            if listed.iter().any(|entry| entry.checkpoint.id == id) {
                self.local.publish(&id)?;
                settled.published.push(id);
            } else if self.local.roll_back(&id, false)? {
                tracing::info!(event = "unpublished-copy-dropped", %id, job = %candidate.job, "left over: sealed but never published; dropped");
                settled.dropped.push(id);
            }
        }
        Ok(settled)
    }
}
