//! Metrics for Prometheus: counters of the store, the scrub and the cluster, served over HTTP.
//!
//! The daemon makes one [`Metrics`], adds its sources, and serves it with [`serve`]:
//!
//! ```text
//! let metrics = Metrics::new(&store)
//!     .scrub(&scrubber)
//!     // In a cluster:
//!     .repair(Arc::clone(&progress))
//!     .replication(move || ReplicationNumbers { copies_failed: …, copies_replaced: … })
//!     .cluster(move || ClusterNumbers { leader: leader.is_mine(), fenced: fence.check().is_err(), nodes_live: … });
//! let server = permafrost_metrics::serve(listen_metrics, metrics, move || fence.check().map_err(|e| e.to_string())).await?;
//! ```
//!
//! Names, units and meanings are in docs/metrics.md. This crate counts nothing: each scrape reads the counters of
//! the sources.

#![forbid(unsafe_code)]

mod figures;
mod http;
mod namespaces;
mod process;
mod retention;
mod tell;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use permafrost_audit::Audit;
use permafrost_cluster::RegistryCounters;
use permafrost_cluster::repair;
use permafrost_cluster::scrub::Scrubber;
use permafrost_clustered::ClusteredStore;
use permafrost_metering::costs::Costs;
use permafrost_metering::queues::Queues;
use permafrost_store::Store;

pub use http::{MetricsListenError, MetricsServer, Ready, serve};

/// Copies of this node's own dumps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicationNumbers {
    /// Number of copies that failed while they streamed.
    pub copies_failed: u64,
    /// Number of failed copies that a node, the same or another one, pulled before the commit.
    pub copies_replaced: u64,
}

/// The cluster, as this node sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClusterNumbers {
    /// True if this node leads the cluster's work in the background.
    pub leader: bool,
    /// True if this node has no lease, and refuses dumps that must be listed.
    pub fenced: bool,
    /// Number of nodes with a live lease, this one included.
    pub nodes_live: u64,
    /// Number of nodes that are registered, neither alive nor removed.
    pub nodes_down: u64,
}

/// The certificate that this node shows, and those that it refuses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CertificateNumbers {
    /// Seconds until the certificate expires; 0 from then on.
    pub expires_s: u64,
    /// Number of entries in the list of denied certificates.
    pub denied: u64,
}

type Ask<T> = Box<dyn Fn() -> T + Send + Sync>;

/// Sources of the metrics.
pub struct Metrics {
    started: Instant,
    store: Arc<Store>,
    scrub: Option<Arc<Scrubber>>,
    repair: Option<Arc<repair::RepairProgress>>,
    replication: Option<Ask<ReplicationNumbers>>,
    cluster: Option<Ask<ClusterNumbers>>,
    registry: Option<Arc<RegistryCounters>>,
    queues: Option<Arc<Queues>>,
    costs: Option<Arc<Costs>>,
    certificate: Option<Ask<CertificateNumbers>>,
    audit: Option<Arc<Audit>>,
    page: Option<Arc<AtomicU64>>,
    retention: Option<Arc<ClusteredStore>>,
}

impl Metrics {
    /// Makes the metrics of a store.
    #[must_use]
    pub fn new(store: &Arc<Store>) -> Self {
        Self {
            started: Instant::now(),
            store: Arc::clone(store),
            scrub: None,
            repair: None,
            replication: None,
            cluster: None,
            registry: None,
            queues: None,
            costs: None,
            certificate: None,
            audit: None,
            page: None,
            retention: None,
        }
    }

    /// Adds the metrics of the scrub.
    #[must_use]
    pub fn scrub(mut self, scrubber: &Arc<Scrubber>) -> Self {
        self.scrub = Some(Arc::clone(scrubber));
        self
    }

    /// Adds the metrics of repair.
    #[must_use]
    pub fn repair(mut self, progress: Arc<repair::RepairProgress>) -> Self {
        self.repair = Some(progress);
        self
    }

    /// Adds the metrics of replication. The function is called at each scrape and must not block.
    #[must_use]
    pub fn replication(
        mut self,
        ask: impl Fn() -> ReplicationNumbers + Send + Sync + 'static,
    ) -> Self {
        self.replication = Some(Box::new(ask));
        self
    }

    /// Adds the node's measurements and predictions.
    #[must_use]
    pub fn costs(mut self, costs: &Arc<Costs>) -> Self {
        self.costs = Some(Arc::clone(costs));
        self
    }

    /// Adds the metrics of the queues.
    #[must_use]
    pub fn queues(mut self, queues: &Arc<Queues>) -> Self {
        self.queues = Some(Arc::clone(queues));
        self
    }

    /// Adds the metrics of the certificate. The function is called at each scrape and must not block.
    #[must_use]
    pub fn certificate(
        mut self,
        ask: impl Fn() -> CertificateNumbers + Send + Sync + 'static,
    ) -> Self {
        self.certificate = Some(Box::new(ask));
        self
    }

    /// Adds the counter of requests for files of the page.
    #[must_use]
    pub fn page(mut self, requests: Arc<AtomicU64>) -> Self {
        self.page = Some(requests);
        self
    }

    /// Adds the metrics of this node's calls to etcd.
    #[must_use]
    pub fn registry(mut self, counters: Arc<RegistryCounters>) -> Self {
        self.registry = Some(counters);
        self
    }

    /// Adds the metrics of the audit log.
    #[must_use]
    pub fn audit(mut self, audit: &Arc<Audit>) -> Self {
        self.audit = Some(Arc::clone(audit));
        self
    }

    /// Adds the metrics of retention.
    #[must_use]
    pub fn retention(mut self, store: &Arc<ClusteredStore>) -> Self {
        self.retention = Some(Arc::clone(store));
        self
    }

    /// Adds the metrics of the cluster. The function is called at each scrape and must not block.
    #[must_use]
    pub fn cluster(mut self, ask: impl Fn() -> ClusterNumbers + Send + Sync + 'static) -> Self {
        self.cluster = Some(Box::new(ask));
        self
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}
