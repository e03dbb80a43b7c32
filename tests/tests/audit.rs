//! The audit log of a running daemon: what users of its sockets did, after a rotation too.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use permafrost_protocol::pageserver::Dialect;
use permafrost_tests::daemon::{Daemon, Options};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use common::*;

fn lines(path: &Path, count: usize) -> Vec<Value> {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let lines: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        if lines.len() >= count || Instant::now() > until {
            return lines;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn requests_of_the_control_socket_are_recorded_with_user_and_outcome() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let path = work.path().join("data/audit.log");
    let opened = daemon.json(&["open", "--job", "team/train"]).unwrap();
    let session = opened["session"].as_str().unwrap();
    // Nothing is changed, and nothing recorded.
    daemon.json(&["ls"]).unwrap();
    assert!(
        !daemon
            .try_run(&["rm", "team/none@1"])
            .unwrap()
            .status
            .success()
    );
    let found = lines(&path, 2);
    let uid = rustix::process::geteuid().as_raw();
    for line in &found {
        assert_eq!(line["via"], "control", "{line}");
        assert_eq!(line["uid"], uid, "{line}");
        assert!(line["pid"].as_i64().unwrap() > 1, "{line}");
    }
    let told = |line: &Value| {
        ["action", "on", "outcome"].map(|field| line[field].as_str().unwrap().to_owned())
    };
    assert_eq!(told(&found[0]), ["open", "team/train", "done"]);
    assert_eq!(told(&found[1]), ["remove", "team/none@1", "not-found"]);
    assert_eq!(found.len(), 2, "{found:?}");

    // Pages that come to the port: whose connection it was.
    let mut peer = Peer::tcp(daemon.address(), Dialect::V32);
    peer.open();
    peer.pages(0x5000_0000, &pages(1, 1));
    assert_eq!(peer.close(), Some(0));
    peer.leave();
    let line = &lines(&path, 3)[2];
    assert_eq!(line["via"], "page-server", "{line}");
    assert_eq!(line["action"], "receive", "{line}");
    assert_eq!(line["uid"], uid, "{line}");

    // As logrotate does it.
    std::fs::rename(&path, path.with_extension("log.1")).unwrap();
    let pid = Pid::from_raw(daemon.pid().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    let found = lines(&path, 1);
    assert_eq!(told(&found[0]), ["reload", "", "done"]);
    daemon.run(&["abort", session]).unwrap();
    let found = lines(&path, 2);
    assert_eq!(told(&found[1]), ["abort", session, "done"]);

    // And nothing that is in memory gets into a core file.
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.pid())).unwrap();
    let core = limits
        .lines()
        .find(|line| line.starts_with("Max core file size"));
    let sizes: Vec<_> = core.unwrap().split_whitespace().skip(4).take(2).collect();
    assert_eq!(sizes, ["0", "0"]);
}
