//! Slots on a cold medium, whose pages are in an object store.

#![allow(missing_docs, clippy::cast_possible_truncation)]

mod faults;
mod keys;
mod moving;
mod opening;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

use permafrost_cold::{
    ColdError, ColdMedium, DirectoryObjects, ListedObject, MemoryObjects, ObjectError, Objects,
};
use permafrost_pmem::layout::Superblock;
use permafrost_pmem::sim::mix;
use permafrost_pmem::{
    CheckpointId, FormatOptions, FoundMember, MapRoot, MediaError, Medium, MediumError,
    OpenOptions, PAGE_SIZE, PageError, RecoverOptions, Region, RegionMember, ShadowError,
    StoredCheckpoint, open_medium, open_sparse_medium,
};
use zerocopy::FromBytes as _;

const SEGMENT: u64 = 64 << 10;
const PAGES: u64 = SEGMENT / PAGE_SIZE as u64;

/// Behaviour of a store that is not as it should be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Fault {
    #[default]
    None,
    /// Objects have other bytes.
    Garbage,
    /// Objects end early.
    Short,
    /// Each object is answered with another one.
    Other,
    /// Objects are missing, and the marker is there.
    Missing,
    /// Everything is missing, as where nothing is mounted.
    Empty,
    /// The store answers that it fails.
    Failing,
}

/// A store in memory with faults, whose requests wait while its gate is closed.
#[derive(Default)]
struct Store {
    objects: MemoryObjects,
    fault: Mutex<Fault>,
    gate: Mutex<bool>,
    opened: Condvar,
    waiting: AtomicUsize,
    gets: AtomicUsize,
    lists: AtomicUsize,
}

impl Store {
    fn set_fault(&self, fault: Fault) {
        *self.fault.lock().unwrap() = fault;
    }

    fn close_gate(&self) {
        *self.gate.lock().unwrap() = true;
    }

    fn open_gate(&self) {
        *self.gate.lock().unwrap() = false;
        self.opened.notify_all();
    }

    /// Waits until a request hangs.
    fn wait_for_request(&self) {
        while self.waiting.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
    }

    fn pass(&self) -> Result<(), ObjectError> {
        let mut closed = self.gate.lock().unwrap();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        while *closed {
            closed = self.opened.wait(closed).unwrap();
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        match *self.fault.lock().unwrap() {
            Fault::Failing => Err(ObjectError::Store("status 500".into())),
            _ => Ok(()),
        }
    }
}

impl Objects for Store {
    fn address(&self) -> &str {
        "memory"
    }

    fn put(&self, name: &str, bytes: Vec<u8>) -> Result<(), ObjectError> {
        self.pass()?;
        self.objects.put(name, bytes)
    }

    fn get(&self, name: &str) -> Result<Vec<u8>, ObjectError> {
        self.gets.fetch_add(1, Ordering::SeqCst);
        self.pass()?;
        let fault = *self.fault.lock().unwrap();
        if fault == Fault::Empty {
            return Err(ObjectError::Missing);
        }
        let mut bytes = self.objects.get(name)?;
        if !name.contains('/') {
            return Ok(bytes);
        }
        match fault {
            Fault::Garbage => bytes.iter_mut().for_each(|byte| *byte ^= 0x5a),
            Fault::Short => bytes.truncate(bytes.len() / 2),
            Fault::Missing => return Err(ObjectError::Missing),
            Fault::Other => {
                let all = self.objects.all();
                let other = all.into_iter().find(|(other, _)| other != name);
                bytes = other.unwrap().1;
            }
            Fault::None | Fault::Empty | Fault::Failing => {}
        }
        Ok(bytes)
    }

    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        self.pass()?;
        self.objects.delete(name)
    }

    fn list(&self, directory: &str) -> Result<Vec<ListedObject>, ObjectError> {
        self.lists.fetch_add(1, Ordering::SeqCst);
        self.pass()?;
        self.objects.list(directory)
    }
}

impl std::ops::Deref for Store {
    type Target = MemoryObjects;

    fn deref(&self) -> &MemoryObjects {
        &self.objects
    }
}

/// A region with a cold medium beside its first, and its object store.
struct Site {
    dir: tempfile::TempDir,
    objects: Arc<Store>,
    /// A directory instead of that store.
    directory: Option<PathBuf>,
}

impl Site {
    fn new() -> (Self, Arc<Region>) {
        let (site, region) = Self::alone(None);
        site.add(&region).unwrap();
        (site, region)
    }

    /// Makes a region whose cold medium is not yet added.
    fn alone(directory: Option<&Path>) -> (Self, Arc<Region>) {
        let site = Self {
            dir: tempfile::tempdir_in("/dev/shm").unwrap(),
            objects: Arc::default(),
            directory: directory.map(Path::to_owned),
        };
        let medium = site.file();
        let format = FormatOptions {
            segment_bytes: SEGMENT as u32,
            journal_records: Some(64),
            uuid: None,
        };
        Region::format(Arc::clone(&medium), &format).unwrap();
        let region = Region::open(medium).unwrap().0;
        (site, region)
    }

    fn add(&self, region: &Arc<Region>) -> Result<usize, MediaError> {
        let path = self.dir.path().join("cold");
        let tier = "cold".parse().unwrap();
        region.add_medium(self.cold(&path), &path, &tier)
    }

    fn index(&self) -> PathBuf {
        self.dir.path().join("index")
    }

    fn file(&self) -> Arc<dyn Medium> {
        let path = self.dir.path().join("first");
        loop {
            match open_medium(&path, 30 * SEGMENT, &OpenOptions::default()) {
                // The one before is being dropped.
                Err(MediumError::InUse { .. }) => std::thread::yield_now(),
                opened => return opened.unwrap(),
            }
        }
    }

    fn cold(&self, path: &Path) -> Arc<dyn Medium> {
        let file = open_sparse_medium(path, 40 * SEGMENT, &OpenOptions::default()).unwrap();
        let objects = match &self.directory {
            Some(path) => Arc::new(DirectoryObjects::new(path)) as Arc<dyn Objects>,
            None => Arc::clone(&self.objects) as Arc<dyn Objects>,
        };
        let index = self.index();
        let named = ([7; 16], SEGMENT);
        ColdMedium::create_index(&index).unwrap();
        Arc::new(ColdMedium::open(file, Some(path), &index, named, objects).unwrap())
    }

    fn open(&self) -> Arc<Region> {
        let mut find = |member: &RegionMember| {
            Ok(FoundMember {
                medium: self.cold(&member.path),
                path: member.path.clone(),
            })
        };
        let (region, report) =
            Region::open_all(self.file(), RecoverOptions::default(), &mut find).unwrap();
        assert_eq!(report.damaged, 0);
        region
    }
}

fn page(salt: u64) -> Vec<u8> {
    (0..PAGE_SIZE as u64 / 8)
        .flat_map(|i| mix(salt ^ i << 48).to_le_bytes())
        .collect()
}

/// Seals a checkpoint of `pages` pages; every `step`th is its own, the others are the parent's.
fn seal(
    region: &Arc<Region>,
    id: u128,
    pages: u64,
    parent: Option<(&Arc<StoredCheckpoint>, u64)>,
) -> Result<Arc<StoredCheckpoint>, ShadowError> {
    let mut shadow = region.begin();
    let mut map = shadow.map();
    let mut cursor = parent.map(|(parent, step)| (parent.map(&root(parent)).cursor(), step));
    for index in 0..pages {
        match &mut cursor {
            Some((cursor, step)) if !index.is_multiple_of(*step) => {
                shadow.reference(&mut map, index, 1, cursor)?;
            }
            _ => shadow.append(&mut map, index, 0, &page(id as u64 + index), None)?,
        }
    }
    let root = shadow.finish(map)?.0;
    Ok(shadow
        .seal(CheckpointId::new(id), &root.to_bytes(), None)
        .unwrap())
}

fn root(checkpoint: &Arc<StoredCheckpoint>) -> MapRoot {
    MapRoot::try_from(&*checkpoint.manifest().unwrap()).unwrap()
}

fn checkpoint(region: &Region, id: u128) -> Arc<StoredCheckpoint> {
    region.checkpoint(CheckpointId::new(id)).unwrap()
}

/// Reads all pages of a checkpoint and compares them with what `seal` wrote.
fn read(region: &Region, id: u128, pages: u64, parent: u128, step: u64) -> Result<(), PageError> {
    let checkpoint = checkpoint(region, id);
    let map = checkpoint.map(&root(&checkpoint));
    let mut next = 0;
    for run in map.runs() {
        let run = run?;
        for (content, index) in map.read(&run)?.chunks(PAGE_SIZE).zip(run.first_index..) {
            let from = if index.is_multiple_of(step) {
                id
            } else {
                parent
            };
            assert!(content == page(from as u64 + index), "page {index} of {id}");
            next = index + 1;
        }
    }
    assert_eq!(next, pages);
    Ok(())
}

/// Moves all slots that can be moved to the cold medium; returns their number.
fn cool(region: &Arc<Region>) -> Result<u64, MediaError> {
    let slots = region.occupied_slots();
    region.retire_tails(&slots.iter().collect::<Vec<_>>());
    let survey = region.survey(&|checkpoint| Some(vec![root(checkpoint)]));
    let mut moved = 0;
    for slot in region.occupied_slots() {
        if slot.medium() == 0 {
            moved += region.cool_slot(&survey, &slot, 1, &|| true)? / SEGMENT;
        }
    }
    Ok(moved)
}

fn recall(region: &Region, id: u128) -> Result<(), MediaError> {
    for slot in region.slots_out(&checkpoint(region, id)) {
        assert_eq!(region.move_slot(&slot, 0)?, SEGMENT);
    }
    Ok(())
}

fn used(region: &Region, number: usize) -> u64 {
    region.media()[number].used_bytes / SEGMENT
}

const FIRST: u64 = 10 * (PAGES - 1);

/// Runs `asking`, which asks the store, and `other` while that request hangs. Returns the result of the first.
fn while_it_hangs<T: Send>(
    site: &Site,
    asking: impl FnOnce() -> T + Send,
    other: impl FnOnce() + Send,
) -> T {
    site.objects.close_gate();
    std::thread::scope(|scope| {
        let asked = scope.spawn(asking);
        site.objects.wait_for_request();
        let (done, waited) = mpsc::channel();
        scope.spawn(move || {
            other();
            let _ = done.send(());
        });
        // Forever, where a lock is held: long enough for anything else.
        let ended = waited.recv_timeout(Duration::from_secs(60));
        site.objects.open_gate();
        ended.expect("waits for the store");
        asked.join().unwrap()
    })
}

/// Returns the error of the cold tier in a page's.
fn cold_error(error: &PageError) -> &ColdError {
    error
        .io()
        .and_then(ColdError::of)
        .unwrap_or_else(|| panic!("{error}"))
}

/// Returns the number of the segment at an offset of the first medium, where none was moved yet.
fn segment_of(site: &Site, at: u64) -> u32 {
    let bytes = std::fs::read(site.dir.path().join("first")).unwrap();
    let (first, _) = Superblock::read_from_prefix(&bytes).unwrap();
    ((at - first.segments_at.get()) / SEGMENT) as u32
}
