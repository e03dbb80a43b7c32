//! A registry that is a list.

use parking_lot::Mutex;

use permafrost_clustered::{JobLock, Registered, Registry};
use permafrost_protocol::control::Checkpoint;
use permafrost_store::StoreError;
/// The registry: a list, the same for all nodes.
#[derive(Default)]
pub(crate) struct List(Mutex<(Vec<Registered>, u64)>);

impl Registry for List {
    fn lock_job(&self, _: &str) -> Result<JobLock, StoreError> {
        Ok(Box::new(()))
    }

    fn reserve_generation(&self, _: &str) -> Result<u64, StoreError> {
        let mut list = self.0.lock();
        list.1 += 1;
        Ok(list.1)
    }

    fn publish(&self, entry: &Registered, _: Option<&str>) -> Result<(), StoreError> {
        self.0.lock().0.push(entry.clone());
        Ok(())
    }

    fn withdraw(&self, checkpoint: &Checkpoint) -> Result<(), StoreError> {
        let mut list = self.0.lock();
        list.0.retain(|entry| entry.checkpoint.id != checkpoint.id);
        Ok(())
    }

    fn is_withdrawn(&self, _: &Checkpoint) -> Result<bool, StoreError> {
        Ok(false)
    }

    fn set_pinned(&self, _: &Checkpoint, _: bool) -> Result<(), StoreError> {
        Ok(())
    }

    fn find(&self, job: &str, generation: u64) -> Result<Option<Registered>, StoreError> {
        let listed = self.list(job)?.into_iter();
        let found = listed.filter(|entry| [0, entry.checkpoint.generation].contains(&generation));
        Ok(found.max_by_key(|entry| entry.checkpoint.generation))
    }

    fn list(&self, job: &str) -> Result<Vec<Registered>, StoreError> {
        let mut listed = self.0.lock().0.clone();
        listed.retain(|entry| job.is_empty() || entry.checkpoint.job == job);
        Ok(listed)
    }

    fn set_holder(&self, of: &Checkpoint, node: &str, holds: bool) -> Result<(), StoreError> {
        let mut list = self.0.lock();
        let entry = list.0.iter_mut().find(|entry| entry.checkpoint.id == of.id);
        entry.unwrap().set_holder(node, holds);
        Ok(())
    }

    fn set_damaged(&self, _: &Checkpoint, _: &str, _: bool) -> Result<(), StoreError> {
        Ok(())
    }

    fn set_cold(&self, _: &Checkpoint, _: &str, _: u64) -> Result<(), StoreError> {
        Ok(())
    }
}
