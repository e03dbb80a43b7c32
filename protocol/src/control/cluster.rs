//! Messages about a cluster: its nodes, and a rebuild of its registry.

use prost::Message;
use serde::Serialize;

use super::Checkpoint;

/// Nodes of a cluster, and how its checkpoints stand.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct NodeList {
    /// Nodes, sorted by name.
    #[prost(message, repeated, tag = "1")]
    pub nodes: Vec<NodeStatus>,
    /// The node that answers.
    #[prost(string, tag = "2")]
    pub answered_by: String,
    /// The node that works in the background for all; empty while there is none, or nobody knows.
    #[prost(string, tag = "3")]
    pub leader: String,
    /// The registry's random id, made with its data; empty while nobody knows.
    #[prost(string, tag = "4")]
    pub cluster: String,
    /// Time since the registry last confirmed which nodes there are, milliseconds; none if it never has.
    #[prost(uint64, optional, tag = "5")]
    pub age_ms: Option<u64>,
    /// Checkpoints that are listed. Like all that is counted, none while the registry does not answer.
    #[prost(uint64, optional, tag = "6")]
    pub checkpoints: Option<u64>,
    /// Of these, with fewer good copies on nodes that live and stay than there should be.
    #[prost(uint64, optional, tag = "7")]
    pub under_replicated: Option<u64>,
    /// Of these, without a good copy on any node that lives.
    #[prost(uint64, optional, tag = "8")]
    pub stranded: Option<u64>,
    /// Listed checkpoints of which some copy is known to be damaged.
    #[prost(uint64, optional, tag = "31")]
    pub damaged: Option<u64>,
}

/// One node of a cluster.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct NodeStatus {
    /// Name of the node.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Administrative state, set by an operator: `active`, `drained` or `removed`.
    #[prost(string, tag = "2")]
    pub state: String,
    /// Its lease lives. What follows is empty of a node that does not, but for the region and what is counted.
    #[prost(bool, tag = "3")]
    pub live: bool,
    /// It is stopping.
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
    /// Its region's uuid.
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
    /// Of these, with too few good copies on the other nodes that live and stay: it is needed until they are copied.
    #[prost(uint64, optional, tag = "17")]
    pub needed: Option<u64>,
    /// Memory of those, bytes.
    #[prost(uint64, optional, tag = "18")]
    pub needed_bytes: Option<u64>,
    /// Of these, without a good copy on any other node that lives: lost, if this one is.
    #[prost(uint64, optional, tag = "19")]
    pub only_here: Option<u64>,
    /// Names of some of those that are only here.
    #[prost(string, repeated, tag = "20")]
    pub only_here_names: Vec<String>,
    /// Its medium does not outlast a power failure or a reboot.
    #[prost(bool, tag = "40")]
    pub volatile: bool,
    /// Copies there count towards durability.
    #[prost(bool, tag = "41")]
    pub copies_count: bool,
    /// Of those that it holds, its copy is known to be damaged.
    #[prost(uint64, optional, tag = "31")]
    pub damaged: Option<u64>,
    /// Of those for which it is needed: no other node has room for them, or may hold them.
    #[prost(uint64, optional, tag = "32")]
    pub stuck: Option<u64>,
    /// Of a drained node: those that it holds whose other copies have not been read lately. They are being read.
    #[prost(uint64, optional, tag = "33")]
    pub unverified: Option<u64>,
}

/// Result of a rebuild, or of its dry run.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct Rebuilt {
    /// Nothing was changed.
    #[prost(bool, tag = "1")]
    pub dry_run: bool,
    /// The registry's id.
    #[prost(string, tag = "2")]
    pub cluster: String,
    /// Nodes whose inventories were taken.
    #[prost(string, repeated, tag = "3")]
    pub nodes: Vec<String>,
    /// Nodes that are not part of it, and why: what only they hold is not listed again.
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
    /// Its name, `JOB@GENERATION`.
    #[prost(string, tag = "2")]
    pub checkpoint: String,
    /// Id of the checkpoint.
    #[prost(string, tag = "3")]
    pub id: String,
    /// Reason why the copy was left alone.
    #[prost(string, tag = "4")]
    pub why: String,
}
