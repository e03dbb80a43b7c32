//! etcd's leader dies or falls silent while several nodes publish: nothing is lost, and nothing is there twice.

use permafrost_protocol::control::ErrorCode;
use permafrost_protocol::control::ReportedError as _;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use permafrost_cluster::EtcdRegistry;
use permafrost_clustered::Registry as _;

use crate::support::{Bench, LIMIT, entry, until};

/// Publishes one checkpoint after the other, each until it is known to be listed, and counts them.
fn publish(
    registry: &EtcdRegistry,
    job: &str,
    done: &AtomicUsize,
    stop: &AtomicBool,
) -> BTreeSet<u64> {
    let mut listed = BTreeSet::new();
    while !stop.load(Ordering::Relaxed) {
        let generation = match registry.reserve_generation(job) {
            Ok(generation) => generation,
            // Fenced for a while, or nobody answered.
            Err(error) if error.code() == ErrorCode::Unavailable => {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            Err(other) => panic!("{other}"),
        };
        let id = format!("{job}-{generation}");
        let begun = Instant::now();
        // What is unknown is asked again: it may be listed already, and must not be listed twice.
        while let Err(error) = registry.publish(&entry(job, generation, &id), None) {
            assert!(error.code() == ErrorCode::Unavailable, "{error}");
            assert!(begun.elapsed() < LIMIT, "{error}");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(
            listed.insert(generation),
            "{job}@{generation} was handed out twice"
        );
        done.fetch_add(1, Ordering::Relaxed);
    }
    listed
}

/// Stops threads when it is dropped: they must also stop when the test panics, or their scope never ends.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Returns the index of the etcd member that reports itself as the leader. Stopped members do not answer and are
/// skipped.
fn leader(bench: &Bench) -> usize {
    let addresses = bench.etcd.addresses();
    bench.runtime.block_on(async {
        let begun = Instant::now();
        loop {
            for (index, address) in addresses.iter().enumerate() {
                let asked = tokio::time::timeout(Duration::from_secs(1), async {
                    let mut client = etcd_client::Client::connect([address], None).await.ok()?;
                    client.status().await.ok()
                });
                let Ok(Some(status)) = asked.await else {
                    continue;
                };
                let own = status.header().map_or(0, |header| header.member_id());
                if own != 0 && own == status.leader() {
                    return index;
                }
            }
            assert!(begun.elapsed() < LIMIT, "nobody leads etcd");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
}

#[test]
fn publishing_outlives_leaders_that_die_and_links_that_are_cut() {
    /// Publications between two faults, of all threads together.
    const MORE: usize = 40;
    let Some(mut bench) = Bench::new("cluster storms", 3) else {
        return;
    };
    let clusters = [bench.join("n1"), bench.join("n2")];
    let (done, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let listed: Vec<(String, BTreeSet<u64>)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|number| {
                let registry = clusters[number % 2].registry();
                let (done, stop) = (&done, &stop);
                scope.spawn(move || {
                    let job = format!("job-{number}");
                    let listed = publish(&registry, &job, done, stop);
                    (job, listed)
                })
            })
            .collect();
        let more = |what: &str| {
            let until_now = done.load(Ordering::Relaxed);
            let took = until(what, || done.load(Ordering::Relaxed) >= until_now + MORE);
            println!("{what}: {MORE} in {took:?}");
        };
        let stops = Stops(&stop);
        more("at first");
        // Silent, with all its connections open; then back as a follower.
        let first = leader(&bench);
        bench.etcd.pause(first).unwrap();
        more("without the silent leader");
        bench.etcd.resume(first).unwrap();
        more("with it again");
        let second = leader(&bench);
        bench.etcd.kill(second).unwrap();
        more("without the dead leader");
        // One more falls silent: nobody has a majority. Both nodes must cease to act.
        let third = leader(&bench);
        bench.etcd.pause(third).unwrap();
        for cluster in &clusters {
            until("it is fenced", || cluster.fence().check().is_err());
        }
        bench.etcd.resume(third).unwrap();
        more("with a majority again");
        bench.etcd.restart(second).unwrap();
        more("with all of them");
        drop(stops);
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    let registry = clusters[0].registry();
    let mut all = None;
    until("the registry answers", || {
        all = registry.list("").ok();
        all.is_some()
    });
    let all = all.unwrap();
    let ids: BTreeSet<_> = all
        .iter()
        .map(|entry| entry.checkpoint.id.as_str())
        .collect();
    assert_eq!(ids.len(), all.len(), "a checkpoint is listed twice");
    for (job, generations) in &listed {
        let of_job = all.iter().filter(|entry| entry.checkpoint.job == *job);
        let of_job: BTreeSet<_> = of_job.map(|entry| entry.checkpoint.generation).collect();
        assert_eq!(of_job, *generations, "of {job}");
    }
    println!("{} checkpoints", all.len());
}

/// etcd chooses a leader anew, again and again: what is asked of the registry meanwhile takes longer, and is done.
#[test]
fn an_election_of_etcd_refuses_nothing() {
    const BLOWS: usize = 4;
    let Some(mut bench) = Bench::new("cluster elections", 3) else {
        return;
    };
    // Its lease is shorter than usual: an election takes longer.
    let cluster = bench.join("n1");
    let registry = cluster.registry();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !stop.load(Ordering::Relaxed) {
                let begun = Instant::now();
                registry.reserve_generation("job").unwrap();
                longest = longest.max(begun.elapsed());
            }
            longest
        });
        let stops = Stops(&stop);
        for _ in 0..BLOWS {
            // Not one that only falls silent: an etcd before 3.4.31 or 3.5.13 that wakes up and does not know yet that
            // another leads ends leases whose time has passed meanwhile.
            let leads = leader(&bench);
            bench.etcd.kill(leads).unwrap();
            leader(&bench);
            bench.etcd.restart(leads).unwrap();
            // It may make the others choose once more.
            std::thread::sleep(Duration::from_secs(2));
        }
        drop(stops);
        println!("the longest took {:?}", asking.join().unwrap());
    });
}
