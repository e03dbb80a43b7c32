//! Checkpoints that are known to be damaged here.
//!
//! A checkpoint in quarantine is kept, but no dump is compared with it. The quarantine is kept in memory.

use std::collections::{HashMap, HashSet};

use parking_lot::Mutex;

use super::Store;

/// Checkpoints in quarantine.
#[derive(Default)]
pub(super) struct Quarantine {
    /// Description of the damage, by checkpoint id.
    damaged: Mutex<HashMap<String, String>>,
    /// Ids of those that were unreadable when the region was opened: nothing of them can be verified.
    gone: Mutex<HashSet<String>>,
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

    /// Returns the known damage of a checkpoint.
    #[must_use]
    pub fn damage(&self, id: &str) -> Option<String> {
        self.quarantine.damaged().get(id).cloned()
    }

    /// Returns the ids of the damaged checkpoints, and their damage.
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

    /// Returns true if a checkpoint of this store is known to be damaged.
    #[must_use]
    pub fn has_damage(&self) -> bool {
        !self.quarantine.damaged().is_empty()
    }

    /// Returns true if the root of a checkpoint is damaged in the region: its pages may be intact, but the next start
    /// cannot read them.
    #[must_use]
    pub fn has_damaged_root(&self, id: &str) -> bool {
        self.checkpoint(id)
            .is_ok_and(|checkpoint| checkpoint.check_root().is_err())
    }
}
