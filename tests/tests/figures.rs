//! Measurements that a daemon makes of its dumps, restores and links, and the predictions that it derives from them.

mod common;

use common::clustered::{LONG, Task, dump, sealed_dump};
use common::*;
use permafrost_tests::cluster::{Cluster, Setup};
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::workload::{self, Workload};
use permafrost_tests::{criu, process};

/// Returns one of the metrics, or `None` if it is unknown.
fn number(numbers: &str, name: &str) -> Option<f64> {
    let mut lines = numbers.lines();
    let line = lines.find_map(|line| line.strip_prefix(&format!("permafrost_{name} ")))?;
    line.parse().ok()
}

fn measuring() -> Options {
    Options {
        extra: ["--listen-metrics", "127.0.0.1:0"]
            .map(str::to_owned)
            .to_vec(),
        ..Options::default()
    }
}

const WRITE: &str = "bandwidth_bytes_per_second{direction=\"write\",quantile=\"0.5\"}";
const COMPARE: &str = "bandwidth_bytes_per_second{direction=\"compare\",quantile=\"0.5\"}";
const READ: &str = "bandwidth_bytes_per_second{direction=\"read\",quantile=\"0.5\"}";
const DUMP_START: &str = "start_seconds{of=\"dump\",quantile=\"0.5\"}";
const RESTORE_START: &str = "start_seconds{of=\"restore\",quantile=\"0.5\"}";

#[test]
fn dumps_feed_the_figures_which_outlast_the_daemon() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &measuring()).unwrap();
    let told = daemon.scrape().unwrap();
    assert_eq!(number(&told, WRITE), None, "nothing is made up");
    assert_eq!(number(&told, "measurements_total"), Some(0.0));

    let memory = pages(3, 2000);
    sealed_dump(&daemon, work.path(), "job", &memory, || {});
    let told = daemon.scrape().unwrap();
    let write = number(&told, WRITE).expect("a bandwidth");
    assert!((1e3..1e12).contains(&write), "{write}");
    assert!(number(&told, DUMP_START).is_some() && number(&told, COMPARE).is_none());
    // The second is compared with the first. What it stores and moves was foreseen by that.
    sealed_dump(&daemon, work.path(), "job", &memory, || {});
    sealed_dump(&daemon, work.path(), "job", &memory, || {});
    let told = daemon.scrape().unwrap();
    assert!(number(&told, COMPARE).is_some());
    let moved = "prediction_error_ratio{of=\"moved_bytes\",quantile=\"0.95\"}";
    assert!(number(&told, moved).expect("compared") < 0.01, "{told}");
    assert_eq!(
        number(&told, "predictions_compared{of=\"dump_time\"}"),
        Some(2.0)
    );
    assert!(exported_pages(&daemon, work.path(), "job") == memory);
    let told = daemon.scrape().unwrap();
    assert!(number(&told, READ).is_some());

    daemon.stop().unwrap();
    let daemon = Daemon::start(work.path(), &measuring()).unwrap();
    let told = daemon.scrape().unwrap();
    for figure in [WRITE, COMPARE, READ, DUMP_START] {
        assert!(number(&told, figure).is_some(), "{figure} in {told}");
    }
    assert_eq!(number(&told, "measurements_total"), Some(0.0));
}

#[test]
fn figures_that_were_damaged_are_measured_anew() {
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &measuring()).unwrap();
    daemon.stop().unwrap();
    let path = work.path().join("data/figures.json");
    std::fs::write(&path, "{\"v\":1,").unwrap();
    let daemon = Daemon::start(work.path(), &measuring()).unwrap();
    assert_eq!(number(&daemon.scrape().unwrap(), WRITE), None);
    let log = std::fs::read_to_string(work.path().join("permafrostd.log")).unwrap();
    assert!(log.contains("figures of the last run"), "{log}");
    sealed_dump(&daemon, work.path(), "job", &pages(1, 100), || {});
    assert!(number(&daemon.scrape().unwrap(), WRITE).is_some());
}

#[test]
fn a_fresh_daemon_soon_knows_its_medium_without_a_restore() {
    let work = tempfile::tempdir().unwrap();
    let mut options = measuring();
    options.extra.push("--probe-period=5m".to_owned());
    let daemon = Daemon::start(work.path(), &options).unwrap();
    let known = |figure| {
        let number = || Ok(number(&daemon.scrape()?, figure));
        process::wait_for("a probe", LONG, number).unwrap()
    };
    assert!(known(WRITE) > 1e6);
    assert_eq!(number(&daemon.scrape().unwrap(), READ), None);
    sealed_dump(&daemon, work.path(), "job", &pages(3, 2000), || {});
    assert!(known(READ) > 1e6);
}

#[test]
fn an_idle_daemon_probes_its_medium() {
    let work = tempfile::tempdir().unwrap();
    let mut options = measuring();
    options.extra.push("--probe-period=1s".to_owned());
    let daemon = Daemon::start(work.path(), &options).unwrap();
    let free = || daemon.json(&["status"]).unwrap()["regions"][0]["free_bytes"].clone();
    let before = free();
    let probed = process::wait_for("a probe", LONG, || Ok(number(&daemon.scrape()?, WRITE)));
    assert!(probed.unwrap() > 1e6);
    assert_eq!(free(), before, "nothing is left of it");
}

#[test]
fn a_real_dump_says_what_the_task_had_in_memory_and_is_foreseen() {
    const TEST: &str = "a_real_dump_says_what_the_task_had_in_memory_and_is_foreseen";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(work.path(), &measuring()).unwrap();
    let size_mib = 24;
    let options = workload::Options {
        size_mib,
        ..workload::Options::default()
    };
    let mut task = Workload::start(work.path(), &options).unwrap();
    for _ in 0..4 {
        task.modify().unwrap();
        let pid = task.pid().to_string();
        daemon
            .json(&["dump", "--job", "job", "--pid", &pid])
            .unwrap();
        task.wait_until_gone().unwrap();
        daemon.run(&["restore", "job"]).unwrap();
    }
    let shown = daemon.json(&["show", "job"]).unwrap();
    let origin = &shown["manifest"]["origin"];
    let resident = origin["resident_bytes"].as_u64().unwrap();
    assert!(
        (size_mib << 20..(2 * size_mib) << 20).contains(&resident),
        "{origin}"
    );
    // As the kernel has it, cut after 15 bytes.
    assert_eq!(origin["program"], "permafrost-work", "{origin}");
    let told = daemon.scrape().unwrap();
    for figure in [WRITE, COMPARE, READ, DUMP_START, RESTORE_START] {
        assert!(number(&told, figure).is_some(), "{figure} in {told}");
    }
    // CRIU was started, and the task stopped, in that time.
    assert!(number(&told, DUMP_START).unwrap() > 0.001);
    // A task of the same memory brings the same, but for a few pages of its own work.
    let moved = "prediction_error_ratio{of=\"moved_bytes\",quantile=\"0.5\"}";
    assert!(number(&told, moved).expect("compared") < 0.2, "{told}");
    assert_eq!(
        number(&told, "predictions_compared{of=\"restore_time\"}"),
        Some(3.0),
        "{told}"
    );
}

#[test]
fn links_between_nodes_are_measured_by_copies_and_by_probes() {
    const TEST: &str = "links_between_nodes_are_measured_by_copies_and_by_probes";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let setup = Setup {
        nodes: 2,
        members: 1,
        extra: ["--listen-metrics=127.0.0.1:0", "--probe-period=2s"]
            .map(str::to_owned)
            .to_vec(),
        ..Setup::default()
    };
    let Some(cluster) = Cluster::for_test(TEST, setup).unwrap() else {
        return;
    };
    let told = |node: usize| {
        cluster
            .host(node)
            .run(|| cluster.node(node).scrape())
            .unwrap()
    };
    let link = |node: usize, to: &str| {
        let name = format!("link_bytes_per_second{{node=\"{to}\",quantile=\"0.5\"}}");
        number(&told(node), &name)
    };
    let names: Vec<String> = (0..2).map(permafrost_tests::cluster::name).collect();
    // The one that takes no dump is told of the link by a probe.
    let probed = process::wait_for("a probe of the link", LONG, || Ok(link(1, &names[0])));
    assert!(probed.unwrap() > 1e5);
    let mut task = Task::start(&cluster, 0, 32);
    let dumped = dump(cluster.node(0), &mut task, "job");
    assert_eq!(dumped["nodes"].as_array().map(Vec::len), Some(2));
    assert!(link(0, &names[1]).is_some());
    assert!(number(&told(0), WRITE).is_some());
    // Nothing is left of the probes.
    let held = cluster.node(1).json(&["ls"]).unwrap();
    assert_eq!(held["checkpoints"].as_array().map(Vec::len), Some(1));
}
