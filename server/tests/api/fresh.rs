//! Age of the replies: the API keeps up with the daemon, and reports it when it cannot.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use http_body_util::BodyExt;
use permafrost_api_types::events::ApiEvent;
use permafrost_http_api::{Api, ApiConfig, refresh};
use serde_json::{Value, json};

use crate::fixture::{Asked, GB, Plain, checkpoint, node, three_nodes};

fn quick() -> ApiConfig {
    ApiConfig {
        refresh: Duration::from_millis(20),
        list: Duration::from_secs(3600),
        stale_after: Duration::from_secs(3600),
    }
}

fn started(source: &Arc<Plain>, config: ApiConfig) -> (Asked, refresh::Refresher) {
    let api = Api::new(Arc::clone(source) as _);
    let refresher = refresh::start(&api, config).unwrap();
    (Asked::new(api), refresher)
}

/// Waits until a condition holds, for as long as a test may take.
async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(60), waiting).await;
    assert!(waited.is_ok(), "{what} did not come");
}

async fn is_ready(asked: &Asked) -> bool {
    let request = Request::get("/readyz").body(Body::empty()).unwrap();
    asked.send(request).await.status() == StatusCode::OK
}

async fn job_names(asked: &Asked) -> Vec<String> {
    let (_, answer) = asked.get("/v1/jobs").await;
    let jobs = answer["jobs"].as_array().unwrap();
    jobs.iter()
        .map(|job| job["job"].as_str().unwrap().to_owned())
        .collect()
}

#[tokio::test]
async fn before_the_first_look_there_is_nothing_to_say() {
    let source = three_nodes();
    source.hang(true);
    let (asked, _refresher) = started(&source, quick());
    let (status, problem) = asked.post("/v1/preempt", &json!({"candidates": []})).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(problem["retry_after_s"], 1);
    assert_eq!(
        asked.get("/v1/nodes").await.0,
        StatusCode::SERVICE_UNAVAILABLE
    );
    assert!(!is_ready(&asked).await);
    source.hang(false);
    until("the first look", async || is_ready(&asked).await).await;
}

#[tokio::test]
async fn nodes_come_go_and_change_from_look_to_look() {
    let source = three_nodes();
    let (asked, _refresher) = started(&source, quick());
    until("the first look", async || is_ready(&asked).await).await;
    let places = async || {
        let answer = asked
            .ok(
                "/v1/place",
                &json!({"placements": [{"size_bytes": GB, "copies": 9}]}),
            )
            .await;
        let nodes = answer["answers"][0]["nodes"].as_array().unwrap().clone();
        nodes
            .iter()
            .map(|node| node["node"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(places().await, ["b", "a"]);
    // b goes away for good, c comes back, d is new and quicker than all.
    {
        let mut nodes = source.nodes.lock();
        nodes.remove(1);
        nodes[1].live = true;
        nodes.push(node("d", (20.0, 20.0), (0, 0)));
    }
    until("the change", async || places().await == ["d", "c", "a"]).await;
    let answer = asked
        .ok("/v1/resume", &json!({"checkpoints": ["sort"]}))
        .await;
    let nodes: Vec<&Value> = answer["answers"][0]["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .collect();
    // No link to c or d is known; b is not ranked, as it is not there.
    assert_eq!(nodes.len(), 1);
    assert_eq!(nodes[0]["node"], "a");
    assert_eq!(asked.get("/v1/nodes?name=b").await.0, StatusCode::NOT_FOUND);
    // It comes back under its old number.
    source.nodes.lock().push(node("b", (30.0, 30.0), (0, 0)));
    until("its return", async || {
        places().await == ["b", "d", "c", "a"]
    })
    .await;
}

#[tokio::test]
async fn an_event_is_followed_by_a_new_list() {
    let source = three_nodes();
    let (asked, _refresher) = started(&source, quick());
    until("the first look", async || is_ready(&asked).await).await;
    assert_eq!(job_names(&asked).await, ["sort", "team/k-means"]);
    source
        .checkpoints
        .lock()
        .push(checkpoint("new", 1, 1, &["a"]));
    let event = ApiEvent::Checkpoint {
        checkpoint: "new@1".into(),
        job: "new".into(),
        generation: 1,
        memory_bytes: GB,
        stored_bytes: GB,
    };
    source.events.send(event).unwrap();
    // Without it the next list would come in an hour.
    until("the new list", async || job_names(&asked).await.len() == 3).await;
}

#[tokio::test]
async fn nobody_is_told_to_start_anew_what_was_sealed_before_the_question() {
    let source = three_nodes();
    let (asked, _refresher) = started(&source, quick());
    until("the first look", async || is_ready(&asked).await).await;
    // Of another node, say: nothing is heard of it, and the next list would come in an hour.
    let sealed = checkpoint("new", 1, 1, &["a"]);
    source.checkpoints.lock().push(sealed);
    let resume = json!({"checkpoints": ["sort", "new", "new@2", "none"]});
    let answer = asked.ok("/v1/resume", &resume).await;
    let answers = &answer["answers"];
    assert_eq!(
        (&answers[0]["generation"], &answers[1]["generation"]),
        (&json!(7), &json!(1))
    );
    assert_eq!(
        (&answers[2]["restart"], &answers[3]["restart"]),
        (&json!(true), &json!(true))
    );
    let sealed = checkpoint("newer", 1, 1, &["a"]);
    source.checkpoints.lock().push(sealed);
    let (status, _) = asked.get("/v1/jobs?job=newer").await;
    assert_eq!(status, StatusCode::OK);
    // While nothing can be listed there is no saying that there is none.
    source.hang(true);
    let (status, problem) = asked
        .post("/v1/resume", &json!({"checkpoints": ["none"]}))
        .await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(problem["retry_after_s"], 5);
    let known = json!({"checkpoints": ["new"]});
    assert_eq!(asked.post("/v1/resume", &known).await.0, StatusCode::OK);
    source.hang(false);
}

#[tokio::test]
async fn who_hangs_holds_up_no_answer_and_the_age_grows() {
    let source = three_nodes();
    let (asked, _refresher) = started(&source, quick());
    until("the first look", async || is_ready(&asked).await).await;
    source.hang(true);
    let mut before = 0.0;
    until("an older answer", async || {
        let (status, answer) = asked.get("/v1/nodes").await;
        assert_eq!(status, StatusCode::OK);
        before = answer["age_s"].as_f64().unwrap();
        before > 0.3
    })
    .await;
    let answer = asked
        .ok(
            "/v1/preempt",
            &json!({"candidates": [{"id": "k", "node": "b", "progress_s": 1}]}),
        )
        .await;
    assert!(answer["age_s"].as_f64().unwrap() >= before);
    assert_eq!(answer["victims"][0]["mechanism"], "kill");
    source.hang(false);
    until("a fresh answer", async || {
        asked.api.world().unwrap().age() < Duration::from_millis(200)
    })
    .await;
}

#[tokio::test]
async fn queues_are_unknown_when_the_daemon_has_not_been_seen_for_too_long() {
    let source = three_nodes();
    let config = ApiConfig {
        stale_after: Duration::from_millis(300),
        ..quick()
    };
    let (asked, _refresher) = started(&source, config);
    until("the first look", async || is_ready(&asked).await).await;
    let estimate = async || {
        let tasks = json!([{"id": "k", "node": "b", "full_bytes": GB, "progress_s": 7}]);
        let request = json!({"tasks": tasks, "mechanisms": ["full_dump", "kill"]});
        asked.ok("/v1/estimate", &request).await["answers"].clone()
    };
    assert!(estimate().await[0].get("cost").is_some());
    source.hang(true);
    until("what is too old", async || {
        estimate().await[0].get("unknown").is_some()
    })
    .await;
    let answers = estimate().await;
    let why = answers[0]["unknown"].as_str().unwrap();
    assert!(
        why.starts_with("the length of the queue was last measured")
            && why.ends_with("figures hold for 300.0 ms"),
        "{why}"
    );
    // What needs no queue is known as before.
    assert!(answers[1].get("cost").is_some());
    let placed = asked
        .ok(
            "/v1/place",
            &json!({"placements": [{"size_bytes": 1, "copies": 1}]}),
        )
        .await;
    assert_eq!(
        (
            &placed["answers"][0]["missing"],
            &placed["answers"][0]["unranked"]
        ),
        (&json!(1), &json!(2))
    );
    source.hang(false);
    until("figures that hold", async || {
        estimate().await[0].get("cost").is_some()
    })
    .await;
}

#[tokio::test]
async fn who_panics_is_asked_again() {
    let source = three_nodes();
    let (asked, _refresher) = started(&source, quick());
    until("the first look", async || is_ready(&asked).await).await;
    source.panics.store(true, Ordering::SeqCst);
    let old = asked.api.world().unwrap();
    until("an older answer", async || {
        asked.api.world().unwrap().age() > Duration::from_millis(200)
    })
    .await;
    assert_eq!(asked.get("/v1/nodes").await.0, StatusCode::OK);
    // To reserve has to be passed on, and fails alone.
    let (status, _) = asked
        .post("/v1/reserve", &json!({"direction": "write", "bytes": 1}))
        .await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    source.panics.store(false, Ordering::SeqCst);
    until("a fresh answer", async || {
        !Arc::ptr_eq(&asked.api.world().unwrap(), &old)
    })
    .await;
    until("a whole one", async || {
        asked.api.world().unwrap().age() < Duration::from_millis(200)
    })
    .await;
}

/// Returns the next event of a stream, without comments.
async fn next_event(body: &mut Body) -> (String, Value) {
    loop {
        let frame = tokio::time::timeout(Duration::from_secs(60), body.frame()).await;
        let frame = frame.expect("an event").unwrap().unwrap();
        let text = String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap();
        let field = |name: &str| {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
            line.map(str::to_owned)
        };
        if let (Some(event), Some(data)) = (field("event"), field("data")) {
            return (event, serde_json::from_str(&data).unwrap());
        }
    }
}

async fn listen(asked: &Asked) -> Body {
    let request = Request::get("/v1/events").body(Body::empty()).unwrap();
    let response = asked.send(request).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    response.into_body()
}

#[tokio::test]
async fn events_are_passed_on_and_changes_of_nodes_are_events() {
    let source = three_nodes();
    let (mut asked, _refresher) = started(&source, quick());
    until("the first look", async || is_ready(&asked).await).await;
    let mut body = listen(&asked).await;
    asked.caller.as_mut().unwrap().namespaces =
        permafrost_identity::Namespaces::new(["team"]).unwrap();
    let mut of_team = listen(&asked).await;
    let removed = |job: &str| ApiEvent::Removed {
        checkpoint: format!("{job}@1"),
        job: job.into(),
        generation: 1,
    };
    source.events.send(removed("sort")).unwrap();
    source.events.send(removed("team/k-means")).unwrap();
    let (name, data) = next_event(&mut body).await;
    assert_eq!(
        (name.as_str(), &data["checkpoint"]),
        ("removed", &json!("sort@1"))
    );
    assert_eq!(next_event(&mut body).await.1["job"], "team/k-means");
    // The others' jobs are not told.
    assert_eq!(next_event(&mut of_team).await.1["job"], "team/k-means");
    source.nodes.lock()[2].live = true;
    let (name, data) = next_event(&mut body).await;
    assert_eq!(
        (name.as_str(), data),
        ("node", json!({"event": "node", "node": "c", "live": true}))
    );
    let mut told = Vec::new();
    for _ in 0..2 {
        told.push(next_event(&mut body).await);
    }
    // Its queues are known again.
    assert!(
        told.iter()
            .all(|(name, data)| name == "queue" && data["node"] == "c"),
        "{told:?}"
    );
}

#[tokio::test]
async fn who_reads_too_slowly_is_told_how_much_was_missed() {
    let source = three_nodes();
    let (asked, _refresher) = started(&source, quick());
    until("the first look", async || is_ready(&asked).await).await;
    let mut body = listen(&asked).await;
    // One at a time, so that the API itself misses none: 2,000 of which 1,024 are kept.
    let mut heard = source.events.subscribe();
    for generation in 1..=2000 {
        let event = ApiEvent::Removed {
            checkpoint: format!("j@{generation}"),
            job: "j".into(),
            generation,
        };
        source.events.send(event).unwrap();
        heard.recv().await.unwrap();
        tokio::task::yield_now().await;
        tokio::task::yield_now().await;
    }
    let (name, data) = next_event(&mut body).await;
    assert_eq!(name, "missed");
    let missed = data["missed"].as_u64().unwrap();
    assert!(missed > 0, "{missed}");
    assert_eq!(next_event(&mut body).await.0, "removed");
}
