//! HTTP by hand, for requests that no honest client sends.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use super::*;

/// Reply of the HTTP API.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    head: String,
    pub(crate) body: Value,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        let found = lines.find(|(header, _)| header.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value)
    }

    /// Checks that the reply is a problem of this status and kind that names these fields.
    pub(crate) fn assert_problem(&self, status: u16, kind: &str, pointers: &[&str]) {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.body["status"], status, "{self:?}");
        let kind = format!("urn:permafrost:problem:{kind}");
        assert_eq!(self.body["type"], kind, "{self:?}");
        let media_type = self.header("content-type");
        assert_eq!(media_type, Some("application/problem+json"), "{self:?}");
        assert!(!self.body["detail"].as_str().unwrap().is_empty());
        let named = self.body["errors"].as_array().cloned().unwrap_or_default();
        let named: Vec<_> = named.iter().map(|one| &one["pointer"]).collect();
        assert_eq!(named, pointers, "{self:?}");
    }
}

/// Connection that carries a request.
pub(crate) trait Stream: Read + Write + Send {}

impl<T: Read + Write + Send> Stream for T {}

/// Connects to the daemon's socket, on which the tests' user has all rights.
pub(crate) fn socket(daemon: &Daemon) -> Box<dyn Stream> {
    let stream = UnixStream::connect(daemon.control().with_file_name("api.sock")).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    Box::new(stream)
}

/// Connects to the daemon's port.
pub(crate) fn port(daemon: &Daemon) -> Box<dyn Stream> {
    let stream = TcpStream::connect(daemon.api()).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    Box::new(stream)
}

fn send(stream: &mut dyn Stream, method: &str, path: &str, token: &str, body: &[u8]) {
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\n");
    head += "Connection: close\r\nContent-Type: application/json\r\n";
    if !token.is_empty() {
        head += &format!("Authorization: Bearer {token}\r\n");
    }
    head += &format!("Content-Length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).unwrap();
    // Who is refused may be so before all of it has come.
    let _ = stream.write_all(body);
}

/// Sends one request over a connection of its own.
pub(crate) fn ask(
    mut stream: Box<dyn Stream>,
    method: &str,
    path: &str,
    token: &str,
    body: &[u8],
) -> Answer {
    send(&mut *stream, method, path, token, body);
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer");
    let answer = String::from_utf8(answer).expect("text");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split_whitespace().nth(1).expect("a status");
    Answer {
        status: status.parse().expect("a number"),
        body: serde_json::from_str(body).unwrap_or_default(),
        head: head.to_owned(),
    }
}

/// The stream of events, as it arrives.
pub(crate) struct Events(Receiver<Value>);

impl Events {
    pub(crate) fn of(mut stream: Box<dyn Stream>, token: &str) -> Self {
        send(&mut *stream, "GET", "/v1/events", token, b"");
        let mut lines = BufReader::new(stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(lines.read_line(&mut head).unwrap() > 0, "{head}");
        }
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert!(head.contains("text/event-stream"), "{head}");
        let (send, events) = channel();
        std::thread::spawn(move || {
            let mut name = String::new();
            // Sizes of chunks stand between them.
            for line in lines.lines().map_while(Result::ok) {
                if let Some(event) = line.strip_prefix("event: ") {
                    event.clone_into(&mut name);
                }
                let Some(data) = line.strip_prefix("data: ") else {
                    continue;
                };
                let data: Value = serde_json::from_str(data).expect("JSON");
                assert_eq!(data["event"], *name);
                if send.send(data).is_err() {
                    return;
                }
            }
        });
        Self(events)
    }

    /// Returns the next event for which `is` returns true.
    pub(crate) fn next(&self, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + LIMIT;
        let mut seen = Vec::new();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.0.recv_timeout(left) {
                Ok(event) if is(&event) => return event,
                Ok(event) => seen.push(event),
                Err(error) => panic!("{what}: {error}, after {seen:?}"),
            }
        }
    }
}
