//! `permafrost bench`: tiers that are emulated, measured with the real CRIU; a run that is cut off and goes on; a node.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::{binaries, criu, process};
use rustix::process::Signal;
use serde_json::Value;

/// More than a process has in zero pages, and a device makes up for.
const MIB: f64 = 1_048_576.0;

/// Returns a small benchmark: 8 MiB, and a device that would take 0.4 s for them.
fn bench(tier: &Path, out: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(binaries::path("permafrost").unwrap());
    command
        .args(["--json", "bench", "tiers", "--sizes", "8M", "--dirty", "10"])
        .args(["--copies", "local", "--emulate", "slow=20M:20M:0"])
        .arg(format!("--tier=slow={}", tier.display()))
        .arg("--out")
        .arg(out)
        .args(more)
        .stdin(Stdio::null());
    if let Ok(criu) = criu::find() {
        command.env(criu::CRIU, criu.path);
    }
    command
}

fn memory_dir() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        tempfile::tempdir_in(memory).unwrap()
    } else {
        tempfile::tempdir().unwrap()
    }
}

fn json(output: &Output) -> Value {
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).unwrap()
}

fn journal_lines(out: &Path) -> usize {
    let journal = fs::read_to_string(out.join("journal.jsonl")).unwrap_or_default();
    journal.lines().count()
}

/// Waits until no process of a benchmark that used `tier` runs any more.
fn wait_until_quiet(tier: &Path) {
    let tier = tier.to_str().unwrap();
    process::wait_for(
        "the benchmark's node to end",
        Duration::from_secs(30),
        || {
            let processes = fs::read_dir("/proc").unwrap().flatten();
            let left = processes
                .filter_map(|entry| fs::read(entry.path().join("cmdline")).ok())
                .any(|line| {
                    let line = String::from_utf8_lossy(&line);
                    line.contains("permafrostd") && line.contains(tier)
                });
            Ok((!left).then_some(()))
        },
    )
    .unwrap();
}

#[test]
fn an_emulated_tier_is_measured_and_says_so_everywhere() {
    if criu::for_test("an_emulated_tier_is_measured_and_says_so_everywhere").is_none() {
        return;
    }
    let (tier, out) = (memory_dir(), tempfile::tempdir().unwrap());
    let output = bench(tier.path(), out.path(), &["--runs", "1"])
        .output()
        .unwrap();
    let results = json(&output);
    assert_eq!(results["emulated"], true);
    let measurements = results["measurements"].as_array().unwrap();
    assert_eq!(measurements.len(), 2, "{results}");
    for measured in measurements {
        assert_eq!(measured["emulated"], true);
        assert_eq!(measured["verified"], true);
        let medium = measured["medium"].as_str().unwrap();
        assert!(
            medium.starts_with("emulated device (20.0 MB/s write, 20.0 MB/s read) over"),
            "{medium}"
        );
        let memory_bytes = measured["memory_bytes"].as_f64().unwrap();
        assert!(memory_bytes >= f64::from(8 << 20));
        // All of it but zero pages is read at a resume, and the device does not do that faster.
        let least_s = (memory_bytes - MIB) / 20e6;
        assert!(
            measured["resume_s"].as_f64().unwrap() >= least_s,
            "{measured}"
        );
    }
    let (full, second) = (&measurements[0], &measurements[1]);
    let least_s = (full["stored_bytes"].as_f64().unwrap() - MIB) / 20e6;
    assert!(full["suspend_s"].as_f64().unwrap() >= least_s, "{full}");
    assert!(full["dirty_percent"].is_null());
    assert_eq!(second["dirty_percent"], 10);
    // A tenth of the pages, and what the process itself wrote.
    let stored = |of: &Value| of["stored_bytes"].as_u64().unwrap();
    assert!(stored(second) * 4 < stored(full), "{second}");

    let read = |name: &str| fs::read_to_string(out.path().join(name)).unwrap();
    let on_disk: Value = serde_json::from_str(&read("results.json")).unwrap();
    assert_eq!(on_disk["medians"], results["medians"]);
    let csv = read("results.csv");
    assert_eq!(csv.lines().count(), 3);
    assert!(csv.lines().skip(1).all(|line| line.contains("emulated")));
    for picture in ["suspend-resume-local.svg", "second-dump-local.svg"] {
        assert!(read(picture).contains("slow (emulated)"), "{picture}");
    }
    // Nothing is left on the tier.
    assert_eq!(fs::read_dir(tier.path()).unwrap().count(), 0);
}

/// Runs a benchmark until its first run is finished, and then sends it a signal.
fn cut_off(tier: &Path, out: &Path, signal: Signal) -> Child {
    let mut child = bench(tier, out, &["--runs", "4"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let before = journal_lines(out).max(1);
    process::wait_for("a run to be measured", Duration::from_secs(60), || {
        assert!(child.try_wait().unwrap().is_none(), "ended too early");
        Ok((journal_lines(out) > before).then_some(()))
    })
    .unwrap();
    process::signal(child.id(), signal).unwrap();
    child
}

#[test]
fn a_run_that_was_cut_off_goes_on_where_it_stopped() {
    if criu::for_test("a_run_that_was_cut_off_goes_on_where_it_stopped").is_none() {
        return;
    }
    let (tier, out) = (memory_dir(), tempfile::tempdir().unwrap());
    let killed = cut_off(tier.path(), out.path(), Signal::KILL)
        .wait()
        .unwrap();
    assert!(!killed.success());
    // Its node goes with it, by the kernel's hand.
    wait_until_quiet(tier.path());
    let journal = fs::read_to_string(out.path().join("journal.jsonl")).unwrap();

    let interrupted = cut_off(tier.path(), out.path(), Signal::INT)
        .wait()
        .unwrap();
    assert_eq!(interrupted.code(), Some(130));
    assert_eq!(fs::read_dir(tier.path()).unwrap().count(), 0);

    // Other parameters are another run.
    let other = bench(tier.path(), out.path(), &["--runs", "5"])
        .output()
        .unwrap();
    assert_eq!(other.status.code(), Some(4));
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(said.contains("runs 5 here, 4 there"), "{said}");

    let results = json(
        &bench(tier.path(), out.path(), &["--runs", "4"])
            .output()
            .unwrap(),
    );
    let measurements = results["measurements"].as_array().unwrap();
    let mut runs: Vec<_> = measurements.iter().map(|m| m["run"].as_u64()).collect();
    runs.dedup();
    assert_eq!(runs, [Some(1), Some(2), Some(3), Some(4)]);
    assert_eq!(results["medians"][0]["runs"], 4);
    // What was measured before it was killed was not measured again.
    let whole = fs::read_to_string(out.path().join("journal.jsonl")).unwrap();
    assert!(whole.starts_with(&journal));
}

#[test]
fn a_node_is_measured_and_left_as_it_was() {
    if criu::for_test("a_node_is_measured_and_left_as_it_was").is_none() {
        return;
    }
    let work = memory_dir();
    let options = Options {
        extra: vec!["--emulate-medium".to_owned(), "50M:50M:0".to_owned()],
        ..Options::default()
    };
    let daemon = Daemon::start(work.path(), &options).unwrap();
    let status = daemon.run(&["status"]).unwrap();
    assert!(
        status.contains("emulated device (50.0 MB/s write"),
        "{status}"
    );
    let figures = work.path().join("figures.json");
    let report = daemon
        .json(&[
            "bench",
            "node",
            "--sizes",
            "8M,32M",
            "--runs",
            "2",
            "--out",
            figures.to_str().unwrap(),
        ])
        .unwrap();
    assert_eq!(report["emulated"], true);
    assert_eq!(report["samples"].as_array().unwrap().len(), 4);
    for sample in report["samples"].as_array().unwrap() {
        let bytes = sample["bytes"].as_f64().unwrap();
        assert!(sample["suspend_s"].as_f64().unwrap() >= (bytes - MIB) / 50e6);
    }
    assert_eq!(report["figures"]["write"].as_array().unwrap().len(), 2);
    let written: Value = serde_json::from_slice(&fs::read(figures).unwrap()).unwrap();
    assert_eq!(written, report["figures"]);
    // The node knows them.
    let nodes = daemon.json(&["nodes"]).unwrap();
    let tier = &nodes["nodes"][0]["tiers"][0];
    assert!(
        tier["write_bytes_per_s"]["p50"].as_f64().unwrap() > 0.0,
        "{nodes}"
    );
    assert!(tier["emulated"].is_string(), "{nodes}");
    let left = daemon.json(&["ls"]).unwrap();
    assert_eq!(left["checkpoints"].as_array().map(Vec::len), Some(0));
}
