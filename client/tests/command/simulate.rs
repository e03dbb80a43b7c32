//! Tests of `simulate`: its results as text, JSON, CSV and SVG, and what it says of traces that cannot be replayed.

use std::fs;

use crate::fake::{Daemon, assert_exit, json, stderr, stdout};

#[test]
fn results_are_those_of_the_paper_and_the_same_each_time() {
    let daemon = Daemon::start(|_| vec![]);
    let arguments = [
        "simulate",
        "--workload",
        "two-jobs",
        "--policy",
        "kill,wait",
        "--medium",
        "hdd",
        "--json",
    ];
    let first = daemon.run(&arguments);
    assert_exit(&first, 0);
    assert_eq!(daemon.run(&arguments).stdout, first.stdout);
    let results = json(&first.stdout);
    let mean = |at: usize, band: usize| results["outcomes"][at]["bands"][band]["mean_s"].as_f64();
    // Paper 000, Figure 4: a job of 60 s is killed after 30 s and begins again, or is waited for.
    assert_eq!(results["outcomes"][0]["policy"], "kill");
    assert_eq!((mean(0, 0), mean(0, 1)), (Some(150.0), Some(60.0)));
    assert_eq!(results["outcomes"][1]["policy"], "wait");
    assert_eq!((mean(1, 0), mean(1, 1)), (Some(60.0), Some(90.0)));
    let drawn = |seed: &str| {
        let workload = ["simulate", "--workload", "natjam", "--policy", "pr+random"];
        let output = daemon.run(&[&workload[..], &["--seed", seed, "--json"]].concat());
        assert_exit(&output, 0);
        output.stdout
    };
    assert_eq!(drawn("7"), drawn("7"));
    assert_ne!(drawn("7"), drawn("8"));
}

#[test]
fn a_figure_has_a_table_a_picture_and_results_that_are_the_same_each_time() {
    let daemon = Daemon::start(|_| vec![]);
    let made = |directory: &str| {
        let out = daemon.path().join(directory);
        let path = out.to_str().unwrap();
        let output = daemon.run(&["simulate", "--figure", "002-F10", "--out", path]);
        assert_exit(&output, 0);
        assert!(stdout(&output).starts_with("002-F10: "));
        let read = |name: &str| fs::read_to_string(out.join(name)).unwrap();
        ["002-F10.txt", "002-F10.csv", "002-F10.svg", "results.json"].map(read)
    };
    let [text, table, picture, results] = made("first");
    assert!(text.contains("(synthetic)"), "{text}");
    let mut lines = table.lines();
    assert_eq!(
        lines.next(),
        Some("figure,workload,what,unit,paper,ours,deviation")
    );
    // The first column with a comma in it is quoted: the numbers are the last three.
    let last: Vec<&str> = lines.next().unwrap().rsplit(',').take(3).collect();
    let number = |at: usize| last[at].parse::<f64>().unwrap();
    let (deviation, ours, paper) = (number(0), number(1), number(2));
    assert_eq!(paper, 175.0);
    assert!((ours - paper - deviation).abs() < 1e-9);
    assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"));
    assert_eq!(json(results.as_bytes())["figures"][0]["id"], "002-F10");
    assert_eq!(made("second"), [text, table, picture, results]);
}

#[test]
fn a_trace_that_cannot_be_replayed_is_refused_with_its_line_and_advice() {
    let daemon = Daemon::start(|_| vec![]);
    let good = "job0\t49\t49\t740773\t2339561\t627471\n";
    let replay = |text: &str| {
        let trace = daemon.path().join("trace.tsv");
        fs::write(&trace, format!("{good}{text}")).unwrap();
        let path = trace.to_str().unwrap();
        daemon.run(&[
            "simulate",
            "--workload",
            "fb2009",
            "--policy",
            "kill",
            "--trace",
            path,
        ])
    };
    assert_exit(&replay("job1\t101\t52\t0\t0\t0\n"), 0);
    for torn in [
        "job1\t101\t52\t17005",
        "job1\t-1\t52\t0\t0\t0\n",
        "job1\tNaN\t52\t0\t0\t0\n",
        "job1\t48\t0\t0\t0\t0\n",
        "job1\t50\t0\t99999999999999999\t0\t0\n",
    ] {
        let output = replay(torn);
        assert_exit(&output, 2);
        let message = stderr(&output);
        assert!(
            message.contains("trace.tsv, line 2: ") && message.contains("; "),
            "{torn:?}: {message}"
        );
    }
    let refused = |arguments: &[&str], what: &str| {
        let output = daemon.run(&[&["simulate"], arguments].concat());
        assert_ne!(output.status.code(), Some(0));
        assert!(stderr(&output).contains(what), "{}", stderr(&output));
    };
    refused(&["--workload", "fb2009"], "pass its path with --trace");
    refused(&["--figure", "000-F99"], "000-F3, 000-F4");
    refused(&["--policy", "mdf+llf"], "undo each other's decisions");
}
