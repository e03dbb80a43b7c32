//! Real processes, dumped and restored by the real CRIU through an agent.

use permafrost_tests::criu;
use permafrost_tests::workload::{self, Workload};

use super::{Site, refusal};

#[test]
fn a_task_is_dumped_and_restored_through_an_agent() {
    if criu::for_test("a_task_is_dumped_and_restored_through_an_agent").is_none() {
        return;
    }
    let site = Site::new(1);
    let agent = site.agent("compute", "*", &[]);
    let options = workload::Options {
        size_mib: 24,
        ..workload::Options::default()
    };
    let mut workload = Workload::start(site.work(), &options).unwrap();
    let mut counter = 0;
    for generation in 1..=3_u64 {
        let modified = workload.modify().unwrap();
        let pid = workload.pid().to_string();
        let dumped = agent
            .json(&["dump", "--pid", &pid, "--job", "tasks/one"])
            .unwrap();
        assert_eq!(dumped["checkpoint"]["generation"], generation, "{dumped}");
        workload.wait_until_gone().unwrap();
        let restored = agent.json(&["restore", "tasks/one"]).unwrap();
        assert_eq!(restored["streamed"], true, "{restored}");
        let after = workload.verify().unwrap();
        assert!(after.is_sound(), "generation {generation}: {after:?}");
        assert_eq!(after.generation, modified.generation);
        assert!(after.counter > counter, "the counter goes on");
        counter = after.counter;
    }
    // And from an images directory.
    workload.kill();
    agent
        .run(&["restore", "--no-stream", "tasks/one@3"])
        .unwrap();
    assert!(workload.verify().unwrap().is_sound());
}

#[test]
fn a_dump_whose_node_is_gone_leaves_the_task_alive() {
    if criu::for_test("a_dump_whose_node_is_gone_leaves_the_task_alive").is_none() {
        return;
    }
    let mut site = Site::new(1);
    let agent = site.agent("compute", "*", &["--deadline", "4s"]);
    let workload = Workload::start(site.work(), &workload::Options::default()).unwrap();
    let pid = workload.pid().to_string();
    site.nodes[0].take().unwrap().kill().unwrap();
    let (code, said) = refusal(&agent, &["dump", "--pid", &pid, "--job", "tasks/two"]);
    assert_eq!(code, 11, "{said}");
    assert!(workload.verify().unwrap().is_sound());
}
