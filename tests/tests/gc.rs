//! Cleaning: the space that removed generations leave between the pages of later ones becomes free, on request and by
//! itself, and what is left is restored as it was.

use std::path::Path;
use std::time::Duration;

use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process::wait_for;
use permafrost_tests::workload::{self, Workload};

const MIB: u64 = 1 << 20;

/// Dumps of which the last one refers to scattered pages of all those before it.
const GENERATIONS: usize = 8;

fn daemon(dir: &Path, region_mib: u64, interval: &str) -> Daemon {
    let options = Options {
        region_mib,
        extra: vec![format!("--clean-interval={interval}")],
        ..Options::default()
    };
    Daemon::start(dir, &options).unwrap()
}

/// Leaves the last of several generations of a workload, which has ended.
fn leave_the_last(dir: &Path, daemon: &Daemon) -> Workload {
    let options = workload::Options {
        size_mib: 32,
        modify_percent: 10,
        ..workload::Options::default()
    };
    let mut workload = Workload::start(dir, &options).unwrap();
    let pid = workload.pid().to_string();
    for generation in 1..=GENERATIONS {
        if generation > 1 {
            workload.modify().unwrap();
        }
        let mut dump = vec!["dump", "--pid", &pid, "--job", "changing"];
        if generation < GENERATIONS {
            dump.push("--leave-running");
        }
        daemon.run(&dump).unwrap();
    }
    workload.wait_until_gone().unwrap();
    for generation in 1..GENERATIONS {
        daemon
            .run(&["rm", &format!("changing@{generation}")])
            .unwrap();
    }
    workload
}

fn free_bytes(daemon: &Daemon) -> u64 {
    daemon.json(&["status"]).unwrap()["regions"][0]["free_bytes"]
        .as_u64()
        .unwrap()
}

fn restore(daemon: &Daemon, workload: &Workload) {
    daemon.run(&["restore", "changing"]).unwrap();
    assert!(workload.verify().unwrap().is_sound());
}

#[test]
fn cleaning_frees_what_lies_between_pages_in_use() {
    if criu::for_test("cleaning_frees_what_lies_between_pages_in_use").is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let first = daemon(work.path(), 256, "off");
    let workload = leave_the_last(work.path(), &first);
    let before = free_bytes(&first);

    let measured = first.json(&["gc", "--dry-run"]).unwrap();
    let region = &measured["regions"][0];
    assert_eq!(region["freed_bytes"], 0, "{measured}");
    assert!(
        region["reclaimable_bytes"].as_u64().unwrap() > 4 * MIB,
        "{measured}"
    );
    assert_eq!(free_bytes(&first), before, "a dry run moves nothing");

    let cleaned = first.json(&["gc"]).unwrap();
    let region = &cleaned["regions"][0];
    let freed = region["freed_bytes"].as_u64().unwrap();
    assert!(freed > 4 * MIB, "{cleaned}");
    assert_eq!(region["damaged_segments"], 0, "{cleaned}");
    assert_eq!(free_bytes(&first), before + freed);
    let again = first.json(&["gc"]).unwrap();
    assert_eq!(again["regions"][0]["freed_bytes"], 0, "{again}");
    let text = first.run(&["gc", "--dry-run"]).unwrap();
    assert!(
        text.contains("in use for") && text.contains("would free"),
        "{text}"
    );
    first.run(&["verify", "changing"]).unwrap();

    // The places that pages were moved to outlive the daemon.
    first.kill().unwrap();
    let second = daemon(work.path(), 256, "off");
    assert_eq!(free_bytes(&second), before + freed);
    second.run(&["scrub"]).unwrap();
    restore(&second, &workload);
}

#[test]
fn a_region_that_is_half_full_is_cleaned_by_itself() {
    if criu::for_test("a_region_that_is_half_full_is_cleaned_by_itself").is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = daemon(work.path(), 72, "1s");
    let workload = leave_the_last(work.path(), &daemon);
    wait_for(
        "cleaning in the background",
        Duration::from_secs(60),
        || {
            // 42 MiB are in use for 32 of pages before it, 34 behind it.
            Ok((free_bytes(&daemon) > 32 * MIB).then_some(()))
        },
    )
    .unwrap();
    restore(&daemon, &workload);
}
