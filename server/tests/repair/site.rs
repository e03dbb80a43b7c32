//! Nodes with a store each, that serve fetches and can be told to do it badly.

use std::collections::{BTreeMap, HashMap};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, MutexGuard};
use std::time::Duration;

use permafrost_client::identity::{Authority, Order, Peer, ReloadingIdentity, Role};
use permafrost_client::peer::{
    Endpoint, FrameSink, FrameSource, Handler, Network, Options, PeerError, Replies,
};
use permafrost_pmem::{FormatOptions, OpenOptions, PAGE_SIZE, Region, open_medium};
use permafrost_protocol::control;
use permafrost_protocol::manifest::Manifest;
use permafrost_protocol::pageserver::SpaceId;
use permafrost_protocol::wire::frame::Kind;
use permafrost_protocol::wire::message::{Commit, Done, reply, request};
use permafrost_server::agents::serve_fetch;
use permafrost_server::catalog::SledCatalog;
use permafrost_server::repair::{Limits, Puller, Throttle};
use permafrost_server::store::{Fetched, Place, ReplicaRequest, Retention, Store};
use tempfile::TempDir;
use tokio::runtime::Runtime;

const REGION_BYTES: u64 = 24 << 20;

/// What a node does wrong when it is fetched from, until it is cleared.
#[derive(Default)]
pub(crate) struct Faults {
    /// Goes away after so many frames: all its connections end.
    pub(crate) die_after: Option<u64>,
    /// Claims another digest than that of what it sends.
    pub(crate) lie: bool,
    /// Gets one bit of the first page wrong.
    pub(crate) corrupt: bool,
    /// Before the first frame both wait here.
    pub(crate) gate: Option<Arc<Barrier>>,
}

/// Pages by the way they went.
#[derive(Default)]
pub(crate) struct Sent {
    pub(crate) fetches: AtomicU64,
    pub(crate) pages: AtomicU64,
    pub(crate) zero: AtomicU64,
    pub(crate) parent: AtomicU64,
}

impl Sent {
    /// Pages sent, zero, and left to the parent.
    pub(crate) fn take(&self) -> (u64, u64, u64) {
        let take = |count: &AtomicU64| count.swap(0, Ordering::SeqCst);
        (take(&self.pages), take(&self.zero), take(&self.parent))
    }
}

pub(crate) struct Serving {
    store: Arc<Store>,
    faults: Mutex<Faults>,
    pub(crate) sent: Sent,
    endpoint: Mutex<Option<Arc<Endpoint>>>,
}

impl Serving {
    pub(crate) fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap()
    }
}

struct Faulty<'a> {
    inner: &'a mut dyn FrameSink,
    serving: &'a Serving,
    frames: u64,
}

impl FrameSink for Faulty<'_> {
    fn opened(&mut self, manifest: Manifest, mut digest: Vec<u8>) -> Result<(), PeerError> {
        if self.serving.faults().lie {
            digest[3] ^= 1;
        }
        self.inner.opened(manifest, digest)?;
        let gate = self.serving.faults().gate.clone();
        if let Some(gate) = gate {
            gate.wait();
            gate.wait();
        }
        Ok(())
    }

    fn push(
        &mut self,
        kind: Kind,
        flags: u16,
        pages: u32,
        index: u64,
        payload: &[u8],
    ) -> Result<(), PeerError> {
        self.frames += 1;
        let (die_after, corrupt) = {
            let faults = self.serving.faults();
            (faults.die_after, faults.corrupt)
        };
        if die_after.is_some_and(|after| self.frames > after) {
            let endpoint = self.serving.endpoint.lock().unwrap().clone().unwrap();
            // What was pushed before is to be there.
            std::thread::sleep(Duration::from_millis(200));
            endpoint.disconnect();
        }
        let sent = &self.serving.sent;
        let count = match kind {
            Kind::Pages => &sent.pages,
            Kind::Zero => &sent.zero,
            Kind::Parent => &sent.parent,
            _ => return self.inner.push(kind, flags, pages, index, payload),
        };
        count.fetch_add(pages.into(), Ordering::SeqCst);
        if corrupt && kind == Kind::Pages {
            self.serving.faults().corrupt = false;
            let mut wrong = payload.to_vec();
            wrong[1000] ^= 16;
            return self.inner.push(kind, flags, pages, index, &wrong);
        }
        self.inner.push(kind, flags, pages, index, payload)
    }
}

impl Handler for Serving {
    fn call(&self, _: &Peer, _: request::Body) -> reply::Body {
        reply::Body::Done(Done { free_bytes: 0 })
    }

    fn dump(
        &self,
        _: &Peer,
        _: request::Dump,
        _: &mut dyn FrameSource,
        _: &mut dyn Replies,
    ) -> Result<(), control::Error> {
        unreachable!("nobody dumps")
    }

    fn fetch(
        &self,
        peer: &Peer,
        request: request::Fetch,
        frames: &mut dyn FrameSink,
    ) -> Result<(), control::Error> {
        self.sent.fetches.fetch_add(1, Ordering::SeqCst);
        let mut faulty = Faulty {
            inner: frames,
            serving: self,
            frames: 0,
        };
        serve_fetch(&self.store, peer, &request, &mut faulty)
    }
}

pub(crate) struct Node {
    pub(crate) store: Arc<Store>,
    pub(crate) serving: Arc<Serving>,
    pub(crate) puller: Arc<Puller>,
    pub(crate) throttle: Arc<Throttle>,
    region: PathBuf,
}

type Addresses = Arc<Mutex<HashMap<String, SocketAddr>>>;

/// Nodes of one cluster.
pub(crate) struct Site {
    runtime: Runtime,
    authority: Authority,
    directory: TempDir,
    addresses: Addresses,
}

impl Site {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::create(&directory.path().join("ca"), "test", false).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        Self {
            runtime,
            authority,
            directory,
            addresses: Addresses::default(),
        }
    }

    /// A node that is there, and found by its name.
    pub(crate) fn node(&self, name: &str) -> Node {
        let options = Options {
            reconnect: Duration::from_secs(1),
            ..Options::default()
        };
        let directory = self.directory.path().join(name);
        std::fs::create_dir(&directory).unwrap();
        let region_path = directory.join("region");
        let medium = open_medium(&region_path, REGION_BYTES, &OpenOptions::default()).unwrap();
        let format = FormatOptions {
            segment_bytes: 64 << 10,
            ..FormatOptions::default()
        };
        Region::format(Arc::clone(&medium), &format).unwrap();
        let guarantee = medium.guarantee().clone();
        let region = Region::open(medium).unwrap().0;
        let (catalog, _) = SledCatalog::open_or_replace(&directory.join("catalog")).unwrap();
        let place = Place {
            path: region_path.clone(),
            guarantee,
        };
        let store = Store::new(region, place, Box::new(catalog), Retention::default()).unwrap();
        let identity = directory.join("identity");
        let order = Order::new(name, Role::Node);
        self.authority.issue(&order, &identity, false).unwrap();
        let identity = Arc::new(ReloadingIdentity::load(&identity).unwrap());
        let serving = Arc::new(Serving {
            store: Arc::clone(&store),
            faults: Mutex::default(),
            sent: Sent::default(),
            endpoint: Mutex::default(),
        });
        let endpoint = Endpoint::serve(
            self.runtime.handle(),
            (Ipv4Addr::LOCALHOST, 0).into(),
            Arc::clone(&identity),
            Arc::clone(&serving) as Arc<dyn Handler>,
            options.clone(),
        );
        let endpoint = Arc::new(endpoint.unwrap());
        let address = endpoint.local_address().unwrap();
        self.addresses
            .lock()
            .unwrap()
            .insert(name.to_owned(), address);
        *serving.endpoint.lock().unwrap() = Some(endpoint);
        let addresses = Arc::clone(&self.addresses);
        let network = Network::new(
            self.runtime.handle().clone(),
            (Ipv4Addr::LOCALHOST, 0).into(),
            identity,
            "",
            Arc::new(move |node: &str| addresses.lock().unwrap().get(node).copied()),
            options,
        );
        let throttle = Throttle::of(&store, Limits::default());
        let puller = Puller::new(
            Arc::clone(&store),
            network.unwrap(),
            name,
            Arc::clone(&throttle),
        );
        Node {
            store,
            serving,
            puller: Arc::new(puller),
            throttle,
            region: region_path,
        }
    }
}

/// Pages of the one address space by index.
pub(crate) type Pages = BTreeMap<u64, [u8; PAGE_SIZE]>;

/// A page that nobody else has; zeros for 0.
pub(crate) fn page(salt: u64) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    if salt > 0 {
        for (word, at) in page.as_chunks_mut::<8>().0.iter_mut().zip(1_u64..) {
            *word = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ at).to_le_bytes();
        }
    }
    page
}

pub(crate) fn id(number: u64) -> String {
    format!("{number:032x}")
}

impl Node {
    /// A checkpoint of this node alone, published.
    pub(crate) fn make(&self, number: u64, job: &str, generation: u64, pages: &Pages) -> Vec<u8> {
        let request = ReplicaRequest {
            session: [u8::try_from(number).unwrap(); 16],
            job: job.to_owned(),
            parent: String::new(),
        };
        let mut dump = self.store.open_replica(request).unwrap();
        dump.space(SpaceId::process(7), 65_537).unwrap();
        for (index, page) in pages {
            if page.iter().all(|byte| *byte == 0) {
                dump.zero(*index, 4, 1).unwrap();
            } else {
                dump.pages(*index, 4, page).unwrap();
            }
        }
        dump.close().unwrap();
        let image = |dump: &mut permafrost_server::store::ReplicaDump, name: &str, bytes: &[u8]| {
            let len = bytes.len() as u64;
            dump.image(name, len, &mut &bytes[..]).unwrap();
        };
        image(&mut dump, "inventory.img", b"inventory");
        image(&mut dump, "empty.img", b"");
        image(&mut dump, "big.img", &[9; 300_001]);
        let content_digest = dump.prepare().unwrap().to_vec();
        let session = dump.session().to_owned();
        dump.commit(&Commit {
            checkpoint: id(number),
            content_digest: content_digest.clone(),
            job: job.to_owned(),
            generation,
            parent_generation: generation.saturating_sub(1),
            created_unix_ms: 1_700_000_000_000 + number,
            kind: if generation == 0 { 2 } else { 0 },
            origin: None,
            session,
        })
        .unwrap();
        self.store.publish(&id(number)).unwrap();
        content_digest
    }

    /// All pages and images as they are read here, each verified.
    pub(crate) fn read(&self, number: u64) -> Result<(Pages, BTreeMap<String, usize>), String> {
        let fetch = self.store.open_fetch(&id(number), "");
        let fetch = fetch.map_err(|error| error.to_string())?;
        let mut pages = Pages::new();
        for run in fetch.runs(0, 0, 0) {
            match run.map_err(|error| error.to_string())? {
                Fetched::Pages {
                    first_index, bytes, ..
                } => {
                    for (page, index) in bytes.chunks(PAGE_SIZE).zip(first_index..) {
                        pages.insert(index, page.try_into().unwrap());
                    }
                }
                Fetched::Zero {
                    first_index,
                    pages: count,
                    ..
                } => pages.extend((first_index..first_index + count).map(|i| (i, page(0)))),
                Fetched::Parent { .. } => panic!("there is no parent"),
            }
        }
        let mut images = BTreeMap::new();
        for image in &fetch.manifest().images {
            let mut len = 0;
            let read = fetch.image(&image.name, |piece| {
                len += piece.len();
                Ok(())
            });
            read.map_err(|error| error.to_string())?;
            images.insert(image.name.clone(), len);
        }
        Ok((pages, images))
    }

    /// Gets one bit of a stored page wrong, wherever the region has it.
    pub(crate) fn damage(&self, salt: u64) {
        let wanted = page(salt);
        let mut bytes = std::fs::read(&self.region).unwrap();
        let pages = bytes.chunks_mut(PAGE_SIZE).enumerate();
        let file = std::fs::File::options().write(true).open(&self.region);
        let file = file.unwrap();
        let mut damaged = 0;
        for (at, found) in pages {
            if *found == wanted {
                let byte = found[500] ^ 1;
                file.write_all_at(&[byte], (at * PAGE_SIZE + 500) as u64)
                    .unwrap();
                damaged += 1;
            }
        }
        assert!(damaged > 0, "page {salt} is not there");
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.store.region().usage().free_bytes
    }

    pub(crate) fn mark(&self, number: u64) -> (bool, bool) {
        let marks = self.store.marks();
        let mark = marks.iter().find(|mark| mark.id == id(number)).unwrap();
        (mark.published, mark.provisional)
    }
}

/// A pull of what is listed.
pub(crate) fn pull(number: u64, digest: &[u8], from: &[&str]) -> request::Pull {
    request::Pull {
        checkpoint: id(number),
        from: from.iter().map(|&node| node.to_owned()).collect(),
        published: true,
        content_digest: digest.to_vec(),
        ..request::Pull::default()
    }
}

/// So many pages, every fifth of zeros, with a gap in the middle.
pub(crate) fn pages(salt: u64, count: u64) -> Pages {
    let index = |at| if at < count / 2 { 16 + at } else { 5000 + at };
    let salted = |at: u64| if at.is_multiple_of(5) { 0 } else { salt + at };
    (0..count).map(|at| (index(at), page(salted(at)))).collect()
}
