//! Engine: a heap of events by (time, sequence), the cluster as a [`SchedulerView`], and a policy that is told of each event.
//!
//! A task on a node is in one of three phases: it is *starting* (its start, its restore or its way out of swap), it
//! *runs*, or it is *leaving* (it waits for its dump, or is dumped). It holds its processors in all of them. So the
//! processor time that is held is that of work that counts, of work that was undone, of starting and of leaving:
//! [`Outcome`] is refused if the four do not add up to what was held.

mod account;
mod actions;
mod flow;
mod happen;
mod outcome;
mod transfers;

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use permafrost_scheduling::cost::{SwapFigures, TaskResources};
use permafrost_scheduling::estimator::{Estimator, EstimatorConfig, SizedRates};
use permafrost_scheduling::figure::Figure;
use permafrost_scheduling::place::NodeClass;
use permafrost_scheduling::policy::{ClusterEvent, Policy, SchedulerView, TaskState};
use permafrost_scheduling::quantity::{Bytes, Moment, Ratio, Seconds};
use permafrost_scheduling::queue::QueueTicket;
use permafrost_scheduling::sensitivity::Power;
use permafrost_scheduling::{NodeId, TaskId};
use thiserror::Error;

use crate::medium::StorageMedium;
use crate::workload::{NodeChange, NodeSpec, TaskSpec, Workload};
use account::Accounts;
pub use account::{Counts, ProcessorTime};
use flow::Links;
pub use flow::TaskOutput;
pub use outcome::{BandOutcome, Decided, Outcome, Run};
use transfers::Transfers;

/// Configuration of a run, besides its workload and its policy.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Medium of each node for checkpoints, and for swap where nodes have it.
    pub medium: StorageMedium,
    /// Power that a node draws.
    pub power: Power,
    /// Time that a task takes to start from the beginning before it works.
    pub start: Seconds,
    /// Number of transfers in one direction that a node runs at once. 1: the paper's.
    pub at_once: usize,
    /// Place of the outputs of tasks of a dataflow.
    pub outputs: TaskOutput,
    /// True if the invariants are checked after every event, which takes long: for tests.
    pub check: bool,
}

impl EngineConfig {
    /// Makes the configuration of paper 000 with a medium. The paper names no wattage; a node draws 100 W idle and
    /// 200 W busy, as much while it transfers.
    #[must_use]
    pub fn with(medium: StorageMedium) -> Self {
        Self {
            medium,
            power: Power {
                idle_w: 100.0,
                busy_w: 200.0,
                checkpointing: Ratio::ONE,
            },
            start: Seconds::ZERO,
            at_once: 1,
            outputs: TaskOutput::Pushed,
            check: false,
        }
    }
}

/// A run that has no outcome.
#[derive(Debug, Error)]
pub enum SimulationError {
    /// Nothing happens any more, and tasks wait.
    #[error(
        "{waiting} of {tasks} tasks are left at {at_s} s, and the policy {policy} starts none of them{}",
        .refused.as_ref().map_or(String::new(), |last| format!("; its last refused decision: {last}"))
    )]
    Stalled {
        /// Name of the policy.
        policy: String,
        /// Tasks that have not ended.
        waiting: u64,
        /// Tasks that were submitted.
        tasks: u64,
        /// Time of the last event, seconds.
        at_s: f64,
        /// Reason why the last refused decision was refused.
        refused: Option<String>,
    },
    /// Tasks still run long after all of them would have ended one after the other.
    #[error(
        "{waiting} of {tasks} tasks are left at {at_s} s, when all would have ended one after the other ten times over: \
         under the policy {policy} they undo each other's work"
    )]
    Unending {
        /// Name of the policy.
        policy: String,
        /// Tasks that have not ended.
        waiting: u64,
        /// Tasks that were submitted.
        tasks: u64,
        /// Time of the last event, seconds.
        at_s: f64,
    },
    /// The policy decides without end at one time.
    #[error("the policy {policy} makes more than {limit} decisions at {at_s} s")]
    Endless {
        /// Name of the policy.
        policy: String,
        /// Most decisions at one time.
        limit: u64,
        /// Time of the decisions, seconds.
        at_s: f64,
    },
    /// An invariant of the simulator does not hold: an error of it.
    #[error("at {at_s} s: {what}")]
    Broken {
        /// Time of the event, seconds.
        at_s: f64,
        /// Invariant that does not hold.
        what: String,
    },
}

/// Most decisions at one time: more than any policy makes for 600,000 tasks that come at once.
const DECISIONS_AT_ONCE: u64 = 10_000_000;

/// Ticks in a row without any effect or other event after which nothing is expected to happen any more.
const IDLE_TICKS: u32 = 10_000;

/// Something that is going to happen.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// The job with this index is submitted.
    Submits(usize),
    /// The task has started, is restored or is back from swap.
    Starts(TaskId, u32),
    /// The task has done its work.
    Ends(TaskId, u32),
    /// The memory of the task is paged out or in: it holds these resources now.
    Resizes(TaskId, u32, TaskResources),
    /// The rounds of a pre-copied dump are over: the task is frozen.
    Freezes(TaskId, u32, Seconds),
    /// The output of the task is safe.
    Commits(TaskId, u32),
    /// The task is dumped or paged out.
    HasLeft(TaskId, u32),
    /// The nodes change.
    Changes(usize),
    /// Nodes report the progress of their queues.
    Heartbeat,
    /// The period of the policy is over.
    Tick,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    at: Moment,
    sequence: u64,
    kind: Kind,
}

impl Entry {
    const fn key(&self) -> (Moment, u64) {
        (self.at, self.sequence)
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

/// Purpose for which a task holds its processors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Away,
    Starting,
    Running,
    Leaving,
}

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Dump,
    Restore,
}

/// A task, beyond what the view has of it.
#[derive(Clone, Copy, Debug, Default)]
struct TaskRun {
    job: usize,
    /// Number of the changes that made scheduled events void.
    attempt: u32,
    /// Number of the changes of its size that made scheduled ones void.
    resizes: u32,
    /// Memory that is being paged out of it.
    paging: Option<Paging>,
    phase: Phase,
    /// Node that it is on, or was last.
    node: NodeId,
    cpu_millis: u64,
    since: Moment,
    /// Processor time of the work that counts so far.
    fresh: ProcessorTime,
    /// Processor time of the work in its checkpoint.
    kept: ProcessorTime,
    /// Bytes of its checkpoints.
    stored: Bytes,
    transfer: Option<Transferring>,
}

impl TaskRun {
    /// Returns the processor time since the last account.
    const fn held(&self, now: Moment) -> ProcessorTime {
        ProcessorTime::of(self.cpu_millis, self.since, now)
    }
}

/// Memory of a task that shrinks.
#[derive(Clone, Copy, Debug)]
struct Paging {
    since: Moment,
    takes: Seconds,
    from: Bytes,
    to: Bytes,
}

/// The place of a task in a queue.
#[derive(Clone, Copy, Debug)]
struct Transferring {
    node: NodeId,
    way: Way,
    ticket: QueueTicket,
    /// Mechanism of a dump, or source of a restore.
    what: What,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Dump(permafrost_scheduling::cost::Dump),
    From(NodeId),
}

/// A job, as far as it has come.
#[derive(Clone, Copy, Debug, Default)]
struct JobRun {
    stage: usize,
    /// Tasks of the stage that have not ended.
    left: usize,
    started: Option<Moment>,
    ended: Option<Moment>,
    /// Tasks that were killed.
    kills: u64,
    /// Some task of it fits no node.
    misfit: bool,
}

/// A node, beyond what the view has of it.
#[derive(Debug)]
struct NodeRun {
    capacity: TaskResources,
    dumps: Transfers,
    restores: Transfers,
    /// Bytes of each task that is suspended there, and how many of them are in swap.
    suspended: BTreeMap<TaskId, (Bytes, Bytes)>,
}

/// A simulation of one workload under one policy.
struct Simulation<'a> {
    workload: &'a Workload,
    config: &'a EngineConfig,
    policy: &'a mut dyn Policy,
    view: SchedulerView,
    now: Moment,
    heap: BinaryHeap<Reverse<Entry>>,
    sequence: u64,
    events: VecDeque<ClusterEvent>,
    tasks: Vec<TaskRun>,
    jobs: Vec<JobRun>,
    nodes: Vec<NodeRun>,
    link: SizedRates,
    estimator: Estimator,
    accounts: Accounts,
    decided: Decided,
    /// Jobs that have not ended.
    jobs_left: usize,
    ended: u64,
    /// Tasks of dataflows that were to run again when nobody needed them any more.
    dropped: u64,
    /// Tasks that were started from the beginning, each time counted.
    started: u64,
    links: Links,
    heartbeat_set: bool,
    last_refused: Option<String>,
    last_end: Moment,
}

/// Runs a workload under a policy until all its jobs have ended. `progress` has the number of ended tasks meanwhile.
///
/// # Errors
///
/// [`SimulationError`]; the message says what the policy did not do.
pub fn run(
    workload: &Workload,
    policy: &mut dyn Policy,
    config: &EngineConfig,
    progress: Option<&AtomicU64>,
) -> Result<Run, SimulationError> {
    let mut simulation = Simulation::new(workload, policy, config);
    simulation.replay(progress)?;
    simulation.outcome()
}

impl<'a> Simulation<'a> {
    fn new(workload: &'a Workload, policy: &'a mut dyn Policy, config: &'a EngineConfig) -> Self {
        let mut simulation = Self {
            workload,
            config,
            policy,
            view: SchedulerView::default(),
            now: Moment::default(),
            heap: BinaryHeap::new(),
            sequence: 0,
            events: VecDeque::new(),
            tasks: Vec::new(),
            jobs: vec![JobRun::default(); workload.jobs.len()],
            nodes: Vec::new(),
            link: SizedRates::uniform(Figure::given(workload.network)),
            estimator: Estimator::new(EstimatorConfig::default()),
            accounts: Accounts::default(),
            decided: Decided::default(),
            jobs_left: workload.jobs.len(),
            ended: 0,
            dropped: 0,
            started: 0,
            links: Links::default(),
            heartbeat_set: false,
            last_refused: None,
            last_end: Moment::default(),
        };
        for node in &workload.nodes {
            simulation.join(node);
        }
        for (index, job) in workload.jobs.iter().enumerate() {
            simulation.schedule(job.submitted, Kind::Submits(index));
        }
        for (index, (at, _)) in workload.changes.iter().enumerate() {
            simulation.schedule(*at, Kind::Changes(index));
        }
        if let Some(period) = simulation.policy.period() {
            simulation.schedule(simulation.now.after(period), Kind::Tick);
        }
        simulation
    }

    fn schedule(&mut self, at: Moment, kind: Kind) {
        let sequence = self.sequence;
        self.sequence += 1;
        self.heap.push(Reverse(Entry { at, sequence, kind }));
    }

    fn seconds(&self) -> f64 {
        self.now.micros() as f64 / 1e6
    }

    /// Returns the time by which all tasks have ended under any policy that gets on with them: ten times that of all
    /// tasks one after the other, each dumped and restored once, and ten hours.
    fn latest(&self) -> Moment {
        let last = self
            .workload
            .jobs
            .last()
            .map_or(Moment::default(), |job| job.submitted);
        let medium = &self.config.medium;
        let alone = |task: &TaskSpec| {
            let transfer = medium.time_of(task.memory);
            task.work.plus(transfer).plus(transfer)
        };
        let work: Seconds = self.workload.tasks().map(alone).sum();
        let margin = Ratio::clamped(10.0);
        last.after(work.plus(Seconds::clamped(3600.0)).times(margin))
    }

    fn replay(&mut self, progress: Option<&AtomicU64>) -> Result<(), SimulationError> {
        let latest = self.latest();
        let (mut idle_ticks, mut at_once) = (0, 0);
        while self.jobs_left > 0 {
            let Some(Reverse(entry)) = self.heap.pop() else {
                return Err(self.stalled());
            };
            if entry.at > self.now {
                at_once = 0;
            }
            self.now = entry.at;
            if self.now > latest {
                return Err(SimulationError::Unending {
                    policy: self.policy.name().to_owned(),
                    waiting: self.tasks.len() as u64 - self.ended,
                    tasks: self.tasks.len() as u64,
                    at_s: self.seconds(),
                });
            }
            let before = self.accounts.decisions - self.accounts.refused;
            self.happens(entry.kind)?;
            at_once += self.tell();
            if at_once > DECISIONS_AT_ONCE {
                return Err(SimulationError::Endless {
                    policy: self.policy.name().to_owned(),
                    limit: DECISIONS_AT_ONCE,
                    at_s: self.seconds(),
                });
            }
            let effects = self.accounts.decisions - self.accounts.refused - before;
            let only_ticks = matches!(entry.kind, Kind::Tick) && self.heap.len() <= 1;
            idle_ticks = if only_ticks && effects == 0 {
                idle_ticks + 1
            } else {
                0
            };
            if idle_ticks > IDLE_TICKS {
                return Err(self.stalled());
            }
            if self.config.check {
                self.check()?;
            }
            if let Some(progress) = progress {
                progress.store(self.ended, std::sync::atomic::Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Tells the policy what has happened, and carries out its decisions; returns their number.
    fn tell(&mut self) -> u64 {
        let mut decisions = 0;
        while let Some(event) = self.events.pop_front() {
            let began = Instant::now();
            let decided = self.policy.decide(self.now, event, &self.view);
            self.decided.record(began.elapsed());
            for decision in decided {
                decisions += 1;
                self.accounts.decisions += 1;
                if let Err(refused) = self.carry_out(&decision) {
                    self.accounts.refused += 1;
                    self.last_refused = Some(format!("{}: {refused}", decision.action));
                }
            }
            if decisions > DECISIONS_AT_ONCE {
                break;
            }
        }
        decisions
    }

    fn stalled(&self) -> SimulationError {
        SimulationError::Stalled {
            policy: self.policy.name().to_owned(),
            waiting: self.tasks.len() as u64 - self.ended,
            tasks: self.tasks.len() as u64,
            at_s: self.seconds(),
            refused: self.last_refused.clone(),
        }
    }

    /// Adds a node to the cluster.
    fn join(&mut self, spec: &NodeSpec) -> NodeId {
        let figures = self.config.medium.figures(NodeId(0));
        let id = self.view.add_node(spec.capacity, figures);
        let swap = (spec.swap > Bytes::ZERO).then(|| SwapFigures {
            free_memory: spec.capacity.memory,
            free_swap: spec.swap,
            write: Figure::given(self.config.medium.storage.write),
            read: Figure::given(self.config.medium.storage.read),
        });
        if let Some(node) = self.view.node_mut(id) {
            node.swap = swap;
            node.link = Figure::given(self.workload.network);
            node.class = spec.class;
            node.rack = spec.rack;
        }
        self.nodes.push(NodeRun {
            capacity: spec.capacity,
            dumps: Transfers::new(self.config.at_once),
            restores: Transfers::new(self.config.at_once),
            suspended: BTreeMap::new(),
        });
        self.probe(id);
        self.events.push_back(ClusterEvent::NodeChanged(id));
        id
    }

    /// Returns true if some node, now or later, is large enough.
    fn fits_some_node(&self, asks: TaskResources) -> bool {
        let later = self
            .workload
            .changes
            .iter()
            .filter_map(|(_, change)| match change {
                NodeChange::Joined(spec) => Some(spec.capacity),
                NodeChange::Lost(_) => None,
            });
        let all = self.workload.nodes.iter().map(|node| node.capacity);
        all.chain(later).any(|capacity| capacity.covers(asks))
    }

    fn task(&mut self, id: TaskId) -> Option<&mut TaskRun> {
        self.tasks.get_mut(usize::try_from(id.0).ok()?)
    }

    fn node(&mut self, id: NodeId) -> Option<&mut NodeRun> {
        self.nodes.get_mut(usize::try_from(id.0).ok()?)
    }

    /// Accounts for what a task held until now, and puts it into another phase.
    fn enter(&mut self, id: TaskId, phase: Phase) {
        let now = self.now;
        let (holds, on) = match self.view.task(id) {
            Some(task) => (task.holds.cpu_millis, task.node),
            None => (0, None),
        };
        let Some(task) = self.task(id) else {
            return;
        };
        let (held, before, was_on) = (task.held(now), task.phase, task.node);
        if before == Phase::Running {
            task.fresh.add(held);
        }
        (task.phase, task.since) = (phase, now);
        if phase != Phase::Running {
            task.resizes += 1;
            task.paging = None;
        }
        task.cpu_millis = if phase == Phase::Away { 0 } else { holds };
        task.node = on.unwrap_or(was_on);
        let share = self.share(was_on, held);
        let accounts = &mut self.accounts;
        accounts.held.add(held);
        match before {
            Phase::Away => {}
            Phase::Running => accounts.computing_s += share,
            Phase::Starting => accounts.starting.add(held),
            Phase::Leaving => accounts.leaving.add(held),
        }
    }

    /// Returns the seconds of the whole node that some processor time is.
    fn share(&self, node: NodeId, held: ProcessorTime) -> f64 {
        let at = usize::try_from(node.0).ok();
        let node = at.and_then(|at| self.nodes.get(at));
        let cpus = node.map_or(0, |node| node.capacity.cpu_millis);
        held.core_seconds() * 1e3 / (cpus.max(1) as f64)
    }

    /// Checks that no node has more than it can have, and that what tasks hold is what nodes miss.
    fn check(&self) -> Result<(), SimulationError> {
        let broken = |what: String| {
            Err(SimulationError::Broken {
                at_s: self.seconds(),
                what,
            })
        };
        let mut held = vec![TaskResources::ZERO; self.nodes.len()];
        for index in 0..self.view.tasks() {
            let (Some(task), Some(run)) = (
                self.view.task(TaskId(index)),
                self.tasks.get(usize::try_from(index).unwrap_or(usize::MAX)),
            ) else {
                return broken(format!("task {index} is lost"));
            };
            let phase = match task.state {
                TaskState::Starting => Phase::Starting,
                TaskState::Running => Phase::Running,
                TaskState::Leaving => Phase::Leaving,
                _ => Phase::Away,
            };
            if phase != run.phase {
                return broken(format!("task {index} is {:?}, not {phase:?}", run.phase));
            }
            if phase == Phase::Away {
                if !task.holds.is_none() {
                    return broken(format!("task {index} holds resources of no node"));
                }
                continue;
            }
            let node = task.node.and_then(|node| usize::try_from(node.0).ok());
            match node.and_then(|node| held.get_mut(node)) {
                Some(held) => *held = held.plus(task.holds),
                None => return broken(format!("task {index} runs on no node")),
            }
        }
        for (((id, node), run), held) in self.view.nodes().zip(&self.nodes).zip(held) {
            if !run.capacity.covers(held) || node.free.plus(held) != node.capacity {
                return broken(format!("node {} has more than it can have", id.0));
            }
            if node.class == NodeClass::Reserved
                && node.capacity.is_none() != run.capacity.is_none()
            {
                return broken(format!("node {} is lost in one place only", id.0));
            }
        }
        Ok(())
    }
}
