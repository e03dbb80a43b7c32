//! The registry as the sweep of this node sees it: lists checkpoints, and decides whether an unlisted copy may be
//! removed.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use permafrost_cluster::rebuild::keep_numbers;
use permafrost_cluster::repair::Standing;
use permafrost_cluster::{ClusterNodes, EtcdRegistry, MemberState};
use permafrost_clustered::{Acquaintance, DataMark, JobLock, KnownData, Registered, Registry};
use permafrost_protocol::control::Checkpoint;
use permafrost_store::{Store, StoreError};

/// Registry that lists checkpoints and remembers which data of etcd the last list came from.
pub(super) struct Listing {
    registry: EtcdRegistry,
    known: KnownData,
    store: Arc<Store>,
    nodes: ClusterNodes,
    node: String,
    /// Origin of the last list.
    seen: Mutex<Option<(DataMark, Acquaintance)>>,
}

impl Listing {
    pub(super) fn new(
        registry: EtcdRegistry,
        known: KnownData,
        store: Arc<Store>,
        nodes: ClusterNodes,
        node: &str,
    ) -> Self {
        Self {
            registry,
            known,
            store,
            nodes,
            node: node.to_owned(),
            seen: Mutex::default(),
        }
    }

    fn seen(&self) -> MutexGuard<'_, Option<(DataMark, Acquaintance)>> {
        self.seen.lock()
    }
}

impl Registry for Listing {
    fn list(&self, job: &str) -> Result<Vec<Registered>, StoreError> {
        *self.seen() = None;
        let mark = self.registry.mark()?;
        let acquaintance = self.known.check(&mark)?;
        if acquaintance != Acquaintance::Known {
            keep_numbers(&self.registry, &self.store.held())?;
        }
        let listed = self.registry.bound_to(&mark).list(job)?;
        *self.seen() = Some((mark, acquaintance));
        Ok(listed)
    }

    fn lock_job(&self, job: &str) -> Result<JobLock, StoreError> {
        self.registry.lock_job(job)
    }

    fn reserve_generation(&self, job: &str) -> Result<u64, StoreError> {
        self.registry.reserve_generation(job)
    }

    fn publish(&self, entry: &Registered, replaces: Option<&str>) -> Result<(), StoreError> {
        self.registry.publish(entry, replaces)
    }

    fn withdraw(&self, checkpoint: &Checkpoint) -> Result<(), StoreError> {
        self.registry.withdraw(checkpoint)
    }

    fn is_withdrawn(&self, checkpoint: &Checkpoint) -> Result<bool, StoreError> {
        self.registry.is_withdrawn(checkpoint)
    }

    fn set_pinned(&self, checkpoint: &Checkpoint, pinned: bool) -> Result<(), StoreError> {
        self.registry.set_pinned(checkpoint, pinned)
    }

    fn find(&self, job: &str, generation: u64) -> Result<Option<Registered>, StoreError> {
        self.registry.find(job, generation)
    }

    fn set_holder(
        &self,
        checkpoint: &Checkpoint,
        node: &str,
        holds: bool,
    ) -> Result<(), StoreError> {
        self.registry.set_holder(checkpoint, node, holds)
    }

    fn set_damaged(
        &self,
        checkpoint: &Checkpoint,
        node: &str,
        damaged: bool,
    ) -> Result<(), StoreError> {
        self.registry.set_damaged(checkpoint, node, damaged)
    }

    fn set_cold(&self, checkpoint: &Checkpoint, node: &str, bytes: u64) -> Result<(), StoreError> {
        self.registry.set_cold(checkpoint, node, bytes)
    }
}

impl Standing for Listing {
    fn may_hold(&self) -> bool {
        let view = self.nodes.live();
        let own = view.nodes.iter().find(|node| node.facts.name == self.node);
        // A drained node's copies are listed, too: only so they are moved away and dropped.
        own.is_some_and(|own| own.state != MemberState::Removed)
    }

    fn knows_registry(&self) -> bool {
        matches!(&*self.seen(), Some((_, Acquaintance::Known)))
    }

    fn all_listed(&self) {
        let Some((mark, acquaintance)) = self.seen().clone() else {
            return;
        };
        if acquaintance == Acquaintance::Known {
            return;
        }
        match self.known.accept(&mark) {
            Ok(()) => tracing::info!(
                event = "registry-data-accepted",
                cluster = mark.id,
                "everything here is listed in the registry's data"
            ),
            Err(error) => {
                tracing::error!(event = "registry-data-not-remembered", %error, "not remembered which data the registry has")
            }
        }
    }
}
