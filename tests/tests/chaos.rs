//! Three nodes and three members of etcd, of which one after the other is killed, or cut off, at a random moment of a
//! dump, a restore or a repair. What was acknowledged is there afterwards, nothing is half there, no task dies with
//! its dump not acknowledged, and in the end every checkpoint has all its copies.
//!
//! `PERMAFROST_CHAOS_ROUNDS` sets the number of rounds (default 100), `PERMAFROST_SEED` repeats a run.

use std::collections::BTreeMap;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use permafrost_tests::cluster::{Cluster, Setup, name};
use permafrost_tests::daemon::{Daemon, NOT_FOUND, UNAVAILABLE};
use permafrost_tests::random::{Random, from_env};
use permafrost_tests::workload::{self, Workload};
use permafrost_tests::{criu, process};
use tempfile::TempDir;

const NODES: usize = 3;
const MEMBERS: usize = 3;

/// Checkpoints of a job that are kept, besides those that are removed to see that they stay so.
const KEPT: usize = 3;

/// Time that a cluster may take to recover once all its parts run again: a lease, the leader's waiting time, copies.
const WHOLE: Duration = Duration::from_secs(120);

/// A task, on the host of the node of the same number, and its acknowledged dumps.
struct Victim {
    task: Workload,
    job: String,
    node: usize,
    /// Number of modifications of the task, by the generation of its checkpoint.
    acknowledged: BTreeMap<u64, u32>,
    _dir: TempDir,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    KillNode(usize),
    KillMember(usize),
    /// Cuts off the host of a node or of a member.
    Cut(usize),
    /// Cuts the connection from one host to the other, in that direction only.
    CutOneWay(usize, usize),
}

impl Fault {
    fn any(random: &mut Random) -> Self {
        let hosts = NODES + MEMBERS;
        match random.below(5) {
            0 | 1 => Self::KillNode(random.index(NODES)),
            2 => Self::KillMember(random.index(MEMBERS)),
            3 => Self::Cut(random.index(hosts)),
            _ => {
                let from = random.index(hosts);
                Self::CutOneWay(from, (from + 1 + random.index(hosts - 1)) % hosts)
            }
        }
    }

    fn strike(self, cluster: &mut Cluster) {
        match self {
            Self::KillNode(node) => cluster.kill(node).unwrap(),
            Self::KillMember(member) => cluster.etcd.kill(member).unwrap(),
            Self::Cut(host) => cluster.host(host).cut().unwrap(),
            Self::CutOneWay(from, to) => cluster.host(from).cut_to(cluster.host(to)).unwrap(),
        }
    }

    fn heal(self, cluster: &mut Cluster) {
        match self {
            Self::KillNode(node) => cluster.restart(node).unwrap(),
            Self::KillMember(member) => cluster.etcd.restart(member).unwrap(),
            Self::Cut(host) => cluster.host(host).heal().unwrap(),
            Self::CutOneWay(from, to) => cluster.host(from).heal_to(cluster.host(to)).unwrap(),
        }
    }
}

struct Chaos {
    cluster: Cluster,
    victims: Vec<Victim>,
    random: Random,
    /// Duration of a dump when nothing fails, and so the time within which faults are injected.
    dump: Duration,
    restore: Duration,
    refused: u64,
}

/// Starts `permafrost` on a node.
fn start(cluster: &Cluster, node: usize, arguments: &[&str]) -> Child {
    let mut command = cluster.node(node).command().unwrap();
    command.arg("--json").args(arguments);
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn said(output: &Output) -> String {
    format!(
        "{}: {}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

impl Chaos {
    fn new(cluster: Cluster, random: Random) -> Self {
        let victims = (0..NODES).map(|node| {
            let dir = tempfile::tempdir().unwrap();
            let options = workload::Options::tree(8);
            let host = cluster.host(node);
            let task = host.run(|| Workload::start(dir.path(), &options)).unwrap();
            Victim {
                task,
                job: format!("victim-{node}"),
                node,
                acknowledged: BTreeMap::new(),
                _dir: dir,
            }
        });
        let mut chaos = Self {
            victims: victims.collect(),
            cluster,
            random,
            dump: Duration::ZERO,
            restore: Duration::ZERO,
            refused: 0,
        };
        chaos.measure();
        chaos
    }

    /// Dumps and restores once without a fault.
    fn measure(&mut self) {
        let victim = &mut self.victims[0];
        let node = self.cluster.node(victim.node);
        let pid = victim.task.pid().to_string();
        let modified = victim.task.report().unwrap().generation;
        let began = Instant::now();
        node.run(&["dump", "--job", &victim.job, "--pid", &pid])
            .unwrap();
        self.dump = began.elapsed();
        victim.task.wait_until_gone().unwrap();
        victim.acknowledged.insert(1, modified);
        let began = Instant::now();
        node.run(&["restore", &victim.job]).unwrap();
        self.restore = began.elapsed();
        let (dump, restore) = (self.dump, self.restore);
        println!("a dump takes {dump:?}, a restore {restore:?}");
    }

    /// Makes a dump, and injects a fault into it.
    fn dump(&mut self, round: u64) -> Fault {
        let at = self.random.index(self.victims.len());
        let stays = self.random.below(3) > 0;
        let fault = Fault::any(&mut self.random);
        let moment = self.random.time(self.dump * 9 / 8);
        let victim = &mut self.victims[at];
        let modified = victim.task.modify().unwrap().generation;
        let pid = victim.task.pid().to_string();
        let mut arguments = vec!["dump", "--job", &victim.job, "--pid", &pid];
        if stays {
            arguments.push("--leave-running");
        }
        println!(
            "round {round}: dump of {} (stays: {stays}), {fault:?} after {moment:?}",
            victim.job
        );
        let dump = start(&self.cluster, victim.node, &arguments);
        std::thread::sleep(moment);
        fault.strike(&mut self.cluster);
        let ended = dump.wait_with_output().unwrap();
        let victim = &mut self.victims[at];
        if ended.status.success() {
            let answer: serde_json::Value = serde_json::from_slice(&ended.stdout).unwrap();
            let generation = answer["checkpoint"]["generation"].as_u64().unwrap();
            victim.acknowledged.insert(generation, modified);
            println!("round {round}: acknowledged {}@{generation}", victim.job);
            if !stays {
                victim.task.wait_until_gone().unwrap();
            }
        } else {
            self.refused += 1;
            println!(
                "round {round}: refused: {}",
                said(&ended).lines().last().unwrap_or_default()
            );
        }
        if stays || !ended.status.success() {
            assert!(
                victim.task.is_running(),
                "round {round}: {} died: {}",
                victim.job,
                said(&ended)
            );
            let state = victim.task.verify().unwrap();
            assert!(state.is_sound(), "round {round}: {state:?}");
        }
        fault
    }

    /// Restores a dumped task, and injects a fault.
    fn restore(&mut self, round: u64) -> Fault {
        let fault = Fault::any(&mut self.random);
        let dumped = self
            .victims
            .iter()
            .position(|victim| !victim.acknowledged.is_empty());
        let Some(at) = dumped else {
            fault.strike(&mut self.cluster);
            return fault;
        };
        let moment = self.random.time(self.restore * 9 / 8);
        let victim = &mut self.victims[at];
        let (&generation, &modified) = victim.acknowledged.last_key_value().unwrap();
        println!(
            "round {round}: restore of {}@{generation}, {fault:?} after {moment:?}",
            victim.job
        );
        victim.task.kill();
        let reference = format!("{}@{generation}", victim.job);
        let restore = start(&self.cluster, victim.node, &["restore", &reference]);
        std::thread::sleep(moment);
        fault.strike(&mut self.cluster);
        let ended = restore.wait_with_output().unwrap();
        let victim = &mut self.victims[at];
        if ended.status.success() {
            let state = victim.task.verify().unwrap();
            assert!(state.is_sound(), "round {round}: {state:?}");
            assert_eq!(state.generation, modified, "round {round}: {reference}");
        } else {
            println!(
                "round {round}: not restored: {}",
                said(&ended).lines().last().unwrap_or_default()
            );
            // What a restore that broke off has left.
            victim.task.kill();
        }
        fault
    }

    /// Has repair replace the copies of a dead node, and injects a fault.
    fn repair(&mut self, round: u64) -> Vec<Fault> {
        let dead = Fault::KillNode(self.random.index(NODES));
        let fault = Fault::any(&mut self.random);
        let moment = Duration::from_secs(2) + self.random.time(Duration::from_secs(4));
        println!("round {round}: {dead:?}, and in its repair {fault:?} after {moment:?}");
        dead.strike(&mut self.cluster);
        std::thread::sleep(moment);
        fault.strike(&mut self.cluster);
        std::thread::sleep(self.random.time(Duration::from_secs(2)));
        vec![fault, dead]
    }

    /// Checks, when everything runs again, that everything acknowledged is there.
    fn check(&mut self, round: u64) {
        self.cluster.wait_whole(NODES).unwrap();
        for victim in &mut self.victims {
            let node = self.cluster.node(victim.node);
            let there = listed(node, &victim.job);
            for generation in victim.acknowledged.keys() {
                assert!(
                    there.contains(generation),
                    "round {round}: {}@{generation} is lost; there are {there:?}",
                    victim.job
                );
            }
            // Sealed and listed, and the answer was lost: whole, but never acknowledged.
            for generation in there {
                if !victim.acknowledged.contains_key(&generation) {
                    println!(
                        "round {round}: {}@{generation} is there, not acknowledged",
                        victim.job
                    );
                    victim.remove(node, generation);
                }
            }
            while victim.acknowledged.len() > KEPT {
                let (oldest, _) = victim.acknowledged.pop_first().unwrap();
                victim.remove(node, oldest);
            }
            if !victim.task.is_running() {
                victim.thaw(&self.cluster, round);
            }
        }
    }

    /// Checks that every checkpoint has its copies, that every copy is good, and that every task can be restored
    /// from each.
    fn finish(mut self, rounds: u64) {
        let asked = self.cluster.node(0);
        process::wait_for("all copies to be there", WHOLE, || {
            let nodes = asked.json_patiently(&["node", "ls"])?;
            Ok((nodes["under_replicated"] == 0).then_some(()))
        })
        .unwrap_or_else(|error| {
            panic!("{error:#}: {:#}", asked.json(&["ls"]).unwrap());
        });
        for node in 0..NODES {
            let verified = self.cluster.node(node).json(&["verify"]).unwrap();
            assert_eq!(
                verified["damage"].as_array().map(Vec::len),
                Some(0),
                "{}: {verified}",
                name(node)
            );
        }
        for victim in &mut self.victims {
            victim.task.kill();
            for (generation, &modified) in &victim.acknowledged {
                let reference = format!("{}@{generation}", victim.job);
                let node = self.cluster.node(victim.node);
                node.run_patiently(&["restore", &reference]).unwrap();
                let state = victim.task.verify().unwrap();
                assert!(state.is_sound(), "{reference}: {state:?}");
                assert_eq!(state.generation, modified, "{reference}");
                victim.task.kill();
            }
        }
        println!("{} dumps of {rounds} rounds were refused", self.refused);
    }
}

impl Victim {
    /// Removes a checkpoint.
    fn remove(&self, node: &Daemon, generation: u64) {
        let reference = format!("{}@{generation}", self.job);
        let mut removed = node.try_run(&["rm", &reference, "--last"]).unwrap();
        if removed.status.code() == Some(UNAVAILABLE) {
            // Whether it is removed may not be known: then the next attempt may not find it any more.
            removed = node
                .try_run_patiently(&["rm", &reference, "--last"])
                .unwrap();
            if removed.status.code() == Some(NOT_FOUND) {
                return;
            }
        }
        assert!(
            removed.status.success(),
            "rm {reference}: {}",
            said(&removed)
        );
    }

    /// Restores the task.
    fn thaw(&mut self, cluster: &Cluster, round: u64) {
        let (generation, modified) = self.acknowledged.last_key_value().unwrap();
        let reference = format!("{}@{generation}", self.job);
        cluster
            .node(self.node)
            .run_patiently(&["restore", &reference])
            .unwrap();
        let state = self.task.verify().unwrap();
        assert!(state.is_sound(), "round {round}: {reference}: {state:?}");
        assert_eq!(state.generation, *modified, "round {round}: {reference}");
    }
}

fn listed(node: &Daemon, job: &str) -> Vec<u64> {
    let listed = node.json_patiently(&["ls"]).unwrap();
    let checkpoints = listed["checkpoints"].as_array().unwrap().iter();
    checkpoints
        .filter(|checkpoint| checkpoint["job"] == job)
        .map(|checkpoint| checkpoint["generation"].as_u64().unwrap())
        .collect()
}

#[test]
fn what_was_acknowledged_outlives_whatever_fails() {
    const TEST: &str = "what_was_acknowledged_outlives_whatever_fails";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let extra = ["--lease", "3s", "--deadline", "8s", "--repair-grace", "2s"];
    let setup = Setup {
        nodes: NODES,
        members: MEMBERS,
        region_mib: 512,
        extra: extra.map(str::to_owned).to_vec(),
        ..Setup::default()
    };
    let Some(cluster) = Cluster::for_test(TEST, setup).unwrap() else {
        return;
    };
    let rounds = from_env("PERMAFROST_CHAOS_ROUNDS").unwrap_or(100);
    let mut chaos = Chaos::new(cluster, Random::seeded());
    for round in 0..rounds {
        let faults = match chaos.random.below(10) {
            0..=5 => vec![chaos.dump(round)],
            6..=7 => vec![chaos.restore(round)],
            _ => chaos.repair(round),
        };
        for fault in faults {
            fault.heal(&mut chaos.cluster);
        }
        chaos.check(round);
    }
    let refused = chaos.refused;
    chaos.finish(rounds);
    assert!(rounds < 50 || refused > 0, "no fault hit a dump");
}
