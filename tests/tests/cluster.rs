//! A cluster of real nodes on hosts of their own, with a real etcd.

use permafrost_tests::cluster::{Cluster, Setup};
use permafrost_tests::criu;
use permafrost_tests::workload::{self, Workload};

#[test]
fn a_task_dumped_on_a_node_that_dies_thaws_on_another() {
    const TEST: &str = "a_task_dumped_on_a_node_that_dies_thaws_on_another";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let Some(mut cluster) = Cluster::for_test(TEST, Setup::default()).unwrap() else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let options = workload::Options::tree(32);
    let mut task = cluster
        .host(0)
        .run(|| Workload::start(work.path(), &options))
        .unwrap();
    let pid = task.pid().to_string();
    let before = task.report().unwrap();

    let dumped = cluster
        .node(0)
        .json(&["dump", "--job", "days", "--pid", &pid])
        .unwrap();
    assert_eq!(
        dumped["checkpoint"]["nodes"].as_array().unwrap().len(),
        2,
        "{dumped}"
    );
    task.wait_until_gone().unwrap();
    let status = cluster.node(1).json(&["status"]).unwrap();
    let part = &status["cluster"];
    assert_eq!(part["copies_wanted"], 2, "{status}");
    assert_eq!(part["fenced"], "", "{status}");
    assert!(
        !part["id"].as_str().unwrap().is_empty() && !part["node"].as_str().unwrap().is_empty(),
        "{status}"
    );
    // A place in the queue of another node, which is given up by its token alone.
    let work = tempfile::tempdir().unwrap();
    let place = work.path().join("place");
    let place = place.to_str().unwrap();
    let reserve = [
        "reserve",
        "--bytes",
        "128M",
        "--node",
        "node-2",
        "--reservation-file",
        place,
    ];
    let reserved = cluster.node(0).json(&reserve).unwrap();
    assert_eq!(reserved["node"], "node-2", "{reserved}");
    let places = || {
        let status = cluster.node(2).json(&["status"]).unwrap();
        status["queues"][0]["reserved"].clone()
    };
    assert_eq!(places(), 1);
    cluster
        .node(0)
        .run(&["reserve", "--cancel", "--reservation-file", place])
        .unwrap();
    assert_eq!(places(), 0);
    // A tree with thousands of threads has as many images, and so have its copies.
    let images = work.path().join("images");
    let images = images.to_str().unwrap();
    cluster.node(0).run(&["get", "days", images]).unwrap();
    for thread in 0..4200 {
        std::fs::write(format!("{images}/ids-9{thread:04}.img"), [1, 2, 3]).unwrap();
    }
    let stored = cluster.node(0).json(&["put", "threads", images]).unwrap();
    assert_eq!(stored["nodes"].as_array().unwrap().len(), 2, "{stored}");
    cluster.node(0).run(&["rm", "threads@1", "--last"]).unwrap();
    // A pin holds on every node, whoever has a copy.
    cluster.node(0).run(&["pin", "days"]).unwrap();
    for node in 0..3 {
        let refused = cluster.node(node).try_run(&["rm", "days@1"]).unwrap();
        assert_eq!(refused.status.code(), Some(4), "{refused:?}");
    }
    cluster.kill(0).unwrap();

    // Not on a node that holds it only: whichever is asked.
    for node in [1, 2] {
        let listed = cluster.node(node).json(&["ls"]).unwrap();
        assert_eq!(
            listed["checkpoints"].as_array().unwrap().len(),
            1,
            "{listed}"
        );
        cluster.node(node).run(&["restore", "days"]).unwrap();
        let after = task.verify().unwrap();
        assert_eq!(after.generation, before.generation);
        task.kill();
    }
}
