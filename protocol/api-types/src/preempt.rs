//! `POST /v1/preempt`: what to do to whom.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::batch::{self, MOST};
use super::cost::{By, Copies, Cost, Detail, Mechanism};
use super::quantity::{Seconds, Weight};
use super::task::{Resources, Swap, Task};
use super::text::Text;

/// Resources that are wanted, and whom they may be taken from. Without `wanted`, how each would be preempted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Preempt<'a> {
    /// What is wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted: Option<Resources>,
    /// Tasks that may be preempted; at most 10,000. Whoever needs the resources on one node names the tasks of that node.
    #[serde(borrow, deserialize_with = "batch::at_most::<MOST, _, _>")]
    #[schema(max_items = 10000)]
    pub candidates: Vec<Task<'a>>,
    /// Where a dump has to be.
    #[serde(default)]
    pub copies: Copies,
    /// Whether medians or bad ends decide.
    #[serde(default)]
    pub by: By,
    /// What a second of delay for the one who preempts counts, in seconds of the victim's. 0, the default: only what the
    /// victim loses is compared.
    #[serde(default)]
    pub delay_weight: Weight,
    /// Longest delay that is allowed at the 95th percentile, seconds: a grace time. Any if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_delay_s: Option<Seconds>,
    /// Whether waiting for the end is an answer. It costs the victim nothing, so it always wins unless a delay counts
    /// or is limited.
    #[serde(default)]
    pub may_wait: bool,
    /// How much is answered.
    #[serde(default)]
    pub detail: Detail,
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

/// What to do to whom.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PreemptAnswer<'a> {
    /// The node that answers.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub answered_by: Text<'a>,
    /// Age of the snapshot that the answer is made from, seconds.
    #[schema(minimum = 0)]
    pub age_s: f64,
    /// In the order of the decisions: dumps of one node are to be queued in this order. Without `wanted`, all that can
    /// be decided on, in the order asked.
    #[serde(borrow)]
    pub victims: Vec<Victim<'a>>,
    /// What they free together.
    pub frees: Total,
    /// What is still wanting when all candidates that can be decided on are taken; nothing without `wanted`.
    pub lacking: Total,
    /// Nothing is lacking.
    pub enough: bool,
    /// Candidates that nothing could be said of, and were not taken.
    #[serde(borrow)]
    pub undecided: Vec<Undecided<'a>>,
    /// Candidates on nodes that nobody knows, or that name none.
    #[serde(borrow)]
    pub unknown_node: Vec<OnUnknownNode<'a>>,
}

/// A sum of resources; stops at the largest numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Total {
    /// Processors, thousandths.
    pub cpu_millis: u64,
    /// Memory, bytes.
    pub memory_bytes: u64,
}

/// A task that is to be preempted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Victim<'a> {
    /// Task.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub task: Text<'a>,
    /// Its node.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub node: Text<'a>,
    /// How.
    pub mechanism: Mechanism,
    /// What becomes free.
    pub frees: Resources,
    /// What it was chosen by, seconds: overhead plus weighted delay.
    #[schema(minimum = 0)]
    pub score_s: f64,
    /// What it costs.
    pub cost: Cost,
    /// The second best way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<Next>,
    /// The decision in words; not with `totals`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The second best way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Next {
    /// How.
    pub mechanism: Mechanism,
    /// Its score, seconds.
    #[schema(minimum = 0)]
    pub score_s: f64,
}

/// A candidate that nothing could be said of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Undecided<'a> {
    /// Task.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub task: Text<'a>,
    /// Why, in words.
    pub reason: String,
}

/// A candidate whose node is not known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OnUnknownNode<'a> {
    /// Task.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub task: Text<'a>,
    /// The node it names; missing if it names none.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub node: Option<Text<'a>>,
}
