//! Who is there: names, the view of the nodes, the leader.

use std::time::Duration;

use permafrost_server::cluster::MemberState;
use permafrost_server::costs::{Costs, CostsConfig};
use permafrost_server::store::StoreError;

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
    let StoreError::Conflict { message, hint } = &refused else {
        panic!("{refused}");
    };
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
