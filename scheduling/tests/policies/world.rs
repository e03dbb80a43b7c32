//! A cluster in which decisions take effect after a time: just enough to test policies.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use permafrost_scheduling::cost::{NodeFigures, PreemptionMechanism, SwapFigures, TaskResources};
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::Figure;
use permafrost_scheduling::policy::{
    ClusterEvent, Decision, Leaves, Policy, SchedulerView, TaskAction, TaskCheckpoint, TaskState,
    TaskView,
};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};
use permafrost_scheduling::{NodeId, TaskId};

/// Bandwidth of the medium and of the network, bytes a second.
pub(crate) const MEDIUM: f64 = 100e6;

/// Something that will happen. The number tells attempts of a task apart.
#[derive(Clone, Debug, PartialEq)]
enum Next {
    Submit(TaskView),
    Runs(TaskId, u32),
    Ends(TaskId, u32),
    Gone(TaskId, u32, Leaves),
    Commit(TaskId, u32),
    Lose(NodeId),
    Tick,
}

/// A cluster, its policy, and what is going to happen.
pub(crate) struct World {
    pub view: SchedulerView,
    pub policy: Box<dyn Policy>,
    pub now: Moment,
    /// All decisions, with their times.
    pub log: Vec<(Moment, Decision)>,
    /// When each task ended.
    pub ended: BTreeMap<TaskId, Moment>,
    /// Work that was done by any attempt, and work that was lost, seconds.
    pub worked: f64,
    pub wasted: f64,
    heap: BinaryHeap<Reverse<(u64, u64, usize)>>,
    next: Vec<Next>,
    attempts: BTreeMap<TaskId, u32>,
    runs: BTreeSet<TaskId>,
    submitted: usize,
}

pub(crate) fn seconds(value: f64) -> Seconds {
    Seconds::new(value).expect("seconds")
}

pub(crate) fn at(value: f64) -> Moment {
    Moment::from_micros(0).after(seconds(value))
}

pub(crate) fn cpus(count: u64, mib: u64) -> TaskResources {
    TaskResources {
        cpu_millis: count * 1000,
        memory: Bytes::mib(mib),
    }
}

pub(crate) fn rate(bytes_per_s: f64) -> Figure<BytesPerSecond> {
    Figure::given(BytesPerSecond::new(bytes_per_s).expect("a rate"))
}

pub(crate) fn figures() -> NodeFigures {
    NodeFigures {
        write: SizedRates::uniform(rate(MEDIUM)),
        read: SizedRates::uniform(rate(MEDIUM)),
        write_queue: Figure::given(Bytes::ZERO),
        read_queue: Figure::given(Bytes::ZERO),
        ..NodeFigures::unknown(NodeId(0))
    }
}

impl World {
    /// Makes a cluster of equal nodes with swap for all of their memory.
    pub(crate) fn new(policy: Box<dyn Policy>, nodes: u32, capacity: TaskResources) -> Self {
        let mut view = SchedulerView::default();
        for _ in 0..nodes {
            let node = view.add_node(capacity, figures());
            let node = view.node_mut(node).expect("the node");
            node.link = rate(MEDIUM);
            node.swap = Some(SwapFigures {
                free_memory: Bytes::ZERO,
                free_swap: capacity.memory,
                write: rate(MEDIUM),
                read: rate(MEDIUM),
            });
        }
        let mut world = Self {
            view,
            policy,
            now: at(0.0),
            log: Vec::new(),
            ended: BTreeMap::new(),
            worked: 0.0,
            wasted: 0.0,
            heap: BinaryHeap::new(),
            next: Vec::new(),
            attempts: BTreeMap::new(),
            runs: BTreeSet::new(),
            submitted: 0,
        };
        if world.policy.period().is_some() {
            world.push(at(0.0), Next::Tick);
        }
        world
    }

    fn push(&mut self, when: Moment, next: Next) {
        let sequence = self.next.len();
        self.next.push(next);
        self.heap
            .push(Reverse((when.micros(), sequence as u64, sequence)));
    }

    /// Submits a task at its time of submission.
    pub(crate) fn submit(&mut self, task: TaskView) {
        self.submitted += 1;
        self.push(task.submitted, Next::Submit(task));
    }

    /// Gives a task other figures.
    pub(crate) fn replace(&mut self, id: TaskId, task: TaskView) {
        *self.view.task_mut(id).expect("a task") = task;
    }

    pub(crate) fn lose(&mut self, node: NodeId, when: Moment) {
        self.push(when, Next::Lose(node));
    }

    /// Lets things happen until all tasks have ended, or until `limit`.
    pub(crate) fn run(&mut self, limit: Moment) {
        while let Some(Reverse((micros, _, index))) = self.heap.peek().copied() {
            if micros > limit.micros() || self.ended.len() == self.submitted {
                break;
            }
            self.heap.pop();
            self.now = Moment::from_micros(micros);
            let next = self.next[index].clone();
            let events = self.happens(next);
            self.tell(events);
        }
    }

    fn tell(&mut self, events: Vec<ClusterEvent>) {
        let mut events = VecDeque::from(events);
        while let Some(event) = events.pop_front() {
            let decisions = self.policy.decide(self.now, event, &self.view);
            for decision in decisions {
                self.log.push((self.now, decision));
                events.extend(self.carry_out(&decision));
                self.check();
            }
        }
    }

    fn check(&self) {
        for (_, node) in self.view.nodes() {
            let held = node
                .tasks
                .iter()
                .map(|id| self.view.task(*id).expect("a task").holds);
            let held = held.fold(TaskResources::ZERO, TaskResources::plus);
            assert!(node.capacity.covers(held), "more is held than there is");
            assert_eq!(node.capacity.less(held), node.free);
        }
    }

    fn attempt(&mut self, task: TaskId) -> u32 {
        let attempt = self.attempts.entry(task).or_default();
        *attempt += 1;
        *attempt
    }

    fn is_last(&self, task: TaskId, attempt: u32) -> bool {
        self.attempts.get(&task) == Some(&attempt)
    }

    /// Counts the work of a task that has stopped running, and what it loses if it goes back to `kept`.
    fn stopped(&mut self, task: TaskId) {
        self.runs.remove(&task);
    }

    fn task(&self, id: TaskId) -> &TaskView {
        self.view.task(id).expect("a task")
    }

    fn happens(&mut self, next: Next) -> Vec<ClusterEvent> {
        let now = self.now;
        match next {
            Next::Submit(task) => {
                let id = self.view.submit(task).expect("a job");
                vec![ClusterEvent::Submitted(id)]
            }
            Next::Runs(id, attempt) if self.is_last(id, attempt) => {
                self.view.runs(id, now).expect("it was being started");
                assert!(self.runs.insert(id), "it runs twice");
                self.plan_end(id);
                vec![ClusterEvent::Running(id)]
            }
            Next::Ends(id, attempt) if self.is_last(id, attempt) => {
                let before = self.task(id).done;
                let node = self.view.ends(id, now).expect("it ran");
                self.worked += self.task(id).done.less(before).value();
                self.stopped(id);
                let attempt = self.attempt(id);
                if self.task(id).state == TaskState::Uncommitted {
                    self.push(now.after(seconds(1.0)), Next::Commit(id, attempt));
                } else {
                    assert!(self.ended.insert(id, now).is_none(), "it ended twice");
                }
                vec![ClusterEvent::Ended(id, node)]
            }
            Next::Gone(id, attempt, leaves) if self.is_last(id, attempt) => {
                let done = self.task(id).progress(now);
                let node = self.view.leaves(id, leaves, now).expect("it was leaving");
                self.wasted += done.less(self.task(id).done).value();
                vec![ClusterEvent::Left(id, node)]
            }
            Next::Commit(id, attempt) if self.is_last(id, attempt) => {
                // A node that was lost meanwhile took the output with it.
                if self.view.commits(id).is_err() {
                    return Vec::new();
                }
                assert!(self.ended.insert(id, now).is_none(), "it ended twice");
                vec![ClusterEvent::Committed(id)]
            }
            Next::Lose(node) => {
                let lost = |task: &TaskView| task.progress(now).value();
                let all = |world: &Self| -> Vec<f64> {
                    (0..world.view.tasks())
                        .map(|id| lost(world.task(TaskId(id))))
                        .collect()
                };
                let (before, done) = (all(self), self.running_work());
                let Ok(tasks) = self.view.lose(node, now) else {
                    return Vec::new();
                };
                for task in tasks {
                    self.attempt(task);
                    self.stopped(task);
                }
                self.worked += done - self.running_work();
                let after = all(self);
                self.wasted += before.iter().zip(after).map(|(b, a)| b - a).sum::<f64>();
                vec![ClusterEvent::NodeLost(node)]
            }
            Next::Tick => {
                let period = self.policy.period().expect("a period");
                self.push(now.after(period), Next::Tick);
                vec![ClusterEvent::Tick]
            }
            Next::Runs(..) | Next::Ends(..) | Next::Gone(..) | Next::Commit(..) => Vec::new(),
        }
    }

    /// Work since the last counting of all that run.
    fn running_work(&self) -> f64 {
        let work = |id: &TaskId| self.task(*id).progress(self.now).less(self.task(*id).done);
        self.runs.iter().map(|id| work(id).value()).sum()
    }

    fn plan_end(&mut self, id: TaskId) {
        let attempt = self.attempt(id);
        let task = self.task(id);
        let pace = task.pace().value().max(1e-6);
        let left = task.remaining(self.now).expect("work").value() / pace;
        self.push(self.now.after(seconds(left)), Next::Ends(id, attempt));
    }

    fn carry_out(&mut self, decision: &Decision) -> Vec<ClusterEvent> {
        let (id, now) = (decision.task, self.now);
        let after = |bytes: Bytes| now.after(seconds(0.1 + bytes.count() as f64 / MEDIUM));
        match decision.action {
            TaskAction::Start | TaskAction::Restore { .. } | TaskAction::Continue => {
                let read = match decision.action {
                    TaskAction::Restore { .. } => self
                        .task(id)
                        .checkpoint
                        .map_or(Bytes::ZERO, |kept| kept.bytes),
                    _ => Bytes::ZERO,
                };
                if self.view.begin(id, decision.node).is_ok() {
                    let attempt = self.attempt(id);
                    self.push(after(read), Next::Runs(id, attempt));
                }
                Vec::new()
            }
            TaskAction::Preempt(PreemptionMechanism::Wait) => Vec::new(),
            TaskAction::Preempt(mechanism) => {
                let before = self.task(id).done;
                let ends_another = matches!(
                    (mechanism, self.task(id).state),
                    (
                        PreemptionMechanism::Kill | PreemptionMechanism::Rollback,
                        TaskState::Leaving | TaskState::Suspended
                    )
                );
                if !ends_another && self.view.stops(id, now).is_err() {
                    return Vec::new();
                }
                if self.runs.contains(&id) {
                    self.worked += self.task(id).done.less(before).value();
                    self.stopped(id);
                }
                let attempt = self.attempt(id);
                let task = self.task(id);
                let kept = TaskCheckpoint {
                    node: decision.node,
                    bytes: task.memory,
                    done: task.done,
                };
                let (when, leaves) = match mechanism {
                    PreemptionMechanism::SuspendInMemory => (after(Bytes::ZERO), Leaves::InMemory),
                    PreemptionMechanism::Checkpoint { .. } => {
                        (after(task.memory), Leaves::Checkpoint(kept))
                    }
                    PreemptionMechanism::Rollback => (after(Bytes::ZERO), Leaves::LastCheckpoint),
                    _ => (after(Bytes::ZERO), Leaves::Nothing),
                };
                self.push(when, Next::Gone(id, attempt, leaves));
                Vec::new()
            }
            TaskAction::Resize(to) => {
                let before = self.task(id).done;
                match self.view.resize(id, to, now) {
                    Ok(()) => {
                        self.worked += self.task(id).done.less(before).value();
                        self.plan_end(id);
                        vec![ClusterEvent::Resized(id)]
                    }
                    Err(_) => Vec::new(),
                }
            }
        }
    }
}
