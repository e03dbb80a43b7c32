//! Property test: from any state and through any failures, repair reaches complete sets of copies, and never
//! has fewer than before.

use std::collections::BTreeMap;
use std::time::Duration;

use permafrost_clustered::Registered;
use proptest::prelude::*;

use super::super::planner::Planner;
use super::super::wanted_copies;
use super::fakes::{FakeNode, Shared, at_once, id, name};
use crate::{MemberState, NodeClass};

#[derive(Clone, Debug)]
enum Event {
    Dies(usize),
    ComesBack(usize),
    Drained(usize),
    Active(usize),
    Transient(usize),
    Removed(usize),
    /// The node's copy of a checkpoint becomes damaged, unnoticed.
    Damaged(usize, usize),
    /// The node's scrub has found and reported all its damage.
    Scrubbed(usize),
    /// The node has healed the checkpoints that have a good copy elsewhere.
    Healed(usize),
    Full(usize),
    Emptied(usize),
}

#[derive(Clone, Debug)]
struct Case {
    nodes: usize,
    /// Wanted copies, holders, and the listed holders that have no copy.
    checkpoints: Vec<(u32, Vec<usize>, Vec<usize>)>,
    /// Events before each round.
    events: Vec<Vec<Event>>,
    /// Results of the calls, cyclically: true if a call fails.
    fails: Vec<bool>,
}

fn event(nodes: usize) -> impl Strategy<Value = Event> {
    (0..12_u8, 0..nodes, 0..6_usize).prop_map(|(kind, node, checkpoint)| match kind {
        0 => Event::Dies(node),
        1 => Event::ComesBack(node),
        2 => Event::Drained(node),
        3 => Event::Active(node),
        4 => Event::Transient(node),
        5 => Event::Removed(node),
        6 | 7 => Event::Damaged(node, checkpoint),
        8 => Event::Scrubbed(node),
        9 => Event::Healed(node),
        10 => Event::Full(node),
        _ => Event::Emptied(node),
    })
}

fn case() -> impl Strategy<Value = Case> {
    (1..7_usize).prop_flat_map(|nodes| {
        let holders = || prop::collection::vec(0..nodes, 0..4);
        let checkpoint = (0..4_u32, holders(), prop::collection::vec(0..nodes, 0..2));
        (
            prop::collection::vec(checkpoint, 1..6),
            prop::collection::vec(prop::collection::vec(event(nodes), 0..3), 0..8),
            prop::collection::vec(prop::bool::weighted(0.3), 1..40),
        )
            .prop_map(move |(checkpoints, events, fails)| Case {
                nodes,
                checkpoints,
                events,
                fails,
            })
    })
}

impl Case {
    fn world(&self) -> Shared {
        let world = Shared::with_nodes(self.nodes);
        for ((wanted, holders, lost), number) in self.checkpoints.iter().zip(1..) {
            let mut holders = holders.clone();
            holders.sort_unstable();
            holders.dedup();
            world.list_of(number, "job", number, *wanted, &holders);
            for node in lost {
                let mut world = world.lock();
                let node = world.nodes.get_mut(&name(*node)).unwrap();
                node.holds.remove(&id(number));
            }
        }
        world
    }
}

impl Event {
    fn happen(&self, world: &Shared) {
        let (Self::Dies(number)
        | Self::ComesBack(number)
        | Self::Drained(number)
        | Self::Active(number)
        | Self::Transient(number)
        | Self::Removed(number)
        | Self::Damaged(number, _)
        | Self::Scrubbed(number)
        | Self::Healed(number)
        | Self::Full(number)
        | Self::Emptied(number)) = self;
        let own = name(*number);
        if let Self::Damaged(_, checkpoint) = self {
            return damage(world, &own, *checkpoint);
        }
        let mut world = world.lock();
        let world = &mut *world;
        let others = world.nodes.clone();
        let node = world.nodes.get_mut(&name(*number)).unwrap();
        match self {
            Self::Dies(_) => node.live = false,
            Self::ComesBack(_) => node.live = true,
            Self::Drained(_) => node.state = MemberState::Drained,
            Self::Active(_) => node.state = MemberState::Active,
            Self::Transient(_) => node.class = NodeClass::Transient,
            Self::Removed(_) => node.state = MemberState::Removed,
            Self::Damaged(..) => {}
            Self::Scrubbed(_) => say_damage(&own, node, &mut world.entries),
            Self::Healed(_) => {
                let has = |id: &String| {
                    let live = others.values().filter(|other| other.live);
                    live.filter(|other| other.has_good(id)).count() > 0
                };
                node.damaged.retain(|id| !node.live || !has(id));
                say_damage(&own, node, &mut world.entries);
            }
            Self::Full(_) => node.free_bytes = 0,
            Self::Emptied(_) => node.free_bytes = 50 << 30,
        }
    }
}

/// Damages a copy, but not the last good one: no repair can help against that damage of the medium.
fn damage(world: &Shared, node: &str, checkpoint: usize) {
    let mut world = world.lock();
    let Some(id) = world
        .entries
        .get(checkpoint)
        .map(|e| e.checkpoint.id.clone())
    else {
        return;
    };
    let good = world
        .nodes
        .values()
        .filter(|node| node.has_good(&id))
        .count();
    let node = world.nodes.get_mut(node).unwrap();
    if good > 1 && node.holds.contains(&id) {
        node.damaged.insert(id);
    }
}

/// Lists the damage that a node knows of in its copies.
fn say_damage(name: &str, node: &FakeNode, entries: &mut [Registered]) {
    for entry in entries.iter_mut().filter(|_| node.live) {
        let damaged = node.damaged.contains(&entry.checkpoint.id);
        entry.set_damaged(name, damaged);
    }
}

/// Returns the number of good copies of each checkpoint, and of those on live nodes at all.
fn good(world: &Shared) -> BTreeMap<String, (usize, usize)> {
    let entries = world.lock().entries.clone();
    let count = |id: &String| {
        let world = world.lock();
        let live = world.nodes.values().filter(|node| node.live);
        live.filter(|node| node.has_good(id)).count()
    };
    entries
        .iter()
        .map(|entry| &entry.checkpoint.id)
        .map(|id| (id.clone(), (world.good(id), count(id))))
        .collect()
}

/// Returns true if a live node has a good copy that the cluster can know of: a removed node no longer reports
/// its copies.
fn is_within_reach(world: &Shared, entry: &Registered) -> bool {
    let id = &entry.checkpoint.id;
    let world = world.lock();
    let mut holders = (world.nodes.iter()).filter(|(_, node)| node.live && node.has_good(id));
    holders.any(|(name, node)| node.state != MemberState::Removed || entry.nodes.contains(name))
}

/// Checks that no step drops a copy that is needed.
fn check_kept(world: &Shared, before: &mut BTreeMap<String, (usize, usize)>) {
    let after = good(world);
    let entries = world.lock().entries.clone();
    for entry in entries {
        let wanted = wanted_copies(&entry);
        let (was, now) = (before[&entry.checkpoint.id], after[&entry.checkpoint.id]);
        assert!(now.0 >= was.0.min(wanted), "{was:?} {now:?} {entry:?}");
        assert!(now.1 >= was.1.min(wanted), "{was:?} {now:?} {entry:?}");
    }
    *before = after;
}

/// Returns the number of good copies of each checkpoint on any node, dead ones too.
fn copies_anywhere(world: &Shared) -> BTreeMap<String, usize> {
    let world = world.lock();
    let ids = world.entries.iter().map(|entry| &entry.checkpoint.id);
    let count = |id: &String| {
        world
            .nodes
            .values()
            .filter(|node| node.has_good(id))
            .count()
    };
    ids.map(|id| (id.clone(), count(id))).collect()
}

/// Corrects the listing as each live node's own sweep does.
fn sweep(world: &Shared) {
    let mut world = world.lock();
    let nodes = world.nodes.clone();
    let mut spare = Vec::new();
    for entry in &mut world.entries {
        let id = &entry.checkpoint.id.clone();
        for (name, node) in nodes.iter().filter(|(_, node)| node.live) {
            let listed = entry.nodes.contains(name);
            match node.holds.contains(id) {
                true if !listed && node.state != MemberState::Removed => {
                    // A damaged copy is not claimed, and is dropped when there are enough others.
                    let damaged = node.damaged.contains(id);
                    entry.set_holder(name, !damaged);
                    if damaged && entry.good().count() >= wanted_copies(entry) {
                        spare.push((name.clone(), id.clone()));
                    }
                }
                false if entry.nodes.len() > 1 => {
                    entry.set_holder(name, false);
                }
                _ => {}
            }
        }
    }
    for (name, id) in spare {
        let node = world.nodes.get_mut(&name).unwrap();
        node.holds.remove(&id);
        node.damaged.remove(&id);
    }
}

fn run(case: &Case) {
    let world = case.world();
    let steps = world.steps();
    let mut planner = Planner::new(at_once());
    let mut fails = case.fails.clone().into_iter().cycle();
    world.lock().fails = Some(Box::new(move || fails.next().unwrap_or_default()));
    let mut now = Duration::from_secs(1);
    for events in &case.events {
        for event in events {
            event.happen(&world);
        }
        let mut before = good(&world);
        world.round(&mut planner, &steps, now, || {
            check_kept(&world, &mut before)
        });
        sweep(&world);
        now += Duration::from_millis(70);
    }

    // From here on every call succeeds, and every scrub completes. Nothing else heals damage.
    world.lock().fails = None;
    for number in 0..case.nodes {
        Event::Emptied(number).happen(&world);
        Event::Scrubbed(number).happen(&world);
    }
    let every_copy = copies_anywhere(&world);
    let mut idle = 0;
    for _ in 0..40 {
        now += Duration::from_secs(60);
        let mut before = good(&world);
        let done = world.round(&mut planner, &steps, now, || {
            check_kept(&world, &mut before)
        });
        sweep(&world);
        idle = if done == 0 { idle + 1 } else { 0 };
    }
    let entries = world.lock().entries.clone();
    // A checkpoint that is listed only where it is missing is requested again and again.
    let lost = (entries.iter()).any(|entry| !is_within_reach(&world, entry));
    assert!(idle > 10 || lost, "it never comes to rest");
    for entry in entries {
        let id = &entry.checkpoint.id;
        let wanted = wanted_copies(&entry);
        let (good, _) = good(&world)[id];
        // An acknowledged checkpoint with one good copy exists to the end.
        assert!(
            every_copy[id] == 0 || copies_anywhere(&world)[id] > 0,
            "{entry:?}"
        );
        if !is_within_reach(&world, &entry) {
            continue;
        }
        // A node with a damaged copy gets no other, before it has healed that or it was dropped.
        let nodes = world.lock().nodes.clone();
        let fit = nodes
            .values()
            .filter(|node| node.counts() && !node.damaged.contains(id));
        assert_eq!(good, wanted.min(fit.count()), "{entry:?}");
        for (name, node) in &world.lock().nodes {
            let (holds, listed) = (node.holds.contains(id), entry.nodes.contains(name));
            // See `is_within_reach`.
            let damaged = node.damaged.contains(id);
            if node.live && node.state != MemberState::Removed {
                assert!(holds == listed || damaged, "{name} {entry:?}");
                // Once there are enough good copies, a damaged one is gone.
                assert!(!(damaged && listed) || good < wanted, "{name} {entry:?}");
                assert!(!holds || good < wanted || node.counts(), "{name} {entry:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn copies_become_whole_and_never_fewer(case in case()) {
        run(&case);
    }
}

/// A surplus copy is taken off the list, the node does not hear that it is to drop it, and is removed: the copy
/// that is left on it does not count, also when the last holder dies later.
#[test]
fn a_copy_left_on_a_removed_node_is_no_copy() {
    let mut fails = vec![false; 16];
    for call in [9, 10, 15] {
        fails[call] = true;
    }
    run(&Case {
        nodes: 3,
        checkpoints: vec![
            (3, vec![0, 2], vec![]),
            (0, vec![0, 1, 2], vec![]),
            (0, vec![2, 1], vec![]),
        ],
        events: vec![
            vec![],
            vec![Event::Removed(2)],
            vec![],
            vec![Event::Dies(1)],
        ],
        fails,
    });
}
