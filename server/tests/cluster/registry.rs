//! Guarantees of the registry while nothing fails.

use permafrost_protocol::control::ErrorCode;
use permafrost_protocol::control::ReportedError as _;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use permafrost_cluster::rebuild::{self, Copy, NodeInventory};
use permafrost_clustered::Registry as _;
use permafrost_store::StoreError;

use crate::support::{Bench, entry};

#[test]
fn checkpoints_are_listed_found_held_and_withdrawn() {
    let Some(bench) = Bench::new("cluster registry", 1) else {
        return;
    };
    let (one, two) = (bench.join("n1"), bench.join("n2"));
    let (one, two) = (one.registry(), two.registry());
    let lock = one.lock_job("a/b").unwrap();
    let error = two.lock_job("a/b").err().unwrap();
    assert!(error.code() == ErrorCode::Conflict, "{error}");
    assert!(error.to_string().contains("n1"), "{error}");
    assert_eq!(one.reserve_generation("a/b").unwrap(), 1);
    one.publish(&entry("a/b", 1, "x"), None).unwrap();
    // Once more, as after an answer that was lost.
    one.publish(&entry("a/b", 1, "x"), None).unwrap();
    let taken = one.publish(&entry("a/b", 1, "other"), None).unwrap_err();
    assert!(taken.code() == ErrorCode::Conflict, "{taken}");
    // Not by one that does not hold the lock, while another does.
    let foreign = two.publish(&entry("a/b", 2, "y"), None).unwrap_err();
    assert!(foreign.to_string().contains("lock"), "{foreign}");
    // Nor a parked dump of the job, which has no number that could be taken.
    let foreign = two.publish(&entry("a/b", 0, "q"), None).unwrap_err();
    assert!(foreign.to_string().contains("lock"), "{foreign}");
    one.publish(&entry("a/b", 0, "q"), None).unwrap();
    one.withdraw(&entry("a/b", 0, "q").checkpoint).unwrap();
    drop(lock);
    let lock = two.lock_job("a/b").unwrap();
    assert_eq!(two.reserve_generation("a/b").unwrap(), 2);
    // A parked one, and its adoption.
    let parked = entry("", 0, "p");
    two.publish(&parked, None).unwrap();
    assert_eq!(one.list("").unwrap().len(), 2);
    two.publish(&entry("a/b", 2, "y"), Some("p")).unwrap();
    drop(lock);
    let listed = one.list("").unwrap();
    let ids: Vec<_> = listed.iter().map(|e| e.checkpoint.id.as_str()).collect();
    assert_eq!(ids, ["x", "y"]);

    assert_eq!(one.find("a/b", 0).unwrap().unwrap().checkpoint.id, "y");
    assert_eq!(one.find("a/b", 1).unwrap().unwrap(), entry("a/b", 1, "x"));
    assert!(one.find("a/b", 3).unwrap().is_none());
    assert!(one.find("a", 0).unwrap().is_none());
    assert!(one.list("a").unwrap().is_empty());

    let x = entry("a/b", 1, "x").checkpoint;
    one.set_holder(&x, "n2", true).unwrap();
    one.set_holder(&x, "n2", true).unwrap();
    two.set_holder(&x, "n1", false).unwrap();
    assert_eq!(one.find("a/b", 1).unwrap().unwrap().nodes, ["n2"]);
    let missing = one.set_holder(&entry("a/b", 1, "other").checkpoint, "n2", true);
    assert!(matches!(missing, Err(StoreError::NotFound { .. })));

    one.withdraw(&entry("a/b", 2, "y").checkpoint).unwrap();
    one.withdraw(&entry("a/b", 2, "y").checkpoint).unwrap();
    // Another checkpoint under the number is not meant.
    one.withdraw(&entry("a/b", 1, "other").checkpoint).unwrap();
    assert_eq!(one.find("a/b", 0).unwrap().unwrap().checkpoint.id, "x");
    assert_eq!(
        one.reserve_generation("a/b").unwrap(),
        3,
        "never used again"
    );
}

#[test]
fn racing_nodes_get_one_lock_and_different_generations() {
    const THREADS: usize = 4;
    const EACH: usize = 60;
    let Some(bench) = Bench::new("cluster races", 1) else {
        return;
    };
    let clusters = [bench.join("n1"), bench.join("n2")];
    let registries: Vec<_> = clusters.iter().map(|cluster| cluster.registry()).collect();
    let holders = AtomicUsize::new(0);
    let (numbers, locked) = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (registry, holders) = (&registries[thread % 2], &holders);
                scope.spawn(move || {
                    let numbers: Vec<_> = (0..EACH)
                        .map(|_| registry.reserve_generation("j").unwrap())
                        .collect();
                    assert!(numbers.is_sorted());
                    let mut locked = 0;
                    for _ in 0..40 {
                        match registry.lock_job("j") {
                            Ok(lock) => {
                                assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                                std::thread::yield_now();
                                holders.fetch_sub(1, Ordering::SeqCst);
                                locked += 1;
                                drop(lock);
                            }
                            Err(error) if error.code() == ErrorCode::Conflict => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                    (numbers, locked)
                })
            })
            .collect();
        let mut numbers = Vec::new();
        let mut locked = 0;
        for thread in threads {
            let (its, had) = thread.join().unwrap();
            numbers.extend(its);
            locked += had;
        }
        (numbers, locked)
    });
    assert!(locked > 0);
    let unique: BTreeSet<_> = numbers.iter().copied().collect();
    assert_eq!(unique.len(), THREADS * EACH, "a number was given out twice");
    assert_eq!(unique.first(), Some(&1));
    assert!(
        registries[0].lock_job("j").is_ok(),
        "a lock was left behind"
    );
}

#[test]
fn thousands_are_listed_by_pages_and_put_back_from_the_nodes() {
    const CHECKPOINTS: u64 = 2000;
    let Some(bench) = Bench::new("cluster listing", 1) else {
        return;
    };
    let cluster = bench.join("n1");
    let registry = cluster.registry();
    // They come back from a node's inventory: the rebuild and the listing at once.
    let copy = |generation: u64| Copy {
        checkpoint: entry("j", generation, &format!("{generation:032x}")).checkpoint,
        content_digest: [7; 32],
        is_published: true,
        is_damaged: false,
    };
    let inventory = |from: u64, to: u64| NodeInventory {
        node: "n1".to_owned(),
        copies: (from..=to).map(copy).collect(),
    };
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for part in 0..8 {
            let registry = &registry;
            let from = part * CHECKPOINTS / 8 + 1;
            let inventory = inventory(from, (part + 1) * CHECKPOINTS / 8);
            scope.spawn(move || {
                assert!(
                    rebuild::apply(registry, &rebuild::plan(&[], &[inventory], 2))
                        .unwrap()
                        .is_empty()
                );
            });
        }
    });
    println!("{CHECKPOINTS} put back in {:?}", begun.elapsed());
    let begun = Instant::now();
    let listed = registry.list("").unwrap();
    println!("{CHECKPOINTS} listed in {:?}", begun.elapsed());
    let generations: Vec<_> = listed.iter().map(|e| e.checkpoint.generation).collect();
    assert_eq!(generations, (1..=CHECKPOINTS).collect::<Vec<_>>());
    assert_eq!(registry.find("j", 0).unwrap().unwrap(), listed[1999]);
    assert_eq!(registry.reserve_generation("j").unwrap(), CHECKPOINTS + 1);
    // Nothing is left to do.
    let again = rebuild::plan(&listed, &[inventory(1, CHECKPOINTS)], 2);
    assert!(again.list.is_empty() && again.holders.is_empty() && again.doubts.is_empty());
}
