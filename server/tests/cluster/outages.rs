//! Failures of single members of etcd, and of all of them.

use permafrost_protocol::control::ErrorCode;
use permafrost_protocol::control::ReportedError as _;
use std::time::{Duration, Instant};

use permafrost_cluster::ClusterConfig;
use permafrost_clustered::Registry as _;

use crate::support::{Bench, entry, until};

#[test]
fn one_member_of_three_may_die_and_all_may_come_back() {
    let Some(mut bench) = Bench::new("cluster outages", 3) else {
        return;
    };
    let config = ClusterConfig {
        lease_ttl: Duration::from_secs(5),
        call_deadline: Duration::from_secs(4),
        ..bench.config()
    };
    let cluster = bench.try_join(&config, "n1", "r1").unwrap();
    let (registry, fence) = (cluster.registry(), cluster.fence());
    registry.publish(&entry("j", 1, "x"), None).unwrap();
    let counters = cluster.registry_counters();
    let answered = || counters.answered.counts().iter().sum::<u64>();
    let before = answered();
    registry.list("").unwrap();
    assert!(answered() > before);
    assert!(!counters.answered.sum().is_zero());

    // The one that this node speaks with dies; whichever is etcd's leader. A call may meet the election and be told
    // that it is over only after its deadline, but not again and again.
    bench.etcd.kill(0).unwrap();
    let begun = Instant::now();
    until("publishing goes on", || {
        registry.publish(&entry("j", 2, "y"), None).is_ok()
    });
    println!("published {:?} after a member died", begun.elapsed());
    until("the registration goes on", || fence.check().is_ok());
    // One that is silent but keeps its connections, too.
    bench.etcd.restart(0).unwrap();
    bench.etcd.wait_ready().unwrap();
    bench.etcd.pause(1).unwrap();
    let begun = Instant::now();
    until("publishing goes on", || {
        registry.publish(&entry("j", 3, "z"), None).is_ok()
    });
    println!("published {:?} after a member fell silent", begun.elapsed());
    bench.etcd.resume(1).unwrap();

    for index in 0..bench.etcd.members() {
        bench.etcd.kill(index).unwrap();
    }
    let begun = Instant::now();
    let failed = counters.failed.value();
    let error = registry.list("").unwrap_err();
    assert!(error.code() == ErrorCode::Unavailable, "{error}");
    let error = registry.publish(&entry("j", 4, "lost"), None).unwrap_err();
    assert!(error.code() == ErrorCode::Unavailable, "{error}");
    // Renewals of the lease fail meanwhile, too.
    assert!(counters.failed.value() >= failed + 2);
    let took = begun.elapsed();
    assert!(
        took < 2 * config.call_deadline + Duration::from_secs(3),
        "{took:?}"
    );
    until("the fence closes", || fence.check().is_err());

    // A node that starts meanwhile comes up, fenced.
    let late = bench.try_join(&config, "n2", "r2").unwrap();
    assert!(late.fence().check().is_err());

    for index in 0..bench.etcd.members() {
        bench.etcd.restart(index).unwrap();
    }
    let begun = Instant::now();
    until("the registry answers", || {
        registry.list("").is_ok_and(|all| all.len() == 3)
    });
    until("both are registered", || {
        fence.check().is_ok() && late.fence().check().is_ok()
    });
    println!("works {:?} after all were started again", begun.elapsed());
    registry.publish(&entry("j", 4, "w"), None).unwrap();
    until("both are seen", || cluster.nodes().live().nodes.len() == 2);
}
