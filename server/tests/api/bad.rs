//! Requests that no client should send, and the replies to them.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use serde_json::{Value, json};

use crate::fixture::{Asked, GB, asked, pointers, three_nodes};

/// Checks that a request is refused with this kind and pointer.
async fn refused(asked: &Asked, path: &str, body: &str, kind: &str, pointer: &str) {
    let (status, problem) = asked.raw("POST", path, body.as_bytes().to_vec()).await;
    assert!(status.is_client_error(), "{body}: {status} {problem:#}");
    assert_eq!(
        problem["type"],
        format!("urn:permafrost:problem:{kind}"),
        "{body}: {problem:#}"
    );
    assert_eq!(problem["status"], status.as_u16());
    assert_eq!(problem["instance"], path);
    if !pointer.is_empty() {
        assert_eq!(pointers(&problem), [pointer], "{body}: {problem:#}");
    }
}

#[tokio::test]
async fn numbers_that_are_none_are_refused_with_their_place() {
    let asked = asked(three_nodes());
    for number in [
        "NaN",
        "-NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "-1",
        "1e13",
        "\"5\"",
        "true",
        "[]",
    ] {
        let body = format!(r#"{{"candidates":[{{"id":"a"}},{{"id":"b","progress_s":{number}}}]}}"#);
        refused(
            &asked,
            "/v1/preempt",
            &body,
            "invalid",
            "/candidates/1/progress_s",
        )
        .await;
    }
    for number in ["-1", "1.5", "1e30", "NaN", "1152921504606846977"] {
        let body = format!(r#"{{"tasks":[{{"id":"a","full_bytes": {number}}}]}}"#);
        refused(
            &asked,
            "/v1/estimate",
            &body,
            "invalid",
            "/tasks/0/full_bytes",
        )
        .await;
        let body = format!(
            "{{\"candidates\":[{{\"id\":\"a\",\n\"holds\":{{\"memory_bytes\":{number}}}}}]}}"
        );
        refused(
            &asked,
            "/v1/preempt",
            &body,
            "invalid",
            "/candidates/0/holds/memory_bytes",
        )
        .await;
    }
    let body = r#"{"tasks":[{"id":"a","dirty_bytes_per_s":0}]}"#;
    refused(
        &asked,
        "/v1/estimate",
        body,
        "invalid",
        "/tasks/0/dirty_bytes_per_s",
    )
    .await;
    let body = r#"{"candidates":[],"delay_weight":-0.1}"#;
    refused(&asked, "/v1/preempt", body, "invalid", "/delay_weight").await;
    let body = r#"{"direction":"write","bytes":1,"priority":12}"#;
    refused(&asked, "/v1/reserve", body, "invalid", "/priority").await;
}

#[tokio::test]
async fn unknown_fields_and_wrong_types_are_refused_with_their_place() {
    let asked = asked(three_nodes());
    for (path, body, pointer) in [
        ("/v1/preempt", r#"{"candidates":[],"wnated":{}}"#, "/wnated"),
        (
            "/v1/preempt",
            r#"{"candidates":[{"id":"a","no~w/":1}]}"#,
            "/candidates/0/no~0w~1",
        ),
        (
            "/v1/preempt",
            r#"{"candidates":[{"id":7}]}"#,
            "/candidates/0/id",
        ),
        ("/v1/preempt", r#"{"candidates":{}}"#, "/candidates"),
        ("/v1/preempt", r#"{"candidates":[{}]}"#, "/candidates/0"),
        ("/v1/preempt", r#"{"candidates":[],"by":"p99"}"#, "/by"),
        (
            "/v1/preempt",
            r#"{"candidates":[],"may_wait":1}"#,
            "/may_wait",
        ),
        (
            "/v1/preempt",
            r#"{"candidates":[{"id":"a"},{"id":"b"}],"together":[[0],[1,2]]}"#,
            "/together/1/1",
        ),
        (
            "/v1/preempt",
            r#"{"candidates":[{"id":"a"},{"id":"b"}],"together":[[1],[0,1]]}"#,
            "/together/1/1",
        ),
        (
            "/v1/preempt",
            r#"{"candidates":[{"id":"a"}],"together":[[-1]]}"#,
            "/together/0/0",
        ),
        (
            "/v1/preempt",
            r#"{"candidates":[{"id":"a"}],"together":[[0]],"wanted":{}}"#,
            "/together",
        ),
        (
            "/v1/preempt",
            r#"{"candidates":[],"figures":[{"node":"a"},{"node":"a"}]}"#,
            "/figures/1/node",
        ),
        (
            "/v1/preempt",
            r#"{"candidates":[],"figures":[{"node":"a","write_bytes_per_s":0}]}"#,
            "/figures/0/write_bytes_per_s",
        ),
        ("/v1/preempt", "[]", ""),
        ("/v1/preempt", "{}", ""),
        ("/v1/preempt", "7", ""),
        (
            "/v1/estimate",
            r#"{"tasks":[],"mechanisms":["nuke"]}"#,
            "/mechanisms/0",
        ),
        ("/v1/resume", r#"{"checkpoints":["a"],"limit":0}"#, "/limit"),
        (
            "/v1/resume",
            r#"{"checkpoints":["a"],"limit":-1}"#,
            "/limit",
        ),
        ("/v1/resume", r#"{"checkpoints":[1]}"#, "/checkpoints/0"),
        (
            "/v1/place",
            r#"{"placements":[{"size_bytes":1,"copies":0}]}"#,
            "/placements/0/copies",
        ),
        (
            "/v1/place",
            r#"{"placements":[{"size_bytes":1,"copies":101}]}"#,
            "/placements/0/copies",
        ),
        (
            "/v1/place",
            r#"{"placements":[{"copies":1}]}"#,
            "/placements/0",
        ),
        (
            "/v1/reserve",
            r#"{"direction":"up","bytes":1}"#,
            "/direction",
        ),
    ] {
        refused(&asked, path, body, "invalid", pointer).await;
    }
}

#[tokio::test]
async fn what_is_no_json_is_told_from_what_is_wrong() {
    let asked = asked(three_nodes());
    for body in [
        "",
        "{",
        "nonsense",
        "{\"candidates\":[]} more",
        "{\"candidates\":[],}",
        "\u{0}",
    ] {
        refused(&asked, "/v1/preempt", body, "not-json", "").await;
    }
    let deep = "[".repeat(100_000);
    let (status, _) = asked.raw("POST", "/v1/preempt", deep.into_bytes()).await;
    assert!(status == 400 || status == 422, "{status}");
    let (status, _) = asked
        .raw(
            "POST",
            "/v1/preempt",
            b"{\"candidates\":[{\"id\":\"\xff\"}]}".to_vec(),
        )
        .await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn nodes_that_nobody_knows_are_refused_with_their_place() {
    let asked = asked(three_nodes());
    for (path, body, pointer) in [
        (
            "/v1/estimate",
            r#"{"tasks":[],"nodes":["a","x"]}"#,
            "/nodes/1",
        ),
        (
            "/v1/preempt",
            r#"{"candidates":[],"swaps":[{"node":"x","free_memory_bytes":1,"free_swap_bytes":1}]}"#,
            "/swaps/0/node",
        ),
        (
            "/v1/resume",
            r#"{"checkpoints":[],"nodes":["x"]}"#,
            "/nodes/0",
        ),
        (
            "/v1/place",
            r#"{"placements":[{"size_bytes":1,"copies":1,"local":"x"}]}"#,
            "/placements/0/local",
        ),
        (
            "/v1/place",
            r#"{"placements":[{"size_bytes":1,"copies":1,"holders":["a","x"]}]}"#,
            "/placements/0/holders/1",
        ),
        (
            "/v1/place",
            r#"{"placements":[{"size_bytes":1,"copies":1,"without":["x"]}]}"#,
            "/placements/0/without/0",
        ),
        (
            "/v1/reserve",
            r#"{"node":"x","direction":"read","bytes":1}"#,
            "/node",
        ),
    ] {
        refused(&asked, path, body, "unknown-node", pointer).await;
    }
}

#[tokio::test]
async fn batches_have_limits_and_empty_ones_are_answered() {
    let asked = asked(three_nodes());
    let many = |one: &str, count: usize| vec![one; count].join(",");
    let million = format!(r#"{{"checkpoints":[{}]}}"#, many(r#""a""#, 1_000_000));
    refused(&asked, "/v1/resume", &million, "too-many", "/checkpoints").await;
    let tasks = format!(r#"{{"candidates":[{}]}}"#, many(r#"{"id":"a"}"#, 10_001));
    refused(&asked, "/v1/preempt", &tasks, "too-many", "/candidates").await;
    let holders = format!(
        r#"{{"placements":[{{"size_bytes":1,"copies":1,"holders":[{}]}}]}}"#,
        many(r#""a""#, 101)
    );
    refused(
        &asked,
        "/v1/place",
        &holders,
        "too-many",
        "/placements/0/holders",
    )
    .await;
    // 10,000 × 3 × 7 answers.
    let nodes = r#""nodes":["a","b","c"]"#;
    let crossed = format!(r#"{{"tasks":[{}],{nodes}}}"#, many(r#"{"id":"a"}"#, 10_000));
    refused(&asked, "/v1/estimate", &crossed, "too-many", "/tasks").await;
    for (path, body, list) in [
        ("/v1/estimate", json!({"tasks": []}), "answers"),
        ("/v1/preempt", json!({"candidates": []}), "victims"),
        ("/v1/resume", json!({"checkpoints": []}), "answers"),
        ("/v1/place", json!({"placements": []}), "answers"),
    ] {
        assert_eq!(asked.ok(path, &body).await[list], json!([]), "{path}");
    }
}

#[tokio::test]
async fn the_largest_batches_are_answered() {
    let asked = asked(three_nodes());
    let tasks: Vec<Value> = (0..10_000)
        .map(|n| {
            let node = if n % 2 == 0 { "a" } else { "b" };
            json!({"id": format!("task-{n}"), "node": node, "full_bytes": GB, "progress_s": n,
                   "holds": {"cpu_millis": 1000}})
        })
        .collect();
    let wanted = json!({"cpu_millis": 5_000_000});
    let answer = asked
        .ok(
            "/v1/preempt",
            &json!({"candidates": tasks, "wanted": wanted, "detail": "totals"}),
        )
        .await;
    assert_eq!(answer["victims"].as_array().unwrap().len(), 5000);
    let answer = asked
        .ok(
            "/v1/estimate",
            &json!({"tasks": tasks, "nodes": ["a", "b"], "detail": "totals"}),
        )
        .await;
    assert_eq!(answer["answers"].as_array().unwrap().len(), 10_000 * 2 * 7);
}

#[tokio::test]
async fn bodies_have_a_limit_and_say_what_they_are() {
    let asked = asked(three_nodes());
    let (status, problem) = asked
        .raw("POST", "/v1/preempt", vec![b' '; 10_000_000])
        .await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(problem["type"], "urn:permafrost:problem:too-large");
    // The same without a length.
    let pieces =
        futures_util::stream::iter((0..10).map(|_| Ok::<_, std::io::Error>(vec![b' '; 1 << 20])));
    let request = Request::post("/v1/preempt")
        .header("content-type", "application/json")
        .body(Body::from_stream(pieces))
        .unwrap();
    assert_eq!(
        asked.send(request).await.status(),
        StatusCode::PAYLOAD_TOO_LARGE
    );
    // A peer that goes away in the middle.
    let broken = [Ok(b"{".to_vec()), Err(std::io::Error::other("gone"))];
    let request = Request::post("/v1/preempt")
        .header("content-type", "application/json; charset=utf-8")
        .body(Body::from_stream(futures_util::stream::iter(broken)))
        .unwrap();
    assert_eq!(asked.send(request).await.status(), StatusCode::BAD_REQUEST);
    for content_type in [
        None,
        Some("text/plain"),
        Some("application/x-www-form-urlencoded"),
    ] {
        let mut request = Request::post("/v1/preempt");
        if let Some(content_type) = content_type {
            request = request.header("content-type", content_type);
        }
        let response = asked.send(request.body(Body::from("{}")).unwrap()).await;
        assert_eq!(response.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
    }
}

#[tokio::test]
async fn paths_and_methods_that_are_not_there_are_problems_too() {
    let asked = asked(three_nodes());
    let (status, problem) = asked.get("/v1/nothing").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(
        (&problem["type"], &problem["instance"]),
        (
            &json!("urn:permafrost:problem:not-found"),
            &json!("/v1/nothing")
        )
    );
    let (status, problem) = asked.get("/v1/preempt").await;
    assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(problem["type"], "urn:permafrost:problem:method");
}

#[tokio::test]
async fn figures_that_lie_do_no_harm() {
    use permafrost_scheduling::estimator::SizedRates;
    use permafrost_scheduling::figure::{Figure, Missing, What};
    use permafrost_scheduling::quantity::{Bytes, BytesPerSecond};

    use crate::fixture::seconds;
    let source = three_nodes();
    {
        let mut nodes = source.nodes.lock();
        nodes[0].doubts = vec!["a write bandwidth of 10^18 bytes a second".into()];
        nodes[0].figures.write = SizedRates::uniform(Figure::given(BytesPerSecond::MIN));
        nodes[0].figures.write_queue = Figure::given(Bytes::new(u64::MAX));
        nodes[1].figures.read = SizedRates::uniform(
            Missing::TooOld {
                what: What::ReadBandwidth,
                age: seconds(7200.0),
                limit: seconds(3600.0),
            }
            .into(),
        );
        nodes[2].figures.read_queue = Missing::NotBelieved {
            what: What::Queue,
            refused: 3,
        }
        .into();
        nodes[2].live = true;
    }
    let asked = asked(Arc::clone(&source));
    let (_, nodes) = asked.get("/v1/nodes").await;
    assert_eq!(
        nodes["nodes"][0]["doubts"][0],
        "a write bandwidth of 10^18 bytes a second"
    );
    let answer = asked
        .ok(
            "/v1/estimate",
            &json!({"tasks": [{"id": "k", "full_bytes": 5 * GB, "progress_s": 1}], "nodes": ["a", "b", "c"],
                    "mechanisms": ["full_dump"], "copies": "local"}),
        )
        .await;
    // As slow as there is, and as long: the longest time.
    assert_eq!(answer["answers"][0]["cost"]["delay_s"]["p50"], 1e12);
    assert_eq!(
        answer["answers"][1]["unknown"],
        "the bandwidth for reading was last measured 7200.0 s ago; figures hold for 3600.0 s"
    );
    let answer = asked
        .ok(
            "/v1/resume",
            &json!({"checkpoints": ["sort"], "nodes": ["c"]}),
        )
        .await;
    assert_eq!(
        answer["answers"][0]["unknown"][0]["why"],
        "the last 3 reports of the length of the queue cannot be true"
    );
}
