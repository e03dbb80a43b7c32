//! Decisions of policies, and the nodes as the caller of a policy knows them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::batch;
use super::cost::{Cost, Mechanism};
use super::figures::StartRate;
use super::preempt::Total;
use super::quantity::{Bytes, BytesPerSecond, Seconds};
use super::task::Resources;
use super::text::Text;

/// Node as the caller knows it: a figure that is given replaces the one that the node has measured. A node that is not
/// in the cluster has these figures only.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeGiven<'a> {
    /// Name of the node, as tasks name it.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub node: Text<'a>,
    /// Resources that no task holds; none if left out.
    #[serde(default)]
    pub free: Resources,
    /// Rack that it is in.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub rack: Option<Text<'a>>,
    /// Bandwidth of dumps, bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_bytes_per_s: Option<BytesPerSecond>,
    /// Bandwidth of restores, bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes_per_s: Option<BytesPerSecond>,
    /// Bandwidth of dumps by their size; before `write_bytes_per_s` for sizes that are alike.
    #[serde(
        default,
        deserialize_with = "batch::at_most::<16, _, _>",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schema(max_items = 16)]
    pub write_by_size: Vec<StartRate>,
    /// Bandwidth of restores by their size; before `read_bytes_per_s` for sizes that are alike.
    #[serde(
        default,
        deserialize_with = "batch::at_most::<16, _, _>",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schema(max_items = 16)]
    pub read_by_size: Vec<StartRate>,
    /// Bandwidth at which it reads a copy that another node has, bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_bytes_per_s: Option<BytesPerSecond>,
    /// Bytes that are written before a dump begins that comes last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_queue_bytes: Option<Bytes>,
    /// Bytes that are read before a restore begins that comes last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_queue_bytes: Option<Bytes>,
    /// Fixed time of a dump, seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dump_start_s: Option<Seconds>,
    /// Fixed time of a restore, seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_start_s: Option<Seconds>,
}

/// Something that a policy does to a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PolicyAction<'a> {
    /// Start it from the beginning on the node.
    Start,
    /// Restore its checkpoint on the node, from this node's copy.
    #[serde(borrow)]
    #[schema(value_type = String)]
    Restore(Text<'a>),
    /// Let it go on that was suspended in the memory of the node.
    Continue,
    /// Take its resources.
    Preempt(Mechanism),
    /// Let it run on with these resources.
    Resize(Total),
}

/// Measure that a decision was made by; the least is best.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PolicyScore {
    /// Time that is lost, seconds.
    LostS(f64),
    /// Time that is left, seconds.
    LeftS(f64),
    /// Order among equals: what was there first, or a number that was drawn.
    Order(u64),
    /// Memory that is moved, bytes.
    MovedBytes(u64),
    /// Tasks that the job of the task has: the most, the least, or drawn in proportion to them.
    Containers(u32),
    /// Time that the deadline or the laxity of the task's job is later than that of the other, seconds.
    LaterS(f64),
}

/// The second best decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SecondChoice<'a> {
    /// Id of the task, as in the request.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub task: Text<'a>,
    /// Action that would be taken.
    #[serde(borrow)]
    pub action: PolicyAction<'a>,
    /// Score that it would be chosen by.
    pub score: PolicyScore,
}

/// A decision of a policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = PolicyDecision)]
pub struct PolicyDecision<'a> {
    /// Id of the task, as in the request.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub task: Text<'a>,
    /// Action to take.
    #[serde(borrow)]
    pub action: PolicyAction<'a>,
    /// Name of the node on which it is done.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub node: Text<'a>,
    /// Score that the task was chosen by.
    pub score: PolicyScore,
    /// The second best; missing if there was no other.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub runner_up: Option<SecondChoice<'a>>,
    /// Reason for the action, in words.
    pub reason: String,
    /// Resources that become free; none unless the task loses some.
    #[serde(default)]
    pub frees: Total,
    /// Cost of the action; missing where it costs nothing that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Cost>,
}
