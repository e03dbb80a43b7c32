//! Rounds of a pre-copy through an agent: they last as long as the agent's client, whatever becomes of the node.

use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::{criu, workload};
use permafrost_transport::control::Connection;

use super::common::rounds::*;
use super::common::*;
use super::{Site, name};

/// Kills a node, and starts it again at the same address.
fn restart(site: &mut Site) {
    let node = site.nodes[0].take().unwrap();
    let peers = node.peers().to_owned();
    node.kill().unwrap();
    let options = Options {
        extra: ["--listen-peers", &peers, "--identity"]
            .map(str::to_owned)
            .into_iter()
            .chain([site
                .work()
                .join(format!("identity-{}", name(0)))
                .display()
                .to_string()])
            .collect(),
        listen: "none".to_owned(),
        region_mib: 768,
        ..Options::default()
    };
    let started = Daemon::start(&site.path(&name(0)), &options).unwrap();
    site.nodes[0] = Some(started);
}

/// Starts an agent that may remove rounds.
fn agent(site: &Site) -> Daemon {
    let identity = site.issue_with("compute", "agent", Some("*"), &["--delete"]);
    site.agent_with("compute", &identity, &[])
}

#[test]
fn rounds_through_an_agent_outlive_a_restart_of_their_node() {
    let mut site = Site::new(1);
    let agent = agent(&site);
    let first = first_round(&agent, site.work());
    assert_eq!(kinds(&agent), [(1, "pre-copy".to_owned())]);
    restart(&mut site);
    // The agent's connection was to the node before.
    agent.json_patiently(&["ls"]).unwrap();

    // The dump is compared with the round, and leaves most pages to it.
    let mut last = Connection::connect(&agent.control()).unwrap();
    let (session, mut peer, has_parent) = open(&mut last, false);
    assert!(has_parent, "the round has gone with the node");
    peer.pages(BASE, &pages(3, 1));
    peer.hole(BASE + PAGE_SIZE as u64, u32::try_from(PAGES - 1).unwrap());
    assert_eq!(seal(&mut last, site.work(), session, peer), "train@2 full");
    // The agent's client has ended: the agent removes the round.
    drop((first, last));
    wait_until_left(&agent, &[(2, "full")]);
    let mut expected = pages(1, PAGES);
    expected[..PAGE_SIZE].copy_from_slice(&pages(3, 1));
    assert!(exported_pages(&agent, site.work(), "train") == expected);
}

#[test]
fn a_round_whose_client_ends_is_removed_by_its_agent() {
    let site = Site::new(1);
    let agent = agent(&site);
    let first = first_round(&agent, site.work());
    let node = site.nodes[0].as_ref().unwrap();
    assert_eq!(kinds(node), [(1, "pre-copy".to_owned())]);
    drop(first);
    wait_until_left(node, &[]);
}

#[test]
fn a_task_is_dumped_with_pre_copy_through_an_agent() {
    if criu::for_test("a_task_is_dumped_with_pre_copy_through_an_agent").is_none() {
        return;
    }
    let site = Site::new(1);
    let agent = site.agent("compute", "*", &[]);
    let options = workload::Options::tree(8);
    let mut task = workload::Workload::start(site.work(), &options).unwrap();
    let pid = task.pid().to_string();
    let dumped = agent
        .json(&["dump", "--pid", &pid, "--job", "train", "--pre-copy"])
        .unwrap();
    // Rounds where the kernel has soft-dirty bits, and the reason where it has not.
    let pre_copy = &dumped["pre_copy"];
    let rounds = pre_copy["rounds"].as_array().unwrap();
    assert!(
        rounds.is_empty() == pre_copy["not_done"].is_string(),
        "{dumped}"
    );
    task.wait_until_gone().unwrap();
    let generation = u64::try_from(rounds.len() + 1).unwrap();
    wait_until_left(&agent, &[(generation, "full")]);
    agent.run(&["restore", "train"]).unwrap();
    assert!(task.verify().unwrap().is_sound());
}
