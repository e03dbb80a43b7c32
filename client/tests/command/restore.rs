//! Tests of restores, streamed or from a directory, and of their failures and interruptions.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use permafrost_protocol::control::{self, Checkpoint, Detail, ErrorCode, Exported, reply, request};
use permafrost_protocol::manifest::Origin;

use crate::fake::{Daemon, assert_exit, checkpoint, detail, json, refusal, stderr};

fn with_options(detail: reply::Body, options: &[String]) -> reply::Body {
    let reply::Body::Detail(mut detail) = detail else {
        panic!("{detail:?}")
    };
    detail.manifest.get_or_insert_default().origin = Some(Origin {
        restore_options: options.to_vec(),
        ..Origin::default()
    });
    reply::Body::Detail(detail)
}

fn for_restores(options: &[&str]) -> Daemon {
    let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
    Daemon::start(move |request| {
        vec![match request {
            request::Body::Show(_) => with_options(detail(3, None), &options),
            request::Body::Export(_) | request::Body::Stream(_) => {
                reply::Body::Exported(Exported::default())
            }
            other => panic!("{other:?}"),
        }]
    })
}

#[test]
fn restore_repeats_the_options_of_the_dump_and_prints_the_pid() {
    let daemon = for_restores(&["--shell-job", "--manage-cgroups=full"]);
    daemon.criu(
        "test -e \"$images/inventory.img\" || exit 6\nprintf 4242 >\"$work/pid\"\necho \"$images\" >@HERE@/images",
    );
    let output = daemon.run(&[
        "restore",
        "train",
        "--no-stream",
        "--json",
        "--",
        "--manage-cgroups=soft",
    ]);
    assert_exit(&output, 0);
    let report = json(&output.stdout);
    assert_eq!(report["pid"], 4242);
    assert_eq!(report["checkpoint"]["generation"], 3);
    let arguments = fs::read_to_string(daemon.path().join("criu-arguments")).unwrap();
    assert!(
        arguments.starts_with("restore --images-dir "),
        "{arguments}"
    );
    assert!(
        arguments
            .trim()
            .ends_with("--shell-job --manage-cgroups=soft"),
        "{arguments}"
    );
    match &daemon.requests()[1].0 {
        // The generation that `Show` returned, whatever is sealed meanwhile.
        request::Body::Export(export) => assert_eq!(export.checkpoint, "train@3"),
        other => panic!("{other:?}"),
    }
    let images = fs::read_to_string(daemon.path().join("images")).unwrap();
    assert!(!Path::new(images.trim()).exists(), "images are removed");
}

#[test]
fn a_recorded_option_that_may_run_code_does_not_reach_criu() {
    let daemon = for_restores(&["--shell-job", "--action-script=/tmp/evil"]);
    daemon.criu("printf 4242 >\"$work/pid\"");
    let output = daemon.run(&["restore", "train"]);
    assert_exit(&output, 9);
    let told = stderr(&output);
    assert!(told.contains("--action-script=/tmp/evil"), "{told}");
    assert!(told.contains("--no-recorded-options"), "{told}");
    assert!(!daemon.path().join("criu-arguments").exists());

    let output = daemon.run(&["restore", "train", "--no-recorded-options", "--", "-l"]);
    assert_exit(&output, 0);
    let arguments = fs::read_to_string(daemon.path().join("criu-arguments")).unwrap();
    assert!(arguments.contains("--file-locks"), "{arguments}");
    assert!(!arguments.contains("action-script"), "{arguments}");
    assert!(!arguments.contains("--shell-job"), "{arguments}");

    // An option that the user gives on a restore is not checked, and replaces the recorded one.
    let output = daemon.run(&["restore", "train", "--", "--action-script", "/mine"]);
    assert_exit(&output, 0);
    let arguments = fs::read_to_string(daemon.path().join("criu-arguments")).unwrap();
    assert!(
        arguments.contains("--shell-job --action-script=/mine"),
        "{arguments}"
    );
}

#[test]
fn what_an_agent_dumped_is_restored_on_a_storage_node_only_if_it_is_trusted() {
    let daemon = Daemon::start(|request| {
        vec![match request {
            request::Body::Show(_) => {
                let reply::Body::Detail(mut detail) = detail(3, None) else {
                    panic!()
                };
                detail.manifest.get_or_insert_default().taken_by = "agent c7".to_owned();
                reply::Body::Detail(detail)
            }
            _ => reply::Body::Exported(Exported::default()),
        }]
    });
    daemon.criu("printf 4242 >\"$work/pid\"");
    let output = daemon.run(&["restore", "train"]);
    assert_exit(&output, 9);
    let told = stderr(&output);
    assert!(told.contains("agent c7"), "{told}");
    assert!(told.contains("--trust agent:c7"), "{told}");
    assert!(!daemon.path().join("criu-arguments").exists());
    assert_exit(&daemon.run(&["restore", "train", "--trust", "agent:c8"]), 9);
    assert_exit(
        &daemon.run(&["restore", "train", "--trust", "agent:c8,agent:c7"]),
        0,
    );
}

#[test]
fn a_restore_is_streamed_unless_told_otherwise() {
    let daemon = for_restores(&[]);
    daemon.criu("test -S \"$images/streamer-serve.sock\" || exit 6\nprintf 4242 >\"$work/pid\"");
    let output = daemon.run(&["restore", "train", "--json"]);
    assert_exit(&output, 0);
    assert_eq!(json(&output.stdout)["streamed"], true);
    let arguments = fs::read_to_string(daemon.path().join("criu-arguments")).unwrap();
    assert!(arguments.contains(" --stream"), "{arguments}");
    let (request, carries) = &daemon.requests()[1];
    assert!(matches!(request, request::Body::Stream(stream) if stream.checkpoint == "train@3"));
    assert!(*carries, "the listening socket rides along");
}

#[test]
fn damage_found_while_streaming_is_the_reason_of_a_failed_restore() {
    let daemon = Daemon::start(|request| {
        vec![match request {
            request::Body::Show(_) => detail(3, None),
            _ => reply::Body::Error(control::Error {
                code: ErrorCode::Corrupt.into(),
                message: "train@3: process 7 address 0x1000: damaged".to_owned(),
                hint: String::new(),
            }),
        }]
    });
    daemon.criu("exit 1");
    let output = daemon.run(&["restore", "train"]);
    assert_exit(&output, 7);
    assert!(
        stderr(&output).contains("address 0x1000"),
        "{}",
        stderr(&output)
    );
}

/// Script that fails like CRIU when no process listens on the streamer's socket any more, as `/proc/net/unix`
/// shows; gives up after 10 s.
const COMES_FOR_IMAGES: &str = r#"for i in $(seq 500); do
grep -q "$images/streamer-serve.sock" /proc/net/unix || exit 1
sleep 0.02
done
printf 4242 >"$work/pid""#;

#[test]
fn a_daemon_that_does_not_serve_the_images_fails_the_restore() {
    let daemon = Daemon::start(|request| {
        vec![match request {
            request::Body::Show(_) => detail(3, None),
            _ => refusal(ErrorCode::NotFound),
        }]
    });
    daemon.criu(COMES_FOR_IMAGES);
    let output = daemon.run(&["restore", "train"]);
    assert_exit(&output, 3);
    assert!(
        stderr(&output).contains("the daemon's reason"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_restore_that_criu_makes_of_damaged_images_has_failed() {
    let daemon = Daemon::start(|request| {
        vec![match request {
            request::Body::Show(_) => detail(3, None),
            _ => refusal(ErrorCode::Internal),
        }]
    });
    // No number of a process: nothing is killed, but if it were it would not be a stranger.
    daemon.criu("printf 5000000 >\"$work/pid\"");
    let output = daemon.run(&["restore", "train"]);
    assert_exit(&output, 7);
    assert!(output.stdout.is_empty());
    let text = stderr(&output);
    assert!(
        text.contains("the daemon's reason; process 5000000 runs from damaged"),
        "{text}"
    );
    assert!(text.contains("end process 5000000"), "{text}");
}

#[test]
fn an_interrupt_ends_a_restore_and_all_of_it() {
    for how in ["--no-stream", "--quiet"] {
        let daemon = for_restores(&[]);
        daemon
            .criu("sleep 600 & echo $! $$ >@HERE@/pids.new; mv @HERE@/pids.new @HERE@/pids; wait");
        let child = daemon
            .command(&["restore", "train", how])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let pids = loop {
            match fs::read_to_string(daemon.path().join("pids")) {
                Ok(pids) => break pids,
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        };
        let pid = rustix::process::Pid::from_child(&child);
        let group = |pid| rustix::process::getpgid(Some(pid)).unwrap();
        let mut criu = pids
            .split_whitespace()
            .rev()
            .map(|pid| pid.parse::<i32>().unwrap());
        let criu = rustix::process::Pid::from_raw(criu.next().unwrap()).unwrap();
        assert_ne!(
            group(pid),
            group(criu),
            "a terminal's Ctrl-C is not for CRIU"
        );
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_exit(&output, 130);
        for pid in pids.split_whitespace() {
            // A killed process takes a moment to die.
            let mut state = String::new();
            let gone = (0..1000).any(|_| {
                thread::sleep(Duration::from_millis(5));
                state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
                state.is_empty() || state.contains(") Z ")
            });
            assert!(gone, "{state}");
        }
    }
}

#[test]
fn restore_in_the_foreground_waits_for_its_child() {
    let daemon = for_restores(&[]);
    // Stands in for CRIU's --restore-sibling: the "restored" process is this very one.
    daemon.criu("printf $$ >\"$work/pid\"");
    let output = daemon.run(&["restore", "train", "--foreground"]);
    let arguments = fs::read_to_string(daemon.path().join("criu-arguments")).unwrap();
    assert!(arguments.contains("--restore-sibling"), "{arguments}");
    // The process ended with CRIU, so there is nothing to wait for: the command reports that instead of
    // hanging.
    assert_exit(&output, 1);
    assert!(
        stderr(&output).contains("wait for process"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_failed_restore_keeps_the_log_and_removes_the_images() {
    let daemon = for_restores(&[]);
    daemon.criu(
        "echo \"(00.03) Error (criu/cr-restore.c:1237): Can't fork for $PPID: File exists\" >\"$work/restore.log\"\nexit 1",
    );
    let output = daemon.run(&["--json", "restore", "train"]);
    assert_exit(&output, 5);
    let error = &json(&output.stderr)["error"];
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("Can't fork for"),
        "{error}"
    );
    assert!(
        error["hint"]
            .as_str()
            .unwrap()
            .contains("belongs to permafrost"),
        "{error}"
    );
    let log = Path::new(error["log"].as_str().unwrap());
    let kept = log.parent().unwrap();
    assert_eq!(fs::read_dir(kept).unwrap().count(), 1);
    fs::remove_dir_all(kept).unwrap();
}

#[test]
fn a_pre_dump_is_not_restored() {
    let daemon = Daemon::start(|_| {
        vec![reply::Body::Detail(Detail {
            checkpoint: Some(Checkpoint {
                kind: "pre-dump".to_owned(),
                ..checkpoint("train", 3)
            }),
            ..Detail::default()
        })]
    });
    let output = daemon.run(&["restore", "train"]);
    assert_exit(&output, 2);
    assert!(
        stderr(&output).contains("train@3 is a pre-dump"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_program_that_is_not_criu_is_named() {
    let daemon = for_restores(&[]);
    for command in [
        &["restore", "train", "--no-stream", "--criu", "/bin/true"][..],
        &["restore", "train", "--criu", "/bin/true"],
    ] {
        let output = daemon.run(command);
        assert_exit(&output, 5);
        let said = stderr(&output);
        assert!(said.contains("/bin/true is not CRIU"), "{said}");
    }
}
