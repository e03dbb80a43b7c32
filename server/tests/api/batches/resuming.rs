//! Choices of the node that resumes a task, compared with values worked out by hand.

use permafrost_protocol::control::ColdCopy;
use permafrost_scheduling::figure::Figure;
use permafrost_scheduling::quantity::Seconds;
use serde_json::{Value, json};

use crate::fixture::{GB, asked, close, rate, three_nodes};

#[tokio::test]
async fn nodes_are_ranked_as_in_algorithm_2() {
    let asked = asked(three_nodes());
    let answer = asked
        .ok(
            "/v1/resume",
            &json!({"checkpoints": ["team/k-means", "sort@7"]}),
        )
        .await;
    let first = &answer["answers"][0];
    // Its newest is a pre-dump, which nobody resumes.
    assert_eq!(first["generation"], 2);
    assert_eq!(first["size_bytes"], 5 * GB);
    let nodes = first["nodes"].as_array().unwrap();
    // a holds it: queue 1 s, read 5 s. b has the parent and lacks 1 GB at 0.25 GB/s: 4 s, and reads 2.5 s.
    assert_eq!(
        (&nodes[0]["node"], &nodes[0]["local"]),
        (&json!("a"), &json!(true))
    );
    close(&nodes[0]["cost"]["until_running_s"]["p50"], 6.0);
    assert_eq!(
        (&nodes[1]["node"], &nodes[1]["local"]),
        (&json!("b"), &json!(false))
    );
    close(&nodes[1]["cost"]["until_running_s"]["p50"], 6.5);
    let second = answer["answers"][1]["nodes"].as_array().unwrap();
    assert_eq!(
        (&second[0]["node"], &second[0]["local"]),
        (&json!("b"), &json!(true))
    );
    close(&second[0]["cost"]["until_running_s"]["p50"], 4.0);
    close(&second[1]["cost"]["until_running_s"]["p50"], 9.0);
}

#[tokio::test]
async fn a_preference_goes_before_costs_and_a_limit_after() {
    let asked = asked(three_nodes());
    let first = async |more: Value| {
        let mut request = json!({"checkpoints": ["team/k-means"], "limit": 1});
        request
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let answer = asked.ok("/v1/resume", &request).await;
        let nodes = answer["answers"][0]["nodes"].as_array().unwrap().clone();
        assert_eq!(nodes.len(), 1);
        nodes[0]["node"].as_str().unwrap().to_owned()
    };
    assert_eq!(first(json!({"preference": "remote"})).await, "b");
    assert_eq!(first(json!({"preference": "local"})).await, "a");
    // Lazily, the queue of a delays only what nobody waits for: it runs at once on both, and a has all of its pages.
    assert_eq!(first(json!({"lazy": {}})).await, "a");
    assert_eq!(first(json!({"lazy": {"eager_bytes": 5 * GB}})).await, "a");
}

#[tokio::test]
async fn a_lazy_restore_costs_what_the_nodes_lazy_restores_took() {
    let source = three_nodes();
    {
        let a = &mut source.nodes.lock()[0].figures;
        a.lazy = rate(5.0);
        a.lazy_start = Figure::given(Seconds::from_millis(250));
    }
    let asked = asked(source);
    let parts = async |lazy: Value| {
        let request = json!({"checkpoints": ["team/k-means"], "nodes": ["a"], "lazy": lazy});
        let answer = asked.ok("/v1/resume", &request).await;
        let cost = answer["answers"][0]["nodes"][0]["cost"].clone();
        let parts = cost["parts"].as_array().unwrap().clone();
        let part = |name: &str| {
            let found = parts.iter().find(|part| part["part"] == name);
            found.map(|part| part["p50_s"].as_f64().unwrap())
        };
        (part("restore_start"), part("faults"))
    };
    let size = {
        let request = json!({"checkpoints": ["team/k-means"], "nodes": ["a"]});
        let answer = asked.ok("/v1/resume", &request).await;
        answer["answers"][0]["size_bytes"].as_f64().unwrap()
    };
    let (start, faults) = parts(json!({})).await;
    assert!((start.unwrap() - 0.25).abs() < 1e-6, "{start:?}");
    assert!((faults.unwrap() - size / 5e9).abs() < 1e-6, "{faults:?}");
    // A rate in the request counts before it.
    let (_, faults) = parts(json!({"bytes_per_s": 1e9})).await;
    assert!((faults.unwrap() - size / 1e9).abs() < 1e-6, "{faults:?}");
}

#[tokio::test]
async fn what_cannot_be_resumed_begins_anew_and_nodes_that_cannot_are_named() {
    let asked = asked(three_nodes());
    let answer = asked
        .ok(
            "/v1/resume",
            &json!({"checkpoints": ["none", "team/k-means@9", "team/k-means@3", "a b", "sort"],
                    "nodes": ["b", "c"]}),
        )
        .await;
    let why = |at: usize| {
        assert_eq!(answer["answers"][at]["restart"], true);
        answer["answers"][at]["why"].as_str().unwrap()
    };
    assert_eq!(why(0), "the job none has no checkpoint that can be resumed");
    assert_eq!(why(1), "there is no checkpoint team/k-means@9");
    assert_eq!(
        why(2),
        "team/k-means@3 is a pre-dump, which cannot be resumed"
    );
    assert!(why(3).contains("names no checkpoint"));
    assert_eq!(answer["answers"][4]["nodes"][0]["node"], "b");
    assert_eq!(
        answer["answers"][4]["unknown"],
        json!([{"node": "c", "why": "the node is not there"}])
    );
}

#[tokio::test]
async fn a_damaged_copy_is_none() {
    // This node's own copy, and another node's as the cluster lists it.
    for (damaged, whole) in [("a", "b"), ("b", "a")] {
        let source = three_nodes();
        {
            let sort = &mut source.checkpoints.lock()[0];
            match damaged {
                "a" => sort.damaged = "page 7".into(),
                other => sort.damaged_nodes = vec![other.into()],
            }
        }
        let asked = asked(source);
        let answer = asked
            .ok("/v1/resume", &json!({"checkpoints": ["sort"]}))
            .await;
        let nodes = answer["answers"][0]["nodes"].as_array().unwrap();
        let local = |name: &str| {
            let node = nodes.iter().find(|node| node["node"] == name);
            node.unwrap()["local"].clone()
        };
        assert_eq!(local(whole), json!(true));
        assert_eq!(local(damaged), json!(false));
    }
}

#[tokio::test]
async fn a_copy_in_an_object_store_comes_back_first() {
    let sort = |nodes: &[(&str, Option<f64>)], cold: &[(&str, u64)]| {
        let source = three_nodes();
        for (name, recall) in nodes {
            let mut all = source.nodes.lock();
            let node = all.iter_mut().find(|node| node.name == *name).unwrap();
            if let Some(recall) = recall {
                node.figures.recall = rate(*recall);
            }
        }
        source.checkpoints.lock()[0].cold = cold
            .iter()
            .map(|&(node, gb)| ColdCopy {
                node: node.to_owned(),
                bytes: gb * GB,
            })
            .collect();
        source
    };
    let ask = json!({"checkpoints": ["sort"]});
    let first = async |source| {
        let answer = asked(source).ok("/v1/resume", &ask).await;
        answer["answers"][0].clone()
    };
    let of = |answer: &Value, name: &str| {
        let nodes = answer["nodes"].as_array().unwrap();
        nodes.iter().find(|node| node["node"] == name).cloned()
    };
    let until = |node: Value| node["cost"]["until_running_s"]["p50"].as_f64().unwrap();

    let warm = first(sort(&[], &[])).await;
    let cold = first(sort(&[("b", Some(0.5))], &[("b", 2)])).await;
    let [before, after] = [&warm, &cold].map(|answer| until(of(answer, "b").unwrap()));
    assert!((after - before - 4.0).abs() < 1e-9, "{before} {after}");
    let parts = of(&cold, "b").unwrap()["cost"]["parts"].clone();
    assert!(
        parts
            .as_array()
            .unwrap()
            .iter()
            .any(|part| part["part"] == "recall"),
        "{parts}"
    );
    // Nothing has come back from there yet: nobody knows how long it takes.
    let unknown = first(sort(&[], &[("b", 2)])).await;
    assert_eq!(of(&unknown, "b"), None);
    let why = unknown["unknown"][0]["why"].as_str().unwrap();
    assert!(why.contains("bandwidth of the object store"), "{unknown}");
}
