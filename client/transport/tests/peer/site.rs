//! Two nodes with certificates of one authority, a handler that records what it receives, and dumps to send.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use permafrost_identity::{Authority, CertificateOrder, Peer, ReloadingIdentity, Role};
use permafrost_protocol::PAGE_SIZE;
use permafrost_protocol::control;
use permafrost_protocol::manifest::Manifest;
use permafrost_protocol::wire::frame::Kind;
use permafrost_protocol::wire::message::{
    Closed, Commit, Committed, Done, Prepared, reply, request,
};
use permafrost_transport::peer::{
    DumpSender, Endpoint, FrameSink, FrameSource, Handler, Network, PeerError, PeerOptions, Replies,
};
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Time limit of the tests' waits: the machine may be busy with other things.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn deadline() -> Instant {
    Instant::now() + LONG
}

/// An item that was sent or received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Space(u16, u64, u32),
    Pages(u64, u16, Vec<u8>),
    Zero(u64, u16, u32),
    Parent(u64, u16, u32),
    Close,
    Image(String, Vec<u8>),
}

/// A dump as a peer received it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Taken {
    pub(crate) events: Vec<Event>,
    pub(crate) commit: Option<Commit>,
    pub(crate) end: Option<Result<(), String>>,
}

type Hook = Box<dyn Fn(u64) + Send + Sync>;

/// Handler that records the received dumps.
#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) dumps: Mutex<HashMap<Vec<u8>, Taken>>,
    pub(crate) ended: Condvar,
    /// Called with the frame's number before each frame is taken.
    pub(crate) before_frame: Mutex<Option<Hook>>,
    /// Called between a commit and its reply.
    pub(crate) before_committed: Mutex<Option<Hook>>,
    pub(crate) frames: AtomicU64,
    /// Number of requests other than a ping.
    pub(crate) calls: AtomicU64,
    /// Items that fetches return.
    pub(crate) stored: Mutex<Vec<Event>>,
}

impl Recorder {
    /// Returns the dump of this session, once its handler has returned.
    pub(crate) fn wait(&self, session: &[u8]) -> Taken {
        let until = deadline();
        let mut dumps = self.dumps.lock();
        loop {
            if let Some(taken) = dumps.get(session)
                && taken.end.is_some()
            {
                return taken.clone();
            }
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the handler did not return");
            self.ended.wait_for(&mut dumps, left);
        }
    }

    fn take(
        &self,
        session: &[u8],
        frames: &mut dyn FrameSource,
        replies: &mut dyn Replies,
    ) -> Result<(), PeerError> {
        let note = |event| {
            let mut dumps = self.dumps.lock();
            dumps
                .entry(session.to_vec())
                .or_default()
                .events
                .push(event);
        };
        let nodes = vec!["there".to_owned()];
        let content_digest = vec![7; 32];
        loop {
            let number = self.frames.fetch_add(1, Ordering::SeqCst);
            if let Some(hook) = &*self.before_frame.lock() {
                hook(number);
            }
            let frame = frames.next()?;
            let (header, payload) = (frame.header, frame.payload);
            let (index, flags, pages) = (header.index, header.flags, header.pages);
            match header.kind {
                Kind::Space => note(Event::Space(flags, index, pages)),
                Kind::Pages => note(Event::Pages(index, flags, payload.to_vec())),
                Kind::Zero => note(Event::Zero(index, flags, pages)),
                Kind::Parent => note(Event::Parent(index, flags, pages)),
                Kind::Close => {
                    note(Event::Close);
                    replies.closed(Closed {
                        content_digest: content_digest.clone(),
                        nodes: nodes.clone(),
                    });
                }
                Kind::Image => {
                    let name = String::from_utf8(payload.to_vec()).unwrap();
                    note(Event::Image(name, Vec::new()));
                }
                Kind::ImageData => {
                    let mut dumps = self.dumps.lock();
                    match dumps.get_mut(session).unwrap().events.last_mut() {
                        Some(Event::Image(_, bytes)) => bytes.extend_from_slice(&payload),
                        other => panic!("image data after {other:?}"),
                    }
                }
                Kind::Prepare => break,
            }
        }
        replies.prepared(Prepared {
            content_digest,
            nodes: nodes.clone(),
        });
        let commit = frames.commit()?;
        let mut dumps = self.dumps.lock();
        dumps.entry(session.to_vec()).or_default().commit = Some(commit);
        drop(dumps);
        if let Some(hook) = &*self.before_committed.lock() {
            hook(0);
        }
        replies.committed(Committed {
            checkpoint: None,
            nodes,
        });
        Ok(())
    }
}

impl Handler for Recorder {
    fn call(&self, _: &Peer, body: request::Body) -> reply::Body {
        match body {
            request::Body::Ping(_) => reply::Body::Done(Done {
                free_bytes: 42,
                ..Done::default()
            }),
            _ => {
                self.calls.fetch_add(1, Ordering::SeqCst);
                reply::Body::Error(refusal("not here"))
            }
        }
    }

    fn dump(
        &self,
        _: &Peer,
        request: request::Dump,
        frames: &mut dyn FrameSource,
        replies: &mut dyn Replies,
    ) -> Result<(), control::Error> {
        if request.job == "refused" {
            return Err(refusal("this job is refused"));
        }
        self.dumps
            .lock()
            .insert(request.session.clone(), Taken::default());
        replies.opened(!request.parent.is_empty());
        if request.job == "full" {
            frames.next().and_then(|_| frames.next()).unwrap();
            return Err(refusal("the region is full"));
        }
        let taken = self.take(&request.session, frames, replies);
        let mut dumps = self.dumps.lock();
        let end = taken.map_err(|error| error.to_string());
        dumps.entry(request.session).or_default().end = Some(end.clone());
        self.ended.notify_all();
        end.map_err(|error| refusal(&error))
    }

    fn fetch(
        &self,
        _: &Peer,
        request: request::Fetch,
        frames: &mut dyn FrameSink,
    ) -> Result<(), control::Error> {
        if request.checkpoint.is_empty() {
            return Err(refusal("no such checkpoint"));
        }
        let failed = |error: PeerError| refusal(&error.to_string());
        frames
            .opened(Manifest::default(), vec![9; 32])
            .map_err(failed)?;
        for event in &*self.stored.lock() {
            match event {
                Event::Space(kind, id, pages_id) => {
                    frames.push(Kind::Space, *kind, *pages_id, *id, &[])
                }
                Event::Pages(index, flags, bytes) => {
                    let pages = u32::try_from(bytes.len() / PAGE_SIZE).unwrap();
                    frames.push(Kind::Pages, *flags, pages, *index, bytes)
                }
                Event::Zero(index, flags, pages) => {
                    frames.push(Kind::Zero, *flags, *pages, *index, &[])
                }
                Event::Parent(index, flags, pages) => {
                    frames.push(Kind::Parent, *flags, *pages, *index, &[])
                }
                Event::Close => return Err(refusal("given up half-way")),
                Event::Image(..) => Ok(()),
            }
            .map_err(failed)?;
        }
        frames.push(Kind::Prepare, 0, 0, 0, &[]).map_err(failed)
    }
}

pub(crate) fn refusal(message: &str) -> control::Error {
    control::Error {
        code: control::ErrorCode::Invalid.into(),
        message: message.to_owned(),
        hint: String::new(),
    }
}

/// A node that serves, called `there`, and others that connect to it.
pub(crate) struct Site {
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) endpoint: Endpoint,
    pub(crate) runtime: Runtime,
    options: PeerOptions,
    pub(crate) authority: Authority,
    pub(crate) directory: TempDir,
}

impl Site {
    pub(crate) fn new(options: PeerOptions) -> Self {
        Self::at((Ipv4Addr::LOCALHOST, 0).into(), options)
    }

    pub(crate) fn at(address: SocketAddr, options: PeerOptions) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::create(&directory.path().join("ca"), "test", false).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let recorder = Arc::new(Recorder::default());
        let endpoint = Endpoint::serve(
            runtime.handle(),
            address,
            identity(
                &authority,
                directory.path().join("there"),
                "there",
                Role::Node,
            ),
            Arc::clone(&recorder) as Arc<dyn Handler>,
            options.clone(),
        )
        .unwrap();
        Self {
            recorder,
            endpoint,
            runtime,
            options,
            authority,
            directory,
        }
    }

    pub(crate) fn identity(&self, name: &str, role: Role) -> Arc<ReloadingIdentity> {
        identity(
            &self.authority,
            self.directory.path().join(name),
            name,
            role,
        )
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.endpoint.local_address().unwrap()
    }

    /// Returns the network of another node, which finds `there` at `address`.
    pub(crate) fn network_to(&self, name: &str, address: SocketAddr) -> Network {
        self.network_with(name, address, self.options.clone())
    }

    /// Returns a network like [`Self::network_to`] with options of its own.
    pub(crate) fn network_with(
        &self,
        name: &str,
        address: SocketAddr,
        options: PeerOptions,
    ) -> Network {
        let addresses = move |node: &str| (node != "nowhere").then_some(address);
        Network::new(
            self.runtime.handle().clone(),
            (Ipv4Addr::LOCALHOST, 0).into(),
            self.identity(name, Role::Node),
            "",
            Arc::new(addresses),
            options,
        )
        .unwrap()
    }

    /// Starts another process of the node `there`, at another address.
    pub(crate) fn successor(&self) -> (Endpoint, Arc<Recorder>) {
        let recorder = Arc::new(Recorder::default());
        let identity = ReloadingIdentity::load(self.directory.path().join("there")).unwrap();
        let endpoint = Endpoint::serve(
            self.runtime.handle(),
            (Ipv4Addr::LOCALHOST, 0).into(),
            Arc::new(identity),
            Arc::clone(&recorder) as Arc<dyn Handler>,
            self.options.clone(),
        );
        (endpoint.unwrap(), recorder)
    }

    pub(crate) fn network(&self) -> Network {
        self.network_to("here", self.address())
    }
}

fn identity(
    authority: &Authority,
    directory: PathBuf,
    name: &str,
    role: Role,
) -> Arc<ReloadingIdentity> {
    let order = CertificateOrder::new(name, role);
    authority.issue(&order, &directory, false).unwrap();
    Arc::new(ReloadingIdentity::load(&directory).unwrap())
}

pub(crate) fn dump_request(session: u8) -> request::Dump {
    request::Dump {
        session: vec![session; 16],
        job: "job".to_owned(),
        parent: "0".repeat(32),
        ..request::Dump::default()
    }
}

pub(crate) fn ping() -> request::Body {
    request::Body::Ping(request::Ping {})
}

/// Generator of a few random bits, xorshift64*; the same sequence for the same seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(count + 8);
        while bytes.len() < count {
            bytes.extend_from_slice(&self.next().to_le_bytes());
        }
        bytes.truncate(count);
        bytes
    }
}

/// Returns a dump of about `runs` runs in two spaces, with images.
pub(crate) fn content(seed: u64, runs: usize) -> Vec<Event> {
    println!("seed {seed}");
    let mut random = Random(seed | 1);
    let mut events = Vec::new();
    for space in 1..=2 {
        events.push(Event::Space(1, space, u32::try_from(space).unwrap()));
        let mut index = 16;
        for _ in 0..runs / 2 {
            let pages = 1 + random.below(64);
            let count = u32::try_from(pages).unwrap();
            let bytes = usize::try_from(pages).unwrap() * PAGE_SIZE;
            let flags = u16::try_from(random.below(4)).unwrap();
            events.push(match random.below(6) {
                0 => Event::Zero(index, flags, count * 100),
                1 => Event::Parent(index, flags, count),
                2 => {
                    let text = b"a line of text that is easily compressed; ".repeat(bytes / 42 + 1);
                    Event::Pages(index, flags, text[..bytes].to_vec())
                }
                _ => Event::Pages(index, flags, random.bytes(bytes)),
            });
            index += pages * 100 + random.below(1000);
        }
    }
    events.push(Event::Close);
    events.push(Event::Image("core-1.img".to_owned(), random.bytes(3000)));
    events.push(Event::Image("large.img".to_owned(), random.bytes(700_000)));
    events.push(Event::Image("empty.img".to_owned(), Vec::new()));
    events
}

/// Pushes all events, with a CLOSE in between.
pub(crate) fn send(dump: &mut DumpSender, events: &[Event]) -> Result<(), PeerError> {
    for event in events {
        match event {
            Event::Space(kind, id, pages_id) => dump.space(*kind, *id, *pages_id)?,
            Event::Pages(index, flags, bytes) => dump.pages(*index, *flags, bytes)?,
            Event::Zero(index, flags, pages) => dump.zero(*index, *flags, *pages)?,
            Event::Parent(index, flags, pages) => dump.parent(*index, *flags, *pages)?,
            Event::Close => {
                let closed = dump.close(deadline())?;
                assert_eq!(closed.content_digest, vec![7; 32]);
            }
            Event::Image(name, bytes) => {
                dump.begin_image(name, bytes.len() as u64)?;
                dump.image_data(bytes)?;
            }
        }
    }
    Ok(())
}

/// Sends a whole dump, from its opening to its seal.
pub(crate) fn send_all(network: &Network, session: u8, events: &[Event]) -> DumpSender {
    let mut dump = DumpSender::open(network, "there", dump_request(session), deadline()).unwrap();
    send(&mut dump, events).unwrap();
    finish(&mut dump);
    dump
}

pub(crate) fn commit() -> Commit {
    Commit {
        checkpoint: "c".repeat(32),
        content_digest: vec![7; 32],
        job: "job".to_owned(),
        generation: 3,
        session: "07".repeat(16),
        ..Commit::default()
    }
}

pub(crate) fn finish(dump: &mut DumpSender) {
    let prepared = dump.prepare(deadline()).unwrap();
    assert_eq!(prepared.nodes, ["there"]);
    let committed = dump.commit(&commit(), deadline()).unwrap();
    assert_eq!(committed.nodes, ["there"]);
}
