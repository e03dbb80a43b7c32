//! A plain `criu dump --page-server`, without any program of ours on its side, and its adoption and restore.

mod common;

use std::path::Path;
use std::process::Command;

use common::listing;
use permafrost_tests::criu::{self, Criu};
use permafrost_tests::daemon::{Daemon, Options, tail};
use permafrost_tests::workload::{self, Workload};

fn criu_dump(criu: &Criu, pid: u32, images: &Path, address: &str, leave_running: bool) {
    std::fs::create_dir_all(images).unwrap();
    let (host, port) = address.rsplit_once(':').unwrap();
    let mut command = Command::new(&criu.path);
    command
        .args(["dump", "-t", &pid.to_string(), "--images-dir"])
        .arg(images);
    command.args([
        "--page-server",
        "--address",
        host,
        "--port",
        port,
        "-o",
        "dump.log",
        "-v4",
    ]);
    if leave_running {
        command.arg("--leave-running");
    }
    let status = command.status().unwrap();
    assert!(
        status.success(),
        "criu dump: {status}\n{}",
        tail(&images.join("dump.log"))
    );
}

fn dump_adopt_restore(test: &str, options: &workload::Options) {
    let Some(criu) = criu::for_test(test) else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let mut workload = Workload::start(work.path(), options).unwrap();
    let before = workload.verify().unwrap();
    let images = work.path().join("images");
    criu_dump(&criu, workload.pid(), &images, daemon.address(), false);
    workload.wait_until_gone().unwrap();

    let parked = listing(&daemon);
    assert_eq!(parked.len(), 1);
    assert_eq!(parked[0]["kind"], "parked");
    let adopted = daemon
        .json(&[
            "adopt",
            "--job",
            "plain",
            "--images-dir",
            images.to_str().unwrap(),
        ])
        .unwrap();
    assert_eq!(
        (adopted["job"].as_str(), adopted["generation"].as_u64()),
        (Some("plain"), Some(1))
    );
    assert_eq!(
        listing(&daemon).len(),
        1,
        "adopting replaces the parked session"
    );

    daemon.run(&["restore", "plain"]).unwrap();
    let after = workload.verify().unwrap();
    assert!(after.is_sound(), "{after:?}");
    assert!(
        after.counter >= before.counter,
        "the counter goes on: {} then {}",
        before.counter,
        after.counter
    );
    assert_eq!(after.checksum_kept, before.checksum_kept);
}

#[test]
fn one_process_is_parked_adopted_and_restored() {
    let options = workload::Options {
        size_mib: 32,
        ..workload::Options::default()
    };
    dump_adopt_restore("one_process_is_parked_adopted_and_restored", &options);
}

#[test]
fn a_tree_with_shared_memory_threads_pipes_and_files_is_restored() {
    let options = workload::Options::tree(16);
    dump_adopt_restore(
        "a_tree_with_shared_memory_threads_pipes_and_files_is_restored",
        &options,
    );
}

#[test]
fn a_parked_dump_survives_kill_nine() {
    let Some(criu) = criu::for_test("a_parked_dump_survives_kill_nine") else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let mut workload = Workload::start(work.path(), &workload::Options::default()).unwrap();
    let images = work.path().join("images");
    criu_dump(&criu, workload.pid(), &images, daemon.address(), false);
    workload.wait_until_gone().unwrap();
    daemon.kill().unwrap();

    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    daemon
        .json(&[
            "adopt",
            "--job",
            "survivor",
            "--images-dir",
            images.to_str().unwrap(),
        ])
        .unwrap();
    daemon.run(&["restore", "survivor"]).unwrap();
    assert!(workload.verify().unwrap().is_sound());
}

#[test]
fn dumps_that_look_alike_are_told_apart_and_copies_by_hand() {
    let Some(criu) = criu::for_test("dumps_that_look_alike_are_told_apart_and_copies_by_hand")
    else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let workload = Workload::start(work.path(), &workload::Options::tree(1)).unwrap();
    let images = [1, 2].map(|n| work.path().join(format!("images{n}")));
    for dir in &images {
        criu_dump(&criu, workload.pid(), dir, daemon.address(), true);
    }
    let parked = daemon.json(&["ls", "--parked"]).unwrap();
    let parked = parked["checkpoints"].as_array().unwrap();
    assert_eq!(parked.len(), 2);
    let processes = &parked[0]["parked_processes"];
    assert_eq!(processes[0]["pid"], workload.pid());
    // Linux keeps 15 letters of it.
    assert_eq!(processes[0]["program"], "permafrost-work", "{processes}");

    let adopt =
        |dir: &std::path::Path| daemon.json(&["adopt", "--job=twins", "-D", dir.to_str().unwrap()]);
    let second = adopt(&images[1]).unwrap();
    assert_eq!(adopt(&images[1]).unwrap()["id"], second["id"], "as it was");
    assert_eq!(listing(&daemon).len(), 2, "the first one is parked still");
    let first = adopt(&images[0]).unwrap();
    assert!(first["session"] != second["session"]);
    let parked = daemon.json(&["ls", "--parked"]).unwrap();
    assert_eq!(parked["checkpoints"].as_array().unwrap().len(), 0);

    // A copy was written later than the pages.
    let third = work.path().join("images3");
    criu_dump(&criu, workload.pid(), &third, daemon.address(), true);
    let copy = work.path().join("copy");
    std::fs::create_dir(&copy).unwrap();
    for file in std::fs::read_dir(&third).unwrap().flatten() {
        std::fs::copy(file.path(), copy.join(file.file_name())).unwrap();
    }
    let adopt = ["adopt", "--job=twins", "-D", copy.to_str().unwrap()];
    let refused = daemon.try_run(&adopt).unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(3), "{said}");
    assert!(said.contains("after its last page"), "{said}");
    daemon
        .json(&[&adopt[..], &["--ignore-times"]].concat())
        .unwrap();
}

#[test]
fn images_of_another_process_are_refused() {
    let Some(criu) = criu::for_test("images_of_another_process_are_refused") else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let workload = Workload::start(work.path(), &workload::Options::default()).unwrap();
    let images = work.path().join("images");
    criu_dump(&criu, workload.pid(), &images, daemon.address(), true);
    let session = listing(&daemon)[0]["session"].as_str().unwrap().to_owned();
    let other = work.path().join("other");
    common::fake_images(&other);
    let adopt = [
        "adopt",
        "--job",
        "x",
        "--images-dir",
        other.to_str().unwrap(),
    ];
    let by_name = daemon
        .try_run(&[&adopt[..], &[session.as_str()]].concat())
        .unwrap();
    assert_eq!(by_name.status.code(), Some(2), "{by_name:?}");
    assert_eq!(
        daemon.try_run(&adopt).unwrap().status.code(),
        Some(3),
        "nothing fits"
    );
    let empty = work.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let adopt = ["adopt", "--job=x", "-D", empty.to_str().unwrap()];
    let refused = daemon.try_run(&adopt).unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("describes no process"), "{said}");
    assert_eq!(
        listing(&daemon).len(),
        1,
        "the parked session is still there"
    );
}
