//! `POST /v1/estimate`: costs of each mechanism of preempting each task on each node.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::batch::{self, MOST};
use super::cost::{Copies, Cost, Mechanism, ReplyDetail};
use super::task::{Swap, Task};
use super::text::Text;

/// Tasks × nodes × mechanisms: at most 10,000 tasks and 200,000 answers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Estimate)]
pub struct EstimateRequest<'a> {
    /// Tasks that may be preempted; at most 10,000.
    #[serde(borrow, deserialize_with = "batch::at_most::<MOST, _, _>")]
    #[schema(max_items = 10000)]
    pub tasks: Vec<Task<'a>>,
    /// Mechanisms; all if left out.
    #[serde(
        default,
        deserialize_with = "batch::if_any::<7, _, _>",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(max_items = 7)]
    pub mechanisms: Option<Vec<Mechanism>>,
    /// Nodes that would take the dumps; if left out, each task's own.
    #[serde(
        default,
        borrow,
        deserialize_with = "batch::if_any::<MOST, _, _>",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<Vec<String>>, max_items = 10000)]
    pub nodes: Option<Vec<Text<'a>>>,
    /// Place where a dump has to be stored before the task may be stopped.
    #[serde(default)]
    pub copies: Copies,
    /// Amount of detail in the reply.
    #[serde(default)]
    pub detail: ReplyDetail,
    /// Machines on which tasks could be suspended in memory.
    #[serde(
        default,
        borrow,
        deserialize_with = "batch::at_most::<MOST, _, _>",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schema(max_items = 10000)]
    pub swaps: Vec<Swap<'a>>,
}

/// Estimated costs of the tasks of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EstimateAnswer<'a> {
    /// The node that answers.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub answered_by: Text<'a>,
    /// Age of the snapshot that the answer is made from, seconds.
    #[schema(minimum = 0)]
    pub age_s: f64,
    /// Estimates by task, then node, then mechanism, each in the order of the request.
    #[serde(borrow)]
    pub answers: Vec<Estimated<'a>>,
}

/// Estimated cost of one mechanism for one task on one node: either `cost` or `unknown` is present.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Estimated<'a> {
    /// Id of the task, as in the request.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub task: Text<'a>,
    /// Node; missing if the task names none.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub node: Option<Text<'a>>,
    /// Mechanism that the estimate is for.
    pub mechanism: Mechanism,
    /// Estimated cost; missing if it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Cost>,
    /// Reason why there is no cost, in words.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub unknown: Option<Text<'a>>,
}
