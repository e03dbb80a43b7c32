//! Checkpoints that are known to be damaged here, and the interface of the scrub, which looks for them.
//!
//! A checkpoint in quarantine is kept, but not used: no dump is compared with it, and no restore of it begins
//! unless another node has a copy. The quarantine is kept in memory, and in a cluster also in the registry: a
//! restarted node quarantines the checkpoints listed as damaged, until the scrub has read them.

use std::collections::{HashMap, HashSet};
use std::sync::{OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use permafrost_protocol::control;
use permafrost_protocol::wire::message::{Verified, request};

use super::reader::checkpoint_name;
use super::{ProgressReceiver, Store, StoreError};
use crate::ReadingError;

/// Verifies and heals stored checkpoints: see `permafrost_cluster::scrub`.
pub trait ScrubService: Send + Sync {
    /// Verifies a checkpoint, a job's newest, or (empty) everything; heals or quarantines damaged ones.
    ///
    /// # Errors
    /// No such checkpoint. Damage is no error.
    fn scrub(
        &self,
        reference: &str,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Scrubbed, StoreError>;

    /// Makes a checkpoint that may be damaged the next to be verified. Returns at once.
    fn suspect(&self, id: &str);

    /// Returns the verification state of copies of this node. Those that were not read within `within` are the next
    /// to be read, after the suspects. Returns at once.
    fn verified(&self, ids: &[String], within: Duration) -> Verified;

    /// Returns the progress of the scrub.
    fn status(&self) -> control::ScrubStatus;
}

/// Checkpoints in quarantine, and the scrub.
#[derive(Default)]
pub(super) struct Quarantine {
    /// Description of the damage, by checkpoint id.
    damaged: Mutex<HashMap<String, String>>,
    /// Ids of those that were unreadable when the region was opened: nothing of them can be verified.
    gone: Mutex<HashSet<String>>,
    /// The scrub. It holds the store, so the store must not hold it.
    scrub: OnceLock<Weak<dyn ScrubService>>,
}

impl Quarantine {
    fn damaged(&self) -> parking_lot::MutexGuard<'_, HashMap<String, String>> {
        self.damaged.lock()
    }

    fn gone(&self) -> parking_lot::MutexGuard<'_, HashSet<String>> {
        self.gone.lock()
    }
}

impl Store {
    /// Sets the scrub, once. Returns false if there is one already.
    pub fn scrubbed_by(&self, scrub: Weak<dyn ScrubService>) -> bool {
        self.quarantine.scrub.set(scrub).is_ok()
    }

    fn scrub(&self) -> Option<std::sync::Arc<dyn ScrubService>> {
        self.quarantine.scrub.get()?.upgrade()
    }

    /// Verifies a checkpoint, a job's newest, or (empty) everything that this node holds, now; heals or quarantines
    /// damaged ones.
    ///
    /// # Errors
    /// No such checkpoint here. Damage is no error.
    pub fn scrub_now(
        &self,
        reference: &str,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Scrubbed, StoreError> {
        let scrub = self
            .scrub()
            .ok_or(ReadingError::NoScrub { action: "scrubs" })?;
        scrub.scrub(reference, progress)
    }

    /// Makes a checkpoint that looked damaged to a reader the next to be verified. Returns at once.
    pub fn suspect(&self, id: &str) {
        if let Some(scrub) = self.scrub() {
            scrub.suspect(id);
        }
    }

    /// Returns the verification state of copies of this node, for another node that is to rely on them.
    ///
    /// # Errors
    /// Too many checkpoints in one request; this node is starting or stopping.
    pub fn verified(&self, asked: &request::Verify) -> Result<Verified, StoreError> {
        if asked.checkpoints.len() > request::MAX_VERIFY {
            return Err(ReadingError::TooMany {
                requested: asked.checkpoints.len(),
                limit: request::MAX_VERIFY,
            }
            .into());
        }
        let scrub = self
            .scrub()
            .ok_or(ReadingError::NoScrub { action: "verifies" })?;
        Ok(scrub.verified(&asked.checkpoints, Duration::from_secs(asked.within_s)))
    }

    /// Marks this node's copy of a checkpoint in the registry as damaged, or as whole; does nothing where the
    /// cluster does not list it. If the registry cannot be reached, the sweep repeats it later.
    pub fn list_damage(&self, record: &control::Checkpoint, damaged: bool) {
        let Some((registry, node)) = self.registry().zip(self.node()) else {
            return;
        };
        match registry.set_damaged(record, node, damaged) {
            Ok(()) | Err(StoreError::NotFound { .. }) => {}
            Err(error) => {
                tracing::warn!(id = %record.id, damaged, %error, "the registry does not know yet how this copy stands");
            }
        }
    }

    /// Returns the state of the scrub, if there is one.
    #[must_use]
    pub fn scrub_status(&self) -> Option<control::ScrubStatus> {
        Some(self.scrub()?.status())
    }

    /// Quarantines a damaged checkpoint. Returns true if it was not yet in quarantine.
    pub fn set_aside(&self, id: &str, damage: &str) -> bool {
        let mut damaged = self.quarantine.damaged();
        damaged.insert(id.to_owned(), damage.to_owned()).is_none()
    }

    /// Quarantines a checkpoint that the region could not open.
    pub(super) fn set_aside_gone(&self, id: String, reason: String) {
        self.quarantine.damaged().insert(id.clone(), reason);
        self.quarantine.gone().insert(id);
    }

    /// Forgets an unreadable checkpoint: it is removed, or a whole copy has its place.
    pub(super) fn forget_gone(&self, id: &str) {
        if self.quarantine.gone().remove(id) {
            self.quarantine.damaged().remove(id);
        }
    }

    /// Lifts the quarantine of a checkpoint that is whole, or no longer exists. Returns true if it was in
    /// quarantine.
    pub fn lift(&self, id: &str) -> bool {
        self.quarantine.gone().remove(id);
        self.quarantine.damaged().remove(id).is_some()
    }

    /// Returns the known damage of a checkpoint of this node.
    #[must_use]
    pub fn damage(&self, id: &str) -> Option<String> {
        self.quarantine.damaged().get(id).cloned()
    }

    /// Returns the ids of this node's damaged checkpoints, and their damage.
    #[must_use]
    pub fn set_asides(&self) -> Vec<(String, String)> {
        let mut damaged = self.quarantine.damaged();
        let gone = self.quarantine.gone().clone();
        damaged.retain(|id, _| gone.contains(id) || self.checkpoint(id).is_ok());
        damaged
            .iter()
            .map(|(id, damage)| (id.clone(), damage.clone()))
            .collect()
    }

    /// Adds the known damage to a record, for people: never to be stored.
    pub(super) fn with_damage(&self, mut record: control::Checkpoint) -> control::Checkpoint {
        record.damaged = self.damage(&record.id).unwrap_or_default();
        record
    }

    /// Refuses a checkpoint that is damaged here, and that no other node holds: before a restore begins rather than
    /// in the middle of it.
    ///
    /// # Errors
    /// [`ReadingError::Damaged`]; no such checkpoint.
    pub fn check_restorable(&self, reference: &str) -> Result<(), StoreError> {
        if self.quarantine.damaged().is_empty() {
            return Ok(());
        }
        let record = self.resolve(reference)?;
        let Some(damage) = self.damage(&record.id) else {
            return Ok(());
        };
        let elsewhere = record
            .nodes
            .iter()
            .any(|node| Some(node.as_str()) != self.node());
        // Its pages may be intact, but the next start could not read them any more.
        let last_chance = self
            .checkpoint(&record.id)
            .is_ok_and(|checkpoint| checkpoint.check_root().is_err());
        if elsewhere || last_chance {
            return Ok(());
        }
        Err(ReadingError::Damaged {
            name: checkpoint_name(&record),
            damage,
        }
        .into())
    }
}
