//! Preemption by priority: when a task has no room, tasks of lower priority make it.

use super::base::Base;
use super::index::Index;
use super::victims::{Chosen, Victims};
use super::{
    ChooseVictims, ClusterEvent, Decision, DecisionReason, Preempt, SchedulerView, TaskView,
    VictimQuestion,
};
use crate::cost::TaskResources;
use crate::quantity::{Moment, Seconds};
use crate::{NodeId, TaskId};

/// Number of waiting tasks with a promise among which one without is looked for.
const MOST_PROMISED: usize = 64;

/// Makes room for tasks of higher priority, on the node where that costs least. Of the priorities that can make room,
/// the lowest do.
pub(super) struct ByPriority {
    victims: Victims,
    /// None to visit all nodes for each decision.
    index: Option<Index>,
    /// None to choose the victims here.
    other: Option<Box<dyn ChooseVictims>>,
}

impl ByPriority {
    pub(super) fn new(victims: Victims, index: bool) -> Self {
        Self {
            victims,
            index: index.then(Index::default),
            other: None,
        }
    }

    /// Has another party choose the victims on the node that was found.
    pub(super) fn asking(self, other: Option<Box<dyn ChooseVictims>>) -> Self {
        Self { other, ..self }
    }

    /// Finds the node where making room for a task costs least.
    fn cheapest(
        &mut self,
        now: Moment,
        base: &mut Base,
        task: &TaskView,
        view: &SchedulerView,
    ) -> Option<(NodeId, Chosen)> {
        if let Some(index) = &mut self.index {
            index.sync(now, base, &self.victims, view);
        }
        let victims = &self.victims;
        match &mut self.index {
            Some(index) => index.cheapest(now, task.asks, task.priority, |node, leaf, level| {
                let candidates = || leaf.candidates(level);
                with_room(
                    victims,
                    now,
                    task.asks,
                    (node, leaf.room(), level),
                    candidates,
                    view,
                )
            }),
            None => self.everywhere(now, base, task, view),
        }
    }

    /// Returns what makes room for a task on one node, all of a priority of at most `most`.
    fn on_node(
        &self,
        now: Moment,
        base: &Base,
        asks: TaskResources,
        node: NodeId,
        most: u8,
        view: &SchedulerView,
    ) -> Option<Chosen> {
        let room = base.room_to_come(node, view);
        let candidates = || candidates(base, node, most, view);
        with_room(
            &self.victims,
            now,
            asks,
            (node, room, most),
            candidates,
            view,
        )
    }

    /// Finds the node and the victims by visiting all nodes.
    fn everywhere(
        &self,
        now: Moment,
        base: &Base,
        task: &TaskView,
        view: &SchedulerView,
    ) -> Option<(NodeId, Chosen)> {
        let tasks = view.nodes().flat_map(|(_, node)| &node.tasks);
        let can = tasks.filter(|id| base.can_be_preempted(**id, view));
        let mut levels: Vec<u8> = can
            .filter_map(|id| Some(view.task(*id)?.priority))
            .collect();
        levels.push(0);
        levels.sort_unstable();
        levels.dedup();
        let below = levels
            .into_iter()
            .take_while(|level| *level < task.priority);
        { below }.find_map(|level| {
            let mut best: Option<(NodeId, Chosen)> = None;
            for (node, _) in view.nodes() {
                if let Some(chosen) = self.on_node(now, base, task.asks, node, level, view)
                    && best
                        .as_ref()
                        .is_none_or(|(_, best)| chosen.total < best.total)
                {
                    best = Some((node, chosen));
                }
            }
            best
        })
    }

    /// Decides that the chosen tasks make room for a task on a node.
    fn carry_out(
        &mut self,
        now: Moment,
        base: &mut Base,
        id: TaskId,
        node: NodeId,
        chosen: &Chosen,
        view: &SchedulerView,
    ) -> Vec<Decision> {
        let reason = DecisionReason::MakesRoomFor(id);
        let victims = chosen.victims.iter();
        let mut decisions: Vec<Decision> = victims.map(|victim| victim.decision(reason)).collect();
        if let Some(other) = &mut self.other
            && let Some(asks) = view.task(id).map(|task| task.asks)
            && !decisions.is_empty()
        {
            let candidates = candidates(base, node, chosen.level, view);
            let question = VictimQuestion {
                now,
                node,
                wanted: asks.less(base.room_to_come(node, view)),
                candidates: &candidates,
                view,
            };
            decisions = other.choose(&question, decisions);
        }
        let victims = decisions.iter().map(|decision| decision.task);
        base.promise(id, node, victims, view);
        decisions
    }

    fn make_room(
        &mut self,
        now: Moment,
        base: &mut Base,
        id: TaskId,
        view: &SchedulerView,
        out: &mut Vec<Decision>,
    ) {
        let Some(task) = view.task(id) else { return };
        if base.has_promise(id) || !base.is_waiting(id) {
            return;
        }
        let found = match base.bound_to(id) {
            Some(node) => {
                let below = task.priority.checked_sub(1);
                let chosen =
                    below.and_then(|below| self.on_node(now, base, task.asks, node, below, view));
                chosen.map(|chosen| (node, chosen))
            }
            None => self.cheapest(now, base, task, view),
        };
        if let Some((node, chosen)) = found {
            out.extend(self.carry_out(now, base, id, node, &chosen, view));
        }
    }
}

/// Returns what makes room for a task on a node of which `room` comes anyway.
fn with_room(
    victims: &Victims,
    now: Moment,
    asks: TaskResources,
    (node, room, level): (NodeId, TaskResources, u8),
    candidates: impl FnOnce() -> Vec<TaskId>,
    view: &SchedulerView,
) -> Option<Chosen> {
    if !view.node(node)?.capacity.covers(asks) {
        return None;
    }
    let wanted = asks.less(room);
    if wanted.is_none() {
        return Some(Chosen {
            enough: true,
            ..Chosen::default()
        });
    }
    let chosen = victims.choose(now, view, &candidates(), wanted);
    chosen.enough.then_some(Chosen { level, ..chosen })
}

impl Preempt for ByPriority {
    fn cost_of_room(
        &self,
        now: Moment,
        base: &Base,
        id: TaskId,
        node: NodeId,
        view: &SchedulerView,
    ) -> Option<Seconds> {
        let task = view.task(id)?;
        let below = task.priority.checked_sub(1)?;
        let chosen = self.on_node(now, base, task.asks, node, below, view)?;
        Some(chosen.total)
    }

    fn preempt(
        &mut self,
        now: Moment,
        event: ClusterEvent,
        base: &mut Base,
        view: &SchedulerView,
        out: &mut Vec<Decision>,
    ) {
        for (id, node) in base.take_room_wanted() {
            let Some(task) = view.task(id) else { continue };
            if let Some(below) = task.priority.checked_sub(1)
                && !base.has_promise(id)
                && base.is_waiting(id)
                && let Some(chosen) = self.on_node(now, base, task.asks, node, below, view)
            {
                out.extend(self.carry_out(now, base, id, node, &chosen, view));
            }
        }
        for id in base.take_lacking() {
            self.make_room(now, base, id, view, out);
        }
        match event {
            // A task of higher priority may have found nobody to preempt so far.
            ClusterEvent::Running(running) => {
                let Some(running) = view.task(running) else {
                    return;
                };
                let Some(node) = running.node else { return };
                let few: Vec<TaskId> = base.waiting().take(MOST_PROMISED).collect();
                let first = few.into_iter().find(|id| !base.has_promise(*id));
                let Some(task) = first.and_then(|id| view.task(id)) else {
                    return;
                };
                if let Some(id) = first
                    && task.priority > running.priority
                    && base.bound_to(id).is_none_or(|bound| bound == node)
                    && let Some(below) = task.priority.checked_sub(1)
                    && let Some(chosen) = self.on_node(now, base, task.asks, node, below, view)
                {
                    out.extend(self.carry_out(now, base, id, node, &chosen, view));
                }
            }
            ClusterEvent::Wanted(wanted, node) => {
                let chosen = wanted_from(now, base, &self.victims, wanted, node, view);
                for victim in &chosen.victims {
                    base.tell(victim.task, victim.node);
                    out.push(victim.decision(DecisionReason::Wanted));
                }
            }
            _ => {}
        }
    }
}

/// Chooses what frees resources for a scheduler that starts tasks itself, on one node or anywhere.
pub(super) fn wanted_from(
    now: Moment,
    base: &Base,
    victims: &Victims,
    wanted: TaskResources,
    node: Option<NodeId>,
    view: &SchedulerView,
) -> Chosen {
    let candidates = match node {
        Some(node) => candidates(base, node, u8::MAX, view),
        None => view
            .nodes()
            .flat_map(|(node, _)| candidates(base, node, u8::MAX, view))
            .collect(),
    };
    victims.choose(now, view, &candidates, wanted)
}

/// Returns the tasks of a node that can be preempted, of a priority of at most `most`, by number.
fn candidates(base: &Base, node: NodeId, most: u8, view: &SchedulerView) -> Vec<TaskId> {
    let tasks = view.node(node).into_iter().flat_map(|node| &node.tasks);
    let low = |id: &&TaskId| {
        let low = view.task(**id).is_some_and(|task| task.priority <= most);
        low && base.can_be_preempted(**id, view)
    };
    let mut candidates: Vec<TaskId> = tasks.filter(low).copied().collect();
    candidates.sort_unstable();
    candidates
}
