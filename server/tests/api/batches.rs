//! Costs and decisions, compared with values worked out by hand.

use axum::http::StatusCode;
use permafrost_protocol::control::{ColdCopy, Work};
use permafrost_scheduling::cost::SwapFigures;
use permafrost_scheduling::figure::{Figure, What};
use permafrost_scheduling::quantity::{Bytes, Seconds};
use serde_json::{Value, json};

use crate::fixture::{GB, asked, close, node, pointers, rate, three_nodes};

/// Returns the answer for one mechanism.
fn of<'a>(answer: &'a Value, mechanism: &str) -> &'a Value {
    let answers = answer["answers"].as_array().unwrap();
    let found = answers.iter().find(|one| one["mechanism"] == mechanism);
    found.unwrap_or_else(|| panic!("no {mechanism} in {answer:#}"))
}

#[tokio::test]
async fn each_way_costs_what_the_papers_formula_says() {
    let asked = asked(three_nodes());
    let answer = asked
        .ok(
            "/v1/estimate",
            &json!({"tasks": [{
                "id": "k", "node": "a", "job": "team/k-means", "full_bytes": 5 * GB, "incremental_bytes": GB / 2,
                "progress_s": 30, "since_checkpoint_s": 12, "remaining_s": 40, "start_s": 2
            }]}),
        )
        .await;
    assert_eq!(answer["answered_by"], "a");
    assert!(answer["age_s"].as_f64().unwrap() < 60.0);
    // Queue 2 GB ÷ 0.5, write 5 ÷ 0.5, read 5 ÷ 1.
    let full = &of(&answer, "full_dump")["cost"];
    close(&full["overhead_s"]["p50"], 4.0 + 10.0 + 5.0);
    close(&full["delay_s"]["p50"], 4.0 + 10.0);
    close(&full["until_running_s"]["p50"], 5.0);
    assert_eq!(full["parts"][0]["part"], "write_queue");
    close(&full["parts"][1]["p50_s"], 10.0);
    assert!(
        full["reason"].as_str().unwrap().contains("write 10.0 s"),
        "{full}"
    );
    assert_eq!(full["omits"], "the latency was not given");
    close(
        &of(&answer, "incremental_dump")["cost"]["overhead_s"]["p50"],
        4.0 + 1.0 + 5.0,
    );
    close(
        &of(&answer, "kill")["cost"]["overhead_s"]["p50"],
        30.0 + 2.0,
    );
    close(
        &of(&answer, "rollback")["cost"]["overhead_s"]["p50"],
        12.0 + 5.0,
    );
    close(&of(&answer, "wait")["cost"]["delay_s"]["p50"], 40.0);
    close(&of(&answer, "wait")["cost"]["overhead_s"]["p50"], 0.0);
    assert_eq!(
        of(&answer, "pre_copied_dump")["unknown"],
        "the rate at which the task dirties memory was not given"
    );
    assert_eq!(
        of(&answer, "suspend_in_memory")["unknown"],
        "nothing is to be suspended in memory on that node"
    );
}

#[tokio::test]
async fn the_work_before_a_restore_counts_for_who_counts_from_the_restore() {
    let plain = three_nodes();
    {
        // An hour of work, the first half of which the dumped process had from a restore of its own.
        let mut checkpoints = plain.checkpoints.lock();
        let sort = &mut checkpoints[0];
        assert_eq!(sort.job, "sort");
        sort.work = Some(Box::new(Work {
            worked_us: 3_600_000_000,
            carried_us: 1_800_000_000,
            process: "boot/17".into(),
        }));
    }
    let asked = asked(plain);
    let lost = async |task: Value| {
        let mut task = task;
        task["id"] = "s".into();
        task["node"] = "b".into();
        task["job"] = "sort".into();
        let answer = asked.ok("/v1/estimate", &json!({ "tasks": [task] })).await;
        let kill = &of(&answer, "kill")["cost"]["overhead_s"]["p50"];
        let rollback = &of(&answer, "rollback")["cost"]["overhead_s"]["p50"];
        (kill.as_f64().unwrap(), rollback.as_f64().unwrap())
    };
    // Restored 5 s ago, here or on another node: a kill loses the hour, going back only the 5 s. 8 GB at 2 GB/s.
    let restored = json!({"progress_s": 5, "progress_of_this_run": true, "process": "other/99"});
    let (kill, rollback) = lost(restored).await;
    assert!((kill - 3_605.0).abs() < 0.1, "{kill}");
    assert!((rollback - 9.0).abs() < 0.1, "{rollback}");
    // The dumped process goes on: it counts the work since its own restore itself.
    let goes_on = json!({"progress_s": 2000, "progress_of_this_run": true, "process": "boot/17"});
    let (kill, rollback) = lost(goes_on).await;
    assert!((kill - 3_800.0).abs() < 0.1, "{kill}");
    assert!((16.0..40.0).contains(&rollback), "{rollback}");
    // Pods have no process: one that is younger than the checkpoint was restored from it.
    let pod = |age_s: u64| json!({"progress_s": age_s, "progress_of_this_run": true});
    let young = lost(pod(1)).await.0;
    assert!((young - 3_601.0).abs() < 0.1, "{young}");
    let old = lost(pod(2_000)).await.0;
    assert!((old - 3_800.0).abs() < 0.1, "{old}");
    // Who says how much it is in all is believed.
    let in_all = lost(json!({"progress_s": 50})).await.0;
    assert!((in_all - 50.0).abs() < 0.1, "{in_all}");
}

#[tokio::test]
async fn a_copy_counts_with_what_it_takes_longer() {
    let asked = asked(three_nodes());
    let answer = asked
        .ok(
            "/v1/estimate",
            &json!({
                "tasks": [{"id": "k", "full_bytes": 5 * GB}], "nodes": ["a", "b"], "mechanisms": ["full_dump"],
                "copies": "replicated", "detail": "totals"
            }),
        )
        .await;
    let answers = answer["answers"].as_array().unwrap();
    assert_eq!(answers.len(), 2);
    // On a: 4 + 10 there. To b, over 0.25 GB/s that b has measured to a: 20 s. Six more. And 5 to read.
    assert_eq!(answers[0]["node"], "a");
    close(
        &answers[0]["cost"]["overhead_s"]["p50"],
        4.0 + 10.0 + 6.0 + 5.0,
    );
    // On b: 5 s. To a: queue 4 s, then 20 s: nineteen more. And 2.5 to read.
    close(&answers[1]["cost"]["overhead_s"]["p50"], 5.0 + 19.0 + 2.5);
    assert!(answers[1]["cost"].get("reason").is_none());
    assert!(answers[1]["cost"].get("parts").is_none());
}

#[tokio::test]
async fn what_is_left_out_comes_from_the_jobs_history_or_is_said_to_be_missing() {
    let asked = asked(three_nodes());
    let answer = asked
        .ok(
            "/v1/estimate",
            &json!({"tasks": [{"id": "k", "node": "b", "job": "team/k-means", "dirty_pages": 1_000_000,
                               "progress_s": 100}]}),
        )
        .await;
    // Its memory is taken to be that of its last checkpoint that can be resumed, generation 2: 5 GB.
    close(
        &of(&answer, "full_dump")["cost"]["overhead_s"]["p50"],
        5.0 + 2.5,
    );
    close(
        &of(&answer, "incremental_dump")["cost"]["overhead_s"]["p50"],
        4.096 + 2.5,
    );
    // Sealed 12 s ago.
    let rollback = of(&answer, "rollback")["cost"]["overhead_s"]["p50"]
        .as_f64()
        .unwrap();
    assert!((14.5..30.0).contains(&rollback), "{rollback}");
    let nothing = asked
        .ok(
            "/v1/estimate",
            &json!({"tasks": [{"id": "n", "node": "b"}]}),
        )
        .await;
    assert_eq!(
        of(&nothing, "full_dump")["unknown"],
        "the task's memory was not given"
    );
    assert_eq!(
        of(&nothing, "incremental_dump")["unknown"],
        "the task's memory was not given"
    );
    assert_eq!(
        of(&nothing, "rollback")["unknown"],
        "the task has no checkpoint"
    );
    assert_eq!(
        of(&nothing, "kill")["unknown"],
        "the task's progress was not given"
    );
}

#[tokio::test]
async fn a_node_that_is_gone_or_unknown_has_no_cost_and_says_why() {
    let asked = asked(three_nodes());
    let answer = asked
        .ok(
            "/v1/estimate",
            &json!({"tasks": [{"id": "k", "node": "c", "full_bytes": GB, "progress_s": 9},
                              {"id": "l", "node": "nobody", "full_bytes": GB, "progress_s": 9},
                              {"id": "m", "full_bytes": GB, "progress_s": 9}],
                    "mechanisms": ["full_dump", "kill"]}),
        )
        .await;
    let unknown: Vec<&str> = answer["answers"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|one| one["unknown"].as_str())
        .collect();
    assert_eq!(
        unknown,
        [
            "the node is not there",
            "there is no such node",
            "the task names no node, and there are several"
        ]
    );
    // To kill it takes no node.
    close(&answer["answers"][5]["cost"]["overhead_s"]["p50"], 9.0);
    assert!(answer["answers"][5].get("node").is_none());
}

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

#[tokio::test]
async fn dumps_and_copies_go_where_they_arrive_soonest() {
    let asked = asked(three_nodes());
    let answer = asked
        .ok(
            "/v1/place",
            &json!({"placements": [
                {"size_bytes": 5 * GB, "copies": 3},
                {"size_bytes": 5 * GB, "copies": 2, "local": "a"},
                {"size_bytes": 5 * GB, "copies": 2, "holders": ["b"]},
                {"size_bytes": 5 * GB, "copies": 1, "without": ["b"]},
                {"size_bytes": 51 * GB, "copies": 1},
                {"job": "sort", "copies": 1},
                {"job": "unheard-of", "copies": 1}
            ]}),
        )
        .await;
    let answers = answer["answers"].as_array().unwrap();
    let nodes = |at: usize| -> Vec<&str> {
        let nodes = answers[at]["nodes"].as_array().unwrap();
        nodes
            .iter()
            .map(|node| node["node"].as_str().unwrap())
            .collect()
    };
    // Over its link, which is slower than its medium, `b` has a copy in 20 s; `a` knows of no link.
    assert_eq!(nodes(0), ["a", "b"]);
    close(&answers[0]["nodes"][0]["arrives_in_s"], 14.0);
    close(&answers[0]["nodes"][1]["arrives_in_s"], 20.0);
    assert_eq!(answers[0]["missing"], 1);
    assert_eq!(nodes(1), ["a", "b"]);
    assert_eq!(nodes(2), ["a"]);
    assert_eq!(nodes(3), ["a"]);
    assert_eq!((nodes(4).len(), &answers[4]["missing"]), (0, &json!(1)));
    // 8 GB at its last checkpoint, of which half would be stored.
    assert_eq!(answers[5]["size_bytes"]["p50"], 4 * GB);
    close(&answers[5]["nodes"][0]["arrives_in_s"], 12.0);
    assert_eq!(
        answers[6]["size_bytes"]["unknown"],
        "the task's memory was not given"
    );
}

#[tokio::test]
async fn copies_on_transient_nodes_do_not_count() {
    let source = three_nodes();
    source.nodes.lock()[1].durable = false;
    let asked = asked(source);
    let answer = asked
        .ok(
            "/v1/place",
            &json!({"placements": [{"size_bytes": 1, "copies": 2}]}),
        )
        .await;
    let nodes = &answer["answers"][0]["nodes"];
    assert_eq!(
        (&nodes[0]["node"], &nodes[0]["durable"]),
        (&json!("a"), &json!(true))
    );
    assert_eq!(
        (&nodes[1]["node"], &nodes[1]["durable"]),
        (&json!("b"), &json!(false))
    );
}

#[tokio::test]
async fn a_node_that_replication_refuses_is_no_place() {
    let source = three_nodes();
    {
        let mut nodes = source.nodes.lock();
        // b has space, and nearly all of it is promised to dumps that are on their way. a and c share a machine's
        // name in different racks: two machines.
        nodes[1].room_bytes = GB;
        nodes[0].host = "m1".into();
        nodes[2].host = "m1".into();
        nodes[2].figures = nodes[0].figures;
        nodes[2].live = true;
    }
    let asked = asked(source.clone());
    let place = |size: u64| json!({"placements": [{"size_bytes": size, "copies": 3}]});
    let named = |answer: &Value| -> Vec<String> {
        let nodes = answer["answers"][0]["nodes"].as_array().unwrap();
        let name = |node: &Value| node["node"].as_str().unwrap().to_owned();
        nodes.iter().map(name).collect()
    };
    let large = asked.ok("/v1/place", &place(5 * GB)).await;
    assert_eq!(named(&large), ["a", "c"]);
    assert_eq!(large["answers"][0]["missing"], 1);
    let small = asked.ok("/v1/place", &place(GB / 2)).await;
    assert_eq!(named(&small).len(), 3);
    // Without room it takes nothing, however small.
    source.nodes.lock()[1].room_bytes = 0;
    let full = self::asked(source);
    let none = full.ok("/v1/place", &place(1)).await;
    assert!(!named(&none).contains(&"b".to_owned()), "{none}");
}

#[tokio::test]
async fn places_are_reserved_and_given_back() {
    let source = three_nodes();
    let asked = asked(source.clone());
    let place = asked
        .ok(
            "/v1/reserve",
            &json!({"node": "b", "direction": "write", "bytes": GB, "priority": 11, "deadline_s": 60}),
        )
        .await;
    assert_eq!(
        (&place["token"], &place["node"]),
        (&json!("t1"), &json!("b"))
    );
    assert_eq!(place["starts_in_s"]["unknown"], "not measured");
    assert_eq!(source.reserved.lock()[0].priority.level(), 11);
    let delete = async |token: &str| {
        asked
            .raw("DELETE", &format!("/v1/reserve/{token}"), Vec::new())
            .await
            .0
    };
    assert_eq!(delete("t1").await, StatusCode::NO_CONTENT);
    assert_eq!(delete("t2").await, StatusCode::NOT_FOUND);
    let (status, _) = asked
        .post(
            "/v1/reserve",
            &json!({"node": "c", "direction": "read", "bytes": 1}),
        )
        .await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn starting_estimates_are_installed() {
    let source = three_nodes();
    let asked = asked(source.clone());
    let body =
        json!({"write": [{"size_bytes": 1 << 30, "p50_bytes_per_s": 1.5e9}], "links": {"b": 1e9}});
    let (status, _) = asked
        .raw("PUT", "/v1/figures", serde_json::to_vec(&body).unwrap())
        .await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    let installed = source.installed.lock().clone().unwrap();
    assert_eq!(
        serde_json::to_value(installed.write[0]).unwrap()["p50_bytes_per_s"],
        1.5e9
    );
    assert_eq!(installed.links.len(), 1);
}
