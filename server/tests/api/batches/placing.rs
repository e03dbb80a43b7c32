//! Places of dumps and copies, reservations, and starting estimates.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::fixture::{GB, asked, close, three_nodes};

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
