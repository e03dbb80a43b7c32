//! Rounds of a pre-copy: how long they last, what refers to them, and a kernel on which there are none.

mod common;

use permafrost_protocol::control::request;
use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process::wait_for;
use permafrost_tests::workload::{self, Workload};
use permafrost_transport::control::Connection;

use common::rounds::*;
use common::*;

#[test]
fn the_dump_holds_what_its_rounds_brought_and_they_are_gone() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let first = first_round(&daemon, work.path());
    assert_eq!(kinds(&daemon), [(1, "pre-copy".to_owned())]);
    // Nobody restores it.
    let refused = daemon.try_run(&["restore", "train"]).unwrap();
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");

    // The second round sends four modified pages, and leaves the others to the first.
    let mut second = Connection::connect(&daemon.control()).unwrap();
    let (session, mut peer, has_parent) = open(&mut second, true);
    assert!(has_parent);
    peer.pages(BASE, &pages(2, 4));
    peer.hole(
        BASE + 4 * PAGE_SIZE as u64,
        u32::try_from(PAGES - 4).unwrap(),
    );
    let sealed = seal(&mut second, work.path(), session, peer);
    assert_eq!(sealed, "train@2 pre-copy");
    drop(first);
    wait_until_left(&daemon, &[(2, "pre-copy")]);

    // The dump sends one.
    let mut last = Connection::connect(&daemon.control()).unwrap();
    let (session, mut peer, has_parent) = open(&mut last, false);
    assert!(has_parent);
    peer.pages(BASE, &pages(3, 1));
    peer.hole(BASE + PAGE_SIZE as u64, u32::try_from(PAGES - 1).unwrap());
    let sealed = seal(&mut last, work.path(), session, peer);
    assert_eq!(sealed, "train@3 full");
    // As the command does it, over the round's own connection.
    let remove = request::Remove {
        checkpoint: "train@2".to_owned(),
        ..request::Remove::default()
    };
    assert_eq!(second.call(remove).unwrap().count, 1);
    assert_eq!(kinds(&daemon), [(3, "full".to_owned())]);
    drop((second, last));

    let mut expected = pages(1, PAGES);
    expected[..4 * PAGE_SIZE].copy_from_slice(&pages(2, 4));
    expected[..PAGE_SIZE].copy_from_slice(&pages(3, 1));
    assert!(exported_pages(&daemon, work.path(), "train") == expected);
    let verified = daemon.json(&["verify"]).unwrap();
    assert_eq!(
        verified["damage"].as_array().map(Vec::len),
        Some(0),
        "{verified}"
    );
}

#[test]
fn a_client_that_ends_leaves_neither_a_round_nor_a_half_one() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    // Ended after a round, in the middle of the next one, and in the middle of the dump.
    for (at, unfinished) in [None, Some(true), Some(false)].into_iter().enumerate() {
        let mut connection = Connection::connect(&daemon.control()).unwrap();
        let (session, mut peer, _) = open(&mut connection, true);
        peer.pages(BASE, &pages(1, PAGES));
        seal(&mut connection, work.path(), session, peer);
        assert_eq!(kinds(&daemon).len(), 1, "{at}");
        let next = unfinished.map(|pre_copy| {
            let mut next = Connection::connect(&daemon.control()).unwrap();
            let (_, mut peer, _) = open(&mut next, pre_copy);
            peer.pages(BASE, &pages(2, 4));
            (next, peer)
        });
        drop((connection, next));
        wait_until_left(&daemon, &[]);
        wait_for("the end of the sessions", LIMIT, || {
            let status = daemon.json(&["status"])?;
            let sessions = status["sessions"].as_array().map_or(0, |sessions| {
                let open = sessions.iter().filter(|one| one["state"] != "failed");
                open.count()
            });
            Ok((sessions == 0).then_some(()))
        })
        .unwrap();
    }
}

#[test]
fn rounds_of_a_killed_daemon_are_removed_by_the_next() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let first = first_round(&daemon, work.path());
    let mut second = Connection::connect(&daemon.control()).unwrap();
    let (_, mut peer, _) = open(&mut second, true);
    peer.pages(BASE, &pages(2, 4));
    daemon.kill().unwrap();
    drop((first, second));

    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    wait_until_left(&daemon, &[]);
}

#[test]
fn a_dump_with_pre_copy_is_taken_on_every_kernel() {
    let Some(criu) = criu::for_test("a_dump_with_pre_copy_is_taken_on_every_kernel") else {
        return;
    };
    let has_soft_dirty = std::process::Command::new(&criu.path)
        .args(["check", "--feature", "mem_dirty_track"])
        .output()
        .unwrap()
        .status
        .success();
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let mut workload = Workload::start(work.path(), &workload::Options::tree(8)).unwrap();
    let pid = workload.pid().to_string();
    let logs = work.path().join("logs");
    let dumped = daemon
        .json(&[
            "dump",
            "--pid",
            &pid,
            "--job",
            "train",
            "--pre-copy",
            "--work-dir",
            logs.to_str().unwrap(),
        ])
        .unwrap();
    let rounds = dumped["pre_copy"]["rounds"].as_array().unwrap();
    assert_eq!(rounds.is_empty(), !has_soft_dirty, "{dumped}");
    if !has_soft_dirty {
        let why = dumped["pre_copy"]["not_done"].as_str().unwrap();
        assert!(why.contains("CONFIG_MEM_SOFT_DIRTY"), "{dumped}");
        // A pre-dump on such a kernel ends in CRIU's abort.
        assert!(!logs.join("pre-dump.log").exists() && !logs.join("round-1").exists());
    }
    workload.wait_until_gone().unwrap();
    wait_for("the removal of rounds", LIMIT, || {
        Ok((listing(&daemon).len() == 1).then_some(()))
    })
    .unwrap();
    daemon.run(&["restore", "train"]).unwrap();
    assert!(workload.verify().unwrap().is_sound());
}
