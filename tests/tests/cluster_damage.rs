//! Nodes whose medium fails, and copies that are damaged on a node without room for a fresh one: the last good copy
//! goes nowhere, and comes back elsewhere.

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use permafrost_protocol::control::request;
use permafrost_protocol::pageserver::Dialect;
use permafrost_tests::cluster::{Cluster, Setup, name};
use permafrost_tests::daemon::Daemon;
use permafrost_tests::process;
use permafrost_transport::control::Connection;

use common::clustered::*;
use common::{PAGE_SIZE, Peer, exported_pages, pages};

/// The job whose copies are damaged.
const JOB: &str = "days";
const MIB: usize = 1 << 20;
/// Size of the job's memory, bytes.
const SIZE: usize = 20 * MIB;
/// Index of the first page of the memory that [`sealed_dump`] sends.
const FIRST_PAGE: u64 = 0x5000_0000 / PAGE_SIZE as u64;
/// Number of the node that is drained.
const GOOD: usize = 0;
/// Number of the node whose medium fails, and which comes back with an empty one.
const THIRD: usize = 1;
/// Number of the node whose copy is damaged.
const BAD: usize = 2;
/// Time limit of a drain: a drain that cannot go on ends after 15 s; the rest allows for a busy machine.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);

#[test]
fn the_last_good_copy_outlives_failed_media_damage_and_full_nodes() {
    const TEST: &str = "the_last_good_copy_outlives_failed_media_damage_and_full_nodes";
    let setup = Setup {
        members: 1,
        region_mib: 64,
        extra: [
            "--repair-grace=2s",
            "--lease=2s",
            "--scrub-period=off",
            "--listen-metrics=127.0.0.1:0",
        ]
        .map(str::to_owned)
        .to_vec(),
        ..Setup::default()
    };
    let Some(mut cluster) = Cluster::for_test(TEST, setup).unwrap() else {
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let memory = pages(7, SIZE / PAGE_SIZE);
    a_node_whose_medium_fails_takes_itself_out(&cluster);
    let sealed = sealed_dump(cluster.node(GOOD), work.path(), JOB, &memory, || {});
    assert_eq!(sealed.nodes, [name(GOOD), name(BAD)], "{sealed:?}");
    // The node that failed was not even asked.
    let numbers = fetch(&cluster, GOOD, "/metrics");
    assert!(
        numbers.contains("permafrost_replication_copies_failed_total 0\n"),
        "{numbers}"
    );

    // A new disk for the one that failed, which something fills.
    lose(&mut cluster, THIRD, GOOD);
    cluster.restart(THIRD).unwrap();
    cluster.wait_whole(3).unwrap();
    let third_full = Filler::take(cluster.node(THIRD), "third", 48 * MIB);
    damage_the_map(&mut cluster, BAD);
    let _bad_full = Filler::take(cluster.node(BAD), "bad", 32 * MIB);
    a_damaged_copy_is_no_copy(&cluster);
    a_drain_that_cannot_go_on_ends_and_says_so(&cluster);
    drop(third_full);
    cluster.kill(THIRD).unwrap();
    a_drain_that_cannot_go_on_ends_and_says_so(&cluster);
    cluster.restart(THIRD).unwrap();
    cluster.wait_whole(3).unwrap();

    wait_held(cluster.node(BAD), JOB, &names([GOOD, THIRD]));
    lose(&mut cluster, GOOD, BAD);
    for node in [THIRD, BAD] {
        let read = exported_pages(cluster.node(node), work.path(), JOB);
        assert!(read == memory, "what {} gives", name(node));
    }
    cluster.node(THIRD).run(&["verify", JOB]).unwrap();
}

/// An unsealed dump, which takes room on its node alone until this is dropped.
struct Filler {
    _connection: Connection,
    _peer: Peer,
}

impl Filler {
    fn take(at: &Daemon, job: &str, bytes: usize) -> Self {
        let mut connection = Connection::connect(&at.control()).unwrap();
        let open = request::Open {
            job: job.to_owned(),
            seal_follows: true,
            bound_to_connection: true,
            durability: "local".to_owned(),
            ..request::Open::default()
        };
        let session = connection.call(open).unwrap();
        let mut peer = Peer::unix(session.socket.as_ref(), Dialect::V32);
        peer.open();
        peer.pages(0x1000_0000, &pages(3, bytes / PAGE_SIZE));
        let filled = process::wait_for("a full node", LONG, || {
            let status = at.json(&["status"])?;
            let free = status["regions"][0]["free_bytes"].as_u64();
            Ok(free.filter(|free| *free < SIZE as u64).map(drop))
        });
        filled.unwrap();
        Self {
            _connection: connection,
            _peer: peer,
        }
    }
}

/// Returns the reply to a GET from a node's port for metrics.
fn fetch(cluster: &Cluster, node: usize, path: &str) -> String {
    let address = cluster.node(node).metrics().to_owned();
    let answer = cluster.host(node).run(|| {
        let mut stream = TcpStream::connect(address)?;
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    });
    answer.unwrap()
}

/// The region's file is truncated under the daemon: each access to its pages is a SIGBUS, as with a bad sector.
fn a_node_whose_medium_fails_takes_itself_out(cluster: &Cluster) {
    let region = std::fs::File::options()
        .write(true)
        .open(cluster.region(THIRD));
    region.unwrap().set_len(0).unwrap();
    // The first that fails says so.
    let failing = cluster.node(THIRD);
    let mut connection = Connection::connect(&failing.control()).unwrap();
    let open = request::Open {
        job: "first".to_owned(),
        ..request::Open::default()
    };
    let session = connection.call(open).unwrap();
    let mut peer = Peer::unix(session.socket.as_ref(), Dialect::V32);
    peer.open();
    peer.pages(0x5000_0000, &pages(1, 600));
    assert_ne!(peer.close(), Some(0));

    let shown = process::wait_for("the failure to be known", LONG, || {
        std::thread::sleep(PAUSE);
        let list = cluster.node(GOOD).json(&["node", "show", &name(THIRD)])?;
        Ok((list["nodes"][0]["state"] == "failed").then_some(()))
    });
    shown.unwrap();
    assert!(
        cluster
            .node(GOOD)
            .run(&["node", "ls"])
            .unwrap()
            .contains("failed")
    );
    let ready = fetch(cluster, THIRD, "/readyz");
    assert!(
        ready.starts_with("HTTP/1.0 503") || ready.starts_with("HTTP/1.1 503"),
        "{ready}"
    );
    let (code, said) = refusal(failing, &["open", "--job", "second"]);
    assert_eq!(code, 11, "{said}");
    assert!(said.contains("hint"), "{said}");
}

/// Stops a node, flips a bit in each map of the job's memory in its region, and starts it again. Pages are healed in
/// their places; a map is the copy's own, so a fresh copy has to take its place, for which there must be room.
fn damage_the_map(cluster: &mut Cluster, node: usize) {
    cluster.stop(node).unwrap();
    let path = cluster.region(node);
    let region = std::fs::read(&path).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    // A leaf of eight pages, as docs/format.md has it: first index, pages, digest, flags, level, slots, entries.
    const ENTRIES: usize = 52;
    let begin = [FIRST_PAGE.to_le_bytes(), 8_u64.to_le_bytes()].concat();
    let is_leaf = |node: &[u8]| node.starts_with(&begin) && node[50..ENTRIES] == [0, 0xff];
    let mut found = 0;
    for (place, node) in region.windows(ENTRIES).enumerate() {
        if is_leaf(node) {
            let at = place + ENTRIES;
            file.write_all_at(&[region[at] ^ 0x10], at as u64).unwrap();
            found += 1;
        }
    }
    assert!(found > 0, "no map of the job's memory in the region");
    cluster.restart(node).unwrap();
    cluster.wait_whole(3).unwrap();
}

fn a_damaged_copy_is_no_copy(cluster: &Cluster) {
    let [good, bad] = [GOOD, BAD].map(|node| cluster.node(node));
    let scrubbed = bad.try_run(&["--json", "scrub", JOB]).unwrap();
    assert_eq!(scrubbed.status.code(), Some(7), "{scrubbed:?}");
    let scrubbed: serde_json::Value = serde_json::from_slice(&scrubbed.stdout).unwrap();
    assert_eq!(scrubbed["damaged"][0]["mended"], false, "{scrubbed}");

    for node in [good, bad] {
        let list = process::wait_for("an answer with counts", LONG, || {
            // Refused while the registry does not answer.
            Ok(node.json(&["node", "ls"]).ok())
        });
        let list = list.unwrap();
        let counted = ["under_replicated", "stranded", "damaged"].map(|name| list[name].as_u64());
        assert_eq!(counted, [Some(1), Some(0), Some(1)], "{list}");
    }
    let status = good.json(&["status"]).unwrap();
    assert_eq!(status["cluster"]["under_replicated"], 1, "{status}");
    // The leader counts all that is listed, and looks at it now and then.
    let told = process::wait_for("the leader's numbers", LONG, || {
        std::thread::sleep(PAUSE);
        let told = (0..3).any(|node| {
            let numbers = fetch(cluster, node, "/metrics");
            let says = |name: &str| numbers.contains(&format!("permafrost_repair_{name} 1\n"));
            says("under_replicated") && says("damaged")
        });
        Ok(told.then_some(()))
    });
    told.unwrap();
    let ready = fetch(cluster, BAD, "/readyz");
    assert!(ready.contains("copies on this node are damaged"), "{ready}");
}

/// The good copy's node is to go, and no other node can take its copy.
fn a_drain_that_cannot_go_on_ends_and_says_so(cluster: &Cluster) {
    let (asked, good) = (cluster.node(BAD), name(GOOD));
    let began = Instant::now();
    let (code, said) = refusal(asked, &["node", "drain", "--wait", &good]);
    assert_eq!(code, 6, "{said}");
    assert!(
        said.contains("still needed for 1 checkpoint") && said.contains("hint: free space"),
        "{said}"
    );
    assert!(began.elapsed() < DRAIN_LIMIT, "{:?}", began.elapsed());
    let (code, said) = refusal(asked, &["node", "remove", &good]);
    assert_eq!(code, 4, "{said}");
    let says = [
        &format!("{JOB}@1"),
        "hint: wait until they are copied or healed",
    ];
    assert!(says.iter().all(|says| said.contains(*says)), "{said}");
    asked.run(&["node", "undrain", &good]).unwrap();
}
