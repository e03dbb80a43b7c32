//! Policies: what a scheduler does when something happens in its cluster.
//!
//! A [`Policy`] is told what happened, sees the cluster as a [`SchedulerView`], and returns [`Decision`]s. Whoever has the
//! cluster carries them out: a scheduler by `permafrost`, the simulator by an entry in its queue of events. So what
//! is simulated is what is deployed.

mod asked;
mod base;
mod bound;
mod decision;
mod goes_by;
mod index;
mod name;
pub mod pado;
mod priority;
mod random;
mod reclaim;
mod resume;
mod running;
mod shrink;
mod suspend;
mod victims;
mod view;

pub use asked::{ChooseVictims, VictimQuestion};
use base::Base;
pub use decision::{Decision, DecisionReason, RunnerUp, Score, TaskAction};
pub use goes_by::{RequiredFigure, VictimFate};
pub use name::{Name, PolicySettings, UnknownPolicy, mismatched_deadlines};
pub use random::SplitMix64;
pub use view::{
    JobView, Leaves, Node, RefusedChange, SchedulerView, TaskCheckpoint, TaskState, TaskView,
};

use crate::cost::TaskResources;
use crate::quantity::{Moment, Seconds};
use crate::{NodeId, TaskId};

/// Something that happened in a cluster. The view has it already when the policy is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterEvent {
    /// The task is new, and waits for its first start.
    Submitted(TaskId),
    /// The task runs: its start, its restore or its resumption is done.
    Running(TaskId),
    /// The task has ended by itself; the resources that it held on the node are free.
    Ended(TaskId, NodeId),
    /// The output of the task, which had ended, is [committed](SchedulerView::commits).
    Committed(TaskId),
    /// The task has left its node, by a decision or because it failed there; its resources there are free. The state of
    /// the task in the view says whether it can be resumed.
    Left(TaskId, NodeId),
    /// The task waited, and [nothing needs it any more](SchedulerView::withdraw).
    Withdrawn(TaskId),
    /// The task has less or more resources than before, as decided, or as much of it as was possible.
    Resized(TaskId),
    /// A node is there that was not, or has other figures than before. A policy may rely on the figures of a node as
    /// long as no event names the node or a task on it.
    NodeChanged(NodeId),
    /// The node is gone with all that ran and was stored on it. Its tasks have left it in the view.
    NodeLost(NodeId),
    /// Resources are wanted by a scheduler that starts tasks itself, on the node or on any.
    Wanted(TaskResources, Option<NodeId>),
    /// The [`period`](Policy::period) is over.
    Tick,
}

/// A policy, with what it remembers between decisions.
pub trait Policy: Send {
    /// Returns the name by which it is chosen.
    fn name(&self) -> &str;

    /// Returns the time between [`ClusterEvent::Tick`]s; none if it needs none.
    fn period(&self) -> Option<Seconds> {
        None
    }

    /// Decides what is done now that `event` has happened.
    ///
    /// The first time it takes in the whole view, so that a policy may be asked about a cluster that it has not seen
    /// grow.
    ///
    /// The decisions are carried out in their order, and before it is asked again. One that the view
    /// [refuses](RefusedChange) when its turn comes is dropped, and the policy is not told: it sees it in the view.
    fn decide(&mut self, now: Moment, event: ClusterEvent, view: &SchedulerView) -> Vec<Decision>;
}

/// Part of a policy that makes room for tasks that find none.
trait Preempt: Send {
    /// Returns the time between ticks; none if it needs none.
    fn period(&self) -> Option<Seconds> {
        None
    }

    /// Returns what is lost by making room for a task on a node; none if no room would be made.
    fn cost_of_room(
        &self,
        _now: Moment,
        _base: &Base,
        _task: TaskId,
        _node: NodeId,
        _view: &SchedulerView,
    ) -> Option<Seconds> {
        None
    }

    /// Decides about preemption, when what has room was started.
    fn preempt(
        &mut self,
        now: Moment,
        event: ClusterEvent,
        base: &mut Base,
        view: &SchedulerView,
        out: &mut Vec<Decision>,
    );
}

/// Policy part that preempts no task.
struct Never;

impl Preempt for Never {
    fn preempt(
        &mut self,
        _: Moment,
        _: ClusterEvent,
        _: &mut Base,
        _: &SchedulerView,
        _: &mut Vec<Decision>,
    ) {
    }
}

/// A policy of the base scheduler and a way to preempt.
struct Composed {
    name: &'static str,
    base: Base,
    preempt: Box<dyn Preempt>,
}

impl Composed {
    const fn new(name: &'static str, base: Base, preempt: Box<dyn Preempt>) -> Self {
        Self {
            name,
            base,
            preempt,
        }
    }
}

impl Policy for Composed {
    fn name(&self) -> &str {
        self.name
    }

    fn period(&self) -> Option<Seconds> {
        self.preempt.period()
    }

    fn decide(&mut self, now: Moment, event: ClusterEvent, view: &SchedulerView) -> Vec<Decision> {
        let mut decisions = Vec::new();
        self.base.observe(now, event, view);
        let preempt = &*self.preempt;
        let cost = |base: &Base, task, node| preempt.cost_of_room(now, base, task, node, view);
        self.base.fill(now, view, &cost, &mut decisions);
        self.preempt
            .preempt(now, event, &mut self.base, view, &mut decisions);
        self.base.asked(&decisions);
        decisions
    }
}
