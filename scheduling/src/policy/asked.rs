//! Another party that chooses the victims: to compare a daemon with this library, decision by decision.

use super::{Decision, Name, Policy, PolicySettings, SchedulerView};
use crate::cost::TaskResources;
use crate::quantity::Moment;
use crate::{NodeId, TaskId};

/// A choice of victims on one node.
#[derive(Clone, Copy, Debug)]
pub struct VictimQuestion<'a> {
    /// Time of the choice.
    pub now: Moment,
    /// Node that the victims are on.
    pub node: NodeId,
    /// Resources that are wanted there.
    pub wanted: TaskResources,
    /// Tasks that may be preempted, by number.
    pub candidates: &'a [TaskId],
    /// The cluster.
    pub view: &'a SchedulerView,
}

/// A party that chooses victims instead of the library.
pub trait ChooseVictims: Send {
    /// Returns the decisions that are carried out. `own` are those of the library.
    fn choose(&mut self, question: &VictimQuestion<'_>, own: Vec<Decision>) -> Vec<Decision>;
}

impl Name {
    /// Returns true for the policies whose victims another party can choose: those that choose among the tasks of one
    /// node, by nothing that they remember.
    #[must_use]
    pub fn may_ask(self) -> bool {
        let first = self.as_str().split('+').next();
        matches!(first, Some("kill" | "basic" | "li2015" | "adaptive"))
    }

    /// Builds the policy with another party that chooses victims whenever a task has no room, on the node that the
    /// library has found. A policy that [may not ask](Self::may_ask) decides by itself.
    #[must_use]
    pub fn build_asking(
        self,
        settings: &PolicySettings,
        other: Box<dyn ChooseVictims>,
    ) -> Box<dyn Policy> {
        self.built(settings, self.may_ask().then_some(other))
    }
}
