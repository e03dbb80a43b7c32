//! Tests of images that are moved without a dump by this command: get, put, adopt, open.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use permafrost_protocol::control::{Exported, SessionOpened, reply, request};

use crate::fake::{Daemon, assert_exit, checkpoint, detail, stderr, stdout};

#[test]
fn get_makes_a_private_directory_and_spares_a_full_one() {
    let daemon = Daemon::start(|_| {
        vec![reply::Body::Exported(Exported {
            checkpoint: Some(checkpoint("train", 1)),
            files: 1,
            ..Exported::default()
        })]
    });
    let target = daemon.path().join("images");
    let target = target.to_str().unwrap();
    let output = daemon.run(&["get", "train", target]);
    assert_exit(&output, 0);
    assert!(
        stdout(&output).contains("criu restore --images-dir"),
        "{}",
        stdout(&output)
    );
    assert_eq!(fs::metadata(target).unwrap().mode() & 0o777, 0o700);
    assert!(Path::new(target).join("inventory.img").exists());
    let (request, directory) = daemon.only_request();
    assert!(directory);
    assert_eq!(
        request,
        request::Body::Export(request::Export {
            checkpoint: "train".to_owned(),
            ..Default::default()
        })
    );
    assert_exit(&daemon.run(&["get", "train", target]), 4);
    assert_exit(&daemon.run(&["get", "train", target, "--force"]), 0);
}

#[test]
fn put_and_adopt_hand_the_directory_over() {
    let daemon = Daemon::start(|_| vec![reply::Body::Checkpoint(checkpoint("train", 4))]);
    let images = daemon.path().to_str().unwrap().to_owned();
    let output = daemon.run(&["put", "train", &images]);
    assert!(
        stdout(&output).starts_with("train@4 is sealed\n"),
        "{}",
        stdout(&output)
    );
    let output = daemon.run(&[
        "adopt",
        "--job",
        "train",
        "--images-dir",
        &images,
        "abc",
        "--",
        "--file-locks",
    ]);
    assert_exit(&output, 0);
    let requests = daemon.requests();
    assert!(requests.iter().all(|(_, directory)| *directory));
    match &requests[1].0 {
        request::Body::Adopt(adopt) => {
            assert_eq!(
                (adopt.session.as_str(), adopt.job.as_str()),
                ("abc", "train")
            );
            let origin = adopt.origin.as_ref().unwrap();
            assert_eq!(origin.restore_options, ["--file-locks"]);
            assert_eq!(origin.pid, 0);
        }
        other => panic!("{other:?}"),
    }
    assert_exit(&daemon.run(&["put", "train", "/nonexistent"]), 3);
    assert_exit(
        &daemon.run(&["put", "train", daemon.socket().to_str().unwrap()]),
        1,
    );
}

#[test]
fn open_prints_what_criu_needs_and_outlives_the_command() {
    let daemon = Daemon::start(|_| {
        vec![reply::Body::SessionOpened(SessionOpened {
            session: "77".to_owned(),
            socket: "/run/s".to_owned(),
            address: "127.0.0.1:4000".to_owned(),
            ..SessionOpened::default()
        })]
    });
    let output = daemon.run(&["open", "--job", "train"]);
    assert!(
        stdout(&output).contains("--address 127.0.0.1 --port 4000"),
        "{}",
        stdout(&output)
    );
    match daemon.only_request().0 {
        request::Body::Open(open) => {
            assert!(!open.bound_to_connection && !open.seal_follows && !open.no_parent);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn bad_archives_are_refused_before_anything_is_stored() {
    let daemon = Daemon::start(|_| vec![reply::Body::Checkpoint(checkpoint("train", 1))]);
    let work = daemon.path().join("work");
    fs::create_dir(&work).unwrap();
    let cases: [(&str, &[u8], i32, &str); 4] = [
        ("text", b"no archive", 2, "not a tar archive"),
        ("xz", b"\xfd7zXZ\0", 2, "xz"),
        ("empty", b"", 2, "truncated"),
        ("short", b"\x28\xb5\x2f\xfd", 2, "truncated"),
    ];
    for (name, bytes, code, reason) in cases {
        let archive = daemon.path().join(name);
        fs::write(&archive, bytes).unwrap();
        let mut arguments = vec!["put", "train", "--archive", archive.to_str().unwrap()];
        for _ in 0..2 {
            let output = daemon.run(&arguments);
            assert_exit(&output, code);
            assert!(
                stderr(&output).contains(reason),
                "{name}: {}",
                stderr(&output)
            );
            arguments.extend(["--work-dir", work.to_str().unwrap()]);
        }
    }
    assert_eq!(fs::read_dir(&work).unwrap().count(), 0);
    assert!(daemon.requests().is_empty(), "{:?}", daemon.requests());
    assert_exit(
        &daemon.run(&["put", "train", "--archive", "/nonexistent"]),
        3,
    );
    assert_exit(
        &daemon.run(&["put", "train", "--archive", work.to_str().unwrap()]),
        2,
    );
    assert_exit(&daemon.run(&["put", "train"]), 2);
    assert_exit(
        &daemon.run(&["put", "train", "images", "--archive", "x"]),
        2,
    );
}

#[test]
fn an_archive_is_written_whole_or_not_at_all() {
    let daemon = Daemon::start(|_| vec![detail(1, None)]);
    let target = daemon.path().join("out");
    fs::create_dir(&target).unwrap();
    let archive = target.join("a.tar");
    let archive = archive.to_str().unwrap();
    // It was not stored from one.
    let output = daemon.run(&["get", "train", "--archive", archive]);
    assert_exit(&output, 2);
    assert!(
        stderr(&output).contains("permafrost get train@1 DIRECTORY"),
        "{}",
        stderr(&output)
    );
    assert_eq!(fs::read_dir(&target).unwrap().count(), 0);
    // Neither its name nor an option says how it is compressed.
    assert_exit(
        &daemon.run(&["get", "train", "--archive", "checkpoint.img"]),
        2,
    );
    fs::write(archive, "here before").unwrap();
    assert_exit(&daemon.run(&["get", "train", "--archive", archive]), 4);
    assert_eq!(fs::read_to_string(archive).unwrap(), "here before");
}
