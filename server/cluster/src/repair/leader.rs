//! The leader's part: finds the copies that the cluster lacks, and assigns the work.
//!
//! One thread plans; one more for each node with work sends it one step after the other, so that all nodes work
//! in parallel and each on one step. A leader that loses its lease stops before its next step; the step that a
//! node was given goes on there, and the next leader finds it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use permafrost_clustered::Registry;
use permafrost_metering::copying::{RepairProgress, RepairStep};

use super::planner::{Job, Planned, Planner};
use super::steps::{Peers, Steps, Undone, View};
use super::thread::{Stop, Worker};
use super::timing::Timing;
use crate::{MemberState, NodesView};

/// Interval at which the leader checks if a round is due.
const TICK: Duration = Duration::from_millis(500);

/// Longest time that a stopping leader waits for the steps under way.
const LAST_STEPS: Duration = Duration::from_secs(3);

/// Repairs the cluster while this node leads it.
pub struct Leading {
    steps: Arc<Steps>,
    timing: Timing,
    queues: Arc<Queues>,
}

/// Steps that the leader has given to nodes, for those who look at them.
#[derive(Clone)]
pub struct RepairBoard(Arc<Queues>);

impl RepairBoard {
    /// Returns the steps that run, then those that wait, `most` in all; and how many wait. All empty on a node that does
    /// not lead.
    #[must_use]
    pub fn look(&self, most: usize) -> (Vec<RepairStep>, usize) {
        let state = self.0.lock();
        let running = state.running.values().map(|job| job.told(true));
        let waiting = state.waiting.values().flatten().map(|job| job.told(false));
        let count = state.waiting.values().map(VecDeque::len).sum();
        (running.chain(waiting).take(most).collect(), count)
    }
}

/// Compact state of the view, to detect changes: the nodes and their membership status. Free space changes all
/// the time and is left out.
type Signature = Vec<(String, MemberState, u64)>;

/// State between two rounds.
#[derive(Default)]
struct Last {
    looked: Option<Instant>,
    signature: Signature,
    is_busy: bool,
}

impl Leading {
    /// Creates the leader over the registry and the other nodes, this one included; counts in `progress`.
    #[must_use]
    pub fn new(
        registry: Arc<dyn Registry>,
        peers: Arc<dyn Peers>,
        view: Arc<dyn View>,
        timing: Timing,
        progress: Arc<RepairProgress>,
    ) -> Self {
        Self {
            steps: Arc::new(Steps {
                registry,
                peers,
                view,
                progress,
            }),
            timing,
            queues: Arc::default(),
        }
    }

    /// Returns a view of the steps, which lives as long as this leader.
    #[must_use]
    pub fn board(&self) -> RepairBoard {
        RepairBoard(Arc::clone(&self.queues))
    }

    /// Starts the leader on a thread of its own.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn start(self) -> std::io::Result<Worker> {
        let stop = Stop::default();
        Worker::start("repair", stop.clone(), move || self.run(&stop))
    }

    fn run(&self, stop: &Stop) {
        let began = Instant::now();
        let mut planner = Planner::new(self.timing);
        let mut last = Last::default();
        while !stop.after(TICK) {
            if !self.steps.view.leads() {
                // The new leader does not know how long nodes have been gone; nor does this node when it leads again.
                planner = Planner::new(self.timing);
                last = Last::default();
                self.queues.forget_waiting();
                self.steps.progress.quiet();
                continue;
            }
            let now = began.elapsed();
            let ended = self.queues.take_ended();
            last.is_busy |= !ended.is_empty();
            for (job, end) in ended {
                let node_failed = end.as_ref().is_err_and(Undone::is_nodes_fault);
                planner.ended(now, &job, end.is_ok(), node_failed);
            }
            if self.is_due(&mut last) {
                self.look(now, &mut planner, &mut last);
            }
            RepairProgress::set(
                &self.steps.progress.under_way,
                self.queues.under_way().len(),
            );
        }
        self.queues.stop();
        self.steps.progress.quiet();
    }

    /// Returns true if a round is due, and the nodes are known.
    fn is_due(&self, last: &mut Last) -> bool {
        let view = self.steps.view.nodes();
        if view.age > self.timing.freshness || view.nodes.is_empty() {
            return false;
        }
        let signature = signature(&view);
        if signature != last.signature {
            last.signature = signature;
            last.is_busy = true;
        }
        let pause = if last.is_busy {
            self.timing.busy
        } else {
            self.timing.idle
        };
        last.looked.is_none_or(|looked| looked.elapsed() >= pause)
    }

    fn look(&self, now: Duration, planner: &mut Planner, last: &mut Last) {
        last.looked = Some(Instant::now());
        // Before the list is read: a step that ends in between still counts as under way, and is not planned twice.
        let under_way = self.queues.under_way();
        let entries = match self.steps.registry.list("") {
            Ok(entries) => entries,
            Err(error) => {
                tracing::warn!(event = "repair-registry-unreadable", %error, "nothing repaired: the registry cannot be read");
                return;
            }
        };
        let view = self.steps.view.nodes();
        if view.age > self.timing.freshness {
            return;
        }
        let planned = planner.plan(now, &entries, &view, &under_way);
        let progress = &self.steps.progress;
        RepairProgress::add(&progress.rounds, 1);
        RepairProgress::set(&progress.under_replicated, planned.under_replicated);
        RepairProgress::set(&progress.stranded, planned.stranded);
        RepairProgress::set(&progress.damaged, planned.damaged);
        let Planned { jobs, is_busy, .. } = planned;
        last.is_busy = is_busy || !under_way.is_empty();
        for job in jobs {
            Queues::push(&self.queues, &self.steps, job);
        }
    }
}

fn signature(view: &NodesView) -> Signature {
    let members = view.members.iter().map(|member| {
        let live = view
            .nodes
            .iter()
            .find(|node| node.facts.name == member.name);
        let token = live.map_or(0, |node| node.token);
        (member.name.clone(), member.state, token)
    });
    members.collect()
}

/// Steps that nodes are to take, and their results.
#[derive(Default)]
pub(super) struct Queues {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Steps by node; an entry exists as long as the node's thread.
    waiting: HashMap<String, VecDeque<Job>>,
    /// The step that each node is taking.
    running: HashMap<String, Job>,
    /// Checkpoints with steps under way or waiting, and the number of such steps.
    under_way: HashMap<String, usize>,
    ended: Vec<(Job, Result<(), Undone>)>,
    stopped: bool,
}

impl Queues {
    /// Queues a step after those that its node already has.
    fn push(queues: &Arc<Self>, steps: &Arc<Steps>, job: Job) {
        let mut state = queues.lock();
        if state.stopped {
            return;
        }
        *state
            .under_way
            .entry(job.checkpoint.id.clone())
            .or_default() += 1;
        let node = job.node.clone();
        if let Some(waiting) = state.waiting.get_mut(&node) {
            return waiting.push_back(job);
        }
        state.waiting.insert(node.clone(), VecDeque::from([job]));
        drop(state);
        let (own, steps, of) = (Arc::clone(queues), Arc::clone(steps), node.clone());
        let thread = std::thread::Builder::new().name("repair-node".to_owned());
        if let Err(error) = thread.spawn(move || own.work(&steps, &of)) {
            tracing::error!(event = "repair-node-failed", %error, "nothing repaired on {node}");
            queues.lock().give_up(&node);
        }
    }

    /// Takes the steps of one node until there are none.
    fn work(&self, steps: &Steps, node: &str) {
        loop {
            let mut state = self.lock();
            let Some(job) = state.waiting.get_mut(node).and_then(VecDeque::pop_front) else {
                state.waiting.remove(node);
                drop(state);
                self.changed.notify_all();
                return;
            };
            state.running.insert(node.to_owned(), job.clone());
            drop(state);
            let end = steps.take(&job);
            let mut state = self.lock();
            state.running.remove(node);
            state.forget(&job.checkpoint.id);
            // A step that failed because of its node would fail again; the node's other steps are dropped, and
            // planned anew.
            if end.as_ref().is_err_and(Undone::is_nodes_fault) {
                state.give_up_waiting(node);
            }
            state.ended.push((job, end));
        }
    }

    fn take_ended(&self) -> Vec<(Job, Result<(), Undone>)> {
        std::mem::take(&mut self.lock().ended)
    }

    /// Returns the checkpoints with steps under way or waiting.
    fn under_way(&self) -> HashSet<String> {
        self.lock().under_way.keys().cloned().collect()
    }

    fn forget_waiting(&self) {
        let mut state = self.lock();
        let nodes: Vec<_> = state.waiting.keys().cloned().collect();
        for node in nodes {
            state.give_up_waiting(&node);
        }
        state.ended.clear();
    }

    /// Starts no more steps, and waits a moment for those under way.
    fn stop(&self) {
        self.forget_waiting();
        let mut state = self.lock();
        state.stopped = true;
        let working = |state: &mut State| !state.waiting.is_empty();
        self.changed.wait_while_for(&mut state, working, LAST_STEPS);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    fn forget(&mut self, id: &str) {
        if let Some(count) = self.under_way.get_mut(id) {
            *count -= 1;
            if *count == 0 {
                self.under_way.remove(id);
            }
        }
    }

    fn give_up_waiting(&mut self, node: &str) {
        let waiting = self.waiting.get_mut(node).map(std::mem::take);
        for job in waiting.into_iter().flatten() {
            self.forget(&job.checkpoint.id);
        }
    }

    fn give_up(&mut self, node: &str) {
        self.give_up_waiting(node);
        self.waiting.remove(node);
    }
}
