//! `/metrics` and the health checks of a real daemon.

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use common::*;
use permafrost_tests::daemon::{Daemon, Options};

/// Returns the reply to a GET: its status line, and the rest.
fn ask(daemon: &Daemon, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(daemon.metrics()).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (status, rest) = answer.split_once("\r\n").unwrap();
    (status.to_owned(), rest.to_owned())
}

fn number(numbers: &str, name: &str) -> f64 {
    let line = numbers.lines().find(|line| {
        line.strip_prefix(name)
            .is_some_and(|rest| rest.starts_with(' '))
    });
    let line = line.unwrap_or_else(|| panic!("no {name} in {numbers}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_dump_shows_in_the_numbers() {
    let work = tempfile::tempdir().unwrap();
    let options = Options {
        extra: ["--listen-metrics", "127.0.0.1:0"]
            .map(str::to_owned)
            .to_vec(),
        ..Options::default()
    };
    let daemon = Daemon::start(work.path(), &options).unwrap();
    let (status, before) = ask(&daemon, "/metrics");
    assert!(status.contains("200"), "{status}");
    assert!(number(&before, "permafrost_dumps_parked_total").abs() < 0.5);
    for path in ["/healthz", "/readyz"] {
        let (status, said) = ask(&daemon, path);
        assert!(status.contains("200"), "{path}: {status} {said}");
    }
    assert!(ask(&daemon, "/elsewhere").0.contains("404"));

    dump_and_adopt(&daemon, work.path(), "job", 0x40_0000, &pages(7, 100));
    let (_, after) = ask(&daemon, "/metrics");
    assert!((number(&after, "permafrost_dumps_parked_total") - 1.0).abs() < 0.5);
    let received = number(&after, "permafrost_received_bytes_total");
    assert!(received >= (100 * PAGE_SIZE) as f64, "{received}");
    let free = |numbers| number(numbers, "permafrost_region_free_bytes");
    assert!(free(&after) < free(&before));
}

#[test]
fn a_port_that_is_taken_is_said_and_leaves_the_region_clean() {
    let work = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let options = Options {
        extra: vec![
            "--listen-metrics".to_owned(),
            taken.local_addr().unwrap().to_string(),
        ],
        ..Options::default()
    };
    let error = Daemon::start(work.path(), &options).unwrap_err();
    assert!(format!("{error:#}").contains("metrics"), "{error:#}");
    let daemon = Daemon::start(work.path(), &Options::default()).unwrap();
    let status = daemon.json(&["status"]).unwrap();
    assert_eq!(status["regions"][0]["unsafe_shutdowns"], 0, "{status}");
}
