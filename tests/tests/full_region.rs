//! A full region: CRIU gets an error, and the task survives.

mod common;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;

use common::*;
use permafrost_protocol::pageserver::Dialect;
use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::workload::{self, Workload};

#[test]
fn a_dump_that_does_not_fit_leaves_the_task_running() {
    if criu::for_test("a_dump_that_does_not_fit_leaves_the_task_running").is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(
        work.path(),
        &Options {
            region_mib: 64,
            ..Options::default()
        },
    )
    .unwrap();
    let options = workload::Options {
        size_mib: 96,
        ..workload::Options::default()
    };
    let workload = Workload::start(work.path(), &options).unwrap();
    let pid = workload.pid().to_string();
    let refused = daemon
        .try_run(&["dump", "--pid", &pid, "--job", "big"])
        .unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(6), "no space: {said}");
    assert!(said.contains("full") && said.contains("hint"), "{said}");
    assert!(workload.is_running(), "the task must live");
    assert!(workload.verify().unwrap().is_sound());

    // All that it took is free again.
    let status = daemon.json(&["status"]).unwrap();
    let region = &status["regions"][0];
    assert_eq!(region["free_bytes"], region["capacity_bytes"], "{status}");
}

#[test]
fn a_seal_that_does_not_fit_is_refused_and_frees_everything() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(
        work.path(),
        &Options {
            region_mib: 64,
            ..Options::default()
        },
    )
    .unwrap();
    let opened = daemon.json(&["open", "--job", "tight"]).unwrap();
    let mut peer = Peer::tcp(opened["address"].as_str().unwrap(), Dialect::V32);
    peer.open();
    peer.pages(0x10_0000, &pages(1, 40 * 256));
    let images = work.path().join("images");
    fake_images(&images);
    assert_eq!(peer.close(), Some(0));
    peer.leave();
    std::fs::write(images.join("ghost-file-1.img"), vec![7; 32 << 20]).unwrap();
    let session = opened["session"].as_str().unwrap();
    let adopt = [
        "adopt",
        "--job",
        "tight",
        "--images-dir",
        images.to_str().unwrap(),
        session,
    ];
    let refused = daemon.try_run(&adopt).unwrap();
    assert_eq!(refused.status.code(), Some(6), "{refused:?}");
    // The pages are parked still, and can be adopted once there is room.
    assert_eq!(listing(&daemon).len(), 1);
    std::fs::remove_file(images.join("ghost-file-1.img")).unwrap();
    daemon.json(&adopt).unwrap();
    daemon.run(&["rm", "tight@1", "--last"]).unwrap();
    let status = daemon.json(&["status"]).unwrap();
    let region = &status["regions"][0];
    assert_eq!(region["free_bytes"], region["capacity_bytes"], "{status}");
}

#[test]
fn a_region_that_is_too_small_is_refused_with_the_least_size() {
    let work = tempfile::tempdir().unwrap();
    let small = Options {
        region_mib: 1,
        ..Options::default()
    };
    let refused = format!("{:#}", Daemon::start(work.path(), &small).unwrap_err());
    assert!(refused.contains("needs at least 2097152"), "{refused}");
    // Nothing is in the way of a better size.
    drop(Daemon::start(work.path(), &Options::default()).unwrap());

    let passwd = work.path().join("passwd");
    std::fs::write(&passwd, "root:x:0:0:root:/root:/bin/sh\n").unwrap();
    std::fs::set_permissions(&passwd, Permissions::from_mode(0o600)).unwrap();
    let file = Options {
        region: Some(passwd.clone()),
        ..Options::default()
    };
    let other = tempfile::tempdir().unwrap();
    let refused = format!("{:#}", Daemon::start(other.path(), &file).unwrap_err());
    assert!(
        refused.contains("has 30 bytes and so holds no region"),
        "{refused}"
    );
    assert_eq!(
        std::fs::metadata(&passwd).unwrap().len(),
        30,
        "left as it was"
    );
}
