//! The state of a daemon.

use prost::Message;
use serde::Serialize;

use super::{CertificateStatus, QueueStatus, ScrubStatus};
use crate::versions::SpokenVersions;

/// State of the daemon.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct ServerStatus {
    /// Version of `permafrostd`.
    #[prost(string, tag = "1")]
    pub version: String,
    /// Process id of the daemon.
    #[prost(uint32, tag = "2")]
    pub pid: u32,
    /// Seconds since it started.
    #[prost(uint64, tag = "3")]
    pub uptime_s: u64,
    /// Well-known page-server endpoint, `address:port`.
    #[prost(string, tag = "4")]
    pub address: String,
    /// Well-known page-server AF_UNIX endpoint.
    #[prost(string, tag = "5")]
    pub socket: String,
    /// Regions that the daemon has open.
    #[prost(message, repeated, tag = "6")]
    pub regions: Vec<RegionStatus>,
    /// Sessions that are open.
    #[prost(message, repeated, tag = "7")]
    pub sessions: Vec<SessionStatus>,
    /// Number of sealed checkpoints.
    #[prost(uint64, tag = "8")]
    pub checkpoints: u64,
    /// Number of parked sessions.
    #[prost(uint64, tag = "9")]
    pub parked: u64,
    /// Time for which a parked session is kept, seconds.
    #[prost(uint64, tag = "10")]
    pub park_ttl_s: u64,
    /// Source of the catalog: `opened`, `rebuilt` and why.
    #[prost(string, tag = "11")]
    pub catalog: String,
    /// True for an agent, which stores nothing itself.
    #[prost(bool, tag = "12")]
    pub agent: bool,
    /// Address at which nodes and agents are served, `address:port`; empty if they are not.
    #[prost(string, tag = "13")]
    pub peers: String,
    /// Address at which Prometheus is served, `address:port`; empty if it is not.
    #[prost(string, tag = "14")]
    pub metrics: String,
    /// State of the cluster, if the daemon is a node of one.
    #[prost(message, optional, tag = "15")]
    pub cluster: Option<ClusterStatus>,
    /// Release and versions that it speaks.
    #[prost(message, optional, tag = "60")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speaks: Option<SpokenVersions>,
    /// Size from which on dumps come in CRIU's page-server protocol and not through pipes, bytes; absent without a limit.
    #[prost(uint64, optional, tag = "61")]
    pub pipe_bytes: Option<u64>,
    /// State of the scrub.
    #[prost(message, optional, tag = "20")]
    pub scrub: Option<ScrubStatus>,
    /// The queues of dumps and of restores.
    #[prost(message, repeated, tag = "26")]
    pub queues: Vec<QueueStatus>,
    /// The certificate that it shows, if it has one.
    #[prost(message, optional, tag = "40")]
    pub certificate: Option<CertificateStatus>,
    /// Usage of the namespaces, where there are quotas.
    #[prost(message, repeated, tag = "41")]
    pub namespaces: Vec<NamespaceUsage>,
    /// Files and directories that the daemon uses; named to callers of its own machine only.
    #[prost(message, repeated, tag = "50")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<DaemonFile>,
}

/// File or directory that a daemon uses.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct DaemonFile {
    /// Purpose: `data`, `run`, `identity`, `tokens`, `key`, `quotas`, `audit`, `registry-user` or
    /// `registry-key`.
    #[prost(string, tag = "1")]
    pub purpose: String,
    /// Absolute path of the file.
    #[prost(string, tag = "2")]
    pub path: String,
}

/// Usage and limits of a namespace on a node. A missing limit means that there is no limit.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct NamespaceUsage {
    /// Name of the namespace.
    #[prost(string, tag = "1")]
    pub namespace: String,
    /// Bytes that its checkpoints take; shared pages count once.
    #[prost(uint64, tag = "2")]
    pub bytes: u64,
    /// Limit of `bytes`.
    #[prost(uint64, optional, tag = "3")]
    pub bytes_limit: Option<u64>,
    /// Number of checkpoints, parked ones included.
    #[prost(uint64, tag = "4")]
    pub checkpoints: u64,
    /// Limit of `checkpoints`.
    #[prost(uint64, optional, tag = "5")]
    pub checkpoints_limit: Option<u64>,
    /// Dumps that are open.
    #[prost(uint64, tag = "6")]
    pub sessions: u64,
    /// Limit of `sessions`.
    #[prost(uint64, optional, tag = "7")]
    pub sessions_limit: Option<u64>,
    /// Places that are kept in the queues.
    #[prost(uint64, tag = "8")]
    pub reservations: u64,
    /// Limit of `reservations`.
    #[prost(uint64, optional, tag = "9")]
    pub reservations_limit: Option<u64>,
    /// Highest priority that its transfers may have.
    #[prost(uint64, optional, tag = "10")]
    pub priority_limit: Option<u64>,
}

/// A node's place in its cluster.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct ClusterStatus {
    /// Name of the node in the cluster.
    #[prost(string, tag = "1")]
    pub node: String,
    /// Id of the registry's data; empty before the node has registered once.
    #[prost(string, tag = "2")]
    pub id: String,
    /// Reason why the node may do nothing that has to be listed; empty if it may.
    #[prost(string, tag = "3")]
    pub fenced: String,
    /// Name of the leader, which does the cluster's background work; empty while there is none, or it is unknown.
    #[prost(string, tag = "4")]
    pub leader: String,
    /// Number of copies that there should be of dumps on this node.
    #[prost(uint32, tag = "5")]
    pub copies_wanted: u32,
    /// Kind of the registry and of the connection to it, in words.
    #[prost(string, tag = "40")]
    pub registry: String,
    /// True if copies on this node count towards durability.
    #[prost(bool, tag = "41")]
    pub copies_count: bool,
    /// Listed checkpoints with fewer good copies on nodes that live and stay than there should be; none while the
    /// registry does not answer, like the two that follow.
    #[prost(uint64, optional, tag = "31")]
    pub under_replicated: Option<u64>,
    /// Listed checkpoints without a good copy on any live node.
    #[prost(uint64, optional, tag = "32")]
    pub stranded: Option<u64>,
    /// Listed checkpoints with a copy that is known to be damaged.
    #[prost(uint64, optional, tag = "33")]
    pub damaged: Option<u64>,
}

/// State of a region.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct RegionStatus {
    /// Path of the region's file or device.
    #[prost(string, tag = "1")]
    pub path: String,
    /// UUID of the region.
    #[prost(string, tag = "2")]
    pub uuid: String,
    /// Kind of the medium: `dax` or `file`.
    #[prost(string, tag = "3")]
    pub medium: String,
    /// Durability that the medium guarantees, in words, with the errno when DAX was refused.
    #[prost(string, tag = "4")]
    pub guarantee: String,
    /// Bytes in the segment area.
    #[prost(uint64, tag = "5")]
    pub capacity_bytes: u64,
    /// Bytes in segments that are free.
    #[prost(uint64, tag = "6")]
    pub free_bytes: u64,
    /// Times the region was opened after an unclean stop.
    #[prost(uint64, tag = "7")]
    pub unsafe_shutdowns: u64,
    /// Records used in the journal half in use, and its capacity.
    #[prost(uint64, tag = "8")]
    pub journal_records: u64,
    /// Capacity of a journal half, records.
    #[prost(uint64, tag = "9")]
    pub journal_capacity: u64,
    /// Reason for which it takes no writes; empty while it does.
    #[prost(string, tag = "10")]
    pub failure: String,
    /// Pages that the medium could not give or take since the region was opened.
    #[prost(uint64, tag = "11")]
    pub lost_pages: u64,
    /// Checkpoints that are listed and could not be read when it was opened.
    #[prost(uint64, tag = "12")]
    pub unreadable: u64,
    /// True if the medium does not outlast a power failure or a reboot.
    #[prost(bool, tag = "40")]
    pub volatile: bool,
}

/// State of an open session.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct SessionStatus {
    /// Id of the session.
    #[prost(string, tag = "1")]
    pub session: String,
    /// Job; empty for an anonymous one.
    #[prost(string, tag = "2")]
    pub job: String,
    /// `open`, `receiving`, `closed`, `sealing`, `failed`.
    #[prost(string, tag = "3")]
    pub state: String,
    /// Bytes received so far.
    #[prost(uint64, tag = "4")]
    pub received_bytes: u64,
    /// Reason why the session failed.
    #[prost(string, tag = "5")]
    pub error: String,
    /// Seconds since it was opened.
    #[prost(uint64, tag = "6")]
    pub age_s: u64,
}
