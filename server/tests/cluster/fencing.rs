//! A node that cannot reach etcd ceases to act before another may take its place.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use permafrost_server::cluster::Registry as _;
use permafrost_server::store::StoreError;

use crate::support::{Bench, LIMIT, entry, until};

#[test]
fn a_silent_etcd_fences_the_node_before_its_lease_ends() {
    let Some(bench) = Bench::new("cluster fence", 1) else {
        return;
    };
    let cluster = bench.join("n1");
    let (fence, registry) = (cluster.fence(), cluster.registry());
    let lock = registry.lock_job("j").unwrap();
    let generation = registry.reserve_generation("j").unwrap();
    let token = fence.token().unwrap();
    let ttl = bench.config().lease_ttl;

    bench.etcd.pause(0).unwrap();
    let paused = Instant::now();
    let closed = until("the fence closes", || fence.check().is_err());
    // Everything this node had sent was answered before; so etcd counts from no later than this moment.
    assert!(
        closed < ttl,
        "closed {closed:?} after the last possible sign of life"
    );
    let refused = registry.publish(&entry("j", generation, "late"), None);
    assert!(matches!(refused, Err(StoreError::Unavailable { .. })));
    println!("fenced {closed:?} after etcd fell silent, of a lease of {ttl:?}");

    // Long enough for etcd to see that the lease is over.
    std::thread::sleep((ttl + Duration::from_secs(1)).saturating_sub(paused.elapsed()));
    bench.etcd.resume(0).unwrap();
    until("it registers again", || {
        fence.token().is_some_and(|new| new > token)
    });
    // The lock went with the lease: what was dumped under it is not listed any more.
    let late = registry
        .publish(&entry("j", generation, "late"), None)
        .unwrap_err();
    assert!(matches!(late, StoreError::Conflict { .. }), "{late}");
    assert!(registry.find("j", 0).unwrap().is_none());
    drop(lock);
    drop(registry.lock_job("j").unwrap());
}

#[test]
fn others_take_over_only_after_the_fence_has_closed() {
    let Some(mut bench) = Bench::new("cluster take-over", 1) else {
        return;
    };
    // A node whose runtime stands still: as a process that was stopped. Its late writes must fail.
    let stalled = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let own = std::mem::replace(&mut bench.runtime, stalled);
    let victim = bench.join("n1");
    let stalled = std::mem::replace(&mut bench.runtime, own);
    let other = bench.join("n2");
    let (fence, registry) = (victim.fence(), victim.registry());
    let drive = |what: Duration| stalled.block_on(async move { tokio::time::sleep(what).await });
    // Its calls run on its runtime, so they are driven here while they are waited for.
    let done = AtomicBool::new(false);
    let lock = std::thread::scope(|scope| {
        let lock = scope.spawn(|| {
            let lock = registry.lock_job("j");
            done.store(true, Ordering::SeqCst);
            lock
        });
        while !done.load(Ordering::SeqCst) {
            drive(Duration::from_millis(10));
        }
        lock.join().unwrap().unwrap()
    });
    assert!(other.registry().lock_job("j").is_err());
    // From here on nobody drives it, and no sign of life is sent.
    let begun = Instant::now();
    let taken = loop {
        match other.registry().lock_job("j") {
            Ok(lock) => break lock,
            Err(StoreError::Conflict { .. }) => {
                assert!(begun.elapsed() < LIMIT);
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => panic!("{error}"),
        }
    };
    println!("taken over after {:?}", begun.elapsed());
    assert!(
        fence.check().is_err(),
        "taken over while the first may still act"
    );
    let _ = (lock, taken);
}

/// A lease that is revoked behind a node's back, while its fence is open: etcd itself refuses its writes.
#[test]
fn a_transaction_of_a_registration_that_is_gone_changes_nothing() {
    let Some(bench) = Bench::new("cluster late write", 1) else {
        return;
    };
    let config = bench.config();
    let first = bench.try_join(&config, "n1", "r1").unwrap();
    let registry = first.registry();
    let generation = registry.reserve_generation("j").unwrap();
    // The same region on the same machine: the first is taken for dead.
    let second = bench.try_join(&config, "n1", "r1").unwrap();
    assert!(second.fence().token() > first.fence().token());
    let late = registry.publish(&entry("j", generation, "late"), None);
    // The first may have noticed already, and registered again in its turn: then it may write.
    if let Err(late) = late {
        assert!(matches!(late, StoreError::Unavailable { .. }), "{late}");
        assert!(second.registry().find("j", 0).unwrap().is_none());
    }
}
