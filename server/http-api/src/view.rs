//! A request as a cluster that policies decide over, and their decisions in the words of the request.

use std::collections::{BTreeMap, HashMap};

use permafrost_api_types::cost::ReplyDetail;
use permafrost_api_types::policy::{self as said, SecondChoice};
use permafrost_api_types::preempt::{Total, Undecided};
use permafrost_api_types::problem::ProblemKind;
use permafrost_api_types::quantity::Seconds;
use permafrost_api_types::task::Task as Described;
use permafrost_api_types::text::Text;
use permafrost_scheduling::cost::{Copies, PreemptionMechanism, TaskResources};
use permafrost_scheduling::figure::{Figure, What};
use permafrost_scheduling::policy::{
    ClusterEvent, Decision, DecisionReason, Name, PolicySettings, RequiredFigure, SchedulerView,
    Score, TaskAction, TaskCheckpoint, TaskView,
};
use permafrost_scheduling::preempt::{Candidate, Terms, cost_of, dumped, freed};
use permafrost_scheduling::quantity::{Bytes, Moment};
use permafrost_scheduling::size::JobId;
use permafrost_scheduling::{NodeId, TaskId};

use crate::body::Asked;
use crate::nodes::Nodes;
use crate::problem::RequestProblem;
use crate::{say, tasks};

/// Time of a view. Late enough for the past of every task: 35 years after the origin.
const NOW: Moment = Moment::from_micros(1 << 50);

/// Returns the policy that a request names.
///
/// # Errors
/// A problem about the field, with the names that there are.
pub(super) fn named(policy: Option<&Text<'_>>) -> Result<Option<Name>, RequestProblem> {
    let parsed = policy.map(|name| name.as_str().parse::<Name>()).transpose();
    parsed
        .map_err(|unknown| RequestProblem::at(ProblemKind::Invalid, "/policy", unknown.to_string()))
}

/// Returns the settings of a policy: what it draws follows from the `seed`, or from the clock.
pub(super) fn settings(seed: Option<u64>, terms: Terms) -> PolicySettings {
    let clock = || {
        let now = std::time::SystemTime::now();
        let since = now.duration_since(std::time::UNIX_EPOCH);
        since.map_or(0, |since| u64::from(since.subsec_nanos()) ^ since.as_secs())
    };
    PolicySettings {
        seed: seed.unwrap_or_else(clock),
        terms,
        ..PolicySettings::default()
    }
}

/// Tasks and nodes of a request.
pub(super) struct Cluster<'a> {
    pub(super) asked: &'a Asked<'a>,
    pub(super) nodes: &'a Nodes<'a>,
    /// Tasks that run: their figures, the number of each being its place in `described`.
    pub(super) running: &'a [Candidate],
    pub(super) described: &'a [Described<'a>],
    /// Field of the request that has them.
    pub(super) pointer: &'static str,
}

/// A cluster that policies decide over.
pub(super) struct Seen<'a> {
    of: &'a Cluster<'a>,
    pub(super) view: SchedulerView,
    /// The request's nodes, by the numbers of the view.
    nodes: Vec<NodeId>,
    /// The view's nodes, by the numbers of the request.
    numbers: HashMap<NodeId, NodeId>,
    /// Names of the tasks; for those that run, their figures.
    tasks: Vec<(&'a str, Option<&'a Candidate>)>,
}

impl<'a> Cluster<'a> {
    /// Checks that all is known that the policy goes by.
    fn check(
        &self,
        policy: Name,
        deadlines: &HashMap<&str, Seconds>,
    ) -> Result<(), RequestProblem> {
        for candidate in self.running {
            let Some((index, described)) = self.described(candidate) else {
                continue;
            };
            let task = &candidate.task;
            let memory = task.full.known().is_ok() || task.resident.known().is_ok();
            let swap = self.nodes.swap(candidate.node).is_some();
            let job = group(described);
            let deadline = match job {
                Some(job) => deadlines.get(job).copied(),
                None => described.deadline_s,
            };
            let is_missing = |figure: &RequiredFigure| match figure {
                RequiredFigure::Job => job.is_none(),
                RequiredFigure::Deadline => deadline.is_none(),
                RequiredFigure::Remaining => task.remaining.known().is_err(),
                RequiredFigure::Progress => task.progress.known().is_err(),
                RequiredFigure::Memory => !memory,
                RequiredFigure::Swap => !swap,
            };
            match policy.required().find(is_missing) {
                None => {}
                Some(RequiredFigure::Swap) => {
                    let node = self.nodes.name(candidate.node);
                    let detail = format!(
                        "the policy {policy} goes by the swap of {node}, and it is not given"
                    );
                    return Err(RequestProblem::at(ProblemKind::Invalid, "/swaps", detail));
                }
                Some(figure) => {
                    let pointer = format!("{}/{index}/{}", self.pointer, figure.field());
                    let detail = format!("the policy {policy} goes by it, and it is not known");
                    return Err(RequestProblem::at(ProblemKind::Invalid, pointer, detail));
                }
            }
        }
        Ok(())
    }

    fn described(&self, candidate: &Candidate) -> Option<(usize, &'a Described<'a>)> {
        let index = usize::try_from(candidate.task.id.0).ok()?;
        Some((index, self.described.get(index)?))
    }

    /// Returns the deadlines of all jobs.
    fn deadlines(&self) -> Result<HashMap<&'a str, Seconds>, RequestProblem> {
        let mut deadlines = HashMap::new();
        for (index, task) in self.described.iter().enumerate() {
            let (Some(group), Some(deadline)) = (group(task), task.deadline_s) else {
                continue;
            };
            if *deadlines.entry(group).or_insert(deadline) != deadline {
                let pointer = format!("{}/{index}/deadline_s", self.pointer);
                let detail = format!("another task of {group} has another deadline");
                return Err(RequestProblem::at(ProblemKind::Invalid, pointer, detail));
            }
        }
        Ok(deadlines)
    }

    /// Builds the view: nodes in the order of the figures that are given, then as tasks name them; tasks and jobs in
    /// the order of the request. Figures of a task replace what would follow from the view.
    ///
    /// # Errors
    /// A problem about a field that the policy goes by, or a deadline that two tasks of a job do not share.
    pub(super) fn seen(&'a self, policy: Name) -> Result<Seen<'a>, RequestProblem> {
        let deadlines = self.deadlines()?;
        self.check(policy, &deadlines)?;
        let mut seen = Seen {
            of: self,
            view: SchedulerView::default(),
            nodes: Vec::new(),
            numbers: HashMap::new(),
            tasks: Vec::with_capacity(self.running.len()),
        };
        let mut held: BTreeMap<NodeId, TaskResources> = BTreeMap::new();
        for candidate in self.running {
            let held = held.entry(candidate.node).or_insert(TaskResources::ZERO);
            *held = held.plus(candidate.task.holds);
        }
        let given = self.nodes.given().iter().map(|given| given.id);
        let of_tasks = self.running.iter().map(|candidate| candidate.node);
        let mut racks = HashMap::new();
        for node in given.chain(of_tasks) {
            seen.add_node(
                node,
                held.get(&node).copied().unwrap_or_default(),
                &mut racks,
            );
        }
        let mut jobs: HashMap<&str, JobId> = HashMap::new();
        for candidate in self.running {
            let Some((index, described)) = self.described(candidate) else {
                continue;
            };
            let deadline = |deadline: Seconds| NOW.after(deadline);
            let job = match group(described) {
                Some(group) => *(jobs.entry(group)).or_insert_with(|| {
                    seen.view
                        .add_job(deadlines.get(group).copied().map(deadline))
                }),
                None => seen.view.add_job(described.deadline_s.map(deadline)),
            };
            if seen.run(candidate, described, job).is_none() {
                let pointer = format!("{}/{index}/holds", self.pointer);
                let detail = "together they hold more than can be counted";
                return Err(RequestProblem::at(ProblemKind::Invalid, pointer, detail));
            }
        }
        Ok(seen)
    }
}

/// Returns the job of its scheduler that a task belongs to, as far as it is given.
fn group<'a>(task: &'a Described<'_>) -> Option<&'a str> {
    task.group.as_deref().or(task.job.as_deref())
}

impl<'a> Seen<'a> {
    fn add_node(&mut self, node: NodeId, held: TaskResources, racks: &mut HashMap<String, u32>) {
        let nodes = self.of.nodes;
        let Some(figures) = nodes.figures(node) else {
            return;
        };
        if self.numbers.contains_key(&node) {
            return;
        }
        let given = nodes.given_of(node).map(|given| given.of);
        let free = given.map_or(TaskResources::ZERO, |given| tasks::resources(given.free));
        let id = self.view.add_node(free.plus(held), *figures);
        let world = self.of.asked.world;
        let entry = world.node(node).map(|node| &node.entry);
        let rack = given.and_then(|given| given.rack.as_deref());
        let rack = rack
            .map(str::to_owned)
            .or_else(|| entry.map(|entry| format!("{}/{}", entry.zone, entry.rack)));
        let next = u32::try_from(racks.len()).unwrap_or(u32::MAX);
        let rack = rack.map(|rack| *racks.entry(rack).or_insert(next));
        let link = given.and_then(|given| given.link_bytes_per_s);
        let link = link.map_or(Figure::not_given(What::LinkBandwidth), Figure::given);
        if let Some(there) = self.view.node_mut(id) {
            there.swap = nodes.swap(node);
            there.link = link;
            // A node of an unknown rack is in one of its own.
            there.rack = rack.unwrap_or(u32::MAX - id.0);
            if let Some(entry) = entry {
                there.class = entry.class;
            }
        }
        self.nodes.push(node);
        self.numbers.insert(node, id);
    }

    /// Adds a task that runs; none if the sum of what the tasks hold cannot be counted.
    fn run(
        &mut self,
        candidate: &'a Candidate,
        described: &'a Described<'a>,
        job: JobId,
    ) -> Option<()> {
        let figures = &candidate.task;
        let node = self.numbers.get(&candidate.node).copied();
        // A task that holds nothing makes no room.
        let Some(node) = node.filter(|_| !figures.holds.is_none()) else {
            return Some(());
        };
        let time = |figure: &Figure<Seconds>| figure.known().ok().map(|time| time.p50);
        let size = |figure: &Figure<Bytes>| figure.known().ok().map(|size| size.p50);
        let done = time(&figures.progress).unwrap_or_default();
        let memory = size(&figures.full).or(size(&figures.resident));
        let checkpoint = figures.has_checkpoint.then(|| TaskCheckpoint {
            node,
            bytes: memory.unwrap_or_default(),
            done: done.less(time(&figures.since_checkpoint).unwrap_or_default()),
        });
        let mut task = TaskView::new(job, NOW.before(done), figures.holds);
        task.priority = described.priority.unwrap_or_default();
        task.memory = memory.unwrap_or(figures.holds.memory);
        task.dirty_rate = figures.dirty_rate.known().ok().map(|rate| rate.p50);
        task.work = time(&figures.remaining).map(|left| done.plus(left));
        task.done = done;
        task.checkpoint = checkpoint;
        task.given = Some(Box::new(*figures));
        let id = self.view.submit(task).ok()?;
        self.view.begin(id, node).ok()?;
        self.view.runs(id, NOW).ok()?;
        self.tasks.push((&described.id, Some(candidate)));
        Some(())
    }

    /// Returns the decisions of a policy that sees this cluster for the first time.
    pub(super) fn decide(
        &self,
        policy: Name,
        settings: &PolicySettings,
        wanted: TaskResources,
    ) -> Vec<Decision> {
        let event = ClusterEvent::Wanted(wanted, None);
        policy.build(settings).decide(NOW, event, &self.view)
    }

    /// Returns decisions with the names of the request, and the sum of what they free of `wanted`.
    pub(super) fn said(
        &self,
        decisions: &[Decision],
        wanted: TaskResources,
        detail: ReplyDetail,
    ) -> (Vec<said::PolicyDecision<'a>>, TaskResources) {
        let mut sum = TaskResources::ZERO;
        // Dumps of a node wait for those that are decided on before.
        let mut ahead: HashMap<NodeId, Bytes> = HashMap::new();
        let decisions = decisions.iter().filter_map(|decision| {
            let (name, candidate) = self.task(decision.task)?;
            let frees = candidate.map_or(TaskResources::ZERO, |candidate| {
                let holds = candidate.task.holds;
                match decision.action {
                    TaskAction::Preempt(mechanism) => freed(holds, wanted.less(sum), mechanism),
                    TaskAction::Resize(to) => holds.less(to),
                    TaskAction::Start | TaskAction::Restore { .. } | TaskAction::Continue => {
                        TaskResources::ZERO
                    }
                }
            });
            sum = sum.plus(frees);
            let cost = match decision.action {
                TaskAction::Preempt(mechanism) => candidate.and_then(|candidate| {
                    let ahead = ahead.entry(candidate.node).or_default();
                    let before = *ahead;
                    *ahead = before.plus(dumped(&candidate.task, mechanism));
                    self.cost(candidate, before, mechanism, detail)
                }),
                _ => None,
            };
            Some(said::PolicyDecision {
                task: name.into(),
                action: self.action(decision.action),
                node: self.name(decision.node).into(),
                score: score(decision.score),
                runner_up: decision.runner_up.and_then(|next| {
                    Some(SecondChoice {
                        task: self.task(next.task)?.0.into(),
                        action: self.action(next.action),
                        score: score(next.score),
                    })
                }),
                reason: self.reason(decision),
                frees: total(frees),
                cost,
            })
        });
        let decisions = decisions.collect();
        (decisions, sum)
    }

    fn cost(
        &self,
        candidate: &Candidate,
        ahead: Bytes,
        mechanism: PreemptionMechanism,
        detail: ReplyDetail,
    ) -> Option<permafrost_api_types::cost::Cost> {
        let site = self.of.nodes.site(candidate.node, Copies::Local)?;
        let cost = cost_of(&candidate.task, &site, ahead, mechanism).ok()?;
        Some(say::cost(&cost, detail, self.of.asked.world.age_s()))
    }

    /// Returns the tasks about which the policy does not decide, and why.
    pub(super) fn undecided(&self, policy: Name) -> impl Iterator<Item = Undecided<'a>> {
        let undecided = policy.undecided(NOW, &self.view).into_iter();
        undecided.filter_map(|(id, missing)| {
            Some(Undecided {
                task: self.task(id)?.0.into(),
                reason: format!("{missing}"),
            })
        })
    }

    fn task(&self, id: TaskId) -> Option<(&'a str, Option<&'a Candidate>)> {
        self.tasks.get(usize::try_from(id.0).ok()?).copied()
    }

    fn name(&self, node: NodeId) -> &'a str {
        let node = self.nodes.get(node.0 as usize);
        node.map_or("", |node| self.of.nodes.name(*node))
    }

    fn action(&self, action: TaskAction) -> said::PolicyAction<'a> {
        match action {
            TaskAction::Start => said::PolicyAction::Start,
            TaskAction::Restore { from } => said::PolicyAction::Restore(self.name(from).into()),
            TaskAction::Continue => said::PolicyAction::Continue,
            TaskAction::Preempt(mechanism) => {
                said::PolicyAction::Preempt(say::mechanism(mechanism))
            }
            TaskAction::Resize(to) => said::PolicyAction::Resize(total(to)),
        }
    }

    fn reason(&self, decision: &Decision) -> String {
        match decision.reason {
            DecisionReason::MakesRoomFor(task) => {
                let name = self.task(task).map_or("another task", |(name, _)| name);
                format!("makes room for {name}")
            }
            reason => reason.to_string(),
        }
    }
}

const fn total(of: TaskResources) -> Total {
    Total {
        cpu_millis: of.cpu_millis,
        memory_bytes: of.memory.count(),
    }
}

fn score(of: Score) -> said::PolicyScore {
    match of {
        Score::Lost(time) => said::PolicyScore::LostS(say::rounded(time.value())),
        Score::Left(time) => said::PolicyScore::LeftS(say::rounded(time.value())),
        Score::Order(order) => said::PolicyScore::Order(order),
        Score::Moved(bytes) => said::PolicyScore::MovedBytes(bytes.count()),
        Score::Containers(count) => said::PolicyScore::Containers(count),
        Score::Later(time) => said::PolicyScore::LaterS(say::rounded(time.value())),
    }
}
