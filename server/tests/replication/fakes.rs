//! Nodes, a wire and a registry, with faults on demand.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use permafrost_client::frontend::{PageSink, SinkError};
use permafrost_pmem::{FormatOptions, PAGE_SIZE, Region, create_medium_in_memory};
use permafrost_protocol::control::Checkpoint;
use permafrost_protocol::pageserver::{PE_PRESENT, SpaceId};
use permafrost_protocol::wire::message::Commit;
use permafrost_server::catalog::SledCatalog;
use permafrost_server::cluster::{JobLock, Registered, Registry};
use permafrost_server::replication::{ContentDigest, Copies, CopiesRequest, Durability, Replicate};
use permafrost_server::store::{
    Cluster, Fetched, Place, ReplicaDump, ReplicaRequest, Retention, SessionRequest, SessionSink,
    Store, StoreError,
};

pub(crate) const REGION_BYTES: u64 = 16 << 20;
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// A step of a dump at which something can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Close,
    Prepare,
    Reserve,
    /// Before the copy of that number is committed; as many as there are: behind the last.
    Commit(usize),
    BeforePublish,
    AfterPublish,
    Published,
}

/// What goes wrong, until it is cleared.
#[derive(Default)]
pub(crate) struct Faults {
    /// The origin's thread dies there.
    pub(crate) die_at: Option<Step>,
    /// These copies fail from the first page on.
    pub(crate) broken: HashSet<usize>,
    /// These copies get one bit of the first page wrong.
    pub(crate) corrupt: HashSet<usize>,
    /// Publishing fails without having been done, and with what error.
    pub(crate) refuse_publish: Option<fn() -> StoreError>,
    /// The registry publishes, and its answer is lost.
    pub(crate) lose_answer: bool,
    /// The registry answers nothing but publications.
    pub(crate) silent: bool,
}

pub(crate) fn unavailable() -> StoreError {
    StoreError::Unavailable {
        message: "the registry does not answer".to_owned(),
        hint: "",
    }
}

pub(crate) fn fenced() -> StoreError {
    StoreError::Conflict {
        message: "the lease is lost".to_owned(),
        hint: "",
    }
}

#[derive(Clone, Default)]
pub(crate) struct Shared(Arc<Mutex<Faults>>);

impl Shared {
    pub(crate) fn faults(&self) -> MutexGuard<'_, Faults> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass(&self, step: Step) {
        let die = self.faults().die_at == Some(step);
        assert!(!die, "the origin dies at {step:?}");
    }
}

/// A store of its own.
pub(crate) struct Node {
    pub(crate) store: Arc<Store>,
    _dir: tempfile::TempDir,
}

impl Node {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let medium = create_medium_in_memory(REGION_BYTES).unwrap();
        let options = FormatOptions {
            segment_bytes: 64 << 10,
            ..FormatOptions::default()
        };
        Region::format(Arc::clone(&medium), &options).unwrap();
        let guarantee = medium.guarantee().clone();
        let region = Region::open(medium).unwrap().0;
        let (catalog, _) = SledCatalog::open_or_replace(&dir.path().join("catalog")).unwrap();
        let place = Place {
            path: PathBuf::from("memory"),
            guarantee,
        };
        let store = Store::new(region, place, Box::new(catalog), Retention::default()).unwrap();
        Self { store, _dir: dir }
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.store.region().usage().free_bytes
    }

    pub(crate) fn checkpoints(&self) -> usize {
        self.store.region().checkpoints().len()
    }
}

/// One origin, some replicas, a registry.
pub(crate) struct World {
    pub(crate) origin: Node,
    pub(crate) replicas: Vec<Arc<Node>>,
    pub(crate) registry: Arc<FakeRegistry>,
    pub(crate) faults: Shared,
    wire: Arc<Wire>,
}

impl World {
    pub(crate) fn new(replicas: usize, durability: Durability) -> Self {
        let faults = Shared::default();
        let replicas: Vec<_> = (0..replicas).map(|_| Arc::new(Node::new())).collect();
        let registry = Arc::new(FakeRegistry {
            faults: faults.clone(),
            state: Mutex::default(),
        });
        let wire = Arc::new(Wire {
            replicas: Mutex::new(replicas.clone()),
            faults: faults.clone(),
            seen: Arc::default(),
        });
        let origin = Node::new();
        assert!(origin.store.join(Cluster {
            node: "origin".to_owned(),
            replicate: Some(Arc::clone(&wire) as Arc<dyn Replicate>),
            registry: Some(Arc::clone(&registry) as Arc<dyn Registry>),
            durability,
            deadline: DEADLINE,
            wanted_copies: u32::try_from(replicas.len() + 1).unwrap(),
        }));
        for (n, replica) in replicas.iter().enumerate() {
            replica.store.join(Cluster {
                node: name(n),
                replicate: None,
                registry: Some(Arc::clone(&registry) as Arc<dyn Registry>),
                durability,
                deadline: DEADLINE,
                wanted_copies: 1,
            });
        }
        Self {
            origin,
            replicas,
            registry,
            faults,
            wire,
        }
    }

    /// A node that has nothing yet takes the place of a replica.
    pub(crate) fn replace(&mut self, n: usize) {
        self.replicas[n] = Arc::new(Node::new());
        self.wire.replicas.lock().unwrap()[n] = Arc::clone(&self.replicas[n]);
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = &Node> {
        std::iter::once(&self.origin).chain(self.replicas.iter().map(|node| &**node))
    }

    /// What went over the wire since it was last asked.
    pub(crate) fn seen(&self) -> Seen {
        std::mem::take(&mut self.wire.seen.lock().unwrap())
    }
}

pub(crate) fn name(n: usize) -> String {
    format!("replica-{n}")
}

/// Pages by the way they went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) pages: u64,
    pub(crate) zero: u64,
    pub(crate) parent: u64,
}

struct Wire {
    replicas: Mutex<Vec<Arc<Node>>>,
    faults: Shared,
    seen: Arc<Mutex<Seen>>,
}

impl Replicate for Wire {
    fn begin(&self, request: CopiesRequest) -> Result<Box<dyn Copies>, StoreError> {
        let replicas = self.replicas.lock().unwrap().clone();
        let open = |node: &Arc<Node>| {
            node.store.open_replica(ReplicaRequest {
                session: request.session,
                job: request.job.clone(),
                parent: request.parent.clone(),
            })
        };
        let mut copies = Vec::new();
        for (n, node) in replicas.iter().enumerate() {
            copies.push(Copy {
                n,
                node: Arc::clone(node),
                dump: Some(open(node)?),
            });
        }
        Ok(Box::new(Loop {
            total: copies.len() + 1,
            takes_parent: copies
                .iter()
                .all(|copy| copy.dump.as_ref().is_some_and(ReplicaDump::has_parent)),
            copies,
            durability: request.durability,
            faults: self.faults.clone(),
            seen: Arc::clone(&self.seen),
            corrupted: HashSet::new(),
        }))
    }
}

struct Copy {
    n: usize,
    node: Arc<Node>,
    dump: Option<ReplicaDump>,
}

struct Loop {
    copies: Vec<Copy>,
    /// Copies there should be, the origin's included.
    total: usize,
    takes_parent: bool,
    durability: Durability,
    faults: Shared,
    seen: Arc<Mutex<Seen>>,
    corrupted: HashSet<usize>,
}

impl Loop {
    /// A copy that fails is no copy any more.
    fn each(&mut self, mut take: impl FnMut(&mut ReplicaDump) -> Result<(), StoreError>) {
        for copy in &mut self.copies {
            if copy.dump.as_mut().is_some_and(|dump| take(dump).is_err()) {
                copy.dump = None;
            }
        }
    }

    fn agree(
        &mut self,
        own: ContentDigest,
        ask: impl Fn(&mut ReplicaDump) -> Result<ContentDigest, StoreError>,
    ) -> Result<(), StoreError> {
        self.each(|dump| match ask(dump)? {
            theirs if theirs == own => Ok(()),
            _ => Err(unavailable()),
        });
        self.enough()
    }

    fn enough(&self) -> Result<(), StoreError> {
        let have = 1 + self
            .copies
            .iter()
            .filter(|copy| copy.dump.is_some())
            .count();
        let needed = match self.durability {
            Durability::Local => 1,
            Durability::Quorum => self.total / 2 + 1,
            Durability::All => self.total,
        };
        if have >= needed {
            return Ok(());
        }
        Err(StoreError::Unavailable {
            message: format!("{have} copies of {needed}"),
            hint: "",
        })
    }
}

impl Copies for Loop {
    fn takes_parent(&self) -> bool {
        self.takes_parent
    }

    fn space(&mut self, space: SpaceId, pages_id: u32) {
        self.each(|dump| dump.space(space, pages_id));
    }

    fn pages(&mut self, first_index: u64, flags: u16, bytes: &[u8]) {
        self.seen.lock().unwrap().pages += (bytes.len() / PAGE_SIZE) as u64;
        let (broken, corrupt) = {
            let faults = self.faults.faults();
            (faults.broken.clone(), faults.corrupt.clone())
        };
        for copy in &mut self.copies {
            if broken.contains(&copy.n) {
                copy.dump = None;
            }
            let Some(dump) = &mut copy.dump else { continue };
            let mut bytes = bytes.to_vec();
            if corrupt.contains(&copy.n) && self.corrupted.insert(copy.n) {
                bytes[77] ^= 4;
            }
            if dump.pages(first_index, flags, &bytes).is_err() {
                copy.dump = None;
            }
        }
    }

    fn zero(&mut self, first_index: u64, flags: u16, pages: u64) {
        self.seen.lock().unwrap().zero += pages;
        self.each(|dump| dump.zero(first_index, flags, pages));
    }

    fn parent(&mut self, first_index: u64, flags: u16, pages: u64) {
        assert!(self.takes_parent);
        self.seen.lock().unwrap().parent += pages;
        self.each(|dump| dump.parent(first_index, flags, pages));
    }

    fn close(&mut self, own: ContentDigest) -> Result<(), StoreError> {
        self.faults.pass(Step::Close);
        self.agree(own, ReplicaDump::close)
    }

    fn image(
        &mut self,
        name: &str,
        len_bytes: u64,
        contents: &mut dyn Read,
    ) -> Result<(), StoreError> {
        let mut bytes = Vec::new();
        contents.read_to_end(&mut bytes).unwrap();
        self.each(|dump| dump.image(name, len_bytes, &mut bytes.as_slice()));
        Ok(())
    }

    fn prepare(&mut self, own: ContentDigest) -> Result<(), StoreError> {
        self.faults.pass(Step::Prepare);
        self.agree(own, ReplicaDump::prepare)
    }

    fn commit(&mut self, commit: &Commit) -> Result<Vec<String>, StoreError> {
        let mut names = Vec::new();
        for n in 0..self.copies.len() {
            self.faults.pass(Step::Commit(n));
            let copy = &mut self.copies[n];
            let Some(dump) = &mut copy.dump else { continue };
            match dump.commit(commit) {
                Ok(first) => {
                    // Asked again, as after a lost answer: the same checkpoint, on the conversation and without it.
                    assert_eq!(dump.commit(commit).unwrap(), first);
                    assert_eq!(copy.node.store.committed(commit).unwrap(), Some(first));
                    names.push(name(copy.n));
                }
                Err(_) => copy.dump = None,
            }
        }
        self.faults.pass(Step::Commit(self.copies.len()));
        if let Err(error) = self.enough() {
            self.roll_back(&commit.checkpoint);
            return Err(error);
        }
        Ok(names)
    }

    fn published(&mut self, checkpoint: &str) {
        self.faults.pass(Step::Published);
        for copy in self.copies.iter().filter(|copy| copy.dump.is_some()) {
            copy.node.store.publish(checkpoint).unwrap();
        }
    }

    fn roll_back(&mut self, checkpoint: &str) {
        for copy in &self.copies {
            copy.node.store.roll_back(checkpoint, false).unwrap();
            // It may well be asked twice.
            assert!(!copy.node.store.roll_back(checkpoint, false).unwrap());
        }
    }
}

pub(crate) struct FakeRegistry {
    faults: Shared,
    state: Mutex<Listing>,
}

#[derive(Default)]
struct Listing {
    entries: Vec<Registered>,
    generations: HashMap<String, u64>,
    locked: Arc<Mutex<HashSet<String>>>,
}

struct Lock(String, Arc<Mutex<HashSet<String>>>);

impl Drop for Lock {
    fn drop(&mut self) {
        self.1.lock().unwrap().remove(&self.0);
    }
}

impl FakeRegistry {
    fn state(&self) -> MutexGuard<'_, Listing> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn entries(&self) -> Vec<Registered> {
        self.state().entries.clone()
    }

    fn speak(&self) -> Result<(), StoreError> {
        if self.faults.faults().silent {
            return Err(unavailable());
        }
        Ok(())
    }
}

impl Registry for FakeRegistry {
    fn lock_job(&self, job: &str) -> Result<JobLock, StoreError> {
        let locked = Arc::clone(&self.state().locked);
        if locked.lock().unwrap().insert(job.to_owned()) {
            return Ok(Box::new(Lock(job.to_owned(), locked)));
        }
        Err(StoreError::Conflict {
            message: format!("{job} is another node's"),
            hint: "",
        })
    }

    fn reserve_generation(&self, job: &str) -> Result<u64, StoreError> {
        self.faults.pass(Step::Reserve);
        let mut state = self.state();
        let generation = state.generations.entry(job.to_owned()).or_default();
        *generation += 1;
        Ok(*generation)
    }

    fn publish(&self, entry: &Registered, _replaces: Option<&str>) -> Result<(), StoreError> {
        self.faults.pass(Step::BeforePublish);
        let (refuse, lose) = {
            let faults = self.faults.faults();
            (faults.refuse_publish, faults.lose_answer)
        };
        if let Some(refuse) = refuse {
            return Err(refuse());
        }
        self.state().entries.push(entry.clone());
        if lose {
            return Err(unavailable());
        }
        self.faults.pass(Step::AfterPublish);
        Ok(())
    }

    fn withdraw(&self, checkpoint: &Checkpoint) -> Result<(), StoreError> {
        self.speak()?;
        self.state()
            .entries
            .retain(|entry| entry.checkpoint.id != checkpoint.id);
        Ok(())
    }

    fn find(&self, job: &str, generation: u64) -> Result<Option<Registered>, StoreError> {
        self.speak()?;
        let state = self.state();
        let of_job = state.entries.iter().filter(|entry| {
            let checkpoint = &entry.checkpoint;
            checkpoint.job == job
                && checkpoint.generation > 0
                && (generation == 0 || checkpoint.generation == generation)
        });
        Ok(of_job
            .max_by_key(|entry| entry.checkpoint.generation)
            .cloned())
    }

    fn list(&self, job: &str) -> Result<Vec<Registered>, StoreError> {
        self.speak()?;
        let mut entries = self.entries();
        entries.retain(|entry| job.is_empty() || entry.checkpoint.job == job);
        Ok(entries)
    }

    fn set_holder(&self, _: &Checkpoint, _: &str, _: bool) -> Result<(), StoreError> {
        self.speak()
    }
}

/// Pages of an address space by index.
pub(crate) type Pages = BTreeMap<u64, [u8; PAGE_SIZE]>;

/// A page that nobody else has.
pub(crate) fn page(salt: u64) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    if salt > 0 {
        for (word, at) in page.as_chunks_mut::<8>().0.iter_mut().zip(1_u64..) {
            *word = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ at).to_le_bytes();
        }
    }
    page
}

pub(crate) fn request(job: &str, seal_follows: bool) -> SessionRequest {
    SessionRequest {
        job: job.to_owned(),
        pre_dump: false,
        seal_follows,
        origin: None,
        no_parent: false,
        parent_images: true,
        durability: None,
    }
}

/// Sends a process's pages, each on its own, as CRIU would.
pub(crate) fn send(sink: &mut SessionSink, space: SpaceId, pages: &Pages) -> Result<(), SinkError> {
    sink.open(space)?;
    for (index, page) in pages {
        sink.pages(index * PAGE_SIZE as u64, PE_PRESENT, page)?;
    }
    Ok(())
}

/// A whole dump of one process.
pub(crate) fn dump(store: &Arc<Store>, job: &str, pages: &Pages) -> Result<Checkpoint, String> {
    let session = store
        .open_session(request(job, true))
        .map_err(|error| error.to_string())?;
    let mut sink = session.start(store, Box::new(|| {})).unwrap();
    let sent = send(&mut sink, SpaceId::process(7), pages);
    sent.and_then(|()| sink.close())
        .map_err(|error| error.to_string())?;
    store
        .seal_session(&session.id, images(&[7]))
        .map_err(|error| error.to_string())
}

thread_local! {
    /// Images directories of a test: there as long as its thread.
    static IMAGES: RefCell<Vec<tempfile::TempDir>> = const { RefCell::new(Vec::new()) };
}

/// An images directory for these processes.
pub(crate) fn images(pids: &[u32]) -> OwnedFd {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    write("inventory.img", b"inventory");
    write("empty.img", b"");
    write("big.img", &[9; 300_001]);
    for pid in pids {
        write(&format!("core-{pid}.img"), &pid.to_le_bytes());
        write(&format!("mm-{pid}.img"), &[1; 5000]);
    }
    let fd = OwnedFd::from(File::open(dir.path()).unwrap());
    IMAGES.with_borrow_mut(|kept| kept.push(dir));
    fd
}

/// Index, flags, bytes.
type OnePage = (u64, u16, Vec<u8>);

/// All that a node has of a checkpoint: pages with index and flags by space, images by name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Whole {
    spaces: Vec<(i32, u64, u32, Vec<OnePage>)>,
    images: BTreeMap<String, Vec<u8>>,
    digest: ContentDigest,
}

impl Whole {
    pub(crate) fn of(store: &Store, id: &str) -> Self {
        let fetch = store.open_fetch(id, "").unwrap();
        let mut spaces = Vec::new();
        for (place, space) in fetch.manifest().spaces.iter().enumerate() {
            let mut pages = Vec::new();
            for run in fetch.runs(place, 0, 0) {
                match run.unwrap() {
                    Fetched::Pages {
                        first_index,
                        flags,
                        bytes,
                    } => {
                        for (page, index) in bytes.chunks(PAGE_SIZE).zip(first_index..) {
                            pages.push((index, flags, page.to_vec()));
                        }
                    }
                    Fetched::Zero {
                        first_index,
                        flags,
                        pages: count,
                    } => {
                        for index in first_index..first_index + count {
                            pages.push((index, flags, vec![0; PAGE_SIZE]));
                        }
                    }
                    Fetched::Parent { .. } => panic!("there is no parent"),
                }
            }
            spaces.push((space.space_type, space.id, space.pages_id, pages));
        }
        let mut images = BTreeMap::new();
        for image in &fetch.manifest().images {
            let mut bytes = Vec::new();
            let all = fetch.image(&image.name, |piece| {
                bytes.extend_from_slice(piece);
                Ok(())
            });
            all.unwrap();
            images.insert(image.name.clone(), bytes);
        }
        Self {
            spaces,
            images,
            digest: fetch.content_digest(),
        }
    }

    /// The pages of the first space.
    pub(crate) fn pages(&self) -> Pages {
        let pages = self.spaces[0].3.iter();
        pages
            .map(|(index, _, page)| (*index, page.as_slice().try_into().unwrap()))
            .collect()
    }
}
