//! `kill -9` of `permafrostd` at random moments of real dumps: what was acknowledged is there afterwards, what was
//! not is there whole or not at all, and the task lives.
//!
//! `PERMAFROST_KILL_ROUNDS` sets the number of rounds (default 50), `PERMAFROST_SEED` repeats a run.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::Duration;

use permafrost_tests::criu;
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::random::{Random, from_env};
use permafrost_tests::workload::{self, Workload};

fn generations(daemon: &Daemon) -> Vec<u64> {
    let listed = daemon.json(&["ls"]).unwrap();
    listed["checkpoints"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["generation"].as_u64().unwrap())
        .collect()
}

#[test]
fn nothing_acknowledged_is_lost_and_nothing_is_half_there() {
    if criu::for_test("nothing_acknowledged_is_lost_and_nothing_is_half_there").is_none() {
        return;
    }
    let rounds = from_env("PERMAFROST_KILL_ROUNDS").unwrap_or(50);
    let mut random = Random::seeded();
    let work = tempfile::tempdir().unwrap();
    let mut workload = Workload::start(work.path(), &workload::Options::tree(8)).unwrap();
    let pid = workload.pid().to_string();
    // Generation of the checkpoint → how often the workload had been modified.
    let mut acknowledged = BTreeMap::new();
    let mut longest = Duration::from_millis(300);
    let mut killed_before_the_answer = 0;

    for round in 0..rounds {
        let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
        let modified = workload.modify().unwrap().generation;
        let mut dump = daemon.command().unwrap();
        let dump = dump.args([
            "--json",
            "dump",
            "--leave-running",
            "--job",
            "victim",
            "--pid",
            &pid,
        ]);
        let started = std::time::Instant::now();
        let dump = dump
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let moment = random.time(longest);
        std::thread::sleep(moment);
        daemon.kill().unwrap();
        let ended = dump.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stdout).into_owned();
        if ended.status.success() {
            let answer: serde_json::Value = serde_json::from_str(&said).unwrap();
            acknowledged.insert(
                answer["checkpoint"]["generation"].as_u64().unwrap(),
                modified,
            );
            // So that about half the kills come before the end, whatever the machine's speed.
            longest = (started.elapsed() + moment * 2) / 2;
        } else {
            killed_before_the_answer += 1;
            longest += longest / 10;
        }

        assert!(workload.is_running(), "round {round}: the task died");
        assert!(
            workload.verify().unwrap().is_sound(),
            "round {round}: the task was harmed"
        );
        let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
        let there = generations(&daemon);
        for generation in acknowledged.keys() {
            assert!(
                there.contains(generation),
                "round {round}: {generation} is lost; there are {there:?}"
            );
        }
        // Sealed in the moment between the seal and its answer: whole, but never acknowledged.
        let surplus = there
            .iter()
            .filter(|generation| !acknowledged.contains_key(generation))
            .count();
        assert!(
            surplus <= 1,
            "round {round}: {there:?} against {acknowledged:?}"
        );
        for &generation in &there {
            acknowledged.entry(generation).or_insert(modified);
        }
        let verified = daemon.json(&["verify"]).unwrap();
        assert_eq!(
            verified["damage"].as_array().map(Vec::len),
            Some(0),
            "round {round}: {verified}"
        );
        while acknowledged.len() > 4 {
            let (oldest, _) = acknowledged.pop_first().unwrap();
            daemon.run(&["rm", &format!("victim@{oldest}")]).unwrap();
        }
        daemon.kill().unwrap();
    }

    println!("{killed_before_the_answer} of {rounds} kills came before the dump's answer");
    assert!(
        rounds < 20 || killed_before_the_answer > rounds / 10,
        "hardly a kill hit a dump"
    );
    assert!(
        rounds < 20 || killed_before_the_answer < rounds - rounds / 10,
        "hardly a dump was acknowledged"
    );
    workload.kill();
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    for (generation, modified) in acknowledged {
        daemon
            .run(&["restore", &format!("victim@{generation}")])
            .unwrap();
        let back = workload.verify().unwrap();
        assert!(back.is_sound(), "generation {generation}: {back:?}");
        assert_eq!(back.generation, modified, "generation {generation}");
        workload.kill();
    }
}
