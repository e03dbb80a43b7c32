//! `permafrost doctor` of a real daemon, and of a cluster in which clocks and etcd are wrong.

mod common;

use std::time::Duration;

use common::clustered::is_live;

use permafrost_tests::cluster::{Cluster, Setup};
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::{criu, faketime};
use serde_json::Value;

/// Runs the command, whatever it finds.
fn doctor(daemon: &Daemon) -> Value {
    let output = daemon.try_run(&["doctor", "--json"]).unwrap();
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    let has_errors = report["errors"].as_u64().unwrap() > 0;
    assert_eq!(
        output.status.code(),
        Some(i32::from(has_errors)),
        "{report:#}"
    );
    report
}

#[track_caller]
fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    let checks = report["checks"].as_array().unwrap();
    let found = checks.iter().find(|check| check["check"] == name);
    found.unwrap_or_else(|| panic!("no {name}: {report:#}"))
}

#[test]
fn a_daemon_tells_what_it_guarantees_and_where_its_files_are() {
    const TEST: &str = "a_daemon_tells_what_it_guarantees_and_where_its_files_are";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let report = doctor(&daemon);
    for name in [
        "permafrostd",
        "program",
        "control socket",
        "API socket",
        "data directory",
        "run directory",
    ] {
        assert_eq!(check(&report, name)["status"], "ok", "{name}: {report:#}");
    }
    let region = check(&report, "guarantee")["found"].as_str().unwrap();
    assert!(
        region.starts_with(work.path().to_str().unwrap()),
        "{region}"
    );
    // What others may read is found, while the daemon runs.
    let data = work.path().join("data");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&data, open).unwrap();
    assert_eq!(check(&doctor(&daemon), "data directory")["status"], "error");
}

#[test]
fn a_cluster_s_clocks_and_registry_are_looked_at() {
    const TEST: &str = "a_cluster_s_clocks_and_registry_are_looked_at";
    if criu::for_test(TEST).is_none() || !faketime::for_test(TEST) {
        return;
    }
    let setup = Setup {
        members: 1,
        adjust: |node, options| {
            if node == 1 {
                options.prefix.extend(faketime::prefix(2));
            }
        },
        ..Setup::default()
    };
    let Some(mut cluster) = Cluster::for_test(TEST, setup).unwrap() else {
        return;
    };
    assert!(is_live(cluster.node(0), "node-1"));
    let report = doctor(cluster.node(0));
    let ahead = check(&report, "clock of node-1");
    assert_eq!(ahead["status"], "error", "{ahead}");
    let found = ahead["found"].as_str().unwrap();
    assert!(found.contains("ahead of that of node-0"), "{found}");
    assert_eq!(
        check(&report, "clock of node-2")["status"],
        "ok",
        "{report:#}"
    );
    let checks = report["checks"].as_array().unwrap();
    let members: Vec<_> = checks
        .iter()
        .filter(|check| check["area"] == "registry")
        .collect();
    let [member] = members.as_slice() else {
        panic!("{members:#?}");
    };
    assert_eq!(member["status"], "ok", "{member}");
    assert!(
        member["found"].as_str().unwrap().contains("etcd 3."),
        "{member}"
    );

    cluster.kill(2).unwrap();
    cluster.etcd.kill(0).unwrap();
    // What a probe has found is told for 3 s.
    std::thread::sleep(Duration::from_millis(3_200));
    let report = doctor(cluster.node(0));
    let checks = report["checks"].as_array().unwrap();
    let away = checks
        .iter()
        .any(|check| check["area"] == "registry" && check["status"] == "error");
    assert!(away, "{report:#}");
}
