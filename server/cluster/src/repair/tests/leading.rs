//! Tests of the leader's threads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::super::{Leading, RepairProgress};
use super::fakes::{Shared, at_once, id};

fn leading(world: &Shared, progress: &Arc<RepairProgress>) -> Leading {
    Leading::new(
        Arc::new(world.clone()),
        Arc::new(world.clone()),
        Arc::new(world.clone()),
        at_once(),
        Arc::clone(progress),
    )
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn copies_are_made_on_all_nodes_at_once_and_on_each_one_by_one() {
    let world = Shared::with_nodes(4);
    for number in 1..=24 {
        world.list(number, 2, &[0]);
    }
    // Pulls under way by node, and the maximum at once.
    let now = Arc::new(Mutex::new((BTreeMap::<String, usize>::new(), 0)));
    let seen = Arc::clone(&now);
    world.lock().at_pull = Some(Arc::new(move |node| {
        let change = |by: isize| {
            let mut seen = seen.lock();
            let on_node = seen.0.entry(node.to_owned()).or_default();
            *on_node = on_node.checked_add_signed(by).unwrap();
            assert!(*on_node <= 1, "two at once on {node}");
            seen.1 = seen.1.max(seen.0.values().sum());
        };
        change(1);
        std::thread::sleep(Duration::from_millis(30));
        change(-1);
    }));
    let progress = Arc::new(RepairProgress::default());
    let worker = leading(&world, &progress).start().unwrap();
    until("all copies", || {
        (1..=24).all(|n| world.good(&id(n)) == 2 && world.holders(n).len() == 2)
    });
    until("the last look", || {
        progress.under_replicated.load(Ordering::Relaxed) == 0
            && progress.under_way.load(Ordering::Relaxed) == 0
    });
    worker.stop();
    assert_eq!(now.lock().1, 3);
    assert_eq!(progress.copies_made.load(Ordering::Relaxed), 24);
    assert_eq!(progress.bytes_copied.load(Ordering::Relaxed), 24 << 30);
    let world = world.lock();
    for name in ["n1", "n2", "n3"] {
        assert_eq!(world.nodes[name].pulled.len(), 8, "{name}");
    }
    // Each was pulled once.
    let asked: std::collections::BTreeSet<_> = world.asked.iter().collect();
    assert_eq!((asked.len(), world.asked.len()), (24, 24));
}

#[test]
fn only_the_leader_does_anything_and_another_one_goes_on() {
    let world = Shared::with_nodes(3);
    world.list(1, 2, &[0]);
    world.lock().not_leading = true;
    let progress = Arc::new(RepairProgress::default());
    let worker = leading(&world, &progress).start().unwrap();
    std::thread::sleep(Duration::from_millis(1200));
    assert!(world.lock().asked.is_empty());
    assert_eq!(progress.rounds.load(Ordering::Relaxed), 0);
    world.lock().not_leading = false;
    until("the copy", || world.holders(1).len() == 2);
    drop(worker);
}

#[test]
fn a_stopped_leader_does_not_wait_for_a_node_that_hangs() {
    let world = Shared::with_nodes(2);
    world.list(1, 2, &[0]);
    let (hangs, hung) = std::sync::mpsc::channel::<()>();
    let hung = Mutex::new(hung);
    let (entered, enters) = std::sync::mpsc::channel();
    world.lock().at_pull = Some(Arc::new(move |_| {
        entered.send(()).unwrap();
        let _ = hung.lock().recv();
    }));
    let worker = leading(&world, &Arc::default()).start().unwrap();
    enters.recv_timeout(Duration::from_secs(60)).unwrap();
    let began = Instant::now();
    worker.stop();
    assert!(began.elapsed() < Duration::from_secs(20));
    drop(hangs);
}
