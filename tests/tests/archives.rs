//! Checkpoints of containers as archives: stored as deltas, and given back as what podman takes.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::podman::Podman;
use permafrost_tests::{criu, podman};

/// Time limit for actions that take moments on an idle machine.
const LIMIT: Duration = Duration::from_secs(30);

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn wait_for_count(podman: &Podman, container: &str, above: u64) {
    let until = Instant::now() + LIMIT;
    while podman.count(container).is_ok_and(|count| count <= above)
        || podman.count(container).is_err()
    {
        assert!(Instant::now() < until, "{container} does not count");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn export(podman: &Podman, container: &str, compression: &str, archive: &Path) {
    let compress = format!("--compress={compression}");
    let arguments = [
        "container",
        "checkpoint",
        &compress,
        "--export",
        text(archive),
        container,
    ];
    podman.run(&arguments).unwrap();
    podman.run(&["rm", container]).unwrap();
}

fn import(podman: &Podman, archive: &Path, container: &str) {
    let arguments = [
        "container",
        "restore",
        "--import",
        text(archive),
        "--name",
        container,
    ];
    podman.run(&arguments).unwrap();
}

/// Returns the members of an archive as `tar` lists them, each with its mode, owner, size and time, and its contents.
fn members(archive: &Path, scratch: &Path) -> BTreeMap<String, Vec<u8>> {
    std::fs::create_dir(scratch).unwrap();
    let tar = |arguments: &[&str]| {
        // It finds out the compression by itself.
        let output = Command::new("tar")
            .arg("-f")
            .arg(archive)
            .args(arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    tar(&["-x", "-C", text(scratch)]);
    let lines = tar(&["-tv", "--full-time", "--numeric-owner"]);
    let member = |line: &str| {
        let path = scratch.join(line.split_whitespace().last().unwrap());
        (line.to_owned(), std::fs::read(path).unwrap_or_default())
    };
    lines.lines().map(member).collect()
}

#[test]
fn podman_restores_what_it_exported_from_an_archive_that_was_stored() {
    let test = "podman_restores_what_it_exported_from_an_archive_that_was_stored";
    let Some(criu) = criu::for_test(test).filter(|_| podman::for_test(test)) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(dir.path(), &Options::default()).unwrap();
    let podman = Podman::new(&criu).unwrap();
    podman.start_counting("one").unwrap();
    wait_for_count(&podman, "one", 1);

    // podman's default, whatever the name says.
    let first = dir.path().join("first.tar.gz");
    export(&podman, "one", "zstd", &first);
    let stored = daemon
        .json(&["put", "pod", "--archive", text(&first)])
        .unwrap();
    let back = dir.path().join("back.tar.zst");
    let got = daemon
        .json(&["get", "pod", "--archive", text(&back)])
        .unwrap();
    assert_eq!(got["checkpoint"]["generation"], 1);
    let [before, after] = [(&first, "before"), (&back, "after")]
        .map(|(archive, name)| members(archive, &dir.path().join(name)));
    assert!(
        before.keys().any(|line| line.ends_with(" rootfs-diff.tar")),
        "{:?}",
        before.keys()
    );
    assert!(before == after, "{:?}\n{:?}", before.keys(), after.keys());

    // The container goes on with its count, from the archive that the store has given back.
    import(&podman, &back, "two");
    let resumed = podman.count("two").unwrap();
    assert!(resumed > 1, "it began anew");
    wait_for_count(&podman, "two", resumed);

    // Its next checkpoint is a delta, and comes through a pipe, as the same bytes.
    let second = dir.path().join("second.tar");
    export(&podman, "two", "none", &second);
    let tar = std::fs::File::open(&second).unwrap();
    let put = daemon
        .command()
        .unwrap()
        .args(["--json", "put", "pod", "--archive", "-"])
        .stdin(tar)
        .output()
        .unwrap();
    assert!(
        put.status.success(),
        "{}",
        String::from_utf8_lossy(&put.stderr)
    );
    let delta: serde_json::Value = serde_json::from_slice(&put.stdout).unwrap();
    assert_eq!(delta["parent_generation"], 1, "{delta}");
    assert_eq!(stored["kind"], "full");
    let out = daemon
        .command()
        .unwrap()
        .args(["get", "pod@2", "--archive", "-"])
        .stderr(Stdio::null())
        .output()
        .unwrap();
    assert!(out.stdout == std::fs::read(&second).unwrap());

    // Nothing is replaced unasked, and a checkpoint of processes is no archive.
    assert_eq!(
        daemon
            .try_run(&["get", "pod", "--archive", text(&back)])
            .unwrap()
            .status
            .code(),
        Some(4)
    );
    daemon
        .run(&["get", "pod@2", "--force", "--archive", text(&back)])
        .unwrap();
    import(&podman, &back, "three");
    wait_for_count(&podman, "three", podman.count("three").unwrap());
    let directory = dir.path().join("after/checkpoint");
    daemon.run(&["put", "processes", text(&directory)]).unwrap();
    let refused = daemon
        .try_run(&[
            "get",
            "processes",
            "--archive",
            text(&dir.path().join("x.tar")),
        ])
        .unwrap();
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
}
