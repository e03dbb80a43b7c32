//! The policies of retention: one value, which the nodes sign and check themselves.

use etcd_client::KeyValue;
use permafrost_store::StoreError;

use super::EtcdRegistry;

impl EtcdRegistry {
    /// Returns the value of the policies; `None` if none was ever set.
    ///
    /// # Errors
    /// The registry is unavailable.
    pub fn retention(&self) -> Result<Option<Vec<u8>>, StoreError> {
        self.wait(|inner| async move {
            let found = inner.get(inner.keys.retention(), None).await?;
            Ok(found.kvs().first().map(|kv| kv.value().to_vec()))
        })
    }

    /// Replaces the value of the policies, if it is still `before`. Returns false if it is not.
    ///
    /// # Errors
    /// The registry is unavailable.
    pub fn replace_retention(
        &self,
        before: Option<Vec<u8>>,
        after: Vec<u8>,
    ) -> Result<bool, StoreError> {
        self.wait(|inner| async move {
            let replaced = std::sync::atomic::AtomicBool::new(false);
            let changed = |present: Option<&KeyValue>| {
                let same = present.map(KeyValue::value) == before.as_deref();
                replaced.store(same, std::sync::atomic::Ordering::Relaxed);
                Ok(same.then(|| after.clone()))
            };
            inner.revise(inner.keys.retention(), changed).await?;
            Ok(replaced.into_inner())
        })
    }
}
