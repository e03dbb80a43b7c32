//! The cluster: its nodes, and the holders of each checkpoint.
//!
//! A single machine has no cluster. With `--catalog etcd://…` the *registry* in etcd lists the checkpoints and
//! their holders; each node's own catalog (sled) stays the index over its own region.
//!
//! [`Cluster::join`] registers this node and returns the parts: the registry, the view of the nodes, the fence
//! and the leader. docs/cluster.md has the keys and why each step is safe.

#![forbid(unsafe_code)]

mod config;
mod error;
mod etcd;
mod fence;
mod inventory;
mod keys;
mod membership;
mod nodes;
mod operate;
pub mod placement;
mod probe;
pub mod rebuild;
mod registry;
pub mod repair;
pub mod replication;
pub mod scrub;
mod standing;
mod values;

use std::sync::Arc;

use permafrost_identity::ReloadingIdentity;
use permafrost_store::StoreError;

pub use config::{ClusterConfig, DEFAULT_PREFIX, TlsFiles};
pub use etcd::RegistryCounters;
pub use fence::Fence;
pub use inventory::{Inventories, PeerInventories, held};
pub use membership::{HeardDenials, Leader};
pub use nodes::{ClusterNodes, LiveNode, NodesView};
pub use operate::no_cluster;
pub use operate::{Operate, Operator};
pub use registry::EtcdRegistry;
pub use values::{FailureDomain, Member, MemberState, NodeClass, NodeFacts, Tier};

/// Membership of this node in the cluster. If it is dropped, the node sends no more signs of life, and counts
/// as dead when its lease ends; [`Cluster::leave`] ends the membership at once.
pub struct Cluster {
    membership: membership::Membership,
    registry: EtcdRegistry,
    registry_counters: Arc<RegistryCounters>,
    nodes: ClusterNodes,
    follower: tokio::task::JoinHandle<()>,
}

impl Cluster {
    /// Registers this node. If etcd does not answer, it returns all the same, fenced, and registers later. Must be
    /// called on a tokio runtime with time and I/O enabled, on which all calls run.
    ///
    /// # Errors
    /// A file cannot be read; a conflict when there is another node of this name, or this one was
    /// removed.
    pub async fn join(config: &ClusterConfig, facts: NodeFacts) -> Result<Self, StoreError> {
        Self::join_as(config, facts, None).await
    }

    /// Registers this node as [`Self::join`] does, with the node's certificate, which signs the values that others
    /// must not be able to forge in etcd.
    ///
    /// # Errors
    /// Those of [`Self::join`].
    pub async fn join_as(
        config: &ClusterConfig,
        facts: NodeFacts,
        identity: Option<Arc<ReloadingIdentity>>,
    ) -> Result<Self, StoreError> {
        if let Some(warning) = config.warning() {
            tracing::warn!(event = "registry-insecure", "{warning}");
        }
        let etcd = Arc::new(etcd::Etcd::new(config)?);
        let name = facts.name.clone();
        let membership = membership::Membership::begin(etcd.clone(), config, facts).await?;
        let nodes = ClusterNodes::default();
        let follower = tokio::spawn(
            nodes
                .clone()
                .follow(etcd.clone(), keys::Keys::new(&config.prefix)),
        );
        let registry_counters = etcd.counters();
        let registry = EtcdRegistry::new(
            etcd,
            config,
            membership.fence(),
            &name,
            identity,
            tokio::runtime::Handle::current(),
        );
        Ok(Self {
            membership,
            registry,
            registry_counters,
            nodes,
            follower,
        })
    }

    /// Returns the registry; a clone that shares its locks.
    #[must_use]
    pub fn registry(&self) -> EtcdRegistry {
        self.registry.clone()
    }

    /// Returns the counters of this node's calls to etcd.
    #[must_use]
    pub fn registry_counters(&self) -> Arc<RegistryCounters> {
        Arc::clone(&self.registry_counters)
    }

    /// Returns the view of the nodes.
    #[must_use]
    pub fn nodes(&self) -> ClusterNodes {
        self.nodes.clone()
    }

    /// Returns the fence, which decides if this node may act.
    #[must_use]
    pub fn fence(&self) -> Arc<Fence> {
        self.membership.fence()
    }

    /// Returns the id of etcd's data, as of this node's last registration; `None` before the first. A sweep uses
    /// [`EtcdRegistry::mark`] and [`KnownData`](permafrost_clustered::KnownData) instead.
    #[must_use]
    pub fn id(&self) -> Option<String> {
        self.membership.data_id()
    }

    /// Returns the handler of `permafrost node …` on this node. `inventories` requests the inventories of nodes;
    /// `wanted_copies` is the number of copies of checkpoints that a rebuild lists again.
    #[must_use]
    pub fn operator(&self, inventories: Arc<dyn Inventories>, wanted_copies: u32) -> Operator {
        Operator::new(self.registry(), self.nodes(), inventories, wanted_copies)
    }

    /// Returns the leadership, which decides if this node does the background work.
    #[must_use]
    pub fn leader(&self) -> Leader {
        self.membership.leader()
    }

    /// Waits until this node must stop, and returns the reason: another daemon has its name, and a copy of its
    /// region.
    pub async fn failed(&self) -> StoreError {
        let mut ended = self.membership.ended();
        let reason = match ended.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or_default(),
            // The node has left the cluster.
            Err(_) => return std::future::pending().await,
        };
        error::NodesError::RegionCopied { reason }.into()
    }

    /// Returns a channel with the cluster's list of denied certificates; `None` before this node has received it.
    #[must_use]
    pub fn denials(&self) -> tokio::sync::watch::Receiver<Option<HeardDenials>> {
        self.membership.denials()
    }

    /// Changes this node's facts; other nodes see that within a third of a lease. Name and region stay.
    pub fn update_facts(&self, change: impl FnOnce(&mut NodeFacts)) {
        self.membership.update(change);
    }

    /// Ends the registration: other nodes see that at once, and its locks are free. Takes 2 s at most.
    pub async fn leave(&self) {
        self.membership.leave().await;
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.follower.abort();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// Checks that only code which shows the time at which a region was first seen reads the wall clock: a clock
    /// that is hours off must change nothing. Decisions use [`super::fence::Tick`], or tokio's clock, which cannot
    /// be set.
    #[test]
    fn the_wall_clock_is_read_only_to_be_shown() {
        let mut readers = Vec::new();
        let mut uses = Vec::new();
        let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
        while let Some(folder) = folders.pop() {
            for file in std::fs::read_dir(folder).unwrap() {
                let path = file.unwrap().path();
                if path.is_dir() {
                    // Repair, scrub and the rest read the clock for reports; nothing there decides who is alive.
                    if ["registry", "membership"]
                        .iter()
                        .any(|name| path.ends_with(name))
                    {
                        folders.push(path);
                    }
                    continue;
                }
                let text = std::fs::read_to_string(&path).unwrap();
                let code = text.split("#[cfg(test)]").next().unwrap_or_default();
                for line in code.lines() {
                    let place = format!("{}: {}", path.display(), line.trim());
                    if ["SystemTime::", "UtcDateTime", "ClockId::Realtime", "chrono"]
                        .iter()
                        .any(|clock| line.contains(clock))
                    {
                        readers.push(place);
                    } else if line.contains("unix_ms()") {
                        uses.push(place);
                    }
                }
            }
        }
        assert!(readers.is_empty(), "{readers:#?}");
        assert!(!uses.is_empty(), "the search finds nothing any more");
        for place in uses {
            let is_shown = place.contains("first_seen_unix_ms: unix_ms(),");
            assert!(is_shown, "{place}");
        }
    }
}
