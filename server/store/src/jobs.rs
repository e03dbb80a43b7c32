//! One writer per job: a lineage grows at its head only.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::JobLock;

/// Jobs with a dump under way, and the holder of each.
#[derive(Clone, Default)]
pub(super) struct JobLocks(Arc<Mutex<HashMap<String, String>>>);

/// Lock on a job, released when dropped.
pub(super) struct JobGuard {
    locks: JobLocks,
    job: String,
    /// Lock of the cluster, which keeps other nodes away; `None` without a cluster.
    cluster: Option<JobLock>,
}

impl JobGuard {
    /// Adds the cluster's lock, which is then held as long as this one.
    pub(super) fn also(&mut self, lock: JobLock) {
        self.cluster = Some(lock);
    }
}

impl JobLocks {
    /// Locks the job for `holder`.
    ///
    /// # Errors
    /// The current holder of the job.
    pub(super) fn lock(&self, job: &str, holder: &str) -> Result<JobGuard, String> {
        let mut held = self.0.lock();
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
        // Released before the local lock: the next holder of that requests the cluster's at once.
        self.cluster = None;
        self.locks.0.lock().remove(&self.job);
    }
}
