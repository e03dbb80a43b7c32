//! The cluster: which nodes there are, and which checkpoint is where.
//!
//! On one machine there is none. With `--catalog etcd://…` the *registry* in etcd says what exists and who holds it;
//! each node's own catalog (sled) stays the index over its own region.
//!
//! [`Cluster::join`] registers this node and gives the parts: the registry, the view of the nodes, the fence and the
//! leader. docs/cluster.md has the keys and why each step is safe.

mod config;
mod data;
mod etcd;
mod fence;
mod inventory;
mod keys;
mod membership;
mod nodes;
mod operate;
pub mod placement;
pub mod rebuild;
mod registry;
mod standing;
mod values;

use std::any::Any;
use std::sync::Arc;

use permafrost_client::identity::ReloadingIdentity;
use permafrost_protocol::control::Checkpoint;

use crate::replication::ContentDigest;
use crate::store::StoreError;

pub use config::{ClusterConfig, DEFAULT_PREFIX, TlsFiles};
pub use data::{Acquaintance, KnownData, Mark};
pub use fence::Fence;
pub use inventory::{Inventories, PeerInventories, held};
pub use membership::{HeardDenials, Leader};
pub use nodes::{LiveNode, Nodes, NodesView};
pub(crate) use operate::no_cluster;
pub use operate::{Operate, Operator};
pub use registry::EtcdRegistry;
pub use values::{FailureDomain, Member, MemberState, NodeClass, NodeFacts, Tier};

/// This node's place in the cluster. Dropped, it falls silent, and counts as dead when its lease ends;
/// [`Cluster::leave`] says so at once.
pub struct Cluster {
    membership: membership::Membership,
    registry: EtcdRegistry,
    nodes: Nodes,
    follower: tokio::task::JoinHandle<()>,
}

impl Cluster {
    /// Registers this node. Without etcd it comes back all the same, fenced, and registers when etcd is there.
    /// Must be called on a tokio runtime, whose time and I/O are enabled; that is also where all calls run.
    ///
    /// # Errors
    /// Files that cannot be read; [`StoreError::Conflict`] when another node of this name is there, or this one was
    /// removed.
    pub async fn join(config: &ClusterConfig, facts: NodeFacts) -> Result<Self, StoreError> {
        Self::join_as(config, facts, None).await
    }

    /// As [`Self::join`], with the node's certificate, which signs what others must not be able to forge in etcd.
    ///
    /// # Errors
    /// As there.
    pub async fn join_as(
        config: &ClusterConfig,
        facts: NodeFacts,
        identity: Option<Arc<ReloadingIdentity>>,
    ) -> Result<Self, StoreError> {
        if let Some(warning) = config.warning() {
            tracing::warn!("{warning}");
        }
        let etcd = Arc::new(etcd::Etcd::new(config)?);
        let name = facts.name.clone();
        let membership = membership::Membership::begin(etcd.clone(), config, facts).await?;
        let nodes = Nodes::default();
        let follower = tokio::spawn(
            nodes
                .clone()
                .follow(etcd.clone(), keys::Keys::new(&config.prefix)),
        );
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
            nodes,
            follower,
        })
    }

    /// What exists. A clone, with the same locks.
    #[must_use]
    pub fn registry(&self) -> EtcdRegistry {
        self.registry.clone()
    }

    /// Who is there.
    #[must_use]
    pub fn nodes(&self) -> Nodes {
        self.nodes.clone()
    }

    /// Whether this node may act.
    #[must_use]
    pub fn fence(&self) -> Arc<Fence> {
        self.membership.fence()
    }

    /// The id of etcd's data, as of this node's last registration; `None` before the first. What a sweep goes by is
    /// [`EtcdRegistry::mark`] and [`KnownData`].
    #[must_use]
    pub fn id(&self) -> Option<String> {
        self.membership.data_id()
    }

    /// Answers `permafrost node …` on this node. `inventories` asks nodes what they hold; `wanted_copies` is for
    /// checkpoints that a rebuild lists again.
    #[must_use]
    pub fn operator(&self, inventories: Arc<dyn Inventories>, wanted_copies: u32) -> Operator {
        Operator::new(self.registry(), self.nodes(), inventories, wanted_copies)
    }

    /// Whether this node does the work in the background.
    #[must_use]
    pub fn leader(&self) -> Leader {
        self.membership.leader()
    }

    /// Waits until this node must not go on, and says why: another daemon has its name, and a copy of its region.
    pub async fn failed(&self) -> StoreError {
        let mut ended = self.membership.ended();
        let reason = match ended.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or_default(),
            // It has left the cluster.
            Err(_) => return std::future::pending().await,
        };
        StoreError::Conflict {
            message: reason,
            hint: "a region was copied: stop the daemon whose copy is not wanted; to have two nodes, give one another certificate and an empty region",
        }
    }

    /// Follows the cluster's list of denied certificates; `None` before this node has heard it.
    #[must_use]
    pub fn denials(&self) -> tokio::sync::watch::Receiver<Option<HeardDenials>> {
        self.membership.denials()
    }

    /// Changes what this node says of itself; told to the others within a third of a lease. Name and region stay.
    pub fn update_facts(&self, change: impl FnOnce(&mut NodeFacts)) {
        self.membership.update(change);
    }

    /// Ends the registration: the others know at once, and its locks are free. Takes 2 s at most.
    pub async fn leave(&self) {
        self.membership.leave().await;
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.follower.abort();
    }
}

/// A checkpoint that the cluster lists.
#[derive(Clone, Debug, PartialEq)]
pub struct Registered {
    /// Its line of the listing.
    pub checkpoint: Checkpoint,
    /// What it holds, wherever it is stored.
    pub content_digest: ContentDigest,
    /// Nodes that hold a copy, by name.
    pub nodes: Vec<String>,
    /// How many copies there should be.
    pub wanted_copies: u32,
    /// Those of the holders whose copy is known to be damaged. It counts for nothing until it is healed.
    pub damaged: Vec<String>,
}

impl Registered {
    /// Whether the copy of a node is known to be damaged.
    #[must_use]
    pub fn is_damaged_on(&self, node: &str) -> bool {
        self.damaged.iter().any(|damaged| damaged == node)
    }

    /// Holders whose copy is not known to be damaged.
    pub fn good(&self) -> impl Iterator<Item = &String> {
        self.nodes.iter().filter(|node| !self.is_damaged_on(node))
    }

    /// Adds or removes a holder; whether that changes anything.
    pub fn set_holder(&mut self, node: &str, holds: bool) -> bool {
        if self.nodes.iter().any(|holder| holder == node) == holds {
            return false;
        }
        if holds {
            self.nodes.push(node.to_owned());
        } else {
            self.nodes.retain(|holder| holder != node);
            self.damaged.retain(|holder| holder != node);
        }
        true
    }

    /// Marks the copy of a holder as damaged, or as whole; whether that changes anything. Of a node that holds none
    /// nothing is remembered.
    pub fn set_damaged(&mut self, node: &str, damaged: bool) -> bool {
        let holds = self.nodes.iter().any(|holder| holder == node);
        if self.is_damaged_on(node) == damaged || (damaged && !holds) {
            return false;
        }
        if damaged {
            self.damaged.push(node.to_owned());
        } else {
            self.damaged.retain(|holder| holder != node);
        }
        true
    }
}

/// Released when dropped.
pub type JobLock = Box<dyn Any + Send + Sync>;

/// What exists in the cluster. All methods block, each for a bounded time; without the registry they fail with
/// [`StoreError::Unavailable`], and nothing is half done.
pub trait Registry: Send + Sync {
    /// Keeps other dumps of a job away, on every node, while the lock is held and this node's lease lives.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] names who has it.
    fn lock_job(&self, job: &str) -> Result<JobLock, StoreError>;

    /// A generation number of the job that was never used, and never will be by anybody else.
    ///
    /// # Errors
    /// Unavailable.
    fn reserve_generation(&self, job: &str) -> Result<u64, StoreError>;

    /// Lists a checkpoint, and moves its job's head, in one transaction; fails if this node's lease was lost or the
    /// number is taken. `replaces` is a parked checkpoint's id that goes in the same step.
    ///
    /// # Errors
    /// Unavailable; then whether it was listed is unknown, and [`Registry::find`] tells once it is back.
    fn publish(&self, entry: &Registered, replaces: Option<&str>) -> Result<(), StoreError>;

    /// Removes a checkpoint from the list, and says so for a month ([`Registry::is_withdrawn`]).
    ///
    /// # Errors
    /// Unavailable.
    fn withdraw(&self, checkpoint: &Checkpoint) -> Result<(), StoreError>;

    /// Returns true if a node of the cluster has taken a checkpoint off the list: it was not merely lost with the
    /// registry's data, nor deleted by somebody who can write there. Only so may a copy go that was published. Of a checkpoint whose manifest
    /// cannot be read no more than the id is given.
    ///
    /// # Errors
    /// Unavailable.
    fn is_withdrawn(&self, checkpoint: &Checkpoint) -> Result<bool, StoreError>;

    /// One checkpoint; a job's newest when `generation` is 0.
    ///
    /// # Errors
    /// Unavailable.
    fn find(&self, job: &str, generation: u64) -> Result<Option<Registered>, StoreError>;

    /// All of a job's checkpoints, or all with an empty name.
    ///
    /// # Errors
    /// Unavailable.
    fn list(&self, job: &str) -> Result<Vec<Registered>, StoreError>;

    /// Pins a checkpoint, or unpins it, for all nodes.
    ///
    /// # Errors
    /// Unavailable, or it is not listed.
    fn set_pinned(&self, checkpoint: &Checkpoint, pinned: bool) -> Result<(), StoreError>;

    /// Adds or removes a node as a holder of a checkpoint.
    ///
    /// # Errors
    /// Unavailable, or it is not listed.
    fn set_holder(
        &self,
        checkpoint: &Checkpoint,
        node: &str,
        holds: bool,
    ) -> Result<(), StoreError>;

    /// Marks the copy of a holder as damaged, or as whole again.
    ///
    /// # Errors
    /// Unavailable, or it is not listed.
    fn set_damaged(
        &self,
        checkpoint: &Checkpoint,
        node: &str,
        damaged: bool,
    ) -> Result<(), StoreError>;
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// A clock that is hours off must change nothing, so nothing here may look at it but what tells people when a
    /// region was first seen. Time that decides is [`super::fence::Tick`], or tokio's, both of which nobody sets.
    #[test]
    fn the_wall_clock_is_read_only_to_be_shown() {
        let mut readers = Vec::new();
        let mut uses = Vec::new();
        let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cluster")];
        while let Some(folder) = folders.pop() {
            for file in std::fs::read_dir(folder).unwrap() {
                let path = file.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
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
