//! Three nodes: each answers for all, one dies, one reports false figures.

use std::process::Command;

use permafrost_tests::cluster::{Cluster, Setup, name};
use permafrost_tests::{criu, etcd};
use serde_json::json;

use super::common::clustered::{Task, dump};
use super::*;

fn cluster(test: &str) -> Option<Cluster> {
    let setup = Setup {
        members: 1,
        extra: ["--probe-period=off", "--lease=2s"]
            .map(str::to_owned)
            .to_vec(),
        ..Setup::default()
    };
    let cluster = Cluster::for_test(test, setup).unwrap()?;
    for node in 0..3 {
        await_first_look(cluster.node(node));
    }
    Some(cluster)
}

/// Returns a node as another one reports it.
fn seen(by: &Daemon, node: &str) -> Value {
    let (code, answer, error) = told(by, &["nodes", node]);
    assert_eq!(code, 0, "{error}");
    answer["nodes"][0].clone()
}

/// Waits until the report of a node meets a condition.
fn wait_seen(by: &Daemon, node: &str, what: &str, so: impl Fn(&Value) -> bool) -> Value {
    let mut last = Value::Null;
    let found = process::wait_for(what, LIMIT, || {
        last = seen(by, node);
        Ok(so(&last).then_some(()))
    });
    found.unwrap_or_else(|error| panic!("{error}: {last:#}"));
    last
}

fn write(node: &Value) -> &Value {
    &node["tiers"][0]["write_bytes_per_s"]
}

/// Checks that the plans which precede a decision return their documented exit codes, whichever nodes are live.
fn assert_plans_go_on(by: &Daemon, job: &str) {
    let (code, resume, error) = told(by, &["plan", "resume", job]);
    assert_eq!(code, 0, "{error} {resume}");
    assert_adds_up(&resume["answers"][0]["nodes"][0]["cost"]);
    let (code, placed, error) = told(by, &["plan", "place", "--size", "8M", "--copies", "3"]);
    assert!([0, 12].contains(&code), "{error} {placed}");
    for node in 0..3 {
        let task = json!([{"id": "a", "node": name(node), "job": job, "progress_s": 3600,
            "resident_bytes": 8 << 20}]);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), task.to_string()).unwrap();
        let file = file.path().to_str().unwrap();
        let (code, plan, error) = told(by, &["plan", "preempt", "--candidates", file]);
        assert_eq!(code, 0, "{error} {plan}");
        let victim = &plan["victims"][0];
        assert_adds_up(&victim["cost"]);
        assert!(number(&victim["score_s"]) <= 3600.0, "{victim}");
    }
}

/// Makes a dump and a restore on each node, so that each has figures.
fn measure_all(cluster: &Cluster) {
    for node in 0..3 {
        let mut task = Task::start(cluster, node, 16);
        let job = format!("of-{node}");
        for _ in 0..2 {
            dump(cluster.node(node), &mut task, &job);
            cluster.node(node).run(&["restore", &job]).unwrap();
        }
        task.kill();
    }
    for by in 0..3 {
        let by = cluster.node(by);
        for node in 0..3 {
            wait_seen(by, &name(node), "figures", |seen| {
                write(seen)["p50"].is_f64()
            });
            // What others have dumped is listed every few seconds.
            let job = format!("of-{node}@2");
            let listed = process::wait_for("the checkpoint of another node", LIMIT, || {
                let (code, ..) = told(by, &["plan", "resume", &job]);
                Ok((code == 0).then_some(()))
            });
            listed.unwrap();
        }
    }
}

#[test]
fn each_answers_for_all_and_a_dead_ones_figures_are_not_gone_by() {
    const TEST: &str = "each_answers_for_all_and_a_dead_ones_figures_are_not_gone_by";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let Some(mut cluster) = cluster(TEST) else {
        return;
    };
    measure_all(&cluster);
    for by in 0..3 {
        let (_, answer, _) = told(cluster.node(by), &["nodes"]);
        assert_eq!(answer["answered_by"], name(by));
        let nodes = answer["nodes"].as_array().unwrap();
        let names: Vec<_> = nodes.iter().map(|node| &node["name"]).collect();
        assert_eq!(names, ["node-0", "node-1", "node-2"]);
        for node in nodes {
            assert_eq!((&node["live"], &node["doubts"]), (&true.into(), &json!([])));
            assert_measured(write(node), false);
            assert!(number(&node["age_s"]) < 60.0, "{node}");
        }
        assert_plans_go_on(cluster.node(by), "of-2");
    }
    let before = write(&seen(cluster.node(0), "node-2")).clone();

    // A crash loses the figures of a few seconds, not those of a whole run.
    let kept = cluster.region(2).with_file_name("figures.json");
    process::wait_for("figures that are written down", LIMIT, || {
        let text = std::fs::read_to_string(&kept).unwrap_or_default();
        Ok(["\"write\"", "\"read\""]
            .iter()
            .all(|of| text.contains(of))
            .then_some(()))
    })
    .unwrap();
    cluster.kill(2).unwrap();
    for by in 0..2 {
        let by = cluster.node(by);
        let dead = wait_seen(by, "node-2", "its death", |node| node["live"] == false);
        assert_eq!(write(&dead)["unknown"], "the node is not there");
        let unseen = number(&dead["age_s"]);
        assert!((0.0..300.0).contains(&unseen), "{dead}");
        // Its copies are elsewhere, too.
        assert_plans_go_on(by, "of-2");
        let placed = told(by, &["plan", "place", "--size", "8M", "--copies", "3"]);
        assert_eq!(placed.0, 12, "{placed:?}");
        let on = placed.1["answers"][0]["nodes"].to_string();
        assert!(!on.contains("node-2"), "{on}");
        let resume = told(by, &["plan", "resume", "of-2", "--node", "node-2"]);
        assert_eq!(resume.0, 11, "{resume:?}");
        let there = &resume.1["answers"][0]["unknown"][0];
        assert_eq!(there["why"], "the node is not there", "{resume:?}");
    }

    cluster.restart(2).unwrap();
    for by in 0..3 {
        await_first_look(cluster.node(by));
        let back = wait_seen(cluster.node(by), "node-2", "its return", |node| {
            node["live"] == true && write(node)["p50"].is_f64()
        });
        // It has not moved anything since.
        let [was, is] = [&before, write(&back)].map(|figure| number(&figure["p50"]));
        assert!((is / was - 1.0).abs() < 0.2, "{was} {is}");
        assert!(number(&write(&back)["age_s"]) < 300.0, "{back}");
        assert_plans_go_on(cluster.node(by), "of-2");
    }
    for node in 0..3 {
        assert_no_panic(cluster.node(node));
    }
}

/// Runs etcd's own client on the registry.
fn etcdctl(cluster: &Cluster, arguments: &[&str]) -> String {
    let [address] = &cluster.etcd.addresses()[..] else {
        panic!("one member");
    };
    let host = cluster.host(0);
    let output = host
        .run(|| {
            Ok(Command::new(etcd::client())
                .args(["--endpoints", address])
                .args(arguments)
                .output()?)
        })
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_node_that_lies_is_not_believed() {
    const TEST: &str = "a_node_that_lies_is_not_believed";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let Some(mut cluster) = cluster(TEST) else {
        return;
    };
    measure_all(&cluster);
    const KEY: &str = "/permafrost/v1/nodes/node-2";
    let honest = etcdctl(&cluster, &["get", "--print-value-only", KEY]);
    let honest: Value = serde_json::from_str(&honest).unwrap();
    let was = number(&write(&seen(cluster.node(0), "node-2"))["p50"]);
    cluster.kill(2).unwrap();
    for by in 0..2 {
        wait_seen(cluster.node(by), "node-2", "its death", |node| {
            node["live"] == false
        });
    }
    // From now on somebody else speaks for it.
    let claim = |change: &dyn Fn(&mut Value)| {
        let mut value = honest.clone();
        change(&mut value["facts"]["figures"]);
        etcdctl(&cluster, &["put", KEY, &value.to_string()]);
    };
    // Each lie is told from the one before.
    let honest_again = |sequence: u64| {
        claim(&|figures| figures["sequence"] = json!(sequence));
        for by in 0..2 {
            wait_seen(cluster.node(by), "node-2", "an honest report", |node| {
                node["doubts"] == json!([])
            });
        }
    };
    let doubted = |word: &str| {
        for by in 0..2 {
            let by = cluster.node(by);
            let seen = wait_seen(by, "node-2", word, |node| {
                node["doubts"].to_string().contains(word)
            });
            assert_eq!(seen["live"], true);
            assert_plans_go_on(by, "of-2");
        }
    };
    // Of its figures each that is known.
    fn set(figures: &mut Value, to: &Value) {
        match figures {
            Value::Object(fields) => {
                for (name, value) in fields {
                    if name == "p50" || name == "p95" {
                        value.clone_from(to);
                    } else {
                        set(value, to);
                    }
                }
            }
            Value::Array(values) => values.iter_mut().for_each(|value| set(value, to)),
            _ => {}
        }
    }
    for (lie, at) in [json!(0), json!(1e18), json!(-1), json!("fast")]
        .iter()
        .zip(1000..)
    {
        honest_again(at);
        claim(&|figures| {
            figures["sequence"] = json!(at + 1);
            set(&mut figures["write"], lie);
        });
        doubted("bandwidth for writing makes no sense");
        let seen = seen(cluster.node(0), "node-2");
        assert!(write(&seen)["unknown"].is_string(), "{lie}: {seen:#}");
        // What it does not lie about is gone by.
        assert_measured(&seen["tiers"][0]["read_bytes_per_s"], false);
    }
    claim(&|figures| {
        figures["sequence"] = json!(2000);
        figures["write_queue"]["bytes"] = json!(u64::MAX);
    });
    doubted("queue of dumps");
    claim(&|figures| *figures = json!([1, 2]));
    doubted("cannot be read");
    // Backwards: what it said before stands.
    honest_again(1_000_000);
    claim(&|figures| {
        figures["sequence"] = json!(999_999);
        set(&mut figures["write"], &json!(1e7));
    });
    doubted("came after report");
    for by in 0..2 {
        let stands = number(&write(&seen(cluster.node(by), "node-2"))["p50"]);
        assert!((stands / was - 1.0).abs() < 0.2, "{was} {stands}");
        assert_no_panic(cluster.node(by));
    }
}
