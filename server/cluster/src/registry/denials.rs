//! The cluster's list of denied certificates: one value, which every node reads with its signs of life.

use std::collections::BTreeSet;

use etcd_client::{Compare, CompareOp, KeyValue, Txn, TxnOp};
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
        let own = self.own().await?;
        loop {
            let found = self.get(key.clone(), None).await?;
            let present = found.kvs().first();
            let revision = present.map_or(0, KeyValue::mod_revision);
            let mut list = match present {
                None => DenialList {
                    v: VERSION,
                    ..DenialList::default()
                },
                Some(kv) => DenialList::decode(kv.value()).map_err(|error| damaged(&key, error))?,
            };
            let before = list.entries.clone();
            change(&mut list.entries);
            if list.entries == before {
                return Ok(revision);
            }
            if list.entries.len() > MAX_DENIALS {
                return Err(RegistryError::TooManyDenials { limit: MAX_DENIALS }.into());
            }
            let put = Txn::new()
                .when([
                    self.still(own),
                    Compare::mod_revision(key.clone(), CompareOp::Equal, revision),
                ])
                .and_then([
                    TxnOp::put(key.clone(), list.encode(), None),
                    TxnOp::get(key.clone(), None),
                ])
                .or_else([self.get_own()]);
            let outcome = self.transaction(put).await?;
            if outcome.succeeded {
                let written = outcome.found.first().and_then(|found| found.first());
                return Ok(written.map_or(revision, KeyValue::mod_revision));
            }
            if !self.is_registered(&outcome, own) {
                return Err(self.fenced());
            }
        }
    }
}
