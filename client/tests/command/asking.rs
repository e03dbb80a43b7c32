//! Tests of `nodes`, `cost`, `plan` and `token` against an API that is a thread of the test: the requests, the
//! output, and the exit codes and words for scripts.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::process::Stdio;
use std::sync::Arc;

use parking_lot::Mutex;
use permafrost_criu::origin;
use serde_json::{Value, json};

use crate::fake::{Daemon, Victim, assert_exit, json as read_json, stderr, stdout};

/// An API that answers each path with a status and a body, and records the requests.
struct Api {
    daemon: Daemon,
    seen: Arc<Mutex<Vec<(String, Value)>>>,
}

impl Api {
    fn start(answers: &[(&'static str, u16, Value)]) -> Self {
        let daemon = Daemon::start(|_| vec![]);
        let listener = UnixListener::bind(daemon.path().join("api.sock")).unwrap();
        let answers = answers.to_vec();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let remembered = Arc::clone(&seen);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, answers) = (stream.unwrap(), answers.clone());
                let seen = Arc::clone(&remembered);
                std::thread::spawn(move || {
                    let mut reader = BufReader::new(stream.try_clone().unwrap());
                    while let Some((line, body)) = request(&mut reader) {
                        let found = answers.iter().find(|(path, ..)| line.contains(path));
                        let (_, status, answer) = found.cloned().unwrap_or(("", 404, json!({})));
                        seen.lock().push((line, body));
                        let answer = answer.to_string();
                        let length = answer.len();
                        let text = format!(
                            "HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n{answer}"
                        );
                        if stream.write_all(text.as_bytes()).is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { daemon, seen }
    }

    fn asked(&self, path: &str) -> Value {
        let seen = self.seen.lock();
        let found = seen.iter().rfind(|(line, _)| line.contains(path));
        found.map(|(_, body)| body.clone()).unwrap()
    }
}

/// Reads the request line and the body; `None` at the end.
fn request(reader: &mut impl BufRead) -> Option<(String, Value)> {
    let mut first = String::new();
    reader.read_line(&mut first).ok().filter(|read| *read > 0)?;
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        if line.trim().is_empty() {
            break;
        }
        if let Some(number) = line.strip_prefix("content-length: ") {
            length = number.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((first, serde_json::from_slice(&body).unwrap_or(Value::Null)))
}

fn nodes() -> Value {
    json!({"answered_by": "n1", "age_s": 0.5, "nodes": []})
}

fn spread(seconds: f64) -> Value {
    json!({"p50": seconds, "p95": seconds})
}

fn cost(seconds: f64) -> Value {
    json!({
        "overhead_s": spread(seconds), "delay_s": spread(0.5), "until_running_s": spread(0.5),
        "age_s": 1.0, "reason": "so it is", "a_field_of_a_later_version": 1
    })
}

fn plan(mechanism: &str, enough: bool) -> Value {
    let victims = json!([{
        "task": "t", "node": "n1", "mechanism": mechanism, "score_s": 1.0, "cost": cost(1.0),
        "frees": {"cpu_millis": 500, "memory_bytes": 4096}
    }]);
    json!({
        "answered_by": "n1", "age_s": 0.5, "victims": victims, "enough": enough,
        "frees": {"cpu_millis": 500, "memory_bytes": 4096},
        "lacking": {"cpu_millis": 0, "memory_bytes": if enough { 0 } else { 8192 }},
        "undecided": [], "unknown_node": []
    })
}

#[test]
fn json_is_the_apis_own_answer() {
    let answer =
        json!({"answered_by": "n1", "age_s": 0.5, "nodes": [], "a_field_of_a_later_version": [1]});
    let api = Api::start(&[("/v1/nodes", 200, answer.clone())]);
    let output = api.daemon.run(&["nodes", "--json"]);
    assert_exit(&output, 0);
    assert_eq!(stdout(&output), format!("{answer}\n"));
    let output = api.daemon.run(&["nodes"]);
    assert!(stdout(&output).contains("as of 500.0 ms ago, asked n1"));
}

#[test]
fn a_node_is_asked_for_by_its_name() {
    let api = Api::start(&[("/v1/nodes?name=n%209", 200, nodes())]);
    let output = api.daemon.run(&["nodes", "n 9"]);
    assert_exit(&output, 3);
}

#[test]
fn a_process_is_asked_about_with_what_proc_says_of_it() {
    let estimate = json!({
        "answered_by": "n1", "age_s": 0.5,
        "answers": [
            {"task": "t", "node": "n1", "mechanism": "kill", "cost": cost(3.0)},
            {"task": "t", "node": "n1", "mechanism": "wait", "unknown": "nobody knows its end"}
        ]
    });
    let api = Api::start(&[("/v1/nodes", 200, nodes()), ("/v1/estimate", 200, estimate)]);
    let task = Victim::start();
    let output = api.daemon.run(&[
        "cost",
        "--pid",
        &task.pid(),
        "--job",
        "team/train",
        "--mechanism",
        "kill",
        "--progress",
        "2h",
        "--copies",
        "replicated",
    ]);
    assert_exit(&output, 0);
    let text = stdout(&output);
    assert!(
        text.contains("nobody knows its end") && text.contains("t kill: so it is"),
        "{text}"
    );
    let asked = api.asked("/v1/estimate");
    assert_eq!(asked["tasks"][0]["id"], task.pid());
    assert_eq!(asked["tasks"][0]["node"], "n1");
    assert_eq!(asked["tasks"][0]["job"], "team/train");
    assert_eq!(asked["tasks"][0]["progress_s"], 7_200.0);
    assert!(asked["tasks"][0]["progress_of_this_run"].is_null());
    // The values in /proc start again with every restore.
    let answered = api
        .daemon
        .run(&["cost", "--pid", &task.pid(), "--job", "team/train"]);
    assert_exit(&answered, 0);
    let asked_again = api.asked("/v1/estimate");
    assert_eq!(asked_again["tasks"][0]["progress_of_this_run"], true);
    let process = asked_again["tasks"][0]["process"].as_str().unwrap();
    assert_eq!(
        process,
        origin::process(task.pid().parse().unwrap()).unwrap()
    );
    assert!(asked["tasks"][0]["resident_bytes"].as_u64().unwrap() > 0);
    assert_eq!(asked["mechanisms"], json!(["kill"]));
    assert_eq!(asked["copies"], "replicated");
    // No process has that pid.
    assert_exit(&api.daemon.run(&["cost", "--pid", "5000000"]), 3);
}

#[test]
fn tasks_of_a_file_are_passed_on_as_they_are() {
    let unknown = json!({
        "answered_by": "n1", "age_s": 0.5,
        "answers": [{"task": "a", "mechanism": "kill", "unknown": "no progress is known"}]
    });
    let api = Api::start(&[("/v1/estimate", 200, unknown)]);
    let mut child = api
        .daemon
        .command(&["cost", "--tasks", "-", "--totals", "--node", "n2"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let tasks = br#"[{"id":"a","of_a_later_version":true}]"#;
    child.stdin.take().unwrap().write_all(tasks).unwrap();
    let output = child.wait_with_output().unwrap();
    // An unknown cost is not a cost of 0.
    assert_exit(&output, 11);
    assert!(stderr(&output).contains("no progress is known"));
    assert_eq!(
        api.asked("/v1/estimate"),
        json!({"tasks": [{"id": "a", "of_a_later_version": true}], "nodes": ["n2"], "detail": "totals"})
    );
    assert_exit(&api.daemon.run(&["cost", "--tasks", "/no/such/file"]), 3);
}

#[test]
fn a_verdict_is_one_word() {
    for (mechanism, word) in [
        ("full_dump", "checkpoint"),
        ("incremental_dump", "checkpoint"),
        ("pre_copied_dump", "checkpoint"),
        ("kill", "kill"),
        ("rollback", "rollback"),
        ("suspend_in_memory", "suspend"),
        ("wait", "wait"),
    ] {
        let api = Api::start(&[
            ("/v1/nodes", 200, nodes()),
            ("/v1/preempt", 200, plan(mechanism, true)),
        ]);
        let task = Victim::start();
        let pid = format!("{}:train", task.pid());
        let output = api
            .daemon
            .run(&["plan", "preempt", "--pid", &pid, "--verdict"]);
        assert_exit(&output, 0);
        assert_eq!(stdout(&output), format!("{word}\n"));
        assert!(api.asked("/v1/preempt").get("wanted").is_none());
    }
}

#[test]
fn a_plan_says_by_its_exit_code_whether_it_is_enough() {
    let ask = [
        "plan",
        "preempt",
        "--cpu",
        "0.5",
        "--memory",
        "8K",
        "--candidates",
    ];
    for (enough, code) in [(true, 0), (false, 12)] {
        let api = Api::start(&[("/v1/preempt", 200, plan("kill", enough))]);
        let file = api.daemon.path().join("tasks");
        std::fs::write(&file, r#"{"candidates": [], "by": "p50"}"#).unwrap();
        let mut arguments = ask.to_vec();
        arguments.extend([
            file.to_str().unwrap(),
            "--by",
            "p95",
            "--longest-delay",
            "30s",
            "--json",
        ]);
        let output = api.daemon.run(&arguments);
        assert_exit(&output, code);
        // The plan is there either way.
        assert_eq!(read_json(&output.stdout)["enough"], enough);
        assert_eq!(
            api.asked("/v1/preempt"),
            json!({
                "candidates": [], "by": "p95", "longest_delay_s": 30.0,
                "wanted": {"cpu_millis": 500, "memory_bytes": 8192}
            })
        );
        if !enough {
            let error = read_json(&output.stderr);
            assert_eq!(error["error"]["code"], "not-enough");
        }
    }
    let api = Api::start(&[]);
    for wrong in [
        &["plan", "preempt"][..],
        &["plan", "preempt", "--pid", "0:a"],
        &["plan", "preempt", "--pid", "7:a", "--candidates", "-"],
        &[
            "plan",
            "preempt",
            "--pid",
            "7:a",
            "--pid",
            "8:b",
            "--verdict",
        ],
        &["plan", "place"],
        &["plan", "resume"],
    ] {
        assert_exit(&api.daemon.run(wrong), 2);
    }
}

#[test]
fn the_policy_that_is_named_decides() {
    let mut answer = plan("kill", true);
    answer["decisions"] = json!([{
        "task": "t", "node": "n1", "action": {"preempt": "kill"}, "score": {"containers": 3},
        "runner_up": {"task": "u", "action": {"preempt": "kill"}, "score": {"containers": 1}},
        "reason": "its job has most containers", "frees": {"cpu_millis": 500, "memory_bytes": 4096}
    }]);
    for (name, full) in [("mr+srt", "mr+srt"), ("cheaper", "adaptive+cheaper")] {
        let api = Api::start(&[("/v1/preempt", 200, answer.clone())]);
        let file = api.daemon.path().join("tasks");
        std::fs::write(&file, "[]").unwrap();
        let mut arguments = vec!["plan", "preempt", "--cpu", "0.5", "--policy", name];
        arguments.extend(["--candidates", file.to_str().unwrap()]);
        let output = api.daemon.run(&arguments);
        assert_exit(&output, 0);
        let text = stdout(&output);
        assert!(
            text.contains("3 containers") && text.contains("u kill, 1 containers"),
            "{text}"
        );
        assert_eq!(api.asked("/v1/preempt")["policy"], full);
        assert_eq!(api.asked("/v1/preempt")["seed"], Value::Null);
        arguments.extend(["--seed", "7"]);
        assert_exit(&api.daemon.run(&arguments), 0);
        assert_eq!(api.asked("/v1/preempt")["seed"], 7);
        arguments.push("--json");
        let output = api.daemon.run(&arguments);
        assert_eq!(read_json(&output.stdout)["decisions"], answer["decisions"]);
    }
    let api = Api::start(&[]);
    let output = api.daemon.run(&[
        "plan", "preempt", "--cpu", "1", "--pid", "7:a", "--policy", "fifo",
    ]);
    assert_exit(&output, 2);
    let error = stderr(&output);
    assert!(
        error.contains("fifo") && error.contains("mr+srt"),
        "{error}"
    );
}

#[test]
fn a_daemon_that_decides_otherwise_than_the_library_fails_a_simulation() {
    let mut answer = plan("kill", true);
    answer["decisions"] = json!([]);
    let api = Api::start(&[("/v1/preempt", 200, answer)]);
    let simulate = |more: &[&str]| {
        let line = [
            "simulate",
            "--workload",
            "two-jobs",
            "--medium",
            "hdd",
            "--against",
            "socket",
        ];
        api.daemon.run(&[&line[..], more].concat())
    };
    let output = simulate(&["--policy", "kill", "--json"]);
    assert_exit(&output, 4);
    let against = &read_json(&output.stdout)["against"];
    assert!(against["different"].as_u64() >= Some(1), "{against}");
    let first = against["differences"][0].as_str().unwrap();
    assert!(
        first.contains("the library decides kill of 0; the daemon"),
        "{first}"
    );
    let asked = api.asked("/v1/preempt");
    assert_eq!(asked["policy"], "kill");
    assert_eq!(asked["candidates"][0]["id"], "0");
    let output = simulate(&["--policy", "kill,mr+srt"]);
    assert_exit(&output, 2);
    assert!(stderr(&output).contains("mr+srt"));
    // Nothing to compare, and nobody to ask.
    assert_exit(&simulate(&["--policy", "wait"]), 11);
    let nobody = [
        "simulate",
        "--workload",
        "two-jobs",
        "--policy",
        "kill",
        "--against",
    ];
    let output = api
        .daemon
        .run(&[&nobody[..], &["http://127.0.0.1:1"]].concat());
    assert_exit(&output, 11);
}

#[test]
fn a_task_without_a_checkpoint_begins_anew() {
    let restart = json!({
        "answered_by": "n1", "age_s": 0.5,
        "answers": [{"checkpoint": "train", "restart": true, "why": "it has none"}]
    });
    let api = Api::start(&[("/v1/resume", 200, restart)]);
    let output = api
        .daemon
        .run(&["plan", "resume", "train", "--prefer", "local"]);
    assert_exit(&output, 3);
    assert!(stdout(&output).contains("train: start anew: it has none"));
    assert_eq!(api.asked("/v1/resume")["preference"], "local");
}

#[test]
fn refusals_of_the_api_have_exit_codes() {
    for (status, code) in [
        (400, 2),
        (401, 9),
        (403, 9),
        (404, 3),
        (409, 4),
        (413, 2),
        (422, 2),
        (429, 11),
        (500, 1),
        (503, 11),
    ] {
        let problem = json!({
            "type": "urn:permafrost:problem:x", "title": "X", "status": status, "detail": "it is so",
            "errors": [{"pointer": "/tasks/3/progress_s", "detail": "no time"}]
        });
        let api = Api::start(&[("/v1/nodes", status, problem)]);
        let output = api.daemon.run(&["nodes", "--json"]);
        assert_exit(&output, code);
        let error = read_json(&output.stderr);
        assert_eq!(
            error["error"]["message"],
            "it is so; /tasks/3/progress_s: no time"
        );
        assert!(output.stdout.is_empty());
    }
    // No API listens there.
    let daemon = Daemon::start(|_| vec![]);
    assert_exit(&daemon.run(&["nodes"]), 10);
    // Something else is there.
    let api = Api::start(&[("/v1/nodes", 502, json!("sorry"))]);
    assert_exit(&api.daemon.run(&["nodes"]), 11);
}

#[test]
fn a_token_is_printed_with_its_line_beside_it() {
    let daemon = Daemon::start(|_| vec![]);
    let new = [
        "token",
        "new",
        "--name",
        "slurm",
        "--scopes",
        "read,reserve",
    ];
    let output = daemon.run(&new);
    assert_exit(&output, 0);
    assert!(stdout(&output).starts_with("pft-"));
    assert!(stderr(&output).contains("slurm read,reserve "));
    let mut wrong = new;
    wrong[5] = "write";
    assert_exit(&daemon.run(&wrong), 2);
}
