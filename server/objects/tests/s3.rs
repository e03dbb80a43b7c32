//! A cold medium over a real S3 server, which is killed in the middle.

#![allow(missing_docs)]

use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_cold::{ColdError, ColdMedium, ObjectError, Objects};
use permafrost_medium::{Medium, OpenOptions, PAGE_SIZE, open_sparse_medium};
use permafrost_objects::connect_with;
use permafrost_tests::s3;

const BLOCK: u64 = 64 << 10;

/// An S3 server over a directory with a bucket.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start(root: &Path, port: u16) -> Self {
        let program = s3::find().expect("`cargo xtask setup` fetches the S3 server");
        std::fs::create_dir_all(root.join("bucket")).unwrap();
        let child = Command::new(program)
            .args([
                "--host",
                "127.0.0.1",
                "--access-key",
                "key",
                "--secret-key",
                "secret",
            ])
            .args(["--port", &port.to_string()])
            .arg(root)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < until, "the server does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Self { child, port }
    }

    fn connect(&self, prefix: &str, secret: &str) -> Arc<dyn Objects> {
        let options = [
            ("AWS_ACCESS_KEY_ID", "key".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", secret.to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ENDPOINT", format!("http://127.0.0.1:{}", self.port)),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
        ];
        let options = options
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value));
        connect_with(&format!("s3://bucket/{prefix}"), options).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    listener.local_addr().unwrap().port()
}

#[test]
fn objects_are_kept_by_a_real_s3_server() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), free_port());
    let store = server.connect("some/prefix", "secret");
    assert!(matches!(store.get("a/1"), Err(ObjectError::Missing)));
    store.put("a/1", vec![7; 1 << 20]).unwrap();
    store.put("a/2", vec![8]).unwrap();
    store.put("b/3", vec![9]).unwrap();
    assert_eq!(store.get("a/1").unwrap(), vec![7; 1 << 20]);
    let names = || -> Vec<_> {
        let listed = store.list("a").unwrap().into_iter();
        let mut all: Vec<_> = listed.map(|o| (o.name, o.len_bytes)).collect();
        all.sort();
        all
    };
    assert_eq!(
        names(),
        [("a/1".to_owned(), 1 << 20), ("a/2".to_owned(), 1)]
    );
    store.delete("a/1").unwrap();
    store.delete("a/1").unwrap();
    assert_eq!(names(), [("a/2".to_owned(), 1)]);
    assert!(store.list("nothing").unwrap().is_empty());
    let stranger = server.connect("some/prefix", "wrong");
    assert!(matches!(stranger.get("a/2"), Err(ObjectError::Store(_))));
}

#[test]
fn a_cold_medium_survives_the_death_of_its_server() {
    let dir = tempfile::tempdir().unwrap();
    let (root, port) = (dir.path().join("s3"), free_port());
    let server = Server::start(&root, port);
    let open = |store: Arc<dyn Objects>| {
        let path = dir.path().join("cold");
        let file = open_sparse_medium(&path, 1 << 20, &OpenOptions::default()).unwrap();
        let index = dir.path().join("index");
        ColdMedium::create_index(&index).unwrap();
        ColdMedium::open(file, Some(&path), &index, ([7; 16], BLOCK), store).unwrap()
    };
    let page = |n: u8| [n; PAGE_SIZE];
    let file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(dir.path().join("cold"))
        .unwrap();
    file.set_len(1 << 20).unwrap();
    for n in 0..32 {
        let at = BLOCK + u64::from(n) * PAGE_SIZE as u64;
        file.write_all_at(&page(n), at).unwrap();
    }
    drop(file);
    let medium = open(server.connect("node", "secret"));
    let cold = medium.cold().unwrap();
    let out: Vec<u32> = (1..16).collect();
    cold.move_out(BLOCK, BLOCK, &[0], &out).unwrap();
    drop(server);

    let away = cold.move_out(2 * BLOCK, BLOCK, &[0], &out).unwrap_err();
    assert!(
        matches!(ColdError::of(&away), Some(ColdError::Away { .. })),
        "{away}"
    );
    assert!(cold.is_out(BLOCK) && !cold.is_out(2 * BLOCK));
    let mut read = page(0);
    let at = BLOCK + 5 * PAGE_SIZE as u64;
    let away = medium.read(at, &mut read).unwrap_err();
    assert!(
        matches!(ColdError::of(&away), Some(ColdError::Away { .. })),
        "{away}"
    );
    drop(medium);

    let server = Server::start(&root, port);
    let medium = open(server.connect("node", "secret"));
    medium.read(at, &mut read).unwrap();
    assert!(read == page(5));
    let cold = medium.cold().unwrap();
    cold.move_out(2 * BLOCK, BLOCK, &[0], &out).unwrap();
    assert!(cold.absent().unwrap().is_empty());
    cold.forget(BLOCK).unwrap();
    assert_eq!(cold.remove(&cold.unneeded(true).unwrap()).unwrap(), 1);
    medium
        .read(2 * BLOCK + PAGE_SIZE as u64, &mut read)
        .unwrap();
    assert!(read == page(17));
}
