//! Retention in a cluster of real nodes: one rule for all of them, and deltas that outlive their parents on every
//! node.

mod common;

use std::time::Duration;

use common::clustered::*;
use common::*;
use permafrost_tests::cluster::{Cluster, Setup};
use permafrost_tests::process::wait_for;

const JOB: &str = "team/job";

#[test]
fn one_rule_holds_on_all_nodes_and_what_it_leaves_is_exact_everywhere() {
    const TEST: &str = "one_rule_holds_on_all_nodes_and_what_it_leaves_is_exact_everywhere";
    let setup = Setup {
        members: 1,
        extra: ["--retention-interval=1s", "--repair-grace=1s"]
            .map(str::to_owned)
            .to_vec(),
        ..Setup::default()
    };
    let Some(mut cluster) = Cluster::for_test(TEST, setup).unwrap() else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let set = [
        "retention",
        "set",
        "--namespace",
        "team",
        "--keep-last",
        "2",
    ];
    let rules = cluster.node(0).json(&set).unwrap();
    assert_eq!(cluster.node(2).json(&["retention", "show"]).unwrap(), rules);

    let mut memory = pages(1, 60);
    for generation in 1..=5_u8 {
        let node = usize::from(generation % 2);
        memory[usize::from(generation) * 5 * PAGE_SIZE] ^= generation;
        let sealed = sealed_dump(cluster.node(node), work.path(), JOB, &memory, || {});
        assert_eq!(sealed.generation, u64::from(generation));
        if generation == 1 {
            cluster.node(1).run(&["pin", "team/job@1"]).unwrap();
        }
    }
    for node in 0..3 {
        let mut last = Vec::new();
        let left = wait_for("what the rule leaves", Duration::from_secs(60), || {
            let listed = listing(cluster.node(node)).into_iter();
            last = listed
                .map(|line| line["generation"].as_u64().unwrap())
                .collect::<Vec<_>>();
            Ok((last == [1, 4, 5]).then_some(()))
        });
        left.unwrap_or_else(|error| panic!("{error} on node {node}: {last:?}"));
    }
    // By whichever node is asked, the last one does not go.
    for generation in [1, 4] {
        let name = format!("team/job@{generation}");
        cluster.node(2).run(&["rm", "--force", &name]).unwrap();
    }
    let (code, said) = refusal(cluster.node(2), &["rm", "team/job@5"]);
    assert!(code == 4 && said.contains("--last"), "{code}: {said}");

    // Its parents are gone on every node. A node that never had them gets a copy, and has all of its pages.
    let lost = 1;
    cluster.kill(lost).unwrap();
    wait_held(cluster.node(0), JOB, &names([0, 2]));
    for node in [0, 2] {
        let exported = exported_pages(cluster.node(node), work.path(), "team/job@5");
        assert!(exported == memory, "node {node}");
        let verified = cluster.node(node).json(&["verify"]).unwrap();
        assert_eq!(
            verified["damage"].as_array().map(Vec::len),
            Some(0),
            "{verified}"
        );
    }
}
