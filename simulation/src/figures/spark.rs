//! Stand-in for Spark's scheduler in the figures of paper 003, which compare Pado with it; nothing of it is deployed.
//!
//! A task runs when the outputs of all operators before its own are there. An operator whose outputs were lost runs
//! again as far as others need them, and so do those before it. Operators of one task are the master's, which is never
//! evicted (003, §5.2.2). With checkpoints, outputs are there when they are stored on reserved nodes, which run no
//! other tasks then (§5.1.2).

use std::collections::{BTreeMap, BTreeSet};

use permafrost_scheduling::cost::TaskResources;
use permafrost_scheduling::place::NodeClass;
use permafrost_scheduling::policy::pado::Dataflow;
use permafrost_scheduling::policy::{
    ClusterEvent, Decision, DecisionReason, Policy, SchedulerView, Score, TaskAction, TaskState,
};
use permafrost_scheduling::quantity::Moment;
use permafrost_scheduling::size::JobId;
use permafrost_scheduling::{NodeId, TaskId};

/// Tasks of an operator: how many have put out what others need, and which wait.
#[derive(Clone, Debug, Default)]
struct Tasks {
    all: u32,
    there: u32,
    waiting: BTreeSet<TaskId>,
}

/// Scheduler of Spark, with checkpoints or without.
#[derive(Clone, Debug, Default)]
pub(super) struct Spark {
    checkpoints: bool,
    operators: BTreeMap<(JobId, u32), Tasks>,
    seen: u64,
    /// Node after the last one that was given a task.
    next: u32,
}

impl Spark {
    pub(super) fn new(checkpoints: bool) -> Self {
        Self {
            checkpoints,
            ..Self::default()
        }
    }

    /// Counts again what is there and what waits.
    fn scan(&mut self, view: &SchedulerView) {
        self.operators.clear();
        self.seen = 0;
        self.learn(view);
    }

    /// Learns of new tasks.
    fn learn(&mut self, view: &SchedulerView) {
        for id in (self.seen..view.tasks()).map(TaskId) {
            let Some((job, operator)) = of(id, view) else {
                continue;
            };
            let tasks = self.operators.entry((job, operator)).or_default();
            tasks.all += 1;
            let state = view.task(id).map(|task| task.state);
            match state {
                Some(TaskState::Waiting) => {
                    tasks.waiting.insert(id);
                }
                Some(state) if is_there(state, self.checkpoints) => tasks.there += 1,
                _ => {}
            }
        }
        self.seen = view.tasks();
    }

    fn is_done(&self, job: JobId, operator: u32) -> bool {
        let tasks = self.operators.get(&(job, operator));
        tasks.is_some_and(|tasks| tasks.there == tasks.all)
    }

    /// Returns the tasks that may run now, those of the first operators first.
    fn ready(&self, view: &SchedulerView) -> Vec<TaskId> {
        let mut ready = Vec::new();
        let jobs: BTreeSet<JobId> = self.operators.keys().map(|(job, _)| *job).collect();
        for job in jobs {
            let Some(flow) = view.job(job).and_then(|job| job.dataflow.as_deref()) else {
                continue;
            };
            for operator in self.needed(job, flow) {
                let mut before = flow.into(operator).map(|edge| edge.from);
                if before.all(|from| self.is_done(job, from))
                    && let Some(tasks) = self.operators.get(&(job, operator))
                {
                    ready.extend(&tasks.waiting);
                }
            }
        }
        ready
    }

    /// Returns the operators whose output is needed and not there: the last ones, and those that one of these needs
    /// of which tasks wait. The last operators have the largest numbers.
    fn needed(&self, job: JobId, flow: &Dataflow) -> Vec<u32> {
        let count = u32::try_from(flow.operators().len()).unwrap_or(u32::MAX);
        let mut needed = BTreeSet::new();
        for operator in (0..count).rev() {
            let waits = |operator: u32| {
                let tasks = self.operators.get(&(job, operator));
                tasks.is_some_and(|tasks| !tasks.waiting.is_empty())
            };
            let mut after = flow.from(operator).map(|edge| edge.to).peekable();
            let is_last = after.peek().is_none();
            let is_needed = is_last || after.any(|to| needed.contains(&to) && waits(to));
            if is_needed && !self.is_done(job, operator) {
                needed.insert(operator);
            }
        }
        needed.into_iter().collect()
    }

    /// Finds a node with room, in turn.
    fn node(
        &mut self,
        asks: TaskResources,
        is_master: bool,
        taken: &BTreeMap<NodeId, TaskResources>,
        view: &SchedulerView,
    ) -> Option<NodeId> {
        let fits = |(id, node): &(NodeId, &permafrost_scheduling::policy::Node)| {
            let reserved = node.class == NodeClass::Reserved;
            let is_its = if is_master {
                reserved
            } else {
                !(reserved && self.checkpoints)
            };
            let taken = taken.get(id).copied().unwrap_or_default();
            is_its && !node.capacity.is_none() && node.free.less(taken).covers(asks)
        };
        let from = self.next;
        let after = view.nodes().filter(|(id, _)| id.0 >= from).find(fits);
        let found = after.or_else(|| view.nodes().find(fits));
        let (node, _) = found?;
        self.next = node.0.saturating_add(1);
        Some(node)
    }
}

/// Returns true if the output of a task is there.
const fn is_there(state: TaskState, checkpoints: bool) -> bool {
    match state {
        TaskState::Ended => true,
        TaskState::Uncommitted => !checkpoints,
        _ => false,
    }
}

/// Returns the job and the operator of a task of a dataflow.
fn of(id: TaskId, view: &SchedulerView) -> Option<(JobId, u32)> {
    let task = view.task(id)?;
    Some((task.job, task.operator?))
}

impl Policy for Spark {
    fn name(&self) -> &str {
        if self.checkpoints {
            "spark-checkpoint"
        } else {
            "spark"
        }
    }

    fn decide(&mut self, _now: Moment, event: ClusterEvent, view: &SchedulerView) -> Vec<Decision> {
        match event {
            ClusterEvent::NodeLost(_) => self.scan(view),
            ClusterEvent::Ended(id, _) | ClusterEvent::Committed(id) => {
                let state = view.task(id).map(|task| task.state);
                let counts = match event {
                    ClusterEvent::Ended(..) => {
                        state.is_some_and(|state| is_there(state, self.checkpoints))
                    }
                    // Without checkpoints it counted when it ended.
                    _ => self.checkpoints && state == Some(TaskState::Ended),
                };
                if let Some(tasks) = of(id, view).and_then(|of| self.operators.get_mut(&of))
                    && counts
                {
                    tasks.there += 1;
                }
            }
            _ => {}
        }
        self.learn(view);
        let mut taken: BTreeMap<NodeId, TaskResources> = BTreeMap::new();
        let mut out = Vec::new();
        let mut full = [false; 2];
        for id in self.ready(view) {
            let (Some(task), Some(of)) = (view.task(id), of(id, view)) else {
                continue;
            };
            let is_master = self.operators.get(&of).is_some_and(|tasks| tasks.all == 1);
            let Some(full) = full.get_mut(usize::from(is_master)).filter(|full| !**full) else {
                continue;
            };
            // All tasks ask for as much.
            let Some(node) = self.node(task.asks, is_master, &taken, view) else {
                *full = true;
                continue;
            };
            let of_node = taken.entry(node).or_default();
            *of_node = of_node.plus(task.asks);
            if let Some(tasks) = self.operators.get_mut(&of) {
                tasks.waiting.remove(&id);
            }
            out.push(Decision {
                action: TaskAction::Start,
                task: id,
                node,
                score: Score::Order(task.submitted.micros()),
                runner_up: None,
                reason: DecisionReason::Room,
            });
        }
        out
    }
}
