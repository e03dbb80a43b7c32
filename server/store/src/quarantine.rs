//! Checkpoints that are known to be damaged here, and who looks for them.
//!
//! One in quarantine stays, and nothing is built upon it: no dump is compared with it, and no restore begins that no
//! other node could help out. Remembered in memory, and in a cluster in its registry too: a restarted node sets aside what
//! is listed as damaged, until the scrub has read it.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use permafrost_protocol::control;
use permafrost_protocol::wire::message::{Verified, request};

use super::reader::checkpoint_name;
use super::{Progress, Store, StoreError};

/// Looks after what is stored: see [`permafrost_cluster::scrub`].
pub trait Scrub: Send + Sync {
    /// Verifies a checkpoint, a job's newest, or (empty) everything, and mends or sets aside what is damaged.
    ///
    /// # Errors
    /// No such checkpoint. Damage is no error.
    fn scrub(
        &self,
        reference: &str,
        progress: Progress<'_>,
    ) -> Result<control::Scrubbed, StoreError>;

    /// A checkpoint may be damaged: it is the next to be verified. Returns at once.
    fn suspect(&self, id: &str);

    /// How copies of this node stand; those that were not read within `within` are the next to be read, after the
    /// suspects. Returns at once.
    fn verified(&self, ids: &[String], within: Duration) -> Verified;

    /// How far it is.
    fn status(&self) -> control::ScrubStatus;
}

/// The store's side of it.
#[derive(Default)]
pub(super) struct Quarantine {
    /// By id: what is damaged.
    damaged: Mutex<HashMap<String, String>>,
    /// Those of them that were not readable when the region was opened: there is nothing to be verified.
    gone: Mutex<HashSet<String>>,
    /// Holds the store, so the store must not hold it.
    scrub: OnceLock<Weak<dyn Scrub>>,
}

impl Quarantine {
    fn damaged(&self) -> std::sync::MutexGuard<'_, HashMap<String, String>> {
        self.damaged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn gone(&self) -> std::sync::MutexGuard<'_, HashSet<String>> {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    /// Says who scrubs, once and for all. False if somebody does already.
    pub fn scrubbed_by(&self, scrub: Weak<dyn Scrub>) -> bool {
        self.quarantine.scrub.set(scrub).is_ok()
    }

    fn scrub(&self) -> Option<std::sync::Arc<dyn Scrub>> {
        self.quarantine.scrub.get()?.upgrade()
    }

    /// Verifies a checkpoint, a job's newest, or (empty) everything that this node holds, now; mends or sets aside what
    /// is damaged.
    ///
    /// # Errors
    /// No such checkpoint here. Damage is no error.
    pub fn scrub_now(
        &self,
        reference: &str,
        progress: Progress<'_>,
    ) -> Result<control::Scrubbed, StoreError> {
        let scrub = self.scrub().ok_or_else(|| StoreError::Unavailable {
            message: "this node is starting or stopping and scrubs nothing".to_owned(),
            hint: "try again",
        })?;
        scrub.scrub(reference, progress)
    }

    /// A checkpoint looked damaged to whoever read it: it is the next to be verified. Returns at once.
    pub fn suspect(&self, id: &str) {
        if let Some(scrub) = self.scrub() {
            scrub.suspect(id);
        }
    }

    /// How copies of this node stand, for another node that is to rely on them.
    ///
    /// # Errors
    /// Too many at once; this node is starting or stopping.
    pub fn verified(&self, asked: &request::Verify) -> Result<Verified, StoreError> {
        if asked.checkpoints.len() > request::MAX_VERIFY {
            return Err(StoreError::Invalid {
                message: format!(
                    "{} checkpoints are to be verified, and {} may be at once",
                    asked.checkpoints.len(),
                    request::MAX_VERIFY
                ),
                hint: "ask for some at a time",
            });
        }
        let scrub = self.scrub().ok_or_else(|| StoreError::Unavailable {
            message: "this node is starting or stopping and verifies nothing".to_owned(),
            hint: "try again",
        })?;
        Ok(scrub.verified(&asked.checkpoints, Duration::from_secs(asked.within_s)))
    }

    /// Marks in the registry this node's copy of a checkpoint as damaged, or as whole; nothing where the cluster does
    /// not list it. What does not get through is the sweep's.
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

    /// State of the scrub, where there is one.
    #[must_use]
    pub fn scrub_status(&self) -> Option<control::ScrubStatus> {
        Some(self.scrub()?.status())
    }

    /// Sets a damaged checkpoint aside; whether it was not yet.
    pub fn set_aside(&self, id: &str, damage: &str) -> bool {
        let mut damaged = self.quarantine.damaged();
        damaged.insert(id.to_owned(), damage.to_owned()).is_none()
    }

    /// Sets a checkpoint aside that the region could not open.
    pub(super) fn set_aside_gone(&self, id: String, reason: String) {
        self.quarantine.damaged().insert(id.clone(), reason);
        self.quarantine.gone().insert(id);
    }

    /// It is removed, or a whole copy has its place.
    pub(super) fn forget_gone(&self, id: &str) {
        if self.quarantine.gone().remove(id) {
            self.quarantine.damaged().remove(id);
        }
    }

    /// A checkpoint is whole, or is no more; whether it was set aside.
    pub fn lift(&self, id: &str) -> bool {
        self.quarantine.gone().remove(id);
        self.quarantine.damaged().remove(id).is_some()
    }

    /// What is known to be damaged in a checkpoint of this node.
    #[must_use]
    pub fn damage(&self, id: &str) -> Option<String> {
        self.quarantine.damaged().get(id).cloned()
    }

    /// Checkpoints of this node that are damaged: ids, and what is.
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

    /// With what is known of its damage, for people: never to be stored.
    pub(super) fn with_damage(&self, mut record: control::Checkpoint) -> control::Checkpoint {
        record.damaged = self.damage(&record.id).unwrap_or_default();
        record
    }

    /// Refuses a checkpoint that is damaged here, and that no other node holds: better before a restore begins than in
    /// the middle of it.
    ///
    /// # Errors
    /// [`StoreError::Damaged`]; no such checkpoint.
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
        // Its pages may be as they were, and the next start cannot read them any more.
        let last_chance = self
            .checkpoint(&record.id)
            .is_ok_and(|checkpoint| checkpoint.check_root().is_err());
        if elsewhere || last_chance {
            return Ok(());
        }
        Err(StoreError::Damaged {
            name: checkpoint_name(&record),
            damage,
        })
    }
}
