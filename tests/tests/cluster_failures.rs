//! Failures during a dump in a cluster. The dumped task survives each of them.

mod common;

use std::time::{Duration, Instant};

use common::clustered::*;
use common::listing;
use permafrost_tests::cluster::{Cluster, Setup};
use permafrost_tests::{criu, process};
use rustix::process::Signal;

#[test]
fn a_replica_without_room_is_left_out_and_all_copies_are_refused() {
    const TEST: &str = "a_replica_without_room_is_left_out_and_all_copies_are_refused";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let setup = Setup {
        members: 1,
        extra: ["--copies", "3"].map(str::to_owned).to_vec(),
        adjust: |node, options| {
            if node == 1 {
                options.region_mib = 64;
            }
        },
        ..Setup::default()
    };
    let Some(cluster) = Cluster::for_test(TEST, setup).unwrap() else {
        return;
    };
    let mut task = Task::start(&cluster, 0, 80);
    let [asked, full] = [0, 1].map(|node| cluster.node(node));

    // Before its deadline of 30 s: that it is full is known sooner.
    let began = Instant::now();
    let all = [
        "dump",
        "--job",
        "big",
        "--pid",
        &task.pid(),
        "--durability",
        "all",
    ];
    let (code, said) = refusal(asked, &all);
    assert_eq!(code, 11, "{said}");
    assert!(said.contains("node-1"), "{said}");
    assert!(
        began.elapsed().as_secs() < 25,
        "{:?}: {said}",
        began.elapsed()
    );
    task.assert_sound();
    assert!(listing(asked).is_empty());

    // On the full one itself it is another matter.
    let neighbour = Task::start(&cluster, 1, 80);
    let here = ["dump", "--job", "here", "--pid", &neighbour.pid()];
    let (code, said) = refusal(full, &here);
    assert_eq!(code, 6, "{said}");
    neighbour.assert_sound();
    drop(neighbour);

    let line = dump(asked, &mut task, "big");
    assert_eq!(holders(&line), names([0, 2]), "{line}");
    // Nothing is left of what did not fit.
    let status = full.json(&["status"]).unwrap();
    let region = &status["regions"][0];
    assert_eq!(region["free_bytes"], region["capacity_bytes"], "{status}");
    // Where it was not taken it is readable all the same.
    thaw(full, &mut task, "big");
}

#[test]
fn dumps_outlive_a_lost_lock_a_lost_lease_and_a_lost_registry() {
    const TEST: &str = "dumps_outlive_a_lost_lock_a_lost_lease_and_a_lost_registry";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let setup = Setup {
        members: 1,
        extra: ["--lease", "2s"].map(str::to_owned).to_vec(),
        ..Setup::default()
    };
    let Some(mut cluster) = Cluster::for_test(TEST, setup).unwrap() else {
        return;
    };
    // A dump of 16 MiB on node 0 takes 2.7 s.
    cluster.host(0).limit(50).unwrap();
    let mut tasks = [0, 1].map(|host| Task::start(&cluster, host, 16));
    one_dump_of_a_job_at_a_time(&cluster, &mut tasks);
    a_node_that_stood_still_acts_no_more(&cluster, &mut tasks);
    without_the_registry_what_is_known_is_served(&mut cluster, &mut tasks);
}

fn one_dump_of_a_job_at_a_time(cluster: &Cluster, [first, second]: &mut [Task; 2]) {
    let [one, other] = [0, 1].map(|node| cluster.node(node));
    let dumping = spawn(one, &["dump", "--job", "shared", "--pid", &first.pid()]);
    wait_for_session(one, "shared");
    let late = ["dump", "--job", "shared", "--pid", &second.pid()];
    let (code, said) = refusal(other, &late);
    assert_eq!(code, 4, "{said}");
    assert!(said.contains("node-0"), "who is dumping it: {said}");
    second.assert_sound();

    let output = dumping.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}", refused(&output));
    first.wait_until_gone().unwrap();
    assert_eq!(line(other, "shared").unwrap()["generation"], 1);
    thaw(one, first, "shared");
    one.run(&["restore", "shared"]).unwrap();
}

/// SIGSTOP, for longer than its lease, in the middle of a dump.
fn a_node_that_stood_still_acts_no_more(cluster: &Cluster, [first, second]: &mut [Task; 2]) {
    let [still, other] = [0, 1].map(|node| cluster.node(node));
    let dumping = spawn(still, &["dump", "--job", "still", "--pid", &first.pid()]);
    wait_for_session(still, "still");
    process::stop(still.pid()).unwrap();
    let gone = || Ok((!is_live(other, "node-0")).then_some(()));
    process::wait_for("the end of a lease", LONG, gone).unwrap();
    // The job's lock went with the lease.
    let by_the_other = dump(other, second, "still");
    process::signal(still.pid(), Signal::CONT).unwrap();

    let (code, said) = refused(&dumping.wait_with_output().unwrap());
    assert_ne!(code, 0, "{said}");
    first.assert_sound();
    cluster.wait_whole(3).unwrap();
    let newest = line(still, "still").unwrap();
    assert_eq!(newest["id"], by_the_other["id"], "{newest}");
    // It takes part again.
    cluster.host(0).limit(10_000).unwrap();
    let generation = newest["generation"].as_u64().unwrap();
    let again = dump(still, first, "still");
    assert!(again["generation"].as_u64() > Some(generation), "{again}");
    assert_eq!(holders(&again).len(), 2, "{again}");
    still.run(&["restore", "still"]).unwrap();
    first.assert_sound();
    let name = format!("still@{generation}");
    other.run(&["restore", &name]).unwrap();
    second.assert_sound();
}

fn without_the_registry_what_is_known_is_served(cluster: &mut Cluster, tasks: &mut [Task; 2]) {
    let [first, second] = tasks;
    dump(cluster.node(0), first, "known");
    let before = listing(cluster.node(2));
    cluster.etcd.kill(0).unwrap();
    // Its leases are over, and the nodes know it.
    std::thread::sleep(Duration::from_secs(3));
    // Nothing can be acknowledged that is not listed, however few copies it needs.
    let pids = [second.pid()];
    let local = [
        "dump",
        "--job",
        "new",
        "--durability",
        "local",
        "--pid",
        &pids[0],
    ];
    let refusing = spawn(cluster.node(1), &local);
    let began = Instant::now();
    thaw(cluster.node(0), first, "known");
    assert!(began.elapsed().as_secs() < 10, "{:?}", began.elapsed());
    let (code, said) = refused(&refusing.wait_with_output().unwrap());
    assert_eq!(code, 11, "{said}");
    second.assert_sound();

    cluster.etcd.restart(0).unwrap();
    cluster.wait_whole(3).unwrap();
    assert_eq!(listing(cluster.node(2)), before);
    let line = dump(cluster.node(1), second, "new");
    assert_eq!(holders(&line).len(), 2, "{line}");
    thaw(cluster.node(1), second, "new");
}
