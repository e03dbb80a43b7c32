//! Pado (paper 003): dataflows on nodes that may be taken away at any time, and a few that stay.
//!
//! Tasks whose loss would make many others run again are placed on reserved nodes, the others on transient ones
//! (Algorithm 1). Stages run when the stages before them are complete (Algorithm 2), and a task when all of its input
//! is committed. What ran on a transient node is at risk until its output is committed: then only that runs again when
//! the node is lost (§3.2.5). Nodes of a class are taken in turn (§3.2.3). Nobody is preempted.
//!
//! A reserved task starts when its input is committed, and not before, as the paper's do to take in their input: a
//! second of running is a second of work here.

mod dag;

use std::collections::BTreeMap;

pub use dag::{BadDataflow, Dataflow, DataflowOperator, Dependency, Edge, Stage};

use super::base::{Free, Key, Waiting};
use super::{
    ClusterEvent, Decision, DecisionReason, Policy, SchedulerView, Score, TaskAction, TaskState,
};
use crate::place::NodeClass;
use crate::quantity::Moment;
use crate::size::JobId;
use crate::{NodeId, TaskId};

/// A job's dataflow, and how far it is.
#[derive(Clone, Debug)]
struct Flow {
    placement: Vec<NodeClass>,
    stages: Vec<Stage>,
    stage_of: Vec<usize>,
    /// Tasks of each operator, in the order of their submission.
    tasks: Vec<Vec<TaskId>>,
    /// Tasks of each operator whose output is committed.
    done: Vec<u32>,
}

impl Flow {
    fn new(flow: &Dataflow) -> Self {
        let placement = flow.placement();
        let stages = flow.stages(&placement);
        let count = flow.operators().len();
        let mut stage_of = vec![0; count];
        for (number, stage) in stages.iter().enumerate() {
            for operator in &stage.operators {
                if let Some(of) = stage_of.get_mut(index(*operator)) {
                    *of = number;
                }
            }
        }
        Self {
            placement,
            stages,
            stage_of,
            tasks: vec![Vec::new(); count],
            done: vec![0; count],
        }
    }

    fn is_done(&self, flow: &Dataflow, operator: u32) -> bool {
        let tasks = flow
            .operators()
            .get(index(operator))
            .map(|operator| operator.tasks);
        self.done.get(index(operator)).copied() >= tasks
    }

    /// Returns true if all that the task of an operator needs is committed.
    fn is_ready(&self, flow: &Dataflow, operator: u32, id: TaskId, view: &SchedulerView) -> bool {
        let stage = self
            .stage_of
            .get(index(operator))
            .and_then(|stage| self.stages.get(*stage));
        let before = stage.into_iter().flat_map(|stage| &stage.parents);
        let mut before = before.filter_map(|parent| self.stages.get(*parent));
        if !before.all(|stage| {
            stage
                .operators
                .iter()
                .all(|operator| self.is_done(flow, *operator))
        }) {
            return false;
        }
        let tasks = self.tasks.get(index(operator));
        let number = tasks.and_then(|tasks| tasks.iter().position(|task| *task == id));
        flow.into(operator).all(|edge| {
            if edge.dependency != Dependency::OneToOne {
                return self.is_done(flow, edge.from);
            }
            let parents = self.tasks.get(index(edge.from));
            let parent = parents.and_then(|parents| parents.get(number?));
            let parent = parent.and_then(|parent| view.task(*parent));
            parent.is_some_and(|parent| parent.state == TaskState::Ended)
        })
    }
}

fn index(operator: u32) -> usize {
    usize::try_from(operator).unwrap_or(usize::MAX)
}

/// Nodes of one class, and the tasks that wait for them.
#[derive(Clone, Debug, Default)]
struct Part {
    free: Free,
    waiting: Waiting,
    /// Node after the last one that was given a task.
    next: NodeId,
    /// Nodes that are not lost.
    nodes: u32,
}

/// Scheduler of paper 003.
#[derive(Default)]
pub(super) struct Pado {
    flows: BTreeMap<JobId, Flow>,
    reserved: Part,
    transient: Part,
    /// Nodes and tasks that the last decisions are about.
    touched: Vec<(TaskId, NodeId)>,
    seen: u64,
    knows: bool,
}

impl Pado {
    fn part(&mut self, class: NodeClass) -> &mut Part {
        // Without nodes of its class a task goes to the others.
        let transient = match class {
            NodeClass::Transient => self.transient.nodes > 0,
            NodeClass::Reserved => self.reserved.nodes == 0,
        };
        if transient {
            &mut self.transient
        } else {
            &mut self.reserved
        }
    }

    /// Learns of tasks that were submitted.
    fn learn(&mut self, view: &SchedulerView) {
        for id in (self.seen..view.tasks()).map(TaskId) {
            let Some(task) = view.task(id) else { continue };
            let Some((operator, dataflow)) = of(task, view) else {
                continue;
            };
            let flow = self.flows.entry(task.job);
            let flow = flow.or_insert_with(|| Flow::new(dataflow));
            if let Some(tasks) = flow.tasks.get_mut(index(operator)) {
                tasks.push(id);
            }
        }
        self.seen = view.tasks();
    }

    /// Reads everything anew: nodes, what is committed, and what waits.
    fn rescan(&mut self, view: &SchedulerView) {
        (self.reserved, self.transient) = (Part::default(), Part::default());
        for (_, node) in view.nodes().filter(|(_, node)| !node.capacity.is_none()) {
            match node.class {
                NodeClass::Reserved => self.reserved.nodes += 1,
                NodeClass::Transient => self.transient.nodes += 1,
            }
        }
        for (id, _) in view.nodes() {
            self.weigh(id, view);
        }
        for flow in self.flows.values_mut() {
            for (done, tasks) in flow.done.iter_mut().zip(&flow.tasks) {
                let tasks = tasks.iter().filter_map(|id| view.task(*id));
                let ended = tasks.filter(|task| task.state == TaskState::Ended).count();
                *done = u32::try_from(ended).unwrap_or(u32::MAX);
            }
        }
        for id in (0..view.tasks()).map(TaskId) {
            self.consider(id, view);
        }
    }

    fn weigh(&mut self, id: NodeId, view: &SchedulerView) {
        let Some(node) = view.node(id) else { return };
        let room = Some(node.free).filter(|_| !node.capacity.is_none());
        let part = match node.class {
            NodeClass::Reserved => &mut self.reserved,
            NodeClass::Transient => &mut self.transient,
        };
        part.free.set(id, room);
    }

    /// Puts a task into its queue if it waits and has all of its input.
    fn consider(&mut self, id: TaskId, view: &SchedulerView) {
        let Some(task) = view.task(id).filter(|task| task.waits()) else {
            return;
        };
        let mut class = NodeClass::Transient;
        if let Some((operator, dataflow)) = of(task, view) {
            let Some(flow) = self.flows.get(&task.job) else {
                return;
            };
            if !flow.is_ready(dataflow, operator, id, view) {
                return;
            }
            class = flow
                .placement
                .get(index(operator))
                .copied()
                .unwrap_or(class);
        }
        let key = Key {
            rank: -i64::from(task.priority),
            submitted: task.submitted,
            task: id,
        };
        self.part(class).waiting.put(key, task.asks, None);
    }

    /// Takes in that the output of a task is committed, and considers those that may have waited for it.
    fn committed(&mut self, id: TaskId, view: &SchedulerView) {
        let Some(task) = view.task(id).filter(|task| task.state == TaskState::Ended) else {
            return;
        };
        let Some((operator, dataflow)) = of(task, view) else {
            return;
        };
        let Some(flow) = self.flows.get_mut(&task.job) else {
            return;
        };
        if let Some(done) = flow.done.get_mut(index(operator)) {
            *done += 1;
        }
        let tasks = |operator: u32| {
            flow.tasks
                .get(index(operator))
                .into_iter()
                .flatten()
                .copied()
        };
        let all: Vec<TaskId> = if flow.is_done(dataflow, operator) {
            (0..).take(flow.tasks.len()).flat_map(tasks).collect()
        } else {
            let own = flow.tasks.get(index(operator));
            let number = own.and_then(|own| own.iter().position(|task| *task == id));
            let children = dataflow.from(operator);
            let next = children.filter_map(|edge| flow.tasks.get(index(edge.to))?.get(number?));
            next.copied().collect()
        };
        for id in all {
            self.consider(id, view);
        }
    }

    /// Starts what there is room for.
    fn fill(&mut self, view: &SchedulerView, out: &mut Vec<Decision>) {
        for part in [&mut self.reserved, &mut self.transient] {
            let all: Vec<Key> = part.waiting.all().collect();
            for key in all {
                let Some(task) = view.task(key.task) else {
                    continue;
                };
                let found = part.free.first(task.asks, part.next);
                let Some(node) = found.or_else(|| part.free.first(task.asks, NodeId(0))) else {
                    continue;
                };
                part.next = NodeId(node.0.saturating_add(1));
                part.waiting.remove(key.task);
                let room = part.free.of(node).map(|room| room.less(task.asks));
                part.free.set(node, room);
                self.touched.push((key.task, node));
                out.push(Decision {
                    action: TaskAction::Start,
                    task: key.task,
                    node,
                    score: Score::Order(task.submitted.micros()),
                    runner_up: None,
                    reason: DecisionReason::Room,
                });
            }
        }
    }
}

/// Returns the operator of a task, and its job's dataflow.
fn of<'a>(task: &super::TaskView, view: &'a SchedulerView) -> Option<(u32, &'a Dataflow)> {
    let dataflow = view.job(task.job)?.dataflow.as_deref()?;
    Some((task.operator?, dataflow))
}

impl Policy for Pado {
    fn name(&self) -> &'static str {
        "pado"
    }

    fn decide(&mut self, _now: Moment, event: ClusterEvent, view: &SchedulerView) -> Vec<Decision> {
        self.learn(view);
        for (task, node) in std::mem::take(&mut self.touched) {
            self.weigh(node, view);
            self.consider(task, view);
        }
        if !self.knows {
            self.knows = true;
            self.rescan(view);
        } else {
            match event {
                ClusterEvent::Submitted(id) => self.consider(id, view),
                ClusterEvent::Ended(id, node) => {
                    self.weigh(node, view);
                    self.committed(id, view);
                }
                ClusterEvent::Committed(id) => self.committed(id, view),
                ClusterEvent::Withdrawn(id) => {
                    for part in [&mut self.reserved, &mut self.transient] {
                        part.waiting.remove(id);
                    }
                }
                ClusterEvent::Left(id, node) => {
                    self.weigh(node, view);
                    self.consider(id, view);
                }
                ClusterEvent::NodeChanged(_) | ClusterEvent::NodeLost(_) => self.rescan(view),
                ClusterEvent::Running(_)
                | ClusterEvent::Resized(_)
                | ClusterEvent::Wanted(..)
                | ClusterEvent::Tick => {}
            }
        }
        let mut out = Vec::new();
        self.fill(view, &mut out);
        out
    }
}
