//! Compute nodes without storage, over a cluster.

mod common;

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, ChildStderr, Stdio};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use permafrost_tests::cluster::{Cluster, Setup};
use permafrost_tests::criu;
use permafrost_tests::daemon::Daemon;
use permafrost_transport::control::Connection;

use common::clustered::*;
use common::*;

/// Number of the compute node's host, after three nodes and one member.
const COMPUTE: usize = 4;

fn cluster(test: &str, extra: &[&str]) -> Option<Cluster> {
    let setup = Setup {
        members: 1,
        others: 1,
        region_mib: 512,
        extra: extra.iter().map(|&option| option.to_owned()).collect(),
        ..Setup::default()
    };
    Cluster::for_test(test, setup).unwrap()
}

#[test]
fn what_an_agent_dumped_outlives_the_node_that_took_it() {
    const TEST: &str = "what_an_agent_dumped_outlives_the_node_that_took_it";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let Some(mut cluster) = cluster(TEST, &[]) else {
        return;
    };
    let agent = cluster.agent("compute", COMPUTE, "*", &[]).unwrap();
    let mut task = Task::start(&cluster, COMPUTE, 16);
    let line = dump(&agent, &mut task, "far");
    let held = holders(&line);
    assert_eq!(held.len(), 2, "{line}");
    // The agent's first node took it.
    assert!(held.contains("node-0"), "{line}");

    // A storage node runs it only when it is told whose dumps to trust.
    let node = cluster.node(1);
    for trust in [&[][..], &["--trust", "node,agent:other"]] {
        let (code, told) = refusal(node, &[&["restore", "far"], trust].concat());
        assert_eq!(code, 9, "{told}");
        assert!(told.contains("was dumped by agent compute"), "{told}");
        assert!(told.contains("--trust agent:compute"), "{told}");
    }
    node.run(&["restore", "far", "--trust", "agent:compute"])
        .unwrap();
    task.assert_sound();
    task.kill();

    cluster.kill(0).unwrap();
    thaw(&agent, &mut task, "far");

    // And the next dump goes to another one.
    agent.run(&["restore", "far"]).unwrap();
    let line = dump(&agent, &mut task, "far");
    assert_eq!(holders(&line), names([1, 2]), "{line}");
    thaw(&agent, &mut task, "far");
}

#[test]
fn rounds_of_a_pre_copy_have_copies_and_outlive_their_node() {
    const TEST: &str = "rounds_of_a_pre_copy_have_copies_and_outlive_their_node";
    let Some(mut cluster) = cluster(TEST, &[]) else {
        return;
    };
    // It may remove rounds.
    let rights = ["--namespace", "*", "--delete"];
    let identity = cluster.issue("compute", "agent", &rights).unwrap();
    let agent = cluster
        .agent_as("compute", COMPUTE, &identity, &[])
        .unwrap();
    let work = tempfile::tempdir().unwrap();
    let first = rounds::first_round(&agent, work.path());
    let listed = listing(cluster.node(1));
    assert_eq!(listed[0]["kind"], "pre-copy");
    assert_eq!(holders(&listed[0]).len(), 2, "{listed:?}");

    // The node that took it starts again, and the dump refers to it all the same.
    cluster.kill(0).unwrap();
    cluster.restart(0).unwrap();
    cluster.wait_whole(3).unwrap();
    agent.json_patiently(&["ls"]).unwrap();
    let mut last = Connection::connect(&agent.control()).unwrap();
    let (session, mut peer, has_parent) = rounds::open(&mut last, false);
    assert!(has_parent);
    peer.pages(rounds::BASE, &pages(3, 1));
    let rest = u32::try_from(rounds::PAGES - 1).unwrap();
    peer.hole(rounds::BASE + PAGE_SIZE as u64, rest);
    let sealed = rounds::seal(&mut last, work.path(), session, peer);
    assert_eq!(sealed, "train@2 full");
    drop((first, last));
    let mut expected = pages(1, rounds::PAGES);
    expected[..PAGE_SIZE].copy_from_slice(&pages(3, 1));
    for node in 0..3 {
        let node = cluster.node(node);
        rounds::wait_until_left(node, &[(2, "full")]);
        assert!(exported_pages(node, work.path(), "train@2") == expected);
    }
}

/// Number of real tasks, and of clients that speak like CRIU.
const REAL: usize = 20;
const FAKE: usize = 180;

#[test]
fn two_hundred_dumps_at_once_are_all_kept() {
    const TEST: &str = "two_hundred_dumps_at_once_are_all_kept";
    if criu::for_test(TEST).is_none() {
        return;
    }
    // Otherwise they would wait for each other.
    let Some(cluster) = cluster(TEST, &["--dumps-at-once", "256"]) else {
        return;
    };
    let agent = cluster.agent("compute", COMPUTE, "*", &[]).unwrap();
    let mut tasks: Vec<_> = (0..REAL)
        .map(|_| Task::start(&cluster, COMPUTE, 1))
        .collect();
    let work = tempfile::tempdir().unwrap();
    // All sessions are open before the first is closed.
    let open = Barrier::new(FAKE);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for (n, task) in tasks.iter_mut().enumerate() {
            let agent = &agent;
            scope.spawn(move || dump(agent, task, &format!("real/{n}")));
        }
        for n in 0..FAKE {
            let (agent, work, open) = (&agent, work.path(), &open);
            scope.spawn(move || fake_dump(agent, work, n, open));
        }
    });
    let took = began.elapsed();
    println!("{} dumps took {took:?}", REAL + FAKE);
    assert!(took < Duration::from_secs(60), "{took:?}");

    assert_eq!(listing(&agent).len(), REAL + FAKE);
    let verified = [0, 1, 2].map(|node| {
        let verified = cluster.node(node).json(&["verify"]).unwrap();
        verified["checkpoints"].as_u64().unwrap()
    });
    // Two copies of each; what is needed for a quorum of two.
    let copies = u64::try_from(2 * (REAL + FAKE)).unwrap();
    assert_eq!(verified.iter().sum::<u64>(), copies, "{verified:?}");
    for n in (0..FAKE).step_by(30) {
        assert!(exported_pages(&agent, work.path(), &format!("fake/{n}")) == contents(n));
    }
    for (n, task) in tasks.iter_mut().enumerate().step_by(5) {
        thaw(&agent, task, &format!("real/{n}"));
    }
}

#[test]
fn dumps_of_an_agent_that_wait_all_get_their_turns() {
    const TEST: &str = "dumps_of_an_agent_that_wait_all_get_their_turns";
    // More than a node keeps waiting at once.
    const DUMPS: usize = 80;
    let Some(cluster) = cluster(TEST, &[]) else {
        return;
    };
    let agent = cluster.agent("compute", COMPUTE, "*", &[]).unwrap();
    let work = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for n in 0..DUMPS {
            let (agent, work) = (&agent, work.path());
            scope.spawn(move || {
                let alone = Barrier::new(1);
                fake_dump(agent, work, n, &alone);
            });
        }
    });
    assert_eq!(listing(&agent).len(), DUMPS);
    let status = cluster.node(0).json(&["status"]).unwrap();
    let queue = &status["queues"][0];
    assert_eq!(
        (&queue["running"], &queue["waiting"], &queue["reserved"]),
        (&0.into(), &0.into(), &0.into()),
        "{queue}"
    );
}

fn contents(n: usize) -> Vec<u8> {
    // Every dump has its own length; its own seed, but for the last byte's worth of them.
    pages(u8::try_from(n % 255).unwrap() + 1, 32 + n)
}

fn fake_dump(agent: &Daemon, work: &Path, n: usize, open: &Barrier) {
    let job = format!("fake/{n}");
    let line = sealed_dump(agent, work, &job, &contents(n), || {
        open.wait();
    });
    assert_eq!(line.generation, 1, "{job}");
}

#[test]
fn a_lazy_restore_goes_on_when_the_node_that_serves_it_dies() {
    const TEST: &str = "a_lazy_restore_goes_on_when_the_node_that_serves_it_dies";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let Some(mut cluster) = cluster(TEST, &[]) else {
        return;
    };
    let agent = cluster.agent("compute", COMPUTE, "*", &[]).unwrap();
    let mut task = Task::start(&cluster, COMPUTE, 16);
    let line = dump(&agent, &mut task, "far");
    assert!(holders(&line).contains("node-0"), "{line}");
    let (mut restoring, _told) = touched_only(&agent, "far");
    // The agent asks this node first.
    cluster.kill(0).unwrap();
    task.modify().unwrap();
    task.assert_sound();
    task.kill();
    assert!(restoring.wait().unwrap().success());

    // Or removes the checkpoint.
    let (mut restoring, _told) = touched_only(&agent, "far");
    cluster.node(1).run(&["rm", "far", "--all"]).unwrap();
    task.assert_sound();
    task.kill();
    assert!(restoring.wait().unwrap().success());
    // The agent knows which pages were waited for.
    let orders = agent.control().with_file_name("touched");
    assert_eq!(std::fs::read_dir(orders).unwrap().count(), 1);

    // An agent that stops has what is missing brought first.
    let mut task = Task::start(&cluster, COMPUTE, 16);
    dump(&agent, &mut task, "near");
    let (mut restoring, _told) = touched_only(&agent, "near");
    assert!(agent.stop().unwrap().success());
    assert!(restoring.wait().unwrap().success());
    task.assert_sound();
    task.kill();
}

/// The process waits while nobody can bring its memory, and goes on with whoever comes back.
#[test]
fn a_lazy_restore_outlives_its_agent_and_waits_for_nodes_that_are_away() {
    const TEST: &str = "a_lazy_restore_outlives_its_agent_and_waits_for_nodes_that_are_away";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let Some(mut cluster) = cluster(TEST, &[]) else {
        return;
    };
    let identity = cluster
        .issue("compute", "agent", &["--namespace", "*"])
        .unwrap();
    let start = |cluster: &Cluster| {
        // It gives up soon where no node answers.
        let extra = ["--deadline", "3s"];
        let agent = cluster.agent_as("compute", COMPUTE, &identity, &extra);
        agent.unwrap()
    };
    let agent = start(&cluster);
    let mut task = Task::start(&cluster, COMPUTE, 16);
    let line = dump(&agent, &mut task, "far");
    assert_eq!(holders(&line), names([0, 1]), "{line}");
    let (mut restoring, _told) = touched_only(&agent, "far");
    agent.kill().unwrap();
    let agent = start(&cluster);
    task.modify().unwrap();
    task.assert_sound();
    task.kill();
    assert!(restoring.wait().unwrap().success());

    let (mut restoring, told) = touched_only(&agent, "far");
    for node in [0, 1] {
        cluster.kill(node).unwrap();
    }
    let mut told = told.lines().map(Result::unwrap);
    std::thread::scope(|scope| {
        let verifying = scope.spawn(|| task.assert_sound());
        assert!(told.any(|line| line.contains("waits for it to come back")));
        assert!(!verifying.is_finished());
        cluster.restart(1).unwrap();
        verifying.join().unwrap();
    });
    task.kill();
    assert!(restoring.wait().unwrap().success());
}

/// Begins a restore that brings only what is accessed. Returns once the task runs.
fn touched_only(agent: &Daemon, job: &str) -> (Child, BufReader<ChildStderr>) {
    let mut restoring = agent.command().unwrap();
    restoring.args(["restore", job, "--touched-only"]);
    let mut restoring = restoring.stderr(Stdio::piped()).spawn().unwrap();
    let mut told = BufReader::new(restoring.stderr.take().unwrap());
    let mut running = String::new();
    told.read_line(&mut running).unwrap();
    assert!(running.contains("runs as process"), "{running}");
    (restoring, told)
}
