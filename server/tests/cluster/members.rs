//! Membership of a cluster: names, the view of the nodes, the leader.

use std::time::Duration;

use permafrost_cluster::MemberState;
use permafrost_metering::costs::{Costs, CostsConfig};
use permafrost_protocol::control::{ErrorCode, ReportedError};

use crate::support::{Bench, until};

#[test]
fn a_namesake_with_another_region_is_refused_while_the_first_is_alive() {
    let Some(bench) = Bench::new("cluster namesake", 1) else {
        return;
    };
    let config = bench.config();
    let first = bench.try_join(&config, "n1", "r1").unwrap();
    let token = first.fence().token().unwrap();
    let refused = bench.try_join(&config, "n1", "r2").err().unwrap();
    assert_eq!(refused.code(), ErrorCode::Conflict, "{refused}");
    let (message, hint) = (refused.to_string(), refused.hint());
    assert!(
        message.contains("r1") && message.contains("n1:7118"),
        "{message}"
    );
    assert!(hint.contains("another name"), "{hint}");
    first.fence().check().unwrap();

    // After a clean stop at once, with a higher token.
    bench.runtime.block_on(first.leave());
    assert!(first.fence().check().is_err());
    let second = bench.try_join(&config, "n1", "r2").unwrap();
    assert!(second.fence().token().unwrap() > token);
    // And the same region after a crash: its lease is still there, but it is known to be dead.
    drop(second);
    let third = bench.try_join(&config, "n1", "r2").unwrap();
    third.fence().check().unwrap();

    third
        .registry()
        .set_member_state("n1", MemberState::Removed)
        .unwrap();
    bench.runtime.block_on(third.leave());
    let removed = bench.try_join(&config, "n1", "r2").err().unwrap();
    assert!(removed.to_string().contains("removed"), "{removed}");
}

#[test]
fn of_two_daemons_with_one_name_and_copies_of_one_region_one_stops() {
    let Some(bench) = Bench::new("cluster twins", 1) else {
        return;
    };
    let config = bench.config();
    let join = |file: &str| bench.try_join_with(&config, "n1", "r1", file);
    let first = join("1:7").unwrap();
    let token = first.fence().token().unwrap();
    // On the same machine, as a test of both would be. It must not end the first one's lease.
    let second = join("1:8").err().unwrap();
    assert_eq!(second.code(), ErrorCode::Conflict, "{second}");
    let (message, hint) = (second.to_string(), second.hint());
    assert!(
        message.contains("a copy of this region, at n1:7118"),
        "{message}"
    );
    assert!(
        hint.contains("stop the daemon whose copy is not wanted"),
        "{hint}"
    );
    assert_eq!(first.fence().token(), Some(token), "the first goes on");
    // The very file again is the same node after a crash.
    drop(first);
    let first = join("1:7").unwrap();

    // The first one's lease ends for a moment, and its copy takes the place.
    let second = bench.join("n2");
    let other = second.registry();
    other.set_member_state("n1", MemberState::Removed).unwrap();
    until("it is fenced", || first.fence().check().is_err());
    other.set_member_state("n1", MemberState::Active).unwrap();
    // Whichever comes back first lives on; the other stops, or was refused.
    let copy = join("1:8");
    let failed = |cluster: &permafrost_cluster::Cluster| {
        let failed = cluster.failed();
        bench.runtime.block_on(async {
            tokio::time::timeout(Duration::from_millis(50), failed)
                .await
                .ok()
        })
    };
    match copy {
        Err(refused) => {
            assert!(
                refused.to_string().contains("copy of this region"),
                "{refused}"
            );
            until("the first is back", || first.fence().check().is_ok());
        }
        Ok(copy) => {
            let mut error = None;
            until("the first stops", || {
                error = failed(&first);
                error.is_some()
            });
            let error = error.unwrap().to_string();
            assert!(error.contains("copy of this region"), "{error}");
            copy.fence().check().unwrap();
        }
    }
}

#[test]
fn figures_of_a_node_reach_the_others() {
    let Some(bench) = Bench::new("cluster figures", 1) else {
        return;
    };
    let (one, two) = (bench.join("n1"), bench.join("n2"));
    let costs = Costs::new(CostsConfig::default());
    costs.copied("n1", 100 << 20, Duration::from_millis(500));
    let report = costs.report();
    let told = report.clone();
    two.update_facts(|facts| facts.figures = Some(told));
    let nodes = one.nodes();
    until("the figures are seen", || {
        let view = nodes.live();
        let mut nodes = view.nodes.into_iter();
        nodes.any(|node| {
            let facts = node.facts;
            assert!(facts.name != "n1" || facts.figures.is_none());
            let Some(figures) = facts.figures else {
                return false;
            };
            figures == report && figures.links.contains_key("n1")
        })
    });
}

#[test]
fn nodes_come_and_go_and_one_of_them_leads() {
    let Some(bench) = Bench::new("cluster view", 1) else {
        return;
    };
    let (one, two) = (bench.join("n1"), bench.join("n2"));
    let nodes = one.nodes();
    let names = || {
        let view = nodes.live();
        let names = view.nodes.iter().map(|node| node.facts.name.clone());
        names.collect::<Vec<_>>().join(",")
    };
    until("both are seen", || names() == "n1,n2");
    until("one leads", || {
        one.leader().is_mine() || two.leader().is_mine()
    });
    assert!(!(one.leader().is_mine() && two.leader().is_mine()));

    two.update_facts(|facts| facts.free_bytes = 4096);
    two.update_facts(|facts| facts.name = "other".to_owned());
    one.registry()
        .set_member_state("n2", MemberState::Drained)
        .unwrap();
    until("the new facts are seen", || {
        let view = nodes.live();
        let node = view.nodes.iter().find(|node| node.facts.name == "n2");
        node.is_some_and(|node| node.facts.free_bytes == 4096 && node.state == MemberState::Drained)
    });
    // The view says how old it is, and stays young while nothing happens.
    std::thread::sleep(Duration::from_millis(2500));
    assert!(
        nodes.live().age < Duration::from_secs(10),
        "{:?}",
        nodes.live().age
    );

    // The leader goes: the other one leads.
    let (gone, left) = if one.leader().is_mine() {
        (one, two)
    } else {
        (two, one)
    };
    bench.runtime.block_on(gone.leave());
    assert!(!gone.leader().is_mine());
    until("the other leads", || left.leader().is_mine());
    let nodes = left.nodes();
    until("it has gone", || nodes.live().nodes.len() == 1);
    assert_eq!(nodes.live().members.len(), 2);
}
