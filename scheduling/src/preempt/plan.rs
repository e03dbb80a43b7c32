//! Whom to preempt for resources that are wanted.
//!
//! Greedy: always the victim whose score is least for what it frees of what is still wanted, as the paper
//! takes the lowest size ÷ bandwidth first (000, §5.2.2). Each dump that was decided on lengthens its node's queue for
//! those that follow. So scores only grow and shares only shrink while the plan is made, and a candidate's old key is a
//! lower bound: only those that come to the top of the heap are looked at again.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap};

use serde::Serialize;

use super::choose::{Choice, Site, Terms, Undecided, choose};
use crate::cost::{Copies, Dump, Mechanism, Resources, Task};
use crate::figure::Figure;
use crate::quantity::{Bytes, Seconds};
use crate::{NodeId, TaskId};

/// A task that may be preempted, and where it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Node.
    pub node: NodeId,
    /// Task.
    pub task: Task,
}

/// A task that is to be preempted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Victim {
    /// Task.
    pub task: TaskId,
    /// Where it runs.
    pub node: NodeId,
    /// What becomes free.
    pub frees: Resources,
    /// How.
    pub choice: Choice,
}

/// What to do to whom.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Plan {
    /// Victims, in the order of the decisions: dumps of one node are to be queued in this order.
    pub victims: Vec<Victim>,
    /// What they free together.
    pub frees: Resources,
    /// What is still wanting when all candidates that can be decided on are taken.
    pub lacking: Resources,
    /// Candidates that nothing could be said of, and were not taken.
    pub undecided: Vec<Undecided>,
    /// Candidates on nodes that were not given.
    pub unknown_node: Vec<TaskId>,
}

struct Entry {
    /// Score for the share freed; the true one is no less.
    key: Seconds,
    task: TaskId,
    index: usize,
    choice: Choice,
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.key, self.task, self.index).cmp(&(other.key, other.task, other.index))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}

/// Victims among `candidates` that free what is `wanted`, wherever they run: whoever needs it on one node passes the
/// candidates of that node. O(n log n) for n candidates, but for ones whose costs rise while the plan is made.
#[must_use]
pub fn plan(
    wanted: Resources,
    candidates: &[Candidate],
    sites: &BTreeMap<NodeId, Site>,
    terms: &Terms,
) -> Plan {
    let mut sites = sites.clone();
    let mut plan = Plan::default();
    let mut heap = BinaryHeap::with_capacity(candidates.len());
    for (index, candidate) in candidates.iter().enumerate() {
        let Some(site) = sites.get(&candidate.node) else {
            plan.unknown_node.push(candidate.task.id);
            continue;
        };
        match entry(index, candidate, site, terms, (wanted, wanted)) {
            Ok(Some(entry)) => heap.push(Reverse(entry)),
            Ok(None) => {}
            Err(undecided) => plan.undecided.push(undecided),
        }
    }
    while !wanted.less(plan.frees).is_none() {
        let Some(Reverse(top)) = heap.pop() else {
            break;
        };
        let Some((candidate, site)) = candidates
            .get(top.index)
            .and_then(|candidate| Some((candidate, sites.get_mut(&candidate.node)?)))
        else {
            continue;
        };
        // Its queue may have grown, and what it frees be wanted no more.
        let left = wanted.less(plan.frees);
        match entry(top.index, candidate, site, terms, (left, wanted)) {
            Ok(Some(now)) if heap.peek().is_some_and(|Reverse(next)| now > *next) => {
                heap.push(Reverse(now));
            }
            Ok(Some(now)) => {
                occupy(site, &candidate.task, now.choice.mechanism);
                plan.frees = plan.frees.plus(candidate.task.holds);
                plan.victims.push(Victim {
                    task: candidate.task.id,
                    node: candidate.node,
                    frees: candidate.task.holds,
                    choice: now.choice,
                });
            }
            Ok(None) => {}
            Err(undecided) => plan.undecided.push(undecided),
        }
    }
    spare(&mut plan, wanted);
    plan.lacking = wanted.less(plan.frees);
    plan
}

fn entry(
    index: usize,
    candidate: &Candidate,
    site: &Site,
    terms: &Terms,
    (left, wanted): (Resources, Resources),
) -> Result<Option<Entry>, Undecided> {
    let share = share(candidate.task.holds.least(left), wanted);
    if share == 0.0 {
        return Ok(None);
    }
    let choice = choose(&candidate.task, site, terms)?;
    Ok(Some(Entry {
        key: Seconds::clamped(choice.score.value() / share),
        task: candidate.task.id,
        index,
        choice,
    }))
}

/// Part of all that is wanted that `holds` is: of the resource of which it is most. Not a part of what is *left*, which
/// would grow as that shrinks.
fn share(holds: Resources, wanted: Resources) -> f64 {
    let part = |held: u64, wanted: u64| match wanted {
        0 => 0.0,
        wanted => held.min(wanted) as f64 / wanted as f64,
    };
    let memory = part(holds.memory.count(), wanted.memory.count());
    part(holds.cpu_millis, wanted.cpu_millis).max(memory)
}

/// What a decision takes of its node.
fn occupy(site: &mut Site, task: &Task, mechanism: Mechanism) {
    let size = |figure: Figure<Bytes>| figure.known().map_or(Bytes::ZERO, |size| size.p50);
    match mechanism {
        Mechanism::Checkpoint { dump, copies } => {
            let bytes = match dump {
                Dump::Incremental => size(task.incremental),
                // A pre-copied one writes at least the whole.
                _ => size(task.full),
            };
            site.node = site.node.with_queued(bytes);
            if let (Copies::Replicated, Some(replica)) = (copies, &mut site.replica) {
                replica.node = replica.node.with_queued(bytes);
            }
        }
        Mechanism::SuspendInMemory => {
            if let Some(swap) = &mut site.swap {
                swap.free_swap = swap.free_swap.less(size(task.resident));
                swap.free_memory = swap.free_memory.less(task.holds.memory);
            }
        }
        Mechanism::Wait | Mechanism::Rollback | Mechanism::Kill => {}
    }
}

/// Lets victims go that a later one made superfluous, the dearest first.
fn spare(plan: &mut Plan, wanted: Resources) {
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
    fn site(node: u32) -> (NodeId, Site) {
        let rate = SizedRates::uniform(Figure::given(BytesPerSecond::new(1e9).unwrap()));
        let node = NodeFigures {
            write: rate,
            read: rate,
            write_queue: Figure::given(Bytes::ZERO),
            ..NodeFigures::unknown(NodeId(node))
        };
        let site = Site {
            node,
            replica: None,
            swap: None,
        };
        (node.node, site)
    }

    fn candidate(task: u64, node: u32, gb: u64, progress: u64) -> Candidate {
        let holds = Resources {
            cpu_millis: 1000,
            memory: Bytes::new(gb * GB),
        };
        Candidate {
            node: NodeId(node),
            task: Task {
                full: Figure::given(Bytes::new(gb * GB)),
                progress: Figure::given(Seconds::from_millis(progress * 1000)),
                ..Task::unknown(TaskId(task), holds)
            },
        }
    }

    fn cpus(count: u64) -> Resources {
        Resources {
            cpu_millis: count * 1000,
            memory: Bytes::ZERO,
        }
    }

    fn tasks(plan: &Plan) -> Vec<u64> {
        plan.victims.iter().map(|victim| victim.task.0).collect()
    }

    #[test]
    fn the_cheapest_go_first_each_by_its_own_mechanism() {
        let sites = BTreeMap::from([site(1)]);
        let candidates = [
            candidate(1, 1, 50, 1000),
            candidate(2, 1, 2, 1000),
            candidate(3, 1, 50, 3),
        ];
        let plan = plan(cpus(2), &candidates, &sites, &Terms::default());
        assert_eq!(tasks(&plan), [3, 2]);
        assert_eq!(plan.victims[0].choice.mechanism, Mechanism::Kill);
        assert_eq!(plan.victims[1].choice.score.value(), 4.0);
        assert_eq!(plan.lacking, Resources::ZERO);
    }

    #[test]
    fn dumps_of_one_node_queue_and_the_next_victim_is_elsewhere() {
        let sites = BTreeMap::from([site(1), site(2)]);
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
        let sites = BTreeMap::from([site(1)]);
        let candidates: Vec<_> = (0..4).map(|n| candidate(n, 1, 10, 35)).collect();
        let plan = plan(cpus(4), &candidates, &sites, &Terms::default());
        let kills = plan.victims.iter();
        let kills = kills.filter(|victim| victim.choice.mechanism == Mechanism::Kill);
        // 20 and 30 s by dump; then 40 s against 35.
        assert_eq!(kills.count(), 2);
    }

    #[test]
    fn a_victim_that_a_larger_one_made_superfluous_is_spared() {
        let sites = BTreeMap::from([site(1)]);
        let wanted = Resources {
            cpu_millis: 0,
            memory: Bytes::new(10 * GB),
        };
        let candidates = [candidate(1, 1, 1, 1), candidate(2, 1, 10, 1000)];
        let plan = plan(wanted, &candidates, &sites, &Terms::default());
        assert_eq!(tasks(&plan), [2]);
    }

    #[test]
    fn what_cannot_be_had_or_decided_is_said() {
        let sites = BTreeMap::from([site(1)]);
        let unknown = Candidate {
            task: Task::unknown(TaskId(2), cpus(1)),
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
        let sites = BTreeMap::from([site(1)]);
        let nothing = plan(
            Resources::ZERO,
            &[candidate(1, 1, 1, 1)],
            &sites,
            &Terms::default(),
        );
        assert_eq!(nothing, Plan::default());
    }
}
