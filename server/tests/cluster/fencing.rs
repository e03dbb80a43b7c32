//! A node that cannot reach etcd stops acting before another node may take its place.

use permafrost_protocol::control::ErrorCode;
use permafrost_protocol::control::ReportedError as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use permafrost_cluster::{ClusterConfig, MemberState};
use permafrost_clustered::Registry as _;

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
    assert!(
        refused
            .as_ref()
            .is_err_and(|error| error.code() == ErrorCode::Unavailable)
    );
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
    assert!(late.code() == ErrorCode::Conflict, "{late}");
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
            Err(error) if error.code() == ErrorCode::Conflict => {
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
    // A node that sends a sign of life every ten seconds only: in between it cannot notice that it is gone. On a
    // machine that stands still for so long it may, and then nothing was shown: once more, under another name.
    let seldom = ClusterConfig {
        lease_ttl: Duration::from_secs(30),
        ..bench.config()
    };
    for attempt in 0..5 {
        let (node, job) = (format!("n{attempt}"), format!("j{attempt}"));
        let first = bench.try_join(&seldom, &node, "r1").unwrap();
        let registry = first.registry();
        let generation = registry.reserve_generation(&job).unwrap();
        registry
            .publish(&entry(&job, generation, "x"), None)
            .unwrap();
        let x = entry(&job, generation, "x").checkpoint;
        // The first sign of life comes with the registration; it must be through.
        std::thread::sleep(Duration::from_millis(500));
        let token = first.fence().token();
        // The same region on the same machine: the first is taken for dead.
        let second = bench.try_join(&seldom, &node, "r1").unwrap();
        assert!(second.fence().token() > token);
        let was_open = first.fence().token() == token;
        let late = [
            (
                "publish",
                registry.publish(&entry(&job, generation + 1, "late"), None),
            ),
            ("withdraw", registry.withdraw(&x)),
            ("hold", registry.set_holder(&x, "n9", true)),
            ("count", registry.reserve_generation(&job).map(drop)),
            ("lock", registry.lock_job(&job).map(drop)),
            (
                "drain",
                registry.set_member_state(&node, MemberState::Drained),
            ),
        ];
        let is_open = first.fence().token() == token;
        if !(was_open && is_open) {
            println!("attempt {attempt}: the first noticed in between");
            continue;
        }
        for (what, late) in late {
            let late = late.expect_err(what);
            assert!(late.code() == ErrorCode::Unavailable, "{what}: {late}");
            assert!(
                late.to_string().contains("lost its registration"),
                "{what}: {late}"
            );
        }
        let registry = second.registry();
        assert_eq!(registry.list(&job).unwrap(), [entry(&job, generation, "x")]);
        assert_eq!(registry.reserve_generation(&job).unwrap(), generation + 1);
        drop(registry.lock_job(&job).unwrap());
        return;
    }
    panic!("the first noticed each time: nothing was shown");
}
