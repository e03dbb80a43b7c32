//! Tests of the planner: the time, order and nodes of the steps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::super::Timing;
use super::super::planner::{Job, Planner, Task};
use super::fakes::{Shared, at_once, id, name};
use crate::{MemberState, NodeClass};

const S: fn(u64) -> Duration = Duration::from_secs;

fn copies(jobs: &[Job]) -> Vec<(String, String)> {
    let copies = jobs.iter().map(|job| {
        assert!(matches!(job.task, Task::Copy { .. }), "{job:?}");
        (job.checkpoint.id.clone(), job.node.clone())
    });
    copies.collect()
}

#[test]
fn a_node_is_missed_after_its_grace_and_not_before() {
    let world = Shared::with_nodes(3);
    world.list(1, 2, &[0, 1]);
    let mut planner = Planner::new(Timing::default());
    let planned = world.plan(&mut planner, S(100));
    assert_eq!((planned.jobs.len(), planned.is_busy), (0, false));

    world.lock().nodes.get_mut("n1").unwrap().live = false;
    for now in [101, 110, 130] {
        let planned = world.plan(&mut planner, S(now));
        assert!(planned.jobs.is_empty());
        assert_eq!((planned.under_replicated, planned.is_busy), (1, true));
    }
    // A restart: the grace period begins anew.
    world.lock().nodes.get_mut("n1").unwrap().live = true;
    assert_eq!(world.plan(&mut planner, S(131)).under_replicated, 0);
    world.lock().nodes.get_mut("n1").unwrap().live = false;
    assert!(world.plan(&mut planner, S(140)).jobs.is_empty());
    assert!(world.plan(&mut planner, S(169)).jobs.is_empty());
    let planned = world.plan(&mut planner, S(170));
    assert_eq!(copies(&planned.jobs), [(id(1), name(2))]);
    let Task::Copy {
        from,
        content_digest,
        ..
    } = &planned.jobs[0].task
    else {
        panic!("no copy")
    };
    assert_eq!((from, content_digest), (&vec![name(0)], &[1; 32]));
}

#[test]
fn a_dump_that_is_just_listed_has_time_to_make_its_copies() {
    let world = Shared::with_nodes(3);
    world.list(1, 2, &[0]);
    let mut planner = Planner::new(Timing::default());
    assert!(world.plan(&mut planner, S(0)).jobs.is_empty());
    assert!(world.plan(&mut planner, S(9)).jobs.is_empty());
    assert_eq!(world.plan(&mut planner, S(10)).jobs.len(), 1);
}

#[test]
fn what_was_whole_before_does_not_wait_for_its_dump() {
    let world = Shared::with_nodes(3);
    world.list(1, 2, &[0, 1]);
    let mut planner = Planner::new(Timing::default());
    assert!(world.plan(&mut planner, S(0)).jobs.is_empty());
    world.lock().nodes.get_mut("n1").unwrap().live = false;
    assert!(world.plan(&mut planner, S(12)).jobs.is_empty());
    assert!(world.plan(&mut planner, S(41)).jobs.is_empty());
    // The node's grace period is over, and nothing else is waited for.
    assert_eq!(world.plan(&mut planner, S(42)).jobs.len(), 1);
}

#[test]
fn the_work_of_a_dead_node_is_spread_over_all_that_are_left() {
    let world = Shared::with_nodes(5);
    for number in 1..=40 {
        world.list(number, 2, &[0, 1 + usize::try_from(number % 4).unwrap()]);
    }
    world.lock().nodes.get_mut("n0").unwrap().live = false;
    let mut planner = Planner::new(at_once());
    let planned = world.plan(&mut planner, S(1));
    assert_eq!(planned.under_replicated, 40);
    let mut by_node = BTreeMap::<_, usize>::new();
    for (_, node) in copies(&planned.jobs) {
        *by_node.entry(node).or_default() += 1;
    }
    assert_eq!(by_node.len(), 4);
    assert!(
        by_node.values().all(|count| (8..=12).contains(count)),
        "{by_node:?}"
    );
}

#[test]
fn generations_of_a_job_go_where_their_parents_go() {
    let world = Shared::with_nodes(6);
    for generation in 1..=10 {
        world.list_of(generation, "job", generation, 2, &[0, 1]);
    }
    world.lock().nodes.get_mut("n1").unwrap().live = false;
    let mut planner = Planner::new(at_once());
    let planned = world.plan(&mut planner, S(1));
    let copies = copies(&planned.jobs);
    assert_eq!(copies.len(), 10);
    assert!(
        copies.iter().all(|(_, node)| *node == copies[0].1),
        "{copies:?}"
    );
    for (job, generation) in planned.jobs.iter().zip(1..) {
        let Task::Copy { parent, .. } = &job.task else {
            panic!("no copy")
        };
        let expected = if generation == 1 {
            String::new()
        } else {
            id(generation - 1)
        };
        assert_eq!(*parent, expected);
    }
}

#[test]
fn what_failed_waits_longer_each_time_and_its_node_rests() {
    let world = Shared::with_nodes(3);
    world.list(1, 2, &[0]);
    let mut planner = Planner::new(Timing {
        patience: Duration::ZERO,
        ..Timing::default()
    });
    let first = world.plan(&mut planner, S(0)).jobs.remove(0);
    planner.ended(S(0), &first, false, true);
    assert!(world.plan(&mut planner, S(9)).jobs.is_empty());
    let second = world.plan(&mut planner, S(10)).jobs.remove(0);
    assert_ne!(second.node, first.node);
    planner.ended(S(10), &second, false, false);
    assert!(world.plan(&mut planner, S(29)).jobs.is_empty());
    let third = world.plan(&mut planner, S(30)).jobs.remove(0);
    planner.ended(S(30), &third, true, false);
    assert_eq!(world.plan(&mut planner, S(31)).jobs.len(), 1);
}

#[test]
fn transient_drained_and_full_nodes_get_nothing() {
    let world = Shared::with_nodes(5);
    world.list(1, 2, &[0]);
    {
        let mut world = world.lock();
        world.nodes.get_mut("n1").unwrap().class = NodeClass::Transient;
        world.nodes.get_mut("n2").unwrap().state = MemberState::Drained;
        world.nodes.get_mut("n3").unwrap().free_bytes = 1 << 30;
    }
    let mut planner = Planner::new(at_once());
    let planned = world.plan(&mut planner, S(1));
    assert_eq!(copies(&planned.jobs), [(id(1), name(4))]);
    world.lock().nodes.get_mut("n4").unwrap().state = MemberState::Drained;
    let planned = world.plan(&mut planner, S(2));
    assert_eq!((planned.jobs.len(), planned.under_replicated), (0, 1));
}

#[test]
fn a_transient_copy_does_not_count_and_goes_when_there_are_enough() {
    let world = Shared::with_nodes(3);
    world.list(1, 2, &[0, 1]);
    world.lock().nodes.get_mut("n1").unwrap().class = NodeClass::Transient;
    let (mut planner, steps) = (Planner::new(at_once()), world.steps());
    assert_eq!(world.round(&mut planner, &steps, S(1), || ()), 1);
    assert_eq!(world.holders(1), ["n0", "n1", "n2"]);
    assert_eq!(world.round(&mut planner, &steps, S(2), || ()), 1);
    assert_eq!(world.holders(1), ["n0", "n2"]);
    assert!(world.lock().nodes["n1"].holds.is_empty());
}

#[test]
fn nothing_goes_while_the_others_do_not_say_that_they_have_it() {
    let world = Shared::with_nodes(3);
    world.list(1, 2, &[0, 1, 2]);
    // One of the nodes is listed, and has lost its copy.
    world.lock().nodes.get_mut("n1").unwrap().holds.clear();
    world.lock().nodes.get_mut("n0").unwrap().free_bytes = 40 << 30;
    let (mut planner, steps) = (Planner::new(at_once()), world.steps());
    assert_eq!(world.round(&mut planner, &steps, S(1), || ()), 1);
    assert_eq!(world.holders(1), ["n0", "n1", "n2"]);
    assert_eq!(world.good(&id(1)), 2);
}

#[test]
fn a_leader_that_leads_no_more_does_nothing_more() {
    let world = Shared::with_nodes(3);
    world.list(1, 2, &[0]);
    let (mut planner, steps) = (Planner::new(at_once()), world.steps());
    let copy = world.plan(&mut planner, S(1)).jobs.remove(0);
    // In the middle of the pull.
    let (leads, seen) = (world.clone(), world.clone());
    world.lock().at_pull = Some(Arc::new(move |_| leads.lock().not_leading = true));
    steps.take(&copy).unwrap_err();
    assert_eq!(seen.holders(1), ["n0"]);
    world.lock().at_pull = None;
    world.lock().asked.clear();
    steps.take(&copy).unwrap_err();
    assert!(world.lock().asked.is_empty());
}

#[test]
fn a_copy_of_what_was_removed_meanwhile_is_taken_away_again() {
    let world = Shared::with_nodes(2);
    world.list(1, 2, &[0]);
    let (mut planner, steps) = (Planner::new(at_once()), world.steps());
    let copy = world.plan(&mut planner, S(1)).jobs.remove(0);
    let removed = world.clone();
    world.lock().at_pull = Some(Arc::new(move |_| removed.lock().entries.clear()));
    steps.take(&copy).unwrap_err();
    assert!(world.lock().nodes["n1"].holds.is_empty());
    assert_eq!(world.lock().nodes["n1"].pulled, [id(1)]);
}
