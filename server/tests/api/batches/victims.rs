//! Choices of victims, compared with values worked out by hand.

use permafrost_scheduling::cost::SwapFigures;
use permafrost_scheduling::figure::{Figure, What};
use permafrost_scheduling::quantity::Bytes;
use serde_json::{Value, json};

use crate::fixture::{GB, asked, close, node, pointers, three_nodes};

#[tokio::test]
async fn victims_are_chosen_by_cost_and_each_by_its_own_mechanism() {
    let asked = asked(three_nodes());
    let holds = json!({"cpu_millis": 1000, "memory_bytes": 0});
    let answer = asked
        .ok(
            "/v1/preempt",
            &json!({
                "wanted": {"cpu_millis": 2000, "memory_bytes": 0},
                "candidates": [
                    {"id": "large", "node": "b", "full_bytes": 40 * GB, "progress_s": 1000, "holds": holds},
                    {"id": "small", "node": "b", "full_bytes": 2 * GB, "progress_s": 1000, "holds": holds},
                    {"id": "fresh", "node": "b", "full_bytes": 40 * GB, "progress_s": 1, "holds": holds},
                    {"id": "lost", "node": "nobody", "holds": holds},
                    {"id": "where", "holds": holds},
                    {"id": "dark", "node": "a", "holds": holds}
                ]
            }),
        )
        .await;
    let victims = answer["victims"].as_array().unwrap();
    assert_eq!(victims.len(), 2);
    assert_eq!(
        (&victims[0]["task"], &victims[0]["mechanism"]),
        (&json!("fresh"), &json!("kill"))
    );
    close(&victims[0]["score_s"], 1.0);
    assert_eq!(
        (&victims[1]["task"], &victims[1]["mechanism"]),
        (&json!("small"), &json!("full_dump"))
    );
    // 2 GB at 1 GB/s and back at 2.
    close(&victims[1]["score_s"], 3.0);
    close(&victims[1]["cost"]["delay_s"]["p50"], 2.0);
    assert_eq!(victims[1]["next"]["mechanism"], "kill");
    close(&victims[1]["next"]["score_s"], 1000.0);
    assert!(
        victims[1]["reason"]
            .as_str()
            .unwrap()
            .starts_with("full dump: 3.0 s")
    );
    assert_eq!(answer["frees"]["cpu_millis"], 2000);
    assert_eq!(answer["enough"], true);
    assert_eq!(answer["undecided"][0]["task"], "dark");
    assert_eq!(
        answer["undecided"][0]["reason"],
        "kill: the task's progress was not given; dump: the task's memory was not given"
    );
    assert_eq!(
        answer["unknown_node"],
        json!([{"task": "lost", "node": "nobody"}, {"task": "where"}])
    );
}

#[tokio::test]
async fn what_cannot_be_had_is_lacking() {
    let asked = asked(three_nodes());
    let answer = asked
        .ok(
            "/v1/preempt",
            &json!({
                "wanted": {"cpu_millis": 5000, "memory_bytes": GB},
                "candidates": [{"id": "only", "node": "b", "progress_s": 1, "holds": {"cpu_millis": 1000}}]
            }),
        )
        .await;
    assert_eq!(
        answer["lacking"],
        json!({"cpu_millis": 4000, "memory_bytes": GB})
    );
    assert_eq!(answer["enough"], false);
}

#[tokio::test]
async fn without_a_want_each_is_decided_as_if_it_were_alone() {
    let asked = asked(three_nodes());
    let task = |id: &str| json!({"id": id, "node": "b", "full_bytes": 10 * GB, "progress_s": 20});
    let candidates = [task("1"), task("2"), task("3")];
    let answer = asked
        .ok(
            "/v1/preempt",
            &json!({"candidates": candidates, "detail": "totals"}),
        )
        .await;
    let victims = answer["victims"].as_array().unwrap();
    assert_eq!(victims.len(), 3);
    for victim in victims {
        assert_eq!(victim["mechanism"], "full_dump");
        close(&victim["score_s"], 15.0);
        assert!(victim.get("reason").is_none());
    }
    // In a plan the second would wait for the first: 25 s against 20 for a kill.
    let mut held = candidates.to_vec();
    for task in &mut held {
        task["holds"] = json!({"cpu_millis": 1000});
    }
    let plan = asked
        .ok(
            "/v1/preempt",
            &json!({"candidates": held, "wanted": {"cpu_millis": 3000}}),
        )
        .await;
    let kills = plan["victims"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|victim| victim["mechanism"] == "kill");
    assert_eq!(kills.count(), 2);
}

#[tokio::test]
async fn a_set_of_candidates_is_preempted_together() {
    let asked = asked(three_nodes());
    let task = |id: &str, node: &str| json!({"id": id, "node": node, "full_bytes": 10 * GB, "progress_s": 22, "holds": {"cpu_millis": 1000}});
    let candidates = json!([
        task("0", "b"),
        task("1", "b"),
        task("2", "b"),
        task("3", "b"),
        task("4", "nobody")
    ]);
    let answer = asked
        .ok(
            "/v1/preempt",
            &json!({"candidates": candidates, "together": [[3, 1, 4], [0]], "detail": "totals"}),
        )
        .await;
    let decided: Vec<_> = answer["victims"]
        .as_array()
        .unwrap()
        .iter()
        .map(|victim| {
            (
                victim["task"].as_str().unwrap(),
                victim["mechanism"].as_str().unwrap(),
                victim["score_s"].as_f64().unwrap(),
            )
        })
        .collect();
    // 10 s to write and 5 to read; behind another it takes 25, and a kill 22.
    assert_eq!(
        decided,
        [
            ("1", "full_dump", 15.0),
            ("3", "kill", 22.0),
            ("0", "full_dump", 15.0),
            ("2", "full_dump", 15.0),
        ]
    );
    assert_eq!(answer["frees"]["cpu_millis"], 4000);
    assert_eq!(answer["unknown_node"][0]["task"], "4");
}

#[tokio::test]
async fn a_task_that_is_suspended_for_its_processors_keeps_its_memory() {
    let asked = asked(three_nodes());
    let swap = json!([{"node": "b", "free_memory_bytes": 0, "free_swap_bytes": 9 * GB,
                       "write_bytes_per_s": GB / 10, "read_bytes_per_s": GB / 10}]);
    let request = |memory: u64| {
        json!({"wanted": {"cpu_millis": 1000, "memory_bytes": memory}, "swaps": swap, "candidates": [
            {"id": "k", "node": "b", "full_bytes": 5 * GB, "resident_bytes": 5 * GB, "progress_s": 1000,
             "holds": {"cpu_millis": 2000, "memory_bytes": 5 * GB}}]})
    };
    for (memory, mechanism, score, frees) in [
        (0, "suspend_in_memory", 0.0, 0),
        (GB / 10, "suspend_in_memory", 2.0, GB / 10),
        (5 * GB, "full_dump", 7.5, 5 * GB),
    ] {
        let answer = asked.ok("/v1/preempt", &request(memory)).await;
        let victim = &answer["victims"][0];
        assert_eq!(victim["mechanism"], mechanism);
        close(&victim["score_s"], score);
        let frees = json!({"cpu_millis": 2000, "memory_bytes": frees});
        assert_eq!((&victim["frees"], &answer["frees"]), (&frees, &frees));
        assert_eq!(answer["enough"], true);
    }
}

#[tokio::test]
async fn figures_that_are_given_replace_what_was_measured() {
    let asked = asked(three_nodes());
    let given = |node: &str| json!({"node": node, "write_bytes_per_s": 2e9, "read_bytes_per_s": 4e9, "write_queue_bytes": 0});
    let task =
        |node: &str| json!({"id": node, "node": node, "full_bytes": 4 * GB, "progress_s": 1000});
    let request = json!({"candidates": [task("a"), task("b"), task("elsewhere"), task("nobody")],
                         "figures": [given("a"), given("elsewhere")]});
    let answer = asked.ok("/v1/preempt", &request).await;
    let victims = answer["victims"].as_array().unwrap();
    // 2 s to write and 1 to read; b is as it has measured.
    for (victim, (node, score)) in victims
        .iter()
        .zip([("a", 3.0), ("b", 6.0), ("elsewhere", 3.0)])
    {
        assert_eq!(victim["node"], node);
        close(&victim["score_s"], score);
    }
    assert_eq!(
        (victims.len(), &answer["unknown_node"][0]["node"]),
        (3, &json!("nobody"))
    );
}

#[tokio::test]
async fn terms_are_heeded() {
    let asked = asked(three_nodes());
    let task = json!({"id": "k", "node": "b", "full_bytes": 5 * GB, "progress_s": 30, "remaining_s": 1,
                      "holds": {"memory_bytes": 6 * GB}, "resident_bytes": 5 * GB});
    let decide = async |terms: Value| {
        let mut request = terms;
        request["candidates"] = json!([task]);
        let answer = asked.ok("/v1/preempt", &request).await;
        answer["victims"][0]["mechanism"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    assert_eq!(decide(json!({})).await, "full_dump");
    assert_eq!(decide(json!({"longest_delay_s": 4.9})).await, "kill");
    assert_eq!(decide(json!({"longest_delay_s": 5})).await, "full_dump");
    assert_eq!(
        decide(json!({"may_wait": true, "delay_weight": 1})).await,
        "wait"
    );
    let swap = json!([{"node": "b", "free_memory_bytes": 6 * GB, "free_swap_bytes": 5 * GB}]);
    assert_eq!(decide(json!({"swaps": swap})).await, "suspend_in_memory");
}

#[tokio::test]
async fn what_is_measured_of_swap_is_used_unless_a_swap_is_given() {
    let source = three_nodes();
    for node in source.nodes.lock().iter_mut() {
        node.swap = (node.name == "b").then_some(SwapFigures {
            free_memory: Bytes::new(6 * GB),
            free_swap: Bytes::new(5 * GB),
            write: Figure::not_given(What::SwapBandwidth),
            read: Figure::not_given(What::SwapBandwidth),
        });
    }
    let asked = asked(source);
    let (_, nodes) = asked.get("/v1/nodes").await;
    let memory = |at: usize| nodes["nodes"][at]["memory"].clone();
    assert_eq!(memory(0), Value::Null, "a has measured none");
    assert_eq!(memory(1)["free_bytes"], 6 * GB);
    assert_eq!(memory(1)["free_swap_bytes"], 5 * GB);
    assert!(
        memory(1)["page_out_bytes_per_s"]["unknown"].is_string(),
        "{nodes}"
    );
    let task = |node: &str| {
        json!({"id": node, "node": node, "full_bytes": 5 * GB, "resident_bytes": 5 * GB, "progress_s": 30,
               "holds": {"cpu_millis": 1000}})
    };
    let mut request = json!({"candidates": [task("a"), task("b")]});
    let mechanisms = |answer: &Value| -> Vec<Value> {
        let victims = answer["victims"].as_array().unwrap().iter();
        victims.map(|victim| victim["mechanism"].clone()).collect()
    };
    let answer = asked.ok("/v1/preempt", &request).await;
    let at_a = mechanisms(&answer)[0].clone();
    assert_ne!(at_a, "suspend_in_memory", "a has measured none");
    assert_eq!(mechanisms(&answer)[1], "suspend_in_memory");
    // What the caller states goes before it.
    request["swaps"] = json!([{"node": "b", "free_memory_bytes": 0, "free_swap_bytes": 0}]);
    let answer = asked.ok("/v1/preempt", &request).await;
    assert_ne!(mechanisms(&answer)[1], "suspend_in_memory");
    // A policy that goes by swap needs none in the request, but where none is measured.
    let by_swap = |node: &str| json!({"policy": "suspend", "wanted": {"cpu_millis": 1}, "candidates": [task(node)]});
    let answer = asked.ok("/v1/preempt", &by_swap("b")).await;
    assert_eq!(mechanisms(&answer), ["suspend_in_memory"], "{answer}");
    let (status, problem) = asked.post("/v1/preempt", &by_swap("a")).await;
    assert_eq!(
        (status.as_u16(), pointers(&problem)),
        (422, vec!["/swaps"]),
        "{problem}"
    );
}

#[tokio::test]
async fn one_machine_needs_no_names_of_nodes() {
    let source = three_nodes();
    *source.nodes.lock() = vec![node("a", (1.0, 2.0), (0, 0))];
    let asked = asked(source);
    let answer = asked
        .ok(
            "/v1/preempt",
            &json!({"candidates": [{"id": "k", "full_bytes": 4 * GB, "progress_s": 99}]}),
        )
        .await;
    assert_eq!(answer["victims"][0]["node"], "a");
    close(&answer["victims"][0]["score_s"], 6.0);
}
