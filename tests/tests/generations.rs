//! A task's life: dumped, restored, dumped again, ten times over, checked by its own checksum each time.

use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::workload::{self, Workload};

#[test]
fn ten_generations_each_restored_and_checked() {
    if criu::for_test("ten_generations_each_restored_and_checked").is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let options = workload::Options {
        size_mib: 24,
        ..workload::Options::default()
    };
    let mut workload = Workload::start(work.path(), &options).unwrap();
    let mut counter = 0;
    for generation in 1..=10_u64 {
        let modified = workload.modify().unwrap();
        let dumped = daemon
            .json(&[
                "dump",
                "--pid",
                &workload.pid().to_string(),
                "--job",
                "tasks/one",
            ])
            .unwrap();
        assert_eq!(dumped["checkpoint"]["generation"], generation, "{dumped}");
        workload.wait_until_gone().unwrap();
        daemon.run(&["restore", "tasks/one"]).unwrap();
        let after = workload.verify().unwrap();
        assert!(after.is_sound(), "generation {generation}: {after:?}");
        assert_eq!(
            after.generation, modified.generation,
            "modifications survive"
        );
        assert!(after.counter > counter, "the counter goes on");
        counter = after.counter;
    }
    // A tenth is modified between dumps, so the ten together stay well under three whole ones.
    let listed = daemon.json(&["ls", "tasks/one"]).unwrap();
    let added: Vec<u64> = listed["checkpoints"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["added_bytes"].as_u64().unwrap())
        .collect();
    let (first, later) = added.split_first().unwrap();
    assert!(
        later.iter().all(|bytes| bytes * 4 < *first),
        "added bytes: {added:?}"
    );

    // Any generation restores, and the ancestors of one that is left may go.
    workload.kill();
    for generation in 1..=9 {
        daemon
            .run(&["rm", &format!("tasks/one@{generation}")])
            .unwrap();
    }
    let verified = daemon.json(&["verify"]).unwrap();
    assert_eq!(
        verified["damage"].as_array().map(Vec::len),
        Some(0),
        "{verified}"
    );
    daemon.run(&["restore", "tasks/one@10"]).unwrap();
    assert!(workload.verify().unwrap().is_sound());
}

#[test]
fn a_task_left_running_is_not_disturbed() {
    if criu::for_test("a_task_left_running_is_not_disturbed").is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let mut workload = Workload::start(work.path(), &workload::Options::tree(16)).unwrap();
    let pid = workload.pid().to_string();
    for _ in 0..3 {
        daemon
            .json(&["dump", "--pid", &pid, "--job", "running", "--leave-running"])
            .unwrap();
        assert!(workload.is_running());
        workload.modify().unwrap();
        assert!(workload.verify().unwrap().is_sound());
    }
    let generation_of_third = workload.report().unwrap().generation;
    workload.kill();
    daemon.run(&["restore", "running@2"]).unwrap();
    let back = workload.verify().unwrap();
    assert!(back.is_sound(), "{back:?}");
    assert_eq!(
        back.generation + 2,
        generation_of_third,
        "the second dump is from before the second modification"
    );
}
