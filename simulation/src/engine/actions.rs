//! Carries out decisions.

use permafrost_scheduling::cost::{
    self, Copies, Dump, MissingPages, NoCost, NodeFigures, Part, PreemptionMechanism, SwapFigures,
    TaskFigures, TaskResources,
};
use permafrost_scheduling::figure::Figure;
use permafrost_scheduling::policy::{
    ClusterEvent, Decision, Leaves, RefusedChange, TaskAction, TaskState,
};
use permafrost_scheduling::quantity::{Bytes, Ratio, Seconds};
use permafrost_scheduling::queue::{QueueError, QueueTicket};
use permafrost_scheduling::{NodeId, TaskId};
use thiserror::Error;

use super::{Kind, Paging, Phase, Simulation, Transferring, Way, What};

/// A decision that is not carried out.
#[derive(Debug, Error)]
pub(super) enum NotDone {
    #[error(transparent)]
    Refused(#[from] RefusedChange),
    #[error(transparent)]
    NoCost(#[from] NoCost),
    #[error(transparent)]
    Queue(#[from] QueueError),
    #[error("task {} is {state:?}", task.0)]
    State { task: TaskId, state: TaskState },
    #[error("task {} is being dumped already", .0.0)]
    Dumped(TaskId),
    #[error("copies on other nodes are not simulated")]
    Replicated,
}

/// Figures of a node without its queues: the duration of a transfer once it runs.
fn alone(figures: &NodeFigures) -> NodeFigures {
    NodeFigures {
        write_queue: Figure::given(Bytes::ZERO),
        read_queue: Figure::given(Bytes::ZERO),
        ..*figures
    }
}

impl Simulation<'_> {
    pub(super) fn carry_out(&mut self, decision: &Decision) -> Result<(), NotDone> {
        let (task, node) = (decision.task, decision.node);
        match decision.action {
            TaskAction::Start => self.start(task, node),
            TaskAction::Restore { from } => self.restore(task, node, from),
            TaskAction::Continue => self.resume(task, node),
            TaskAction::Preempt(mechanism) => self.preempt(task, mechanism),
            TaskAction::Resize(to) => self.resize(task, to),
        }
    }

    fn expect(&self, task: TaskId, state: TaskState) -> Result<(), NotDone> {
        let found = self
            .view
            .task(task)
            .ok_or(RefusedChange::NoTask(task))?
            .state;
        if found == state {
            Ok(())
        } else {
            Err(NotDone::State { task, state: found })
        }
    }

    /// Schedules the time at which a task runs that is being started.
    fn runs_after(&mut self, id: TaskId, time: Seconds) {
        let at = self.now.after(time);
        if let Some(task) = self.task(id) {
            task.attempt += 1;
            let attempt = task.attempt;
            self.schedule(at, Kind::Starts(id, attempt));
        }
    }

    fn start(&mut self, id: TaskId, on: NodeId) -> Result<(), NotDone> {
        self.expect(id, TaskState::Waiting)?;
        self.view.begin(id, on)?;
        self.enter(id, Phase::Starting);
        let paging = self.make_room(on)?;
        let fetching = self.fetch(id, on);
        self.started += 1;
        self.runs_after(id, self.config.start.plus(paging).plus(fetching));
        Ok(())
    }

    fn restore(&mut self, id: TaskId, on: NodeId, from: NodeId) -> Result<(), NotDone> {
        self.expect(id, TaskState::Stored)?;
        let task = self.view.task(id).ok_or(RefusedChange::NoTask(id))?;
        let (priority, checkpoint) = (task.priority, task.checkpoint);
        let kept = checkpoint.filter(|kept| kept.node == from);
        let bytes = kept.ok_or(NoCost::NoCheckpoint)?.bytes;
        self.view.begin(id, on)?;
        let submitted =
            self.submit_transfer(id, on, Way::Restore, bytes, priority, What::From(from));
        if let Err(full) = submitted {
            self.view.leaves(id, Leaves::LastCheckpoint, self.now)?;
            return Err(full);
        }
        self.enter(id, Phase::Starting);
        if let Some(task) = self.task(id) {
            task.attempt += 1;
        }
        let counts = &mut self.accounts.counts;
        if on == from {
            counts.local_restores += 1;
        } else {
            counts.remote_restores += 1;
        }
        // What is suspended there is paged out while the restore waits and reads.
        self.make_room(on)?;
        self.begin_transfers(on, Way::Restore);
        Ok(())
    }

    fn resume(&mut self, id: TaskId, on: NodeId) -> Result<(), NotDone> {
        self.expect(id, TaskState::Suspended)?;
        self.view.begin(id, on)?;
        self.enter(id, Phase::Starting);
        let node = self.node(on).ok_or(RefusedChange::NoNode(on))?;
        let (_, paged) = node.suspended.remove(&id).unwrap_or_default();
        let page_in = self.paging(on, paged)?.1;
        let page_out = self.make_room(on)?;
        self.accounts.counts.continues += 1;
        self.runs_after(id, page_in.plus(page_out));
        Ok(())
    }

    fn preempt(&mut self, id: TaskId, mechanism: PreemptionMechanism) -> Result<(), NotDone> {
        if self.task(id).is_some_and(
            |task| matches!(task.transfer, Some(transfer) if transfer.way == Way::Dump),
        ) && matches!(mechanism, PreemptionMechanism::Checkpoint { .. })
        {
            return Err(NotDone::Dumped(id));
        }
        match mechanism {
            PreemptionMechanism::Wait => {}
            PreemptionMechanism::Kill => self.drop_task(id, Leaves::Nothing)?,
            PreemptionMechanism::Rollback => {
                let task = self.view.task(id).ok_or(RefusedChange::NoTask(id))?;
                task.checkpoint.ok_or(NoCost::NoCheckpoint)?;
                self.drop_task(id, Leaves::LastCheckpoint)?;
            }
            PreemptionMechanism::Checkpoint { dump, copies } => self.dump(id, dump, copies)?,
            PreemptionMechanism::SuspendInMemory => self.suspend(id)?,
        }
        self.accounts.counts.preempted(mechanism);
        Ok(())
    }

    /// Kills a task; `leaves` says whether it keeps its last checkpoint.
    fn drop_task(&mut self, id: TaskId, leaves: Leaves) -> Result<(), NotDone> {
        let node = self.view.leaves(id, leaves, self.now)?;
        if let Some(node) = self.node(node) {
            node.suspended.remove(&id);
        }
        self.end_transfer(id);
        self.enter(id, Phase::Away);
        if leaves == Leaves::Nothing {
            self.forget_checkpoint(id);
            let job = self.task(id).map(|task| task.job);
            if let Some(job) = job.and_then(|job| self.jobs.get_mut(job)) {
                job.kills += 1;
            }
        }
        self.go_back(id);
        self.make_room(node)?;
        self.events.push_back(ClusterEvent::Left(id, node));
        Ok(())
    }

    /// Counts the work of a task since its last checkpoint as lost.
    pub(super) fn go_back(&mut self, id: TaskId) {
        let Some(task) = self.task(id) else {
            return;
        };
        task.attempt += 1;
        let lost = task.fresh.less(task.kept);
        task.fresh = task.kept;
        self.accounts.lost.add(lost);
    }

    /// Forgets that a task has a checkpoint.
    pub(super) fn forget_checkpoint(&mut self, id: TaskId) {
        let now = self.now;
        let Some(task) = self.task(id) else {
            return;
        };
        let stored = std::mem::take(&mut task.stored);
        task.kept = super::ProcessorTime::default();
        self.accounts.stored.change(now, Bytes::ZERO, stored);
    }

    fn dump(&mut self, id: TaskId, dump: Dump, copies: Copies) -> Result<(), NotDone> {
        if copies == Copies::Replicated {
            return Err(NotDone::Replicated);
        }
        self.expect(id, TaskState::Running)?;
        let task = self.view.task(id).ok_or(RefusedChange::NoTask(id))?;
        let on = task.node.ok_or(RefusedChange::NoTask(id))?;
        let (priority, figures) = (task.priority, task.figures(id, self.now));
        let bytes = match dump {
            Dump::Incremental => figures.incremental.known().map_err(NoCost::from)?.p50,
            Dump::Full | Dump::PreCopied => figures.full.known().map_err(NoCost::from)?.p50,
        };
        // Refused here if it has no cost, and not when its turn comes.
        let node = self.view.node(on).ok_or(RefusedChange::NoNode(on))?;
        cost::checkpoint(&figures, dump, copies, &node.figures, None)?;
        self.submit_transfer(id, on, Way::Dump, bytes, priority, What::Dump(dump))?;
        if dump != Dump::PreCopied {
            self.view.stops(id, self.now)?;
            self.enter(id, Phase::Leaving);
            if let Some(task) = self.task(id) {
                task.attempt += 1;
            }
        }
        self.begin_transfers(on, Way::Dump);
        Ok(())
    }

    fn submit_transfer(
        &mut self,
        id: TaskId,
        on: NodeId,
        way: Way,
        bytes: Bytes,
        priority: u8,
        what: What,
    ) -> Result<QueueTicket, NotDone> {
        let now = self.now;
        let node = self.node(on).ok_or(RefusedChange::NoNode(on))?;
        let queue = match way {
            Way::Dump => &mut node.dumps,
            Way::Restore => &mut node.restores,
        };
        let ticket = queue.submit(now, id, bytes, priority)?;
        if let Some(task) = self.task(id) {
            task.transfer = Some(Transferring {
                node: on,
                way,
                ticket,
                what,
            });
        }
        Ok(ticket)
    }

    /// Begins the transfers that may run now on a node, and reports its queue.
    pub(super) fn begin_transfers(&mut self, on: NodeId, way: Way) {
        let now = self.now;
        while let Some((ticket, task)) = self.node(on).and_then(|node| {
            let queue = match way {
                Way::Dump => &mut node.dumps,
                Way::Restore => &mut node.restores,
            };
            queue.next(now)
        }) {
            // The cost was known when it was queued, and the medium has not changed.
            let takes = self.begin_transfer(task, on).unwrap_or(Seconds::MAX);
            if let Some(node) = self.node(on) {
                let queue = match way {
                    Way::Dump => &mut node.dumps,
                    Way::Restore => &mut node.restores,
                };
                queue.begun(now, ticket, takes);
            }
            self.set_heartbeat();
        }
        self.report(on, way);
        self.events.push_back(ClusterEvent::NodeChanged(on));
    }

    /// Schedules the end of a task's transfer that begins now, and returns how long it takes: what the cost model says
    /// of the medium as it is, not as it was estimated.
    fn begin_transfer(&mut self, id: TaskId, on: NodeId) -> Result<Seconds, NotDone> {
        let now = self.now;
        let transfer = self.task(id).and_then(|task| task.transfer);
        let transfer = transfer.ok_or(RefusedChange::NoTask(id))?;
        let figures = alone(&self.config.medium.figures(on));
        let attempt = self.task(id).map_or(0, |task| task.attempt);
        let task = self.view.task(id).ok_or(RefusedChange::NoTask(id))?;
        match transfer.what {
            What::Dump(dump) => {
                let cost =
                    cost::checkpoint(&task.figures(id, now), dump, Copies::Local, &figures, None)?;
                let takes = cost.delay().p50;
                let running = (cost.parts())
                    .find(|(part, _)| *part == Part::PreCopy)
                    .map_or(Seconds::ZERO, |(_, time)| time.p50);
                if running > Seconds::ZERO {
                    let frozen = takes.less(running);
                    self.schedule(now.after(running), Kind::Freezes(id, attempt, frozen));
                } else {
                    self.schedule(now.after(takes), Kind::HasLeft(id, attempt));
                }
                Ok(takes)
            }
            What::From(from) => {
                let bytes = task.checkpoint.ok_or(NoCost::NoCheckpoint)?.bytes;
                let lacks = MissingPages {
                    bytes,
                    link: &self.link,
                };
                let lacks = (from != on).then_some(&lacks);
                let takes = cost::resume(bytes, &figures, lacks, None)?
                    .until_running()
                    .p50;
                self.schedule(now.after(takes), Kind::Starts(id, attempt));
                Ok(takes)
            }
        }
    }

    /// Stops a task and leaves it in memory.
    fn suspend(&mut self, id: TaskId) -> Result<(), NotDone> {
        let task = self.view.task(id).ok_or(RefusedChange::NoTask(id))?;
        let on = task.node.ok_or(RefusedChange::NoTask(id))?;
        let figures = task.figures(id, self.now);
        let node = self.view.node(on).ok_or(RefusedChange::NoNode(on))?;
        let swap = node.swap.ok_or(NoCost::NoSwap)?;
        // Nothing is paged out before another task needs the memory; but it must fit (paper 001, §III).
        cost::in_memory(&figures, Bytes::ZERO, &swap)?;
        self.expect(id, TaskState::Running)?;
        self.view.stops(id, self.now)?;
        self.enter(id, Phase::Leaving);
        let now = self.now;
        if let Some(task) = self.task(id) {
            task.attempt += 1;
            let attempt = task.attempt;
            self.schedule(now, Kind::HasLeft(id, attempt));
        }
        Ok(())
    }

    /// Records that a task is suspended: its resources are free, its memory is not.
    pub(super) fn suspended(&mut self, id: TaskId) -> Result<(), NotDone> {
        let memory = self.view.task(id).map_or(Bytes::ZERO, |task| task.memory);
        let node = self.view.leaves(id, Leaves::InMemory, self.now)?;
        self.enter(id, Phase::Away);
        if let Some(run) = self.node(node) {
            run.suspended.insert(id, (memory, Bytes::ZERO));
        }
        self.make_room(node)?;
        self.events.push_back(ClusterEvent::Left(id, node));
        Ok(())
    }

    /// Returns the time of paging `bytes` out on a node, and of paging them in again.
    fn paging(&self, on: NodeId, bytes: Bytes) -> Result<(Seconds, Seconds), NotDone> {
        let node = self.view.node(on).ok_or(RefusedChange::NoNode(on))?;
        let Some(swap) = node.swap.filter(|_| bytes > Bytes::ZERO) else {
            return Ok((Seconds::ZERO, Seconds::ZERO));
        };
        let figures = TaskFigures {
            resident: Figure::given(bytes),
            ..TaskFigures::unknown(TaskId(0), TaskResources::ZERO)
        };
        let full = SwapFigures {
            free_memory: Bytes::ZERO,
            free_swap: bytes,
            ..swap
        };
        let cost = cost::in_memory(&figures, bytes, &full)?;
        let out = cost.delay().p50;
        Ok((out, cost.overhead().p50.less(out)))
    }

    /// Pages out what is suspended on a node as far as its other tasks need the memory, and reports its free memory,
    /// which has changed; returns how long paging takes.
    pub(super) fn make_room(&mut self, on: NodeId) -> Result<Seconds, NotDone> {
        let free = self
            .view
            .node(on)
            .map_or(Bytes::ZERO, |node| node.free.memory);
        let Some(node) = self.node(on).filter(|node| !node.suspended.is_empty()) else {
            if let Some(swap) = self.view.node_mut(on).and_then(|node| node.swap.as_mut()) {
                swap.free_memory = free;
            }
            return Ok(Seconds::ZERO);
        };
        let resident = (node.suspended.values()).fold(Bytes::ZERO, |sum, (memory, paged)| {
            sum.plus(memory.less(*paged))
        });
        let short = resident.less(free);
        let mut left = short;
        for (memory, paged) in node.suspended.values_mut() {
            let more = memory.less(*paged).min(left);
            *paged = paged.plus(more);
            left = left.less(more);
        }
        if let Some(swap) = self.view.node_mut(on).and_then(|node| node.swap.as_mut()) {
            swap.free_memory = free.less(resident.less(short));
        }
        Ok(self.paging(on, short)?.0)
    }

    /// Takes or gives resources of a task. Of its memory, what it has in use is paged: out before another can have it,
    /// with the processors taken first so that it dirties no more; in before it gets back its processors (paper 004,
    /// §4.3).
    fn resize(&mut self, id: TaskId, to: TaskResources) -> Result<(), NotDone> {
        self.expect(id, TaskState::Running)?;
        if self.goes_on(id, to) {
            let holds = self.view.task(id).map_or(to, |task| task.holds);
            self.accounts.counts.resizes += 1;
            return self.resize_to(
                id,
                TaskResources {
                    memory: holds.memory,
                    ..to
                },
            );
        }
        self.settle(id)?;
        let task = self.view.task(id).ok_or(RefusedChange::NoTask(id))?;
        let (holds, on) = (task.holds, task.node.ok_or(RefusedChange::NoTask(id))?);
        let (before, after) = (task.memory.min(holds.memory), task.memory.min(to.memory));
        let (out, back) = (before.less(after), after.less(before));
        let takes = (self.paging(on, out)?.0).plus(self.paging(on, back)?.1);
        self.accounts.counts.resizes += 1;
        if takes == Seconds::ZERO {
            return self.resize_to(id, to);
        }
        let first = TaskResources {
            cpu_millis: to.cpu_millis.min(holds.cpu_millis),
            memory: to.memory.max(holds.memory),
        };
        self.resize_to(id, first)?;
        let now = self.now;
        if let Some(task) = self.task(id) {
            task.resizes += 1;
            let number = task.resizes;
            task.paging = (out > Bytes::ZERO).then_some(Paging {
                since: now,
                takes,
                from: before,
                to: after,
            });
            self.schedule(now.after(takes), Kind::Resizes(id, number, to));
        }
        Ok(())
    }

    /// Returns true if as much of a task is being paged out as is to be: only its processors change.
    fn goes_on(&mut self, id: TaskId, to: TaskResources) -> bool {
        let memory = self.view.task(id).map(|task| task.holds.memory);
        let paging = self.task(id).and_then(|task| task.paging);
        (paging.zip(memory))
            .is_some_and(|(paging, memory)| (paging.to..=memory).contains(&to.memory))
    }

    /// Ends a change of size half-way: frees the memory that is paged out so far.
    fn settle(&mut self, id: TaskId) -> Result<(), NotDone> {
        let now = self.now;
        let Some(task) = self.task(id) else {
            return Ok(());
        };
        task.resizes += 1;
        let Some(paging) = task.paging.take() else {
            return Ok(());
        };
        let done = now.since(paging.since).value() / paging.takes.value().max(1e-9);
        let out = paging.from.less(paging.to);
        let out = out.times(Ratio::clamped(done.min(1.0)));
        let task = self.view.task(id).ok_or(RefusedChange::NoTask(id))?;
        let memory = task.holds.memory.min(paging.from.less(out));
        let to = TaskResources {
            memory,
            ..task.holds
        };
        self.resize_to(id, to)
    }

    /// Ends a change of size: what is paged out is free, and what is paged in runs with as many processors as there are.
    pub(super) fn resizes(
        &mut self,
        id: TaskId,
        number: u32,
        to: TaskResources,
    ) -> Result<(), NotDone> {
        let was_out = match self.task(id) {
            Some(task) if task.resizes == number => task.paging.take().is_some(),
            _ => return Ok(()),
        };
        let Some(task) = self
            .view
            .task(id)
            .filter(|task| task.state == TaskState::Running)
        else {
            return Ok(());
        };
        let node = task.node.and_then(|node| self.view.node(node));
        let free = node.map_or(TaskResources::ZERO, |node| node.free);
        let mut to = to.least(task.holds.plus(free));
        if was_out {
            // Its processors may have changed meanwhile.
            to.cpu_millis = task.holds.cpu_millis;
        }
        self.resize_to(id, to)
    }

    fn resize_to(&mut self, id: TaskId, to: TaskResources) -> Result<(), NotDone> {
        self.view.resize(id, to, self.now)?;
        self.enter(id, Phase::Running);
        if let Some(node) = self.view.task(id).and_then(|task| task.node) {
            self.make_room(node)?;
        }
        self.schedule_end(id);
        self.events.push_back(ClusterEvent::Resized(id));
        Ok(())
    }
}
