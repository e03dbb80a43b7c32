//! Choice of victims for resources that are wanted.
//!
//! The algorithm is greedy: it always takes the victim with the least score for its share of the resources still
//! wanted, as the paper takes the lowest size ÷ bandwidth first (000, §5.2.2). Each planned dump lengthens its node's
//! queue for the following ones, by an equal time for all of them. So a node's candidates are sorted once, by their
//! costs with the initial queue, and only the first of each node is evaluated again. Between candidates of one node
//! that free different shares the order may so differ from that of the present queue.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use serde::Serialize;

use super::choose::{Choice, Site, Terms, UndecidedTask, best, choose, choose_behind, least};
use crate::cost::{Dump, PreemptionMechanism, Sums, TaskFigures, TaskResources};
use crate::figure::Figure;
use crate::quantity::{Bytes, Seconds};
use crate::{NodeId, TaskId};

/// A task that may be preempted, and where it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Node that the task runs on.
    pub node: NodeId,
    /// Figures of the task.
    pub task: TaskFigures,
}

/// A task that is to be preempted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PlannedVictim {
    /// Id of the task.
    pub task: TaskId,
    /// Node that the task runs on.
    pub node: NodeId,
    /// Resources that become free.
    pub frees: TaskResources,
    /// Mechanism, with its cost.
    pub choice: Choice,
}

/// Tasks to preempt, and the mechanism for each.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PreemptionPlan {
    /// Victims, in the order of the decisions: dumps of one node are to be queued in this order.
    pub victims: Vec<PlannedVictim>,
    /// Resources that all victims free together.
    pub frees: TaskResources,
    /// Resources still lacking when all candidates that can be decided on are taken.
    pub lacking: TaskResources,
    /// Candidates for which no mechanism could be chosen; they are not taken.
    pub undecided: Vec<UndecidedTask>,
    /// Candidates on nodes that were not given.
    pub unknown_node: Vec<TaskId>,
}

/// A candidate in the order of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    /// Score for the share freed.
    key: Seconds,
    task: TaskId,
    index: usize,
}

/// A node's candidates, the last one best.
struct Line<'a> {
    node: NodeId,
    site: Site<'a>,
    /// Bytes of the dumps that are planned: they go before the following ones, here and on the replica.
    ahead: Bytes,
    /// Candidates by the costs that do not depend on other decisions for the node.
    alone: Vec<Place>,
    /// Candidates by their costs with the initial queue and swap.
    queued: Vec<Place>,
    /// Best candidate, as it was last evaluated.
    best: Option<Place>,
}

/// Chooses victims among `candidates` that free the `wanted` resources, on any node: a caller that needs them on one
/// node passes the candidates of that node. O(n log n) for n candidates.
#[must_use]
pub fn plan(
    wanted: TaskResources,
    candidates: &[Candidate],
    sites: &BTreeMap<NodeId, Site<'_>>,
    terms: &Terms,
) -> PreemptionPlan {
    let mut planning = Planning {
        wanted,
        candidates,
        terms,
        over: vec![false; candidates.len()],
        plan: PreemptionPlan::default(),
    };
    let mut lines = planning.lines(sites);
    let mut heap = BinaryHeap::with_capacity(lines.len());
    for (at, line) in lines.iter_mut().enumerate() {
        heap.extend(planning.look(line).map(|place| Reverse((place, at))));
    }
    while !planning.left().is_none() {
        let Some(Reverse((seen, at))) = heap.pop() else {
            break;
        };
        let Some(line) = lines.get_mut(at) else {
            continue;
        };
        // The resources still wanted may have shrunk since then.
        if !planning.still_frees_as_much(seen) {
            match planning.look(line) {
                Some(place) if heap.peek().is_some_and(|Reverse((next, _))| place > *next) => {
                    heap.push(Reverse((place, at)));
                    continue;
                }
                _ => {}
            }
        }
        if let Some(place) = line.best.take() {
            planning.take(place, line);
            heap.extend(planning.look(line).map(|place| Reverse((place, at))));
        }
    }
    let mut plan = planning.plan;
    spare(&mut plan, wanted);
    plan.lacking = wanted.less(plan.frees);
    plan
}

struct Planning<'a> {
    wanted: TaskResources,
    candidates: &'a [Candidate],
    terms: &'a Terms,
    /// Taken already, or not to be taken.
    over: Vec<bool>,
    plan: PreemptionPlan,
}

impl Planning<'_> {
    fn left(&self) -> TaskResources {
        self.wanted.less(self.plan.frees)
    }

    /// Candidates by node, sorted.
    fn lines<'s>(&mut self, sites: &BTreeMap<NodeId, Site<'s>>) -> Vec<Line<'s>> {
        let mut lines: BTreeMap<NodeId, Line<'s>> = BTreeMap::new();
        for (index, candidate) in self.candidates.iter().enumerate() {
            let (node, task) = (candidate.node, &candidate.task);
            let Some(site) = sites.get(&node) else {
                self.plan.unknown_node.push(task.id);
                continue;
            };
            let share = share(task.holds.least(self.wanted), self.wanted);
            if share == 0.0 {
                continue;
            }
            let line = lines.entry(node).or_insert_with(|| Line {
                node,
                site: *site,
                ahead: Bytes::ZERO,
                alone: Vec::new(),
                queued: Vec::new(),
                best: None,
            });
            let least = least(task, site, self.terms);
            let place = |score: Seconds| Place {
                key: Seconds::clamped(score.value() / share),
                task: task.id,
                index,
            };
            line.alone.extend(least.alone.map(place));
            line.queued.extend(least.queued.map(place));
            if least.alone.or(least.queued).is_none()
                && let Err(undecided) = choose(task, site, self.terms)
            {
                self.plan.undecided.push(undecided);
            }
        }
        let mut lines: Vec<Line<'_>> = lines.into_values().collect();
        for line in &mut lines {
            for order in [&mut line.alone, &mut line.queued] {
                order.sort_unstable_by(|a, b| b.cmp(a));
            }
        }
        lines
    }

    fn still_frees_as_much(&self, place: Place) -> bool {
        let candidate = self.candidates.get(place.index);
        candidate.is_some_and(|candidate| self.left().covers(candidate.task.holds))
    }

    /// Finds the best candidate of a node at present costs.
    fn look(&mut self, line: &mut Line<'_>) -> Option<Place> {
        let alone = self.first(&mut line.alone, &line.site, line.ahead);
        let queued = self.first(&mut line.queued, &line.site, line.ahead);
        line.best = match (alone, queued) {
            (Some(alone), Some(queued)) => Some(alone.min(queued)),
            (alone, queued) => alone.or(queued),
        };
        line.best
    }

    /// Returns the first candidate in this order that can still be taken, at its present cost.
    fn first(&mut self, order: &mut Vec<Place>, site: &Site<'_>, ahead: Bytes) -> Option<Place> {
        while let Some(&place) = order.last() {
            let candidate = self.candidates.get(place.index);
            if let (Some(candidate), Some(false)) = (candidate, self.over.get(place.index)) {
                match self.now(candidate, place, site, ahead) {
                    Ok(Some(best)) => return Some(best),
                    Ok(None) => {}
                    Err(undecided) => self.plan.undecided.push(undecided),
                }
                self.end(place.index);
            }
            order.pop();
        }
        None
    }

    /// Returns the place of a candidate by its present cost; none if nothing that it holds is wanted any more.
    fn now(
        &self,
        candidate: &Candidate,
        place: Place,
        site: &Site<'_>,
        ahead: Bytes,
    ) -> Result<Option<Place>, UndecidedTask> {
        let share = share(candidate.task.holds.least(self.left()), self.wanted);
        if share == 0.0 {
            return Ok(None);
        }
        let best = best::<Sums>(&candidate.task, site, ahead, self.terms)?;
        let key = Seconds::clamped(best.score.value() / share);
        Ok(Some(Place { key, ..place }))
    }

    fn take(&mut self, place: Place, line: &mut Line<'_>) {
        self.end(place.index);
        let Some(candidate) = self.candidates.get(place.index) else {
            return;
        };
        // The choice that was evaluated, now with the parts of its cost.
        match choose_behind(&candidate.task, &line.site, line.ahead, self.terms) {
            Ok(choice) => {
                occupy(line, &candidate.task, choice.mechanism);
                self.plan.frees = self.plan.frees.plus(candidate.task.holds);
                self.plan.victims.push(PlannedVictim {
                    task: candidate.task.id,
                    node: line.node,
                    frees: candidate.task.holds,
                    choice,
                });
            }
            Err(undecided) => self.plan.undecided.push(undecided),
        }
    }

    fn end(&mut self, index: usize) {
        if let Some(over) = self.over.get_mut(index) {
            *over = true;
        }
    }
}

/// Returns the share of `wanted` that `holds` is: of the resource of which it is most. Not the share of the resources
/// *left*, which would grow as those shrink.
fn share(holds: TaskResources, wanted: TaskResources) -> f64 {
    let part = |held: u64, wanted: u64| match wanted {
        0 => 0.0,
        wanted => held.min(wanted) as f64 / wanted as f64,
    };
    let memory = part(holds.memory.count(), wanted.memory.count());
    part(holds.cpu_millis, wanted.cpu_millis).max(memory)
}

/// Adds the effect of a decision to its node: bytes in the queue, or memory and swap in use.
fn occupy(line: &mut Line<'_>, task: &TaskFigures, mechanism: PreemptionMechanism) {
    let size = |figure: Figure<Bytes>| figure.known().map_or(Bytes::ZERO, |size| size.p50);
    match mechanism {
        PreemptionMechanism::Checkpoint { dump, .. } => {
            let bytes = match dump {
                Dump::Incremental => size(task.incremental),
                // A pre-copied one writes at least the whole.
                _ => size(task.full),
            };
            line.ahead = line.ahead.plus(bytes);
        }
        PreemptionMechanism::SuspendInMemory => {
            if let Some(swap) = &mut line.site.swap {
                swap.free_swap = swap.free_swap.less(size(task.resident));
                swap.free_memory = swap.free_memory.less(task.holds.memory);
            }
        }
        PreemptionMechanism::Wait | PreemptionMechanism::Rollback | PreemptionMechanism::Kill => {}
    }
}

/// Lets victims go that a later one made superfluous, the dearest first.
fn spare(plan: &mut PreemptionPlan, wanted: TaskResources) {
    let mut by_score: Vec<(Seconds, usize)> = (plan.victims.iter())
        .enumerate()
        .map(|(index, victim)| (victim.choice.score, index))
        .collect();
    by_score.sort_unstable_by(|a, b| b.cmp(a));
    let mut spared = vec![false; plan.victims.len()];
    for (_, index) in by_score {
        let (Some(victim), Some(spare)) = (plan.victims.get(index), spared.get_mut(index)) else {
            continue;
        };
        let without = plan.frees.less(victim.frees);
        // A sum that stopped at the largest number cannot be taken apart again.
        let exact = without.plus(victim.frees) == plan.frees && plan.frees != without;
        if exact && without.covers(wanted) {
            *spare = true;
            plan.frees = without;
        }
    }
    let mut spared = spared.into_iter();
    plan.victims.retain(|_| !spared.next().unwrap_or(false));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::NodeFigures;
    use crate::estimator::SizedRates;
    use crate::quantity::BytesPerSecond;

    const GB: u64 = 1_000_000_000;

    /// Reads and writes 1 GB/s.
    fn node(node: u32) -> NodeFigures {
        let rate = SizedRates::uniform(Figure::given(BytesPerSecond::new(1e9).unwrap()));
        NodeFigures {
            write: rate,
            read: rate,
            write_queue: Figure::given(Bytes::ZERO),
            ..NodeFigures::unknown(NodeId(node))
        }
    }

    fn sites(nodes: &[NodeFigures]) -> BTreeMap<NodeId, Site<'_>> {
        let site = |node| Site {
            node,
            replica: None,
            swap: None,
        };
        nodes.iter().map(|node| (node.node, site(node))).collect()
    }

    fn candidate(task: u64, node: u32, gb: u64, progress: u64) -> Candidate {
        let holds = TaskResources {
            cpu_millis: 1000,
            memory: Bytes::new(gb * GB),
        };
        Candidate {
            node: NodeId(node),
            task: TaskFigures {
                full: Figure::given(Bytes::new(gb * GB)),
                progress: Figure::given(Seconds::from_millis(progress * 1000)),
                ..TaskFigures::unknown(TaskId(task), holds)
            },
        }
    }

    fn cpus(count: u64) -> TaskResources {
        TaskResources {
            cpu_millis: count * 1000,
            memory: Bytes::ZERO,
        }
    }

    fn tasks(plan: &PreemptionPlan) -> Vec<u64> {
        plan.victims.iter().map(|victim| victim.task.0).collect()
    }

    #[test]
    fn the_cheapest_go_first_each_by_its_own_mechanism() {
        let nodes = [node(1)];
        let sites = sites(&nodes);
        let candidates = [
            candidate(1, 1, 50, 1000),
            candidate(2, 1, 2, 1000),
            candidate(3, 1, 50, 3),
        ];
        let plan = plan(cpus(2), &candidates, &sites, &Terms::default());
        assert_eq!(tasks(&plan), [3, 2]);
        assert_eq!(plan.victims[0].choice.mechanism, PreemptionMechanism::Kill);
        assert_eq!(plan.victims[1].choice.score.value(), 4.0);
        assert_eq!(plan.lacking, TaskResources::ZERO);
    }

    #[test]
    fn dumps_of_one_node_queue_and_the_next_victim_is_elsewhere() {
        let nodes = [node(1), node(2)];
        let sites = sites(&nodes);
        let candidates = [
            candidate(1, 1, 10, 1000),
            candidate(2, 1, 10, 1000),
            candidate(3, 2, 12, 1000),
        ];
        let plan = plan(cpus(2), &candidates, &sites, &Terms::default());
        // The second on node 1 would wait 10 s: 30 against 24.
        assert_eq!(tasks(&plan), [1, 3]);
    }

    #[test]
    fn a_dump_behind_many_becomes_a_kill() {
        let nodes = [node(1)];
        let sites = sites(&nodes);
        let candidates: Vec<_> = (0..4).map(|n| candidate(n, 1, 10, 35)).collect();
        let plan = plan(cpus(4), &candidates, &sites, &Terms::default());
        let kills = plan.victims.iter();
        let kills = kills.filter(|victim| victim.choice.mechanism == PreemptionMechanism::Kill);
        // 20 and 30 s by dump; then 40 s against 35.
        assert_eq!(kills.count(), 2);
    }

    #[test]
    fn a_victim_that_a_larger_one_made_superfluous_is_spared() {
        let nodes = [node(1)];
        let sites = sites(&nodes);
        let wanted = TaskResources {
            cpu_millis: 0,
            memory: Bytes::new(10 * GB),
        };
        let candidates = [candidate(1, 1, 1, 1), candidate(2, 1, 10, 1000)];
        let plan = plan(wanted, &candidates, &sites, &Terms::default());
        assert_eq!(tasks(&plan), [2]);
    }

    #[test]
    fn what_cannot_be_had_or_decided_is_said() {
        let nodes = [node(1)];
        let sites = sites(&nodes);
        let unknown = Candidate {
            task: TaskFigures::unknown(TaskId(2), cpus(1)),
            ..candidate(2, 1, 1, 1)
        };
        let candidates = [candidate(1, 1, 1, 1), unknown, candidate(3, 9, 1, 1)];
        let plan = plan(cpus(5), &candidates, &sites, &Terms::default());
        assert_eq!(tasks(&plan), [1]);
        assert_eq!(plan.lacking, cpus(4));
        assert_eq!(plan.undecided[0].task, TaskId(2));
        assert_eq!(plan.unknown_node, [TaskId(3)]);
    }

    #[test]
    fn nothing_wanted_is_nothing_done() {
        let nodes = [node(1)];
        let sites = sites(&nodes);
        let nothing = plan(
            TaskResources::ZERO,
            &[candidate(1, 1, 1, 1)],
            &sites,
            &Terms::default(),
        );
        assert_eq!(nothing, PreemptionPlan::default());
    }
}
