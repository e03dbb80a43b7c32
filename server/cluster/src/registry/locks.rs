//! Locks of jobs: keys bound to the lease of the node that dumps.

use std::collections::HashMap;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp};
use parking_lot::MutexGuard;
use permafrost_store::StoreError;

use super::Inner;
use crate::error::RegistryError;
use crate::etcd::Failure;
use crate::values::{Holder, Json as _, VERSION};

/// Longest time that releasing a lock may delay its holder; after that it continues in the background.
const UNLOCK_WAIT: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Locks {
    /// Create revision of the lock, by job.
    pub(super) held: HashMap<String, i64>,
    /// Tokens of locks that were released while etcd did not answer, by job.
    let_go: HashMap<String, String>,
}

impl Inner {
    pub(super) fn locks(&self) -> MutexGuard<'_, Locks> {
        self.locks.lock()
    }

    pub(super) async fn lock_job(&self, job: &str) -> Result<Holder, StoreError> {
        let key = self.keys.lock(job);
        let own = self.own().await?;
        let holder = Holder {
            v: VERSION,
            node: self.node.clone(),
            token: uuid::Uuid::new_v4().to_string(),
        };
        loop {
            let lock = Txn::new()
                .when([
                    self.still(own),
                    Compare::create_revision(key.clone(), CompareOp::Equal, 0),
                ])
                .and_then([
                    self.get_own(),
                    TxnOp::put(
                        key.clone(),
                        holder.encode(),
                        Some(PutOptions::new().with_lease(own.lease)),
                    ),
                    TxnOp::get(key.clone(), None),
                ])
                .or_else([self.get_own(), TxnOp::get(key.clone(), None)]);
            let outcome = self.transaction(lock).await?;
            if !self.is_registered(&outcome, own) {
                return Err(self.fenced());
            }
            let Some(kv) = outcome.found.get(1).and_then(|found| found.first()) else {
                // The lock was free again when the answer was made.
                continue;
            };
            let present =
                Holder::decode(kv.value()).map_err(|source| RegistryError::LockUnreadable {
                    job: job.to_owned(),
                    source,
                })?;
            if present.token == holder.token {
                self.locks()
                    .held
                    .insert(job.to_owned(), kv.create_revision());
                return Ok(holder);
            }
            let was_let_go = self
                .locks()
                .let_go
                .get(job)
                .is_some_and(|token| *token == present.token);
            if was_let_go {
                self.unlock(job, &present.token).await?;
                continue;
            }
            return Err(RegistryError::JobBusy {
                job: job.to_owned(),
                node: present.node,
            }
            .into());
        }
    }

    /// Removes a lock if it still has that token.
    pub(super) async fn unlock(&self, job: &str, token: &str) -> Result<(), Failure> {
        let key = self.keys.lock(job);
        let holder = Holder {
            v: VERSION,
            node: self.node.clone(),
            token: token.to_owned(),
        };
        let delete = Txn::new()
            .when([Compare::value(
                key.clone(),
                CompareOp::Equal,
                holder.encode(),
            )])
            .and_then([TxnOp::delete(key, None)]);
        self.transaction(delete).await?;
        let mut locks = self.locks();
        if locks.let_go.get(job).is_some_and(|known| known == token) {
            locks.let_go.remove(job);
        }
        Ok(())
    }
}

/// A held lock, released when dropped.
pub(super) struct Held {
    inner: Arc<Inner>,
    job: String,
    token: String,
}

impl Held {
    pub(super) fn new(inner: &Arc<Inner>, job: &str, holder: Holder) -> Self {
        Self {
            inner: Arc::clone(inner),
            job: job.to_owned(),
            token: holder.token,
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let inner = Arc::clone(&self.inner);
        let (job, token) = (self.job.clone(), self.token.clone());
        {
            let mut locks = inner.locks();
            locks.held.remove(&job);
            locks.let_go.insert(job.clone(), token.clone());
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        let runtime = inner.runtime.clone();
        runtime.spawn(async move {
            // If etcd does not answer for that long, the lease ends too, or the next lock of the job removes it.
            if let Err(failure) = inner.unlock(&job, &token).await {
                tracing::warn!(event = "registry-lock-not-removed", %failure, job, "lock not removed");
            }
            let _ = sender.send(());
        });
        // Waits, so that the next dump of the job finds it free.
        let _ = receiver.recv_timeout(UNLOCK_WAIT);
    }
}
