//! Messages about a cluster: its nodes, and a rebuild of its registry.

use prost::Message;
use serde::Serialize;

use super::Checkpoint;
use crate::versions::SpokenVersions;

/// Nodes of a cluster, and counts of its checkpoints by their replication.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct NodeList {
    /// Nodes, sorted by name.
    #[prost(message, repeated, tag = "1")]
    pub nodes: Vec<NodeStatus>,
    /// The node that answers.
    #[prost(string, tag = "2")]
    pub answered_by: String,
    /// Name of the leader, which does the cluster's background work; empty while there is none, or it is unknown.
    #[prost(string, tag = "3")]
    pub leader: String,
    /// Random id of the registry, made with its data; empty while it is unknown.
    #[prost(string, tag = "4")]
    pub cluster: String,
    /// Time since the registry last confirmed which nodes there are, milliseconds; none if it never has.
    #[prost(uint64, optional, tag = "5")]
    pub age_ms: Option<u64>,
    /// Checkpoints that are listed. Like all that is counted, none while the registry does not answer.
    #[prost(uint64, optional, tag = "6")]
    pub checkpoints: Option<u64>,
    /// Listed checkpoints among them with fewer good copies on live nodes that stay than there should be.
    #[prost(uint64, optional, tag = "7")]
    pub under_replicated: Option<u64>,
    /// Listed checkpoints among them without a good copy on any live node.
    #[prost(uint64, optional, tag = "8")]
    pub stranded: Option<u64>,
    /// Listed checkpoints with a copy that is known to be damaged.
    #[prost(uint64, optional, tag = "31")]
    pub damaged: Option<u64>,
    /// Members of the registry, if they were asked.
    #[prost(message, repeated, tag = "50")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub registry: Vec<RegistryMember>,
    /// Version of the values in the registry that the cluster uses; none while the registry does not answer.
    #[prost(uint32, optional, tag = "51")]
    pub registry_level: Option<u32>,
    /// Newest version that every node which was not removed speaks: to which the level may be raised.
    #[prost(uint32, optional, tag = "52")]
    pub highest_registry_level: Option<u32>,
}

/// Member of the registry, as the answering node reaches it.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct RegistryMember {
    /// Address of the member, `host:port` or a URL.
    #[prost(string, tag = "1")]
    pub address: String,
    /// Version of its software; empty if it did not answer.
    #[prost(string, tag = "2")]
    pub version: String,
    /// Time from the question to the answer, microseconds. The connection is made before.
    #[prost(uint64, tag = "3")]
    pub round_trip_us: u64,
    /// Reason why it did not answer; empty if it did.
    #[prost(string, tag = "4")]
    pub error: String,
}

/// A node's answer to the node that lists it.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct NodeProbe {
    /// Time by which the node's clock is ahead of the asking node's, milliseconds; negative: it is behind. Exact to half
    /// of the round trip. None if the node did not say.
    #[prost(sint64, optional, tag = "1")]
    pub clock_ahead_ms: Option<i64>,
    /// Time from the question to the answer, microseconds.
    #[prost(uint64, tag = "2")]
    pub round_trip_us: u64,
    /// Reason why it did not answer; empty if it did.
    #[prost(string, tag = "3")]
    pub error: String,
}

/// Node of a cluster.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct NodeStatus {
    /// Name of the node.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Administrative state, set by an operator: `active`, `drained` or `removed`; `failed` if the medium of an active
    /// node has failed.
    #[prost(string, tag = "2")]
    pub state: String,
    /// True if its lease is alive. For a node that is not live the following fields are empty, except for the region
    /// and the counts.
    #[prost(bool, tag = "3")]
    pub live: bool,
    /// True if it is stopping.
    #[prost(bool, tag = "4")]
    pub stopping: bool,
    /// `reserved`, or `transient`: its copies do not count.
    #[prost(string, tag = "5")]
    pub class: String,
    /// `pmem`, `memory` or `file`.
    #[prost(string, tag = "6")]
    pub tier: String,
    /// Zone it fails with.
    #[prost(string, tag = "7")]
    pub zone: String,
    /// Rack it fails with.
    #[prost(string, tag = "8")]
    pub rack: String,
    /// Machine it fails with.
    #[prost(string, tag = "9")]
    pub host: String,
    /// Address at which it accepts QUIC connections, `host:port`.
    #[prost(string, tag = "10")]
    pub address: String,
    /// UUID of its region.
    #[prost(string, tag = "11")]
    pub region: String,
    /// Size of its region, bytes.
    #[prost(uint64, tag = "12")]
    pub capacity_bytes: u64,
    /// Bytes free in its region.
    #[prost(uint64, tag = "13")]
    pub free_bytes: u64,
    /// Version of its software.
    #[prost(string, tag = "14")]
    pub version: String,
    /// Time at which its region was first registered, milliseconds since the Unix epoch, by its own clock.
    #[prost(uint64, tag = "15")]
    pub first_seen_unix_ms: u64,
    /// Listed checkpoints that it holds.
    #[prost(uint64, optional, tag = "16")]
    pub checkpoints: Option<u64>,
    /// Listed checkpoints among them with too few good copies on the other live nodes that stay: the node is needed
    /// until they are copied.
    #[prost(uint64, optional, tag = "17")]
    pub needed: Option<u64>,
    /// Memory of the checkpoints counted in `needed`, bytes.
    #[prost(uint64, optional, tag = "18")]
    pub needed_bytes: Option<u64>,
    /// Listed checkpoints among them without a good copy on any other live node: lost, if this node is.
    #[prost(uint64, optional, tag = "19")]
    pub only_here: Option<u64>,
    /// Names of the checkpoints counted in `only_here`: 20 at most, all of them after `remove`.
    #[prost(string, repeated, tag = "20")]
    pub only_here_names: Vec<String>,
    /// True if its medium does not outlast a power failure or a reboot.
    #[prost(bool, tag = "40")]
    pub volatile: bool,
    /// True if copies on the node count towards durability.
    #[prost(bool, tag = "41")]
    pub copies_count: bool,
    /// Checkpoints on the node whose copy there is known to be damaged.
    #[prost(uint64, optional, tag = "31")]
    pub damaged: Option<u64>,
    /// Checkpoints counted in `needed` for which no other node has room, or which no other node may hold.
    #[prost(uint64, optional, tag = "32")]
    pub stuck: Option<u64>,
    /// Checkpoints on a drained node whose other copies have not been read lately. The nodes are reading them.
    #[prost(uint64, optional, tag = "33")]
    pub unverified: Option<u64>,
    /// Answer of the node, if it was asked.
    #[prost(message, optional, tag = "50")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probe: Option<NodeProbe>,
    /// Release and versions that it speaks, or spoke when it was registered last; none if it did not say: version 1 of
    /// everything.
    #[prost(message, optional, tag = "51")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speaks: Option<SpokenVersions>,
}

/// Result of a rebuild, or of its dry run.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct Rebuilt {
    /// True if nothing was changed.
    #[prost(bool, tag = "1")]
    pub dry_run: bool,
    /// The registry's id.
    #[prost(string, tag = "2")]
    pub cluster: String,
    /// Nodes whose inventories were taken.
    #[prost(string, repeated, tag = "3")]
    pub nodes: Vec<String>,
    /// Nodes that the rebuild does not include, and the reasons: checkpoints that only they hold are not listed
    /// again.
    #[prost(message, repeated, tag = "4")]
    pub missing: Vec<MissingNode>,
    /// Checkpoints that were listed again.
    #[prost(message, repeated, tag = "5")]
    pub listed: Vec<Checkpoint>,
    /// Copies that were added to checkpoints which were listed.
    #[prost(uint64, tag = "6")]
    pub copies_added: u64,
    /// Copies that were left alone.
    #[prost(message, repeated, tag = "7")]
    pub doubts: Vec<Doubt>,
    /// Checkpoints that were to be listed, and could not: their jobs are being dumped now.
    #[prost(string, repeated, tag = "8")]
    pub busy: Vec<String>,
}

/// A node whose inventory a rebuild does not have.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct MissingNode {
    /// Name of the node.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Reason why its inventory is missing.
    #[prost(string, tag = "2")]
    pub why: String,
}

/// A copy that a rebuild leaves alone.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Doubt {
    /// The node that holds it.
    #[prost(string, tag = "1")]
    pub node: String,
    /// Name of the checkpoint, `JOB@GENERATION`.
    #[prost(string, tag = "2")]
    pub checkpoint: String,
    /// Id of the checkpoint.
    #[prost(string, tag = "3")]
    pub id: String,
    /// Reason why the copy was left alone.
    #[prost(string, tag = "4")]
    pub why: String,
}
