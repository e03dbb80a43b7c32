//! Choice of the node on which a stored task is restored.

use super::base::{Base, CostOfRoom};
use super::{SchedulerView, Score, TaskCheckpoint};
use crate::cost;
use crate::estimator::SizedRates;
use crate::quantity::{Bytes, Moment, Seconds};
use crate::resume::{PreemptedTask, PreviousCheckpoint, ResumeDecision, algorithm_2};
use crate::{NodeId, TaskId};

/// Rule by which the node of a restore is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resume {
    /// The node with the checkpoint alone; the task waits for room there.
    Local,
    /// Any node with room.
    Remote,
    /// The cheaper one by Algorithm 2 of paper 000, in which waiting for room on the node with the checkpoint, or
    /// making room there, is part of its queue (§4.1, "Adaptive resumption").
    Cheaper,
    /// The node with the checkpoint, else one in its rack, else any (002, §9).
    HostRackAny,
}

/// Place for a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// There is room on the node.
    Now(NodeId),
    /// Waiting for the node with the checkpoint is cheaper.
    Wait,
    /// Making room on the node with the checkpoint is cheaper.
    MakeRoom(NodeId),
}

impl Place {
    pub(super) const fn now(self) -> Option<NodeId> {
        match self {
            Self::Now(node) => Some(node),
            Self::Wait | Self::MakeRoom(_) => None,
        }
    }
}

impl Resume {
    /// Chooses the place of a stored task, `room` being a node with room.
    #[expect(clippy::too_many_arguments, reason = "one caller, who has them all")]
    pub(super) fn place(
        self,
        now: Moment,
        base: &Base,
        id: TaskId,
        checkpoint: &TaskCheckpoint,
        room: NodeId,
        view: &SchedulerView,
        cost: CostOfRoom<'_>,
    ) -> Place {
        let Some(task) = view.task(id) else {
            return Place::Wait;
        };
        let home = checkpoint.node;
        let has_room = |node| base.room(node).is_some_and(|room| room.covers(task.asks));
        match self {
            Self::Remote => Place::Now(room),
            Self::Local if room == home || has_room(home) => Place::Now(home),
            Self::Local => Place::Wait,
            Self::HostRackAny => {
                if has_room(home) {
                    return Place::Now(home);
                }
                let rack = view.node(home).map(|node| node.rack);
                let in_rack = |id: &NodeId| view.node(*id).map(|node| node.rack) == rack;
                // A rack has few nodes, and they are numbered one after the other as a rule.
                let near = (home.0.saturating_sub(NEAR)..=home.0.saturating_add(NEAR)).map(NodeId);
                let in_rack = near.filter(in_rack).find(|node| has_room(*node));
                Place::Now(in_rack.unwrap_or(room))
            }
            Self::Cheaper if room == home => Place::Now(home),
            Self::Cheaper => {
                let local =
                    |queue| cheaper(id, checkpoint, room, queue, view) == ResumeDecision::Local;
                if has_room(home) {
                    return Place::Now(if local(Seconds::ZERO) { home } else { room });
                }
                // What is dearer there without waiting is so with it: most tasks need no cost of making room.
                if !local(Seconds::ZERO) {
                    return Place::Now(room);
                }
                let wait = until_room(now, base, id, home, view);
                let make = cost(base, id, home);
                let queue = match (wait, make) {
                    (Some(wait), Some(make)) => Some(wait.min(make)),
                    (one, other) => one.or(other),
                };
                let Some(queue) = queue else {
                    return Place::Now(room);
                };
                if !local(queue) {
                    Place::Now(room)
                } else if make.is_some_and(|make| Some(make) < wait.or(Some(Seconds::MAX))) {
                    Place::MakeRoom(home)
                } else {
                    Place::Wait
                }
            }
        }
    }

    /// Returns the time until the task would run on the node; none if that is not known.
    pub(super) fn score(
        self,
        _now: Moment,
        id: TaskId,
        node: NodeId,
        view: &SchedulerView,
    ) -> Option<Score> {
        overhead(id, node, view).map(Score::Lost)
    }
}

/// Distance from a node's number within which its rack is searched.
const NEAR: u32 = 64;

/// Returns the time from the decision to restore a task on a node until it runs there, without waiting for room.
pub(super) fn overhead(id: TaskId, node: NodeId, view: &SchedulerView) -> Option<Seconds> {
    let (checkpoint, there) = (view.task(id)?.checkpoint?, view.node(node)?);
    let link = SizedRates::uniform(there.link);
    let lacks = cost::MissingPages {
        bytes: checkpoint.bytes,
        link: &link,
    };
    let lacks = (checkpoint.node != node).then_some(&lacks);
    let cost = cost::resume(checkpoint.bytes, &there.figures, lacks, None).ok()?;
    Some(cost.until_running().p50)
}

/// Returns the time until there is room for a task on a node, when all that run there end as expected; none if it
/// is not known of enough of them.
fn until_room(
    now: Moment,
    base: &Base,
    id: TaskId,
    node: NodeId,
    view: &SchedulerView,
) -> Option<Seconds> {
    let asks = view.task(id)?.asks;
    let there = view.node(node)?;
    let mut room = base.room(node)?;
    let known = there.tasks.iter().filter_map(|id| {
        let task = view.task(*id)?;
        Some((task.remaining(now)?, task.holds))
    });
    let mut ends: Vec<_> = known.collect();
    ends.sort_by_key(|(left, _)| *left);
    for (left, holds) in ends {
        room = room.plus(holds);
        if room.covers(asks) {
            return Some(left);
        }
    }
    None
}

/// Runs Algorithm 2 for one task: on the node with its checkpoint after `queue`, or at once on `remote`. What is not
/// known of either counts as nothing; without the bandwidth of the network the task stays local.
fn cheaper(
    id: TaskId,
    checkpoint: &TaskCheckpoint,
    remote: NodeId,
    queue: Seconds,
    view: &SchedulerView,
) -> ResumeDecision {
    let figures = |node: NodeId| {
        let node = view.node(node)?;
        let read = node.figures.read.of(checkpoint.bytes).known().ok()?.p50;
        let wait = node
            .figures
            .read_wait()
            .map_or(Seconds::ZERO, |wait| wait.p50);
        let link = node.link.known().ok().map(|link| link.p50);
        Some((read, wait, link))
    };
    let here = figures(checkpoint.node);
    let (Some((bw_read, wait, _)), Some((bw_read_remote, wait_remote, Some(bw_net)))) =
        (here, figures(remote))
    else {
        return match queue {
            Seconds::ZERO => ResumeDecision::Local,
            _ => ResumeDecision::Remote,
        };
    };
    let task = PreemptedTask {
        task: id,
        previous_checkpoint: Some(PreviousCheckpoint {
            size: Bytes::new(checkpoint.bytes.count()),
            bw_read,
            bw_read_remote,
            bw_net,
            queue_time_local: wait.plus(queue),
            queue_time_remote: wait_remote,
        }),
    };
    let decided = algorithm_2(&[task]);
    decided
        .first()
        .map_or(ResumeDecision::Remote, |(_, decision)| *decision)
}
