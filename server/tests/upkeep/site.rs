//! A store over a file, so that bytes can be flipped beneath it, and a registry that lists another node's copies.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use permafrost_catalog::SledCatalog;
use permafrost_cluster::scrub::{Mend, ScrubOptions, ScrubQueue, Scrubber};
use permafrost_clustered::{
    ClusterServices, ClusteredStore, Durability, JobLock, Registered, Registry,
};
use permafrost_criu::frontend::PageSink;
use permafrost_pmem::{FormatOptions, Medium, OpenOptions, PAGE_SIZE, Region, open_medium};
use permafrost_protocol::control::Checkpoint;
use permafrost_protocol::pageserver::{PE_PRESENT, SpaceId};
use permafrost_store::{
    RegionLocation, SessionRequest, SessionSink, Store, StoreError, StoreParts,
};

pub(crate) const PID: u32 = 7;
pub(crate) const BASE: u64 = 0x7f00_0000_0000;

/// Time limit for actions that take moments on an idle machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

pub(crate) struct Site {
    pub(crate) store: Arc<ClusteredStore>,
    queue: Arc<ScrubQueue>,
    scrubber: Mutex<Option<Arc<Scrubber>>>,
    pub(crate) dir: tempfile::TempDir,
    /// Registry that only [`Site::clustered`] joins.
    registry: Arc<Twofold>,
}

impl Site {
    pub(crate) fn new() -> Self {
        Self::of(16 << 20)
    }

    /// Makes a site with a region of this size.
    pub(crate) fn of(region_bytes: u64) -> Self {
        Self::with(region_bytes, |_| {})
    }

    /// Makes a site with a region of this size, whose store has parts that `change` sets.
    pub(crate) fn with(region_bytes: u64, change: impl FnOnce(&mut StoreParts)) -> Self {
        Self::made(region_bytes, change, Arc::default(), None)
    }

    fn made(
        region_bytes: u64,
        change: impl FnOnce(&mut StoreParts),
        registry: Arc<Twofold>,
        services: Option<ClusterServices>,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = OpenOptions {
            require_dax: false,
            populate: false,
        };
        let medium = open_medium(&dir.path().join("region"), region_bytes, &options).unwrap();
        format(&medium);
        Self::of_parts(dir, medium, change, registry, services)
    }

    /// Makes a site over a medium that is to be formatted.
    pub(crate) fn over(dir: tempfile::TempDir, medium: Arc<dyn Medium>) -> Self {
        format(&medium);
        Self::on(dir, medium)
    }

    /// Makes a site over a medium with a region.
    pub(crate) fn on(dir: tempfile::TempDir, medium: Arc<dyn Medium>) -> Self {
        Self::of_parts(dir, medium, |_| {}, Arc::default(), None)
    }

    fn of_parts(
        dir: tempfile::TempDir,
        medium: Arc<dyn Medium>,
        change: impl FnOnce(&mut StoreParts),
        registry: Arc<Twofold>,
        services: Option<ClusterServices>,
    ) -> Self {
        let guarantee = medium.guarantee().clone();
        let region = Region::open(medium).unwrap().0;
        let (catalog, _) = SledCatalog::open_or_replace(&dir.path().join("catalog")).unwrap();
        let place = RegionLocation {
            path: dir.path().join("region"),
            guarantee,
        };
        let mut parts = StoreParts::new(region, place, Box::new(catalog));
        change(&mut parts);
        let queue = Arc::<ScrubQueue>::default();
        let suspects = Arc::<ScrubQueue>::clone(&queue);
        Self {
            store: ClusteredStore::new(Store::new(parts).unwrap(), services, suspects),
            queue,
            scrubber: Mutex::default(),
            dir,
            registry,
        }
    }

    /// Makes a site of node `self` in a cluster where `other` has a copy of every checkpoint.
    pub(crate) fn clustered() -> Self {
        Self::clustered_with(None)
    }

    /// Makes the site of [`Self::clustered`]. `unlocking` is called when a job's lock is released.
    pub(crate) fn clustered_with(unlocking: Option<Unlocking>) -> Self {
        let registry = Arc::new(Twofold(Mutex::default(), unlocking));
        let services = ClusterServices {
            node: "self".to_owned(),
            registry: Arc::<Twofold>::clone(&registry),
            replicate: None,
            remote: None,
            durability: Durability::Local,
            deadline: LIMIT,
            wanted_copies: 2,
        };
        Self::made(16 << 20, |_| {}, registry, Some(services))
    }

    /// Makes the scrub of this site, which [`Self::scrub`] returns from now on.
    pub(crate) fn scrubber(&self, options: ScrubOptions) -> Arc<Scrubber> {
        self.scrubber_with(options, None)
    }

    /// Makes the scrub of [`Self::scrubber`], which heals with `mend`.
    pub(crate) fn scrubber_with(
        &self,
        options: ScrubOptions,
        mend: Option<Arc<dyn Mend>>,
    ) -> Arc<Scrubber> {
        let scrubber = Scrubber::new(&self.store, Arc::clone(&self.queue), mend, options);
        *self.scrubber.lock() = Some(Arc::clone(&scrubber));
        scrubber
    }

    pub(crate) fn scrub(&self) -> Arc<Scrubber> {
        self.scrubber.lock().clone().unwrap()
    }

    pub(crate) fn region(&self) -> PathBuf {
        self.dir.path().join("region")
    }

    pub(crate) fn memory(&self) -> PathBuf {
        self.dir.path().join("scrub.json")
    }

    /// Flips a bit in the middle of `bytes`, at every position where they are stored; there must be one.
    pub(crate) fn flip(&self, bytes: &[u8]) {
        let region = std::fs::read(self.region()).unwrap();
        let places = region
            .windows(bytes.len())
            .enumerate()
            .filter(|(_, window)| *window == bytes)
            .map(|(at, _)| at + bytes.len() / 2);
        let places: Vec<_> = places.collect();
        assert!(!places.is_empty(), "it is in the region");
        let file = File::options().write(true).open(self.region()).unwrap();
        for at in places {
            file.write_all_at(&[region[at] ^ 1], at as u64).unwrap();
        }
    }

    /// Returns the position of the first of the two copies of a checkpoint's root page.
    pub(crate) fn root(&self, id: &str) -> u64 {
        let region = std::fs::read(self.region()).unwrap();
        let id = u128::from_str_radix(id, 16).unwrap().to_le_bytes();
        let pages: Vec<_> = region.chunks_exact(PAGE_SIZE).collect();
        let has_id = |page: &[u8]| page.windows(16).any(|window| window == id);
        let mut pairs = pages.windows(2).enumerate();
        let found = pairs.find(|(_, pair)| pair[0] == pair[1] && has_id(pair[0]));
        (found.expect("the root").0 * PAGE_SIZE) as u64
    }

    pub(crate) fn flip_at(&self, at: u64) {
        let path = self.region();
        let file = File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }

    /// Flips a bit of a page that is stored once, or flips it back.
    pub(crate) fn flip_page(&self, salt: u64) {
        flip_page(&self.region(), salt);
    }

    /// Begins a dump and sends pages.
    pub(crate) fn begin(&self, job: &str, salts: std::ops::Range<u64>) -> (String, SessionSink) {
        self.begin_as(job, true, salts)
    }

    /// Begins a dump as a bare `criu --page-server` does: without a job and without a seal that follows.
    pub(crate) fn begin_bare(&self, salts: std::ops::Range<u64>) -> (String, SessionSink) {
        self.begin_as("", false, salts)
    }

    fn begin_as(
        &self,
        job: &str,
        seal_follows: bool,
        salts: std::ops::Range<u64>,
    ) -> (String, SessionSink) {
        let request = SessionRequest {
            job: job.to_owned(),
            pre_dump: false,
            pre_copy: false,
            seal_follows,
            origin: None,
            no_parent: false,
            parent_images: false,
            from_here: true,
            taken_by: "node".to_owned(),
        };
        let session = self.store.open_session(request).unwrap();
        let mut sink = session.start(self.store.local(), Box::new(|| {})).unwrap();
        sink.open(space()).unwrap();
        for salt in salts {
            sink.pages(address(salt), PE_PRESENT, &page(salt)).unwrap();
        }
        (session.id.clone(), sink)
    }

    /// Makes a complete dump of the pages with these salts, each at an address of its own.
    pub(crate) fn dump(&self, job: &str, salts: std::ops::Range<u64>) -> Checkpoint {
        let (session, mut sink) = self.begin(job, salts);
        sink.close().unwrap();
        self.store.seal_session(&session, images()).unwrap()
    }

    /// Returns the nodes whose copies the registry lists as damaged.
    pub(crate) fn marked(&self, job: &str, generation: u64) -> Vec<String> {
        let found = self.registry.find(job, generation).unwrap();
        found.unwrap().damaged
    }

    pub(crate) fn listed(&self, reference: &str) -> Checkpoint {
        let (job, generation) = reference.split_once('@').unwrap();
        let generation: u64 = generation.parse().unwrap();
        let listed = self.store.list(Some(&job.parse().unwrap())).unwrap();
        let mut listed = listed.into_iter();
        listed
            .find(|record| record.generation == generation)
            .unwrap()
    }
}

fn format(medium: &Arc<dyn Medium>) {
    let format = FormatOptions {
        segment_bytes: 64 << 10,
        ..FormatOptions::default()
    };
    Region::format(Arc::clone(medium), &format).unwrap();
}

pub(crate) fn flip_page(region: &std::path::Path, salt: u64) {
    let bytes = std::fs::read(region).unwrap();
    // All but where the bit is flipped.
    let wanted = &page(salt)[..1024];
    let pages = bytes.chunks_exact(PAGE_SIZE);
    let at = pages.enumerate().find(|(_, page)| page.starts_with(wanted));
    let at = at.expect("the page is in the region").0 * PAGE_SIZE + 2000;
    let file = File::options().write(true).open(region).unwrap();
    file.write_all_at(&[bytes[at] ^ 1], at as u64).unwrap();
}

pub(crate) fn space() -> SpaceId {
    SpaceId::process(PID)
}

pub(crate) fn address(salt: u64) -> u64 {
    BASE + salt * PAGE_SIZE as u64
}

/// Returns a page with unique contents.
pub(crate) fn page(salt: u64) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    let mut word = salt.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for bytes in page.chunks_exact_mut(8) {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    page
}

thread_local! {
    /// Images directories of a test, which exist as long as its thread.
    static IMAGES: RefCell<Vec<tempfile::TempDir>> = const { RefCell::new(Vec::new()) };
}

pub(crate) const CORE_IMAGE: &[u8] = b"the core image of a process that was frozen";

pub(crate) fn images() -> OwnedFd {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    write("inventory.img", b"inventory");
    write(&format!("core-{PID}.img"), CORE_IMAGE);
    write(&format!("mm-{PID}.img"), &[1; 5000]);
    let fd = OwnedFd::from(File::open(dir.path()).unwrap());
    IMAGES.with_borrow_mut(|kept| kept.push(dir));
    fd
}

pub(crate) fn wait_until(what: &str, done: impl Fn() -> bool) {
    let until = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < until, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Callback for the release of a job's lock.
pub(crate) type Unlocking = Arc<dyn Fn() + Send + Sync>;

/// Registry that lists published checkpoints as held by two nodes.
#[derive(Default)]
struct Twofold(Mutex<Vec<Registered>>, Option<Unlocking>);

struct Lock(Option<Unlocking>);

impl Drop for Lock {
    fn drop(&mut self) {
        if let Some(unlocking) = &self.0 {
            unlocking();
        }
    }
}

impl Registry for Twofold {
    fn lock_job(&self, _: &str) -> Result<JobLock, StoreError> {
        Ok(Box::new(Lock(self.1.clone())))
    }

    fn reserve_generation(&self, job: &str) -> Result<u64, StoreError> {
        Ok(self.list(job)?.len() as u64 + 1)
    }

    fn publish(&self, entry: &Registered, _: Option<&str>) -> Result<(), StoreError> {
        let mut entry = entry.clone();
        entry.nodes.push("other".to_owned());
        self.0.lock().push(entry);
        Ok(())
    }

    fn withdraw(&self, _: &Checkpoint) -> Result<(), StoreError> {
        Ok(())
    }

    fn is_withdrawn(&self, _: &Checkpoint) -> Result<bool, StoreError> {
        Ok(false)
    }

    fn set_pinned(&self, _: &Checkpoint, _: bool) -> Result<(), StoreError> {
        Ok(())
    }

    fn find(&self, job: &str, generation: u64) -> Result<Option<Registered>, StoreError> {
        let mut entries = self.list(job)?;
        entries.retain(|entry| generation == 0 || entry.checkpoint.generation == generation);
        Ok(entries.pop())
    }

    fn list(&self, job: &str) -> Result<Vec<Registered>, StoreError> {
        let mut entries = self.0.lock().clone();
        entries.retain(|entry| job.is_empty() || entry.checkpoint.job == job);
        Ok(entries)
    }

    fn set_holder(&self, _: &Checkpoint, _: &str, _: bool) -> Result<(), StoreError> {
        Ok(())
    }

    fn set_damaged(&self, of: &Checkpoint, node: &str, damaged: bool) -> Result<(), StoreError> {
        for entry in &mut *self.0.lock() {
            if entry.checkpoint.id == of.id {
                entry.set_damaged(node, damaged);
            }
        }
        Ok(())
    }

    fn set_cold(&self, of: &Checkpoint, node: &str, bytes: u64) -> Result<(), StoreError> {
        for entry in &mut *self.0.lock() {
            if entry.checkpoint.id == of.id {
                entry.set_cold(node, bytes);
            }
        }
        Ok(())
    }
}
