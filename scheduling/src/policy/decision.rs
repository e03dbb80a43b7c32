//! Decisions, and why they were made.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::cost::{PreemptionMechanism, TaskResources};
use crate::quantity::{Bytes, Seconds};
use crate::{NodeId, TaskId};

/// Something to do to a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskAction {
    /// Start it from the beginning on the node.
    Start,
    /// Restore its checkpoint on the node; `from` is the node whose copy is read, the same one if it is local.
    Restore {
        /// Node whose copy is read.
        from: NodeId,
    },
    /// Let it go on that was suspended in the memory of the node.
    Continue,
    /// Take its resources by the mechanism. [`Wait`](PreemptionMechanism::Wait): leave it until it ends. A kill or a
    /// rollback may follow another mechanism that takes too long, and ends it; a kill makes a task that is suspended in
    /// memory leave that.
    Preempt(PreemptionMechanism),
    /// Take or give resources, so that it holds these, and runs on.
    Resize(TaskResources),
}

impl fmt::Display for TaskAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start => f.write_str("start"),
            Self::Restore { from } => write!(f, "restore from node {}", from.0),
            Self::Continue => f.write_str("continue"),
            Self::Preempt(mechanism) => mechanism.fmt(f),
            Self::Resize(to) => write!(
                f,
                "resize to {} thousandths of a processor and {}",
                to.cpu_millis, to.memory
            ),
        }
    }
}

/// Measure that a decision was made by; the least is best.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Score {
    /// Time that is lost.
    Lost(Seconds),
    /// Time that is left.
    Left(Seconds),
    /// Order among equals: what was there first, or a number that was drawn.
    Order(u64),
    /// Memory that is moved.
    Moved(Bytes),
    /// Containers that the task's job has: the most, the least, or drawn in proportion to them.
    Containers(u32),
    /// Time that the deadline of the task's job is later than that of the job that it makes room for, or that its
    /// laxity is greater.
    Later(Seconds),
}

/// The second best decision.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunnerUp {
    /// Task of the second best decision.
    pub task: TaskId,
    /// Action of the second best decision.
    pub action: TaskAction,
    /// Score of the second best decision.
    pub score: Score,
}

/// Rule by which a decision was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecisionReason {
    /// There is room for the task.
    Room,
    /// The task makes room for another.
    MakesRoomFor(TaskId),
    /// The task makes room for resources that are wanted.
    Wanted,
    /// The task has not left its node in time.
    Unanswered,
    /// The task has waited too long for the node in whose memory it is.
    WaitedLong,
    /// The task has begun so recently that a kill loses little.
    Fresh,
    /// The task swaps, and is not to dirty more memory.
    Swaps,
    /// The task gets back what was taken of it.
    GivenBack,
}

impl fmt::Display for DecisionReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Room => f.write_str("there is room"),
            Self::MakesRoomFor(task) => write!(f, "makes room for task {}", task.0),
            Self::Wanted => f.write_str("its resources are wanted"),
            Self::Unanswered => f.write_str("it has not left its node in time"),
            Self::WaitedLong => f.write_str("it has waited too long for its node"),
            Self::Fresh => f.write_str("it has just begun, and a kill loses little"),
            Self::Swaps => f.write_str("it swaps, and is not to dirty more memory"),
            Self::GivenBack => f.write_str("it gets back what was taken of it"),
        }
    }
}

/// A decision of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Action to take.
    pub action: TaskAction,
    /// Task that it is done to.
    pub task: TaskId,
    /// Node on which it is done.
    pub node: NodeId,
    /// Score that the task was chosen by.
    pub score: Score,
    /// The second best; none if there was no other.
    pub runner_up: Option<RunnerUp>,
    /// Reason for the action.
    pub reason: DecisionReason,
}
