//! Counters of generations: a number is handed out once, whatever becomes of it.

use etcd_client::{Compare, CompareOp, Txn, TxnOp};
use permafrost_store::StoreError;

use super::{Inner, damaged};
use crate::fence::Registration;
use crate::values::ValueError;

impl Inner {
    pub(super) async fn reserve_generation(&self, job: &str) -> Result<u64, StoreError> {
        let key = self.keys.generation(job);
        let own = self.own().await?;
        loop {
            let (last, revision) = self.counter(&key).await?;
            // After a counter was lost, numbers that are listed must not be handed out.
            let last = match last {
                Some(last) => last,
                None => self
                    .newest(job)
                    .await?
                    .map_or(0, |(newest, _)| newest.checkpoint.generation),
            };
            let next = last
                .checked_add(1)
                .ok_or_else(|| damaged(&key, ValueError::UsedUp))?;
            if self.set_counter(&key, revision, next, own).await? {
                return Ok(next);
            }
            // Another node was quicker, or it was this one and the answer was lost: that number is skipped then.
        }
    }

    /// Raises a counter to at least `generation`. Used by the rebuild.
    pub(super) async fn raise_generation(
        &self,
        job: &str,
        generation: u64,
    ) -> Result<(), StoreError> {
        let key = self.keys.generation(job);
        let own = self.own().await?;
        loop {
            let (last, revision) = self.counter(&key).await?;
            if last.is_some_and(|last| last >= generation)
                || self.set_counter(&key, revision, generation, own).await?
            {
                return Ok(());
            }
        }
    }

    /// Returns a counter, `None` if there is none, and its revision.
    async fn counter(&self, key: &str) -> Result<(Option<u64>, i64), StoreError> {
        let present = self.get(key, None).await?;
        let Some(kv) = present.kvs().first() else {
            return Ok((None, 0));
        };
        let last = std::str::from_utf8(kv.value())
            .ok()
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| damaged(key, ValueError::NoNumber))?;
        Ok((Some(last), kv.mod_revision()))
    }

    /// Sets a counter if it still has that revision. Returns true if it had.
    async fn set_counter(
        &self,
        key: &str,
        revision: i64,
        to: u64,
        own: Registration,
    ) -> Result<bool, StoreError> {
        let set = Txn::new()
            .when([
                self.still(own),
                Compare::mod_revision(key, CompareOp::Equal, revision),
            ])
            .and_then([self.get_own(), TxnOp::put(key, to.to_string(), None)])
            .or_else([self.get_own()]);
        let outcome = self.transaction(set).await?;
        if !outcome.succeeded && !self.is_registered(&outcome, own) {
            return Err(self.fenced());
        }
        Ok(outcome.succeeded)
    }
}
