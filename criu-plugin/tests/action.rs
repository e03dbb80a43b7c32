//! `permafrost-action` as CRIU runs it, against a daemon that is a thread of the test.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use permafrost_criu::handover::{self, SealOrder};
use permafrost_criu::verdict::{SealBy, Verdict};
use permafrost_protocol::control::{Checkpoint, Error, ErrorCode, Reply, Request, reply, request};
use permafrost_transport::framing;

/// Answers one request, and returns it with whether a directory came along.
fn daemon(directory: &Path, answer: reply::Body) -> JoinHandle<(request::Body, bool)> {
    let listener = UnixListener::bind(directory.join("control.sock")).unwrap();
    thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let (request, fds) = framing::recv::<Request>(&stream).unwrap().unwrap();
        framing::send(&stream, &Reply { body: Some(answer) }, &[]).unwrap();
        let images = fds.first().is_some_and(|fd| {
            rustix::fs::accessat(
                fd,
                "inventory.img",
                rustix::fs::Access::EXISTS,
                rustix::fs::AtFlags::empty(),
            )
            .is_ok()
        });
        (request.body.unwrap(), images)
    })
}

fn run(directory: &Path, stage: &str, variables: &[(&str, &str)]) -> Output {
    let images = directory.join("images");
    fs::create_dir_all(&images).unwrap();
    fs::write(images.join("inventory.img"), "").unwrap();
    Command::new(env!("CARGO_BIN_EXE_permafrost-action"))
        .env_clear()
        .env("CRTOOLS_SCRIPT_ACTION", stage)
        .env("CRTOOLS_IMAGE_DIR", images)
        .env("PERMAFROST_SOCKET", directory.join("control.sock"))
        .env("PERMAFROST_VERDICT", directory.join("verdict"))
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

fn verdict(directory: &Path) -> Verdict {
    fs::read_to_string(directory.join("verdict"))
        .unwrap()
        .parse()
        .unwrap()
}

fn sealed() -> reply::Body {
    reply::Body::Checkpoint(Checkpoint {
        job: "train".to_owned(),
        generation: 3,
        id: "7".repeat(32),
        ..Checkpoint::default()
    })
}

#[test]
fn post_dump_seals_the_session_with_the_images() {
    let directory = tempfile::tempdir().unwrap();
    let serving = daemon(directory.path(), sealed());
    let output = run(
        directory.path(),
        "post-dump",
        &[("PERMAFROST_SESSION", "5e55")],
    );
    assert!(output.status.success(), "{output:?}");
    let (request, images) = serving.join().unwrap();
    assert!(images);
    assert_eq!(
        request,
        request::Body::Seal(request::Seal {
            session: "5e55".to_owned()
        })
    );
    match verdict(directory.path()) {
        Verdict::Sealed { checkpoint, .. } => {
            let named = (
                checkpoint.job.as_str(),
                checkpoint.generation,
                checkpoint.id,
            );
            assert_eq!(named, ("train", 3, "7".repeat(32)));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_refusal_is_written_down_and_rolls_the_dump_back() {
    let directory = tempfile::tempdir().unwrap();
    let refusal = Error {
        code: ErrorCode::NoSpace.into(),
        message: "region is full".to_owned(),
        hint: "remove a checkpoint".to_owned(),
    };
    let serving = daemon(directory.path(), reply::Body::Error(refusal));
    let output = run(
        directory.path(),
        "post-dump",
        &[("PERMAFROST_SESSION", "5e55")],
    );
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("region is full"));
    serving.join().unwrap();
    assert_eq!(
        verdict(directory.path()),
        Verdict::Refused {
            code: 6,
            message: "region is full".to_owned(),
            hint: "remove a checkpoint".to_owned(),
        }
    );
}

#[test]
fn without_a_daemon_the_dump_is_rolled_back() {
    let directory = tempfile::tempdir().unwrap();
    let output = run(
        directory.path(),
        "post-dump",
        &[("PERMAFROST_SESSION", "5e55")],
    );
    assert_eq!(output.status.code(), Some(1));
    assert!(matches!(
        verdict(directory.path()),
        Verdict::Refused { code: 10, .. }
    ));
}

#[test]
fn an_anonymous_session_is_adopted_for_the_job() {
    let directory = tempfile::tempdir().unwrap();
    let serving = daemon(directory.path(), sealed());
    let output = run(
        directory.path(),
        "post-dump",
        &[("PERMAFROST_JOB", "train")],
    );
    assert!(output.status.success(), "{output:?}");
    match serving.join().unwrap() {
        (request::Body::Adopt(adopt), true) => {
            assert_eq!((adopt.session.as_str(), adopt.job.as_str()), ("", "train"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_other_stage_and_every_other_dump_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    for stage in ["pre-dump", "network-lock", "pre-restore", "post-resume", ""] {
        let output = run(directory.path(), stage, &[("PERMAFROST_SESSION", "5e55")]);
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{stage}: {output:?}"
        );
    }
    assert!(run(directory.path(), "post-dump", &[]).status.success());
    assert!(!directory.path().join("verdict").exists());
}

#[test]
fn a_daemon_that_does_not_answer_in_time_has_refused() {
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(directory.path().join("control.sock")).unwrap();
    let soon = SealBy::after(Duration::from_millis(200)).to_string();
    let output = run(
        directory.path(),
        "post-dump",
        &[
            ("PERMAFROST_SESSION", "5e55"),
            ("PERMAFROST_SEAL_BY", &soon),
        ],
    );
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(verdict(directory.path()), Verdict::too_late());
    // The daemon finds the request, and a caller that no longer waits for its answer.
    let (stream, _) = listener.accept().unwrap();
    assert!(framing::recv::<Request>(&stream).unwrap().is_some());
    assert!(framing::recv::<Request>(&stream).unwrap().is_none());
}

#[test]
fn without_an_environment_the_file_beside_the_images_names_the_session() {
    let directory = tempfile::tempdir().unwrap();
    let scratch = directory.path();
    fs::set_permissions(scratch, fs::Permissions::from_mode(0o700)).unwrap();
    let images = scratch.join("images");
    fs::create_dir(&images).unwrap();
    fs::write(images.join("inventory.img"), "").unwrap();
    handover::make_verdict(scratch).unwrap();
    let order = SealOrder {
        session: "5e55",
        socket: &scratch.join("control.sock"),
        seal_by: None,
    };
    handover::write(scratch, &order).unwrap();
    let action = || {
        // As CRIU names it.
        let open = fs::File::open(&images).unwrap();
        let link = format!("/proc/{}/fd/{}", std::process::id(), open.as_raw_fd());
        Command::new(env!("CARGO_BIN_EXE_permafrost-action"))
            .env_clear()
            .env("CRTOOLS_SCRIPT_ACTION", "post-dump")
            .env("CRTOOLS_IMAGE_DIR", link)
            .output()
            .unwrap()
    };

    // A directory that others may enter is not believed: they could send a root's action script anywhere.
    fs::set_permissions(&images, fs::Permissions::from_mode(0o755)).unwrap();
    let output = action();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
    assert_eq!(fs::read_to_string(scratch.join("verdict")).unwrap(), "");

    fs::set_permissions(&images, fs::Permissions::from_mode(0o700)).unwrap();
    let serving = daemon(scratch, sealed());
    let output = action();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(
        serving.join().unwrap(),
        (
            request::Body::Seal(request::Seal {
                session: "5e55".to_owned()
            }),
            true
        )
    );
    assert!(matches!(verdict(scratch), Verdict::Sealed { .. }));
}

/// Name under which the script stores every dump, and the one under which it stores those that are named.
const HOOK: &str = "permafrost-hook";
const ACTION: &str = "permafrost-action";

/// Runs the action script under the name by which it stores every dump.
fn run_hook(directory: &Path, variables: &[(&str, &str)]) -> Output {
    run_as(HOOK, directory, variables)
}

/// Runs the action script under a name, as this process's script.
fn run_as(name: &str, directory: &Path, variables: &[(&str, &str)]) -> Output {
    let hook = directory.join(name);
    if !hook.exists() {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_permafrost-action"), &hook).unwrap();
    }
    let images = directory.join("images");
    fs::create_dir_all(&images).unwrap();
    fs::write(images.join("inventory.img"), "").unwrap();
    // As CRIU names it.
    let open = fs::File::open(&images).unwrap();
    let link = format!("/proc/{}/fd/{}", std::process::id(), open.as_raw_fd());
    Command::new(hook)
        .env_clear()
        .env("CRTOOLS_SCRIPT_ACTION", "post-dump")
        .env("CRTOOLS_IMAGE_DIR", link)
        .env("CRTOOLS_INIT_PID", std::process::id().to_string())
        .env("PERMAFROST_SOCKET", directory.join("control.sock"))
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

#[test]
fn a_hook_stores_a_dump_that_nobody_has_named() {
    let directory = tempfile::tempdir().unwrap();
    // Pages that are with the page server are adopted.
    let serving = daemon(directory.path(), sealed());
    let output = run_hook(directory.path(), &[]);
    assert!(output.status.success(), "{output:?}");
    let name = match serving.join().unwrap() {
        (request::Body::Adopt(adopt), true) => adopt.job,
        other => panic!("{other:?}"),
    };
    // This process and the hook are in one cgroup.
    assert!(
        name.ends_with(&format!("pid-{}", std::process::id())),
        "{name}"
    );

    // CRIU runs two scripts if two files name one: the second repeats what the first has done, and asks nobody.
    let output = run_hook(directory.path(), &[]);
    assert!(output.status.success(), "{output:?}");
    let of_dump = directory.path().join("images/permafrost.verdict");
    let verdict: Verdict = fs::read_to_string(&of_dump).unwrap().parse().unwrap();
    assert!(matches!(verdict, Verdict::Sealed { .. }));

    // The next dump into the same directory is another one; and pages in the directory are imported.
    let text = fs::read_to_string(&of_dump).unwrap();
    let line = text.lines().next_back().unwrap();
    fs::write(&of_dump, text.replace(line, "dump 1 1")).unwrap();
    fs::write(directory.path().join("images/pagemap-1.img"), "").unwrap();
    fs::remove_file(directory.path().join("control.sock")).unwrap();
    let serving = daemon(directory.path(), sealed());
    let output = run_hook(directory.path(), &[("PERMAFROST_JOB", "train")]);
    assert!(output.status.success(), "{output:?}");
    match serving.join().unwrap() {
        (request::Body::Import(import), true) => assert_eq!(import.job, "train"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_second_script_repeats_the_verdict_on_a_session() {
    let directory = tempfile::tempdir().unwrap();
    let verdict_file = directory.path().join("verdict");
    let named = [
        ("PERMAFROST_SESSION", "5e55"),
        ("PERMAFROST_VERDICT", verdict_file.to_str().unwrap()),
    ];
    let serving = daemon(directory.path(), sealed());
    assert!(run_hook(directory.path(), &named).status.success());
    serving.join().unwrap();
    // The session is no more: who asked again would be refused, and CRIU would roll back a dump that is sealed.
    assert!(run_hook(directory.path(), &named).status.success());
    assert!(matches!(verdict(directory.path()), Verdict::Sealed { .. }));
    // A verdict on an earlier dump is none on this one.
    let text = fs::read_to_string(&verdict_file).unwrap();
    let line = text.lines().next_back().unwrap().to_owned();
    fs::write(&verdict_file, text.replace(&line, "dump 1 1")).unwrap();
    fs::remove_file(directory.path().join("images/permafrost.verdict")).unwrap();
    assert!(!run_hook(directory.path(), &named).status.success());
    assert!(matches!(verdict(directory.path()), Verdict::Refused { .. }));
    assert!(!run_hook(directory.path(), &named).status.success());
}

#[test]
fn a_second_script_repeats_the_verdict_under_either_name() {
    let refusal = || {
        reply::Body::Error(Error {
            code: ErrorCode::NoSpace.into(),
            message: "region is full".to_owned(),
            hint: String::new(),
        })
    };
    let named = [("PERMAFROST_JOB", "train")];
    for order in [[HOOK, ACTION], [ACTION, HOOK]] {
        for has_pages in [false, true] {
            for (answer, succeeds) in [(sealed(), true), (refusal(), false)] {
                let directory = tempfile::tempdir().unwrap();
                if has_pages {
                    fs::create_dir(directory.path().join("images")).unwrap();
                    fs::write(directory.path().join("images/pagemap-1.img"), "").unwrap();
                }
                let serving = daemon(directory.path(), answer);
                let first = run_as(order[0], directory.path(), &named);
                assert_eq!(first.status.success(), succeeds, "{order:?}: {first:?}");
                let (request, _) = serving.join().unwrap();
                assert_eq!(matches!(request, request::Body::Import(_)), has_pages);
                // Another daemon would give the opposite answer, and is not asked.
                fs::remove_file(directory.path().join("control.sock")).unwrap();
                let opposite = if succeeds { refusal() } else { sealed() };
                let _unasked = daemon(directory.path(), opposite);
                let second = run_as(order[1], directory.path(), &named);
                assert_eq!(second.status.success(), succeeds, "{order:?}: {second:?}");
                assert!(second.stderr.is_empty(), "{second:?}");
            }
        }
    }
}

#[test]
fn a_script_that_no_time_binds_gives_up_after_its_own_limit() {
    for name in [HOOK, ACTION] {
        let directory = tempfile::tempdir().unwrap();
        // It takes the connection, and never answers.
        let _listener = UnixListener::bind(directory.path().join("control.sock")).unwrap();
        let named = [
            ("PERMAFROST_JOB", "train"),
            ("PERMAFROST_SEAL_WITHIN_MS", "200"),
        ];
        let output = run_as(name, directory.path(), &named);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let left = fs::read_to_string(directory.path().join("images/permafrost.verdict"));
        assert_eq!(
            left.unwrap().parse::<Verdict>().unwrap(),
            Verdict::too_late()
        );
    }
}

#[test]
fn a_dump_of_no_job_is_left_alone_and_a_refusal_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let unknown = Error {
        code: ErrorCode::NotFound.into(),
        message: "parked dump".to_owned(),
        hint: String::new(),
    };
    let serving = daemon(directory.path(), reply::Body::Error(unknown));
    // Pages that are neither here nor there may have been lost: the dump is rolled back.
    let output = run_hook(directory.path(), &[]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(log.contains("PERMAFROST_JOB=none"), "{log}");
    serving.join().unwrap();

    fs::remove_file(directory.path().join("images/permafrost.verdict")).unwrap();
    fs::remove_file(directory.path().join("control.sock")).unwrap();
    for name in [HOOK, ACTION] {
        let output = run_as(name, directory.path(), &[("PERMAFROST_JOB", "none")]);
        assert!(output.status.success(), "{output:?}");
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(log.contains("left alone"), "{log}");
        // A session that is named is sealed all the same, and no daemon is here.
        let session = [("PERMAFROST_JOB", "none"), ("PERMAFROST_SESSION", "5e55")];
        assert!(
            !run_as(name, directory.path(), &session).status.success(),
            "{name}"
        );
    }
}
