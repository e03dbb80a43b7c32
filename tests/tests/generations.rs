//! A task's life: dumped, restored, dumped again, ten times over, checked by its own checksum each time.

use std::process::{Command, Stdio};
use std::time::Duration;

use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::workload::{self, Workload};
use permafrost_tests::{criu, process};

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

/// A task with 24 MB, under a parent that collects a child a third of a second after its end.
const COLLECTED_LATE: &str = r#"
use POSIX ();
my $task = fork;
if (!$task) {
    POSIX::setsid();
    my $data = "x" x 24_000_000;
    open my $ready, ">", "ready";
    close $ready;
    sleep 1 for 1 .. 100;
    exit;
}
$SIG{CHLD} = sub { select undef, undef, undef, 0.3; wait; exit };
open my $file, ">", "task.new";
print $file $task;
close $file;
rename "task.new", "task";
sleep 100;
"#;

#[test]
fn a_restore_right_behind_a_dump_finds_its_pids_free() {
    if criu::for_test("a_restore_right_behind_a_dump_finds_its_pids_free").is_none() {
        return;
    }
    process::adopt_orphans().unwrap();
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let mut parent = Command::new("perl")
        .args(["-e", COLLECTED_LATE])
        .current_dir(work.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let pid = process::wait_for("a task with its memory", Duration::from_secs(60), || {
        let text = std::fs::read_to_string(work.path().join("task")).ok();
        let pid: Option<u32> = text.and_then(|text| text.parse().ok());
        Ok(pid.filter(|_| work.path().join("ready").exists()))
    });
    let pid = pid.unwrap();
    daemon
        .run(&["dump", "--job", "late", "--pid", &pid.to_string()])
        .unwrap();
    let entry = format!("/proc/{pid}");
    assert!(!std::path::Path::new(&entry).exists(), "not collected yet");
    daemon.run(&["restore", "late"]).unwrap();
    assert!(process::is_alive(pid));
    process::kill(&[pid]);
    parent.wait().unwrap();
}

/// Keeps 8 MB of random text, and a worker with it that is renewed by SIGUSR1, as `nginx -s reload` does. The worker's
/// pid is in the file `worker`.
const MASTER: &str = r#"
data=$(head -c 6000000 /dev/urandom | base64)
renew() {
    [ -z "$worker" ] || { kill "$worker"; wait "$worker"; }
    ( trap - USR1; while :; do sleep 1000; done ) &
    worker=$!
    echo "$worker" >worker.new && mv worker.new worker
}
trap renew USR1
renew
while :; do wait; done
"#;

#[test]
fn a_worker_shares_its_memory_with_the_master_and_the_worker_before() {
    if criu::for_test("a_worker_shares_its_memory_with_the_master_and_the_worker_before").is_none()
    {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let mut master = Command::new("setsid")
        .args(["sh", "-c", MASTER])
        .current_dir(work.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let pid = master.id().to_string();
    let worker = |before: u64| {
        process::wait_for("a worker", Duration::from_secs(60), || {
            let pid = std::fs::read_to_string(work.path().join("worker")).unwrap_or_default();
            let pid: Option<u64> = pid.trim().parse().ok();
            Ok(pid.filter(|pid| *pid != before))
        })
        .unwrap()
    };
    let dump = || {
        let dumped = daemon
            .json(&["dump", "--pid", &pid, "--job", "web", "--leave-running"])
            .unwrap();
        let shown = daemon.json(&["show", "web"]).unwrap();
        (dumped, shown["manifest"]["spaces"].clone())
    };
    let space = |spaces: &serde_json::Value, pid: u64| {
        let mut spaces = spaces.as_array().unwrap().iter();
        let space = spaces.find(|space| space["id"] == pid).unwrap().clone();
        ["pages", "parent_pages", "sibling_pages"].map(|field| space[field].as_u64().unwrap())
    };
    let before = worker(0);
    let (first, spaces) = dump();
    assert_eq!(first["incremental"], false, "{first}");
    // Forked by the master, it has the master's memory: stored once.
    let [pages, _, shared] = space(&spaces, before);
    assert!(pages > 1000 && shared * 10 > pages * 9, "{spaces}");

    assert!(
        Command::new("kill")
            .args(["-USR1", &pid])
            .status()
            .unwrap()
            .success()
    );
    let after = worker(before);
    let (second, spaces) = dump();
    let [pages, shared, _] = space(&spaces, after);
    assert!(
        shared * 10 > pages * 9,
        "{shared} of {pages} pages are shared"
    );
    assert_eq!(second["incremental"], true, "{second}");

    for pid in [after, master.id().into()] {
        let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
    }
    master.wait().unwrap();
}
