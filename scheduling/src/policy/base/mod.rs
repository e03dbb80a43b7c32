//! Scheduler that all policies share: who waits, in which order, where there is room, and which room is promised.
//!
//! A task for which room is made has a promise: room on a node that is being freed for it, which no other task is
//! given. It still waits, and starts elsewhere if there is room sooner.

mod free;
mod order;
mod waiting;

use std::collections::{BTreeMap, HashMap, HashSet};

pub(in crate::policy) use free::Free;
pub(in crate::policy) use order::Order;
pub(in crate::policy) use waiting::{Key, Waiting};

use super::resume::Resume;
use super::{
    ClusterEvent, Decision, DecisionReason, RunnerUp, SchedulerView, Score, TaskAction, TaskState,
};
use crate::cost::{Dump, PreemptionMechanism, TaskResources};
use crate::quantity::{Bytes, Moment, Ratio, Seconds};
use crate::{NodeId, TaskId};

/// Number of stored tasks that may decline the room of a node before it goes to one that takes it.
const MOST_DECLINES: usize = 8;

/// Room that is being freed.
#[derive(Clone, Debug)]
struct Promise {
    task: TaskId,
    asks: TaskResources,
    /// Tasks that are leaving for it.
    awaits: Vec<TaskId>,
}

/// Cost of making room on a node for a task, if its policy would do that.
pub(in crate::policy) type CostOfRoom<'a> = &'a dyn Fn(&Base, TaskId, NodeId) -> Option<Seconds>;

/// Queue, free room and promises.
pub(in crate::policy) struct Base {
    resume: Resume,
    order: Order,
    free: Free,
    waiting: Waiting,
    promises: BTreeMap<NodeId, Vec<Promise>>,
    promised: HashMap<TaskId, NodeId>,
    /// Tasks that were told to leave, and run on for now.
    told: HashSet<TaskId>,
    /// Room that this round's decisions take.
    taken: BTreeMap<NodeId, TaskResources>,
    /// Tasks that this round's decisions start.
    started: Vec<TaskId>,
    /// Nodes that this round's decisions are about.
    touched: Vec<NodeId>,
    /// Tasks that the last round's decisions stop at once, and their nodes.
    asked: Vec<(TaskId, NodeId)>,
    /// Nodes that may have more room than before.
    changed: Vec<NodeId>,
    /// Tasks to be tried on all nodes.
    fresh: Vec<TaskId>,
    /// Tasks that found no room in this round.
    lacking: Vec<TaskId>,
    /// Tasks that would best be restored on a node where room has to be made first.
    room_wanted: Vec<(TaskId, NodeId)>,
    /// Largest share of the cluster that tasks of priority 0 may hold, and how much that is.
    limit: Option<(Ratio, TaskResources)>,
    knows: bool,
    /// Nodes whose room or candidates have changed since they were last taken, each once.
    dirty: Vec<NodeId>,
    lost: bool,
    is_dirty: HashSet<NodeId>,
}

impl Base {
    pub(in crate::policy) fn new(order: Order, resume: Resume) -> Self {
        Self {
            resume,
            order,
            free: Free::default(),
            waiting: Waiting::default(),
            promises: BTreeMap::new(),
            promised: HashMap::new(),
            told: HashSet::new(),
            taken: BTreeMap::new(),
            started: Vec::new(),
            touched: Vec::new(),
            asked: Vec::new(),
            changed: Vec::new(),
            fresh: Vec::new(),
            lacking: Vec::new(),
            room_wanted: Vec::new(),
            limit: None,
            knows: false,
            dirty: Vec::new(),
            lost: false,
            is_dirty: HashSet::new(),
        }
    }

    /// Takes in what has happened, and what has become of the last decisions.
    pub(in crate::policy) fn observe(
        &mut self,
        now: Moment,
        event: ClusterEvent,
        view: &SchedulerView,
    ) {
        self.taken.clear();
        self.lacking.clear();
        self.room_wanted.clear();
        if !self.knows {
            self.take_in(now, view);
            return;
        }
        if self.order.renew(now, event, view) {
            self.reorder(view);
        }
        for task in std::mem::take(&mut self.started) {
            if view.task(task).is_some_and(super::TaskView::waits) {
                self.enqueue(task, view);
            }
        }
        for (task, node) in std::mem::take(&mut self.asked) {
            // The decision was refused.
            if view.task(task).map(|task| task.state) == Some(TaskState::Running) {
                self.told.remove(&task);
                self.touched.push(node);
            }
        }
        for node in std::mem::take(&mut self.touched) {
            self.refresh(node, view);
        }
        match event {
            ClusterEvent::Submitted(task) | ClusterEvent::Withdrawn(task) => {
                self.enqueue(task, view);
            }
            ClusterEvent::Running(task) | ClusterEvent::Resized(task) => {
                if matches!(event, ClusterEvent::Running(_)) {
                    self.told.remove(&task);
                }
                if let Some(node) = view.task(task).and_then(|task| task.node) {
                    self.refresh(node, view);
                    self.changed.push(node);
                }
            }
            ClusterEvent::Ended(task, node) | ClusterEvent::Left(task, node) => {
                self.told.remove(&task);
                self.enqueue(task, view);
                self.refresh(node, view);
                self.changed.push(node);
            }
            ClusterEvent::NodeChanged(node) => {
                self.measure(view);
                self.refresh(node, view);
                self.changed.push(node);
            }
            ClusterEvent::NodeLost(node) => {
                self.lost = true;
                for promise in self.promises.remove(&node).unwrap_or_default() {
                    self.promised.remove(&promise.task);
                    self.fresh.push(promise.task);
                }
                self.measure(view);
                self.refresh(node, view);
                self.rescan(view);
            }
            ClusterEvent::Committed(_) | ClusterEvent::Tick | ClusterEvent::Wanted(..) => {}
        }
    }

    /// Takes in a cluster that was there before the policy.
    fn take_in(&mut self, now: Moment, view: &SchedulerView) {
        self.knows = true;
        self.measure(view);
        self.order.renew(now, ClusterEvent::Tick, view);
        for (node, _) in view.nodes() {
            self.refresh(node, view);
        }
        self.rescan(view);
    }

    /// Looks for waiting tasks among all.
    fn rescan(&mut self, view: &SchedulerView) {
        for task in (0..view.tasks()).map(TaskId) {
            let Some(now) = view.task(task) else { continue };
            let bound = self.bound(task, view);
            if now.waits() && (!self.waiting.contains(task) || self.waiting.bound(task) != bound) {
                self.enqueue(task, view);
            }
        }
    }

    /// Sorts the queue anew.
    fn reorder(&mut self, view: &SchedulerView) {
        let all: Vec<Key> = self.waiting.all().collect();
        for key in all {
            self.put(key.task, view);
        }
    }

    fn bound(&self, id: TaskId, view: &SchedulerView) -> Option<NodeId> {
        let task = view.task(id)?;
        match task.state {
            TaskState::Suspended => task.node,
            TaskState::Stored if self.resume == Resume::Local => Some(task.checkpoint?.node),
            _ => None,
        }
    }

    fn put(&mut self, id: TaskId, view: &SchedulerView) {
        let Some(task) = view.task(id) else { return };
        let key = Key {
            rank: self.order.rank(task),
            submitted: task.submitted,
            task: id,
        };
        self.waiting.put(key, task.asks, self.bound(id, view));
    }

    /// Puts a task into the queue if it waits.
    fn enqueue(&mut self, id: TaskId, view: &SchedulerView) {
        if view.task(id).is_some_and(super::TaskView::waits) {
            self.told.remove(&id);
            self.put(id, view);
            self.fresh.push(id);
        } else {
            self.waiting.remove(id);
            self.withdraw(id);
        }
    }

    /// Reads the room of a node, and ends promises there for which nobody leaves any more.
    fn refresh(&mut self, node: NodeId, view: &SchedulerView) {
        if let Some(promises) = self.promises.get_mut(&node) {
            let told = &self.told;
            let leaves = |id: &TaskId| {
                view.task(*id).is_some_and(|task| {
                    task.node == Some(node)
                        && (task.state == TaskState::Leaving || told.contains(id))
                })
            };
            let free = view
                .node(node)
                .map_or(TaskResources::ZERO, |node| node.free);
            let mut broken = Vec::new();
            promises.retain_mut(|promise| {
                promise.awaits.retain(leaves);
                let stands = !promise.awaits.is_empty() || free.covers(promise.asks);
                if !stands {
                    broken.push(promise.task);
                }
                stands
            });
            if promises.is_empty() {
                self.promises.remove(&node);
            }
            for task in broken {
                self.promised.remove(&task);
                self.fresh.push(task);
            }
        }
        self.weigh(node, view);
    }

    fn soil(&mut self, node: NodeId) {
        if self.is_dirty.insert(node) {
            self.dirty.push(node);
        }
    }

    /// Returns true if a node was lost since the last call.
    pub(in crate::policy) fn take_lost(&mut self) -> bool {
        std::mem::take(&mut self.lost)
    }

    /// Takes the nodes on which something has changed since the last time.
    pub(in crate::policy) fn take_dirty(&mut self) -> Vec<NodeId> {
        self.is_dirty.clear();
        std::mem::take(&mut self.dirty)
    }

    /// Writes the room of a node that is not promised into the index.
    fn weigh(&mut self, node: NodeId, view: &SchedulerView) {
        self.soil(node);
        let room = view.node(node).filter(|node| !node.capacity.is_none());
        let room = room.map(|there| {
            let free = there.free.less(self.taken_of(node));
            self.promises_of(node)
                .fold(free, |free, promise| free.less(promise.asks))
        });
        self.free.set(node, room);
    }

    fn taken_of(&self, node: NodeId) -> TaskResources {
        self.taken
            .get(&node)
            .copied()
            .unwrap_or(TaskResources::ZERO)
    }

    fn promises_of(&self, node: NodeId) -> impl Iterator<Item = &Promise> {
        self.promises.get(&node).into_iter().flatten()
    }

    /// Returns the room of a node that is neither held nor promised.
    pub(in crate::policy) fn room(&self, node: NodeId) -> Option<TaskResources> {
        self.free.of(node)
    }

    /// Returns the room that a node will have when all have left that leave it, without what is promised.
    pub(in crate::policy) fn room_to_come(
        &self,
        id: NodeId,
        view: &SchedulerView,
    ) -> TaskResources {
        let Some(node) = view.node(id) else {
            return TaskResources::ZERO;
        };
        let mut room = node.free;
        for id in &node.tasks {
            if let Some(task) = view.task(*id)
                && (task.state == TaskState::Leaving || self.told.contains(id))
            {
                room = room.plus(task.holds);
            }
        }
        let room = room.less(self.taken_of(id));
        self.promises_of(id)
            .fold(room, |room, promise| room.less(promise.asks))
    }

    /// Returns true if a task can be preempted: it runs, and was not told to leave.
    pub(in crate::policy) fn can_be_preempted(&self, id: TaskId, view: &SchedulerView) -> bool {
        let runs = view
            .task(id)
            .is_some_and(|task| task.state == TaskState::Running);
        runs && !self.told.contains(&id)
    }

    /// Returns true if room is being made for the task.
    pub(in crate::policy) fn has_promise(&self, task: TaskId) -> bool {
        self.promised.contains_key(&task)
    }

    /// Takes the tasks that found no room in this round, in order.
    pub(in crate::policy) fn take_lacking(&mut self) -> Vec<TaskId> {
        std::mem::take(&mut self.lacking)
    }

    /// Takes the tasks for which room is to be made on one node.
    pub(in crate::policy) fn take_room_wanted(&mut self) -> Vec<(TaskId, NodeId)> {
        std::mem::take(&mut self.room_wanted)
    }

    /// Returns the tasks that wait, in order.
    pub(in crate::policy) fn waiting(&self) -> impl DoubleEndedIterator<Item = TaskId> {
        self.waiting.all().map(|key| key.task)
    }

    /// Returns true if the task waits for room.
    pub(in crate::policy) fn is_waiting(&self, task: TaskId) -> bool {
        self.waiting.contains(task)
    }

    /// Returns the node that a waiting task is bound to.
    pub(in crate::policy) fn bound_to(&self, task: TaskId) -> Option<NodeId> {
        self.waiting.bound(task)
    }

    /// Limits tasks of priority 0 to a share of the cluster.
    pub(in crate::policy) fn limited(mut self, share: Ratio) -> Self {
        self.limit = Some((share, TaskResources::ZERO));
        self
    }

    fn measure(&mut self, view: &SchedulerView) {
        if let Some((share, limit)) = &mut self.limit {
            let all = view.nodes().map(|(_, node)| node.capacity);
            let all = all.fold(TaskResources::ZERO, TaskResources::plus);
            *limit = TaskResources {
                cpu_millis: Bytes::new(all.cpu_millis).times(*share).count(),
                memory: all.memory.times(*share),
            };
        }
    }

    /// Promises a task room on a node, which `victims` are told to leave.
    pub(in crate::policy) fn promise(
        &mut self,
        id: TaskId,
        node: NodeId,
        victims: impl Iterator<Item = TaskId>,
        view: &SchedulerView,
    ) {
        self.withdraw(id);
        let Some(task) = view.task(id) else { return };
        self.told.extend(victims);
        // Those who were told before count, too: some of their room may be left over.
        let tasks = view.node(node).into_iter().flat_map(|node| &node.tasks);
        let leaves = |id: &&TaskId| {
            let leaving = view.task(**id).map(|task| task.state) == Some(TaskState::Leaving);
            leaving || self.told.contains(id)
        };
        let awaits = tasks.filter(leaves).copied().collect();
        self.promised.insert(id, node);
        self.promises.entry(node).or_default().push(Promise {
            task: id,
            asks: task.asks,
            awaits,
        });
        self.touched.push(node);
        self.weigh(node, view);
    }

    /// Remembers whom the decisions of this round stop at once, to see whether they were refused.
    pub(in crate::policy) fn asked(&mut self, decisions: &[Decision]) {
        let stops = |decision: &&Decision| match decision.action {
            TaskAction::Preempt(mechanism) => !matches!(
                mechanism,
                PreemptionMechanism::Wait
                    | PreemptionMechanism::Checkpoint {
                        dump: Dump::PreCopied,
                        ..
                    }
            ),
            _ => false,
        };
        let asked = decisions.iter().filter(stops);
        self.asked = asked
            .map(|decision| (decision.task, decision.node))
            .collect();
    }

    /// Tells a task to leave without a promise to anyone.
    pub(in crate::policy) fn tell(&mut self, task: TaskId, node: NodeId) {
        self.told.insert(task);
        self.touched.push(node);
        self.soil(node);
    }

    /// Takes back that a task was told to leave.
    pub(in crate::policy) fn untell(&mut self, task: TaskId, node: NodeId) {
        self.told.remove(&task);
        self.soil(node);
    }

    /// Returns the first node with room.
    pub(in crate::policy) fn node_with(&self, asks: TaskResources) -> Option<NodeId> {
        self.free.first(asks, NodeId(0))
    }

    /// Ends the promise of a task.
    fn withdraw(&mut self, task: TaskId) {
        if let Some(node) = self.promised.remove(&task) {
            if let Some(promises) = self.promises.get_mut(&node) {
                promises.retain(|promise| promise.task != task);
                if promises.is_empty() {
                    self.promises.remove(&node);
                }
            }
            self.changed.push(node);
        }
    }

    /// Starts and resumes what there is room for.
    pub(in crate::policy) fn fill(
        &mut self,
        now: Moment,
        view: &SchedulerView,
        cost: CostOfRoom<'_>,
        out: &mut Vec<Decision>,
    ) {
        loop {
            if let Some(node) = self.changed.pop() {
                self.weigh(node, view);
                self.fill_node(now, node, view, cost, out);
            } else if !self.fresh.is_empty() {
                let mut fresh: Vec<TaskId> = std::mem::take(&mut self.fresh);
                if fresh.len() > 1 {
                    let rank = |task: &TaskId| {
                        view.task(*task)
                            .map(|t| (self.order.rank(t), t.submitted, *task))
                    };
                    fresh.sort_by_cached_key(rank);
                    fresh.dedup();
                }
                for task in fresh {
                    self.fill_task(now, task, view, cost, out);
                }
            } else {
                break;
            }
        }
    }

    fn fill_node(
        &mut self,
        now: Moment,
        node: NodeId,
        view: &SchedulerView,
        cost: CostOfRoom<'_>,
        out: &mut Vec<Decision>,
    ) {
        while let Some(task) = self.first_of_promised(node, view) {
            self.start(now, task, node, view, out);
        }
        let (mut after, mut declined) = (None, 0);
        while let Some(room) = self.free.of(node) {
            let admits = |task| self.admits(task, view);
            let Some(key) = self.waiting.first(node, room, after, admits) else {
                break;
            };
            let place = self.place(now, key.task, node, view, cost);
            match place {
                Some(place) => self.start(now, key.task, place, view, out),
                None => {
                    declined += 1;
                    if declined == MOST_DECLINES {
                        break;
                    }
                    after = Some(key);
                }
            }
        }
    }

    /// Returns a task that gets room of a node that was promised: who has the promise, or who comes before in the order.
    fn first_of_promised(&self, node: NodeId, view: &SchedulerView) -> Option<TaskId> {
        let promises = self.promises.get(&node)?;
        let free = view.node(node)?.free.less(self.taken_of(node));
        let key = |task| self.waiting.key(task);
        let fits = |first: Key, asks: TaskResources| {
            let before = |promise: &&Promise| key(promise.task).is_some_and(|key| key < first);
            let before = promises.iter().filter(before);
            let left = before.fold(free, |free, promise| free.less(promise.asks));
            left.covers(asks)
        };
        // Who is stored elsewhere may want to wait: it gets no room that was promised to another.
        let comes_here = |task: &super::TaskView| match task.state {
            TaskState::Stored => task.checkpoint.is_some_and(|kept| kept.node == node),
            _ => true,
        };
        let first = self
            .waiting
            .first(node, free, None, |task| self.admits(task, view))
            .filter(|first| {
                let task = view.task(first.task);
                task.is_some_and(|task| comes_here(task) && fits(*first, task.asks))
            });
        let mut promised: Vec<(Key, TaskResources)> = (promises.iter())
            .filter_map(|promise| Some((key(promise.task)?, promise.asks)))
            .collect();
        promised.sort_unstable_by_key(|(key, _)| *key);
        let promised = promised.into_iter().find(|(key, asks)| fits(*key, *asks));
        let first = match (first, promised.map(|(key, _)| key)) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        first.map(|key| key.task)
    }

    fn fill_task(
        &mut self,
        now: Moment,
        id: TaskId,
        view: &SchedulerView,
        cost: CostOfRoom<'_>,
        out: &mut Vec<Decision>,
    ) {
        if !self.waiting.contains(id) || !self.admits(id, view) {
            return;
        }
        let Some(task) = view.task(id) else { return };
        let room = match self.waiting.bound(id) {
            Some(node) => Some(node).filter(|node| {
                self.free
                    .of(*node)
                    .is_some_and(|room| room.covers(task.asks))
            }),
            None => self.free.first(task.asks, NodeId(0)),
        };
        match room.and_then(|room| self.place(now, id, room, view, cost)) {
            Some(place) => self.start(now, id, place, view, out),
            None if room.is_none() => self.lacking.push(id),
            None => {}
        }
    }

    /// Returns the node on which a task is to start or be resumed, `room` being one with room; none if it had better
    /// wait for another.
    fn place(
        &mut self,
        now: Moment,
        id: TaskId,
        room: NodeId,
        view: &SchedulerView,
        cost: CostOfRoom<'_>,
    ) -> Option<NodeId> {
        let task = view.task(id)?;
        if task.state != TaskState::Stored || self.waiting.bound(id).is_some() {
            return Some(room);
        }
        let checkpoint = task.checkpoint?;
        let place = self
            .resume
            .place(now, self, id, &checkpoint, room, view, cost);
        if let super::resume::Place::MakeRoom(node) = place {
            self.room_wanted.push((id, node));
        }
        place.now()
    }

    /// Returns false if the task would hold more than tasks of its kind may.
    fn admits(&self, id: TaskId, view: &SchedulerView) -> bool {
        let (Some((_, limit)), Some(task)) = (self.limit, view.task(id)) else {
            return true;
        };
        if task.priority > 0 {
            return true;
        }
        let taken = (self.started.iter())
            .filter_map(|id| view.task(*id))
            .filter(|task| task.priority == 0)
            .fold(TaskResources::ZERO, |sum, task| sum.plus(task.asks));
        let held = view.held_by_priority_0().plus(taken);
        // One that asks for more than all may have runs alone.
        held.is_none() || limit.covers(held.plus(task.asks))
    }

    fn start(
        &mut self,
        now: Moment,
        id: TaskId,
        node: NodeId,
        view: &SchedulerView,
        out: &mut Vec<Decision>,
    ) {
        let Some(task) = view.task(id) else { return };
        self.waiting.remove(id);
        self.withdraw(id);
        let (action, score) = match (task.state, task.checkpoint) {
            (TaskState::Stored, Some(checkpoint)) => {
                let score = self.resume.score(now, id, node, view);
                let from = checkpoint.node;
                (TaskAction::Restore { from }, score)
            }
            (TaskState::Suspended, _) => (TaskAction::Continue, None),
            _ => (TaskAction::Start, None),
        };
        let order = Score::Order(task.submitted.micros());
        let next = self.free.first(task.asks, NodeId(node.0 + 1));
        let runner_up = next.filter(|_| score.is_some()).and_then(|next| {
            Some(RunnerUp {
                task: id,
                action,
                score: self.resume.score(now, id, next, view)?,
            })
        });
        let taken = self.taken.entry(node).or_insert(TaskResources::ZERO);
        *taken = taken.plus(task.asks);
        self.started.push(id);
        self.touched.push(node);
        self.weigh(node, view);
        out.push(Decision {
            action,
            task: id,
            node,
            score: score.unwrap_or(order),
            runner_up,
            reason: DecisionReason::Room,
        });
    }
}
