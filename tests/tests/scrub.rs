//! `permafrost scrub`, and the daemon's own scrub, over a region in which a bit has flipped.

mod common;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use common::*;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process::wait_for;

const BASE: u64 = 0x7f00_0000_0000;

fn with_period(period: &str) -> Options {
    Options {
        extra: vec!["--scrub-period".to_owned(), period.to_owned()],
        ..Options::default()
    }
}

/// Flips a bit in the page of that number, or flips it back.
fn flip(work: &Path, number: usize) {
    let mut page = pages(7, number + 1)[number * PAGE_SIZE..].to_vec();
    page.truncate(1024);
    let path = work.join("data/region");
    let region = std::fs::read(&path).unwrap();
    let stored = region
        .chunks_exact(PAGE_SIZE)
        .position(|chunk| chunk.starts_with(&page));
    let at = stored.expect("the page in the region") * PAGE_SIZE + 2000;
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(&[region[at] ^ 1], at as u64).unwrap();
}

fn damaged(daemon: &Daemon) -> Vec<String> {
    let listed = listing(daemon);
    let damaged = listed.iter().map(|line| line["damaged"].as_str().unwrap());
    damaged
        .filter(|damaged| !damaged.is_empty())
        .map(str::to_owned)
        .collect()
}

#[test]
fn damage_is_told_set_aside_and_lifted_on_request() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &with_period("off")).unwrap();
    dump_and_adopt(&daemon, work.path(), "job", BASE, &pages(7, 200));
    let whole = daemon.json(&["scrub"]).unwrap();
    assert_eq!(whole["checkpoints"], 1, "{whole}");
    assert_eq!(whole["damaged"].as_array().unwrap().len(), 0, "{whole}");
    assert!(
        daemon
            .run(&["scrub", "job@1"])
            .unwrap()
            .contains("every checksum matches")
    );
    assert_eq!(
        daemon.try_run(&["scrub", "job@2"]).unwrap().status.code(),
        Some(3)
    );

    flip(work.path(), 123);
    // Reading it is not looking after it.
    assert_eq!(daemon.try_run(&["verify"]).unwrap().status.code(), Some(7));
    assert!(damaged(&daemon).is_empty());

    let address = format!("{:#x}", BASE + 123 * PAGE_SIZE as u64);
    let refused = daemon.try_run(&["--json", "scrub", "job"]).unwrap();
    assert_eq!(refused.status.code(), Some(7));
    let found: serde_json::Value = serde_json::from_slice(&refused.stdout).unwrap();
    assert_eq!(found["damaged"][0]["checkpoint"], "job@1", "{found}");
    assert_eq!(found["damaged"][0]["mended"], false, "{found}");
    let place = found["damaged"][0]["damage"][0].as_str().unwrap();
    assert!(place.contains(&address), "{found}");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        said.contains("1 checkpoint is damaged and not mended"),
        "{said}"
    );
    let said = daemon.try_run(&["scrub"]).unwrap();
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(
        said.contains("job@1 is damaged, not mended: no other node"),
        "{said}"
    );
    assert!(said.contains(&address), "{said}");

    // Shown wherever it is asked about.
    assert_eq!(damaged(&daemon).len(), 1);
    assert!(daemon.run(&["ls"]).unwrap().contains("damaged"));
    assert!(daemon.run(&["show", "job"]).unwrap().contains(&address));
    let status = daemon.json(&["status"]).unwrap();
    assert_eq!(status["scrub"]["quarantined"], 1, "{status}");
    assert!(
        daemon
            .run(&["status"])
            .unwrap()
            .contains("1 checkpoint is damaged")
    );
    // A restore says so before it begins; another dump is whole by itself.
    for arguments in [&["get", "job", "out"][..], &["restore", "job"]] {
        let refused = daemon
            .command()
            .unwrap()
            .current_dir(work.path())
            .args(arguments)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(7), "{arguments:?}: {said}");
        assert!(
            said.contains("job@1 is damaged") && said.contains(&address),
            "{said}"
        );
    }
    let adopted = dump_and_adopt(&daemon, work.path(), "job", BASE, &pages(7, 200));
    drop(adopted);
    let listed = listing(&daemon);
    let parents: Vec<_> = listed
        .iter()
        .map(|line| line["parent_generation"].as_u64())
        .collect();
    assert_eq!(parents, [Some(0), Some(0)], "{listed:?}");

    flip(work.path(), 123);
    daemon.run(&["scrub"]).unwrap();
    assert!(damaged(&daemon).is_empty());
}

#[test]
fn a_daemon_finds_it_by_itself_and_again_after_a_restart() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &with_period("1s")).unwrap();
    dump_and_adopt(&daemon, work.path(), "job", BASE, &pages(7, 200));
    assert!(damaged(&daemon).is_empty());
    flip(work.path(), 50);
    let found = |daemon: &Daemon| {
        wait_for("the damage", Duration::from_secs(60), || {
            Ok((!damaged(daemon).is_empty()).then_some(()))
        })
    };
    found(&daemon).unwrap();
    let log = std::fs::read_to_string(daemon.log()).unwrap();
    assert!(log.contains("job@1") && log.contains("damaged"), "{log}");
    assert!(daemon.stop().unwrap().success());
    assert!(work.path().join("data/scrub.json").exists());
    let daemon = Daemon::start(work.path(), &with_period("1s")).unwrap();
    found(&daemon).unwrap();
    drop(daemon);
    // A file that says nothing costs nothing.
    std::fs::write(work.path().join("data/scrub.json"), b"rubbish").unwrap();
    let daemon = Daemon::start(work.path(), &with_period("1s")).unwrap();
    found(&daemon).unwrap();
}
