//! Stores that take requests and never answer.

#![allow(missing_docs)]

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use permafrost_cold::{ObjectError, Objects};
use permafrost_objects::connect_within;

const LIMIT: Duration = Duration::from_millis(200);

fn assert_late<T: std::fmt::Debug>(result: Result<T, ObjectError>) {
    let Err(ObjectError::Store(error)) = result else {
        panic!("{result:?}");
    };
    let error = error.downcast_ref::<io::Error>().unwrap();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
}

#[test]
fn requests_to_a_server_that_does_not_answer_end() {
    // Connections wait in its queue, and are never taken.
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let options = [
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ENDPOINT", &endpoint),
        ("AWS_ALLOW_HTTP", "true"),
    ];
    let options = options.map(|(key, value)| (key.to_owned(), value.to_owned()));
    let store = connect_within("s3://bucket/x", options.into_iter(), LIMIT).unwrap();
    assert_late(store.get("a/1"));
    assert_late(store.put("a/1", vec![1]));
    assert_late(store.delete("a/1"));
    assert_late(store.list("a"));
}

#[test]
fn requests_to_a_directory_that_hangs_end_and_do_not_pile_up() {
    let dir = tempfile::tempdir().unwrap();
    let pipes = dir.path().join("a");
    std::fs::create_dir(&pipes).unwrap();
    // Whoever opens a pipe waits for its other end: as the files of a mount that hangs.
    rustix::fs::mknodat(
        rustix::fs::CWD,
        pipes.join("1"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    let address = format!("file://{}", dir.path().display());
    let store: Arc<dyn Objects> =
        connect_within(&address, std::iter::empty(), Duration::from_millis(1)).unwrap();
    for _ in 0..32 {
        assert_late(store.get("a/1"));
    }
    let refused = store.get("a/2").unwrap_err().to_string();
    assert!(refused.contains("still hang"), "{refused}");
    // It answers again.
    let end = std::fs::File::options()
        .read(true)
        .write(true)
        .open(pipes.join("1"));
    drop(end.unwrap());
    while store
        .get("a/2")
        .unwrap_err()
        .to_string()
        .contains("still hang")
    {
        std::thread::yield_now();
    }
}
