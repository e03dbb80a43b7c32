//! Output of commands, as text and as JSON, and their exit codes.

use std::fs;
use std::io::Read;
use std::process::Stdio;

use permafrost_protocol::control::{
    self, Checkpoint, Checkpoints, ClusterStatus, ErrorCode, ServerStatus, SessionStatus, reply,
    request,
};
use permafrost_protocol::manifest::{DumpedProcess, Origin};

use crate::fake::{Daemon, assert_exit, checkpoint, detail, json, stderr, stdout};

#[test]
fn every_refusal_has_its_exit_code() {
    for code in [
        ErrorCode::Internal,
        ErrorCode::Invalid,
        ErrorCode::NotFound,
        ErrorCode::Conflict,
        ErrorCode::NoSpace,
        ErrorCode::Corrupt,
        ErrorCode::SessionFailed,
        ErrorCode::Denied,
    ] {
        let daemon = Daemon::refusing(code);
        let output = daemon.run(&["show", "train"]);
        assert_exit(&output, code.into());
        assert_eq!(
            stderr(&output),
            "permafrost: the daemon's reason\n  hint: the daemon's hint\n"
        );
        let output = daemon.run(&["show", "train", "--json"]);
        assert_exit(&output, code.into());
        assert!(output.stdout.is_empty());
        let error = json(&output.stderr);
        assert_eq!(error["error"]["exit_code"], i32::from(code));
        assert_eq!(error["error"]["message"], "the daemon's reason");
        assert_eq!(error["error"]["hint"], "the daemon's hint");
    }
}

#[test]
fn without_a_daemon_there_is_an_exit_code_and_a_hint() {
    let daemon = Daemon::start(|_| vec![]);
    fs::remove_file(daemon.socket()).unwrap();
    let output = daemon.run(&["status"]);
    assert_exit(&output, 10);
    assert!(
        stderr(&output).contains("start permafrostd"),
        "{}",
        stderr(&output)
    );
    let output = daemon.run(&["no-such-command"]);
    assert_exit(&output, 2);
}

#[test]
fn ls_lists_checkpoints_and_parked_sessions() {
    let daemon = Daemon::start(|_| {
        vec![reply::Body::Checkpoints(Checkpoints {
            next: String::new(),
            checkpoints: vec![
                Checkpoint {
                    pinned: true,
                    ..checkpoint("train", 1)
                },
                Checkpoint {
                    parent_generation: 1,
                    ..checkpoint("train", 2)
                },
                Checkpoint {
                    kind: "parked".to_owned(),
                    session: "5".repeat(32),
                    ..checkpoint("", 0)
                },
            ],
        })]
    });
    let output = daemon.run(&["ls", "train"]);
    assert_exit(&output, 0);
    let text = stdout(&output);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("CHECKPOINT  KIND"), "{text}");
    assert!(
        lines[1].starts_with("train@1     full") && lines[1].ends_with("pinned"),
        "{text}"
    );
    assert!(
        lines[2].contains("8.0 MiB  1.0 MiB") && lines[2].ends_with("@1"),
        "{text}"
    );
    assert!(
        lines[5].starts_with(&"5".repeat(32)) && lines[5].contains("never"),
        "{text}"
    );
    assert_eq!(
        daemon.only_request(),
        (
            request::Body::List(request::List {
                job: "train".to_owned(),
                ..request::List::default()
            }),
            false
        )
    );
    let listed = json(&daemon.run(&["--json", "ls"]).stdout);
    assert_eq!(listed["checkpoints"][1]["generation"], 2);
    assert_eq!(listed["checkpoints"][0]["memory_bytes"], 8 << 20);
}

#[test]
fn texts_of_others_do_not_steer_the_terminal() {
    // A process and a host may have any name, and a peer's message may be anything.
    let odd = "x\u{1b}]0;owned\u{7}\n\u{9b}2J\u{202e}y";
    let daemon = Daemon::start(move |request| {
        vec![match request {
            request::Body::List(_) => reply::Body::Checkpoints(Checkpoints {
                next: String::new(),
                checkpoints: vec![Checkpoint {
                    kind: "parked".to_owned(),
                    parked_processes: vec![DumpedProcess {
                        pid: 7,
                        program: odd.to_owned(),
                        ..DumpedProcess::default()
                    }],
                    ..checkpoint("", 0)
                }],
            }),
            request::Body::Show(_) => {
                let origin = Origin {
                    host: odd.to_owned(),
                    ..Origin::default()
                };
                detail(1, Some(origin))
            }
            _ => reply::Body::Error(control::Error {
                code: ErrorCode::Denied.into(),
                message: odd.to_owned(),
                hint: odd.to_owned(),
            }),
        }]
    });
    let listed = daemon.run(&["ls", "--parked"]);
    assert_exit(&listed, 0);
    let shown = daemon.run(&["show", "train"]);
    assert_exit(&shown, 0);
    let refused = daemon.run(&["pin", "train@1"]);
    assert_exit(&refused, 9);
    let texts = [stdout(&listed), stdout(&shown), stderr(&refused)];
    for text in &texts {
        assert!(text.contains("x\\u{1b}]0;owned\\u{7}"), "{text:?}");
        assert!(text.contains("\\u{9b}2J\\u{202e}y"), "{text:?}");
        let raw = |letter: char| letter.is_control() && letter != '\n' || letter == '\u{202e}';
        assert!(!text.contains(raw), "{text:?}");
    }
    // The text stays on its line, too.
    assert!(texts[0].contains("\\u{7}\\n\\u{9b}"), "{:?}", texts[0]);
    // JSON has the text itself.
    let listed = json(&daemon.run(&["--json", "ls", "--parked"]).stdout);
    let process = &listed["checkpoints"][0]["parked_processes"][0];
    assert_eq!(process["program"], odd);
}

#[test]
fn ls_of_an_unknown_job_is_not_found() {
    let daemon = Daemon::start(|_| vec![reply::Body::Checkpoints(Checkpoints::default())]);
    assert_exit(&daemon.run(&["ls", "train"]), 3);
    let output = daemon.run(&["ls"]);
    assert_exit(&output, 0);
    assert_eq!(stdout(&output), "no checkpoints\n");
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let daemon = Daemon::start(|_| {
        let checkpoints = (1..20_000)
            .map(|generation| checkpoint("train", generation))
            .collect();
        vec![reply::Body::Checkpoints(Checkpoints {
            checkpoints,
            next: String::new(),
        })]
    });
    let mut child = daemon
        .command(&["ls"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut some = [0; 10];
    child.stdout.take().unwrap().read_exact(&mut some).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_exit(&output, 0);
    assert!(output.stderr.is_empty(), "{}", stderr(&output));
}

#[test]
fn status_shows_regions_and_sessions() {
    let daemon = Daemon::start(|_| {
        vec![reply::Body::Status(ServerStatus {
            version: "0.1.0".to_owned(),
            regions: vec![control::RegionStatus {
                path: "/data/region".to_owned(),
                capacity_bytes: 4 << 30,
                free_bytes: 3 << 30,
                ..control::RegionStatus::default()
            }],
            sessions: vec![SessionStatus {
                session: "77".to_owned(),
                state: "receiving".to_owned(),
                ..SessionStatus::default()
            }],
            ..ServerStatus::default()
        })]
    });
    let text = stdout(&daemon.run(&["status"]));
    assert!(
        text.contains("1.0 GiB of 4.0 GiB used (25 %), 3.0 GiB free"),
        "{text}"
    );
    assert!(text.contains("77       -    receiving"), "{text}");
}

#[test]
fn status_leaves_out_what_is_not_there() {
    let daemon = Daemon::start(|_| {
        vec![reply::Body::Status(ServerStatus {
            version: "0.1.0".to_owned(),
            agent: true,
            socket: "/r/page-server.sock".to_owned(),
            ..ServerStatus::default()
        })]
    });
    assert_eq!(
        stdout(&daemon.run(&["status"])),
        "permafrost agent 0.1.0, process 0, up 0 s\n  page server  /r/page-server.sock\n  \
         checkpoints  0\n  parked       0\n"
    );
}

#[test]
fn status_tells_how_a_node_stands_in_its_cluster() {
    let daemon = Daemon::start(|_| {
        vec![reply::Body::Status(ServerStatus {
            peers: "10.0.0.1:7118".to_owned(),
            park_ttl_s: 7 * 86_400,
            regions: vec![control::RegionStatus {
                medium: "file".to_owned(),
                volatile: true,
                ..control::RegionStatus::default()
            }],
            certificate: Some(control::CertificateStatus {
                name: "n1".to_owned(),
                role: "node".to_owned(),
                serial: "ab12".to_owned(),
                denied: 3,
                ..control::CertificateStatus::default()
            }),
            cluster: Some(ClusterStatus {
                copies_count: false,
                registry: "etcd at 10.0.0.1:2379, in plaintext".to_owned(),
                node: "n1".to_owned(),
                id: "c".to_owned(),
                fenced: "the registry is away".to_owned(),
                copies_wanted: 2,
                ..ClusterStatus::default()
            }),
            ..ServerStatus::default()
        })]
    });
    let text = stdout(&daemon.run(&["status"]));
    for said in [
        "peers        10.0.0.1:7118\n",
        "0, kept 7 d\n",
        "node n1\n  cluster   c\n  state     fenced: the registry is away\n",
        "  registry  etcd at 10.0.0.1:2379, in plaintext\n",
        "  copies    2 wanted; those on this node do not count towards quorum and all\n",
        "certificate of node n1\n  serial   ab12\n  expires  ",
        "  denied   3 entries\n",
        "file, volatile\n",
    ] {
        assert!(text.contains(said), "{text}");
    }
}

#[test]
fn a_list_comes_in_parts_and_ends_at_its_limit() {
    let daemon = Daemon::start(|request| {
        let request::Body::List(list) = request else {
            panic!("{request:?}");
        };
        let first = match list.after.as_str() {
            "" => 1,
            "train@2" => 3,
            "train@4" => 5,
            other => panic!("{other}"),
        };
        let most = if list.limit == 0 {
            2
        } else {
            list.limit.min(2)
        };
        let generations = first..(first + most).min(6);
        let last = generations.end - 1;
        let checkpoints = generations.map(|generation| checkpoint("train", generation));
        vec![reply::Body::Checkpoints(Checkpoints {
            checkpoints: checkpoints.collect(),
            next: if last < 5 {
                format!("train@{last}")
            } else {
                String::new()
            },
        })]
    });
    let listed = |arguments: &[&str]| {
        let all = json(&daemon.run(&[&["--json", "ls"], arguments].concat()).stdout);
        let checkpoints = all["checkpoints"].as_array().unwrap().iter();
        let generations = checkpoints.map(|one| one["generation"].as_u64().unwrap());
        (
            generations.collect::<Vec<_>>(),
            all["next"].as_str().map(str::to_owned),
        )
    };
    assert_eq!(listed(&[]), (vec![1, 2, 3, 4, 5], None));
    assert_eq!(
        listed(&["--limit", "3"]),
        (vec![1, 2, 3], Some("train@3".to_owned()))
    );
    assert_eq!(listed(&["--after", "train@4"]), (vec![5], None));
    let text = daemon.run(&["ls", "--limit", "2"]).stdout;
    assert!(
        String::from_utf8(text)
            .unwrap()
            .ends_with("there are more: --after train@2\n")
    );
}
