//! Natjam (paper 002): first the victim job, then its task, and requests that are never made twice.
//!
//! Each second (§3.2) the estimates of remaining time are renewed and requests are made: one for each waiting task that
//! has none, to a job of lower priority, or of a later deadline or greater laxity (§4). A request that is not answered
//! by a start within 12 s leads to a kill, and is expired for 2 s before another one can be made.

mod estimates;
mod order;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use estimates::Estimates;
use order::{NextVictim, VictimOrder};

use super::base::{Base, Order};
use super::random::SplitMix64;
use super::running::Running;
use super::{
    ClusterEvent, Decision, DecisionReason, Preempt, RunnerUp, SchedulerView, Score, TaskAction,
    TaskState,
};
use crate::cost::{Copies, Dump, PreemptionMechanism, TaskResources};
use crate::quantity::{Moment, Seconds};
use crate::size::JobId;
use crate::{NodeId, TaskId};

/// Time between two runs of the algorithm (002, §3.2), milliseconds.
const PERIOD_MS: u64 = 1000;

/// Time after which an unanswered request leads to a kill (002, §3.2), milliseconds.
const KILL_AFTER_MS: u64 = 12_000;

/// Time that a request is expired before its container is assumed dead (002, §3.2), milliseconds.
const EXPIRED_MS: u64 = 2000;

/// Number of tasks for which no victim is found before a run ends.
const MOST_IN_VAIN: usize = 16;

const SUSPEND: PreemptionMechanism = PreemptionMechanism::Checkpoint {
    dump: Dump::Full,
    copies: Copies::Local,
};

/// Rule that chooses the victim job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobRule {
    /// Most containers (MR).
    Most,
    /// Least containers (LR).
    Least,
    /// With a probability proportional to its containers (PR).
    Proportional,
    /// Latest deadline (MDF).
    LatestDeadline,
    /// Greatest laxity (MLF).
    GreatestLaxity,
}

/// Rule that chooses the task of the victim job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TaskRule {
    /// Shortest remaining time (SRT).
    Shortest,
    /// Longest remaining time (LRT).
    Longest,
    /// Any, each with the same probability.
    Random,
}

/// A request for a container.
#[derive(Clone, Copy, Debug)]
struct Request {
    since: Moment,
    victim: TaskId,
    node: NodeId,
}

/// Preemptor and releasers.
pub(super) struct Reclaim {
    job: JobRule,
    task: TaskRule,
    random: SplitMix64,
    /// Requests by the task that waits; several if its victims are smaller than it.
    requests: BTreeMap<TaskId, Vec<Request>>,
    /// Since when requests are expired, by the task that waits.
    expired: BTreeMap<TaskId, Moment>,
    running: Running,
    /// Ranks of jobs by what victims are chosen by, when that is a deadline or a laxity.
    ranks: Option<Order>,
    estimates: Estimates,
}

impl Reclaim {
    pub(super) fn new(job: JobRule, task: TaskRule, seed: u64) -> Self {
        Self {
            job,
            task,
            random: SplitMix64::new(seed),
            requests: BTreeMap::new(),
            expired: BTreeMap::new(),
            running: Running::default(),
            ranks: match job {
                JobRule::LatestDeadline => Some(Order::deadline()),
                JobRule::GreatestLaxity => Some(Order::laxity()),
                JobRule::Most | JobRule::Least | JobRule::Proportional => None,
            },
            estimates: Estimates::default(),
        }
    }

    /// Ends requests that were answered, and kills for those that were not for too long.
    fn expire(
        &mut self,
        now: Moment,
        base: &mut Base,
        view: &SchedulerView,
        out: &mut Vec<Decision>,
    ) {
        let mut late = Vec::new();
        self.requests.retain(|waiting, requests| {
            if !base.is_waiting(*waiting) {
                return false;
            }
            let limit = Seconds::from_millis(KILL_AFTER_MS);
            let is_late = requests.iter().any(|one| now.since(one.since) > limit);
            if is_late {
                late.push((*waiting, requests.clone()));
            }
            !is_late
        });
        for (waiting, requests) in late {
            for request in requests {
                let Some(victim) = view.task(request.victim) else {
                    continue;
                };
                // One that runs since then has left, and was restored on the node.
                let has_run = |since: Moment| since <= request.since;
                let is_there = victim.node == Some(request.node)
                    && match victim.state {
                        TaskState::Leaving => true,
                        TaskState::Running => victim.running_since.is_some_and(has_run),
                        _ => false,
                    };
                if is_there {
                    base.tell(request.victim, request.node);
                    out.push(Decision {
                        action: TaskAction::Preempt(PreemptionMechanism::Kill),
                        task: request.victim,
                        node: request.node,
                        score: Score::Lost(now.since(request.since)),
                        runner_up: None,
                        reason: DecisionReason::Unanswered,
                    });
                }
            }
            self.expired.insert(waiting, now);
        }
        let limit = Seconds::from_millis(EXPIRED_MS);
        self.expired.retain(|_, since| now.since(*since) < limit);
    }

    /// Returns the jobs from which a task may take room, with their running tasks that may be asked to leave.
    fn candidates(
        &self,
        base: &Base,
        id: TaskId,
        view: &SchedulerView,
    ) -> Vec<(JobId, Vec<TaskId>)> {
        let Some(task) = view.task(id) else {
            return Vec::new();
        };
        let is_lower = |job: JobId, other: TaskId| match &self.ranks {
            Some(ranks) => ranks.of_job(job) > ranks.of_job(task.job),
            None => view
                .task(other)
                .is_some_and(|other| other.priority < task.priority),
        };
        let mut rooms: BTreeMap<NodeId, bool> = BTreeMap::new();
        let mut jobs = Vec::new();
        for (job, tasks) in self.running.jobs() {
            // The tasks of a job have one priority.
            if !tasks.first().is_some_and(|first| is_lower(job, *first)) {
                continue;
            }
            let mut can = |other: &TaskId| {
                let node = view.task(*other).and_then(|other| other.node);
                let Some(node) = node.filter(|_| base.can_be_preempted(*other, view)) else {
                    return false;
                };
                *rooms.entry(node).or_insert_with(|| {
                    let tasks = view.node(node).into_iter().flat_map(|node| &node.tasks);
                    let lower = tasks.filter(|other| {
                        let job = view.task(**other).map(|task| task.job);
                        base.can_be_preempted(**other, view)
                            && job.is_some_and(|job| is_lower(job, **other))
                    });
                    let room = base.room_to_come(node, view);
                    let most = lower.filter_map(|other| view.task(*other));
                    let most = most.fold(room, |sum, task| sum.plus(task.holds));
                    most.covers(task.asks)
                })
            };
            let tasks: Vec<TaskId> = tasks.iter().filter(|other| can(other)).copied().collect();
            if !tasks.is_empty() {
                jobs.push((job, tasks));
            }
        }
        jobs
    }

    /// Returns the order in which the tasks of `jobs` are taken. What jobs are ranked by does not change meanwhile.
    fn order(&self, jobs: Vec<(JobId, Vec<TaskId>)>, view: &SchedulerView) -> VictimOrder {
        let containers = |job: JobId| view.job(job).map_or(0, |job| job.containers);
        match (self.job, &self.ranks) {
            (JobRule::Proportional, _) => {
                VictimOrder::by_weight(jobs, |job| containers(job).into())
            }
            (JobRule::Least, _) => VictimOrder::by_key(jobs, containers),
            (JobRule::LatestDeadline | JobRule::GreatestLaxity, Some(ranks)) => {
                VictimOrder::by_key(jobs, |job| Reverse(ranks.of_job(job)))
            }
            _ => VictimOrder::by_key(jobs, |job| Reverse(containers(job))),
        }
    }

    /// Returns how a victim's job was chosen to make room for a task of the job `of`.
    fn score(&self, job: JobId, of: JobId, view: &SchedulerView) -> Score {
        match &self.ranks {
            None => Score::Containers(view.job(job).map_or(0, |job| job.containers)),
            Some(ranks) => {
                let later = ranks.of_job(job).saturating_sub(ranks.of_job(of));
                Score::Later(Seconds::clamped(later as f64 / 1e6))
            }
        }
    }

    /// Takes the next victim: the task by the estimates of the last second.
    fn next(&mut self, order: &mut VictimOrder) -> Option<NextVictim> {
        let estimates = &self.estimates;
        order.next(self.task, &mut self.random, |task| estimates.left(task))
    }

    fn decision(
        &self,
        next: NextVictim,
        node: NodeId,
        of: JobId,
        reason: DecisionReason,
        view: &SchedulerView,
    ) -> Decision {
        let action = TaskAction::Preempt(SUSPEND);
        Decision {
            action,
            task: next.task,
            node,
            score: self.score(next.job, of, view),
            runner_up: next.runner_up.map(|task| RunnerUp {
                task,
                action,
                score: Score::Left(self.estimates.left(task)),
            }),
            reason,
        }
    }

    /// Requests room for a waiting task: from one task, or from several of one node if they are smaller. Returns false
    /// if there is no victim.
    fn request(
        &mut self,
        now: Moment,
        base: &mut Base,
        id: TaskId,
        view: &SchedulerView,
        out: &mut Vec<Decision>,
    ) -> bool {
        let Some(task) = view.task(id) else {
            return false;
        };
        let jobs = self.candidates(base, id, view);
        let mut order = self.order(jobs, view);
        if let Some(node) = base.bound_to(id) {
            order.keep(|task| is_on(node, task, view));
        }
        let mut victims: Vec<Decision> = Vec::new();
        let mut freed = TaskResources::ZERO;
        loop {
            let Some(next) = self.next(&mut order) else {
                return false;
            };
            let held = view.task(next.task);
            let Some((held, node)) = held.and_then(|v| Some((v.holds, v.node?))) else {
                return false;
            };
            if victims.is_empty() {
                order.keep(|task| is_on(node, task, view));
            }
            let left = task.asks.less(base.room_to_come(node, view)).less(freed);
            if held.least(left).is_none() && !left.is_none() {
                continue;
            }
            freed = freed.plus(held);
            let reason = DecisionReason::MakesRoomFor(id);
            victims.push(self.decision(next, node, task.job, reason, view));
            if base.room_to_come(node, view).plus(freed).covers(task.asks) {
                let asked = victims.iter().map(|victim| victim.task);
                base.promise(id, node, asked, view);
                let requests = victims.iter().map(|victim| Request {
                    since: now,
                    victim: victim.task,
                    node,
                });
                self.requests.insert(id, requests.collect());
                out.append(&mut victims);
                return true;
            }
        }
    }

    /// Frees resources for a scheduler that starts tasks itself.
    fn want(
        &mut self,
        base: &mut Base,
        wanted: TaskResources,
        node: Option<NodeId>,
        view: &SchedulerView,
        out: &mut Vec<Decision>,
    ) {
        let can = |task: &&TaskId| base.can_be_preempted(**task, view);
        let of = |(job, tasks): (JobId, &BTreeSet<TaskId>)| {
            (job, tasks.iter().filter(can).copied().collect::<Vec<_>>())
        };
        let jobs: Vec<_> = self.running.jobs().map(of).collect();
        let mut order = self.order(jobs, view);
        if let Some(node) = node {
            order.keep(|task| is_on(node, task, view));
        }
        let mut left = wanted;
        while !left.is_none() {
            let Some(next) = self.next(&mut order) else {
                break;
            };
            let held = view.task(next.task);
            let Some((held, node)) = held.and_then(|v| Some((v.holds, v.node?))) else {
                continue;
            };
            if held.least(left).is_none() {
                continue;
            }
            left = left.less(held);
            base.tell(next.task, node);
            let of = JobId(u64::MAX);
            out.push(self.decision(next, node, of, DecisionReason::Wanted, view));
        }
    }
}

fn is_on(node: NodeId, task: TaskId, view: &SchedulerView) -> bool {
    view.task(task).and_then(|task| task.node) == Some(node)
}

impl Preempt for Reclaim {
    fn period(&self) -> Option<Seconds> {
        Some(Seconds::from_millis(PERIOD_MS))
    }

    fn preempt(
        &mut self,
        now: Moment,
        event: ClusterEvent,
        base: &mut Base,
        view: &SchedulerView,
        out: &mut Vec<Decision>,
    ) {
        if let Some(gone) = self.running.observe(event, view) {
            self.estimates.forget(gone);
        }
        if let Some(ranks) = &mut self.ranks {
            ranks.renew(now, event, view);
        }
        if let ClusterEvent::Wanted(wanted, node) = event {
            self.estimates.renew(now, &self.running, view);
            self.want(base, wanted, node, view, out);
        }
        if event != ClusterEvent::Tick {
            return;
        }
        self.estimates.renew(now, &self.running, view);
        self.expire(now, base, view, out);
        let waiting: Vec<TaskId> = base.waiting().collect();
        let mut in_vain = 0;
        for id in waiting {
            let is_new = !self.requests.contains_key(&id)
                && !self.expired.contains_key(&id)
                && !base.has_promise(id);
            if is_new && !self.request(now, base, id, view, out) {
                in_vain += 1;
                if in_vain == MOST_IN_VAIN {
                    break;
                }
            }
        }
    }
}
