//! Nodes without regions, on one etcd.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_cluster::{Cluster, ClusterConfig, NodeFacts};
use permafrost_clustered::Registered;
use permafrost_identity::ReloadingIdentity;
use permafrost_protocol::control::Checkpoint;
use permafrost_store::StoreError;
use permafrost_tests::etcd::{self, EtcdCluster};
use tokio::runtime::Runtime;

/// Time limit for actions that take at most a lease's time on an idle machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// An etcd, and a runtime for the nodes on it.
pub(crate) struct Bench {
    pub(crate) runtime: Runtime,
    pub(crate) etcd: EtcdCluster,
}

impl Bench {
    /// Makes a bench, or returns `None` if the test is to be skipped.
    pub(crate) fn new(test: &str, members: usize) -> Option<Self> {
        Self::over(test, |etcd| EtcdCluster::start(etcd, members).unwrap())
    }

    /// Makes a bench over an etcd that `start` starts.
    pub(crate) fn over(test: &str, start: impl FnOnce(&Path) -> EtcdCluster) -> Option<Self> {
        let etcd = etcd::for_test(test)?;
        Some(Self {
            runtime: tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap(),
            etcd: start(&etcd),
        })
    }

    pub(crate) fn config(&self) -> ClusterConfig {
        ClusterConfig {
            lease_ttl: Duration::from_secs(3),
            ..ClusterConfig::parse(&self.etcd.url()).unwrap()
        }
    }

    pub(crate) fn join(&self, name: &str) -> Cluster {
        self.try_join(&self.config(), name, &format!("region-of-{name}"))
            .unwrap()
    }

    pub(crate) fn try_join(
        &self,
        config: &ClusterConfig,
        name: &str,
        region: &str,
    ) -> Result<Cluster, StoreError> {
        self.try_join_with(config, name, region, "")
    }

    /// Joins with the identity in that directory.
    pub(crate) fn join_as(&self, name: &str, directory: &Path) -> Cluster {
        let facts = NodeFacts {
            name: name.to_owned(),
            region: format!("region-of-{name}"),
            address: format!("{name}:7118"),
            ..NodeFacts::default()
        };
        let identity = ReloadingIdentity::load(directory).unwrap();
        let config = self.config();
        let joined = Cluster::join_as(&config, facts, Some(Arc::new(identity)));
        self.runtime.block_on(joined).unwrap()
    }

    /// Tries to join with the region in that file.
    pub(crate) fn try_join_with(
        &self,
        config: &ClusterConfig,
        name: &str,
        region: &str,
        file: &str,
    ) -> Result<Cluster, StoreError> {
        let facts = NodeFacts {
            name: name.to_owned(),
            region: region.to_owned(),
            region_file: file.to_owned(),
            address: format!("{name}:7118"),
            ..NodeFacts::default()
        };
        self.runtime.block_on(Cluster::join(config, facts))
    }
}

pub(crate) fn entry(job: &str, generation: u64, id: &str) -> Registered {
    Registered {
        checkpoint: Checkpoint {
            job: job.to_owned(),
            generation,
            id: id.to_owned(),
            kind: "full".to_owned(),
            ..Checkpoint::default()
        },
        content_digest: [7; 32],
        nodes: vec!["n1".to_owned()],
        wanted_copies: 2,
        damaged: Vec::new(),
        cold: Vec::new(),
    }
}

/// Waits until `holds` returns true. Returns the time that it took.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < LIMIT, "{what} did not happen in time");
        std::thread::sleep(Duration::from_millis(10));
    }
    begun.elapsed()
}
