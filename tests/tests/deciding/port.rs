//! The port: admitted callers, rate limits, and requests that no client should send.

use super::asking::{ask, port, socket};
use super::*;
use std::os::unix::fs::PermissionsExt as _;

struct Port {
    daemon: Daemon,
    read: String,
    reserve: String,
}

/// Starts a daemon with a port on loopback, and tokens of two callers.
fn with_port(work: &Path, extra: &[&str]) -> Port {
    let mut lines = String::new();
    let mut token = |name: &str, scopes: &str| {
        let binary = permafrost_tests::binaries::path("permafrost").unwrap();
        let made = std::process::Command::new(binary)
            .args(["--json", "token", "new", "--name", name, "--scopes", scopes])
            .output()
            .unwrap();
        let made: Value = serde_json::from_slice(&made.stdout).unwrap();
        lines += made["line"].as_str().unwrap();
        lines += "\n";
        made["token"].as_str().unwrap().to_owned()
    };
    let read = token("looks", "read");
    let reserve = token("slurm", "read,reserve");
    let tokens = work.join("tokens");
    std::fs::write(&tokens, lines).unwrap();
    std::fs::set_permissions(&tokens, std::fs::Permissions::from_mode(0o600)).unwrap();
    let tokens = format!("--api-tokens={}", tokens.display());
    let port = ["--listen-api=127.0.0.1:0", &tokens];
    Port {
        daemon: quiet(work, &[&port, extra].concat()),
        read,
        reserve,
    }
}

#[test]
fn tokens_say_who_may_do_what() {
    let work = tempfile::tempdir().unwrap();
    let Port {
        daemon,
        read,
        reserve,
    } = with_port(work.path(), &[]);
    let ask = |method, path, token: &str, body: &str| {
        ask(port(&daemon), method, path, token, body.as_bytes())
    };
    for stranger in ["", "pft-0", &"0".repeat(64)] {
        let answer = ask("GET", "/v1/nodes", stranger, "");
        answer.assert_problem(401, "unauthenticated", &[]);
        let challenge = answer.header("www-authenticate").unwrap_or_default();
        assert!(challenge.starts_with("Bearer"), "{answer:?}");
        ask("GET", "/healthz", stranger, "").assert_problem(401, "unauthenticated", &[]);
    }
    let place = r#"{"direction":"write","bytes":1000}"#;
    for allowed in [&read, &reserve] {
        let nodes = ask("GET", "/v1/nodes", allowed, "");
        assert_eq!(nodes.status, 200, "{nodes:?}");
        assert_eq!(nodes.body["nodes"].as_array().map(Vec::len), Some(1));
        let plan = ask("POST", "/v1/preempt", allowed, r#"{"candidates":[]}"#);
        assert_eq!(plan.status, 200, "{plan:?}");
        ask("PUT", "/v1/figures", allowed, "{}").assert_problem(403, "forbidden", &[]);
    }
    ask("POST", "/v1/reserve", &read, place).assert_problem(403, "forbidden", &[]);
    let reserved = ask("POST", "/v1/reserve", &reserve, place);
    assert_eq!(reserved.status, 200, "{reserved:?}");
    let path = format!("/v1/reserve/{}", reserved.body["token"].as_str().unwrap());
    ask("DELETE", &path, &read, "").assert_problem(403, "forbidden", &[]);
    assert_eq!(ask("DELETE", &path, &reserve, "").status / 100, 2);

    // The shell's exit codes mean the same.
    let url = format!("http://{}", daemon.api());
    let file = work.path().join("token");
    let with = |token: &str| {
        std::fs::write(&file, token).unwrap();
        let file = file.to_str().unwrap();
        told(&daemon, &["nodes", "--api", &url, "--api-token-file", file])
    };
    assert_eq!(with(&read).0, 0);
    let (code, nothing, error) = with("pft-nobody");
    assert_eq!((code, nothing), (9, Value::Null), "{error}");
    assert_no_panic(&daemon);
}

#[test]
fn who_asks_too_often_is_told_when_to_come_again() {
    let work = tempfile::tempdir().unwrap();
    let Port {
        daemon,
        read,
        reserve,
    } = with_port(work.path(), &["--api-rate=1"]);
    let ask = |token: &str| ask(port(&daemon), "GET", "/v1/nodes", token, b"");
    // Two at once, and one more each second: a hundred take no hundred seconds.
    let refused = (0..100)
        .map(|_| ask(&read))
        .find(|answer| answer.status != 200)
        .expect("a limit");
    refused.assert_problem(429, "too-often", &[]);
    let again: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=10).contains(&again), "{refused:?}");
    // Another one's requests are another one's.
    assert_eq!(ask(&reserve).status, 200);
    assert_no_panic(&daemon);
}

#[test]
fn what_nobody_should_send_is_refused_and_the_field_named() {
    let work = tempfile::tempdir().unwrap();
    let Port { daemon, read, .. } = with_port(work.path(), &[]);
    let large = vec![b' '; 10_000_000];
    for stream in [socket(&daemon), port(&daemon)] {
        let answer = ask(stream, "POST", "/v1/preempt", &read, &large);
        answer.assert_problem(413, "too-large", &[]);
    }
    let post = |path, body: &str| ask(port(&daemon), "POST", path, &read, body.as_bytes());
    // A million tasks, in as few bytes as there can be, are more than a body takes; so are 10,001 in a small one.
    let tasks = |count: usize| {
        let task = r#"{"id":""}"#;
        format!(r#"{{"candidates":[{}]}}"#, vec![task; count].join(","))
    };
    post("/v1/preempt", &tasks(1_000_000)).assert_problem(413, "too-large", &[]);
    post("/v1/preempt", &tasks(10_001)).assert_problem(422, "too-many", &["/candidates"]);
    assert_eq!(post("/v1/preempt", &tasks(10_000)).status, 200);
    // Names take less room: a million of them fit.
    let million = format!(
        r#"{{"checkpoints":[{}]}}"#,
        vec!["\"a\""; 1_000_000].join(",")
    );
    post("/v1/resume", &million).assert_problem(422, "too-many", &["/checkpoints"]);

    for (path, body, kind, pointer) in [
        (
            "/v1/estimate",
            r#"{"tasks":[{"id":"a"},{"id":"b","progress_s":NaN}]}"#,
            "invalid",
            "/tasks/1/progress_s",
        ),
        (
            "/v1/preempt",
            r#"{"candidates":[{"id":"a","resident_bytes":-1}]}"#,
            "invalid",
            "/candidates/0/resident_bytes",
        ),
        (
            "/v1/place",
            r#"{"placements":[{"size_bytes":-5,"copies":1}]}"#,
            "invalid",
            "/placements/0/size_bytes",
        ),
        (
            "/v1/place",
            r#"{"placements":[{"size_bytes":1,"copies":1,"local":"nowhere"}]}"#,
            "unknown-node",
            "/placements/0/local",
        ),
        (
            "/v1/estimate",
            r#"{"tasks":[{"id":"a"}],"nodes":["nowhere"]}"#,
            "unknown-node",
            "/nodes/0",
        ),
        (
            "/v1/resume",
            r#"{"checkpoints":["a"],"nodes":["nowhere"]}"#,
            "unknown-node",
            "/nodes/0",
        ),
        (
            "/v1/preempt",
            r#"{"candidates":[],"dealy_weight":1}"#,
            "invalid",
            "/dealy_weight",
        ),
    ] {
        post(path, body).assert_problem(422, kind, &[pointer]);
    }
    post("/v1/preempt", "{").assert_problem(400, "not-json", &[]);
    // Of candidates the others are decided on.
    let mixed = r#"{"candidates":[{"id":"a","node":"nowhere"},{"id":"b","progress_s":1}]}"#;
    let plan = post("/v1/preempt", mixed);
    assert_eq!(plan.status, 200, "{plan:?}");
    assert_eq!(plan.body["unknown_node"][0]["task"], "a");
    assert_eq!(plan.body["victims"][0]["task"], "b");
    assert_no_panic(&daemon);
}
