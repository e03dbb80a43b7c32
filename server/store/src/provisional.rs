//! Checkpoints that the cluster may or may not list: publishing, rolling back, and collecting leftovers.
//!
//! A checkpoint sealed for a cluster carries an attribute from its first instant, *provisional*; publishing takes
//! it away and sets another. One that has neither was sealed without a cluster, and none of this touches it.

use std::time::{Duration, Instant};

use permafrost_pmem::{ATTR_PROVISIONAL, ATTR_PUBLISHED};
use permafrost_protocol::control;
use permafrost_protocol::manifest::Manifest;

use super::{Store, StoreError, digest, manifest_of};
use crate::{ContentDigest, Registered, SealingError};

/// A checkpoint that this node holds.
#[derive(Clone, Debug)]
pub struct Holding {
    /// Line of the listing.
    pub checkpoint: control::Checkpoint,
    /// Digest of the contents, independent of where they are stored.
    pub content_digest: ContentDigest,
    /// True if this node knows that the cluster lists the checkpoint.
    pub published: bool,
    /// True if the checkpoint was sealed for a cluster, and is not known to be listed.
    pub provisional: bool,
    /// True if this node knows that its copy is damaged.
    pub damaged: bool,
}

/// Publication state of a checkpoint that this node holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicationState {
    /// Id of the checkpoint.
    pub id: String,
    /// True if this node knows that the cluster lists the checkpoint.
    pub published: bool,
    /// True if the checkpoint was sealed for a cluster, and is not known to be listed.
    pub provisional: bool,
}

/// Result of [`Store::settle`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settled {
    /// Ids of checkpoints that the cluster lists, and that are now published here.
    pub published: Vec<String>,
    /// Ids of checkpoints that the cluster does not list, and that were dropped.
    pub dropped: Vec<String>,
}

impl Store {
    /// Marks a checkpoint as listed by the cluster: it is never collected as left over. Durable when this returns;
    /// idempotent.
    ///
    /// # Errors
    /// The checkpoint is not here; the journal cannot be written.
    pub fn publish(&self, id: &str) -> Result<(), StoreError> {
        let _index = self.index();
        let checkpoint = self.checkpoint(id)?;
        let attrs = checkpoint.attrs();
        let wanted = attrs & !ATTR_PROVISIONAL | ATTR_PUBLISHED;
        if attrs != wanted {
            self.region.set_attrs(checkpoint.id(), wanted)?;
        }
        self.provisional_since().remove(id);
        Ok(())
    }

    /// Drops a checkpoint that the cluster does not list. Returns true if it was here. One that is published, or
    /// was sealed without a cluster, is dropped only if it was `withdrawn` from the list.
    ///
    /// # Errors
    /// The checkpoint is published; the journal or the catalog cannot be written.
    pub fn roll_back(&self, id: &str, withdrawn: bool) -> Result<bool, StoreError> {
        let _index = self.index();
        let Ok(checkpoint) = self.checkpoint(id) else {
            self.provisional_since().remove(id);
            return Ok(false);
        };
        if checkpoint.attrs() & ATTR_PROVISIONAL == 0 && !withdrawn {
            return Err(SealingError::Published { id: id.to_string() }.into());
        }
        self.region.delete(checkpoint.id())?;
        // A checkpoint with a damaged manifest was never listed.
        if let Ok(manifest) = manifest_of(&checkpoint) {
            let record = self.summary(&checkpoint, &manifest);
            // Another checkpoint may have its number, or its session.
            if self
                .catalogued(&record)?
                .is_some_and(|found| found.id == id)
            {
                self.catalog.remove(&record)?;
            }
        }
        self.provisional_since().remove(id);
        Ok(true)
    }

    /// Returns the checkpoints that have been provisional for at least `older_than`, by this daemon's own clock (a
    /// restart begins the time anew). Either the notice of their publication did not reach this node, or they are
    /// left over. If the node that took the dump has a longer deadline than this one, twice the difference is
    /// added.
    #[must_use]
    pub fn unpublished(&self, older_than: Duration) -> Vec<control::Checkpoint> {
        let mut since = self.provisional_since();
        let mut found = Vec::new();
        for checkpoint in self.region.checkpoints() {
            if checkpoint.attrs() & ATTR_PROVISIONAL == 0 {
                continue;
            }
            let seen = since
                .entry(checkpoint.id().to_string())
                .or_insert_with(Instant::now);
            let age = seen.elapsed();
            if age < older_than {
                continue;
            }
            match manifest_of(&checkpoint) {
                Ok(manifest)
                    if age < older_than.saturating_add(self.patience_beyond(&manifest)) => {}
                Ok(manifest) => found.push(self.summary(&checkpoint, &manifest)),
                Err(error) => tracing::error!(%error, "provisional checkpoint left alone"),
            }
        }
        found
    }

    /// Returns the extra time that the origin's deadline exceeds this node's: the origin may list the checkpoint as
    /// long as its deadline has not passed.
    fn patience_beyond(&self, manifest: &Manifest) -> Duration {
        let deadline = Duration::from_millis(manifest.commit_deadline_ms);
        deadline
            .saturating_sub(self.commit_deadline())
            .saturating_mul(2)
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

    /// Settles candidates that were found before the list was made, as [`Store::settle`] does.
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
                self.publish(&id)?;
                settled.published.push(id);
            } else if self.roll_back(&id, false)? {
                tracing::info!(%id, job = %candidate.job, "left over: sealed but never published; dropped");
                settled.dropped.push(id);
            }
        }
        Ok(settled)
    }

    /// Returns everything that this node holds, in the order of the seals; the registry is rebuilt from it. Costs a
    /// manifest read for each. A damaged checkpoint is logged and left out.
    #[must_use]
    pub fn held(&self) -> Vec<Holding> {
        let mut held = Vec::new();
        for checkpoint in self.region.checkpoints() {
            let read = || {
                let manifest = manifest_of(&checkpoint)?;
                let content_digest = digest::of_checkpoint(&checkpoint)?;
                let attrs = checkpoint.attrs();
                Ok::<_, StoreError>(Holding {
                    checkpoint: self.summary(&checkpoint, &manifest),
                    content_digest,
                    published: attrs & ATTR_PUBLISHED != 0,
                    provisional: attrs & ATTR_PROVISIONAL != 0,
                    damaged: self.damage(&checkpoint.id().to_string()).is_some(),
                })
            };
            match read() {
                Ok(holding) => held.push(holding),
                Err(error) => tracing::error!(%error, "checkpoint left out of what is held"),
            }
        }
        held
    }

    /// Returns a checkpoint's line of the listing by its id: the id alone where its manifest cannot be read.
    #[must_use]
    pub fn line_of(&self, id: &str) -> control::Checkpoint {
        let read = || {
            let checkpoint = self.checkpoint(id)?;
            let manifest = manifest_of(&checkpoint)?;
            Ok::<_, StoreError>(self.summary(&checkpoint, &manifest))
        };
        read().unwrap_or_else(|_| control::Checkpoint {
            id: id.to_owned(),
            ..control::Checkpoint::default()
        })
    }

    /// Returns true if a checkpoint of that id is here, damaged or not.
    #[must_use]
    pub fn holds(&self, id: &str) -> bool {
        self.checkpoint(id).is_ok()
    }

    /// Returns the publication state of everything that this node holds. Reads nothing from the medium.
    #[must_use]
    pub fn marks(&self) -> Vec<PublicationState> {
        let checkpoints = self.region.checkpoints();
        let marks = checkpoints.iter().map(|checkpoint| {
            let attrs = checkpoint.attrs();
            PublicationState {
                id: checkpoint.id().to_string(),
                published: attrs & ATTR_PUBLISHED != 0,
                provisional: attrs & ATTR_PROVISIONAL != 0,
            }
        });
        marks.collect()
    }

    /// Returns the catalog's record in the place where the checkpoint belongs.
    pub(super) fn catalogued(
        &self,
        record: &control::Checkpoint,
    ) -> Result<Option<control::Checkpoint>, StoreError> {
        Ok(if record.generation == 0 {
            self.catalog.parked(&record.session)?
        } else {
            self.catalog.find(&record.job, record.generation)?
        })
    }

    pub(super) fn provisional_since(
        &self,
    ) -> parking_lot::MutexGuard<'_, std::collections::HashMap<String, Instant>> {
        self.provisional_since.lock()
    }
}
