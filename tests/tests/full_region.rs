//! When there is no room, CRIU is told so, and the task lives.

use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::workload::{self, Workload};

#[test]
fn a_dump_that_does_not_fit_leaves_the_task_running() {
    if criu::for_test("a_dump_that_does_not_fit_leaves_the_task_running").is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(
        work.path(),
        &Options {
            region_mib: 64,
            ..Options::default()
        },
    )
    .unwrap();
    let options = workload::Options {
        size_mib: 96,
        ..workload::Options::default()
    };
    let workload = Workload::start(work.path(), &options).unwrap();
    let pid = workload.pid().to_string();
    let refused = daemon
        .try_run(&["dump", "--pid", &pid, "--job", "big"])
        .unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(6), "no space: {said}");
    assert!(said.contains("full") && said.contains("hint"), "{said}");
    assert!(workload.is_running(), "the task must live");
    assert!(workload.verify().unwrap().is_sound());

    // All that it took is free again.
    let status = daemon.json(&["status"]).unwrap();
    let region = &status["regions"][0];
    assert_eq!(region["free_bytes"], region["capacity_bytes"], "{status}");
}
