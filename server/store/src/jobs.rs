//! One writer a job: a lineage grows at its head only.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use crate::JobLock;

/// Which jobs have a dump under way, and what holds them.
#[derive(Clone, Default)]
pub(super) struct JobLocks(Arc<Mutex<HashMap<String, String>>>);

/// Holds a job until it is dropped.
pub(super) struct JobGuard {
    locks: JobLocks,
    job: String,
    /// Keeps other nodes away, where there are any.
    cluster: Option<JobLock>,
}

impl JobGuard {
    /// Holds the cluster's lock for as long.
    pub(super) fn also(&mut self, lock: JobLock) {
        self.cluster = Some(lock);
    }
}

impl JobLocks {
    /// Takes the job for `holder`, or says who has it.
    pub(super) fn lock(&self, job: &str, holder: &str) -> Result<JobGuard, String> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match held.entry(job.to_owned()) {
            Entry::Occupied(entry) => Err(entry.get().clone()),
            Entry::Vacant(entry) => {
                entry.insert(holder.to_owned());
                Ok(JobGuard {
                    locks: self.clone(),
                    job: job.to_owned(),
                    cluster: None,
                })
            }
        }
    }
}

impl Drop for JobGuard {
    fn drop(&mut self) {
        // Before the local one: who gets that asks for it at once.
        self.cluster = None;
        self.locks
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.job);
    }
}
