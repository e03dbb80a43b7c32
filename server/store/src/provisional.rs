//! Checkpoints whose seal is not final yet: publishing, rolling back, and finding leftovers.
//!
//! A checkpoint that is sealed under a number chosen by the caller is *provisional* until the caller publishes it or
//! rolls it back. It carries an attribute from its first instant; publishing takes that away and sets another. A
//! checkpoint that has neither was sealed at once, and none of this touches it.

use std::time::{Duration, Instant};

use permafrost_pmem::{ATTR_PROVISIONAL, ATTR_PUBLISHED, CheckpointId};
use permafrost_protocol::control;
use permafrost_protocol::manifest::Manifest;

use super::{Store, StoreError, digest, manifest_of};
use crate::ContentDigest;
use crate::SealingError;

/// A checkpoint that the store holds.
#[derive(Clone, Debug)]
pub struct Holding {
    /// Line of the listing.
    pub checkpoint: control::Checkpoint,
    /// Digest of the contents, independent of where they are stored.
    pub content_digest: ContentDigest,
    /// True if the checkpoint was published.
    pub published: bool,
    /// True if the checkpoint is provisional.
    pub provisional: bool,
    /// True if the copy is known to be damaged.
    pub damaged: bool,
}

/// Publication state of a checkpoint that the store holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicationState {
    /// Id of the checkpoint.
    pub id: String,
    /// True if the checkpoint was published.
    pub published: bool,
    /// True if the checkpoint is provisional.
    pub provisional: bool,
}

impl Store {
    /// Marks a checkpoint as final: it is never collected as left over. Durable when this returns; idempotent.
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

    /// Drops a provisional checkpoint. Returns true if it was here. One that is published, or was sealed at once, is
    /// dropped only if it was `withdrawn`.
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
        // A checkpoint with a damaged manifest is not in the catalog.
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
    /// restart begins the time anew). Either the notice of their publication was lost, or they are left over. For a
    /// checkpoint that had longer than `deadline` to be published, twice the difference is added.
    #[must_use]
    pub fn unpublished(
        &self,
        older_than: Duration,
        deadline: Duration,
    ) -> Vec<control::Checkpoint> {
        let mut since = self.provisional_since();
        let mut found = Vec::new();
        for listed in self.region.listed() {
            if listed.attrs & ATTR_PROVISIONAL == 0 {
                continue;
            }
            let Some(checkpoint) = self.region.checkpoint(listed.id) else {
                continue;
            };
            let seen = since
                .entry(checkpoint.id().to_string())
                .or_insert_with(Instant::now);
            let age = seen.elapsed();
            if age < older_than {
                continue;
            }
            match manifest_of(&checkpoint) {
                Ok(manifest)
                    if age < older_than.saturating_add(patience_beyond(deadline, &manifest)) => {}
                Ok(manifest) => found.push(self.summary(&checkpoint, &manifest)),
                Err(error) => {
                    tracing::error!(event = "provisional-checkpoint-unreadable", %error, "provisional checkpoint left alone")
                }
            }
        }
        found
    }

    /// Returns the publication state of a checkpoint; `None` if it is not here.
    #[must_use]
    pub fn mark(&self, id: &str) -> Option<PublicationState> {
        let checkpoint = self.checkpoint(id).ok()?;
        Some(mark_of(checkpoint.id(), checkpoint.attrs()))
    }

    pub(super) fn is_provisional(&self, id: &str) -> bool {
        self.mark(id).is_some_and(|mark| mark.provisional)
    }

    /// Returns everything that the store holds, in the order of the seals. Costs a manifest read for each. A damaged
    /// checkpoint is logged and left out.
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
                Err(error) => {
                    tracing::error!(event = "held-checkpoint-unreadable", %error, "checkpoint left out of what is held")
                }
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

    /// Returns the publication state of everything that the store holds. Reads nothing from the medium.
    #[must_use]
    pub fn marks(&self) -> Vec<PublicationState> {
        let listed = self.region.listed().into_iter();
        listed.map(|held| mark_of(held.id, held.attrs)).collect()
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

fn mark_of(id: CheckpointId, attrs: u32) -> PublicationState {
    PublicationState {
        id: id.to_string(),
        published: attrs & ATTR_PUBLISHED != 0,
        provisional: attrs & ATTR_PROVISIONAL != 0,
    }
}

/// Returns the extra time for a checkpoint whose caller has longer than `deadline` to publish it.
fn patience_beyond(deadline: Duration, manifest: &Manifest) -> Duration {
    Duration::from_millis(manifest.commit_deadline_ms)
        .saturating_sub(deadline)
        .saturating_mul(2)
}
