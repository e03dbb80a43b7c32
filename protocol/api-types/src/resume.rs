//! `POST /v1/resume`: where checkpoints are best resumed.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::batch::{self, MOST};
use super::cost::{Cost, ReplyDetail};
use super::quantity::{Bytes, BytesPerSecond};
use super::text::Text;

/// Checkpoints that are to be resumed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Resume<'a> {
    /// `JOB@GENERATION`, or `JOB` for its newest; at most 10,000.
    #[serde(borrow, deserialize_with = "batch::at_most::<MOST, _, _>")]
    #[schema(value_type = Vec<String>, max_items = 10000)]
    pub checkpoints: Vec<Text<'a>>,
    /// Nodes to rank. Default: those that hold a copy, and the quickest of the others.
    #[serde(
        default,
        borrow,
        deserialize_with = "batch::if_any::<MOST, _, _>",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<Vec<String>>, max_items = 10000)]
    pub nodes: Option<Vec<Text<'a>>>,
    /// Preference that takes precedence over all costs.
    #[serde(default)]
    pub preference: Preference,
    /// Name of a policy that restores what it has stored: its preference counts, so `preference` is left out. `local`,
    /// `remote` and `cheaper` are the shortest names.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub policy: Option<Text<'a>>,
    /// Restore lazily; left out, at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lazy: Option<Lazy>,
    /// Nodes answered for a checkpoint at most: 1 to 10,000; 8 if left out, or all that are named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 10000)]
    pub limit: Option<u32>,
    /// Amount of detail in the reply.
    #[serde(default)]
    pub detail: ReplyDetail,
}

/// Kind of node on which a task is preferably resumed. The other nodes follow, for when there is no room on these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Preference {
    /// Nodes that hold its checkpoint.
    Local,
    /// Nodes that do not hold its checkpoint.
    Remote,
    /// The cheapest node, wherever the checkpoint is.
    #[default]
    None,
}

/// Options of a lazy restore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Lazy {
    /// Bytes that are there before the task runs.
    pub eager_bytes: Bytes,
    /// Rate at which the other bytes come while the task runs, bytes a second. Default: that of the node's lazy
    /// restores of as many bytes, or if it has measured none, its rate for the smallest transfers; where it lacks pages,
    /// no more than the rate of the link for the smallest transfers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_s: Option<BytesPerSecond>,
}

/// Best nodes for each checkpoint of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ResumeAnswer<'a> {
    /// The node that answers.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub answered_by: Text<'a>,
    /// Age of the snapshot that the answer is made from, seconds.
    #[schema(minimum = 0)]
    pub age_s: f64,
    /// Rankings in the order of the request.
    #[serde(borrow)]
    pub answers: Vec<Resumption<'a>>,
}

/// Best action for a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Resumption<'a> {
    /// Resume the checkpoint on one of these nodes.
    #[serde(borrow)]
    Ranked(Ranked<'a>),
    /// Start the task from the beginning.
    #[serde(borrow)]
    Restart(Restart<'a>),
}

/// Nodes that could resume a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Ranked<'a> {
    /// Name of the checkpoint, as in the request.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub checkpoint: Text<'a>,
    /// Generation of the checkpoint in its job.
    pub generation: u64,
    /// Bytes that a restore reads.
    pub size_bytes: u64,
    /// Nodes, the best first.
    #[serde(borrow)]
    pub nodes: Vec<RankedNode<'a>>,
    /// Nodes with missing figures, and the names of these figures.
    #[serde(borrow)]
    pub unknown: Vec<UnknownNode<'a>>,
}

/// A node that could resume it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RankedNode<'a> {
    /// Name of the node.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub node: Text<'a>,
    /// True if the node holds all of the image.
    pub local: bool,
    /// Cost of resuming on this node.
    pub cost: Cost,
}

/// Node with missing figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UnknownNode<'a> {
    /// Name of the node.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub node: Text<'a>,
    /// Figures that are not known, in words.
    pub why: String,
}

/// Checkpoint that does not exist: there is nothing to resume from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Restart<'a> {
    /// Name of the checkpoint, as in the request.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub checkpoint: Text<'a>,
    /// Always true: the task starts from the beginning.
    pub restart: bool,
    /// Reason why there is nothing to resume from, in words.
    pub why: String,
}
