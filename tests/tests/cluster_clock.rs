//! A node whose clock is wrong.

mod common;

use common::clustered::*;
use permafrost_tests::cluster::{Cluster, Setup};
use permafrost_tests::{criu, faketime};

const HOURS: i32 = 2;

#[test]
fn a_node_two_hours_ahead_keeps_its_lease_and_its_order() {
    const TEST: &str = "a_node_two_hours_ahead_keeps_its_lease_and_its_order";
    if criu::for_test(TEST).is_none() || !faketime::for_test(TEST) {
        return;
    }
    let setup = Setup {
        members: 1,
        extra: ["--lease", "2s"].map(str::to_owned).to_vec(),
        adjust: |node, options| {
            if node == 1 {
                options.prefix.extend(faketime::prefix(HOURS));
            }
        },
        ..Setup::default()
    };
    let Some(mut cluster) = Cluster::for_test(TEST, setup).unwrap() else {
        return;
    };
    let mut tasks = [0, 1].map(|host| Task::start(&cluster, host, 8));
    let [right, ahead] = &mut tasks;
    let first = dump(cluster.node(1), ahead, "days");
    assert_eq!(holders(&first).len(), 2, "{first}");
    // Later, and by its date earlier.
    let second = dump(cluster.node(0), right, "days");
    assert_eq!(holders(&second).len(), 2, "{second}");
    let created = |line: &serde_json::Value| line["created_unix_ms"].as_u64().unwrap();
    let hour_ms = 3_600_000;
    assert!(
        created(&first) > created(&second) + hour_ms,
        "{first} {second}"
    );

    // For longer than its lease, and nobody took its place.
    std::thread::sleep(std::time::Duration::from_secs(3));
    for at in 0..3 {
        let at = cluster.node(at);
        assert!(is_live(at, "node-1"));
        assert_eq!(line(at, "days").unwrap()["generation"], 2);
        let shown = at.json(&["show", "days"]).unwrap();
        assert_eq!(shown["manifest"]["generation"], 2, "{shown}");
    }
    // The newest is the later one, on any node.
    thaw(cluster.node(1), right, "days");
    cluster.kill(1).unwrap();
    thaw(cluster.node(2), ahead, "days@1");
    thaw(cluster.node(0), right, "days");
}
