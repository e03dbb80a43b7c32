//! Tests of pre-dumps and the dumps that follow: the conditions for leaving out clean pages.

use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};

use permafrost_protocol::manifest::Origin;

use crate::fake::{Victim, assert_exit, json, stderr};
use crate::for_dumps::{DUMPS, SEALS, for_dumps, names, opened, sealed};

/// Returns true if the user may use soft-dirty bits; otherwise checks that they are refused.
fn may_track() -> bool {
    if rustix::process::geteuid().is_root() {
        return true;
    }
    let (daemon, _pages) = for_dumps(None, sealed());
    daemon.criu("exit 0");
    let victim = Victim::start();
    let pid = victim.pid();
    assert_exit(
        &daemon.run(&["dump", "--pid", &pid, "--job", "train", "--pre-dump"]),
        9,
    );
    assert!(daemon.requests().is_empty());
    false
}

/// Takes a tracked dump of `pid` for a job that already has generation 7 of it. Returns true if it left clean
/// pages out.
fn next_is_incremental(pid: &str, origin: &Origin) -> bool {
    let (daemon, _pages) = for_dumps(Some((7, origin.clone())), sealed());
    daemon.criu(DUMPS);
    daemon.script("action", SEALS);
    let output = daemon.run(&[
        "--json",
        "dump",
        "--pid",
        pid,
        "--job",
        "train",
        "--leave-running",
    ]);
    assert_exit(&output, 0);
    json(&output.stdout)["clean_pages_left_out"] == true
}

#[test]
fn a_tracked_dump_of_a_part_or_of_a_larger_tree_outdates_the_last_one() {
    if !may_track() {
        return;
    }
    let mut shell = Command::new("sh")
        .args(["-c", "sleep 600 & echo $!; read line; kill $!"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = [0; 16];
    let len = shell.stdout.as_mut().unwrap().read(&mut line).unwrap();
    let child = std::str::from_utf8(&line[..len]).unwrap().trim().to_owned();
    let root = shell.id().to_string();
    let track = |pid: &str| {
        let (daemon, _pages) = for_dumps(None, sealed());
        daemon.criu("exit 0");
        assert_exit(
            &daemon.run(&["dump", "--pid", pid, "--job", "train", "--pre-dump"]),
            0,
        );
        opened(&daemon).origin.unwrap()
    };

    let of_root = track(&root);
    let of_child = track(&child);
    assert!(
        !next_is_incremental(&root, &of_root),
        "the child's bits were reset since"
    );
    assert!(next_is_incremental(&child, &of_child));

    track(&root);
    assert!(
        !next_is_incremental(&child, &of_child),
        "the whole tree's were"
    );
    track(&root);
    assert!(next_is_incremental(&root, &of_root));

    drop(shell.stdin.take());
    shell.wait().unwrap();
}

#[test]
fn pre_dump_seals_by_itself_and_the_next_dump_leaves_clean_pages_out() {
    if !may_track() {
        return;
    }
    let victim = Victim::start();
    let (daemon, _pages) = for_dumps(None, sealed());
    daemon.criu("exit 0");
    let output = daemon.run(&[
        "--json",
        "dump",
        "--pid",
        &victim.pid(),
        "--job",
        "train",
        "--pre-dump",
    ]);
    assert_exit(&output, 0);
    assert_eq!(names(&daemon), ["show", "open", "seal"]);
    assert!(
        daemon.requests()[2].1,
        "the seal carries the images directory"
    );
    let open = opened(&daemon);
    assert!(open.pre_dump && open.seal_follows && !open.parent_images);
    let origin = open.origin.unwrap();
    assert!(origin.tracked);
    let arguments = fs::read_to_string(daemon.path().join("criu-arguments")).unwrap();
    assert!(
        arguments.starts_with("check --feature mem_dirty_track\npre-dump "),
        "{arguments}"
    );
    assert!(arguments.contains("--track-mem") && !arguments.contains("--prev-images-dir"));

    // Generation 7 was the last to reset the bits.
    let (daemon, _pages) = for_dumps(Some((7, origin.clone())), sealed());
    daemon.criu(&format!(
        "test -e \"$images/../prev/inventory.img\" || exit 6\n{DUMPS}"
    ));
    daemon.script("action", SEALS);
    let pid = victim.pid();
    let dump = [
        "--json",
        "dump",
        "--pid",
        &pid,
        "--job",
        "train",
        "--leave-running",
    ];
    let output = daemon.run(&dump);
    assert_exit(&output, 0);
    assert_eq!(json(&output.stdout)["clean_pages_left_out"], true);
    assert_eq!(names(&daemon), ["show", "open", "export"]);
    assert!(opened(&daemon).parent_images);
    let arguments = fs::read_to_string(daemon.path().join("criu-arguments")).unwrap();
    assert!(
        arguments.contains("--track-mem --prev-images-dir ../prev"),
        "{arguments}"
    );

    // A tracked dump fails after it may have reset the bits: nothing may be left out any more.
    daemon.criu("exit 1");
    assert_exit(
        &daemon.run(&["dump", "--pid", &victim.pid(), "--job", "train"]),
        5,
    );
    daemon.criu(DUMPS);
    let output = daemon.run(&dump);
    assert_exit(&output, 0);
    assert_eq!(json(&output.stdout)["clean_pages_left_out"], false);
}

#[test]
fn pre_dump_is_refused_beforehand_without_soft_dirty_bits() {
    if !may_track() {
        return;
    }
    let (daemon, _pages) = for_dumps(None, sealed());
    daemon.criu("exit 0");
    let victim = Victim::start();
    let output = daemon
        .command(&[
            "dump",
            "--pid",
            &victim.pid(),
            "--job",
            "train",
            "--pre-dump",
        ])
        .env("NO_SOFT_DIRTY", "1")
        .output()
        .unwrap();
    assert_exit(&output, 5);
    assert!(
        stderr(&output).contains("CONFIG_MEM_SOFT_DIRTY"),
        "{}",
        stderr(&output)
    );
    assert!(daemon.requests().is_empty());
}
