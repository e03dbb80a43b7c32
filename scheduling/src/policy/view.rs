//! A cluster as its scheduler knows it, and the changes that it can go through.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::pado::Dataflow;
use crate::cost::{NodeFigures, SwapFigures, TaskFigures, TaskResources};
use crate::figure::{Figure, What};
use crate::place::NodeClass;
use crate::quantity::{Bytes, BytesPerSecond, Moment, Ratio, Seconds};
use crate::size::JobId;
use crate::{NodeId, TaskId};

/// State of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskState {
    /// It waits for its start: it has never run, or what it had done is lost.
    Waiting,
    /// It holds resources of its node, and is being started, restored or continued there.
    Starting,
    /// It runs on its node.
    Running,
    /// It holds resources of its node, and is about to leave it: it is being dumped, suspended or killed.
    Leaving,
    /// It is stopped in the memory of its node, and holds nothing else there.
    Suspended,
    /// It has left its node, and waits to be restored from its checkpoint.
    Stored,
    /// It has ended, and its output is on its node alone until it is [committed](SchedulerView::commits).
    Uncommitted,
    /// It has ended.
    Ended,
}

/// A checkpoint of a task.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskCheckpoint {
    /// Node that has a copy.
    pub node: NodeId,
    /// Bytes that a restore reads.
    pub bytes: Bytes,
    /// Work that is in it.
    pub done: Seconds,
}

/// A task of a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskView {
    /// Job that it belongs to.
    pub job: JobId,
    /// Larger goes first.
    pub priority: u8,
    /// Time of its submission.
    pub submitted: Moment,
    /// Resources that it asks for.
    pub asks: TaskResources,
    /// Resources that it holds on its node; none while it is on none.
    pub holds: TaskResources,
    /// Its memory: what a full dump moves.
    pub memory: Bytes,
    /// Rate at which it dirties memory; none if that is not known.
    pub dirty_rate: Option<BytesPerSecond>,
    /// All the work that it has to do, as far as a scheduler may know; none if that is not known.
    pub work: Option<Seconds>,
    /// State that it is in.
    pub state: TaskState,
    /// Node that it is on, or on which it is suspended.
    pub node: Option<NodeId>,
    /// Work that it had done when it last began to run, or when it stopped.
    pub done: Seconds,
    /// Time at which it last began to run; none while it does not.
    pub running_since: Option<Moment>,
    /// Operator of its job's dataflow that it is a task of.
    pub operator: Option<u32>,
    /// Its last checkpoint.
    pub checkpoint: Option<TaskCheckpoint>,
    /// Figures that were given by someone who knows better; they replace what follows from the other fields.
    pub given: Option<Box<TaskFigures>>,
}

impl TaskView {
    /// Makes a task that waits for its first start.
    #[must_use]
    pub const fn new(job: JobId, submitted: Moment, asks: TaskResources) -> Self {
        Self {
            job,
            priority: 0,
            submitted,
            asks,
            holds: TaskResources::ZERO,
            memory: asks.memory,
            dirty_rate: None,
            work: None,
            state: TaskState::Waiting,
            node: None,
            done: Seconds::ZERO,
            running_since: None,
            operator: None,
            checkpoint: None,
            given: None,
        }
    }

    /// Returns the work that it has done by `now`. A second of running is a second of work, or as much less of it as
    /// the task has less of the processors than it asks for.
    #[must_use]
    pub fn progress(&self, now: Moment) -> Seconds {
        let run = self
            .running_since
            .map_or(Seconds::ZERO, |since| now.since(since));
        self.done.plus(run.times(self.pace()))
    }

    /// Returns the work that it does in a second: 1, or the share of the processors that it holds.
    #[must_use]
    pub fn pace(&self) -> Ratio {
        if self.holds.cpu_millis >= self.asks.cpu_millis {
            return Ratio::clamped(1.0);
        }
        Ratio::clamped(self.holds.cpu_millis as f64 / self.asks.cpu_millis as f64)
    }

    /// Returns true if it holds less memory than it has.
    #[must_use]
    pub fn swaps(&self) -> bool {
        self.state == TaskState::Running && self.holds.memory < self.memory.min(self.asks.memory)
    }

    /// Returns true if it waits for room: for its start, its restore or its continuation.
    #[must_use]
    pub const fn waits(&self) -> bool {
        matches!(
            self.state,
            TaskState::Waiting | TaskState::Stored | TaskState::Suspended
        )
    }

    /// Returns the work that it has left; none if its work is not known.
    #[must_use]
    pub fn remaining(&self, now: Moment) -> Option<Seconds> {
        Some(self.work?.less(self.progress(now)))
    }

    /// Puts it where its last checkpoint was taken, or at its beginning, on no node.
    fn go_back(&mut self) {
        self.node = None;
        self.done = self.checkpoint.map_or(Seconds::ZERO, |kept| kept.done);
        self.state = match self.checkpoint {
            Some(_) => TaskState::Stored,
            None => TaskState::Waiting,
        };
    }

    /// Returns its figures, as the cost model takes them.
    #[must_use]
    pub fn figures(&self, id: TaskId, now: Moment) -> TaskFigures {
        if let Some(given) = &self.given {
            return TaskFigures { id, ..**given };
        }
        let progress = self.progress(now);
        let mut figures = TaskFigures {
            full: Figure::given(self.memory),
            resident: Figure::given(self.memory),
            progress: Figure::given(progress),
            has_checkpoint: self.checkpoint.is_some(),
            ..TaskFigures::unknown(id, self.holds)
        };
        if let Some(rate) = self.dirty_rate {
            figures.dirty_rate = Figure::given(rate);
        }
        if let Some(left) = self.remaining(now) {
            figures.remaining = Figure::given(left);
        }
        if let Some(checkpoint) = &self.checkpoint {
            let since = progress.less(checkpoint.done);
            figures.since_checkpoint = Figure::given(since);
            if let Some(rate) = self.dirty_rate {
                let dirtied = rate.value() * since.value() / self.memory.count().max(1) as f64;
                let share = Ratio::clamped(dirtied.min(1.0));
                figures.incremental = Figure::given(self.memory.times(share));
            }
        }
        figures
    }
}

/// A node of a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// All its resources; none if it is lost.
    pub capacity: TaskResources,
    /// Resources that no task holds.
    pub free: TaskResources,
    /// Figures of the tier that takes dumps.
    pub figures: NodeFigures,
    /// Its swap; none where nothing is suspended in memory. The view takes the memory of a task from the free swap when
    /// the task is suspended, and gives it back when the task has gone.
    pub swap: Option<SwapFigures>,
    /// Bandwidth at which it reads a copy that another node has.
    pub link: Figure<BytesPerSecond>,
    /// Class: whether it may be taken away at any time.
    pub class: NodeClass,
    /// Rack that it is in, numbered by the caller.
    pub rack: u32,
    /// Tasks that hold resources of it, in no order.
    pub tasks: Vec<TaskId>,
}

/// A job of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobView {
    /// Time by which it is to have ended.
    pub deadline: Option<Moment>,
    /// Resources that its tasks hold together.
    pub holds: TaskResources,
    /// Tasks of it that hold resources.
    pub containers: u32,
    /// Needs of its tasks of each other; none if there are none.
    pub dataflow: Option<Box<Dataflow>>,
}

/// A change that is not possible: the task is in another state, or the node has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RefusedChange {
    /// There is no such task.
    #[error("there is no task {}", .0.0)]
    NoTask(TaskId),
    /// There is no such node, or it is lost.
    #[error("there is no node {}", .0.0)]
    NoNode(NodeId),
    /// There is no such job.
    #[error("there is no job {}", .0.0)]
    NoJob(JobId),
    /// The task is in a state in which this cannot be.
    #[error("task {} is {state:?}", task.0)]
    State {
        /// Id of the task.
        task: TaskId,
        /// State that it is in.
        state: TaskState,
    },
    /// The node has less room than the task needs.
    #[error("node {} has no room for task {}", node.0, task.0)]
    NoRoom {
        /// Id of the task.
        task: TaskId,
        /// Id of the node.
        node: NodeId,
    },
}

/// A cluster as its scheduler knows it. Nodes, jobs and tasks are numbered from 0 without gaps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SchedulerView {
    nodes: Vec<Node>,
    jobs: Vec<JobView>,
    tasks: Vec<TaskView>,
    held_by_priority_0: TaskResources,
}

/// State that a task leaves behind which leaves its node before its end.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Leaves {
    /// It is stopped in the memory of the node, with all that it had done.
    InMemory,
    /// A new checkpoint.
    Checkpoint(TaskCheckpoint),
    /// Nothing new: it goes back to its last checkpoint, or to its beginning if it has none.
    LastCheckpoint,
    /// Nothing: it begins again.
    Nothing,
}

impl SchedulerView {
    /// Adds a node without tasks, and returns its id.
    pub fn add_node(&mut self, capacity: TaskResources, figures: NodeFigures) -> NodeId {
        let id = NodeId(u32::try_from(self.nodes.len()).unwrap_or(u32::MAX));
        self.nodes.push(Node {
            capacity,
            free: capacity,
            figures: NodeFigures {
                node: id,
                ..figures
            },
            swap: None,
            link: Figure::not_given(What::LinkBandwidth),
            class: NodeClass::Reserved,
            rack: 0,
            tasks: Vec::new(),
        });
        id
    }

    /// Adds a job without tasks, and returns its id.
    pub fn add_job(&mut self, deadline: Option<Moment>) -> JobId {
        self.jobs.push(JobView {
            deadline,
            ..JobView::default()
        });
        JobId(self.jobs.len() as u64 - 1)
    }

    /// Adds a task that waits for its start.
    ///
    /// # Errors
    ///
    /// [`RefusedChange::NoJob`].
    pub fn submit(&mut self, task: TaskView) -> Result<TaskId, RefusedChange> {
        self.job(task.job).ok_or(RefusedChange::NoJob(task.job))?;
        self.tasks.push(task);
        Ok(TaskId(self.tasks.len() as u64 - 1))
    }

    /// Returns the nodes with their ids, the lost ones too.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        (0..).map(NodeId).zip(&self.nodes)
    }

    /// Returns the number of tasks, the ended ones too.
    #[must_use]
    pub fn tasks(&self) -> u64 {
        self.tasks.len() as u64
    }

    /// Returns what tasks of priority 0 hold together.
    #[must_use]
    pub const fn held_by_priority_0(&self) -> TaskResources {
        self.held_by_priority_0
    }

    /// Returns a node.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(usize::try_from(id.0).ok()?)
    }

    /// Returns a node, to change its figures, swap, class or rack.
    pub fn node_mut(&mut self, id: NodeId) -> Option<&mut Node> {
        self.nodes.get_mut(usize::try_from(id.0).ok()?)
    }

    /// Returns a job.
    #[must_use]
    pub fn job(&self, id: JobId) -> Option<&JobView> {
        self.jobs.get(usize::try_from(id.0).ok()?)
    }

    /// Returns a task.
    #[must_use]
    pub fn task(&self, id: TaskId) -> Option<&TaskView> {
        self.tasks.get(usize::try_from(id.0).ok()?)
    }

    /// Returns a task, to change what was measured or predicted of it. Its state, its node and what it holds change
    /// only by the methods of the view.
    pub fn task_mut(&mut self, id: TaskId) -> Option<&mut TaskView> {
        self.tasks.get_mut(usize::try_from(id.0).ok()?)
    }

    fn task_in(
        &mut self,
        id: TaskId,
        states: &[TaskState],
    ) -> Result<&mut TaskView, RefusedChange> {
        let task = (usize::try_from(id.0).ok()).and_then(|index| self.tasks.get_mut(index));
        let task = task.ok_or(RefusedChange::NoTask(id))?;
        if !states.contains(&task.state) {
            return Err(RefusedChange::State {
                task: id,
                state: task.state,
            });
        }
        Ok(task)
    }

    /// Gives a task that waits, is stored or is suspended what it asks for of the node, where it is about to run.
    ///
    /// # Errors
    ///
    /// [`RefusedChange`]: a suspended task continues only on its node.
    pub fn begin(&mut self, id: TaskId, on: NodeId) -> Result<(), RefusedChange> {
        let waits = [TaskState::Waiting, TaskState::Stored, TaskState::Suspended];
        let task = self.task_in(id, &waits)?;
        let (state, asks) = (task.state, task.asks);
        if state == TaskState::Suspended && task.node != Some(on) {
            return Err(RefusedChange::State { task: id, state });
        }
        self.hold(id, on, asks)?;
        if state == TaskState::Suspended {
            self.swap_in(id)?;
        }
        let task = self.task_in(id, &waits)?;
        task.state = TaskState::Starting;
        task.node = Some(on);
        Ok(())
    }

    /// Lets a task run that is being started.
    ///
    /// # Errors
    ///
    /// [`RefusedChange::State`], [`RefusedChange::NoTask`].
    pub fn runs(&mut self, id: TaskId, now: Moment) -> Result<(), RefusedChange> {
        let task = self.task_in(id, &[TaskState::Starting])?;
        task.state = TaskState::Running;
        task.running_since = Some(now);
        Ok(())
    }

    /// Stops a task that runs or is being started: it is about to leave its node, and holds its resources until then.
    ///
    /// # Errors
    ///
    /// [`RefusedChange::State`], [`RefusedChange::NoTask`].
    pub fn stops(&mut self, id: TaskId, now: Moment) -> Result<(), RefusedChange> {
        let task = self.task_in(id, &[TaskState::Running, TaskState::Starting])?;
        task.done = task.progress(now);
        task.running_since = None;
        task.state = TaskState::Leaving;
        Ok(())
    }

    /// Frees what a task holds, which leaves its node before its end; returns the node. A task that is suspended in
    /// memory leaves it.
    ///
    /// # Errors
    ///
    /// [`RefusedChange::State`], [`RefusedChange::NoTask`].
    pub fn leaves(
        &mut self,
        id: TaskId,
        what: Leaves,
        now: Moment,
    ) -> Result<NodeId, RefusedChange> {
        let on_node = [
            TaskState::Running,
            TaskState::Starting,
            TaskState::Leaving,
            TaskState::Suspended,
        ];
        let task = self.task_in(id, &on_node)?;
        task.done = task.progress(now);
        task.running_since = None;
        let node = if task.state == TaskState::Suspended {
            self.swap_in(id)?
        } else {
            self.let_go(id)?
        };
        if what == Leaves::InMemory {
            self.swap_out(id)?;
        }
        let task = self.task_in(id, &on_node)?;
        match what {
            Leaves::InMemory => task.state = TaskState::Suspended,
            Leaves::Checkpoint(checkpoint) => {
                task.done = checkpoint.done;
                task.checkpoint = Some(checkpoint);
                (task.state, task.node) = (TaskState::Stored, None);
            }
            Leaves::LastCheckpoint => task.go_back(),
            Leaves::Nothing => {
                task.checkpoint = None;
                task.go_back();
            }
        }
        Ok(node)
    }

    /// Ends a task that runs; returns its node. What a task of a dataflow has put out on a transient node is
    /// [uncommitted](TaskState::Uncommitted).
    ///
    /// # Errors
    ///
    /// [`RefusedChange::State`], [`RefusedChange::NoTask`].
    pub fn ends(&mut self, id: TaskId, now: Moment) -> Result<NodeId, RefusedChange> {
        let on_node = [TaskState::Running, TaskState::Leaving];
        let task = self.task_in(id, &on_node)?;
        task.done = task.progress(now);
        task.running_since = None;
        let node = self.let_go(id)?;
        let class = self.node(node).map(|node| node.class);
        let task = self.task_in(id, &on_node)?;
        if task.operator.is_some() && class == Some(NodeClass::Transient) {
            task.state = TaskState::Uncommitted;
        } else {
            task.node = None;
            task.state = TaskState::Ended;
        }
        Ok(node)
    }

    /// Commits the output of a task: it has arrived where it is needed, and is safe.
    ///
    /// # Errors
    ///
    /// [`RefusedChange::State`], [`RefusedChange::NoTask`].
    pub fn commits(&mut self, id: TaskId) -> Result<(), RefusedChange> {
        let task = self.task_in(id, &[TaskState::Uncommitted])?;
        task.node = None;
        task.state = TaskState::Ended;
        Ok(())
    }

    /// Ends a task that waits, wherever its state is kept: nothing needs it any more.
    ///
    /// # Errors
    ///
    /// [`RefusedChange::State`], [`RefusedChange::NoTask`].
    pub fn withdraw(&mut self, id: TaskId) -> Result<(), RefusedChange> {
        let waits = [TaskState::Waiting, TaskState::Stored, TaskState::Suspended];
        if self.task_in(id, &waits)?.state == TaskState::Suspended {
            self.swap_in(id)?;
        }
        let task = self.task_in(id, &waits)?;
        (task.node, task.checkpoint) = (None, None);
        task.state = TaskState::Ended;
        Ok(())
    }

    /// Gives a job a dataflow, before its tasks are submitted.
    ///
    /// # Errors
    ///
    /// [`RefusedChange::NoJob`].
    pub fn set_dataflow(&mut self, id: JobId, dataflow: Dataflow) -> Result<(), RefusedChange> {
        let job = self.job_mut(id).ok_or(RefusedChange::NoJob(id))?;
        job.dataflow = Some(Box::new(dataflow));
        Ok(())
    }

    /// Gives or takes resources of a task on its node, which works at another [pace](TaskView::pace) from `now` on.
    ///
    /// # Errors
    ///
    /// [`RefusedChange`].
    pub fn resize(
        &mut self,
        id: TaskId,
        to: TaskResources,
        now: Moment,
    ) -> Result<(), RefusedChange> {
        let task = self.task_in(id, &[TaskState::Running])?;
        task.done = task.progress(now);
        task.running_since = Some(now);
        let node = task.node.ok_or(RefusedChange::NoTask(id))?;
        let before = task.holds;
        self.let_go(id)?;
        let resized = self.hold(id, node, to);
        if resized.is_err() {
            self.hold(id, node, before)?;
        }
        resized
    }

    /// Removes a node with what runs and is stored on it; returns the tasks that were there.
    ///
    /// # Errors
    ///
    /// [`RefusedChange::NoNode`].
    pub fn lose(&mut self, node: NodeId, now: Moment) -> Result<Vec<TaskId>, RefusedChange> {
        let lost = self.node(node).ok_or(RefusedChange::NoNode(node))?;
        let tasks = lost.tasks.clone();
        for task in &mut self.tasks {
            if task.checkpoint.is_some_and(|kept| kept.node == node) {
                task.checkpoint = None;
            }
            let was_suspended_there = task.state == TaskState::Suspended && task.node == Some(node);
            let was_put_out_there = task.state == TaskState::Uncommitted && task.node == Some(node);
            let was_stored_there = task.state == TaskState::Stored && task.checkpoint.is_none();
            if was_suspended_there || was_stored_there || was_put_out_there {
                task.go_back();
            }
        }
        for task in &tasks {
            self.leaves(*task, Leaves::LastCheckpoint, now)?;
        }
        if let Some(lost) = self.node_mut(node) {
            lost.capacity = TaskResources::ZERO;
            lost.free = TaskResources::ZERO;
        }
        Ok(tasks)
    }

    fn hold(
        &mut self,
        id: TaskId,
        on: NodeId,
        resources: TaskResources,
    ) -> Result<(), RefusedChange> {
        let node = self.node_mut(on).ok_or(RefusedChange::NoNode(on))?;
        if node.capacity.is_none() {
            return Err(RefusedChange::NoNode(on));
        }
        if !node.free.covers(resources) {
            return Err(RefusedChange::NoRoom { task: id, node: on });
        }
        node.free = node.free.less(resources);
        node.tasks.push(id);
        let Some(task) = (usize::try_from(id.0).ok()).and_then(|at| self.tasks.get_mut(at)) else {
            return Err(RefusedChange::NoTask(id));
        };
        task.holds = resources;
        let job = task.job;
        if task.priority == 0 {
            self.held_by_priority_0 = self.held_by_priority_0.plus(resources);
        }
        if let Some(job) = self.job_mut(job) {
            job.holds = job.holds.plus(resources);
            job.containers += 1;
        }
        Ok(())
    }

    /// Frees what a task holds, and returns its node.
    fn let_go(&mut self, id: TaskId) -> Result<NodeId, RefusedChange> {
        let task = (usize::try_from(id.0).ok()).and_then(|at| self.tasks.get_mut(at));
        let task = task.ok_or(RefusedChange::NoTask(id))?;
        let (holds, job) = (task.holds, task.job);
        let on = task.node.ok_or(RefusedChange::NoTask(id))?;
        task.holds = TaskResources::ZERO;
        if task.priority == 0 {
            self.held_by_priority_0 = self.held_by_priority_0.less(holds);
        }
        let node = self.node_mut(on).ok_or(RefusedChange::NoNode(on))?;
        node.free = node.free.plus(holds);
        if let Some(at) = node.tasks.iter().position(|task| *task == id) {
            node.tasks.swap_remove(at);
        }
        if let Some(job) = self.job_mut(job) {
            job.holds = job.holds.less(holds);
            job.containers = job.containers.saturating_sub(1);
        }
        Ok(on)
    }

    /// Takes the memory of a task from the free swap of its node.
    fn swap_out(&mut self, id: TaskId) -> Result<(), RefusedChange> {
        let task = self.task(id).ok_or(RefusedChange::NoTask(id))?;
        let (memory, on) = (task.memory, task.node.ok_or(RefusedChange::NoTask(id))?);
        if let Some(swap) = self.node_mut(on).and_then(|node| node.swap.as_mut()) {
            swap.free_swap = swap.free_swap.less(memory);
        }
        Ok(())
    }

    /// Gives the memory of a suspended task back to the free swap of its node, and returns the node.
    fn swap_in(&mut self, id: TaskId) -> Result<NodeId, RefusedChange> {
        let task = self.task(id).ok_or(RefusedChange::NoTask(id))?;
        let (memory, on) = (task.memory, task.node.ok_or(RefusedChange::NoTask(id))?);
        if let Some(swap) = self.node_mut(on).and_then(|node| node.swap.as_mut()) {
            swap.free_swap = swap.free_swap.plus(memory);
        }
        Ok(on)
    }

    fn job_mut(&mut self, id: JobId) -> Option<&mut JobView> {
        self.jobs.get_mut(usize::try_from(id.0).ok()?)
    }
}

#[cfg(test)]
mod tests;
