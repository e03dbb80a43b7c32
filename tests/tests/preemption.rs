//! Suspension, shrinking and plans on trees that check themselves; and commands that are killed at any time.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::workload::{self, Workload};
use permafrost_tests::{binaries, criu, process};
use serde_json::{Value, json};

/// Returns a `permafrost` command that needs no daemon.
fn permafrost(arguments: &[&str]) -> Command {
    let mut command = Command::new(binaries::path("permafrost").unwrap());
    command.args(arguments).stdin(Stdio::null());
    command
}

fn run(arguments: &[&str]) -> Output {
    permafrost(arguments).output().unwrap()
}

fn json_of(output: &Output) -> Value {
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{failed}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns true if the tests run as root, who may use the freezer.
fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: only root may use the freezer");
    }
    root
}

fn tree(dir: &Path) -> Workload {
    Workload::start(dir, &workload::Options::tree(8)).unwrap()
}

#[test]
fn a_tree_is_suspended_whole_and_sound_when_it_goes_on() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let workload = tree(dir.path());
    let pid = workload.pid().to_string();
    let before = workload.verify().unwrap();
    let suspended = json_of(&run(&[
        "suspend", "--pid", &pid, "--grace", "100ms", "--json",
    ]));
    assert_eq!(suspended["state"], "suspended");
    assert_eq!(
        suspended["processes"].as_array().unwrap().len(),
        4,
        "{suspended}"
    );
    let listed = json_of(&run(&["resume", "--list", "--json"]));
    let target = format!("process {pid}");
    let is_listed = |one: &Value| one["target"] == target.as_str();
    assert!(
        listed["targets"].as_array().unwrap().iter().any(is_listed),
        "{listed}"
    );
    let resumed = json_of(&run(&["resume", "--pid", &pid, "--json"]));
    assert_eq!(resumed["targets"][0]["state"], "resumed");
    let after = workload.verify().unwrap();
    assert!(after.is_sound(), "{after:?}");
    assert!(after.counter >= before.counter);
    let again = json_of(&run(&["resume", "--pid", &pid, "--json"]));
    assert_eq!(again["targets"][0]["state"], "not_suspended");
}

#[test]
fn a_command_that_is_killed_at_any_time_leaves_the_tree_recoverable() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let workload = tree(dir.path());
    let pid = workload.pid().to_string();
    let commands: [&[&str]; 3] = [
        &["suspend", "--pid", &pid, "--grace", "15ms"],
        &["resume", "--pid", &pid],
        &["shrink", "--pid", &pid, "--cpu", "0.5", "--interval", "5ms"],
    ];
    for delay_ms in (0..60).step_by(3) {
        for command in commands {
            if command[0] == "resume" {
                run(&["suspend", "--pid", &pid, "--freeze"]);
            }
            let mut killed = permafrost(command)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            std::thread::sleep(Duration::from_millis(delay_ms));
            let _ = killed.kill();
            killed.wait().unwrap();
            for undo in ["resume", "grow"] {
                let undone = run(&[undo, "--pid", &pid]);
                let failed = String::from_utf8_lossy(&undone.stderr);
                assert!(
                    undone.status.success(),
                    "{command:?} after {delay_ms} ms: {failed}"
                );
            }
            let status = workload.verify().unwrap();
            assert!(
                status.is_sound(),
                "{command:?} after {delay_ms} ms: {status:?}"
            );
        }
    }
    let group = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    assert!(
        !group.contains("permafrost-"),
        "no group that was made is left: {group}"
    );
}

#[test]
fn bad_targets_and_bad_numbers_each_have_their_message_and_exit_code() {
    for (arguments, code, words) in [
        (&["suspend"][..], 2, "--pid"),
        (&["suspend", "--pid", "0"], 2, "0"),
        (
            &["suspend", "--pid", "1"],
            2,
            "this command, or one it was started by",
        ),
        (&["suspend", "--pid", "5000000"], 3, "no process 5000000"),
        (
            &["suspend", "--pid", "1", "--cgroup", "/x"],
            2,
            "cannot be used with",
        ),
        (
            &["suspend", "--cgroup", "/no/such/group"],
            3,
            "is no control group",
        ),
        (&["suspend", "--cgroup", "/"], 2, "root of a hierarchy"),
        (&["resume", "--pid", "5000000"], 3, "no process 5000000"),
        (&["shrink", "--pid", "1", "--cpu=-1"], 2, "--cpu"),
        (
            &["shrink", "--pid", "1", "--step", "0,1G"],
            2,
            "0.01 processors",
        ),
        (&["shrink", "--cgroup", "/x", "--job", "a"], 2, "--pid"),
        (&["preempt"], 2, "--plan"),
    ] {
        let output = run(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(words), "{arguments:?}: {said}");
    }
}

/// Returns a plan that does to each task what is named.
fn plan(victims: &[(String, &str)]) -> String {
    let spread = json!({"p50": 1.0, "p95": 1.0});
    let victims: Vec<Value> = (victims.iter())
        .map(|(task, mechanism)| {
            json!({
                "task": task, "node": "here", "mechanism": mechanism, "score_s": 1.0,
                "frees": {"cpu_millis": 500, "memory_bytes": 1 << 20},
                "cost": {"overhead_s": spread, "delay_s": spread, "until_running_s": spread, "age_s": 0.0}
            })
        })
        .collect();
    let total = json!({"cpu_millis": 0, "memory_bytes": 0});
    let plan = json!({
        "answered_by": "here", "age_s": 0.1, "victims": victims, "frees": total, "lacking": total,
        "enough": true, "undecided": [], "unknown_node": []
    });
    plan.to_string()
}

#[test]
fn a_plan_is_carried_out_by_each_mechanism() {
    if !is_root() || criu::for_test("a_plan_is_carried_out_by_each_mechanism").is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let dirs = ["kill", "suspend", "dump"].map(|name| work.path().join(name));
    let mut workloads = dirs.each_ref().map(|dir| {
        fs::create_dir(dir).unwrap();
        tree(dir)
    });
    let mut waited = Command::new("sleep").arg("3").spawn().unwrap();
    let pids = workloads.each_ref().map(|one| one.pid().to_string());
    let file = work.path().join("plan.json");
    let victims = [
        (waited.id().to_string(), "wait"),
        (pids[0].clone(), "kill"),
        (pids[1].clone(), "suspend_in_memory"),
        (pids[2].clone(), "full_dump"),
        ("5000000".to_owned(), "kill"),
    ];
    fs::write(&file, plan(&victims)).unwrap();
    let named = format!("{}:train", pids[2]);
    let path = file.to_str().unwrap();
    let line = [
        "preempt", "--plan", path, "--node", "here", "--pid", &named, "--grace", "300ms",
    ];
    let reaper = std::thread::spawn(move || waited.wait());
    let report = daemon.json(&line).unwrap();
    reaper.join().unwrap().unwrap();
    let outcomes: Vec<&str> = (report["victims"].as_array().unwrap().iter())
        .map(|one| one["outcome"].as_str().unwrap())
        .collect();
    assert_eq!(
        outcomes,
        ["done", "done", "done", "done", "finished"],
        "{report}"
    );
    assert_eq!(report["enough"], true);
    assert_eq!(report["cpu_millis"], 2_500);
    assert_eq!(report["victims"][3]["checkpoint"], "train@1");
    let [killed, suspended, dumped] = &mut workloads;
    killed.wait_until_gone().unwrap();
    dumped.wait_until_gone().unwrap();
    daemon.run(&["restore", "train"]).unwrap();
    assert!(dumped.verify().unwrap().is_sound());

    // One that is suspended goes on before it is dumped; a dump without a job frees nothing.
    let suspended_pid = suspended.pid().to_string();
    fs::write(&file, plan(&[(suspended_pid.clone(), "full_dump")])).unwrap();
    let refused = daemon
        .try_run(&["preempt", "--plan", path, "--node", "here", "--json"])
        .unwrap();
    assert_eq!(refused.status.code(), Some(12));
    let report: Value = serde_json::from_slice(&refused.stdout).unwrap();
    assert!(
        report["victims"][0]["error"]
            .as_str()
            .unwrap()
            .contains("names")
            || report["victims"][0]["error"]
                .as_str()
                .unwrap()
                .contains("none is named"),
        "{report}"
    );
    let named = format!("{suspended_pid}:other");
    let line = ["preempt", "--plan", path, "--node", "here", "--pid", &named];
    let report = daemon.json(&line).unwrap();
    assert_eq!(report["victims"][0]["checkpoint"], "other@1", "{report}");
    suspended.wait_until_gone().unwrap();
    daemon.run(&["restore", "other"]).unwrap();
    assert!(suspended.verify().unwrap().is_sound());

    // A victim of another node is not touched.
    let line = ["preempt", "--plan", path, "--node", "there", "--json"];
    let refused = daemon.try_run(&line).unwrap();
    assert_eq!(refused.status.code(), Some(12));
    assert!(process::is_alive(suspended.pid()));
}

#[test]
fn what_is_shrunk_without_swap_is_dumped_first_and_grows_back() {
    if !is_root()
        || criu::for_test("what_is_shrunk_without_swap_is_dumped_first_and_grows_back").is_none()
    {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let workload = tree(work.path());
    let pid = workload.pid().to_string();
    let line = [
        "shrink",
        "--pid",
        &pid,
        "--cpu",
        "0.5",
        "--job",
        "train",
        "--interval",
        "10ms",
    ];
    let shrunk = daemon.json(&line).unwrap();
    assert_eq!(shrunk["checkpoint"], "train@1", "{shrunk}");
    let last = shrunk["steps"].as_array().unwrap().last().unwrap();
    assert_eq!(last["cpu_millis"], 500, "{shrunk}");
    assert!(workload.verify().unwrap().is_sound());
    let grown = daemon.json(&["grow", "--pid", &pid]).unwrap();
    assert_eq!(grown["targets"][0]["state"], "grown");
    assert!(workload.verify().unwrap().is_sound());
}
