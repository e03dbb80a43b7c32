//! A fake CRIU: speaks the page-server protocol to a real daemon, correctly or with deliberate errors.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each scenario is a crate of its own and uses what it needs"
)]

pub mod clustered;
pub mod piped;
pub mod rounds;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

pub use permafrost_protocol::PAGE_SIZE;
use permafrost_protocol::images::{mm_name, write_mappings};
use permafrost_protocol::pageserver::client::Encoder;
use permafrost_protocol::pageserver::{Dialect, PE_LAZY, PE_PRESENT, SpaceId};
use permafrost_tests::daemon::Daemon;

pub const PID: u32 = 4711;

/// A connection to a page-server endpoint.
pub struct Peer {
    stream: Box<dyn Stream>,
    encoder: Encoder,
    pub space: SpaceId,
}

pub trait Stream: Read + Write + Send {
    fn end_writing(&self);
    fn set_write_limit(&self, limit: Duration);
}

impl Stream for TcpStream {
    fn set_write_limit(&self, limit: Duration) {
        self.set_write_timeout(Some(limit)).unwrap();
    }

    fn end_writing(&self) {
        let _ = self.shutdown(std::net::Shutdown::Write);
    }
}

impl Stream for UnixStream {
    fn set_write_limit(&self, limit: Duration) {
        self.set_write_timeout(Some(limit)).unwrap();
    }

    fn end_writing(&self) {
        let _ = self.shutdown(std::net::Shutdown::Write);
    }
}

impl Peer {
    /// Connects to the well-known port.
    pub fn anonymous(daemon: &Daemon, dialect: Dialect) -> Self {
        Self::tcp(daemon.address(), dialect)
    }

    pub fn tcp(address: &str, dialect: Dialect) -> Self {
        let stream = TcpStream::connect(address).expect("connect to the page-server port");
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        stream.set_nodelay(true).unwrap();
        Self {
            stream: Box::new(stream),
            encoder: Encoder::new(dialect),
            space: SpaceId::process(PID),
        }
    }

    pub fn unix(path: &Path, dialect: Dialect) -> Self {
        let stream = UnixStream::connect(path).expect("connect to the session's socket");
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        Self {
            stream: Box::new(stream),
            encoder: Encoder::new(dialect),
            space: SpaceId::process(PID),
        }
    }

    pub fn encoder(&self) -> Encoder {
        self.encoder
    }

    /// Sends bytes as they are. It is no failure if the server has closed the connection: some scenarios test that.
    pub fn send(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    /// Sends the same bytes repeatedly, until the server accepts no more or they were sent `times` times.
    pub fn send_until_stuck(&mut self, bytes: &[u8], times: usize) {
        self.stream.set_write_limit(Duration::from_secs(1));
        for _ in 0..times {
            if self.stream.write_all(bytes).is_err() {
                return;
            }
        }
    }

    /// Sends OPEN2. Returns the server's has_parent.
    pub fn open(&mut self) -> bool {
        let frame = self.encoder.open(self.space);
        self.send(frame.as_ref());
        let mut answer = [0];
        self.stream
            .read_exact(&mut answer)
            .expect("answer to OPEN2");
        answer[0] != 0
    }

    /// Sends ADD_F with pages of the given bytes.
    pub fn pages(&mut self, vaddr: u64, pages: &[u8]) {
        let nr_pages = u32::try_from(pages.len() / PAGE_SIZE).unwrap();
        let frame = self
            .encoder
            .pages(self.space, vaddr, nr_pages, PE_PRESENT | PE_LAZY);
        self.send(frame.as_ref());
        self.send(pages);
    }

    pub fn hole(&mut self, vaddr: u64, nr_pages: u32) {
        let frame = self.encoder.hole(self.space, vaddr, nr_pages);
        self.send(frame.as_ref());
    }

    /// Sends CLOSE. Returns the status, or `None` if the server has closed the connection instead.
    pub fn close(&mut self) -> Option<i32> {
        let frame = self.encoder.close();
        self.send(frame.as_ref());
        let mut status = [0; 4];
        self.stream.read_exact(&mut status).ok()?;
        Some(i32::from_le_bytes(status))
    }

    /// Closes the connection, and waits until the server has closed it too.
    pub fn leave(mut self) {
        self.stream.end_writing();
        let mut rest = Vec::new();
        let _ = self.stream.read_to_end(&mut rest);
    }
}

/// A frozen task whose dump takes until this is dropped: it does not wait for others, and others wait for it.
pub struct Frozen {
    over: Arc<AtomicBool>,
    sending: Option<JoinHandle<()>>,
}

impl Frozen {
    pub fn dump(mut peer: Peer) -> Self {
        peer.open();
        let over = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&over);
        let sending = std::thread::spawn(move || {
            let mut vaddr = 0x5000_0000;
            while !end.load(Ordering::Relaxed) {
                peer.pages(vaddr, &pages(1, 1));
                vaddr += PAGE_SIZE as u64;
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        Self {
            over,
            sending: Some(sending),
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.sending.take().unwrap().join().unwrap();
    }
}

/// Returns `count` pages that differ from each other, from zero, and from those of another seed.
pub fn pages(seed: u8, count: usize) -> Vec<u8> {
    let mut bytes = vec![seed; count * PAGE_SIZE];
    for (index, page) in bytes.chunks_exact_mut(PAGE_SIZE).enumerate() {
        page[..8].copy_from_slice(&(index as u64 + 1).to_le_bytes());
    }
    bytes
}

/// Makes a directory that looks like the images of a dump of process [`PID`].
pub fn fake_images(dir: &Path) {
    std::fs::create_dir_all(dir).unwrap();
    for name in ["inventory.img", "pstree.img", &format!("core-{PID}.img")] {
        std::fs::write(dir.join(name), format!("not really {name}")).unwrap();
    }
    fake_mappings(dir, PID);
}

/// Writes the image of a process whose mappings are unknown.
pub fn fake_mappings(dir: &Path, pid: u32) {
    std::fs::write(dir.join(mm_name(pid)), write_mappings(&[])).unwrap();
}

/// Dumps `pages` at `vaddr` to the well-known port, and adopts the dump as `job`. Returns its line of the listing.
pub fn dump_and_adopt(
    daemon: &Daemon,
    work: &Path,
    job: &str,
    vaddr: u64,
    pages: &[u8],
) -> serde_json::Value {
    let mut peer = Peer::anonymous(daemon, Dialect::V32);
    peer.open();
    peer.pages(vaddr, pages);
    let images = work.join(format!("images-{}", job.replace('/', "-")));
    fake_images(&images);
    assert_eq!(peer.close(), Some(0));
    peer.leave();
    daemon
        .json(&[
            "adopt",
            "--job",
            job,
            "--images-dir",
            images.to_str().unwrap(),
        ])
        .expect("adopt")
}

/// Returns the pages that `get` exports for a checkpoint of one process.
pub fn exported_pages(daemon: &Daemon, work: &Path, checkpoint: &str) -> Vec<u8> {
    let dir = tempfile::tempdir_in(work).unwrap();
    let target = dir.path().join("out");
    daemon
        .run(&["get", checkpoint, target.to_str().unwrap()])
        .expect("get");
    let pages = std::fs::read_dir(&target)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let pages = pages.filter(|path| {
        path.file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .starts_with("pages-")
    });
    let [path] = pages
        .collect::<Vec<_>>()
        .try_into()
        .expect("one pages file");
    std::fs::read(path).unwrap()
}

/// Returns the listing, both sealed and parked.
pub fn listing(daemon: &Daemon) -> Vec<serde_json::Value> {
    let listed = daemon.json(&["ls"]).expect("ls");
    listed["checkpoints"]
        .as_array()
        .expect("an array of checkpoints")
        .clone()
}
