//! The cluster's list of denied certificates: one value, which every node reads with its signs of life.

use std::collections::BTreeSet;

use etcd_client::KeyValue;
use permafrost_identity::MAX_DENIALS;
use permafrost_store::StoreError;

use super::{EtcdRegistry, Inner, damaged};
use crate::error::RegistryError;
use crate::values::{DenialList, Json as _, VERSION};

impl EtcdRegistry {
    /// Adds entries to the list.
    ///
    /// # Errors
    /// The registry is unavailable; the list is full.
    pub fn deny(&self, entries: &[String]) -> Result<(), StoreError> {
        let entries = entries.to_vec();
        self.wait(|inner| async move {
            let add = |list: &mut BTreeSet<String>| list.extend(entries.iter().cloned());
            inner.change_denials(add).await.map(drop)
        })
    }

    /// Removes entries from the list. Returns the revision from which on it is without them.
    ///
    /// # Errors
    /// The registry is unavailable.
    pub fn undeny(&self, entries: &[String]) -> Result<i64, StoreError> {
        let entries = entries.to_vec();
        self.wait(|inner| async move {
            let remove =
                |list: &mut BTreeSet<String>| list.retain(|entry| !entries.contains(entry));
            inner.change_denials(remove).await
        })
    }
}

impl Inner {
    async fn change_denials(
        &self,
        change: impl Fn(&mut BTreeSet<String>),
    ) -> Result<i64, StoreError> {
        let key = self.keys.denied();
        let changed = |present: Option<&KeyValue>| {
            let mut list = match present {
                None => DenialList {
                    v: VERSION,
                    ..DenialList::default()
                },
                Some(kv) => DenialList::decode(kv.value()).map_err(|error| damaged(&key, error))?,
            };
            let before = list.entries.clone();
            change(&mut list.entries);
            if list.entries != before && list.entries.len() > MAX_DENIALS {
                return Err(RegistryError::TooManyDenials { limit: MAX_DENIALS }.into());
            }
            Ok((list.entries != before).then(|| list.encode()))
        };
        self.revise(key.clone(), changed).await
    }
}
