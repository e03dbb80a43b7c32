//! Tests of removing, pinning and verifying checkpoints.

use permafrost_protocol::control::{
    Checkpoint, Checkpoints, Done, NodeList, NodeStatus, Progress, Pruned, PrunedGeneration,
    RetentionRule, RetentionRules, SessionOpened, Verified, reply, request,
};
use permafrost_protocol::manifest::DumpedProcess;

use crate::fake::{Daemon, assert_exit, checkpoint, stderr, stdout};

#[test]
fn open_without_a_port_prints_no_command_for_one() {
    let daemon = Daemon::start(|_| {
        vec![reply::Body::SessionOpened(SessionOpened {
            session: "77".to_owned(),
            socket: "/r/sessions/77.sock".to_owned(),
            ..SessionOpened::default()
        })]
    });
    let text = stdout(&daemon.run(&["open", "--job", "train"]));
    assert!(text.contains("/r/sessions/77.sock"), "{text}");
    assert!(text.contains("no port (--listen none)"), "{text}");
    assert!(!text.contains("--port"), "{text}");
}

#[test]
fn rm_wants_a_generation_or_all() {
    let daemon = Daemon::start(|_| vec![reply::Body::Done(Done { count: 3 })]);
    assert_exit(&daemon.run(&["rm", "train"]), 2);
    let both = daemon.run(&["rm", "train@1", "--all"]);
    assert_exit(&both, 2);
    let said = stderr(&both);
    assert!(
        said.contains("--all takes a job, not a generation"),
        "{said}"
    );
    assert!(daemon.requests().is_empty());
    let output = daemon.run(&["rm", "train", "--all", "--force"]);
    assert_eq!(stdout(&output), "3 checkpoints removed\n");
    assert_eq!(
        daemon.only_request().0,
        request::Body::Remove(request::Remove {
            checkpoint: "train".to_owned(),
            all_generations: true,
            force: true,
            last: false,
        })
    );
}

#[test]
fn prune_says_what_goes_and_fails_if_something_could_not() {
    let daemon = Daemon::start(|request| {
        let request::Body::Prune(prune) = request else {
            panic!()
        };
        let one = |generation, rule: &str, goes, error: &str| PrunedGeneration {
            job: "train".to_owned(),
            generation,
            bytes: 1 << 20,
            rule: rule.to_owned(),
            goes,
            error: error.to_owned(),
            ..PrunedGeneration::default()
        };
        let error = if prune.dry_run {
            ""
        } else {
            "train@2 is pinned"
        };
        vec![reply::Body::Pruned(Pruned {
            generations: vec![
                one(1, "expired", true, ""),
                one(2, "job-quota", true, error),
                one(3, "newest", false, ""),
            ],
            removed: 1 + u64::from(prune.dry_run),
            removed_bytes: 1 << 20,
        })]
    });
    let asked = daemon.run(&["prune", "--job", "train", "--dry-run"]);
    assert_exit(&asked, 0);
    let said = stdout(&asked);
    assert!(said.contains("2 checkpoints would be removed"), "{said}");
    let done = daemon.run(&["prune", "--job", "train"]);
    assert_exit(&done, 4);
    let said = stdout(&done);
    for word in [
        "removed",
        "not removed",
        "job-quota: train@2 is pinned",
        "stays",
        "newest",
    ] {
        assert!(said.contains(word), "{word}: {said}");
    }
    assert!(stderr(&done).contains("1 checkpoint was not removed"));
}

#[test]
fn retention_sends_the_rule_and_shows_those_that_there_are() {
    let daemon = Daemon::start(|request| {
        let request::Body::SetRetention(set) = request else {
            panic!()
        };
        let rules = set.rule.clone().into_iter().collect();
        vec![reply::Body::Retention(RetentionRules { rules })]
    });
    let set = [
        "retention",
        "set",
        "--namespace",
        "team",
        "--job",
        "night-*",
        "--keep-last",
        "3",
        "--keep-within",
        "30d",
        "--max-bytes",
        "1T",
        "--max-checkpoints",
        "9",
        "--over-quota",
        "remove-oldest",
    ];
    let said = stdout(&daemon.run(&set));
    for word in [
        "team",
        "night-*",
        "last 3, within 30d",
        "1.0 TiB, 9 checkpoints",
        "remove-oldest",
    ] {
        assert!(said.contains(word), "{word}: {said}");
    }
    let rule = RetentionRule {
        namespace: "team".to_owned(),
        jobs: "night-*".to_owned(),
        keep_all: false,
        keep_last: Some(3),
        keep_within_s: Some(30 * 86_400),
        max_bytes: Some(1 << 40),
        max_checkpoints: Some(9),
        over_quota: "remove-oldest".to_owned(),
    };
    let sent = request::SetRetention {
        rule: Some(rule),
        remove: false,
    };
    assert_eq!(daemon.only_request().0, request::Body::SetRetention(sent));
}

#[test]
fn pin_and_unpin_say_what_they_want() {
    let daemon = Daemon::start(|request| {
        let request::Body::Pin(pin) = request else {
            panic!()
        };
        vec![reply::Body::Checkpoint(Checkpoint {
            pinned: pin.pinned,
            ..checkpoint("train", 2)
        })]
    });
    assert_eq!(
        stdout(&daemon.run(&["pin", "train@2"])),
        "train@2 is pinned\n"
    );
    assert_eq!(
        stdout(&daemon.run(&["pin", "train@2", "--unpin"])),
        "train@2 is not pinned\n"
    );
    assert_eq!(
        stdout(&daemon.run(&["unpin", "train"])),
        "train@2 is not pinned\n"
    );
}

#[test]
fn verify_exits_with_corrupt_when_something_is() {
    let damage = "train@2: process 7: page 0x7f0000001000: checksum".to_owned();
    let result = move |request: &request::Body| {
        let request::Body::Verify(verify) = request else {
            panic!()
        };
        let mut verified = Verified {
            checkpoints: 2,
            pages: 4096,
            ..Verified::default()
        };
        if verify.checkpoint.is_empty() {
            verified.damage.push(damage.clone());
        }
        vec![
            reply::Body::Progress(Progress {
                done_bytes: 1,
                total_bytes: 2,
                ..Progress::default()
            }),
            reply::Body::Verified(verified),
        ]
    };
    let daemon = Daemon::start(result);
    let output = daemon.run(&["verify", "train@1"]);
    assert_exit(&output, 0);
    assert_eq!(
        stdout(&output),
        "2 checkpoints and 4096 pages read: every checksum matches\n"
    );
    let output = daemon.run(&["verify"]);
    assert_exit(&output, 7);
    assert!(stdout(&output).contains("page 0x7f0000001000"));
}

#[test]
fn nodes_of_a_registry_that_does_not_answer_are_printed_and_exit_11() {
    let list = |checkpoints| NodeList {
        nodes: vec![NodeStatus {
            name: "n1".to_owned(),
            ..NodeStatus::default()
        }],
        checkpoints,
        ..NodeList::default()
    };
    for (checkpoints, code) in [(Some(3), 0), (None, 11)] {
        let daemon = Daemon::start(move |_| vec![reply::Body::Nodes(list(checkpoints))]);
        let output = daemon.run(&["node", "ls"]);
        assert_exit(&output, code);
        assert!(stdout(&output).contains("n1"), "{}", stdout(&output));
    }
}

#[test]
fn parked_sessions_are_listed_with_their_processes_and_times() {
    let parked = Checkpoint {
        kind: "parked".to_owned(),
        session: "77".to_owned(),
        processes: 9,
        parked_processes: vec![
            DumpedProcess {
                pid: 12,
                program: "nginx".to_owned(),
                ..DumpedProcess::default()
            },
            DumpedProcess {
                pid: 13,
                ..DumpedProcess::default()
            },
        ],
        ..checkpoint("", 0)
    };
    let daemon = Daemon::start(move |_| {
        vec![reply::Body::Checkpoints(Checkpoints {
            next: String::new(),
            checkpoints: vec![checkpoint("train", 1), parked.clone()],
        })]
    });
    let text = stdout(&daemon.run(&["ls", "--parked"]));
    assert!(text.contains("2026-11-21 01:04:29 UTC"), "{text}");
    assert!(text.contains("12 nginx, 13, and 7 more"), "{text}");
    assert!(!text.contains("train"), "{text}");
    let text = stdout(&daemon.run(&["ls"]));
    assert!(
        text.contains("train@1") && text.contains("12 nginx"),
        "{text}"
    );
}
