//! A cluster half on the release before and half on this one: rolled forward, back and forward again, with dumps,
//! restores and repair across, and nothing lost.
//!
//! The release before is this build, limited to the oldest versions that it speaks, or the programs in
//! `PERMAFROST_OLD_BIN_DIR` (`cargo xtask upgrade`).

mod common;

use std::path::PathBuf;

use common::clustered::*;
use permafrost_protocol::versions::{Interface, SPEAK};
use permafrost_tests::cluster::{Cluster, Setup, name};
use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process;

/// Environment variable that names the directory of the programs of the release before.
const OLD_BIN_DIR: &str = "PERMAFROST_OLD_BIN_DIR";

/// Makes a node one of the release before.
fn older(options: &mut Options) {
    if let Some(dir) = std::env::var_os(OLD_BIN_DIR) {
        options.programs = Some(PathBuf::from(dir));
    }
    // A release that knows more than the oldest versions speaks these alone, too.
    let oldest = Interface::ALL.map(|interface| {
        let oldest = interface.built().oldest;
        format!("{interface}={oldest}")
    });
    options.env(SPEAK, &oldest.join(","));
}

fn this(_: &mut Options) {}

/// A cluster and what it must not lose.
struct Rolling {
    cluster: Cluster,
    agent: Daemon,
    work: tempfile::TempDir,
    tasks: Vec<(String, Task)>,
    /// Jobs whose memory came through the agent.
    sent: Vec<String>,
}

impl Rolling {
    /// Dumps a task on one node, and memory through the agent, and restores every task on another node.
    fn dump_and_restore(&mut self, by: usize, on: usize) {
        let job = format!("job-{}", self.tasks.len());
        let mut task = Task::start(&self.cluster, by, 4);
        let line = dump(self.cluster.node(by), &mut task, &job);
        assert_eq!(holders(&line).len(), 2, "{line}");
        self.tasks.push((job, task));
        let job = format!("sent-{}", self.sent.len());
        let memory = common::pages(u8::try_from(self.sent.len()).unwrap(), 64);
        sealed_dump(&self.agent, self.work.path(), &job, &memory, || {});
        self.sent.push(job);
        for (job, task) in &mut self.tasks {
            thaw(self.cluster.node(on), task, job);
        }
        self.assert_all_listed(on);
    }

    fn assert_all_listed(&self, on: usize) {
        let listed = self.cluster.node(on).json(&["ls"]).unwrap();
        let listed = listed["checkpoints"].as_array().unwrap();
        let all = self.tasks.iter().map(|(job, _)| job).chain(&self.sent);
        for job in all {
            let found = listed.iter().filter(|line| line["job"] == job.as_str());
            assert_eq!(found.count(), 1, "{job} in {listed:?}");
        }
        assert_eq!(listed.len(), self.tasks.len() + self.sent.len());
    }

    /// Waits until each checkpoint has two good copies on nodes that are alive.
    fn await_copies(&self, by: usize) {
        let whole = process::wait_for("two copies of everything", LONG, || {
            std::thread::sleep(PAUSE);
            let list = self.cluster.node(by).json_patiently(&["node", "ls"])?;
            Ok((list["under_replicated"] == 0).then_some(()))
        });
        whole.unwrap();
    }

    fn roll(&mut self, node: usize, change: impl Fn(&mut Options)) {
        self.cluster.replace(node, change).unwrap();
        self.cluster.wait_whole_everywhere(3).unwrap();
    }

    fn level(&self, by: usize, version: &str) -> serde_json::Value {
        let set = self
            .cluster
            .node(by)
            .json_patiently(&["node", "level", version]);
        set.unwrap()
    }
}

#[test]
fn a_cluster_is_rolled_forward_and_back_and_loses_nothing() {
    const TEST: &str = "a_cluster_is_rolled_forward_and_back_and_loses_nothing";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let setup = Setup {
        members: 1,
        others: 1,
        extra: ["--repair-grace=2s", "--lease=5s", "--scrub-period=off"]
            .map(str::to_owned)
            .to_vec(),
        adjust: |_, options| older(options),
        ..Setup::default()
    };
    let Some(cluster) = Cluster::for_test(TEST, setup).unwrap() else {
        return;
    };
    let agent = cluster.agent("agent", 4, "*", &[]).unwrap();
    let mut rolling = Rolling {
        cluster,
        agent,
        work: tempfile::tempdir().unwrap(),
        tasks: Vec::new(),
        sent: Vec::new(),
    };
    // All old, but for the agent.
    rolling.dump_and_restore(0, 1);
    half_and_half(&mut rolling);
    forward_and_back(&mut rolling);
    with_another_level(&mut rolling);
}

/// One node is new: dumps of either are restored on the other, and both repair.
fn half_and_half(rolling: &mut Rolling) {
    rolling.roll(2, this);
    rolling.dump_and_restore(2, 0);
    rolling.dump_and_restore(0, 2);
    let nodes = rolling
        .cluster
        .node(2)
        .json_patiently(&["node", "level"])
        .unwrap();
    assert_eq!(nodes["registry_level"], 1, "{nodes}");
    assert_eq!(nodes["highest_registry_level"], 1, "{nodes}");
    let newest = Interface::Wire.built().newest;
    let speaks = &nodes["nodes"][2]["speaks"];
    assert_eq!(speaks["wire"]["newest"], newest, "{nodes}");
    // What not all speak is not used.
    let (code, said) = refusal(rolling.cluster.node(2), &["node", "level", "2"]);
    assert_eq!(code, 4, "{said}");
    assert!(said.contains("node-0 (1)"), "{said}");
    assert!(said.contains("upgrade these nodes"), "{said}");
    // Nor does a node start that cannot speak with the others.
    let later = rolling
        .cluster
        .replace(2, |options| options.env(SPEAK, "wire=2"));
    let said = format!("{:?}", later.unwrap_err());
    assert!(said.contains("no common version of wire: node-2"), "{said}");
    assert!(said.contains("upgrade node-0"), "{said}");
    // The copies of the node that is away are replaced by old nodes, and those of an old one with a new node.
    rolling.cluster.wait_whole_everywhere(2).unwrap();
    rolling.await_copies(0);
    rolling.cluster.replace(2, this).unwrap();
    rolling.cluster.wait_whole_everywhere(3).unwrap();
    rolling.cluster.kill(1).unwrap();
    rolling.cluster.wait_whole_everywhere(2).unwrap();
    rolling.await_copies(2);
    rolling.dump_and_restore(2, 0);
}

/// All become new, one old again, and new again.
fn forward_and_back(rolling: &mut Rolling) {
    rolling.cluster.restart(1).unwrap();
    rolling.roll(1, this);
    rolling.roll(0, this);
    rolling.dump_and_restore(1, 0);
    rolling.roll(1, older);
    rolling.dump_and_restore(1, 2);
    rolling.roll(1, this);
}

/// With the newer version of the registry old nodes are kept out, until the older version is set again.
fn with_another_level(rolling: &mut Rolling) {
    let list = rolling.level(0, "2");
    assert_eq!(list["registry_level"], 2, "{list}");
    let refused = rolling.cluster.replace(1, older);
    let said = format!("{:?}", refused.unwrap_err());
    assert!(said.contains("version 2"), "{said}");
    rolling.cluster.wait_whole_everywhere(2).unwrap();
    rolling.dump_and_restore(2, 0);
    // What a node that is down spoke is known by its last registration.
    let list = rolling.level(0, "1");
    let down = &list["nodes"][1];
    assert_eq!(down["name"], name(1), "{down}");
    assert_eq!(down["live"], false, "{down}");
    assert_eq!(down["speaks"]["registry"]["newest"], 2, "{down}");
    rolling.roll(1, older);
    rolling.dump_and_restore(1, 0);
    rolling.roll(1, this);
    rolling.level(0, "2");
    rolling.assert_all_listed(1);
}
