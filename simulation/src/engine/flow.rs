//! Dataflows (paper 003): the input that a task fetches before it works, and its output, which is at risk on a
//! transient node until it is committed.

use std::collections::BTreeSet;

use permafrost_scheduling::place::NodeClass;
use permafrost_scheduling::policy::pado::Dependency;
use permafrost_scheduling::policy::{ClusterEvent, Leaves, TaskState, TaskView};
use permafrost_scheduling::quantity::{Bytes, Moment, Seconds};
use permafrost_scheduling::size::JobId;
use permafrost_scheduling::{NodeId, TaskId};

use super::actions::NotDone;
use super::{Kind, Phase, Simulation, TaskRun};
use crate::workload::FlowSpec;

/// Place of the output of a task that has ended on a transient node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskOutput {
    /// It is sent to the reserved nodes, and is safe there.
    Pushed,
    /// It stays where it is until the job ends; that of the last tasks is written at once.
    Kept,
}

/// Links between nodes, and what was fetched over them.
#[derive(Clone, Debug, Default)]
pub(super) struct Links {
    /// Times at which what was sent to reserved nodes, and what was fetched, has arrived.
    sent: Moment,
    fetched: Moment,
    /// Nodes that have what all tasks of an operator share: it is fetched once.
    shared: BTreeSet<(NodeId, usize, u32)>,
}

fn index(operator: u32) -> usize {
    usize::try_from(operator).unwrap_or(usize::MAX)
}

impl<'a> Simulation<'a> {
    fn flow(&self, id: TaskId) -> Option<(usize, &'a FlowSpec, u32)> {
        let at = usize::try_from(id.0).ok()?;
        let job = self.tasks.get(at)?.job;
        let flow = self.workload.jobs.get(job)?.flow.as_deref()?;
        Some((job, flow, self.view.task(id)?.operator?))
    }

    /// Submits the tasks of a dataflow, all at once: the policy knows when each has its input.
    pub(super) fn submit_flow(&mut self, index: usize, flow: &FlowSpec) -> Result<(), NotDone> {
        let workload = self.workload;
        let Some(spec) = workload.jobs.get(index) else {
            return Ok(());
        };
        let id = JobId(index as u64);
        self.view.set_dataflow(id, flow.dataflow().clone())?;
        let mut last = 0;
        for (operator, stage) in (0..).zip(&spec.stages) {
            if flow.dataflow().from(operator).next().is_none() {
                last += stage.len();
            }
            for task in stage {
                let task = self.view.submit(TaskView {
                    priority: spec.priority,
                    memory: task.memory,
                    work: Some(task.work),
                    operator: Some(operator),
                    ..TaskView::new(id, self.now, task.asks)
                })?;
                self.tasks.push(TaskRun {
                    job: index,
                    ..TaskRun::default()
                });
                self.events.push_back(ClusterEvent::Submitted(task));
            }
        }
        if let Some(job) = self.jobs.get_mut(index) {
            job.left = last;
            if last == 0 {
                job.ended = Some(self.now);
                self.jobs_left -= 1;
            }
        }
        Ok(())
    }

    /// Returns the number of nodes that hold outputs.
    fn holders(&self) -> u64 {
        let all = self.config.outputs == TaskOutput::Kept;
        let nodes = self.view.nodes().filter(|(_, node)| {
            !node.capacity.is_none() && (all || node.class == NodeClass::Reserved)
        });
        (nodes.count() as u64).max(1)
    }

    /// Returns the time of moving bytes behind those before them, over the links of as many nodes and into one.
    fn moves(&self, busy: Moment, bytes: Bytes) -> (Moment, Seconds) {
        let link = self.workload.network;
        let share = Bytes::new(bytes.count().div_ceil(self.holders())).at(link);
        let free = self.now.max(busy).after(share);
        (free, free.since(self.now).max(bytes.at(link)))
    }

    /// Returns the time that a task fetches its input before it works on a node.
    pub(super) fn fetch(&mut self, id: TaskId, on: NodeId) -> Seconds {
        let Some((job, flow, operator)) = self.flow(id) else {
            return Seconds::ZERO;
        };
        let class = self.view.node(on).map(|node| node.class);
        if self.config.outputs == TaskOutput::Pushed && class == Some(NodeClass::Reserved) {
            return Seconds::ZERO;
        }
        let tasks = |operator: u32| {
            let operators = flow.dataflow().operators();
            u64::from(operators.get(index(operator)).map_or(0, |of| of.tasks))
        };
        let mut bytes = Bytes::ZERO;
        for edge in flow.dataflow().into(operator) {
            let one = flow.output(edge.from).count();
            let all = one.saturating_mul(tasks(edge.from));
            bytes = bytes.plus(Bytes::new(match edge.dependency {
                Dependency::OneToOne => one,
                Dependency::ManyToOne => all,
                Dependency::ManyToMany => all.div_ceil(tasks(operator).max(1)),
                Dependency::OneToMany => {
                    let is_new = self.links.shared.insert((on, job, edge.from));
                    if is_new { all } else { 0 }
                }
            }));
        }
        if bytes == Bytes::ZERO {
            return Seconds::ZERO;
        }
        let (free, takes) = self.moves(self.links.fetched, bytes);
        self.links.fetched = free;
        takes
    }

    /// Lets the output of a task that has ended become safe, if it is to.
    pub(super) fn put_out(&mut self, id: TaskId) {
        let Some((_, flow, operator)) = self.flow(id) else {
            return;
        };
        let is_last = flow.dataflow().from(operator).next().is_none();
        let takes = match self.config.outputs {
            TaskOutput::Kept if !is_last => return,
            TaskOutput::Kept => Seconds::ZERO,
            TaskOutput::Pushed => {
                let (free, takes) = self.moves(self.links.sent, flow.output(operator));
                self.links.sent = free;
                takes
            }
        };
        let at = self.now.after(takes);
        if let Some(task) = self.task(id) {
            let attempt = task.attempt;
            self.schedule(at, Kind::Commits(id, attempt));
        }
    }

    pub(super) fn commits(&mut self, id: TaskId) -> Result<(), NotDone> {
        self.view.commits(id)?;
        self.events.push_back(ClusterEvent::Committed(id));
        self.finished(id)
    }

    /// Returns true if the job of a task waits for it, and not only for those that need its output.
    pub(super) fn is_last(&self, id: TaskId) -> bool {
        self.flow(id)
            .is_none_or(|(_, flow, operator)| flow.dataflow().from(operator).next().is_none())
    }

    /// Ends what is left of a dataflow when all of its last tasks have ended: outputs that nobody needs any more, and
    /// tasks that were to make such again.
    pub(super) fn end_flow(&mut self, job: usize) -> Result<(), NotDone> {
        let of_job = (0..).map(TaskId).zip(&self.tasks);
        let of_job = of_job.filter(|(_, task)| task.job == job);
        let tasks: Vec<TaskId> = of_job.map(|(id, _)| id).collect();
        for id in tasks {
            let Some(state) = self.view.task(id).map(|task| task.state) else {
                continue;
            };
            match state {
                TaskState::Ended => continue,
                TaskState::Uncommitted => {
                    // What was to commit it later is void.
                    if let Some(task) = self.task(id) {
                        task.attempt += 1;
                    }
                    self.view.commits(id)?;
                    self.finished(id)?;
                    continue;
                }
                TaskState::Waiting | TaskState::Stored => {}
                TaskState::Suspended => {
                    let node = self.view.task(id).and_then(|task| task.node);
                    if let Some(on) = node {
                        if let Some(node) = self.node(on) {
                            node.suspended.remove(&id);
                        }
                        self.make_room(on)?;
                    }
                }
                TaskState::Starting | TaskState::Running | TaskState::Leaving => {
                    let node = self.view.leaves(id, Leaves::Nothing, self.now)?;
                    self.end_transfer(id);
                    self.enter(id, Phase::Away);
                    self.make_room(node)?;
                    self.events.push_back(ClusterEvent::Left(id, node));
                }
            }
            self.forget_checkpoint(id);
            self.go_back(id);
            self.view.withdraw(id)?;
            self.dropped += 1;
            self.events.push_back(ClusterEvent::Withdrawn(id));
        }
        Ok(())
    }
}
