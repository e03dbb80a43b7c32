//! Protection of the images, which contain a process's secrets: access to files and sockets.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;

use common::*;
use permafrost_tests::binaries;
use permafrost_tests::daemon::{Daemon, Options};

/// Id of the user "nobody" on every Linux.
const NOBODY: u32 = 65534;

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn files_directories_and_sockets_are_for_their_owner_only() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    daemon.json(&["open", "--job", "any"]).unwrap();
    let [data, run] = ["data", "run"].map(|name| work.path().join(name));
    for directory in [&data, &run, &run.join("sessions")] {
        assert_eq!(mode(directory), 0o700, "{}", directory.display());
    }
    assert_eq!(mode(&data.join("region")), 0o600);
    for socket in ["control.sock", "page-server.sock"] {
        assert_eq!(mode(&run.join(socket)), 0o600, "{socket}");
    }
    for endpoint in std::fs::read_dir(run.join("sessions")).unwrap() {
        assert_eq!(mode(&endpoint.unwrap().path()), 0o600);
    }
    assert!(
        daemon.address().starts_with("127.0.0.1:"),
        "{}",
        daemon.address()
    );
}

#[test]
fn another_user_is_refused_whatever_the_modes_say() {
    if !rustix::process::geteuid().is_root() {
        eprintln!(
            "SKIPPED: another_user_is_refused_whatever_the_modes_say: needs root to be another user"
        );
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let run = work.path().join("run");
    // As an operator might in a moment of weakness.
    for (path, mode) in [
        (work.path(), 0o755),
        (&run, 0o755),
        (&run.join("control.sock"), 0o666),
    ] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    // Where the other user can execute it.
    let command = work.path().join("permafrost");
    // By another process: were it open for writing here, a child that another test is just forking would keep it
    // so, and it could not be started.
    let copied = std::process::Command::new("cp")
        .arg(binaries::path("permafrost").unwrap())
        .arg(&command)
        .status();
    assert!(copied.unwrap().success());
    std::fs::set_permissions(&command, std::fs::Permissions::from_mode(0o755)).unwrap();
    let asked = std::process::Command::new(&command)
        .args([
            "--socket",
            run.join("control.sock").to_str().unwrap(),
            "status",
        ])
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .unwrap();
    assert!(
        !asked.status.success(),
        "{}",
        String::from_utf8_lossy(&asked.stdout)
    );
    assert!(asked.stdout.is_empty());
    // Its owner is served on.
    daemon.json(&["status"]).unwrap();
}

#[test]
fn no_port_is_opened_when_none_is_wanted() {
    let work = tempfile::tempdir().unwrap();
    let listen = "none".to_owned();
    let daemon = Daemon::start(
        work.path(),
        &Options {
            listen,
            ..Options::default()
        },
    )
    .unwrap();
    assert_eq!(daemon.json(&["status"]).unwrap()["address"], "");
    let opened = daemon.json(&["open", "--job", "quiet"]).unwrap();
    assert_eq!(opened["address"], "");
    let dialect = permafrost_protocol::pageserver::Dialect::V32;
    let mut peer = Peer::unix(opened["socket"].as_str().unwrap().as_ref(), dialect);
    peer.open();
    peer.pages(0x1000, &pages(1, 3));
    assert_eq!(peer.close(), Some(0));
}
