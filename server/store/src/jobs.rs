//! One writer per job: a lineage grows at its head only.

use parking_lot::Mutex;
use std::any::Any;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// Jobs with a dump under way, and the holder of each.
#[derive(Clone, Default)]
pub(super) struct JobLocks(Arc<Mutex<HashMap<String, String>>>);

/// Lock on a job, released when dropped.
pub struct JobGuard {
    locks: JobLocks,
    job: String,
    /// Another lock on the job, held together with this one.
    outer: Option<Box<dyn Any + Send + Sync>>,
}

impl JobGuard {
    /// Adds a wider lock on the job, which is then held as long as this one.
    pub fn also(&mut self, lock: Box<dyn Any + Send + Sync>) {
        self.outer = Some(lock);
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
                    outer: None,
                })
            }
        }
    }
}

impl Drop for JobGuard {
    fn drop(&mut self) {
        // Released before this lock: the next holder of this one requests the wider one at once.
        self.outer = None;
        self.locks.0.lock().remove(&self.job);
    }
}
