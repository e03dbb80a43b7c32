//! Copies that are damaged, lost or to be moved: the cluster replaces them by itself.

mod common;

use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use common::clustered::*;
use common::{PAGE_SIZE, pages};
use permafrost_tests::cluster::{Cluster, Setup, name};
use permafrost_tests::contents::{self, Contents};
use permafrost_tests::criu;
use permafrost_tests::daemon::Daemon;
use permafrost_tests::process;

/// Name of the only job.
const JOB: &str = "days";
/// Seed of the task on host 0.
const SEED: u64 = 1;
/// Number of a page of its root process, which is searched for in a region.
const SOME_PAGE: u64 = 777;

#[test]
fn copies_come_back_whatever_became_of_them() {
    const TEST: &str = "copies_come_back_whatever_became_of_them";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let setup = Setup {
        members: 1,
        // What is damaged is to be found by who reads it, not by a scrub of the node itself.
        extra: ["--repair-grace=2s", "--lease=2s", "--scrub-period=off"]
            .map(str::to_owned)
            .to_vec(),
        ..Setup::default()
    };
    let Some(mut cluster) = Cluster::for_test(TEST, setup).unwrap() else {
        return;
    };
    let mut task = Task::start(&cluster, 0, 16);
    let line = dump(cluster.node(0), &mut task, JOB);
    assert_eq!(holders(&line).len(), 2, "{line}");
    a_flipped_page_is_read_from_elsewhere_and_mended(&mut cluster, &mut task);
    a_node_that_died_is_replaced(&mut cluster, &mut task);
    a_drained_node_can_go(&mut cluster, &mut task);
    a_new_disk_is_no_copy_and_copies_come_back(&mut cluster, &mut task);
    nodes_that_were_killed_and_are_back_are_reached_at_once(&mut cluster);
}

/// Returns the numbers of the nodes that hold the job's checkpoint, and of those that do not, by their list.
fn split(cluster: &Cluster) -> (Vec<usize>, Vec<usize>) {
    let asked = (0..3).find(|node| cluster.runs(*node));
    let asked = cluster.node(asked.expect("a node that runs"));
    let held = holders(&line(asked, JOB).unwrap());
    (0..3).partition(|node| held.contains(&name(*node)))
}

/// Chooses one of two holders to lose, the one that stays, and the node that has no copy. The lost one is not the
/// leader: a new leader first gives every dump time to make its copies.
fn choose(cluster: &Cluster) -> [usize; 3] {
    let (held, spare) = split(cluster);
    let leader = process::wait_for("a leader", LONG, || {
        std::thread::sleep(PAUSE);
        let list = cluster.node(0).json(&["node", "ls"])?;
        let leads = |node: &usize| list["leader"] == name(*node).as_str();
        Ok((0..3).find(leads))
    });
    let leader = leader.unwrap();
    let lost = held.iter().position(|node| *node != leader).unwrap();
    [held[lost], held[1 - lost], spare[0]]
}

/// Waits until there are neither too few copies nor surplus ones.
fn settle(cluster: &Cluster) {
    let settled = process::wait_for("two copies", LONG, || {
        std::thread::sleep(PAUSE);
        Ok((split(cluster).0.len() == 2).then_some(()))
    });
    settled.unwrap();
}

/// Returns a counter of a node's scrub.
fn scrub_count(at: &Daemon, field: &str) -> u64 {
    let status = at.json(&["status"]).unwrap();
    let count = status["scrub"][field].as_u64();
    count.unwrap_or_else(|| panic!("no {field}: {status}"))
}

/// Stops a node, damages a page of the task's in its region, and starts it again.
fn flip_a_page(cluster: &mut Cluster, node: usize) {
    cluster.stop(node).unwrap();
    let mut page = [0; PAGE_SIZE];
    contents::fill(Contents::Random, SEED, SOME_PAGE, 0, &mut page);
    let path = cluster.region(node);
    let region = std::fs::read(&path).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let places = region.chunks_exact(PAGE_SIZE).enumerate();
    let places = places.filter(|(_, chunk)| *chunk == page);
    // What was replaced by a fresh copy may still lie somewhere.
    let mut found = 0;
    for (place, _) in places {
        let at = place * PAGE_SIZE + 2000;
        file.write_all_at(&[region[at] ^ 0x10], at as u64).unwrap();
        found += 1;
    }
    assert!(found > 0, "the page in the region");
    cluster.restart(node).unwrap();
    cluster.wait_whole(3).unwrap();
    assert_eq!(scrub_count(cluster.node(node), "damaged"), 0);
}

fn a_flipped_page_is_read_from_elsewhere_and_mended(cluster: &mut Cluster, task: &mut Task) {
    let [node, ..] = choose(cluster);
    // Found by a restore.
    flip_a_page(cluster, node);
    let damaged = cluster.node(node);
    thaw(damaged, task, JOB);
    damaged.run(&["scrub", JOB]).unwrap();
    assert_eq!(scrub_count(damaged, "mended"), 1);

    // Found by a scrub.
    flip_a_page(cluster, node);
    let damaged = cluster.node(node);
    let scrubbed = damaged.json(&["scrub", JOB]).unwrap();
    assert_eq!(scrubbed["damaged"][0]["mended"], true, "{scrubbed}");
    damaged.run(&["verify", JOB]).unwrap();
    // All its own again.
    thaw(damaged, task, JOB);
    assert_eq!(scrub_count(damaged, "damaged"), 1);
}

fn a_node_that_died_is_replaced(cluster: &mut Cluster, task: &mut Task) {
    let [lost, stays, spare] = choose(cluster);
    cluster.kill(lost).unwrap();
    let new = cluster.node(spare);
    wait_held(new, JOB, &names([stays, spare]));
    new.run(&["verify", JOB]).unwrap();
    thaw(new, task, JOB);

    let tells = |cluster: &Cluster, event: &str| {
        let log = std::fs::read_to_string(cluster.node(spare).log()).unwrap();
        let line = format!("event=\"{event}\" node=\"{}\"", name(lost));
        log.matches(&line).count()
    };
    assert!(tells(cluster, "node-lost") > 0);
    let joined = tells(cluster, "node-joined");

    // Back again there is one too many.
    cluster.restart(lost).unwrap();
    cluster.wait_whole(3).unwrap();
    assert!(tells(cluster, "node-joined") > joined);
    settle(cluster);
}

fn a_drained_node_can_go(cluster: &mut Cluster, task: &mut Task) {
    let [drained, stays, spare] = choose(cluster);
    let asked = cluster.node(stays);
    let (code, said) = refusal(asked, &["node", "remove", &name(drained)]);
    assert_eq!(code, 4, "it lives and is not drained: {said}");
    asked
        .run(&["node", "drain", "--wait", &name(drained)])
        .unwrap();
    asked.run(&["node", "remove", &name(drained)]).unwrap();
    cluster.stop(drained).unwrap();
    let asked = cluster.node(spare);
    asked.run(&["verify", JOB]).unwrap();
    thaw(asked, task, JOB);

    let refused = cluster.restart(drained).expect_err("it was removed");
    assert!(format!("{refused:#}").contains("removed"), "{refused:#}");
    let asked = cluster.node(stays);
    asked.run(&["node", "undrain", &name(drained)]).unwrap();
    cluster.restart(drained).unwrap();
    cluster.wait_whole(3).unwrap();
    settle(cluster);
}

/// The disk was replaced, and the node started again, and nobody told the cluster.
fn a_new_disk_is_no_copy_and_copies_come_back(cluster: &mut Cluster, task: &mut Task) {
    let [lost, other, _] = choose(cluster);
    lose(cluster, lost, other);
    cluster.restart(lost).unwrap();
    cluster.wait_whole(3).unwrap();
    // Sooner than anybody compares what he has with what is listed.
    let limit = Duration::from_secs(40);
    let whole = process::wait_for("two copies that are there", limit, || {
        std::thread::sleep(PAUSE);
        let held = split(cluster).0;
        let there = |node: &usize| cluster.node(*node).run(&["verify", JOB]).is_ok();
        Ok((held.len() == 2 && held.iter().all(there)).then_some(()))
    });
    whole.unwrap();
    thaw(cluster.node(lost), task, JOB);
}

/// Nodes that hold connections to the killed nodes learn of the restart, and do not wait until the old connections
/// time out.
fn nodes_that_were_killed_and_are_back_are_reached_at_once(cluster: &mut Cluster) {
    let work = tempfile::tempdir().unwrap();
    let dump = |cluster: &Cluster, job: &str| {
        let began = Instant::now();
        sealed_dump(cluster.node(0), work.path(), job, &pages(1, 10), || {});
        began.elapsed()
    };
    for job in ["to-one", "to-another"] {
        dump(cluster, job);
    }
    for node in [1, 2] {
        cluster.kill(node).unwrap();
        cluster.restart(node).unwrap();
    }
    cluster.wait_whole(3).unwrap();
    let took = dump(cluster, "after");
    assert!(took < Duration::from_secs(4), "{took:?}");
}
