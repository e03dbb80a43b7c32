//! `POST /v1/preempt`: choice of victims and of the mechanism for each.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::batch::{self, MOST};
use super::cost::{By, Copies, Cost, Mechanism, ReplyDetail};
use super::policy::{NodeGiven, PolicyDecision};
use super::quantity::{Count, Ratio, Seconds};
use super::task::{Resources, Swap, Task};
use super::text::Text;

/// Resources that are wanted, and the tasks that they may be taken from. Without `wanted`, the reply gives the
/// mechanism for each task.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Preempt<'a> {
    /// Resources that are wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted: Option<Resources>,
    /// Tasks that may be preempted; at most 10,000. A caller that needs the resources on one node names the tasks of
    /// that node.
    #[serde(borrow, deserialize_with = "batch::at_most::<MOST, _, _>")]
    #[schema(max_items = 10000)]
    pub candidates: Vec<Task<'a>>,
    /// Sets of candidates that are preempted together, each named by its place among them, from 0: their dumps on a
    /// node wait for each other, the cheapest first. Each other candidate is decided on as if it were the only one. Only
    /// without `wanted`.
    #[serde(
        default,
        deserialize_with = "batch::at_most::<MOST, _, _>",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schema(max_items = 10000)]
    pub together: Vec<Vec<u32>>,
    /// Policy that decides, by its name: docs/api.md lists them. With it the reply has `decisions`. Default: `adaptive`.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub policy: Option<Text<'a>>,
    /// Seed of what the policy draws: the same request with the same seed has the same reply. Default: another one for
    /// each request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<Count>,
    /// Place where a dump has to be stored before the task may be stopped.
    #[serde(default)]
    pub copies: Copies,
    /// Quantile that decides: medians or 95th percentiles.
    #[serde(default)]
    pub by: By,
    /// Weight of a second of delay for the preempting party, in seconds of the victim's. 0, the default: only the
    /// victim's loss is compared.
    #[serde(default)]
    pub delay_weight: Ratio,
    /// Longest delay that is allowed at the 95th percentile, seconds: a grace time. Any if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_delay_s: Option<Seconds>,
    /// True if waiting for the end of a task is an answer. Waiting costs the victim nothing, so it always wins unless
    /// a delay counts or is limited.
    #[serde(default)]
    pub may_wait: bool,
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
    /// Nodes of which the caller knows more than the cluster, and nodes that are not in it.
    #[serde(
        default,
        borrow,
        deserialize_with = "batch::at_most::<MOST, _, _>",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schema(max_items = 10000)]
    pub figures: Vec<NodeGiven<'a>>,
}

/// Tasks to preempt, and the mechanism for each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PreemptAnswer<'a> {
    /// The node that answers.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub answered_by: Text<'a>,
    /// Age of the snapshot that the answer is made from, seconds.
    #[schema(minimum = 0)]
    pub age_s: f64,
    /// Victims in the order of the decisions: dumps of one node are to be queued in this order. Without `wanted`, all
    /// candidates that can be decided on: those of each set, then the others in the order of the request.
    #[serde(borrow)]
    pub victims: Vec<Victim<'a>>,
    /// Decisions of the policy, in the order in which they are to be carried out; missing if the request names none. The
    /// victims are those among them that are preempted at a cost that is known.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub decisions: Option<Vec<PolicyDecision<'a>>>,
    /// Resources that all victims free together, or all decisions.
    pub frees: Total,
    /// Resources still lacking when all candidates that can be decided on are taken; zero without `wanted`.
    pub lacking: Total,
    /// True if nothing is lacking.
    pub enough: bool,
    /// Candidates for which no mechanism could be chosen; they are not taken.
    #[serde(borrow)]
    pub undecided: Vec<Undecided<'a>>,
    /// Candidates on unknown nodes, or without a node.
    #[serde(borrow)]
    pub unknown_node: Vec<OnUnknownNode<'a>>,
}

/// A sum of resources; stops at the largest numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Total {
    /// Processors, in thousandths of one.
    pub cpu_millis: u64,
    /// Memory in bytes.
    pub memory_bytes: u64,
}

/// A task that is to be preempted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Victim<'a> {
    /// Id of the task, as in the request.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub task: Text<'a>,
    /// Name of the task's node.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub node: Text<'a>,
    /// Mechanism by which it is preempted.
    pub mechanism: Mechanism,
    /// Resources that become free: all that it holds, but of a task that is suspended in memory only the memory that is
    /// wanted of it.
    pub frees: Resources,
    /// Score that it was chosen by, seconds: overhead plus weighted delay.
    #[schema(minimum = 0)]
    pub score_s: f64,
    /// Cost of preempting it.
    pub cost: Cost,
    /// The second best way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<Next>,
    /// Explanation of the decision in words; missing with `totals`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The second best way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Next {
    /// Mechanism of the second best way.
    pub mechanism: Mechanism,
    /// Score of the mechanism, seconds.
    #[schema(minimum = 0)]
    pub score_s: f64,
}

/// Candidate for which no mechanism could be chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Undecided<'a> {
    /// Id of the task, as in the request.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub task: Text<'a>,
    /// Reason why nothing could be decided, in words.
    pub reason: String,
}

/// A candidate whose node is not known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OnUnknownNode<'a> {
    /// Id of the task, as in the request.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub task: Text<'a>,
    /// The node it names; missing if it names none.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub node: Option<Text<'a>>,
}
