//! Tests of the client against a peer with scripted answers.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;

use permafrost_api_types::problem::ProblemKind;

use super::*;

/// Answers requests, in order: each inner list is one connection. Returns the requests.
fn peer(socket: &Path, connections: Vec<Vec<String>>) -> JoinHandle<Vec<String>> {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        let mut requests = Vec::new();
        for answers in connections {
            let (mut stream, _) = listener.accept().unwrap();
            for answer in answers {
                requests.push(request(&mut stream));
                stream.write_all(answer.as_bytes()).unwrap();
            }
        }
        requests
    })
}

/// Reads a head, and a body of the length that it states.
fn request(stream: &mut UnixStream) -> String {
    let mut text = String::new();
    let mut byte = [0];
    while !text.ends_with("\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
        text.push(char::from(byte[0]));
    }
    let length = text
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))
        .map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).unwrap();
    text + &String::from_utf8(body).unwrap()
}

fn says(status: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}")
}

fn client(dir: &tempfile::TempDir) -> ApiClient {
    let options = ApiOptions::beside(&dir.path().join("control.sock"));
    ApiClient::new(&options).unwrap()
}

#[test]
fn questions_share_a_connection_and_a_lost_one_is_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let ok = || says("200 OK", "[1,2]");
    let peer = peer(&dir.path().join(SOCKET), vec![vec![ok(), ok()], vec![ok()]]);
    let client = client(&dir);
    for _ in 0..3 {
        let answer = client.get("/v1/x", &[("job", "a/b c&d")]).unwrap();
        assert_eq!(answer.bytes(), b"[1,2]");
        assert_eq!(answer.into::<Vec<u32>>().unwrap(), [1, 2]);
    }
    let requests = peer.join().unwrap();
    assert!(requests[0].starts_with("GET /v1/x?job=a%2Fb%20c%26d HTTP/1.1\r\n"));
    assert_eq!(requests.len(), 3);
}

#[test]
fn a_question_is_json_and_a_refusal_says_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let problem = Problem::new(ProblemKind::UnknownNode, "there is no n9").at("/nodes/0", "n9");
    let body = serde_json::to_string(&problem).unwrap();
    let answers = vec![
        says("422 Unprocessable Content", &body),
        says("502 Bad Gateway", "<html>sorry"),
        says("200 OK", "{}"),
    ];
    let peer = peer(&dir.path().join(SOCKET), vec![answers]);
    let client = client(&dir);
    match client.post("/v1/estimate", &serde_json::json!({"tasks": []})) {
        Err(ApiError::Refused(refused)) => assert_eq!(*refused, problem),
        other => panic!("{other:?}"),
    }
    match client.delete("/v1/reserve/7") {
        Err(ApiError::Foreign { status, excerpt }) => {
            assert_eq!((status, excerpt.as_str()), (502, "<html>sorry"));
        }
        other => panic!("{other:?}"),
    }
    let answer = client.put("/v1/figures", &1).unwrap();
    assert!(matches!(
        answer.read::<Vec<u32>>(),
        Err(ApiError::Unexpected(_))
    ));
    let requests = peer.join().unwrap();
    assert!(requests[0].contains("content-type: application/json\r\n"));
    assert!(requests[0].ends_with("{\"tasks\":[]}"));
    assert!(requests[1].starts_with("DELETE /v1/reserve/7 "));
}

#[test]
fn nobody_there_and_an_end_in_the_middle_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let client = client(&dir);
    let nobody = client.get("/v1/nodes", &[]).unwrap_err();
    assert!(matches!(nobody, ApiError::Unreachable { .. }), "{nobody:?}");
    let half = "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf".to_owned();
    let peer = peer(
        &dir.path().join(SOCKET),
        vec![vec![String::new()], vec![half]],
    );
    let broken = client.get("/v1/nodes", &[]).unwrap_err();
    assert!(matches!(broken, ApiError::Broken { .. }), "{broken:?}");
    let short = client.get("/v1/nodes", &[]).unwrap_err();
    assert!(matches!(short, ApiError::Body { .. }), "{short:?}");
    peer.join().unwrap();
}

fn of(url: &str, token: Option<&str>) -> Result<ApiClient, ApiError> {
    ApiClient::new(&ApiOptions {
        url: Some(url.to_owned()),
        token: token.map(str::to_owned),
        ..ApiOptions::beside(Path::new("/nowhere/control.sock"))
    })
}

#[test]
fn a_url_has_a_scheme_a_host_and_no_secrets() {
    for url in [
        "",
        "n1",
        "n1:7119",
        "ftp://n1",
        "http://",
        "/run/api.sock",
        "http://user:pw@localhost:1",
        "http://localhost:1/?a=b",
        "http://localhost:99999",
    ] {
        let error = of(url, None).err();
        assert!(
            matches!(error, Some(ApiError::Url { .. })),
            "{url}: {error:?}"
        );
    }
    assert!(matches!(of("https://n1", None), Err(ApiError::NoAuthority)));
    let proxied = of("http://localhost:8080/permafrost/", None).unwrap();
    assert_eq!(proxied.target.path("/v1/nodes"), "/permafrost/v1/nodes");
    assert_eq!(of("http://[::1]:7", None).unwrap().target.host(), "[::1]:7");
}

#[test]
fn a_token_crosses_no_network_in_clear_text() {
    for near in ["http://localhost:1", "http://127.0.0.7:1", "http://[::1]:1"] {
        assert!(of(near, Some("t")).is_ok(), "{near}");
    }
    for far in ["http://n1:1", "http://10.0.0.1", "http://[fd00::1]:1"] {
        assert!(
            matches!(of(far, Some("t")), Err(ApiError::ClearText { .. })),
            "{far}"
        );
        assert!(of(far, None).is_ok(), "{far}");
    }
    assert!(matches!(
        of("http://[::1]:1", Some("a\nb")),
        Err(ApiError::BadToken)
    ));
}
