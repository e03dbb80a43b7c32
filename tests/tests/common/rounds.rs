//! Rounds of a pre-copy, made as `permafrost dump --pre-copy` makes them, with pages of the test's own.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::Duration;

use permafrost_protocol::control::request;
use permafrost_protocol::pageserver::Dialect;
use permafrost_tests::daemon::Daemon;
use permafrost_tests::process::wait_for;
use permafrost_transport::control::Connection;

use super::{Peer, fake_images, listing, pages};

/// Time limit for what takes moments on an idle machine.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Address of the first page.
pub const BASE: u64 = 0x5000_0000;

/// Pages of the process.
pub const PAGES: usize = 64;

/// Opens a round, or the dump that follows the rounds. Returns the session and whether it has a parent.
pub fn open(connection: &mut Connection, pre_copy: bool) -> (String, Peer, bool) {
    let opened = connection
        .call(request::Open {
            job: "train".to_owned(),
            pre_dump: pre_copy,
            pre_copy,
            seal_follows: true,
            bound_to_connection: true,
            parent_images: true,
            ..request::Open::default()
        })
        .unwrap();
    let mut peer = Peer::unix(Path::new(&opened.socket), Dialect::V32);
    let has_parent = peer.open();
    (opened.session, peer, has_parent)
}

/// Seals a round, or the dump that follows. Returns its name and kind.
pub fn seal(connection: &mut Connection, work: &Path, session: String, mut peer: Peer) -> String {
    assert_eq!(peer.close(), Some(0));
    peer.leave();
    let images = work.join("images");
    fake_images(&images);
    let images = File::open(images).unwrap();
    let sealed = connection
        .call_with(request::Seal { session }, Some(images.as_fd()), &mut |_| {})
        .unwrap();
    format!("{}@{} {}", sealed.job, sealed.generation, sealed.kind)
}

/// Makes a round of whole pages over a connection of its own.
pub fn first_round(daemon: &Daemon, work: &Path) -> Connection {
    let mut connection = Connection::connect(&daemon.control()).unwrap();
    let (session, mut peer, _) = open(&mut connection, true);
    peer.pages(BASE, &pages(1, PAGES));
    let sealed = seal(&mut connection, work, session, peer);
    assert_eq!(sealed, "train@1 pre-copy");
    connection
}

/// Returns the generations that are listed, with their kinds.
pub fn kinds(daemon: &Daemon) -> Vec<(u64, String)> {
    listing(daemon)
        .iter()
        .map(|one| {
            let kind = one["kind"].as_str().unwrap().to_owned();
            (one["generation"].as_u64().unwrap(), kind)
        })
        .collect()
}

/// Waits until these generations are left.
pub fn wait_until_left(daemon: &Daemon, left: &[(u64, &str)]) {
    let left: Vec<(u64, String)> = left
        .iter()
        .map(|(generation, kind)| (*generation, (*kind).to_owned()))
        .collect();
    wait_for("the removal of rounds", LIMIT, || {
        Ok((kinds(daemon) == left).then_some(()))
    })
    .unwrap();
}
