//! Costs of each way, compared with values worked out by hand.

use permafrost_protocol::control::Work;
use serde_json::{Value, json};

use super::of;
use crate::fixture::{GB, asked, close, three_nodes};

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
