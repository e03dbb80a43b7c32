//! Tests of images that are moved without a dump by this command: get, put, adopt, open.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use permafrost_protocol::control::{Exported, SessionOpened, reply, request};

use crate::fake::{Daemon, assert_exit, checkpoint, stdout};

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
