//! Real processes, dumped and restored by the real CRIU through an agent.

use std::path::{Path, PathBuf};
use std::process::Command;

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
    let ways = ["page-server", "stream", "stream", "page-server"];
    for (generation, way) in (1_u64..).zip(ways) {
        let modified = workload.modify().unwrap();
        let pid = workload.pid().to_string();
        let force = format!("--{way}");
        let dumped = agent
            .json(&["dump", "--pid", &pid, "--job", "tasks/one", &force])
            .unwrap();
        assert_eq!(dumped["way"], way, "{dumped}");
        if generation > 1 {
            // The node compares the pages, whichever way they came.
            let of = |bytes: &str| dumped["checkpoint"][bytes].as_u64().unwrap();
            assert!(of("added_bytes") * 3 < of("memory_bytes"), "{dumped}");
        }
        assert_eq!(dumped["checkpoint"]["generation"], generation, "{dumped}");
        workload.wait_until_gone().unwrap();
        let restored = agent.json(&["restore", "tasks/one"]).unwrap();
        assert_eq!(restored["way"], "place", "{restored}");
        let after = workload.verify().unwrap();
        assert!(after.is_sound(), "generation {generation}: {after:?}");
        assert_eq!(after.generation, modified.generation);
        assert!(after.counter > counter, "the counter goes on");
        counter = after.counter;
    }
    // And from an images directory.
    workload.kill();
    agent
        .run(&["restore", "--no-stream", "tasks/one@2"])
        .unwrap();
    assert!(workload.verify().unwrap().is_sound());
}

/// Makes an archive in the layout of podman's, of an images directory.
fn archive(work: &Path, images: &Path, name: &str) -> PathBuf {
    let tree = work.join(format!("tree-{name}"));
    std::fs::create_dir_all(tree.join("checkpoint")).unwrap();
    for image in std::fs::read_dir(images).unwrap() {
        let image = image.unwrap();
        let copy = tree.join("checkpoint").join(image.file_name());
        std::fs::copy(image.path(), copy).unwrap();
    }
    for (member, contents) in [("config.dump", "{}"), ("spec.dump", "{}")] {
        std::fs::write(tree.join(member), contents).unwrap();
    }
    // Longer than what a conversation has in flight.
    std::fs::write(tree.join("rootfs-diff.tar"), vec![7; 12 << 20]).unwrap();
    let archive = work.join(name);
    let tar = Command::new("tar")
        .args(["-C", tree.to_str().unwrap(), "-cf"])
        .arg(&archive)
        .args(["checkpoint", "config.dump", "spec.dump", "rootfs-diff.tar"])
        .status()
        .unwrap();
    assert!(tar.success());
    archive
}

#[test]
fn an_archive_is_stored_and_given_back_through_an_agent() {
    if criu::for_test("an_archive_is_stored_and_given_back_through_an_agent").is_none() {
        return;
    }
    let site = Site::new(1);
    let agent = site.agent("compute", "*", &[]);
    let options = workload::Options {
        size_mib: 24,
        ..workload::Options::default()
    };
    let workload = Workload::start(site.work(), &options).unwrap();
    let pid = workload.pid().to_string();
    let dump = |leave: &[&str]| {
        let line = [&["dump", "--pid", &pid, "--job", "plain"], leave].concat();
        agent.run(&line).unwrap();
    };
    let mut first = None;
    for generation in 1..=2 {
        workload.modify().unwrap();
        dump(&["--leave-running"]);
        let images = site.work().join(format!("images-{generation}"));
        let name = format!("plain@{generation}");
        agent
            .run(&["get", &name, images.to_str().unwrap()])
            .unwrap();
        let tar = archive(site.work(), &images, &format!("{generation}.tar"));
        let put = ["put", "pod", "--archive", tar.to_str().unwrap()];
        let put = agent.json(&put).unwrap();
        assert_eq!(put["generation"], generation, "{put}");
        assert_eq!(put["parent_generation"], generation - 1, "{put}");
        assert_eq!(put["kind"], "full");
        // Through the agent, and on the node itself.
        let out = site.work().join(format!("{generation}-back.tar"));
        let name = format!("pod@{generation}");
        for daemon in [&agent, site.nodes[0].as_ref().unwrap()] {
            let got = ["get", &name, "--force", "--archive", out.to_str().unwrap()];
            daemon.run(&got).unwrap();
            assert!(std::fs::read(&out).unwrap() == std::fs::read(&tar).unwrap());
        }
        first.get_or_insert(put["added_bytes"].as_u64().unwrap());
        if generation == 2 {
            let added = put["added_bytes"].as_u64().unwrap();
            assert!(added < first.unwrap() / 2, "{added} of {first:?}");
        }
    }
    // Bad archives are refused before anything is sent.
    let tar = site.work().join("bad.tar");
    std::fs::write(&tar, vec![1; 4096]).unwrap();
    let (code, said) = refusal(&agent, &["put", "pod", "--archive", tar.to_str().unwrap()]);
    assert_eq!(code, 2, "{said}");
    assert!(agent.try_run(&["show", "pod@3"]).unwrap().status.code() == Some(3));
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
