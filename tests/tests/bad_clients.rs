//! Hostile and broken page-server clients: the server answers or hangs up, loses nothing, and serves the next
//! client.

mod common;

use std::io::Write as _;
use std::net::TcpStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use common::*;
use permafrost_protocol::pageserver::client::Encoder;
use permafrost_protocol::pageserver::{Dialect, PE_PRESENT, SpaceId};
use permafrost_tests::daemon::{Daemon, Options};

const BASE: u64 = 0x7f00_0000_0000;

struct Scene {
    daemon: Daemon,
    work: tempfile::TempDir,
    kept: Vec<u8>,
}

impl Scene {
    fn new(region_mib: u64) -> Self {
        let work = tempfile::tempdir().unwrap();
        let daemon = Daemon::start(
            work.path(),
            &Options {
                region_mib,
                ..Options::default()
            },
        )
        .unwrap();
        let kept = pages(7, 300);
        dump_and_adopt(&daemon, work.path(), "kept", BASE, &kept);
        Self { daemon, work, kept }
    }

    /// Checks that the checkpoint stored before is intact, that none was added, and that a new dump works.
    fn assert_unharmed(&mut self, after: &str) {
        assert!(self.daemon.is_running(), "{after}: permafrostd died");
        let names: Vec<_> = listing(&self.daemon)
            .iter()
            .map(|c| c["job"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(names, ["kept"], "{after}");
        assert_eq!(
            exported_pages(&self.daemon, self.work.path(), "kept"),
            self.kept,
            "{after}"
        );
        dump_and_adopt(&self.daemon, self.work.path(), "next", BASE, &pages(9, 10));
        self.daemon.run(&["rm", "next", "--all"]).unwrap();
    }
}

#[test]
fn a_client_that_breaks_the_protocol_harms_nobody() {
    let mut scene = Scene::new(64);
    for dialect in [Dialect::V24, Dialect::V32] {
        let encoder = Encoder::new(dialect);
        let space = SpaceId::process(PID);
        let opened = encoder.open(space).as_ref().to_vec();
        let with = |frame: &[u8]| [opened.as_slice(), frame].concat();
        let unknown = {
            let mut frame = encoder.close().as_ref().to_vec();
            frame[..4].copy_from_slice(&0x77_u32.to_le_bytes());
            frame
        };
        let unknown_type = {
            let mut frame = opened.clone();
            // The type is the lowest byte of dst_id, which ends the frame.
            let at = frame.len() - 8;
            frame[at] = 0x63;
            frame
        };
        let bad: Vec<(&str, Vec<u8>)> = vec![
            ("an unknown type of address space", unknown_type),
            ("garbage", vec![0xA5; 4096]),
            ("zeros", vec![0; 4096]),
            (
                "a truncated first frame",
                opened[..opened.len() - 1].to_vec(),
            ),
            ("an unknown command", with(&unknown)),
            (
                "ADD_F before OPEN",
                encoder.pages(space, BASE, 1, PE_PRESENT).as_ref().to_vec(),
            ),
            (
                "huge nr_pages",
                with(encoder.pages(space, BASE, u32::MAX, PE_PRESENT).as_ref()),
            ),
            (
                "an unaligned address",
                with(encoder.pages(space, BASE + 1, 1, PE_PRESENT).as_ref()),
            ),
            (
                "an address beyond user space",
                with(encoder.pages(space, !0xfff, 1, PE_PRESENT).as_ref()),
            ),
            (
                "no pages",
                with(encoder.pages(space, BASE, 0, PE_PRESENT).as_ref()),
            ),
            (
                "a space opened twice",
                [opened.clone(), opened.clone()].concat(),
            ),
            (
                "compressed pages",
                with(&{
                    let mut frame = encoder.pages(space, BASE, 1, PE_PRESENT).as_ref().to_vec();
                    frame[0] = 8;
                    frame
                }),
            ),
            (
                "a request for lazy pages",
                with(encoder.get(PID, BASE, 1).as_ref()),
            ),
        ];
        for (what, bytes) in bad {
            let mut peer = Peer::anonymous(&scene.daemon, dialect);
            peer.send(&bytes);
            peer.leave();
            scene.assert_unharmed(what);
        }
    }
}

#[test]
fn a_dump_cut_off_anywhere_is_discarded() {
    let mut scene = Scene::new(64);
    for dialect in [Dialect::V24, Dialect::V32] {
        let encoder = Encoder::new(dialect);
        let space = SpaceId::process(PID);
        let mut whole = encoder.open(space).as_ref().to_vec();
        let mut boundaries = vec![whole.len()];
        for frame in 0..3_u64 {
            let vaddr = BASE + frame * 0x10_0000;
            whole.extend_from_slice(encoder.pages(space, vaddr, 4, PE_PRESENT).as_ref());
            boundaries.push(whole.len());
            whole.extend_from_slice(&pages(3, 4));
            boundaries.push(whole.len());
        }
        whole.extend_from_slice(encoder.close().as_ref());
        boundaries.push(whole.len());
        // At each boundary, one byte beside it, and in the middle of a page. The whole is a dump.
        let around = boundaries
            .iter()
            .flat_map(|&at| [at - 1, at, at + 1, at + 2000]);
        for cut in around.filter(|&at| at < whole.len()) {
            let mut peer = Peer::anonymous(&scene.daemon, dialect);
            peer.send(&whole[..cut]);
            peer.leave();
            let parked = listing(&scene.daemon)
                .into_iter()
                .filter(|c| c["generation"] == 0);
            assert_eq!(parked.count(), 0, "cut after {cut} bytes");
        }
    }
    scene.assert_unharmed("cut-off dumps");
}

#[test]
fn a_client_that_never_reads_its_answers_holds_up_nobody() {
    let mut scene = Scene::new(64);
    let mut deaf = Peer::anonymous(&scene.daemon, Dialect::V32);
    let question = deaf.encoder().query_parent(deaf.space).as_ref().to_vec();
    // More answers than a socket's buffers hold, if the server lets us get that far.
    deaf.send_until_stuck(&question.repeat(1000), 20_000);
    scene.assert_unharmed("a client that does not read");
    drop(deaf);
    scene.assert_unharmed("a client that did not read");
}

#[test]
fn addresses_that_overlap_or_descend_are_answered_at_close() {
    let mut scene = Scene::new(64);
    for dialect in [Dialect::V24, Dialect::V32] {
        for second in [BASE, BASE + 3 * 4096, BASE - 16 * 4096] {
            let mut peer = Peer::anonymous(&scene.daemon, dialect);
            peer.open();
            peer.pages(BASE, &pages(1, 4));
            peer.pages(second, &pages(2, 4));
            let status = peer.close().expect("an answer");
            assert_ne!(status, 0, "second range at {second:#x}");
            peer.leave();
            scene.assert_unharmed("overlapping or descending addresses");
        }
    }
}

#[test]
fn a_hole_that_no_parent_fills_is_answered_at_close() {
    let mut scene = Scene::new(64);
    let mut peer = Peer::anonymous(&scene.daemon, Dialect::V32);
    assert!(!peer.open(), "an anonymous dump has no parent");
    peer.hole(BASE, 1);
    peer.pages(BASE + 0x10_0000, &pages(1, 4));
    assert_ne!(peer.close().expect("an answer"), 0);
    peer.leave();

    // With a parent that has some of the pages, but not all.
    let opened = scene
        .daemon
        .json(&["open", "--job", "kept", "--prev-images"])
        .unwrap();
    let mut peer = Peer::tcp(opened["address"].as_str().unwrap(), Dialect::V32);
    assert!(peer.open(), "the job's newest checkpoint has the process");
    peer.hole(BASE + 290 * 4096, 20);
    assert_ne!(peer.close().expect("an answer"), 0);
    peer.leave();
    scene.assert_unharmed("holes without a parent");
}

#[test]
fn a_full_region_is_answered_at_close() {
    let mut scene = Scene::new(64);
    let mut peer = Peer::anonymous(&scene.daemon, Dialect::V32);
    peer.open();
    for chunk in 0..80_u64 {
        peer.pages(
            BASE + chunk * 0x10_0000,
            &pages(u8::try_from(chunk).unwrap() + 1, 256),
        );
    }
    assert_eq!(peer.close(), Some(28), "ENOSPC");
    peer.leave();
    scene.assert_unharmed("a full region");
}

#[test]
fn a_client_that_falls_silent_holds_up_nobody_and_is_given_up() {
    let work = tempfile::tempdir().unwrap();
    let extra = vec!["--idle-timeout".to_owned(), "1s".to_owned()];
    let daemon = Daemon::start(
        work.path(),
        &Options {
            extra,
            ..Options::default()
        },
    )
    .unwrap();
    let mut silent = Peer::anonymous(&daemon, Dialect::V32);
    silent.open();
    let header = silent.encoder().pages(silent.space, BASE, 100, PE_PRESENT);
    silent.send(header.as_ref());
    silent.send(&pages(1, 3));
    dump_and_adopt(&daemon, work.path(), "other", BASE, &pages(9, 10));
    // Returns when the server has hung up.
    silent.close();
    let listed = listing(&daemon);
    assert_eq!(listed.len(), 1, "only the other: {listed:?}");
}

#[test]
fn a_job_has_one_dump_at_a_time() {
    let mut scene = Scene::new(64);
    let opened = scene.daemon.json(&["open", "--job", "kept"]).unwrap();
    let refused = scene.daemon.try_run(&["open", "--job", "kept"]).unwrap();
    assert_eq!(refused.status.code(), Some(4), "conflict");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("kept"), "{said}");
    scene
        .daemon
        .run(&["abort", opened["session"].as_str().unwrap()])
        .unwrap();
    scene.assert_unharmed("two dumps of a job");
}

/// Id of a user that no test runs as.
const NOBODY: u32 = 65534;

/// Returns the bytes that the server sends in reply to an OPEN frame of a user's connection.
fn answered_to(user: u32, address: &str) -> String {
    let (host, port) = address.rsplit_once(':').unwrap();
    let script = format!("exec 3<>/dev/tcp/{host}/{port}; cat >&3; head -c 1 <&3 | wc -c");
    let mut client = Command::new("bash")
        .args(["-c", &script])
        .uid(user)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let open = Encoder::new(Dialect::V32).open(SpaceId::process(PID));
    // Whoever is refused may be gone already.
    let _ = client.stdin.take().unwrap().write_all(open.as_ref());
    let answer = client.wait_with_output().unwrap();
    String::from_utf8_lossy(&answer.stdout).trim().to_owned()
}

#[test]
fn other_users_of_the_machine_store_nothing_unless_they_are_admitted() {
    if !rustix::process::geteuid().is_root() {
        return; // Only root can be somebody else.
    }
    let scene = Scene::new(64);
    assert_eq!(answered_to(NOBODY, scene.daemon.address()), "0");
    assert_eq!(answered_to(0, scene.daemon.address()), "1");
    let opened = scene.daemon.json(&["open", "--job", "other"]).unwrap();
    let port_of_session = opened["address"].as_str().unwrap();
    assert_eq!(answered_to(NOBODY, port_of_session), "0");

    let work = tempfile::tempdir().unwrap();
    let options = Options {
        region_mib: 64,
        extra: vec![format!("--listen-uid={NOBODY}")],
        ..Options::default()
    };
    let daemon = Daemon::start(work.path(), &options).unwrap();
    assert_eq!(answered_to(NOBODY, daemon.address()), "1");
}

#[test]
fn a_dump_without_pages_parks_nothing() {
    let mut scene = Scene::new(64);
    for dialect in [Dialect::V24, Dialect::V32] {
        for opens in [false, true] {
            let mut peer = Peer::anonymous(&scene.daemon, dialect);
            if opens {
                peer.open();
            }
            assert_eq!(peer.close(), Some(0));
            peer.leave();
        }
    }
    scene.assert_unharmed("empty dumps");
    let status = scene.daemon.json(&["status"]).unwrap();
    assert_eq!(
        status["sessions"].as_array().map_or(0, Vec::len),
        0,
        "{status}"
    );
}

#[test]
fn silent_connections_keep_nobody_from_a_session() {
    let scene = Scene::new(64);
    let silent: Vec<_> = (0..300)
        .map(|_| TcpStream::connect(scene.daemon.address()).unwrap())
        .collect();
    let opened = scene.daemon.json(&["open", "--job", "next"]).unwrap();
    let path = opened["socket"].as_str().unwrap();
    let mut peer = Peer::unix(path.as_ref(), Dialect::V32);
    peer.open();
    peer.pages(BASE, &pages(9, 10));
    assert_eq!(peer.close(), Some(0));
    peer.leave();
    assert_eq!(listing(&scene.daemon).len(), 2);
    drop(silent);
}

#[test]
fn dumps_that_nobody_names_leave_room_for_others() {
    let work = tempfile::tempdir().unwrap();
    let options = Options {
        region_mib: 64,
        extra: vec!["--park-quota=16M".to_owned()],
        ..Options::default()
    };
    let daemon = Daemon::start(work.path(), &options).unwrap();
    let anonymous = |mib: u64| {
        let mut peer = Peer::anonymous(&daemon, Dialect::V32);
        peer.open();
        for chunk in 0..mib {
            peer.pages(BASE + chunk * 0x10_0000, &pages(7, 256));
        }
        let status = peer.close();
        peer.leave();
        status
    };
    assert_eq!(anonymous(10), Some(0));
    assert_eq!(anonymous(10), Some(28), "ENOSPC");
    assert_eq!(listing(&daemon).len(), 1);
    // A dump that says what it is has all the room that is left.
    let opened = daemon.json(&["open", "--job", "named"]).unwrap();
    let mut peer = Peer::tcp(opened["address"].as_str().unwrap(), Dialect::V32);
    peer.open();
    for chunk in 0..20_u64 {
        peer.pages(BASE + chunk * 0x10_0000, &pages(7, 256));
    }
    assert_eq!(peer.close(), Some(0));
    peer.leave();
}
