//! `GET /v1/nodes`: the nodes that keep images, with their figures.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::figure::Figure;

/// Filter and page of the list of nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct NodesQuery {
    /// Lists this node only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Lists nodes after this name, in the order of names: `next` of the previous reply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// Maximum number of entries: 1 to 10,000; 1,000 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(minimum = 1, maximum = 10000)]
    pub limit: Option<u32>,
}

/// Page of the list of nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NodesAnswer {
    /// The node that answers.
    pub answered_by: String,
    /// Age of the snapshot that the answer is made from, seconds.
    #[schema(minimum = 0)]
    pub age_s: f64,
    /// Nodes in the order of their names.
    pub nodes: Vec<ListedNode>,
    /// Name after which the rest follows; missing when there is no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Versions of an interface that a node speaks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InterfaceVersions {
    /// `wire`, `control` or `registry`.
    pub interface: String,
    /// Oldest version of it.
    #[schema(minimum = 1)]
    pub oldest: u32,
    /// Newest version of it.
    #[schema(minimum = 1)]
    pub newest: u32,
}

/// Node of the cluster, with the figures that it reports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Node)]
pub struct ListedNode {
    /// Name of the node.
    pub name: String,
    /// Address at which other nodes reach it, `host:port`; empty while that is not known.
    pub address: String,
    /// Administrative state, set by an operator.
    pub state: NodeState,
    /// True if the node's lease is alive.
    pub live: bool,
    /// True if the node is stopping, and takes nothing new.
    pub stopping: bool,
    /// Class of the node: determines whether its copies count towards durability.
    pub class: NodeClass,
    /// Zone that the node fails with; empty if none was configured.
    pub zone: String,
    /// Rack that the node fails with; empty if none was configured.
    pub rack: String,
    /// Machine that it fails with.
    pub host: String,
    /// Version of its software; empty while that is not known.
    pub version: String,
    /// Versions of what nodes share that it speaks, or spoke when it was registered last; empty while that is not known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub speaks: Vec<InterfaceVersions>,
    /// Time since its last report, seconds; missing if it has never reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    pub age_s: Option<f64>,
    /// Tiers that the node stores checkpoints on, the fastest first. Dumps go to the first one with room, and what is
    /// measured of dumps is of that one. An object store is last: its bandwidth of restores is that at which pages come
    /// back from there.
    pub tiers: Vec<NodeTier>,
    /// Links to other nodes, as the node has measured them.
    pub links: Vec<Link>,
    /// Memory and swap of its machine, which suspension in memory goes by; missing on a machine without swap, and while
    /// the last report is older than those of queues may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<NodeMemory>,
    /// Parts of its report that are not believed, in words.
    pub doubts: Vec<String>,
}

/// Memory and swap of a machine, as its node has measured them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NodeMemory {
    /// Memory that is free without anything being paged out, bytes.
    pub free_bytes: u64,
    /// Swap that is free, bytes.
    pub free_swap_bytes: u64,
    /// Bandwidth of paging out: the fastest that was seen within an hour while the machine paged.
    pub page_out_bytes_per_s: Figure<f64>,
    /// Bandwidth of paging in, seen in the same way.
    pub page_in_bytes_per_s: Figure<f64>,
}

/// Administrative state of a node, set by an operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum NodeState {
    /// Normal operation: the operator has set no other state.
    #[default]
    Active,
    /// Takes no new copies; its own are moved away.
    Drained,
    /// Must not come back.
    Removed,
}

/// Class of a node: determines whether its copies outlast the machine.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum NodeClass {
    /// Copies count towards durability.
    #[default]
    Reserved,
    /// The node may be taken away at any time.
    Transient,
}

impl NodeClass {
    /// Returns the class as people and JSON write it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Reserved => "reserved",
            Self::Transient => "transient",
        }
    }
}

/// A medium of a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Tier)]
pub struct NodeTier {
    /// Kind of the medium: `pmem`, `memory`, `file`, or the operator's name for it.
    pub tier: String,
    /// Name of the medium that it is slowed down to emulate; missing for a medium that is not slowed down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub emulated: Option<String>,
    /// Size of the medium, bytes.
    pub capacity_bytes: u64,
    /// Free space on the medium, bytes.
    pub free_bytes: u64,
    /// Bandwidth of dumps, for a long row of them.
    pub write_bytes_per_s: Figure<f64>,
    /// Bandwidth of restores, for a long row of them.
    pub read_bytes_per_s: Figure<f64>,
    /// Bandwidth of dumps by their size.
    pub write_by_size: Vec<RateOfSize>,
    /// Bandwidth of restores by their size.
    pub read_by_size: Vec<RateOfSize>,
    /// Fixed time of a dump, independent of its size, seconds.
    pub dump_start_s: Figure<f64>,
    /// Fixed time of a restore, independent of its size, seconds.
    pub restore_start_s: Figure<f64>,
    /// Bandwidth at which memory follows to processes that were restored lazily, for a long row of restores.
    pub lazy_bytes_per_s: Figure<f64>,
    /// Time until the processes of a lazy restore run, seconds.
    pub lazy_start_s: Figure<f64>,
    /// Dumps that run, wait or have reserved a place.
    pub write_queue: Queue,
    /// Restores that run, wait or have reserved a place.
    pub read_queue: Queue,
}

/// Bandwidth for transfers of one class of sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RateOfSize {
    /// Transfers below this many bytes, and not of a class before; missing for the largest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below_bytes: Option<u64>,
    /// Bandwidth of the transfers in this class.
    pub bytes_per_s: Figure<f64>,
}

/// A queue of dumps or of restores. Counts are missing while the node does not report them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Queue {
    /// Bytes that are moved before a request that comes last begins: 0 while a slot is free.
    pub bytes: Figure<u64>,
    /// Drain rate of the queue: the sum of the rates of all active transfers, their starts included.
    pub bytes_per_s: Figure<f64>,
    /// Number of transfers that run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<u32>,
    /// Number of transfers that wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<u32>,
    /// Number of reservations that are not yet taken up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved: Option<u32>,
    /// Number of transfers that may run at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<u32>,
    /// Time until a request that comes last begins, seconds: `bytes` over `bytes_per_s`, or over the bandwidth of a
    /// single transfer where the drain rate was never measured.
    pub time_s: Figure<f64>,
}

/// The way from one node to another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Link {
    /// Name of the other node.
    pub to: String,
    /// Bandwidth, for a long row of transfers.
    pub bytes_per_s: Figure<f64>,
}
