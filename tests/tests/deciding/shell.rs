//! One daemon, queried from a shell.

use permafrost_tests::criu;
use permafrost_tests::workload::{self, Workload};

use super::common::clustered::sealed_dump;
use super::common::pages;
use super::*;

/// Mechanisms that move bytes: `full_dump` and the others that write.
const DUMPS: [&str; 3] = ["incremental_dump", "full_dump", "pre_copied_dump"];

fn node(daemon: &Daemon) -> Value {
    let (code, answer, _) = told(daemon, &["nodes"]);
    assert_eq!(code, 0);
    let nodes = answer["nodes"].as_array().expect("nodes");
    assert_eq!(nodes.len(), 1, "{answer}");
    nodes[0].clone()
}

/// Checks the code of a refusal, both as exit code and as a word.
fn refused((code, _, error): &(i32, Value, Value), exit: i32, word: &str) -> String {
    assert_eq!(*code, exit, "{error}");
    assert_eq!(error["error"]["exit_code"], exit, "{error}");
    assert_eq!(error["error"]["code"], word, "{error}");
    error["error"]["message"].as_str().unwrap().to_owned()
}

#[test]
fn a_daemon_that_has_measured_nothing_says_so_and_makes_nothing_up() {
    let work = tempfile::tempdir().unwrap();
    let daemon = quiet(work.path(), &[]);
    let me = std::process::id().to_string();

    let tier = &node(&daemon)["tiers"][0];
    for figure in [
        "write_bytes_per_s",
        "read_bytes_per_s",
        "dump_start_s",
        "restore_start_s",
        "lazy_bytes_per_s",
        "lazy_start_s",
    ] {
        assert_unknown(&tier[figure]);
    }
    for class in tier["write_by_size"].as_array().unwrap() {
        assert_unknown(&class["bytes_per_s"]);
    }
    assert_eq!(tier["write_queue"]["running"], 0);
    assert!(tier["free_bytes"].as_u64() > Some(0), "{tier}");
    refused(&told(&daemon, &["nodes", "elsewhere"]), 3, "not-found");

    // Of all ways only the one that moves nothing has a cost.
    let (code, costs, _) = told(&daemon, &["cost", "--pid", &me, "--job", "train"]);
    assert_eq!(code, 0);
    assert!(way(&costs, "kill")["cost"].is_object());
    for dump in DUMPS {
        let way = way(&costs, dump);
        assert!(way["cost"].is_null(), "{way}");
        assert!(!way["unknown"].as_str().unwrap().is_empty(), "{way}");
    }
    let rollback = way(&costs, "rollback");
    assert!(rollback["unknown"].as_str().unwrap().contains("checkpoint"));
    let full = ["cost", "--pid", &me, "--mechanism", "full-dump"];
    let asked = told(&daemon, &full);
    let said = refused(&asked, 11, "unavailable");
    assert!(said.contains("has not been measured"), "{said}");
    assert_eq!(asked.1["answers"].as_array().map(Vec::len), Some(1));

    let (code, plan, _) = told(&daemon, &["plan", "preempt", "--pid", &me]);
    assert_eq!(
        (code, &plan["victims"][0]["mechanism"]),
        (0, &"kill".into())
    );
    // Whose progress nobody knows cannot be killed either.
    let tasks = work.path().join("tasks.json");
    std::fs::write(&tasks, r#"[{"id":"a","full_bytes":1000}]"#).unwrap();
    let file = tasks.to_str().unwrap();
    let asked = told(&daemon, &["plan", "preempt", "--candidates", file]);
    let said = refused(&asked, 11, "unavailable");
    assert!(said.contains("progress was not given"), "{said}");
    assert!(said.contains("has not been measured"), "{said}");
    assert_eq!(asked.1["undecided"][0]["task"], "a");

    let asked = told(&daemon, &["plan", "resume", "train"]);
    refused(&asked, 3, "not-found");
    assert_eq!(asked.1["answers"][0]["restart"], true);

    let place = ["plan", "place", "--size", "1M", "--copies", "1"];
    let asked = told(&daemon, &place);
    refused(&asked, 12, "not-enough");
    assert_eq!(asked.1["answers"][0]["unranked"], 1);
    assert!(
        asked.1["answers"][0]["nodes"]
            .as_array()
            .unwrap()
            .is_empty()
    );
    assert_no_panic(&daemon);
}

#[test]
fn where_to_resume_is_not_said_of_a_node_whose_figures_were_lost() {
    let work = tempfile::tempdir().unwrap();
    let daemon = quiet(work.path(), &[]);
    sealed_dump(&daemon, work.path(), "train", &pages(1, 500), || {});
    daemon.stop().unwrap();
    std::fs::remove_file(work.path().join("data/figures.json")).unwrap();
    let daemon = quiet(work.path(), &[]);
    let asked = told(&daemon, &["plan", "resume", "train"]);
    refused(&asked, 11, "unavailable");
    let answer = &asked.1["answers"][0];
    assert_eq!(answer["generation"], 1, "{answer}");
    let why = answer["unknown"][0]["why"].as_str().unwrap();
    assert!(why.contains("has not been measured"), "{why}");
    assert!(answer["nodes"].as_array().unwrap().is_empty());
}

#[test]
fn after_real_dumps_and_restores_costs_are_known_and_add_up() {
    const TEST: &str = "after_real_dumps_and_restores_costs_are_known_and_add_up";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let daemon = quiet(work.path(), &[]);
    let options = workload::Options {
        size_mib: 24,
        ..workload::Options::default()
    };
    let mut task = Workload::start(work.path(), &options).unwrap();
    let pid = task.pid().to_string();
    let mut worked_us = 0;
    for _ in 0..3 {
        task.modify().unwrap();
        daemon
            .json(&["dump", "--job", "train", "--pid", &pid])
            .unwrap();
        task.wait_until_gone().unwrap();
        daemon.run(&["restore", "train"]).unwrap();
        // /proc has forgotten what was done before the last restore.
        let origin = daemon.json(&["show", "train"]).unwrap()["manifest"]["origin"].clone();
        assert_eq!(origin["carried_us"], worked_us, "{origin}");
        worked_us = origin["worked_us"].as_u64().unwrap();
    }
    let worked_s = Duration::from_micros(worked_us).as_secs_f64();
    assert!(worked_s > 0.0);
    // As soon as the API has listed the last checkpoint. What it says is rounded.
    process::wait_for("the work of all runs to count", LIMIT, || {
        let (_, costs, _) = told(&daemon, &["cost", "--pid", &pid, "--job", "train"]);
        let lost = &way(&costs, "kill")["cost"]["overhead_s"]["p50"];
        Ok(lost.as_f64().filter(|lost| *lost > worked_s * 0.99))
    })
    .unwrap();

    let tier = &node(&daemon)["tiers"][0];
    assert_measured(&tier["write_bytes_per_s"], false);
    assert_measured(&tier["read_bytes_per_s"], false);
    assert_measured(&tier["dump_start_s"], true);
    assert_measured(&tier["restore_start_s"], true);

    let of_task = ["cost", "--pid", &pid, "--job", "train", "--progress", "10m"];
    let (code, costs, _) = told(&daemon, &of_task);
    assert_eq!(code, 0);
    for dump in ["incremental_dump", "full_dump", "rollback", "kill"] {
        assert_adds_up(&way(&costs, dump)["cost"]);
    }
    let kill = &way(&costs, "kill")["cost"];
    assert_eq!(kill["overhead_s"]["p50"], 600.0, "{kill}");
    let age = number(&way(&costs, "full_dump")["cost"]["age_s"]);
    assert!((0.0..60.0).contains(&age), "{age}");
    // It goes back to a moment ago, and not to its start.
    let rollback = number(&way(&costs, "rollback")["cost"]["overhead_s"]["p50"]);
    assert!(rollback < 60.0, "{rollback}");

    // An hour's work is not thrown away. Which way costs least depends on the machine.
    let of_task = format!("{pid}:train");
    let hour = [
        "plan",
        "preempt",
        "--pid",
        &of_task,
        "--progress",
        "1h",
        "--memory",
        "8M",
    ];
    let (code, plan, _) = told(&daemon, &hour);
    let victim = &plan["victims"][0];
    assert_eq!((code, &victim["task"]), (0, &pid.as_str().into()), "{plan}");
    assert_adds_up(&victim["cost"]);
    let ways = ["incremental_dump", "full_dump", "rollback"];
    let chosen = victim["mechanism"].as_str().unwrap();
    assert!(ways.contains(&chosen), "{victim}");
    let [score, next] = [&victim["score_s"], &victim["next"]["score_s"]].map(number);
    assert!(score <= next && next < 3600.0, "{victim}");
    assert!(victim["frees"]["memory_bytes"].as_u64() >= Some(8 << 20));
    // More than there is.
    let much = ["plan", "preempt", "--pid", &of_task, "--memory", "1G"];
    let asked = told(&daemon, &much);
    refused(&asked, 12, "not-enough");
    assert_eq!(asked.1["enough"], false);
    assert_eq!(asked.1["victims"].as_array().map(Vec::len), Some(1));
    // A job without a checkpoint has nothing to build on.
    let other = ["cost", "--pid", &pid, "--job", "other", "--progress", "1h"];
    let (_, costs, _) = told(&daemon, &other);
    for of_checkpoint in ["rollback", "incremental_dump"] {
        let way = way(&costs, of_checkpoint);
        assert!(way["cost"].is_null(), "{way}");
        let why = way["unknown"].as_str().unwrap();
        assert!(why.contains("no checkpoint"), "{way}");
    }
    assert_adds_up(&way(&costs, "full_dump")["cost"]);

    let (code, resume, _) = told(&daemon, &["plan", "resume", "train"]);
    let answer = &resume["answers"][0];
    assert_eq!((code, &answer["generation"]), (0, &3.into()), "{resume}");
    assert!(answer["size_bytes"].as_u64() >= Some(24 << 20), "{answer}");
    assert_eq!(answer["nodes"][0]["local"], true);
    assert_adds_up(&answer["nodes"][0]["cost"]);
    let asked = told(&daemon, &["plan", "resume", "train", "other"]);
    refused(&asked, 3, "not-found");
    assert_eq!(asked.1["answers"].as_array().map(Vec::len), Some(2));

    let place = |size, copies| {
        let place = ["plan", "place", "--size", size, "--copies", copies];
        told(&daemon, &place)
    };
    let (code, placed, _) = place("24M", "1");
    let on = &placed["answers"][0]["nodes"][0];
    assert_eq!((code, &on["durable"]), (0, &true.into()), "{placed}");
    assert!(number(&on["arrives_in_s"]) > 0.0);
    refused(&place("24M", "2"), 12, "not-enough");
    refused(&place("10G", "1"), 12, "not-enough");
    assert!(task.verify().unwrap().is_sound());
    assert_no_panic(&daemon);
}

#[test]
fn a_simulation_against_a_daemon_has_the_decisions_of_the_library() {
    let work = tempfile::tempdir().unwrap();
    let daemon = quiet(work.path(), &[]);
    let against = |workload: &str, policies: &str, media: &str| {
        let line = [
            "simulate",
            "--workload",
            workload,
            "--policy",
            policies,
            "--medium",
            media,
            "--against",
            "socket",
        ];
        let (code, results, error) = told(&daemon, &line);
        assert_eq!(code, 0, "{error}");
        assert_eq!(results["against"]["different"], 0, "{results}");
        results["against"]["asked"].as_u64().unwrap()
    };
    let small = against("two-jobs", "kill,basic,li2015,adaptive", "hdd,ssd,nvm");
    assert_eq!(small, 12);
    let large = against("yarn", "basic,li2015+local,adaptive", "ssd");
    assert!(large > 1000, "{large}");
}
