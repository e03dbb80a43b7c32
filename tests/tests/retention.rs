//! Retention: parked dumps and sessions that nobody uses are removed when their time is up, and not before.

mod common;

use std::time::Duration;

use common::*;
use permafrost_protocol::pageserver::Dialect;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process::wait_for;

const BASE: u64 = 0x7f00_0000_0000;

fn park(daemon: &Daemon) {
    let mut peer = Peer::anonymous(daemon, Dialect::V32);
    peer.open();
    peer.pages(BASE, &pages(1, 30));
    assert_eq!(peer.close(), Some(0));
    peer.leave();
}

#[test]
fn a_parked_dump_is_kept_for_its_time_and_then_discarded() {
    let work = tempfile::tempdir().unwrap();
    let extra = vec!["--park-ttl".to_owned(), "2s".to_owned()];
    let daemon = Daemon::start(
        work.path(),
        &Options {
            extra,
            ..Options::default()
        },
    )
    .unwrap();
    dump_and_adopt(&daemon, work.path(), "kept", BASE, &pages(7, 30));
    park(&daemon);
    let parked = listing(&daemon)
        .into_iter()
        .find(|c| c["kind"] == "parked")
        .expect("listed at once");
    assert!(
        parked["expires_unix_ms"].as_u64().unwrap() > parked["created_unix_ms"].as_u64().unwrap()
    );
    wait_for(
        "the end of the parked dump",
        Duration::from_secs(20),
        || Ok((listing(&daemon).len() == 1).then_some(())),
    )
    .unwrap();
    assert_eq!(listing(&daemon)[0]["job"], "kept");
}

#[test]
fn a_session_that_nobody_comes_for_lets_go_of_its_job() {
    let work = tempfile::tempdir().unwrap();
    let extra = vec!["--session-ttl".to_owned(), "1s".to_owned()];
    let daemon = Daemon::start(
        work.path(),
        &Options {
            extra,
            ..Options::default()
        },
    )
    .unwrap();
    daemon.json(&["open", "--job", "idle"]).unwrap();
    assert_eq!(
        daemon
            .try_run(&["open", "--job", "idle"])
            .unwrap()
            .status
            .code(),
        Some(4)
    );
    wait_for(
        "the end of the idle session",
        Duration::from_secs(20),
        || {
            Ok(daemon
                .try_run(&["open", "--job", "idle"])?
                .status
                .success()
                .then_some(()))
        },
    )
    .unwrap();
}

#[test]
fn a_session_discarded_in_mid_dump_hangs_up_and_frees_what_it_held() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let opened = daemon.json(&["open", "--job", "stopped"]).unwrap();
    let mut peer = Peer::tcp(opened["address"].as_str().unwrap(), Dialect::V32);
    peer.open();
    peer.pages(BASE, &pages(1, 600));
    let session = opened["session"].as_str().unwrap();
    let receiving = |state: &serde_json::Value| {
        state["sessions"][0]["received_bytes"].as_u64() == Some(600 * 4096)
    };
    wait_for("the pages", Duration::from_secs(20), || {
        Ok(receiving(&daemon.json(&["status"])?).then_some(()))
    })
    .unwrap();
    daemon.run(&["abort", session]).unwrap();
    assert_eq!(peer.close(), None, "the server has hung up");
    peer.leave();
    wait_for("the pages' segments", Duration::from_secs(20), || {
        let status = daemon.json(&["status"])?;
        let region = &status["regions"][0];
        Ok((region["free_bytes"] == region["capacity_bytes"]).then_some(()))
    })
    .unwrap();
    assert!(listing(&daemon).is_empty());
}
