//! The registry in etcd.
//!
//! Every change is one repeatable transaction that compares this node's registration (see [`super::fence`]):
//! when an answer is lost, the retry finds the change done.

mod counters;
mod denials;
mod listing;
mod locks;
mod operator;
mod retention;
mod withdrawn;

use permafrost_store::MissingObject;
use std::future::Future;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use etcd_client::{Compare, CompareOp, GetOptions, KeyValue, SortOrder, SortTarget, Txn, TxnOp};
use parking_lot::Mutex;
use permafrost_clustered::{JobLock, Registered, Registry, no_other};
use permafrost_identity::ReloadingIdentity;
use permafrost_protocol::control::Checkpoint;
use permafrost_store::StoreError;
use prost::Message as _;
use tokio::runtime::Handle;

use super::config::ClusterConfig;
use super::etcd::{Etcd, Failure, Outcome};
use super::fence::{Fence, Registration, Tick};
use super::keys::{Keys, end_of};
use super::values::Entry;
use crate::error::RegistryError;
use crate::values::ValueError;
use locks::{Held, Locks};
use permafrost_clustered::DataMark;

/// The registry, seen from one node. Clones share their state.
#[derive(Clone)]
pub struct EtcdRegistry {
    inner: Arc<Inner>,
    /// Data that [`Registry::list`] must read from; `None`: any.
    bound: Option<DataMark>,
}

struct Inner {
    etcd: Arc<Etcd>,
    keys: Keys,
    fence: Arc<Fence>,
    node: String,
    /// Identity that signs removals, and verifies the signatures of others. `None`: nothing is signed, and every
    /// removal is believed.
    identity: Option<Arc<ReloadingIdentity>>,
    limit: Duration,
    runtime: Handle,
    locks: Mutex<Locks>,
}

/// Time limit of a read while this node's registration is lost: then etcd has most likely not answered for a
/// lease's time. Its members are being tried all the while, and the caller can use this node's own knowledge.
const LIMIT_WHILE_AWAY: Duration = Duration::from_secs(2);

/// Longest wait of a change for a registration that may still be valid: an election of etcd takes one to three
/// seconds, some of which have passed when the fence closes.
const ELECTION: Duration = Duration::from_secs(3);

/// Interval at which the registration is checked during that wait.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

impl EtcdRegistry {
    pub(crate) fn new(
        etcd: Arc<Etcd>,
        config: &ClusterConfig,
        fence: Arc<Fence>,
        node: &str,
        identity: Option<Arc<ReloadingIdentity>>,
        runtime: Handle,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                etcd,
                keys: Keys::new(&config.prefix),
                fence,
                node: node.to_owned(),
                identity,
                limit: config.call_deadline,
                runtime,
                locks: Mutex::default(),
            }),
            bound: None,
        }
    }

    /// Runs `work` on the runtime and waits for it. Not `block_on`, which panics on a thread of the runtime.
    fn wait<T, F>(&self, work: impl FnOnce(Arc<Inner>) -> F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let (sender, receiver) = mpsc::sync_channel(1);
        let work = work(self.inner.clone());
        let limit = self.inner.limit;
        let task = self.inner.runtime.spawn(async move {
            let result = match tokio::time::timeout(limit, work).await {
                Ok(result) => result,
                Err(_) => Err(no_answer(limit)),
            };
            let _ = sender.send(result);
        });
        // If all threads of the runtime are busy, the work may not start at all.
        match receiver.recv_timeout(limit + Duration::from_secs(1)) {
            Ok(result) => result,
            Err(_) => {
                task.abort();
                Err(no_answer(limit))
            }
        }
    }
}

fn no_answer(limit: Duration) -> StoreError {
    RegistryError::NoAnswer {
        limit_ms: limit.as_millis(),
    }
    .into()
}

impl Inner {
    async fn transaction(&self, txn: Txn) -> Result<Outcome, Failure> {
        self.etcd.transact(self.limit, txn).await
    }

    async fn get(
        &self,
        key: impl Into<Vec<u8>>,
        options: Option<GetOptions>,
    ) -> Result<etcd_client::GetResponse, Failure> {
        let key = key.into();
        let limit = if self.fence.registration().is_ok() {
            self.limit
        } else {
            self.limit.min(LIMIT_WHILE_AWAY)
        };
        self.etcd
            .call(limit, |mut client| {
                let (key, options) = (key.clone(), options.clone());
                async move { client.get(key, options).await }
            })
            .await
    }

    /// Returns this node's registration. If it counts as lost only because etcd has not answered, waits for it:
    /// most often etcd is electing a leader, and the lease outlives that. Each transaction verifies that it did.
    async fn own(&self) -> Result<Registration, StoreError> {
        let until = Tick::now().plus(ELECTION);
        loop {
            match self.fence.registration() {
                Err(_) if self.fence.may_open() && Tick::now() < until => {
                    tokio::time::sleep(LOOK_AGAIN).await;
                }
                known => return known,
            }
        }
    }

    /// Returns the compare that fails if a node is no longer registered.
    fn still(&self, own: Registration) -> Compare {
        Compare::create_revision(self.keys.node(&self.node), CompareOp::Equal, own.token)
    }

    fn fenced(&self) -> StoreError {
        RegistryError::Fenced {
            node: self.node.clone(),
        }
        .into()
    }

    /// Returns true if the node is registered, from an outcome whose first get was the own node's key.
    fn is_registered(&self, outcome: &Outcome, own: Registration) -> bool {
        outcome
            .found
            .first()
            .and_then(|found| found.first())
            .is_some_and(|kv| kv.create_revision() == own.token)
    }

    fn get_own(&self) -> TxnOp {
        TxnOp::get(self.keys.node(&self.node), None)
    }

    /// Returns the entry with the highest generation, and its revision.
    async fn newest(&self, job: &str) -> Result<Option<(Registered, i64)>, StoreError> {
        let prefix = self.keys.checkpoints_of(job);
        let options = GetOptions::new()
            .with_range(end_of(&prefix))
            .with_sort(SortTarget::Key, SortOrder::Descend)
            .with_limit(1);
        let found = self.get(prefix, Some(options)).await?;
        found.kvs().first().map(entry).transpose()
    }

    async fn entry_of(
        &self,
        checkpoint: &Checkpoint,
    ) -> Result<Option<(Registered, i64)>, StoreError> {
        let found = self.get(self.key_of(checkpoint), None).await?;
        let found = found.kvs().first().map(entry).transpose()?;
        Ok(found.filter(|(present, _)| present.checkpoint.id == checkpoint.id))
    }

    fn key_of(&self, checkpoint: &Checkpoint) -> String {
        self.keys
            .checkpoint(&checkpoint.job, checkpoint.generation, &checkpoint.id)
    }

    async fn publish(
        &self,
        registered: &Registered,
        replaces: Option<&str>,
    ) -> Result<(), StoreError> {
        let checkpoint = &registered.checkpoint;
        let key = self.key_of(checkpoint);
        let own = self.own().await?;
        let lock_key = self.keys.lock(&checkpoint.job);
        // The lock is held here, or by no node: 0 is the create revision of a missing key.
        let lock = self
            .locks()
            .held
            .get(&checkpoint.job)
            .copied()
            .unwrap_or_default();
        let mut compares = vec![
            self.still(own),
            Compare::create_revision(key.clone(), CompareOp::Equal, 0),
        ];
        // Only an anonymous dump, which is parked, has no job and no lock.
        if !checkpoint.job.is_empty() {
            compares.push(Compare::create_revision(
                lock_key.clone(),
                CompareOp::Equal,
                lock,
            ));
        }
        let mut changes = vec![
            self.get_own(),
            TxnOp::put(key.clone(), Entry::of(registered).encode_to_vec(), None),
        ];
        if let Some(parked) = replaces.filter(|parked| self.keys.parked(parked) != key) {
            changes.push(TxnOp::delete(self.keys.parked(parked), None));
            let was = self.keys.parked(parked);
            changes.push(self.say_withdrawn(parked, &was).await?);
        }
        let publish = Txn::new().when(compares).and_then(changes).or_else([
            self.get_own(),
            TxnOp::get(key, None),
            TxnOp::get(lock_key, None),
        ]);
        let outcome = self.transaction(publish).await;
        let outcome = outcome.map_err(|source| RegistryError::OutcomeUnknown {
            id: checkpoint.id.clone(),
            source,
        })?;
        if outcome.succeeded {
            return Ok(());
        }
        if let Some(present) = outcome.found.get(1).and_then(|found| found.first()) {
            let (present, _) = entry(present)?;
            if present.checkpoint.id == checkpoint.id {
                // Listed by an earlier attempt whose answer was lost.
                return Ok(());
            }
            return Err(RegistryError::AlreadyListed {
                job: checkpoint.job.clone(),
                generation: checkpoint.generation,
                id: present.checkpoint.id,
            }
            .into());
        }
        // The following cannot have been listed by an earlier attempt either, nor be listed by one that is still on
        // its way: neither revision comes back.
        if !self.is_registered(&outcome, own) {
            return Err(self.fenced());
        }
        Err(RegistryError::LockLost {
            job: checkpoint.job.clone(),
            id: checkpoint.id.clone(),
        }
        .into())
    }

    /// Takes a checkpoint off the list; with `other`, only while that one is on it.
    async fn withdraw(
        &self,
        checkpoint: &Checkpoint,
        other: Option<&Checkpoint>,
    ) -> Result<(), StoreError> {
        let key = self.key_of(checkpoint);
        let own = self.own().await?;
        let word = self.say_withdrawn(&checkpoint.id, &key).await?;
        loop {
            let Some((_, revision)) = self.entry_of(checkpoint).await? else {
                return Ok(());
            };
            let mut compares = vec![
                self.still(own),
                Compare::mod_revision(key.clone(), CompareOp::Equal, revision),
            ];
            if let Some(other) = other {
                let (_, revision) = self
                    .entry_of(other)
                    .await?
                    .ok_or_else(|| no_other(checkpoint))?;
                let stays = self.key_of(other);
                compares.push(Compare::mod_revision(stays, CompareOp::Equal, revision));
            }
            let delete = Txn::new()
                .when(compares)
                .and_then([
                    self.get_own(),
                    TxnOp::delete(key.clone(), None),
                    word.clone(),
                ])
                .or_else([self.get_own()]);
            let outcome = self.transaction(delete).await?;
            if outcome.succeeded {
                return Ok(());
            }
            if !self.is_registered(&outcome, own) {
                return Err(self.fenced());
            }
        }
    }

    /// Changes an entry, unless `change` finds nothing to do.
    async fn change(
        &self,
        checkpoint: &Checkpoint,
        change: impl Fn(&mut Registered) -> bool,
    ) -> Result<(), StoreError> {
        let changed = |present: Option<&KeyValue>| {
            let present = present.map(entry).transpose()?.map(|(present, _)| present);
            let same = present.filter(|present| present.checkpoint.id == checkpoint.id);
            let Some(mut present) = same else {
                let id = checkpoint.id.clone();
                return Err(StoreError::NotFound(MissingObject::Listed(id)));
            };
            Ok(change(&mut present).then(|| Entry::of(&present).encode_to_vec()))
        };
        self.revise(self.key_of(checkpoint), changed)
            .await
            .map(drop)
    }

    /// Changes the value of a key by compare and swap. `change` gets the present one, and returns the new one or, if
    /// there is nothing to do, `None`. Returns the revision of the value.
    async fn revise(
        &self,
        key: String,
        change: impl Fn(Option<&KeyValue>) -> Result<Option<Vec<u8>>, StoreError>,
    ) -> Result<i64, StoreError> {
        let own = self.own().await?;
        loop {
            let found = self.get(key.clone(), None).await?;
            let present = found.kvs().first();
            let revision = present.map_or(0, KeyValue::mod_revision);
            let Some(value) = change(present)? else {
                return Ok(revision);
            };
            let put = Txn::new()
                .when([
                    self.still(own),
                    Compare::mod_revision(key.clone(), CompareOp::Equal, revision),
                ])
                .and_then([
                    TxnOp::put(key.clone(), value, None),
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

fn entry(kv: &KeyValue) -> Result<(Registered, i64), StoreError> {
    Entry::read(kv.value())
        .map(|registered| (registered, kv.mod_revision()))
        .map_err(|error| damaged(&String::from_utf8_lossy(kv.key()), error))
}

fn damaged(key: &str, source: ValueError) -> StoreError {
    RegistryError::Damaged {
        key: key.to_owned(),
        source,
    }
    .into()
}

impl Registry for EtcdRegistry {
    fn lock_job(&self, job: &str) -> Result<JobLock, StoreError> {
        let owned = job.to_owned();
        let holder = self.wait(|inner| async move { inner.lock_job(&owned).await })?;
        Ok(Box::new(Held::new(&self.inner, job, holder)))
    }

    fn reserve_generation(&self, job: &str) -> Result<u64, StoreError> {
        let job = job.to_owned();
        self.wait(|inner| async move { inner.reserve_generation(&job).await })
    }

    fn publish(&self, entry: &Registered, replaces: Option<&str>) -> Result<(), StoreError> {
        let (entry, replaces) = (entry.clone(), replaces.map(str::to_owned));
        self.wait(|inner| async move { inner.publish(&entry, replaces.as_deref()).await })
    }

    fn withdraw(&self, checkpoint: &Checkpoint) -> Result<(), StoreError> {
        let checkpoint = checkpoint.clone();
        self.wait(|inner| async move { inner.withdraw(&checkpoint, None).await })
    }

    fn withdraw_while(
        &self,
        checkpoint: &Checkpoint,
        other: &Checkpoint,
    ) -> Result<(), StoreError> {
        let (checkpoint, other) = (checkpoint.clone(), other.clone());
        self.wait(|inner| async move { inner.withdraw(&checkpoint, Some(&other)).await })
    }

    fn is_withdrawn(&self, checkpoint: &Checkpoint) -> Result<bool, StoreError> {
        let checkpoint = checkpoint.clone();
        self.wait(|inner| async move { inner.is_withdrawn(&checkpoint).await })
    }

    fn find(&self, job: &str, generation: u64) -> Result<Option<Registered>, StoreError> {
        let job = job.to_owned();
        self.wait(|inner| async move {
            let found = if generation == 0 {
                inner.newest(&job).await?
            } else {
                let key = inner.keys.checkpoint(&job, generation, "");
                let found = inner.get(key, None).await?;
                found.kvs().first().map(self::entry).transpose()?
            };
            Ok(found.map(|(registered, _)| registered))
        })
    }

    fn list(&self, job: &str) -> Result<Vec<Registered>, StoreError> {
        let (job, bound) = (job.to_owned(), self.bound.clone());
        let (listed, _) =
            self.wait(|inner| async move { inner.list(&job, bound.as_ref()).await })?;
        Ok(listed)
    }

    fn set_holder(
        &self,
        checkpoint: &Checkpoint,
        node: &str,
        holds: bool,
    ) -> Result<(), StoreError> {
        let (checkpoint, node) = (checkpoint.clone(), node.to_owned());
        self.wait(|inner| async move {
            let change = |entry: &mut Registered| entry.set_holder(&node, holds);
            inner.change(&checkpoint, change).await
        })
    }

    fn set_damaged(
        &self,
        checkpoint: &Checkpoint,
        node: &str,
        damaged: bool,
    ) -> Result<(), StoreError> {
        let (checkpoint, node) = (checkpoint.clone(), node.to_owned());
        self.wait(|inner| async move {
            let change = |entry: &mut Registered| entry.set_damaged(&node, damaged);
            inner.change(&checkpoint, change).await
        })
    }

    fn set_cold(&self, checkpoint: &Checkpoint, node: &str, bytes: u64) -> Result<(), StoreError> {
        let (checkpoint, node) = (checkpoint.clone(), node.to_owned());
        self.wait(|inner| async move {
            let change = |entry: &mut Registered| entry.set_cold(&node, bytes);
            inner.change(&checkpoint, change).await
        })
    }

    fn set_pinned(&self, checkpoint: &Checkpoint, pinned: bool) -> Result<(), StoreError> {
        let checkpoint = checkpoint.clone();
        self.wait(|inner| async move {
            let change = |entry: &mut Registered| {
                std::mem::replace(&mut entry.checkpoint.pinned, pinned) != pinned
            };
            inner.change(&checkpoint, change).await
        })
    }
}
