//! Suspension in memory (paper 001): commands go with heartbeats, and what is suspended resumes on its node or begins
//! again.
//!
//! A victim is MUST_SUSPEND from the decision to the next heartbeat of its node, SUSPENDED in the view from then on,
//! MUST_RESUME from the moment that there is room to the next heartbeat, and RUNNING again (§III). A heartbeat comes at
//! fixed times, and whenever a task ends. One that ends before its heartbeat has ended, and nothing is done to it.

use std::collections::BTreeMap;

use super::base::Base;
use super::priority::{ByPriority, wanted_from};
use super::victims::Victims;
use super::{ClusterEvent, Decision, DecisionReason, Preempt, SchedulerView, Score, TaskAction};
use crate::cost::PreemptionMechanism;
use crate::quantity::{Moment, Seconds};
use crate::{NodeId, TaskId};

/// Victims that are to be suspended, and tasks that wait for their node.
pub(super) struct Suspend {
    by_priority: ByPriority,
    victims: Victims,
    heartbeat: Seconds,
    patience: Seconds,
    /// Commands for the next heartbeat of a node, with the task for which they make room.
    must: BTreeMap<NodeId, Vec<(Option<TaskId>, Decision)>>,
    /// Time at which a suspended task first declined room on another node.
    declined: BTreeMap<TaskId, Moment>,
}

impl Suspend {
    pub(super) fn new(
        victims: Victims,
        index: bool,
        heartbeat: Seconds,
        patience: Seconds,
    ) -> Self {
        Self {
            by_priority: ByPriority::new(victims, index),
            victims,
            heartbeat,
            patience,
            must: BTreeMap::new(),
            declined: BTreeMap::new(),
        }
    }

    /// Gives the commands for a node that still hold.
    fn beat(
        &mut self,
        node: NodeId,
        base: &mut Base,
        view: &SchedulerView,
        out: &mut Vec<Decision>,
    ) {
        for (waiting, decision) in self.must.remove(&node).unwrap_or_default() {
            let holds = waiting.is_none_or(|waiting| base.has_promise(waiting));
            let runs = view.task(decision.task).and_then(|task| task.node) == Some(node);
            if holds && runs {
                base.tell(decision.task, node);
                out.push(decision);
            } else {
                base.untell(decision.task, node);
            }
        }
    }

    /// Lets tasks begin again that have waited too long for their node while there was room on others.
    fn give_up(
        &mut self,
        now: Moment,
        base: &mut Base,
        view: &SchedulerView,
        out: &mut Vec<Decision>,
    ) {
        let waiting: Vec<TaskId> = base.waiting().collect();
        self.declined
            .retain(|task, _| base.bound_to(*task).is_some());
        for id in waiting {
            let (Some(node), Some(task)) = (base.bound_to(id), view.task(id)) else {
                continue;
            };
            if base.node_with(task.asks).is_none() {
                continue;
            }
            let since = *self.declined.entry(id).or_insert(now);
            let waited = now.since(since);
            if waited >= self.patience {
                base.tell(id, node);
                out.push(Decision {
                    action: TaskAction::Preempt(PreemptionMechanism::Kill),
                    task: id,
                    node,
                    score: Score::Lost(task.progress(now)),
                    runner_up: None,
                    reason: DecisionReason::WaitedLong,
                });
            }
        }
    }
}

impl Preempt for Suspend {
    fn period(&self) -> Option<Seconds> {
        Some(self.heartbeat)
    }

    fn preempt(
        &mut self,
        now: Moment,
        event: ClusterEvent,
        base: &mut Base,
        view: &SchedulerView,
        out: &mut Vec<Decision>,
    ) {
        if let ClusterEvent::Wanted(wanted, node) = event {
            for victim in wanted_from(now, base, &self.victims, wanted, node, view).victims {
                base.tell(victim.task, victim.node);
                out.push(victim.decision(DecisionReason::Wanted));
            }
            return;
        }
        let beats = |node: NodeId| match event {
            ClusterEvent::Tick => true,
            ClusterEvent::Ended(_, ended) => ended == node,
            _ => false,
        };
        // The base starts again next time what was not carried out.
        out.retain(|decision| decision.action != TaskAction::Continue || beats(decision.node));
        let mut decided = Vec::new();
        self.by_priority
            .preempt(now, event, base, view, &mut decided);
        for decision in decided {
            let waiting = match decision.reason {
                DecisionReason::MakesRoomFor(task) => Some(task),
                _ => None,
            };
            self.must
                .entry(decision.node)
                .or_default()
                .push((waiting, decision));
        }
        match event {
            ClusterEvent::Tick => {
                let nodes: Vec<NodeId> = self.must.keys().copied().collect();
                for node in nodes {
                    self.beat(node, base, view, out);
                }
                self.give_up(now, base, view, out);
            }
            ClusterEvent::Ended(_, node) => self.beat(node, base, view, out),
            _ => {}
        }
    }
}
