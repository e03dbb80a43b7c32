//! Configuration of `permafrostd`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use permafrost_audit::AuditFile;
use permafrost_cluster::repair::RepairLimits;
use permafrost_cluster::{ClusterConfig, FailureDomain, NodeClass, Tier};
use permafrost_clustered::Durability;
use permafrost_cooling::CoolingRules;
use permafrost_http_api::serve::Rate;
use permafrost_keys::Wrapper;
use permafrost_metering::queues::QueuesOptions;
use permafrost_pmem::Emulation;
use permafrost_store::Retention;

/// Configuration of a daemon.
#[derive(Clone, Debug)]
pub struct Config {
    /// Directory of the catalog, and of the region unless `region` names another place. Default
    /// `/var/lib/permafrost`.
    pub data_dir: PathBuf,
    /// Path of the region: a file, best on a DAX file system, or on tmpfs where speed matters more than survival.
    /// Default `region` in the data directory.
    pub region: Option<PathBuf>,
    /// Files of the region beside its first that are not where they were when it was last open. Default none.
    pub members: Vec<PathBuf>,
    /// Size of a region that does not exist yet, bytes. Default 4 GiB, or half of the file system's free space where
    /// that is less.
    pub region_size_bytes: Option<u64>,
    /// Refuse to start on anything but a DAX mapping with MAP_SYNC. Default off: a plain file will do, and
    /// `permafrost status` says what it guarantees.
    pub require_dax: bool,
    /// Start although checkpoints that were acknowledged are lost: the region is older than its catalog, or records
    /// of its journal cannot be read. They are forgotten. Default off.
    pub accept_loss: bool,
    /// A slower device to be emulated on the region's medium, for benches: `permafrost status` says so. Default none.
    pub emulate: Option<Emulation>,
    /// Directory of the sockets, mode 0700; the sockets have mode 0600. Default `/run/permafrost`.
    pub run_dir: PathBuf,
    /// Address of the well-known page-server port; port 0 takes any free port. Every client that reaches it can
    /// store pages, so it is on the loopback interface by default: `127.0.0.1:7117`. The ports of sessions are on
    /// the same address. `None`: no ports at all, AF_UNIX sockets only.
    pub listen: Option<SocketAddr>,
    /// Users of this machine, beside root and the daemon's own, who may store pages over the ports. Default none.
    pub listen_uids: Vec<u32>,
    /// Retention times of parked dumps and of sessions.
    pub retention: Retention,
    /// Time after which a silent connection that brings a dump is closed. The task is frozen meanwhile, so the time
    /// must be neither short nor unlimited. Default 10 min.
    pub idle_connection: Duration,
    /// Directory of `ca.pem`, `cert.pem` and `key.pem`. With one, the page-server ports accept `criu --tls`, and
    /// nothing else from other hosts. Default none.
    pub identity: Option<PathBuf>,
    /// UDP address on which other nodes and agents are served, and TCP address of the pages of their dumps; needs an
    /// identity. Port 0 takes any free port. Default: none.
    pub listen_peers: Option<SocketAddr>,
    /// Take and send the pages of dumps over TLS on TCP, where the other end does so too, and not over QUIC. Default true.
    pub pages_over_tcp: bool,
    /// TCP address on which Prometheus and health checks are served. Port 0 takes any free port. Every client that
    /// reaches the port can read how much is stored, but not the contents. Default: none.
    pub listen_metrics: Option<SocketAddr>,
    /// Address of the HTTP API for schedulers, and the callers that it admits.
    pub api: ApiServerOptions,
    /// Key for encryption at rest. Default: nothing is encrypted.
    pub key: Option<Wrapper>,
    /// Key that the stored keys were wrapped with before `key`. Default none.
    pub old_key: Option<Wrapper>,
    /// File of the quotas of namespaces. Default: nothing is limited.
    pub quotas: Option<PathBuf>,
    /// Period within which everything that the region holds is read and verified. Default a week; `None`: never.
    pub scrub_period: Option<Duration>,
    /// Period at which the region is examined for sparse segments, once it is half full and something was removed.
    /// Default a minute; `None`: the region is cleaned on request only.
    pub clean_interval: Option<Duration>,
    /// Rules by which segments move to slower tiers. Applied at each `clean_interval`. Default 7 days, 80 percent.
    pub cooling: CoolingRules,
    /// Period at which the rules of retention are applied to everything; to a job also after each of its dumps.
    /// Default 5 min; `None`: on request only.
    pub retention_interval: Option<Duration>,
    /// Namespaces whose jobs share equal pages; `*` stands for all. Default: none.
    pub share_pages: Vec<String>,
    /// Concurrency limits of dumps and restores, and the rules for those that wait.
    pub queues: QueuesOptions,
    /// Age at which a measured bandwidth is renewed: a node that is idle then makes a small measurement. Default 5
    /// min. `None`: the node never probes, and a bandwidth that nothing renews is forgotten after an hour.
    pub probe_period: Option<Duration>,
    /// Location of the audit log. Default `audit.log` in the data directory.
    pub audit: AuditFile,
    /// Cluster that this node belongs to; needs `listen_peers`. Default: none, a single machine.
    pub cluster: Option<ClusterOptions>,
}

/// Options of the HTTP API. Its AF_UNIX socket in the run directory is always served.
#[derive(Clone, Debug)]
pub struct ApiServerOptions {
    /// TCP address of the API, besides the socket; port 0 takes any free port. It uses TLS if there is an identity,
    /// and must be a loopback address otherwise. Default: none.
    pub listen: Option<SocketAddr>,
    /// File of tokens (`permafrost token new`). Default none: then the TCP address accepts certificates only.
    pub tokens: Option<PathBuf>,
    /// Requests per second of one caller over TCP; bursts may be twice as large. Default 2,000.
    pub rate_per_s: u32,
}

impl Default for ApiServerOptions {
    fn default() -> Self {
        Self {
            listen: None,
            tokens: None,
            rate_per_s: Rate::default().per_s,
        }
    }
}

/// Settings that make a daemon a node of a cluster. The node's name is the name in its certificate.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// Address and credentials of the registry in etcd.
    pub registry: ClusterConfig,
    /// Address at which other nodes and agents reach this node. Default: `listen_peers`, unless that is a wildcard
    /// address.
    pub advertise: Option<SocketAddr>,
    /// Number of copies to keep of a checkpoint, this node's included. Default 2.
    pub copies: u32,
    /// Durability of a dump that requests none. Default quorum.
    pub durability: Durability,
    /// Time that CLOSE, and each step of a seal, may wait for other nodes while the task is frozen. Default 30 s.
    pub deadline: Duration,
    /// Class of this node, which decides whether copies on it count towards durability. Default reserved.
    pub class: NodeClass,
    /// True if copies here count although the region's medium does not outlast a power failure. Default false.
    pub count_volatile_copies: bool,
    /// Failure domain of this node. Default: a domain of its own.
    pub domain: FailureDomain,
    /// Speed class of the medium. Default: that of the region's medium.
    pub tier: Option<Tier>,
    /// Limits of the repair rate.
    pub repair: RepairLimits,
    /// Time that a node may be gone before repair replaces its copies on other nodes. Default 30 s.
    pub repair_grace: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            data_dir: PathBuf::from("/var/lib/permafrost"),
            region: None,
            members: Vec::new(),
            region_size_bytes: None,
            require_dax: false,
            accept_loss: false,
            emulate: None,
            run_dir: PathBuf::from("/run/permafrost"),
            listen: Some(SocketAddr::from(([127, 0, 0, 1], 7117))),
            listen_uids: Vec::new(),
            retention: Retention::default(),
            idle_connection: Duration::from_secs(600),
            identity: None,
            listen_peers: None,
            pages_over_tcp: true,
            listen_metrics: None,
            api: ApiServerOptions::default(),
            key: None,
            old_key: None,
            quotas: None,
            scrub_period: Some(Duration::from_secs(7 * 86400)),
            clean_interval: Some(Duration::from_secs(60)),
            cooling: CoolingRules::default(),
            retention_interval: Some(Duration::from_secs(300)),
            share_pages: Vec::new(),
            queues: QueuesOptions::default(),
            probe_period: Some(Duration::from_secs(300)),
            audit: AuditFile::default(),
            cluster: None,
        }
    }
}

impl Config {
    /// Returns the path of the region.
    #[must_use]
    pub fn region_path(&self) -> PathBuf {
        self.region
            .clone()
            .unwrap_or_else(|| self.data_dir.join("region"))
    }
}
