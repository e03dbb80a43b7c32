//! Rules of retention with a real daemon: it applies them by itself, says why, and what is left is as it was.

mod common;

use std::path::Path;
use std::time::Duration;

use common::clustered::refusal;
use common::*;
use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process::wait_for;
use permafrost_tests::workload::{self, Workload};
use serde_json::Value;

const BASE: u64 = 0x7f00_0000_0000;
const LONG: Duration = Duration::from_secs(60);

fn daemon(work: &Path, interval: &str) -> Daemon {
    let extra = vec![format!("--retention-interval={interval}")];
    let options = Options {
        extra,
        ..Options::default()
    };
    Daemon::start(work, &options).unwrap()
}

fn generations(daemon: &Daemon, job: &str) -> Vec<u64> {
    let listed = listing(daemon)
        .into_iter()
        .filter(|line| line["job"] == job);
    listed
        .map(|line| line["generation"].as_u64().unwrap())
        .collect()
}

fn wait_left(daemon: &Daemon, job: &str, left: &[u64]) {
    let mut last = Vec::new();
    let same = wait_for("what the rules leave", LONG, || {
        last = generations(daemon, job);
        Ok((last == left).then_some(()))
    });
    same.unwrap_or_else(|error| panic!("{error}: {last:?} instead of {left:?}"));
}

fn rules(pruned: &Value) -> Vec<&str> {
    let generations = pruned["generations"].as_array().unwrap();
    generations
        .iter()
        .map(|one| one["rule"].as_str().unwrap())
        .collect()
}

#[test]
fn the_daemon_applies_rules_by_itself_and_records_them() {
    let work = tempfile::tempdir().unwrap();
    let daemon = daemon(work.path(), "1s");
    let dump = |seed| dump_and_adopt(&daemon, work.path(), "team/job", BASE, &pages(seed, 20));
    dump(1);
    daemon.run(&["pin", "team/job@1"]).unwrap();
    let set = [
        "retention",
        "set",
        "--namespace",
        "team",
        "--keep-last",
        "2",
    ];
    let rule = daemon.json(&set).unwrap();
    assert_eq!(rule["rules"][0]["keep_last"], 2, "{rule}");
    for seed in 2..=5 {
        dump(seed);
    }
    wait_left(&daemon, "team/job", &[1, 4, 5]);
    for (generation, seed) in [(1, 1), (4, 4), (5, 5)] {
        let name = format!("team/job@{generation}");
        assert!(
            exported_pages(&daemon, work.path(), &name) == pages(seed, 20),
            "{name}"
        );
    }
    let audit = work.path().join("data/audit.log");
    wait_for("the lines of the audit log", LONG, || {
        let text = std::fs::read_to_string(&audit)?;
        let lines = text
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        let told: Vec<_> = lines
            .filter(|line| line["action"] == "remove-expired" && line["via"] == "retention")
            .map(|line| line["on"].as_str().unwrap().to_owned())
            .collect();
        assert!(text.contains("\"set-retention\""), "{text}");
        Ok((told == ["team/job@2", "team/job@3"]).then_some(()))
    })
    .unwrap();

    // The rules outlive the daemon.
    daemon
        .run(&[
            "retention",
            "set",
            "--keep-within",
            "30d",
            "--max-bytes",
            "1T",
        ])
        .unwrap();
    let before = daemon.json(&["retention", "show"]).unwrap();
    daemon.stop().unwrap();
    let daemon = self::daemon(work.path(), "off");
    assert_eq!(daemon.json(&["retention", "show"]).unwrap(), before);
    assert_eq!(before["rules"].as_array().unwrap().len(), 2, "{before}");
    daemon.run(&["unpin", "team/job@1"]).unwrap();
    let asked = daemon.json(&["prune", "--dry-run"]).unwrap();
    assert_eq!(rules(&asked), ["expired", "keep-last", "newest-whole"]);
    assert_eq!(
        generations(&daemon, "team/job"),
        [1, 4, 5],
        "a dry run, and it does nothing by itself"
    );
    let done = daemon.json(&["prune", "--namespace", "team"]).unwrap();
    assert_eq!(
        (done["removed"].as_u64(), rules(&done)),
        (Some(1), rules(&asked))
    );
    assert_eq!(generations(&daemon, "team/job"), [4, 5]);
    daemon
        .run(&["retention", "rm", "--namespace", "team"])
        .unwrap();
    let (code, said) = refusal(&daemon, &["retention", "rm", "--namespace", "team"]);
    assert!(
        code == 3 && said.contains("retention show"),
        "{code} {said}"
    );
}

#[test]
fn the_last_one_goes_only_when_somebody_says_so() {
    let work = tempfile::tempdir().unwrap();
    let daemon = daemon(work.path(), "off");
    for seed in [1, 2] {
        dump_and_adopt(&daemon, work.path(), "job", BASE, &pages(seed, 5));
    }
    // A clock that is years ahead when the daemon starts could not say more.
    daemon
        .run(&["retention", "set", "--keep-within", "1s"])
        .unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    daemon.run(&["prune"]).unwrap();
    assert_eq!(generations(&daemon, "job"), [2]);
    let (code, said) = refusal(&daemon, &["rm", "job@2"]);
    assert!(code == 4 && said.contains("--last"), "{code} {said}");
    assert!(exported_pages(&daemon, work.path(), "job@2") == pages(2, 5));
    daemon.run(&["rm", "job@2", "--last"]).unwrap();
    assert!(listing(&daemon).is_empty());
}

#[test]
fn a_quota_refuses_before_anything_is_frozen_or_makes_room() {
    let work = tempfile::tempdir().unwrap();
    let daemon = daemon(work.path(), "off");
    let limit = [
        "retention",
        "set",
        "--job",
        "small-*",
        "--max-checkpoints",
        "2",
    ];
    daemon.run(&limit).unwrap();
    for seed in [1, 2] {
        dump_and_adopt(&daemon, work.path(), "small-1", BASE, &pages(seed, 5));
    }
    let (code, said) = refusal(&daemon, &["open", "--job", "small-1"]);
    assert!(
        code == 6 && said.contains("job small-1 may have 2 checkpoints"),
        "{code} {said}"
    );
    assert!(said.contains("permafrost retention set"), "{said}");
    let opened = daemon.json(&["open", "--job", "small-2"]).unwrap();
    daemon
        .run(&["abort", opened["session"].as_str().unwrap()])
        .unwrap();

    daemon
        .run(&[&limit[..], &["--over-quota", "remove-oldest"]].concat())
        .unwrap();
    daemon.json(&["open", "--job", "small-1"]).unwrap();
    assert_eq!(generations(&daemon, "small-1"), [2]);
}

#[test]
fn nonsense_is_refused_and_a_damaged_file_removes_nothing() {
    let work = tempfile::tempdir().unwrap();
    let daemon = daemon(work.path(), "off");
    for arguments in [
        &["retention", "set"][..],
        &["retention", "set", "--keep-last", "0"],
        &["retention", "set", "--keep-last", "-1"],
        &["retention", "set", "--keep-last", "99999999999999999999"],
        &["retention", "set", "--keep-within", "0"],
        &["retention", "set", "--keep-within", "-3d"],
        &["retention", "set", "--keep-within", "999999999d"],
        &["retention", "set", "--keep-within", "9999999999999999999d"],
        &["retention", "set", "--max-bytes", "0"],
        &["retention", "set", "--keep-all", "--keep-last", "1"],
        &["retention", "set", "--over-quota", "refuse"],
        &[
            "retention",
            "set",
            "--over-quota",
            "maybe",
            "--keep-last",
            "1",
        ],
        &["retention", "set", "--keep-last", "1", "--job", ""],
        &["retention", "set", "--keep-last", "1", "--job", "[a-z]"],
        &["retention", "set", "--keep-last", "1", "--namespace", "a/b"],
        &["retention", "set", "--keep-last", "1", "--namespace", "*"],
        &["prune", "--job", "a b"],
        &["prune", "--job", "a", "--namespace", "b"],
    ] {
        let (code, said) = refusal(&daemon, arguments);
        assert_eq!(code, 2, "{arguments:?}: {said}");
    }
    assert_eq!(refusal(&daemon, &["prune", "--job", "none"]).0, 3);
    for seed in [1, 2] {
        dump_and_adopt(&daemon, work.path(), "job", BASE, &pages(seed, 5));
    }
    daemon
        .run(&["retention", "set", "--keep-last", "1"])
        .unwrap();
    daemon.stop().unwrap();
    let file = work.path().join("data/retention.json");
    std::fs::write(
        &file,
        r#"{"v":1,"namespaces":{"default":{"namespace":{"keep_last":1,"keep"#,
    )
    .unwrap();
    let daemon = self::daemon(work.path(), "1s");
    let (code, said) = refusal(&daemon, &["prune"]);
    assert!(
        code == 7 && said.contains("retention.json"),
        "{code} {said}"
    );
    // It dumps on, and removes nothing by itself.
    dump_and_adopt(&daemon, work.path(), "job", BASE, &pages(3, 5));
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(generations(&daemon, "job"), [1, 2, 3]);
}

#[test]
fn a_task_is_restored_from_what_the_rules_have_left() {
    if criu::for_test("a_task_is_restored_from_what_the_rules_have_left").is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = daemon(work.path(), "1s");
    daemon
        .run(&["retention", "set", "--keep-last", "1"])
        .unwrap();
    let options = workload::Options {
        size_mib: 8,
        modify_percent: 10,
        ..workload::Options::default()
    };
    let mut task = Workload::start(work.path(), &options).unwrap();
    let pid = task.pid().to_string();
    for generation in 1..=4 {
        let mut dump = vec!["dump", "--pid", &pid, "--job", "task"];
        if generation < 4 {
            dump.push("--leave-running");
        }
        daemon.run(&dump).unwrap();
        if generation < 4 {
            task.modify().unwrap();
        }
    }
    task.wait_until_gone().unwrap();
    wait_left(&daemon, "task", &[4]);
    let verified = daemon.json(&["verify"]).unwrap();
    assert_eq!(
        verified["damage"].as_array().map(Vec::len),
        Some(0),
        "{verified}"
    );
    daemon.run(&["restore", "task"]).unwrap();
    assert!(task.verify().unwrap().is_sound());
}
