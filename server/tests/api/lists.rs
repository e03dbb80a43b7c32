//! Lists of nodes, jobs and checkpoints, page by page.

use axum::http::StatusCode;
use serde_json::{Value, json};

use permafrost_scheduling::cost::TierRoom;

use crate::fixture::{
    GB, Plain, asked, checkpoint, close, links, node, pointers, rate, three_nodes,
};

#[tokio::test]
async fn a_node_is_told_with_its_figures_and_what_is_not_known() {
    let asked = asked(three_nodes());
    let (status, answer) = asked.get("/v1/nodes").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(answer["answered_by"], "a");
    let names: Vec<&Value> = answer["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| &node["name"])
        .collect();
    assert_eq!(names, ["a", "b", "c"]);
    let a = &answer["nodes"][0];
    assert_eq!(
        (&a["live"], &a["state"], &a["class"]),
        (&json!(true), &json!("active"), &json!("reserved"))
    );
    assert_eq!(
        (&a["zone"], &a["rack"], &a["host"]),
        (&json!("z"), &json!("r-a"), &json!("a"))
    );
    assert!(a["age_s"].as_f64().unwrap() >= 0.5);
    let tier = &a["tiers"][0];
    assert_eq!(
        (&tier["tier"], &tier["free_bytes"]),
        (&json!("memory"), &json!(50 * GB))
    );
    close(&tier["write_bytes_per_s"]["p50"], 0.5e9);
    assert_eq!(tier["write_by_size"].as_array().unwrap().len(), 4);
    assert_eq!(tier["write_by_size"][0]["below_bytes"], 1 << 20);
    assert!(tier["write_by_size"][3].get("below_bytes").is_none());
    assert_eq!(tier["dump_start_s"]["unknown"], "the latency was not given");
    let queue = &tier["write_queue"];
    assert_eq!(queue["bytes"]["p50"], 2 * GB);
    assert_eq!(
        (
            &queue["running"],
            &queue["waiting"],
            &queue["reserved"],
            &queue["slots"]
        ),
        (&json!(1), &json!(2), &json!(3), &json!(4))
    );
    close(&queue["time_s"]["p50"], 4.0);
    let b = &answer["nodes"][1];
    assert_eq!(b["links"][0]["to"], "a");
    close(&b["links"][0]["bytes_per_s"]["p50"], 0.25e9);
    // Of one that is gone nothing holds.
    let c = &answer["nodes"][2];
    assert_eq!(c["live"], false);
    assert_eq!(
        c["tiers"][0]["write_bytes_per_s"]["unknown"],
        "the node is not there"
    );
}

#[tokio::test]
async fn each_tier_is_told_with_what_holds_there() {
    let source = three_nodes();
    let room = |tier: &str, free_gb, cold| TierRoom {
        tier: tier.to_owned(),
        capacity_bytes: 40 * GB,
        free_bytes: free_gb * GB,
        cold,
    };
    source.nodes.lock()[0].tiers = vec![
        room("nvm", 0, false),
        room("ssd", 10, false),
        room("s3", 30, true),
    ];
    source.nodes.lock()[0].figures.recall = rate(0.125);
    let (_, answer) = asked(source).get("/v1/nodes?name=a").await;
    let [nvm, ssd, cold] = [0, 1, 2].map(|at| &answer["nodes"][0]["tiers"][at]);
    assert_eq!(
        (&nvm["tier"], &nvm["free_bytes"]),
        (&json!("nvm"), &json!(0))
    );
    // Dumps go to the first with room, and all but the last are read in place.
    close(&ssd["write_bytes_per_s"]["p50"], 0.5e9);
    for other in [nvm, cold] {
        let why = &other["write_bytes_per_s"]["unknown"];
        assert_eq!(why, "dumps go to the tier ssd");
    }
    close(&nvm["read_bytes_per_s"]["p50"], 1e9);
    close(&cold["read_bytes_per_s"]["p50"], 0.125e9);
}

#[tokio::test]
async fn one_node_by_name_or_none() {
    let asked = asked(three_nodes());
    let (_, answer) = asked.get("/v1/nodes?name=b").await;
    assert_eq!(answer["nodes"].as_array().unwrap().len(), 1);
    let (status, problem) = asked.get("/v1/nodes?name=x").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(problem["detail"], "there is no node \"x\"");
}

/// Returns all pages, each requested with the `next` of the one before.
async fn pages(asked: &crate::fixture::Asked, path: &str, list: &str, name: &str) -> Vec<String> {
    let mut all = Vec::new();
    let mut next = String::new();
    loop {
        let (status, answer) = asked.get(&format!("{path}{next}")).await;
        assert_eq!(status, StatusCode::OK, "{answer:#}");
        let page = answer[list].as_array().unwrap();
        all.extend(
            page.iter()
                .map(|one| one[name].as_str().unwrap().to_owned()),
        );
        match answer.get("next") {
            Some(after) => next = format!("&after={}", after.as_str().unwrap().replace('@', "%40")),
            None => return all,
        }
    }
}

#[tokio::test]
async fn pages_follow_each_other_without_gaps() {
    let names: Vec<String> = (0..25).map(|n| format!("n{n:02}")).collect();
    let nodes = names.iter().map(|name| {
        let mut node = node(name, (1.0, 1.0), (0, 0));
        node.links = links(&["n00", "n01"]);
        node
    });
    let mut checkpoints = Vec::new();
    for job in ["a", "a/b", "a0", "b"] {
        for generation in [1, 2, 10, 11] {
            checkpoints.push(checkpoint(job, generation, 1, &["n00"]));
        }
    }
    let all: Vec<String> = checkpoints
        .iter()
        .map(|one| format!("{}@{}", one.job, one.generation))
        .collect();
    let asked = asked(Plain::new(nodes.collect(), checkpoints));
    for limit in [1, 3, 4, 25, 10_000] {
        assert_eq!(
            pages(&asked, &format!("/v1/nodes?limit={limit}"), "nodes", "name").await,
            names
        );
        let jobs = pages(&asked, &format!("/v1/jobs?limit={limit}"), "jobs", "job").await;
        assert_eq!(jobs, ["a", "a/b", "a0", "b"]);
        let path = format!("/v1/checkpoints?limit={limit}");
        assert_eq!(pages(&asked, &path, "checkpoints", "checkpoint").await, all);
        let path = format!("/v1/checkpoints?job=a/b&limit={limit}");
        assert_eq!(
            pages(&asked, &path, "checkpoints", "checkpoint").await,
            all[4..8]
        );
    }
}

#[tokio::test]
async fn a_job_tells_its_last_checkpoint_and_its_next_dumps() {
    let asked = asked(three_nodes());
    let (_, answer) = asked.get("/v1/jobs?job=team/k-means").await;
    let job = &answer["jobs"][0];
    assert_eq!(
        (&job["job"], &job["checkpoints"]),
        (&json!("team/k-means"), &json!(3))
    );
    let last = &job["last"];
    assert_eq!(last["checkpoint"], "team/k-means@2");
    assert_eq!(
        (&last["memory_bytes"], &last["stored_bytes"]),
        (&json!(5 * GB), &json!(5 * GB / 2))
    );
    assert_eq!(
        (&last["holders"], &last["copies_wanted"]),
        (&json!(["a"]), &json!(2))
    );
    assert_eq!(last["parent_generation"], 1);
    let age = last["age_s"].as_f64().unwrap();
    assert!((12.0..60.0).contains(&age), "{age}");
    assert_eq!(job["next_full_bytes"]["p50"], 5 * GB / 2);
    let (status, _) = asked.get("/v1/jobs?job=nobody").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    let (status, _) = asked.get("/v1/checkpoints?job=nobody").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_store_without_a_cluster_holds_all_itself() {
    let asked = asked(Plain::new(
        vec![node("a", (1.0, 1.0), (0, 0))],
        vec![checkpoint("j", 1, 1, &[])],
    ));
    let (_, answer) = asked.get("/v1/checkpoints").await;
    assert_eq!(answer["checkpoints"][0]["holders"], json!(["a"]));
    assert!(answer["checkpoints"][0].get("parent_generation").is_none());
    let answer = asked.ok("/v1/resume", &json!({"checkpoints": ["j"]})).await;
    assert_eq!(answer["answers"][0]["nodes"][0]["local"], true);
}

#[tokio::test]
async fn parameters_that_are_wrong_are_named() {
    let asked = asked(three_nodes());
    for (path, pointer) in [
        ("/v1/nodes?limit=0", "query:limit"),
        ("/v1/nodes?limit=10001", "query:limit"),
        ("/v1/nodes?limit=-1", "query:limit"),
        ("/v1/nodes?limit=x", "query:limit"),
        ("/v1/nodes?nmae=a", "query:nmae"),
        ("/v1/jobs?limit=1e3", "query:limit"),
        ("/v1/jobs?x=1", "query:x"),
        ("/v1/checkpoints?after=j", "query:after"),
        ("/v1/checkpoints?after=j@0", "query:after"),
        ("/v1/contents", "query:"),
        ("/v1/contents?checkpoint=sort@x", "query:checkpoint"),
        ("/v1/contents?checkpoint=sort@7&limit=0", "query:limit"),
        ("/v1/contents?checkpoint=sort@7&pid=0", "query:pid"),
        ("/v1/contents?checkpoint=sort@7&pid=x", "query:pid"),
        ("/v1/contents?checkpoint=sort@7&after=x", "query:after"),
        ("/v1/contents?checkpoint=sort@7&path=/", "query:path"),
    ] {
        let (status, problem) = asked.get(path).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{path}");
        assert_eq!(pointers(&problem), [pointer], "{path}");
    }
}

#[tokio::test]
async fn a_checkpoint_tells_its_mappings_and_images() {
    let asked = asked(three_nodes());
    let (status, answer) = asked.get("/v1/contents?checkpoint=team/k-means@2").await;
    assert_eq!(status, StatusCode::OK, "{answer:#}");
    assert_eq!(
        (&answer["checkpoint"], &answer["compared_with"]),
        (&json!("team/k-means@2"), &json!("team/k-means@1"))
    );
    let process = &answer["processes"][0];
    assert_eq!(
        (&process["pid"], &process["mapping_count"]),
        (&json!(7), &json!(3))
    );
    let mapping = &process["mappings"][2];
    assert_eq!(mapping["start"], "ffffffffff600000");
    // Of four pages one is zero, and two are not equal to the parent's.
    assert_eq!(mapping["pages"]["stored_pages"], 2);
    assert_eq!(
        answer["images"],
        json!([{"name": "core-7.img", "size_bytes": 900}])
    );
    assert!(answer.get("next").is_none());
    // The newest that can be resumed, and pages of two mappings and of one.
    let path = "/v1/contents?checkpoint=team/k-means&limit=2";
    let (_, first) = asked.get(path).await;
    assert_eq!(first["next"], "7:8000");
    let (_, second) = asked.get(&format!("{path}&after=7:8000")).await;
    let mappings = &second["processes"][0]["mappings"];
    assert_eq!(
        (mappings.as_array().unwrap().len(), &second["images"]),
        (1, &json!([]))
    );
    for missing in ["team/k-means@9", "nobody@1", "team/k-means@2&pid=8"] {
        let (status, _) = asked
            .get(&format!("/v1/contents?checkpoint={missing}"))
            .await;
        assert_eq!(status, StatusCode::NOT_FOUND, "{missing}");
    }
}

#[tokio::test]
async fn one_caller_does_not_have_all_checkpoints_described_at_once() {
    let source = three_nodes();
    let asked = std::sync::Arc::new(asked(std::sync::Arc::clone(&source)));
    source.hang(true);
    let ask = || {
        let asked = std::sync::Arc::clone(&asked);
        tokio::spawn(async move { asked.get("/v1/contents?checkpoint=sort@7").await.0 })
    };
    let waiting = [ask(), ask()];
    // Both wait for the source; the third is refused at once, with when to come again.
    let refused = loop {
        tokio::task::yield_now().await;
        let third = tokio::time::timeout(std::time::Duration::from_millis(50), ask()).await;
        if let Ok(answered) = third {
            break answered.unwrap();
        }
    };
    assert_eq!(refused, StatusCode::SERVICE_UNAVAILABLE);
    source.hang(false);
    for answered in waiting {
        assert_eq!(answered.await.unwrap(), StatusCode::OK);
    }
}
