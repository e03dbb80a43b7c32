//! Dumps whose images and pages come through pipes: `permafrost dump --stream`.

mod common;

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process::wait_for;
use permafrost_tests::workload::{self, Workload};

use common::listing;

/// Longer than a socket's path, with a directory that has its name.
const JOB: &str =
    "models/a-large-one-that-is-trained-for-weeks/with-a-rate-of-0.001/and-a-seed-of-42/try-3";

const LIMIT: Duration = Duration::from_secs(60);

/// Returns the command line of a dump by stream.
fn arguments(workload: &Workload) -> Vec<String> {
    let pid = workload.pid().to_string();
    let words = ["dump", "--stream", "--job", JOB, "--pid", &pid];
    words.map(str::to_owned).to_vec()
}

fn assert_lives(workload: &Workload, output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    assert!(workload.is_running());
    assert!(workload.verify().unwrap().is_sound());
}

/// Writes a script.
fn script(work: &Path, name: &str, text: &str) -> PathBuf {
    let path = work.join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn a_tree_with_shared_memory_is_streamed_and_restored_exactly() {
    if criu::for_test("a_tree_with_shared_memory_is_streamed_and_restored_exactly").is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let mut workload = Workload::start(work.path(), &workload::Options::tree(24)).unwrap();
    let mut added = Vec::new();
    for generation in 1..=2 {
        let modified = workload.modify().unwrap();
        let dumped = daemon.json(&arguments(&workload)).unwrap();
        assert_eq!(dumped["way"], "stream", "{dumped}");
        assert_eq!(dumped["checkpoint"]["generation"], generation, "{dumped}");
        added.push(dumped["checkpoint"]["added_bytes"].as_u64().unwrap());
        workload.wait_until_gone().unwrap();
        daemon.run(&["restore", JOB]).unwrap();
        let after = workload.verify().unwrap();
        assert!(after.is_sound(), "{after:?}");
        assert_eq!(after.generation, modified.generation);
    }
    // A tenth is modified: the rest equals the first dump's.
    assert!(added[1] * 3 < added[0], "{added:?}");
    let verified = daemon.json(&["verify"]).unwrap();
    assert_eq!(
        verified["damage"].as_array().map(Vec::len),
        Some(0),
        "{verified}"
    );
    // The other way finds the same pages.
    let pid = workload.pid().to_string();
    let dumped = daemon
        .json(&["dump", "--job", JOB, "--pid", &pid, "--leave-running"])
        .unwrap();
    assert_eq!(dumped["way"], "page-server", "{dumped}");
    let third = dumped["checkpoint"]["added_bytes"].as_u64().unwrap();
    assert!(third * 3 < added[0], "{dumped}");
}

#[test]
fn a_refused_stream_leaves_the_process_running_and_nothing_sealed() {
    let Some(criu) =
        criu::for_test("a_refused_stream_leaves_the_process_running_and_nothing_sealed")
    else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let small = Options {
        region_mib: 16,
        ..Options::default()
    };
    let daemon = Daemon::start(work.path(), &small).unwrap();
    let workload = Workload::start(work.path(), &workload::Options::tree(24)).unwrap();
    let arguments = arguments(&workload);

    // The region is full in the middle of the pages.
    let output = daemon.try_run(&arguments).unwrap();
    assert_lives(&workload, &output, 6);

    // CRIU's post-dump script has a veto, too.
    let veto = script(
        work.path(),
        "veto",
        "[ \"$CRTOOLS_SCRIPT_ACTION\" != post-dump ]",
    );
    let mut command = daemon.command().unwrap();
    let output = command
        .args(&arguments)
        .env("PERMAFROST_ACTION", veto)
        .output();
    let output = output.unwrap();
    assert_ne!(output.status.code(), Some(0));
    assert!(workload.is_running() && workload.verify().unwrap().is_sound());

    // The command is killed before CRIU has sent anything: nobody takes its images.
    let held = work.path().join("held");
    let go = work.path().join("go");
    let waiting = format!(
        "if [ \"$1\" = dump ]; then : >{}; until [ -e {} ]; do sleep 0.05; done; fi\nexec {} \"$@\"",
        held.display(),
        go.display(),
        criu.path.display()
    );
    let waiting = script(work.path(), "criu", &waiting);
    let mut command = daemon.command().unwrap();
    let mut dump = command
        .args(&arguments)
        .env("PERMAFROST_CRIU", waiting)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for("the start of CRIU", LIMIT, || {
        Ok(held.exists().then_some(()))
    })
    .unwrap();
    dump.kill().unwrap();
    let output = dump.wait_with_output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty());
    std::fs::write(&go, "").unwrap();
    wait_for("the end of the session", LIMIT, || {
        let status = daemon.json(&["status"])?;
        let sessions = status["sessions"].as_array().map_or(0, |sessions| {
            let open = sessions.iter().filter(|one| one["state"] != "failed");
            open.count()
        });
        Ok((sessions == 0).then_some(()))
    })
    .unwrap();
    assert!(workload.is_running() && workload.verify().unwrap().is_sound());
    assert_eq!(listing(&daemon).len(), 0);
}

#[test]
fn a_stream_knows_no_parents_of_crius() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    for other in ["--pre-dump", "--pre-copy"] {
        let words = ["dump", "--stream", other, "--job", JOB, "--pid", "1"];
        let output = daemon.try_run(&words).unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
    }
}
