//! A region on several files: added, grown, drained and removed beside dumps, and a file that is missing at the start.

use std::path::Path;

use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::workload::{self, Workload};

const MIB: u64 = 1 << 20;

fn daemon(dir: &Path, extra: &[String]) -> Daemon {
    let options = Options {
        region_mib: 24,
        extra: extra.to_vec(),
        ..Options::default()
    };
    Daemon::start(dir, &options).unwrap()
}

fn workload(dir: &Path) -> Workload {
    let options = workload::Options {
        size_mib: 32,
        modify_percent: 10,
        ..workload::Options::default()
    };
    Workload::start(dir, &options).unwrap()
}

/// Returns the exit code of a command that fails, and what it says.
fn refused(daemon: &Daemon, arguments: &[&str]) -> (i32, String) {
    let output = daemon.try_run(arguments).unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code().unwrap(), message)
}

/// Returns a field of each medium, in their order.
fn media(daemon: &Daemon, field: &str) -> Vec<serde_json::Value> {
    let listed = daemon.json(&["region", "ls"]).unwrap();
    let media = listed["media"].as_array().unwrap().iter();
    media.map(|medium| medium[field].clone()).collect()
}

fn used(daemon: &Daemon, place: usize) -> u64 {
    media(daemon, "used_bytes")[place].as_u64().unwrap()
}

#[test]
fn a_region_spreads_over_files_and_is_gathered_again() {
    if criu::for_test("a_region_spreads_over_files_and_is_gathered_again").is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    // Cleaning would change what is in use between two looks.
    let first = daemon(work.path(), &["--clean-interval=off".to_owned()]);
    let mut workload = workload(work.path());
    let pid = workload.pid().to_string();
    let dump = ["dump", "--pid", &pid, "--job", "spread", "--leave-running"];
    assert_eq!(refused(&first, &dump).0, 6, "the region is too small");

    let file = work.path().join("more");
    let path = file.to_str().unwrap();
    assert_eq!(refused(&first, &["region", "add", path]).0, 2, "no size");
    assert!(!file.exists());
    let add = ["region", "add", path, "--size", "64M", "--tier", "hdd"];
    let added = first.run(&add).unwrap();
    assert!(added.contains("hdd") && added.contains(path), "{added}");
    let (code, message) = refused(&first, &add);
    assert_eq!(code, 4, "{message}");
    assert!(message.contains("medium 1"), "{message}");

    // The faster file is filled first; a delta refers to pages on both.
    first.run(&dump).unwrap();
    assert!(used(&first, 0) > 8 * MIB && used(&first, 1) > 8 * MIB);
    workload.modify().unwrap();
    first.run(&dump[..5]).unwrap();
    workload.wait_until_gone().unwrap();
    // Cooled and warmed on request, and by the rules only what no newest generation needs.
    let fast = used(&first, 0);
    let would = first
        .run(&["region", "cool", "spread", "--dry-run"])
        .unwrap();
    assert!(would.contains("would move"), "{would}");
    assert_eq!(used(&first, 0), fast);
    first.run(&["region", "cool", "spread"]).unwrap();
    assert!(used(&first, 0) < fast);
    first.run(&["verify", "spread"]).unwrap();
    first.run(&["region", "warm", "spread"]).unwrap();
    assert_eq!(used(&first, 0), fast);
    assert_eq!(refused(&first, &["region", "warm", "nobody"]).0, 3);
    assert_eq!(refused(&first, &["region", "rm", path]).0, 4, "in use");
    assert_eq!(refused(&first, &["region", "rm", "0"]).0, 2);
    assert_eq!(refused(&first, &["region", "drain", "7"]).0, 3);

    // Too full to be drained, until the first one has grown.
    let (code, message) = refused(&first, &["region", "drain", "1"]);
    assert_eq!(code, 6, "{message}");
    assert_eq!(media(&first, "state")[1], "draining");
    first.run(&["region", "grow", "0", "96M"]).unwrap();
    let drained = first.run(&["region", "drain", "1"]).unwrap();
    assert!(drained.contains("empty"), "{drained}");
    assert_eq!(used(&first, 1), 0);
    first.run(&["region", "rm", "1"]).unwrap();
    std::fs::remove_file(&file).unwrap();
    first.run(&["verify", "spread"]).unwrap();

    first.kill().unwrap();
    let second = daemon(work.path(), &[]);
    assert_eq!(media(&second, "number").len(), 1);
    second.run(&["restore", "spread"]).unwrap();
    assert!(workload.verify().unwrap().is_sound());
}

#[test]
fn a_file_that_is_missing_is_found_again_or_given_up() {
    if criu::for_test("a_file_that_is_missing_is_found_again_or_given_up").is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let first = daemon(work.path(), &[]);
    let file = work.path().join("more");
    let path = file.to_str().unwrap();
    first
        .run(&["region", "add", path, "--size", "64M"])
        .unwrap();
    let mut workload = workload(work.path());
    let pid = workload.pid().to_string();
    first
        .run(&["dump", "--pid", &pid, "--job", "spread"])
        .unwrap();
    workload.wait_until_gone().unwrap();
    first.kill().unwrap();

    let away = work.path().join("away");
    std::fs::rename(&file, &away).unwrap();
    let second = daemon(work.path(), &[]);
    assert_eq!(media(&second, "state"), ["active", "missing"]);
    assert!(!file.exists(), "no file is made in its place");
    assert_ne!(refused(&second, &["verify", "spread"]).0, 0);
    assert_eq!(refused(&second, &["region", "drain", "1"]).0, 4);
    let (code, message) = refused(&second, &["region", "rm", "1", "--lost"]);
    assert_eq!(code, 2, "{message}");
    assert!(message.contains("--yes"), "{message}");
    second.kill().unwrap();

    let third = daemon(
        work.path(),
        &[format!("--member={}", away.to_str().unwrap())],
    );
    assert_eq!(media(&third, "state"), ["active", "active"]);
    third.run(&["verify", "spread"]).unwrap();
    assert_eq!(
        refused(&third, &["region", "rm", "1", "--lost", "--yes"]).0,
        4,
        "it is there"
    );
    third.run(&["restore", "spread"]).unwrap();
    assert!(workload.verify().unwrap().is_sound());
    third.kill().unwrap();

    // Where it was found is known.
    let fourth = daemon(work.path(), &[]);
    assert_eq!(media(&fourth, "path")[1], away.to_str().unwrap());
    fourth.kill().unwrap();
    std::fs::remove_file(&away).unwrap();
    let fifth = daemon(work.path(), &[]);
    fifth
        .run(&["region", "rm", "1", "--lost", "--yes"])
        .unwrap();
    assert_eq!(media(&fifth, "number").len(), 1);
    // Its list of parts was on that file.
    let status = fifth.json(&["status"]).unwrap();
    assert_eq!(status["regions"][0]["unreadable"], 1, "{status}");
}

#[test]
fn a_checkpoint_goes_to_an_object_store_and_is_restored_from_it() {
    if criu::for_test("a_checkpoint_goes_to_an_object_store_and_is_restored_from_it").is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let large = Options {
        region_mib: 96,
        ..Options::default()
    };
    let first = Daemon::start(work.path(), &large).unwrap();
    let (file, store) = (work.path().join("cold"), work.path().join("store"));
    let (path, address) = (
        file.to_str().unwrap(),
        format!("file://{}", store.display()),
    );
    let add = ["region", "add", path, "--size", "128M", "--store", &address];
    assert_eq!(refused(&first, &[&add[..6], &["ftp://x"]].concat()).0, 2);
    assert!(!file.exists());
    // A directory that is not there is one that is not mounted.
    assert_eq!(refused(&first, &add).0, 11);
    assert!(!file.exists());
    std::fs::create_dir(&store).unwrap();
    let added = first.run(&add).unwrap();
    assert!(
        added.contains("cold") && added.contains(&address),
        "{added}"
    );

    let mut workload = workload(work.path());
    let pid = workload.pid().to_string();
    let dump = ["dump", "--pid", &pid, "--job", "cold"];
    first.run(&dump).unwrap();
    workload.wait_until_gone().unwrap();
    let fast = used(&first, 0);
    // The store is away: nothing is moved, and nothing is lost.
    let away = work.path().join("away");
    std::fs::rename(&store, &away).unwrap();
    let (code, message) = refused(&first, &["region", "cool", "cold"]);
    assert!(code == 11 && message.contains("away"), "{code} {message}");
    first.run(&["verify", "cold"]).unwrap();
    std::fs::rename(&away, &store).unwrap();
    let out = |node: &Daemon| {
        let listed = node.json(&["ls", "cold"]).unwrap();
        listed["checkpoints"][0]["cold"][0]["bytes"].as_u64()
    };
    assert_eq!(out(&first), None);
    first.run(&["region", "cool", "cold"]).unwrap();
    assert_eq!(out(&first), Some(used(&first, 1)));
    assert!(used(&first, 0) < fast / 4 && used(&first, 1) > fast / 2);
    // What stays on the node is a small part.
    use std::os::unix::fs::MetadataExt as _;
    let kept = std::fs::metadata(&file).unwrap().blocks() * 512;
    assert!(kept < used(&first, 1) / 4, "{kept}");
    first.kill().unwrap();

    // Away at the start: it is listed, and a restore says why it cannot be.
    std::fs::rename(&store, &away).unwrap();
    let second = Daemon::start(work.path(), &large).unwrap();
    assert!(second.run(&["ls", "cold"]).unwrap().contains("cold"));
    let (code, message) = refused(&second, &["restore", "cold"]);
    assert!(
        code == 11 && message.contains("cold tier, which is away"),
        "{code} {message}"
    );
    std::fs::rename(&away, &store).unwrap();
    second.run(&["restore", "cold"]).unwrap();
    assert!(workload.verify().unwrap().is_sound());
    assert_eq!(used(&second, 1), 0, "recalled");
    assert_eq!(out(&second), None);
}
