//! Choice of victims for resources that are wanted.
//!
//! The algorithm is greedy: it always takes the victim with the least score for its share of the resources still
//! wanted, as the paper takes the lowest size ÷ bandwidth first (000, §5.2.2). Each planned dump lengthens its node's
//! queue for the following ones, by an equal time for all of them. So a node's candidates are sorted once, by their
//! costs with the initial queue, and only the first of each node is evaluated again. Between candidates of one node
//! that free different shares the order may so differ from that of the present queue.
//!
//! Only what is wanted counts (000, §4.1): a victim's score is divided by the wanted part of what it holds, and no more
//! of a suspended task's memory is paged out than is still wanted.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use serde::Serialize;

use super::choose::{Choice, Demand, Site, Terms, UndecidedTask, best, choose_under, freed, least};
use crate::cost::{Dump, DumpWait, PreemptionMechanism, TaskFigures, TaskResources};
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
    /// Resources that become free: all that it holds, but of a suspended task only the memory that is wanted of it.
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

/// A node, with the load of the decisions that are made for it.
#[derive(Clone, Copy)]
struct Loaded<'a> {
    site: Site<'a>,
    /// Bytes of the dumps that are planned: they go before the following ones, here and on the replica.
    ahead: Bytes,
    /// Wait of a dump that comes next.
    wait: DumpWait,
}

/// A node's candidates, the last one best.
struct Line<'a> {
    loaded: Loaded<'a>,
    /// Candidates by the costs that do not depend on other decisions for the node.
    alone: Vec<Place>,
    /// Candidates by their costs with the initial queue and swap.
    queued: Vec<Place>,
    /// Best candidate, as it was last evaluated.
    best: Option<Place>,
    /// Resources that were still wanted then.
    wanted: TaskResources,
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
    planned(Some(wanted), candidates, sites, terms)
}

/// Chooses the mechanism for each of the `candidates`, which are all preempted: those of a node one after the other,
/// the cheapest first, so that a dump waits for the dumps before it. All that they hold is to become free. O(n log n)
/// for n candidates.
#[must_use]
pub fn together(
    candidates: &[Candidate],
    sites: &BTreeMap<NodeId, Site<'_>>,
    terms: &Terms,
) -> PreemptionPlan {
    planned(None, candidates, sites, terms)
}

fn planned(
    wanted: Option<TaskResources>,
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
        taken: Vec::new(),
    };
    let mut lines = planning.lines(sites);
    let mut heap = BinaryHeap::with_capacity(lines.len());
    for (at, line) in lines.iter_mut().enumerate() {
        heap.extend(planning.look(line).map(|place| Reverse((place, at))));
    }
    while !planning.is_enough() {
        let Some(Reverse((seen, at))) = heap.pop() else {
            break;
        };
        let Some(line) = lines.get_mut(at) else {
            continue;
        };
        // The resources still wanted may have shrunk since then.
        if !planning.is_wanted_as_much(seen, line.wanted) {
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
    planning.spare(sites);
    let mut plan = planning.plan;
    plan.lacking = wanted.map_or(TaskResources::ZERO, |wanted| wanted.less(plan.frees));
    plan
}

struct Planning<'a> {
    /// Resources that are wanted; none if all candidates are to go.
    wanted: Option<TaskResources>,
    candidates: &'a [Candidate],
    terms: &'a Terms,
    /// Taken already, or not to be taken.
    over: Vec<bool>,
    plan: PreemptionPlan,
    /// Candidates that the victims of the plan are.
    taken: Vec<usize>,
}

impl Planning<'_> {
    fn is_enough(&self) -> bool {
        let covers = |wanted| self.plan.frees.covers(wanted);
        self.wanted.is_some_and(covers)
    }

    /// Returns the part that is still wanted of what a task holds.
    fn left_of(&self, holds: TaskResources) -> TaskResources {
        match self.wanted {
            Some(wanted) => holds.least(wanted.less(self.plan.frees)),
            None => holds,
        }
    }

    /// Returns the share that the task's wanted part is of all that is wanted.
    fn share(&self, task: &TaskFigures) -> f64 {
        match self.wanted {
            Some(wanted) => share(self.left_of(task.holds), wanted),
            None => 1.0,
        }
    }

    fn demand(&self, task: &TaskFigures, wait: DumpWait) -> Demand {
        let memory = self.left_of(task.holds).memory;
        Demand { wait, memory }
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
            let share = self.share(task);
            if share == 0.0 {
                continue;
            }
            let line = lines.entry(node).or_insert_with(|| Line {
                loaded: Loaded::new(site),
                alone: Vec::new(),
                queued: Vec::new(),
                best: None,
                wanted: TaskResources::ZERO,
            });
            let demand = self.demand(task, line.loaded.wait);
            let least = least(task, site, &demand, self.terms);
            let place = |score: Seconds| Place {
                key: Seconds::clamped(score.value() / share),
                task: task.id,
                index,
            };
            line.alone.extend(least.alone.map(place));
            line.queued.extend(least.queued.map(place));
            if least.alone.or(least.queued).is_none()
                && let Err(undecided) = choose_under(task, site, &demand, self.terms)
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

    /// Returns true if as much is wanted of a candidate as when `wanted` were left.
    fn is_wanted_as_much(&self, place: Place, wanted: TaskResources) -> bool {
        self.candidates.get(place.index).is_some_and(|candidate| {
            let holds = candidate.task.holds;
            self.wanted.is_none() || self.left_of(holds) == holds.least(wanted)
        })
    }

    /// Finds the best candidate of a node at present costs.
    fn look(&mut self, line: &mut Line<'_>) -> Option<Place> {
        let alone = self.first(&mut line.alone, &line.loaded);
        let queued = self.first(&mut line.queued, &line.loaded);
        line.best = match (alone, queued) {
            (Some(alone), Some(queued)) => Some(alone.min(queued)),
            (alone, queued) => alone.or(queued),
        };
        let wanted = self.wanted.unwrap_or_default();
        line.wanted = wanted.less(self.plan.frees);
        line.best
    }

    /// Returns the first candidate in this order that can still be taken, at its present cost.
    fn first(&mut self, order: &mut Vec<Place>, loaded: &Loaded<'_>) -> Option<Place> {
        while let Some(&place) = order.last() {
            let candidate = self.candidates.get(place.index);
            if let (Some(candidate), Some(false)) = (candidate, self.over.get(place.index)) {
                match self.now(candidate, place, loaded) {
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
        loaded: &Loaded<'_>,
    ) -> Result<Option<Place>, UndecidedTask> {
        let task = &candidate.task;
        let share = self.share(task);
        if share == 0.0 {
            return Ok(None);
        }
        let demand = self.demand(task, loaded.wait);
        let best = best(task, &loaded.site, &demand, self.terms)?;
        let key = Seconds::clamped(best.score.value() / share);
        Ok(Some(Place { key, ..place }))
    }

    fn take(&mut self, place: Place, line: &mut Line<'_>) {
        self.end(place.index);
        let Some(candidate) = self.candidates.get(place.index) else {
            return;
        };
        match self.victim(candidate, &mut line.loaded) {
            Ok(victim) => {
                self.plan.frees = self.plan.frees.plus(victim.frees);
                self.plan.victims.push(victim);
                self.taken.push(place.index);
            }
            Err(undecided) => self.plan.undecided.push(undecided),
        }
    }

    /// Makes the choice for a candidate, with the parts of its cost, and adds its effect to the node.
    fn victim(
        &self,
        candidate: &Candidate,
        loaded: &mut Loaded<'_>,
    ) -> Result<PlannedVictim, UndecidedTask> {
        let task = &candidate.task;
        let demand = self.demand(task, loaded.wait);
        let choice = choose_under(task, &loaded.site, &demand, self.terms)?;
        let frees = freed(task.holds, self.left_of(task.holds), choice.mechanism);
        loaded.occupy(task, frees, choice.mechanism);
        Ok(PlannedVictim {
            task: task.id,
            node: candidate.node,
            frees,
            choice,
        })
    }

    fn end(&mut self, index: usize) {
        if let Some(over) = self.over.get_mut(index) {
            *over = true;
        }
    }

    /// Lets victims go that a later one made superfluous, the dearest first, and makes the choices for the others
    /// again: they wait for fewer dumps, and more memory may be wanted of them.
    fn spare(&mut self, sites: &BTreeMap<NodeId, Site<'_>>) {
        let Some(kept) = self
            .wanted
            .and_then(|wanted| self.kept(wanted))
            .filter(|kept| kept.len() < self.taken.len())
        else {
            return;
        };
        let before = std::mem::take(&mut self.plan.victims);
        let freed_before = std::mem::take(&mut self.plan.frees);
        let mut loads: BTreeMap<NodeId, Loaded<'_>> = BTreeMap::new();
        for index in kept {
            if let Some(candidate) = self.candidates.get(index)
                && let Some(site) = sites.get(&candidate.node)
            {
                let loaded = loads
                    .entry(candidate.node)
                    .or_insert_with(|| Loaded::new(site));
                if let Ok(victim) = self.victim(candidate, loaded) {
                    self.plan.frees = self.plan.frees.plus(victim.frees);
                    self.plan.victims.push(victim);
                }
            }
        }
        // To page out more of a task may take longer than the terms allow.
        if !self.is_enough() {
            (self.plan.victims, self.plan.frees) = (before, freed_before);
        }
    }

    /// Returns the candidates without which less than `wanted` would become free, in the order of the decisions; none
    /// if all together free less.
    fn kept(&self, wanted: TaskResources) -> Option<Vec<usize>> {
        let mut dearest: Vec<(Seconds, usize, TaskResources)> = Vec::new();
        let mut frees = TaskResources::ZERO;
        for (victim, index) in self.plan.victims.iter().zip(&self.taken) {
            // A suspended task can free more of its memory than was wanted of it.
            let holds = self.candidates.get(*index)?.task.holds;
            frees = frees.plus(holds);
            dearest.push((victim.choice.score, dearest.len(), holds));
        }
        if !frees.covers(wanted) {
            return None;
        }
        dearest.sort_unstable_by_key(|(score, at, _)| Reverse((*score, *at)));
        let mut is_kept = vec![true; self.taken.len()];
        for (_, at, holds) in dearest {
            let without = frees.less(holds);
            // A sum that stopped at the largest number cannot be taken apart again.
            let exact = without.plus(holds) == frees && frees != without;
            if exact
                && without.covers(wanted)
                && let Some(is_kept) = is_kept.get_mut(at)
            {
                *is_kept = false;
                frees = without;
            }
        }
        let taken = self.taken.iter().zip(is_kept);
        let kept = taken.filter_map(|(index, is_kept)| is_kept.then_some(*index));
        Some(kept.collect())
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

impl<'a> Loaded<'a> {
    fn new(site: &Site<'a>) -> Self {
        Self {
            site: *site,
            ahead: Bytes::ZERO,
            wait: site.wait(Bytes::ZERO),
        }
    }

    /// Adds the effect of a decision: bytes in the queue, or memory and swap in use.
    fn occupy(&mut self, task: &TaskFigures, frees: TaskResources, mechanism: PreemptionMechanism) {
        let dumped = dumped(task, mechanism);
        if dumped > Bytes::ZERO {
            self.ahead = self.ahead.plus(dumped);
            self.wait = self.site.wait(self.ahead);
        }
        if mechanism == PreemptionMechanism::SuspendInMemory
            && let Some(swap) = &mut self.site.swap
        {
            swap.free_swap = swap.free_swap.less(size(task.resident));
            swap.free_memory = swap.free_memory.less(frees.memory);
        }
    }
}

fn size(figure: Figure<Bytes>) -> Bytes {
    figure.known().map_or(Bytes::ZERO, |size| size.p50)
}

/// Returns the bytes that the mechanism adds to the queue of the task's node: none unless it is a dump. A pre-copied
/// one counts as a full one, and writes at least as much.
#[must_use]
pub fn dumped(task: &TaskFigures, mechanism: PreemptionMechanism) -> Bytes {
    match mechanism {
        PreemptionMechanism::Checkpoint { dump, .. } => match dump {
            Dump::Incremental => size(task.incremental),
            Dump::Full | Dump::PreCopied => size(task.full),
        },
        PreemptionMechanism::SuspendInMemory
        | PreemptionMechanism::Wait
        | PreemptionMechanism::Rollback
        | PreemptionMechanism::Kill => Bytes::ZERO,
    }
}
