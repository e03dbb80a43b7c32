//! Tests of an agent over nodes that fail: the agent never passes on incomplete data as complete.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use permafrost_agent::remote::{MapDigest, OutlineEncoder, OutlinePages};
use permafrost_agent::{Agent, AgentOptions, StorageNode, host};
use permafrost_identity::{Authority, CertificateOrder, DENIED, DenyList, Namespaces, Peer, Role};
use permafrost_protocol::PAGE_SIZE;
use permafrost_protocol::control::{self, ErrorCode, request};
use permafrost_protocol::images::Pagemap;
use permafrost_protocol::manifest::{self, AddressSpace, Image, Manifest};
use permafrost_protocol::wire::frame::Kind;
use permafrost_protocol::wire::message::{Done, reply, request as wire};
use permafrost_transport::control::{Connection, ControlError};
use permafrost_transport::peer::{self, Endpoint, FrameSink, FrameSource, Handler, Replies};
use tokio::runtime::Runtime;

const PID: u64 = 4711;
/// Number of pages in a frame.
const RUN: usize = 8;
const PAGES: usize = 400;
const FLAGS: u16 = 4;

/// Returns the pages of the only address space, which are consecutive: some of zeros, all others different.
fn memory() -> Vec<u8> {
    let mut bytes = vec![0; PAGES * PAGE_SIZE];
    for (n, page) in bytes.chunks_exact_mut(PAGE_SIZE).enumerate() {
        if n % 64 < 48 {
            page.fill(5);
            page[..8].copy_from_slice(&n.to_le_bytes());
        }
    }
    bytes
}

fn map_digest(bytes: &[u8], first_index: u64, flags: u16) -> Vec<u8> {
    let mut digest = MapDigest::default();
    let mut whole = bytes.to_vec();
    whole.resize(bytes.len().next_multiple_of(PAGE_SIZE), 0);
    digest.pages(first_index, flags, &whole);
    digest.finish().to_vec()
}

fn small(name: &str) -> Vec<u8> {
    name.repeat(700).into_bytes()
}

fn manifest() -> Manifest {
    let image = |name: &str| Image {
        name: name.to_owned(),
        len_bytes: small(name).len() as u64,
        map_root: vec![1; 32],
        map_digest: map_digest(&small(name), 0, 0),
        offset_bytes: 0,
    };
    Manifest {
        version: manifest::VERSION,
        job: "job".to_owned(),
        generation: 1,
        images: vec![image("inventory.img"), image("core-4711.img")],
        spaces: vec![AddressSpace {
            id: PID,
            pages_id: 65_537,
            map_root: vec![1; 32],
            pages: PAGES as u64,
            map_digest: map_digest(&memory(), FIRST, FLAGS),
            ..AddressSpace::default()
        }],
        ..Manifest::default()
    }
}

/// Index of the first page of the address space.
const FIRST: u64 = 0x400;

/// A node that holds the checkpoint, or claims to.
#[derive(Default)]
struct Fake {
    /// Number of frames with pages after which the node gives up.
    breaks_after: Option<usize>,
    /// Page in which the node flips a bit.
    flips: Option<usize>,
    /// True if the checksums that it sends are of the flipped bit, too.
    lies: bool,
    /// Name of the image in which the node flips a bit.
    spoils: Option<&'static str>,
    /// Number of pages sent.
    sent: AtomicU64,
    /// First page indexes of the fetches.
    begun_at: Mutex<Vec<u64>>,
    /// Number of requests for the checkpoint's manifest.
    shown: AtomicU64,
    /// Certificates that the node reports as denied.
    denied: Mutex<Vec<String>>,
}

fn refusal(message: impl ToString) -> control::Error {
    control::Error {
        code: ErrorCode::Internal.into(),
        message: message.to_string(),
        hint: String::new(),
    }
}

/// Sends the positions and checksums of pages.
fn outline(memory: &[u8], frames: &mut dyn FrameSink) -> Result<(), peer::PeerError> {
    let mut send = |bytes: &[u8]| {
        let len_bytes = bytes.len() as u64;
        frames.push(Kind::ImageData, 0, 0, len_bytes, bytes)
    };
    let mut encoder = OutlineEncoder::default();
    for (page, index) in memory.chunks(PAGE_SIZE).zip(FIRST..) {
        let crc = [crc32fast::hash(page)];
        let pages = match page.iter().all(|byte| *byte == 0) {
            true => OutlinePages::Zero(1),
            false => OutlinePages::Stored(&crc),
        };
        encoder.push(index, FLAGS, pages, &mut send)?;
    }
    encoder.finish(&mut send)
}

impl Fake {
    fn pages(&self, request: &wire::Fetch, frames: &mut dyn FrameSink) -> Result<(), String> {
        let failed = |error: peer::PeerError| error.to_string();
        let mut memory = memory();
        let push = |frames: &mut dyn FrameSink, kind, pages: usize, index, payload: &[u8]| {
            let pages = u32::try_from(pages).unwrap();
            frames.push(kind, FLAGS, pages, index, payload)
        };
        frames
            .push(Kind::Space, 0, 65_537, PID, &[])
            .map_err(failed)?;
        if request.outline_only && !self.lies {
            return outline(&memory, frames).map_err(failed);
        }
        if let Some(page) = self.flips {
            memory[page * PAGE_SIZE + 99] ^= 16;
        }
        if request.outline_only {
            return outline(&memory, frames).map_err(failed);
        }
        self.begun_at.lock().push(request.from_index);
        for (n, run) in memory.chunks(RUN * PAGE_SIZE).enumerate() {
            let index = FIRST + (n * RUN) as u64;
            if index < request.from_index {
                continue;
            }
            let pages = run.len() / PAGE_SIZE;
            if request.pages > 0 && index + pages as u64 > request.from_index + request.pages {
                break;
            }
            if run.iter().all(|byte| *byte == 0) {
                push(frames, Kind::Zero, pages, index, &[]).map_err(failed)?;
            } else {
                if self.breaks_after.is_some_and(|after| n >= after) {
                    // A refusal overtakes pages that are on their way.
                    std::thread::sleep(Duration::from_secs(1));
                    return Err("given up half-way".to_owned());
                }
                push(frames, Kind::Pages, pages, index, run).map_err(failed)?;
                self.sent.fetch_add(pages as u64, Ordering::SeqCst);
            }
        }
        Ok(())
    }
}

impl Handler for Fake {
    fn call(&self, peer: &Peer, body: wire::Body) -> reply::Body {
        assert_eq!(peer.role(), Role::Agent);
        match body {
            wire::Body::Control(control::Request {
                body: Some(request::Body::Deny(deny)),
                ..
            }) => {
                assert!(deny.entries.is_empty() && !deny.take_back);
                let entries = self.denied.lock().clone();
                let denials = control::Denials {
                    entries,
                    changed: 0,
                };
                reply::Body::Control(control::Reply {
                    body: Some(control::reply::Body::Denials(denials)),
                })
            }
            wire::Body::Ping(_) => reply::Body::Done(Done {
                free_bytes: 1,
                ..Done::default()
            }),
            wire::Body::Control(control::Request {
                body: Some(request::Body::Show(_)),
                ..
            }) => {
                self.shown.fetch_add(1, Ordering::SeqCst);
                reply::Body::Control(control::Reply {
                    body: Some(control::reply::Body::Detail(control::Detail {
                        checkpoint: Some(control::Checkpoint {
                            job: "job".to_owned(),
                            generation: 1,
                            id: "a".repeat(32),
                            memory_bytes: (PAGES * PAGE_SIZE) as u64,
                            ..control::Checkpoint::default()
                        }),
                        manifest: Some(manifest()),
                        ..control::Detail::default()
                    })),
                })
            }
            _ => reply::Body::Error(refusal("not here")),
        }
    }

    fn dump(
        &self,
        _: &Peer,
        _: wire::Dump,
        _: &mut dyn FrameSource,
        _: &mut dyn Replies,
    ) -> Result<(), control::Error> {
        Err(refusal("not here"))
    }

    fn fetch(
        &self,
        _: &Peer,
        request: wire::Fetch,
        frames: &mut dyn FrameSink,
    ) -> Result<(), control::Error> {
        frames.opened(manifest(), vec![9; 32]).map_err(refusal)?;
        if request.space == 1 {
            self.pages(&request, frames).map_err(refusal)?;
        } else {
            let name = request.image.as_str();
            let mut bytes = small(name);
            if self.spoils == Some(name) {
                bytes[17] ^= 1;
            }
            let len_bytes = bytes.len() as u64;
            let header = frames.push(Kind::Image, 0, 0, len_bytes, name.as_bytes());
            header.map_err(refusal)?;
            let data = frames.push(Kind::ImageData, 0, 0, len_bytes, &bytes);
            data.map_err(refusal)?;
        }
        frames.push(Kind::Prepare, 0, 0, 0, &[]).map_err(refusal)
    }
}

/// Fake nodes, and an agent that knows them in this order.
struct Site {
    work: tempfile::TempDir,
    fakes: Vec<Arc<Fake>>,
    _endpoints: Vec<Endpoint>,
    agent: Option<Agent>,
    runtime: Runtime,
}

impl Site {
    fn new(fakes: impl IntoIterator<Item = Fake>) -> Self {
        Self::with_deadline(Duration::from_secs(30), fakes)
    }

    fn with_deadline(deadline: Duration, fakes: impl IntoIterator<Item = Fake>) -> Self {
        let work = tempfile::tempdir().unwrap();
        let authority = Authority::create(&work.path().join("ca"), "test", false).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let any: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
        let fakes: Vec<_> = fakes.into_iter().map(Arc::new).collect();
        let mut nodes = Vec::new();
        let mut endpoints = Vec::new();
        for (n, fake) in fakes.iter().enumerate() {
            let name = format!("node-{n}");
            let directory = work.path().join(&name);
            let order = CertificateOrder::new(&name, Role::Node);
            authority.issue(&order, &directory, false).unwrap();
            let identity = permafrost_identity::ReloadingIdentity::load(&directory);
            let endpoint = Endpoint::serve(
                runtime.handle(),
                any,
                Arc::new(identity.unwrap()),
                Arc::clone(fake) as Arc<dyn Handler>,
                peer::PeerOptions::default(),
            )
            .unwrap();
            let address = endpoint.local_address().unwrap();
            nodes.push(StorageNode { name, address });
            endpoints.push(endpoint);
        }
        let identity = work.path().join("agent");
        let mut order = CertificateOrder::new("agent", Role::Agent);
        order.namespaces = Namespaces::new(["*"]).unwrap();
        authority.issue(&order, &identity, false).unwrap();
        let agent = runtime.block_on(Agent::start(AgentOptions {
            nodes,
            identity,
            host: host::HostOptions {
                run_dir: work.path().join("run"),
                listen: None,
                listen_uids: Vec::new(),
                idle_connection: Duration::from_secs(60),
                tls: None,
            },
            durability: String::new(),
            deadline,
            session_ttl: Duration::from_secs(60),
            transport: peer::PeerOptions::default(),
            denials_every: Duration::from_millis(50),
        }));
        Self {
            fakes,
            _endpoints: endpoints,
            agent: Some(agent.unwrap()),
            work,
            runtime,
        }
    }

    /// Exports the checkpoint into a new directory.
    fn export(&self, name: &str) -> Result<control::Exported, ControlError> {
        self.export_part(name, false)
    }

    fn export_part(
        &self,
        name: &str,
        without_lazy_pages: bool,
    ) -> Result<control::Exported, ControlError> {
        let out = self.out(name);
        std::fs::create_dir(&out).unwrap();
        let directory = File::open(&out).unwrap();
        let socket = self.agent.as_ref().unwrap().control_socket();
        let mut connection = Connection::connect(&socket).unwrap();
        connection.call_with(
            request::Export {
                checkpoint: "job".to_owned(),
                without_lazy_pages,
                ..Default::default()
            },
            Some(directory.as_fd()),
            &mut |_| {},
        )
    }

    /// Requests the checkpoint, and returns the index of the node that answered.
    fn answering(&self) -> Result<usize, ControlError> {
        let shown = |fake: &Arc<Fake>| fake.shown.load(Ordering::SeqCst);
        let before: Vec<u64> = self.fakes.iter().map(shown).collect();
        let socket = self.agent.as_ref().unwrap().control_socket();
        Connection::connect(&socket)?.call(request::Show {
            checkpoint: "job".to_owned(),
        })?;
        let mut nodes = 0..self.fakes.len();
        let answered = nodes.find(|n| shown(&self.fakes[*n]) > before[*n]);
        Ok(answered.expect("somebody answered"))
    }

    /// Makes a node report these certificates as denied.
    fn report(&self, node: usize, denied: &[&str]) {
        let denied = denied.iter().map(|&entry| entry.to_owned());
        *self.fakes[node].denied.lock() = denied.collect();
    }

    /// Waits until this node answers; with `None`, until no node answers.
    fn wait_for(&self, node: Option<usize>) {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let answering = self.answering().ok();
            if answering == node {
                return;
            }
            assert!(Instant::now() < until, "{answering:?}, not {node:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn out(&self, name: &str) -> std::path::PathBuf {
        self.work.path().join(name)
    }

    fn check(&self, name: &str) {
        let read = |file: &str| std::fs::read(self.out(name).join(file)).unwrap();
        assert!(read("pages-65537.img") == memory());
        assert_eq!(read("core-4711.img"), small("core-4711.img"));
        assert_eq!(read("inventory.img"), small("inventory.img"));
        let pagemap = Pagemap::read(&read("pagemap-4711.img")).unwrap();
        let pages: u64 = pagemap.entries.iter().map(|entry| entry.nr_pages).sum();
        assert_eq!(pages, PAGES as u64);
        assert_eq!(pagemap.entries[0].vaddr, FIRST * PAGE_SIZE as u64);
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some(agent) = self.agent.take() {
            self.runtime.block_on(agent.stop());
        }
    }
}

fn refused(result: Result<control::Exported, ControlError>) -> (ErrorCode, String) {
    match result {
        Err(ControlError::Refused { code, message, .. }) => (code, message),
        other => panic!("{other:?}"),
    }
}

fn is_empty(path: &Path) -> bool {
    std::fs::read_dir(path).unwrap().next().is_none()
}

#[test]
fn what_one_node_leaves_off_another_goes_on_with() {
    let breaking = Fake {
        breaks_after: Some(10),
        ..Fake::default()
    };
    let site = Site::new([breaking, Fake::default()]);
    site.export("out").unwrap();
    site.check("out");
    let [first, second] = [0, 1].map(|n| site.fakes[n].sent.load(Ordering::SeqCst));
    let stored = (0..PAGES).filter(|n| n % 64 < 48).count() as u64;
    assert!(first > 0, "the first one was asked first");
    assert!(second > 0);
    // Frames that were still on their way come twice, but not all of them.
    assert!(second < stored, "{first} and {second} of {stored}");
    let begun_at = site.fakes[1].begun_at.lock().clone();
    assert!(matches!(begun_at[..], [at] if at > FIRST), "{begun_at:?}");
}

#[test]
fn damaged_pages_are_refused_and_nothing_is_left() {
    // The very last page too, which is held back until the digest was compared.
    for page in [0, 200, PAGES - 1] {
        let site = Site::new([Fake {
            flips: Some(page),
            ..Fake::default()
        }]);
        let (code, message) = refused(site.export("out"));
        assert_eq!(code, ErrorCode::Corrupt, "{message}");
        assert!(message.contains("process 4711"), "{message}");
        assert!(is_empty(&site.out("out")));
    }
}

#[test]
fn a_part_is_compared_with_the_checkpoint_whoever_sends_it() {
    // Pages that a lazy restore needs at once, as all of these, are read in parts.
    for lies in [false, true] {
        let liar = || Fake {
            flips: Some(200),
            lies,
            ..Fake::default()
        };
        let site = Site::new([liar()]);
        let (code, message) = refused(site.export_part("out", true));
        assert_eq!(code, ErrorCode::Corrupt, "{message}");
        assert!(is_empty(&site.out("out")));
        let site = Site::new([liar(), Fake::default()]);
        site.export_part("out", true).unwrap();
        site.check("out");
    }
}

#[test]
fn a_damaged_image_comes_from_another_node_or_not_at_all() {
    let spoiling = || Fake {
        spoils: Some("core-4711.img"),
        ..Fake::default()
    };
    let site = Site::new([spoiling(), Fake::default()]);
    site.export("out").unwrap();
    site.check("out");

    let site = Site::new([spoiling()]);
    let (code, message) = refused(site.export("out"));
    assert_eq!(code, ErrorCode::Corrupt, "{message}");
    assert!(is_empty(&site.out("out")));
}

#[test]
fn a_node_that_gives_up_and_has_no_substitute_is_an_error() {
    let breaking = || Fake {
        breaks_after: Some(3),
        ..Fake::default()
    };
    let site = Site::new([breaking(), breaking()]);
    let (_, message) = refused(site.export("out"));
    assert!(message.contains("given up half-way"), "{message}");
    assert!(is_empty(&site.out("out")));
}

#[test]
fn a_node_that_the_cluster_denies_is_refused_until_that_is_taken_back() {
    // Time that passes while no node answers.
    let deadline = Duration::from_secs(4);
    let site = Site::with_deadline(deadline, [Fake::default(), Fake::default()]);
    site.wait_for(Some(0));
    // The connection that is open ends, too.
    site.report(1, &["name node node-0", "nonsense"]);
    site.wait_for(Some(1));
    // Reports of one node do not keep the others from being asked: each node denies the other, and neither is
    // used.
    site.report(0, &["name node node-1"]);
    site.wait_for(None);
    // The agent's own file decides: reports of a node that it denies are ignored.
    let mut own = DenyList::default();
    own.insert("name node node-0".parse().unwrap()).unwrap();
    own.store(&site.out("agent").join(DENIED)).unwrap();
    site.wait_for(Some(1));

    std::fs::remove_file(site.out("agent").join(DENIED)).unwrap();
    site.report(1, &[]);
    site.wait_for(Some(0));
}
