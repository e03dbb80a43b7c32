//! Events: arrivals, ends, transfers, changes of the nodes.

use permafrost_scheduling::estimator::{Channel, Direction, MediumTier, Transfer};
use permafrost_scheduling::figure::Figure;
use permafrost_scheduling::policy::{ClusterEvent, Leaves, TaskCheckpoint, TaskState, TaskView};
use permafrost_scheduling::quantity::{Bytes, Seconds};
use permafrost_scheduling::{NodeId, TaskId};

use super::actions::NotDone;
use super::{Kind, NodeChange, Phase, Simulation, SimulationError, TaskRun, Way, What};
use permafrost_scheduling::cost::Dump;

use permafrost_scheduling::size::JobId;

/// Bytes of the transfer by which a node measures its medium when it joins.
const PROBE: Bytes = Bytes::mib(64);

impl Simulation<'_> {
    pub(super) fn happens(&mut self, kind: Kind) -> Result<(), SimulationError> {
        let done = match kind {
            Kind::Submits(job) => self.submits(job),
            Kind::Starts(task, attempt) => self.starts(task, attempt),
            Kind::Ends(task, attempt) => self.ends(task, attempt),
            Kind::Commits(task, attempt) if self.is_void(task, attempt) => Ok(()),
            Kind::Commits(task, _) => self.commits(task),
            Kind::Resizes(task, number, to) => self.resizes(task, number, to),
            Kind::Freezes(task, attempt, left) => self.freezes(task, attempt, left),
            Kind::HasLeft(task, attempt) => self.has_left(task, attempt),
            Kind::Changes(index) => self.changes(index),
            Kind::Heartbeat => {
                self.heartbeat();
                Ok(())
            }
            Kind::Tick => {
                if let Some(period) = self.policy.period() {
                    let next = self.now.after(period.max(Seconds::clamped(1e-3)));
                    self.schedule(next, Kind::Tick);
                }
                self.events.push_back(ClusterEvent::Tick);
                Ok(())
            }
        };
        done.map_err(|why| SimulationError::Broken {
            at_s: self.seconds(),
            what: format!("{kind:?}: {why}"),
        })
    }

    fn submits(&mut self, index: usize) -> Result<(), NotDone> {
        let workload = self.workload;
        let Some(spec) = workload.jobs.get(index) else {
            return Ok(());
        };
        // Jobs are numbered in the order of their submission, and so are those of the workload.
        let id = self.view.add_job(spec.deadline);
        debug_assert_eq!(id, JobId(index as u64));
        let fits = |task: &crate::workload::TaskSpec| self.fits_some_node(task.asks);
        let misfit = !spec.stages.iter().flatten().all(fits);
        if let Some(job) = self.jobs.get_mut(index) {
            job.misfit = misfit;
        }
        if misfit {
            self.jobs_left -= 1;
            return Ok(());
        }
        if let Some(flow) = &spec.flow {
            return self.submit_flow(index, flow);
        }
        self.next_stage(index)
    }

    /// Submits the tasks of the first stage of a job that has any and has not begun; ends a job that has none.
    fn next_stage(&mut self, index: usize) -> Result<(), NotDone> {
        let workload = self.workload;
        let now = self.now;
        let Some(spec) = workload.jobs.get(index) else {
            return Ok(());
        };
        let Some(job) = self.jobs.get_mut(index) else {
            return Ok(());
        };
        while let Some(stage) = spec.stages.get(job.stage) {
            if !stage.is_empty() {
                break;
            }
            job.stage += 1;
        }
        let Some(stage) = spec.stages.get(job.stage) else {
            job.ended = Some(now);
            self.jobs_left -= 1;
            return Ok(());
        };
        job.left = stage.len();
        for task in stage {
            let id = self.view.submit(TaskView {
                priority: spec.priority,
                memory: task.memory,
                dirty_rate: task.dirty_rate,
                work: Some(task.work),
                ..TaskView::new(JobId(index as u64), now, task.asks)
            })?;
            self.tasks.push(TaskRun {
                job: index,
                ..TaskRun::default()
            });
            self.events.push_back(ClusterEvent::Submitted(id));
        }
        Ok(())
    }

    /// Returns true if the event was scheduled before a later change made it void.
    fn is_void(&mut self, task: TaskId, attempt: u32) -> bool {
        self.task(task).is_none_or(|task| task.attempt != attempt)
    }

    fn starts(&mut self, id: TaskId, attempt: u32) -> Result<(), NotDone> {
        if self.is_void(id, attempt) {
            return Ok(());
        }
        self.end_transfer(id);
        self.view.runs(id, self.now)?;
        self.enter(id, Phase::Running);
        let now = self.now;
        let job = self.task(id).map(|task| task.job);
        if let Some(job) = job.and_then(|job| self.jobs.get_mut(job)) {
            job.started = job.started.or(Some(now));
        }
        self.schedule_end(id);
        self.events.push_back(ClusterEvent::Running(id));
        Ok(())
    }

    /// Schedules the end of a task that runs, by its speed.
    pub(super) fn schedule_end(&mut self, id: TaskId) {
        let now = self.now;
        let Some(task) = self.view.task(id) else {
            return;
        };
        let (left, speed) = (task.remaining(now), task.pace().value());
        let Some(left) = left.filter(|_| speed > 0.0) else {
            return;
        };
        let at = now.after(Seconds::clamped(left.value() / speed));
        let Some(run) = self.task(id) else {
            return;
        };
        run.attempt += 1;
        let attempt = run.attempt;
        self.schedule(at, Kind::Ends(id, attempt));
    }

    fn ends(&mut self, id: TaskId, attempt: u32) -> Result<(), NotDone> {
        if self.is_void(id, attempt) {
            return Ok(());
        }
        // A pre-copied dump may be under way.
        self.end_transfer(id);
        let node = self.view.ends(id, self.now)?;
        self.enter(id, Phase::Away);
        if let Some(task) = self.task(id) {
            task.attempt += 1;
        }
        self.make_room(node)?;
        self.events.push_back(ClusterEvent::Ended(id, node));
        let state = self.view.task(id).map(|task| task.state);
        if state == Some(TaskState::Uncommitted) {
            self.put_out(id);
            return Ok(());
        }
        self.finished(id)
    }

    /// Counts a task whose work is done and safe, and goes on with its job.
    pub(super) fn finished(&mut self, id: TaskId) -> Result<(), NotDone> {
        self.ended += 1;
        self.last_end = self.now;
        let (now, is_last) = (self.now, self.is_last(id));
        let Some(task) = self.task(id) else {
            return Ok(());
        };
        let (fresh, stored, index) = (task.fresh, task.stored, task.job);
        task.stored = Bytes::ZERO;
        self.accounts.done.add(fresh);
        self.accounts.stored.change(now, Bytes::ZERO, stored);
        let Some(job) = self.jobs.get_mut(index).filter(|_| is_last) else {
            return Ok(());
        };
        job.left -= 1;
        if job.left > 0 {
            return Ok(());
        }
        let workload = self.workload;
        if workload
            .jobs
            .get(index)
            .is_some_and(|job| job.flow.is_some())
        {
            job.ended = Some(now);
            self.jobs_left -= 1;
            return self.end_flow(index);
        }
        job.stage += 1;
        self.next_stage(index)
    }

    fn freezes(&mut self, id: TaskId, attempt: u32, left: Seconds) -> Result<(), NotDone> {
        if self.is_void(id, attempt) {
            return Ok(());
        }
        self.view.stops(id, self.now)?;
        self.enter(id, Phase::Leaving);
        let at = self.now.after(left);
        // Its end was scheduled under the number that it had while it ran.
        if let Some(task) = self.task(id) {
            task.attempt += 1;
            let attempt = task.attempt;
            self.schedule(at, Kind::HasLeft(id, attempt));
        }
        Ok(())
    }

    fn has_left(&mut self, id: TaskId, attempt: u32) -> Result<(), NotDone> {
        if self.is_void(id, attempt) {
            return Ok(());
        }
        let dump = match self.task(id).and_then(|task| task.transfer) {
            Some(transfer) => match transfer.what {
                What::Dump(dump) => Some((dump, transfer.node)),
                What::From(_) => None,
            },
            None => None,
        };
        let moved = self.end_transfer(id);
        let Some((dump, on)) = dump else {
            return self.suspended(id);
        };
        let (bytes, done) = match self.view.task(id) {
            Some(task) => (task.memory, task.done),
            None => return Ok(()),
        };
        let checkpoint = TaskCheckpoint {
            node: on,
            bytes,
            done,
        };
        let node = self
            .view
            .leaves(id, Leaves::Checkpoint(checkpoint), self.now)?;
        self.enter(id, Phase::Away);
        let now = self.now;
        if let Some(task) = self.task(id) {
            task.attempt += 1;
            let since_last = task.fresh.less(task.kept);
            task.kept = task.fresh;
            let (more, less) = match dump {
                // The difference is stored beside what there was.
                Dump::Incremental => (moved, Bytes::ZERO),
                Dump::Full | Dump::PreCopied => (bytes, task.stored),
            };
            task.stored = task.stored.plus(more).less(less);
            self.accounts.stored.change(now, more, less);
            self.accounts.kept.add(since_last);
        }
        self.make_room(node)?;
        self.events.push_back(ClusterEvent::Left(id, node));
        Ok(())
    }

    /// Ends the transfer of a task, whether it ran or waited, and begins the next one there; returns its bytes.
    pub(super) fn end_transfer(&mut self, id: TaskId) -> Bytes {
        let now = self.now;
        let Some(task) = self.task(id) else {
            return Bytes::ZERO;
        };
        let (cpu_millis, node) = (task.cpu_millis, task.node);
        let Some(transfer) = task.transfer.take() else {
            return Bytes::ZERO;
        };
        let runs = task.phase == Phase::Running;
        let Some(on) = self.node(transfer.node) else {
            return Bytes::ZERO;
        };
        let queue = match transfer.way {
            Way::Dump => &mut on.dumps,
            Way::Restore => &mut on.restores,
        };
        let (ran, bytes) = queue.finish(now, transfer.ticket);
        self.accounts.medium_busy_s += ran.value();
        if !runs {
            let held = super::ProcessorTime::of(cpu_millis, now.before(ran), now);
            self.accounts.transferring.add(held);
            self.accounts.transferring_s += self.share(node, held);
        }
        self.measured(transfer.node, transfer.way, bytes, ran);
        self.begin_transfers(transfer.node, transfer.way);
        bytes
    }

    /// Gives a finished transfer to the estimator, as the node's daemon does, and its estimate to the view.
    fn measured(&mut self, node: NodeId, way: Way, bytes: Bytes, elapsed: Seconds) {
        let channel = Channel::Medium {
            node,
            tier: MediumTier::Named(0),
            direction: match way {
                Way::Dump => Direction::Write,
                Way::Restore => Direction::Read,
            },
        };
        let now = self.now;
        let transfer = Transfer {
            at: now,
            bytes,
            elapsed,
        };
        // A transfer that was cut off before it moved anything has no rate, and is no sample.
        if self.estimator.transferred(channel, now, transfer).is_ok() {
            let rates = self.estimator.rates(channel, now);
            if let Some(node) = self.view.node_mut(node) {
                match way {
                    Way::Dump => node.figures.write = rates,
                    Way::Restore => node.figures.read = rates,
                }
            }
        }
    }

    /// Measures the medium of a new node, either way.
    pub(super) fn probe(&mut self, node: NodeId) {
        let storage = self.config.medium.storage;
        for (way, rate) in [(Way::Dump, storage.write), (Way::Restore, storage.read)] {
            self.measured(node, way, PROBE, PROBE.at(rate));
        }
    }

    /// Reports the queues of a node to the view.
    pub(super) fn report(&mut self, id: NodeId, way: Way) {
        let now = self.now;
        let Some(node) = self.node(id) else {
            return;
        };
        let bytes = match way {
            Way::Dump => node.dumps.report(now),
            Way::Restore => node.restores.report(now),
        };
        if let Some(node) = self.view.node_mut(id) {
            match way {
                Way::Dump => node.figures.write_queue = Figure::given(bytes),
                Way::Restore => node.figures.read_queue = Figure::given(bytes),
            }
        }
    }

    fn heartbeat(&mut self) {
        self.heartbeat_set = false;
        for index in 0..self.nodes.len() {
            let Some(node) = self.nodes.get(index) else {
                continue;
            };
            let (dumps, restores) = (node.dumps.is_busy(), node.restores.is_busy());
            let id = NodeId(u32::try_from(index).unwrap_or(u32::MAX));
            if dumps {
                self.report(id, Way::Dump);
            }
            if restores {
                self.report(id, Way::Restore);
            }
            if dumps || restores {
                self.events.push_back(ClusterEvent::NodeChanged(id));
                self.set_heartbeat();
            }
        }
    }

    pub(super) fn set_heartbeat(&mut self) {
        if !self.heartbeat_set {
            self.heartbeat_set = true;
            let at = self.now.after(self.workload.heartbeat);
            self.schedule(at, Kind::Heartbeat);
        }
    }

    fn changes(&mut self, index: usize) -> Result<(), NotDone> {
        match self.workload.changes.get(index) {
            Some((_, NodeChange::Joined(spec))) => {
                self.join(spec);
                Ok(())
            }
            Some((_, NodeChange::Lost(node))) => self.loses(NodeId(*node)),
            None => Ok(()),
        }
    }

    /// Removes a node: its tasks go back to their last checkpoint elsewhere, or begin again.
    fn loses(&mut self, id: NodeId) -> Result<(), NotDone> {
        let now = self.now;
        // Dumps there and restores from there fail with it.
        let from_there = |task: &TaskRun| {
            task.transfer.is_some_and(|transfer| {
                transfer.node != id && matches!(transfer.what, What::From(from) if from == id)
            })
        };
        let readers: Vec<TaskId> = (0..)
            .map(TaskId)
            .zip(&self.tasks)
            .filter(|(_, task)| from_there(task))
            .map(|(id, _)| id)
            .collect();
        let stored_there: Vec<TaskId> = (0..self.view.tasks())
            .map(TaskId)
            .filter(|task| {
                let task = self.view.task(*task);
                task.is_some_and(|task| task.checkpoint.is_some_and(|kept| kept.node == id))
            })
            .collect();
        let waited: Vec<TaskId> = stored_there
            .iter()
            .copied()
            .filter(|task| {
                self.view
                    .task(*task)
                    .is_some_and(|task| task.state == TaskState::Stored)
            })
            .collect();
        let suspended: Vec<TaskId> = match self.node(id) {
            Some(node) => std::mem::take(&mut node.suspended).into_keys().collect(),
            None => Vec::new(),
        };
        let put_out: Vec<TaskId> = (0..self.view.tasks())
            .map(TaskId)
            .filter(|task| {
                let task = self.view.task(*task);
                task.is_some_and(|task| {
                    task.state == TaskState::Uncommitted && task.node == Some(id)
                })
            })
            .collect();
        let there = self.view.lose(id, now)?;
        let there = there
            .iter()
            .chain(&suspended)
            .chain(&waited)
            .chain(&put_out);
        let mut gone: Vec<(TaskId, NodeId)> = there.map(|task| (*task, id)).collect();
        for reader in readers {
            let node = self.view.leaves(reader, Leaves::LastCheckpoint, now)?;
            gone.push((reader, node));
        }
        for task in stored_there {
            self.forget_checkpoint(task);
        }
        self.events.push_back(ClusterEvent::NodeLost(id));
        for (task, node) in gone {
            if let Some(run) = self.task(task)
                && run.transfer.is_some_and(|transfer| transfer.node == id)
            {
                run.transfer = None;
            }
            self.end_transfer(task);
            self.enter(task, Phase::Away);
            self.go_back(task);
            self.accounts.counts.evictions += 1;
            self.make_room(node)?;
            self.events.push_back(ClusterEvent::Left(task, node));
        }
        if let Some(node) = self.node(id) {
            node.capacity = permafrost_scheduling::cost::TaskResources::ZERO;
            node.dumps = super::Transfers::new(1);
            node.restores = super::Transfers::new(1);
        }
        Ok(())
    }
}
