//! Tests of `permafrost doctor` on machines where something was broken on purpose.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Output;

use permafrost_identity::{Authority, CertificateOrder, Role};
use permafrost_protocol::control::{
    DaemonFile, ErrorCode, NodeList, NodeProbe, NodeStatus, RegionStatus, RegistryMember,
    ServerStatus, reply, request,
};
use serde_json::Value;

use crate::fake::{Daemon, assert_exit, json, refusal, stdout};

/// Returns the result of a check: its status, what was found, and the advice.
#[track_caller]
fn check(output: &Output, area: &str, name: &str) -> (String, String, String) {
    let report = json(&output.stdout);
    let checks = report["checks"].as_array().unwrap();
    let found = checks
        .iter()
        .find(|check| check["area"] == area && check["check"] == name);
    let found = found.unwrap_or_else(|| panic!("no {area}: {name} in {report:#}"));
    let text = |field: &str| found[field].as_str().unwrap_or_default().to_owned();
    (text("status"), text("found"), text("advice"))
}

#[track_caller]
fn status_of(output: &Output, area: &str, name: &str) -> String {
    check(output, area, name).0
}

fn errors(output: &Output) -> Vec<Value> {
    let report = json(&output.stdout);
    let checks = report["checks"].as_array().unwrap();
    let errors = checks.iter().filter(|check| check["status"] == "error");
    errors.cloned().collect()
}

/// A node of a cluster whose peer's clock is wrong, and one of whose members of etcd is away.
fn clustered(body: &request::Body) -> Vec<reply::Body> {
    let node = |name: &str, clock_ahead_ms| NodeStatus {
        name: name.to_owned(),
        state: "active".to_owned(),
        live: true,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        probe: Some(NodeProbe {
            clock_ahead_ms: Some(clock_ahead_ms),
            round_trip_us: 700,
            error: String::new(),
        }),
        ..NodeStatus::default()
    };
    let member = |address: &str, version: &str, error: &str| RegistryMember {
        address: address.to_owned(),
        version: version.to_owned(),
        round_trip_us: 900,
        error: error.to_owned(),
    };
    match body {
        request::Body::Nodes(nodes) => {
            assert!(nodes.probe, "the clocks are not asked for");
            vec![reply::Body::Nodes(NodeList {
                nodes: vec![node("a", 0), node("b", -7_200_000)],
                answered_by: "a".to_owned(),
                leader: "a".to_owned(),
                registry: vec![
                    member("e1:2379", "3.5.9", ""),
                    member("e2:2379", "", "connection refused"),
                ],
                ..NodeList::default()
            })]
        }
        _ => vec![status(true)],
    }
}

fn status(in_cluster: bool) -> reply::Body {
    reply::Body::Status(ServerStatus {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        regions: vec![RegionStatus {
            path: "/data/region".to_owned(),
            guarantee: "msync".to_owned(),
            capacity_bytes: 4 << 30,
            free_bytes: 3 << 30,
            ..RegionStatus::default()
        }],
        cluster: in_cluster.then(|| permafrost_protocol::control::ClusterStatus {
            node: "a".to_owned(),
            stranded: Some(0),
            under_replicated: Some(0),
            ..Default::default()
        }),
        ..ServerStatus::default()
    })
}

/// Makes what the fake daemon has at its paths as private as a real one's.
fn private(daemon: &Daemon) {
    for name in ["control.sock", "pages.sock"] {
        let path = daemon.path().join(name);
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    }
    fs::set_permissions(daemon.path(), fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn a_machine_in_order_has_no_errors_and_exits_with_0() {
    let daemon = Daemon::start(|_| vec![status(false)]);
    daemon.criu("exit 0");
    private(&daemon);
    let output = daemon.run(&["doctor", "--json"]);
    assert_eq!(errors(&output), Vec::<Value>::new());
    assert_exit(&output, 0);
    assert_eq!(status_of(&output, "criu", "program"), "ok");
    assert_eq!(status_of(&output, "region", "guarantee"), "ok");
    assert_eq!(status_of(&output, "cluster", "nodes"), "skipped");
    let text = stdout(&daemon.run(&["doctor"]));
    assert!(text.contains("0 errors"), "{text}");
    // Nothing but these is asked of a daemon.
    for (body, _) in daemon.requests() {
        assert!(matches!(body, request::Body::Status(_)), "{body:?}");
    }
}

#[test]
fn a_missing_criu_is_an_error_that_says_what_to_do() {
    let daemon = Daemon::start(|_| vec![status(false)]);
    private(&daemon);
    let output = daemon.run(&["doctor", "--json"]);
    assert_exit(&output, 1);
    let (found, _, advice) = check(&output, "criu", "program");
    assert_eq!(found, "error");
    assert!(advice.contains("PERMAFROST_CRIU"), "{advice}");
}

#[test]
fn a_wrong_clock_and_a_silent_member_of_etcd_are_errors() {
    let daemon = Daemon::start(clustered);
    daemon.criu("exit 0");
    private(&daemon);
    let output = daemon.run(&["doctor", "--json"]);
    assert_exit(&output, 1);
    let (found, said, advice) = check(&output, "cluster", "clock of b");
    assert_eq!(found, "error", "{said}");
    assert!(said.contains("2 h behind that of a"), "{said}");
    assert!(advice.contains("chrony"), "{advice}");
    assert_eq!(status_of(&output, "registry", "e1:2379"), "ok");
    assert_eq!(status_of(&output, "registry", "e2:2379"), "error");
    assert_eq!(errors(&output).len(), 2, "{:#?}", errors(&output));
}

#[test]
fn a_registry_that_is_away_is_an_error() {
    let daemon = Daemon::start(|body| match body {
        request::Body::Nodes(_) => vec![refusal(ErrorCode::Unavailable)],
        _ => vec![status(true)],
    });
    daemon.criu("exit 0");
    private(&daemon);
    let output = daemon.run(&["doctor", "--json"]);
    assert_exit(&output, 1);
    let (found, said, advice) = check(&output, "cluster", "nodes");
    assert_eq!(
        (found.as_str(), said.as_str()),
        ("error", "the daemon's reason")
    );
    assert_eq!(advice, "the daemon's hint");
}

#[test]
fn secrets_that_others_can_read_are_errors_and_never_printed() {
    let work = tempfile::tempdir().unwrap();
    let tokens = work.path().join("tokens");
    fs::write(&tokens, "reader planted-secret\n").unwrap();
    fs::set_permissions(&tokens, fs::Permissions::from_mode(0o644)).unwrap();
    let path = tokens.to_str().unwrap().to_owned();
    let daemon = Daemon::start(move |_| {
        let reply::Body::Status(status) = status(false) else {
            unreachable!()
        };
        vec![reply::Body::Status(ServerStatus {
            files: vec![DaemonFile {
                purpose: "tokens".to_owned(),
                path: path.clone(),
            }],
            ..status
        })]
    });
    daemon.criu("exit 0");
    private(&daemon);
    let output = daemon.run(&["doctor", "--json"]);
    assert_exit(&output, 1);
    let (found, said, advice) = check(&output, "files", "tokens of permafrostd");
    assert_eq!(found, "error");
    assert!(said.contains("mode 0644"), "{said}");
    assert!(advice.contains("chmod 600"), "{advice}");
    assert!(!stdout(&output).contains("planted-secret"));
    // A socket that others can connect to.
    let socket = daemon.path().join("control.sock");
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    let output = daemon.run(&["doctor", "--json"]);
    assert_eq!(status_of(&output, "files", "control socket"), "error");
}

#[test]
fn an_expired_certificate_and_a_readable_key_are_errors() {
    let daemon = Daemon::start(|_| vec![status(false)]);
    daemon.criu("exit 0");
    private(&daemon);
    let work = tempfile::tempdir().unwrap();
    let (ca, node) = (work.path().join("ca"), work.path().join("n1"));
    let [ca, node] = [&ca, &node].map(|path| path.to_str().unwrap());
    assert_exit(&daemon.run(&["pki", "init", "--dir", ca]), 0);
    let issue = [
        "pki", "issue", "--dir", ca, "--name", "n1", "--role", "node", "--out", node,
    ];
    assert_exit(&daemon.run(&issue), 0);
    let doctor = ["doctor", "--json", "--certificates", node];
    let output = daemon.run(&doctor);
    assert_exit(&output, 0);
    assert_eq!(status_of(&output, "certificates", "node n1"), "ok");

    let key = fs::canonicalize(work.path().join("n1/key.pem")).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
    let output = daemon.run(&doctor);
    assert_exit(&output, 1);
    let (found, said, _) = check(&output, "certificates", &format!("use of {node}"));
    assert_eq!(found, "error", "{said}");

    let day = std::time::Duration::from_secs(86_400);
    let now = std::time::SystemTime::now();
    let order = CertificateOrder::new("n2", Role::Node);
    let expired = work.path().join("n2");
    let authority = Authority::open(&work.path().join("ca")).unwrap();
    let issued = authority.issue_for(&order, now - 9 * day, now - 2 * day, &expired, false);
    issued.unwrap();
    let expired = expired.to_str().unwrap();
    let output = daemon.run(&["doctor", "--json", "--certificates", expired]);
    assert_exit(&output, 1);
    let (found, said, advice) = check(&output, "certificates", "node n2");
    assert_eq!(found, "error", "{said}");
    assert!(said.contains("2 d ago"), "{said}");
    assert!(advice.contains("pki rotate"), "{advice}");
}

#[test]
fn a_daemon_that_is_away_is_an_error_and_its_place_is_looked_at() {
    let work = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let daemon = Daemon::start(|_| vec![]);
    daemon.criu("exit 0");
    fs::remove_file(daemon.socket()).unwrap();
    // A file system in which nobody can make a file.
    let proc = [
        "doctor",
        "--json",
        "--data-dir",
        "/proc/self",
        "--port",
        &address,
    ];
    let output = daemon.run(&proc);
    assert_exit(&output, 1);
    // Before a daemon's first start it is no error that none runs.
    assert_eq!(status_of(&output, "daemon", "permafrostd"), "skipped");
    let (found, said, advice) = check(&output, "region", "data directory");
    assert_eq!(found, "error", "{said}");
    assert!(advice.contains("--data-dir"), "{advice}");
    assert_eq!(status_of(&output, "ports", &address), "error");
    let data = work.path().to_str().unwrap();
    let output = daemon.run(&["doctor", "--json", "--data-dir", data]);
    assert_eq!(status_of(&output, "region", "data directory"), "ok");
    assert_eq!(status_of(&output, "daemon", "permafrostd"), "skipped");
    let output = daemon.run(&["doctor", "--json"]);
    assert_exit(&output, 1);
    assert_eq!(status_of(&output, "daemon", "permafrostd"), "error");
}

#[test]
fn over_the_api_only_what_it_answers_is_looked_at() {
    let daemon = Daemon::start(|_| panic!("the control socket is not asked"));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            use std::io::{Read as _, Write as _};
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).unwrap();
            let body = r#"{"answered_by":"n1","age_s":0.5,"nodes":[{"name":"n2","address":"h:1","state":"active","live":false,"stopping":false,"class":"reserved","zone":"","rack":"","host":"h","version":"","tiers":[],"links":[],"doubts":[]}]}"#;
            let text = format!(
                "HTTP/1.1 200 OK\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
            stream.write_all(text.as_bytes()).unwrap();
        }
    });
    let work = tempfile::tempdir().unwrap();
    let token = work.path().join("token");
    fs::write(&token, "planted-token").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o640)).unwrap();
    let token = token.to_str().unwrap();
    let output = daemon.run(&["doctor", "--json", "--api", &url, "--api-token-file", token]);
    assert_exit(&output, 1);
    assert_eq!(status_of(&output, "api", "nodes"), "ok");
    assert_eq!(status_of(&output, "api", "node n2"), "warning");
    assert_eq!(status_of(&output, "files", "token"), "error");
    let (found, said, _) = check(&output, "api", "clock");
    assert_eq!(found, "error", "{said}");
    assert!(!stdout(&output).contains("planted-token"));
    // A node that is not there.
    let output = daemon.run(&["doctor", "--json", "--api", "http://127.0.0.1:9"]);
    assert_exit(&output, 1);
    assert_eq!(status_of(&output, "api", "nodes"), "error");
}
