//! Plans over nodes of 1 GB/s.

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
fn a_spared_victim_leaves_the_queue() {
    let nodes = [node(1)];
    let sites = sites(&nodes);
    let wanted = TaskResources {
        cpu_millis: 0,
        memory: Bytes::new(10 * GB),
    };
    // Dumps of 1 GB in 2 s and of 10 GB behind it in 21 s; alone it takes 20.
    let candidates = [candidate(1, 1, 1, 1000), candidate(2, 1, 10, 1000)];
    let plan = plan(wanted, &candidates, &sites, &Terms::default());
    assert_eq!(tasks(&plan), [2]);
    assert_eq!(plan.victims[0].choice.score.value(), 20.0);
    assert_eq!(plan.frees.memory, wanted.memory);
}

/// Has 1 GB of free memory, and room for 40 GB in swap of 1 GB/s.
fn swapping(node: &NodeFigures) -> Site<'_> {
    let rate = Figure::given(BytesPerSecond::new(1e9).unwrap());
    Site {
        node,
        replica: None,
        swap: Some(crate::cost::SwapFigures {
            free_memory: Bytes::new(GB),
            free_swap: Bytes::new(40 * GB),
            write: rate,
            read: rate,
        }),
    }
}

fn resident(task: u64, gb: u64) -> Candidate {
    let mut candidate = candidate(task, 1, gb, 1000);
    candidate.task.resident = candidate.task.full;
    candidate
}

#[test]
fn a_task_suspended_for_its_processor_keeps_its_memory() {
    let node = node(1);
    let sites = BTreeMap::from([(NodeId(1), swapping(&node))]);
    let candidates = [resident(1, 10), resident(2, 12)];
    let plan = plan(cpus(2), &candidates, &sites, &Terms::default());
    for victim in &plan.victims {
        let (mechanism, score) = (victim.choice.mechanism, victim.choice.score);
        assert_eq!(mechanism, PreemptionMechanism::SuspendInMemory);
        assert_eq!((score, victim.frees), (Seconds::ZERO, cpus(1)));
    }
    assert_eq!((plan.frees, plan.lacking), (cpus(2), TaskResources::ZERO));
}

#[test]
fn no_more_memory_is_paged_out_than_is_wanted() {
    let node = node(1);
    let sites = BTreeMap::from([(NodeId(1), swapping(&node))]);
    let wanted = TaskResources {
        cpu_millis: 2000,
        memory: Bytes::new(12 * GB),
    };
    let candidates = [resident(1, 10), resident(2, 10)];
    let plan = plan(wanted, &candidates, &sites, &Terms::default());
    // 10 GB, of which 1 is free: 9 s out and in again. Of the second only 2 GB are wanted.
    let scores: Vec<f64> = (plan.victims.iter())
        .map(|victim| victim.choice.score.value())
        .collect();
    assert_eq!(scores, [18.0, 4.0]);
    assert_eq!((plan.frees, plan.lacking), (wanted, TaskResources::ZERO));
}

#[test]
fn victims_that_go_together_wait_for_each_other_as_long_as_their_grace_lasts() {
    let nodes = [node(1), node(2)];
    let sites = sites(&nodes);
    let mut candidates: Vec<_> = (0..6).map(|n| candidate(n, 1, 10, 1320)).collect();
    for candidate in &mut candidates {
        candidate.task.grace = Some(Seconds::from_millis(30_000));
        candidate.task.holds = TaskResources::ZERO;
    }
    let lost = |plan: &PreemptionPlan| -> f64 {
        let scores = plan.victims.iter();
        scores.map(|victim| victim.choice.score.value()).sum()
    };
    let alone = (candidates.iter())
        .map(|one| choose_alone(&one.task, &sites[&one.node]))
        .sum::<f64>();
    assert_eq!(alone, 120.0);
    let plan = together(&candidates, &sites, &Terms::default());
    // Three dumps end within 30 s: 20 + 30 + 40. The other three are killed.
    assert_eq!(lost(&plan), 90.0 + 3.0 * 1320.0);
    assert_eq!(plan.victims.len(), 6);
    // On two nodes all are dumped.
    for candidate in &mut candidates[3..] {
        candidate.node = NodeId(2);
    }
    let plan = together(&candidates, &sites, &Terms::default());
    assert_eq!(lost(&plan), 180.0);
}

fn choose_alone(task: &TaskFigures, site: &Site<'_>) -> f64 {
    let choice = crate::preempt::choose(task, site, &Terms::default());
    choice.unwrap().score.value()
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
