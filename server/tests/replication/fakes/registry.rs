//! A registry in memory, with faults.

use permafrost_store::SessionError;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use permafrost_clustered::{JobLock, Registered, Registry};
use permafrost_protocol::control::Checkpoint;
use permafrost_store::StoreError;

use super::{Shared, Step, unavailable};

/// A registry that is a list.
pub(crate) struct FakeRegistry {
    pub(super) faults: Shared,
    pub(super) state: Mutex<Listing>,
}

#[derive(Default)]
pub(super) struct Listing {
    entries: Vec<Registered>,
    generations: HashMap<String, u64>,
    locked: Arc<Mutex<HashSet<String>>>,
    withdrawn: HashSet<String>,
}

struct Lock(String, Arc<Mutex<HashSet<String>>>);

impl Drop for Lock {
    fn drop(&mut self) {
        self.1.lock().remove(&self.0);
    }
}

impl FakeRegistry {
    fn state(&self) -> MutexGuard<'_, Listing> {
        self.state.lock()
    }

    pub(crate) fn entries(&self) -> Vec<Registered> {
        self.state().entries.clone()
    }

    /// Returns the last generation of a job that was reserved.
    pub(crate) fn reserved(&self, job: &str) -> u64 {
        let state = self.state();
        state.generations.get(job).copied().unwrap_or_default()
    }

    /// Forgets the generations that were reserved.
    pub(crate) fn forget_reserved(&self) {
        self.state().generations.clear();
    }

    fn speak(&self) -> Result<(), StoreError> {
        if self.faults.faults().silent {
            return Err(unavailable());
        }
        Ok(())
    }
}

impl Registry for FakeRegistry {
    fn lock_job(&self, job: &str) -> Result<JobLock, StoreError> {
        let locked = Arc::clone(&self.state().locked);
        if locked.lock().insert(job.to_owned()) {
            return Ok(Box::new(Lock(job.to_owned(), locked)));
        }
        Err(SessionError::JobBusy {
            job: job.to_owned(),
            holder: "another node".to_owned(),
        }
        .into())
    }

    fn reserve_generation(&self, job: &str) -> Result<u64, StoreError> {
        self.faults.pass(Step::Reserve);
        let mut state = self.state();
        let generation = state.generations.entry(job.to_owned()).or_default();
        *generation += 1;
        Ok(*generation)
    }

    fn publish(&self, entry: &Registered, _replaces: Option<&str>) -> Result<(), StoreError> {
        self.faults.pass(Step::BeforePublish);
        let (refuse, lose) = {
            let faults = self.faults.faults();
            (faults.refuse_publish, faults.lose_answer)
        };
        if let Some(refuse) = refuse {
            return Err(refuse());
        }
        self.state().entries.push(entry.clone());
        if lose {
            return Err(unavailable());
        }
        self.faults.pass(Step::AfterPublish);
        Ok(())
    }

    fn withdraw(&self, checkpoint: &Checkpoint) -> Result<(), StoreError> {
        self.speak()?;
        let mut state = self.state();
        state
            .entries
            .retain(|entry| entry.checkpoint.id != checkpoint.id);
        state.withdrawn.insert(checkpoint.id.clone());
        Ok(())
    }

    fn is_withdrawn(&self, checkpoint: &Checkpoint) -> Result<bool, StoreError> {
        self.speak()?;
        Ok(self.state().withdrawn.contains(&checkpoint.id))
    }

    fn set_pinned(&self, checkpoint: &Checkpoint, pinned: bool) -> Result<(), StoreError> {
        self.speak()?;
        for entry in &mut self.state().entries {
            if entry.checkpoint.id == checkpoint.id {
                entry.checkpoint.pinned = pinned;
            }
        }
        Ok(())
    }

    fn find(&self, job: &str, generation: u64) -> Result<Option<Registered>, StoreError> {
        self.speak()?;
        let state = self.state();
        let of_job = state.entries.iter().filter(|entry| {
            let checkpoint = &entry.checkpoint;
            checkpoint.job == job
                && checkpoint.generation > 0
                && (generation == 0 || checkpoint.generation == generation)
        });
        Ok(of_job
            .max_by_key(|entry| entry.checkpoint.generation)
            .cloned())
    }

    fn list(&self, job: &str) -> Result<Vec<Registered>, StoreError> {
        self.speak()?;
        let mut entries = self.entries();
        entries.retain(|entry| job.is_empty() || entry.checkpoint.job == job);
        Ok(entries)
    }

    fn set_holder(&self, _: &Checkpoint, _: &str, _: bool) -> Result<(), StoreError> {
        self.speak()
    }

    fn set_damaged(&self, _: &Checkpoint, _: &str, _: bool) -> Result<(), StoreError> {
        self.speak()
    }

    fn set_cold(&self, _: &Checkpoint, _: &str, _: u64) -> Result<(), StoreError> {
        self.speak()
    }
}
