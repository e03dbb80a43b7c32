//! Deciding by cost, against real daemons: what `permafrost nodes`, `cost`, `plan` and `reserve`, and the HTTP API
//! under them, say before anything was measured, after real dumps and restores, to those who ask nonsense, and in a
//! cluster that breaks.

#[path = "../common/mod.rs"]
mod common;

mod asking;
mod cluster;
mod places;
mod port;
mod shell;

use std::path::Path;
use std::time::Duration;

use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process;
use serde_json::Value;

/// Time limit for actions that happen by themselves, on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Starts a daemon that measures transfers, but does not probe.
fn quiet(work: &Path, extra: &[&str]) -> Daemon {
    let mut options = Options::default();
    options.extra.push("--probe-period=off".to_owned());
    options
        .extra
        .extend(extra.iter().map(|&argument| argument.to_owned()));
    let daemon = Daemon::start(work, &options).unwrap();
    await_first_look(&daemon);
    daemon
}

/// Waits until the API answers: the first snapshot comes a moment after the daemon is ready.
fn await_first_look(daemon: &Daemon) {
    let looked = process::wait_for("its first look around", LIMIT, || {
        Ok((daemon.try_run(&["nodes"])?.status.code() == Some(0)).then_some(()))
    });
    looked.unwrap();
}

/// Runs `permafrost --json`. Returns its exit code, its output and its error output, both parsed; `null` stands for
/// an empty one.
fn told(by: &Daemon, arguments: &[&str]) -> (i32, Value, Value) {
    let output = by.try_run(&[&["--json"], arguments].concat()).unwrap();
    let parsed = |bytes: &[u8]| {
        if bytes.is_empty() {
            return Value::Null;
        }
        let text = String::from_utf8_lossy(bytes);
        serde_json::from_slice(bytes).unwrap_or_else(|error| panic!("{error}: {text}"))
    };
    let code = output.status.code().expect("an exit code");
    (code, parsed(&output.stdout), parsed(&output.stderr))
}

/// Checks that the daemon's log contains no panic.
fn assert_no_panic(daemon: &Daemon) {
    let log = std::fs::read_to_string(daemon.log()).unwrap();
    let panics: Vec<_> = log
        .lines()
        .filter(|line| line.contains("panicked"))
        .collect();
    assert!(panics.is_empty(), "{panics:?}");
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value}"))
}

/// Checks that a figure was measured, and that its p95 is on the unfavourable side.
fn assert_measured(figure: &Value, bad_end_is_more: bool) {
    let [p50, p95] = ["p50", "p95"].map(|of| number(&figure[of]));
    assert!(p50 > 0.0 && p95 > 0.0, "{figure}");
    let right = if bad_end_is_more {
        p95 >= p50
    } else {
        p95 <= p50
    };
    assert!(right, "{figure}");
    assert!(figure["samples"].as_u64() >= Some(1), "{figure}");
}

fn assert_unknown(figure: &Value) {
    let why = figure["unknown"].as_str().unwrap_or_default();
    assert!(why.contains("has not been measured"), "{figure}");
    assert!(figure["p50"].is_null(), "{figure}");
}

/// Checks that the parts of a cost add up to its sums, as docs/api.md says, and that no p95 is below its median.
fn assert_adds_up(cost: &Value) {
    let parts = cost["parts"].as_array().expect("parts");
    assert!(!parts.is_empty(), "{cost}");
    let of = |part: &Value| part["part"].as_str().expect("a part's name").to_owned();
    for part in parts {
        assert!(number(&part["p95_s"]) >= number(&part["p50_s"]), "{part}");
    }
    // The victim works on during these.
    let working = ["pre_copy", "wait"];
    let away = [
        "write_queue",
        "dump_start",
        "pre_copy",
        "write",
        "replicate",
        "page_out",
        "wait",
    ];
    let back = [
        "start",
        "read_queue",
        "restore_start",
        "transfer",
        "read",
        "page_in",
    ];
    for (end, of_part) in [("p50", "p50_s"), ("p95", "p95_s")] {
        let sum = |counts: &dyn Fn(&str) -> bool| -> f64 {
            let counted = parts.iter().filter(|part| counts(&of(part)));
            counted.map(|part| number(&part[of_part])).sum()
        };
        let close = |named: &str, summed: f64| {
            let said = number(&cost[named][end]);
            assert!((said - summed).abs() < 1e-6, "{named} {end}: {cost}");
        };
        close("overhead_s", sum(&|part| !working.contains(&part)));
        close("delay_s", sum(&|part| away.contains(&part)));
        close("until_running_s", sum(&|part| back.contains(&part)));
    }
}

/// Returns the answer for one mechanism, of those for one task on one node.
fn way<'a>(answer: &'a Value, mechanism: &str) -> &'a Value {
    let answers = answer["answers"].as_array().expect("answers");
    let found = answers.iter().find(|one| one["mechanism"] == mechanism);
    found.unwrap_or_else(|| panic!("no {mechanism} in {answer}"))
}
