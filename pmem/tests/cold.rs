//! Slots on a cold medium, whose pages are in an object store.

#![allow(missing_docs, clippy::cast_possible_truncation)]

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
    CheckpointId, CleanError, DataKey, FormatOptions, FoundMember, KeyId, MapRoot, MediaError,
    Medium, MediumError, OccupiedSlot, OpenOptions, PAGE_SIZE, PageError, RecoverOptions, Region,
    RegionMember, SegmentNo, ShadowError, StoredCheckpoint, open_medium, open_sparse_medium,
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

#[test]
fn pages_go_to_the_store_and_come_back_and_all_else_stays_on_the_node() {
    let (site, region) = Site::new();
    let parent = seal(&region, 1, FIRST, None).unwrap();
    seal(&region, 500, 60, Some((&parent, 3))).unwrap();
    drop(parent);
    let before = used(&region, 0);
    let moved = cool(&region).unwrap();

    assert_eq!((moved, used(&region, 1)), (before, before));
    assert_eq!(site.objects.all().len() as u64, moved);
    drop(region);

    // The store is away: the region opens, lists and surveys, and new dumps do not go there.
    site.objects.set_away(true);
    let region = site.open();
    assert_eq!(region.listed().len(), 2);
    let survey = region.survey(&|checkpoint| Some(vec![root(checkpoint)]));
    assert_eq!(survey.unknown_bytes(), 0);
    drop(survey);
    let away = read(&region, 1, FIRST, 1, 1).unwrap_err();
    assert!(
        away.io().and_then(ColdError::of).unwrap().is_away(),
        "{away}"
    );
    let away = recall(&region, 1).unwrap_err();
    let MediaError::Clean(CleanError::Io(away)) = away else {
        panic!("{away}");
    };
    assert!(ColdError::of(&away).unwrap().is_away(), "{away}");
    seal(&region, 1000, 20, None).unwrap();
    let full = seal(&region, 2000, 40 * PAGES, None).unwrap_err();
    assert!(matches!(full, ShadowError::Full { .. }), "{full}");
    assert_eq!(used(&region, 1), moved);
    assert!(cool(&region).is_err());
    read(&region, 1000, 20, 1000, 1).unwrap();

    // It is back.
    site.objects.set_away(false);
    recall(&region, 500).unwrap();
    read(&region, 500, 60, 1, 3).unwrap();
    recall(&region, 1).unwrap();
    read(&region, 1, FIRST, 1, 1).unwrap();
    assert_eq!(used(&region, 1), 0);
    assert_eq!(region.sweep_cold(true, &|| false).unwrap(), moved);
    assert!(site.objects.all().is_empty());
    drop(region);
    let region = site.open();
    read(&region, 1, FIRST, 1, 1).unwrap();
    read(&region, 500, 60, 1, 3).unwrap();
}

#[test]
fn a_removed_checkpoint_frees_its_objects_and_slots() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    drop(seal(&region, 1000, FIRST, None).unwrap());
    let moved = cool(&region).unwrap();
    region.delete(CheckpointId::new(1)).unwrap();
    let removed = region.sweep_cold(true, &|| false).unwrap();
    assert!(removed > 0 && removed < moved);
    drop(region);
    let region = site.open();
    assert_eq!(region.sweep_cold(true, &|| false).unwrap(), 0);
    recall(&region, 1000).unwrap();
    read(&region, 1000, FIRST, 1000, 1).unwrap();
    // Its slots are used again.
    drop(seal(&region, 2000, FIRST, None).unwrap());
    cool(&region).unwrap();
    recall(&region, 2000).unwrap();
    read(&region, 2000, FIRST, 2000, 1).unwrap();
}

#[test]
fn packed_segments_are_moved_out_too() {
    let (site, region) = Site::new();
    let parent = seal(&region, 1, FIRST, None).unwrap();
    let child = seal(&region, 5000, FIRST, Some((&parent, 2))).unwrap();
    drop((parent, child));
    region.delete(CheckpointId::new(1)).unwrap();
    let mut survey = region.survey(&|checkpoint| Some(vec![root(checkpoint)]));
    assert!(region.clean(&mut survey, u64::MAX).unwrap().slots > 0);
    drop(survey);
    assert!(cool(&region).unwrap() > 0);
    drop(region);
    let region = site.open();
    read(&region, 5000, FIRST, 1, 2).unwrap();
    recall(&region, 5000).unwrap();
    read(&region, 5000, FIRST, 1, 2).unwrap();
}

#[test]
fn garbage_is_damage_and_is_healed_page_by_page() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    assert!(cool(&region).unwrap() > 0);
    site.objects.change_all(|bytes| bytes.truncate(300));
    drop(region);
    let region = site.open();
    assert!(recall(&region, 1).is_err());
    // Nothing was taken for the pages: they are where they were, and can be written from another copy.
    let held = checkpoint(&region, 1);
    let map = held.map(&root(&held));
    for index in 0..FIRST {
        let bytes = page(1 + index);
        let page: &[u8; PAGE_SIZE] = bytes.as_slice().try_into().unwrap();
        map.heal_page(index, page).unwrap();
    }
    read(&region, 1, FIRST, 1, 1).unwrap();
}

#[test]
fn what_a_crash_leaves_in_the_store_is_removed_and_nothing_else() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    let survey = region.survey(&|checkpoint| Some(vec![root(checkpoint)]));
    let slots = region.occupied_slots();
    region.cool_slot(&survey, &slots[0], 1, &|| true).unwrap();
    drop(survey);
    drop(region);
    // Cut after the object and the index entry of a slot that the segment table does not name.
    let cold = site.cold(&site.dir.path().join("cold"));
    let out: Vec<u32> = (1..PAGES as u32).collect();
    let store = cold.cold().unwrap();
    store.move_out(9 * SEGMENT, SEGMENT, &[0], &out).unwrap();
    drop(cold);
    // And after the object.
    let name = site.objects.all().into_keys().next().unwrap();
    let directory = name.split_once('/').unwrap().0;
    site.objects
        .put(&format!("{directory}/3-0000000000000001"), vec![0; 10])
        .unwrap();
    let region = site.open();
    assert_eq!(region.sweep_cold(true, &|| false).unwrap(), 2);
    recall(&region, 1).unwrap();
    read(&region, 1, FIRST, 1, 1).unwrap();
}

/// Returns the error of the cold tier in a page's.
fn cold_error(error: &PageError) -> &ColdError {
    error
        .io()
        .and_then(ColdError::of)
        .unwrap_or_else(|| panic!("{error}"))
}

#[test]
fn a_store_that_answers_garbage_costs_nothing_but_time() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    assert!(cool(&region).unwrap() > 1);
    drop(region);
    for (fault, is_away) in [
        (Fault::Garbage, false),
        (Fault::Short, false),
        (Fault::Other, false),
        (Fault::Missing, false),
        (Fault::Empty, true),
        (Fault::Failing, true),
    ] {
        site.objects.set_fault(fault);
        let region = site.open();
        let error = read(&region, 1, FIRST, 1, 1).unwrap_err();
        assert_eq!(cold_error(&error).is_away(), is_away, "{fault:?}: {error}");
        let text = error.to_string() + &cold_error(&error).to_string();
        assert!(text.contains("memory"), "names the store: {text}");
        assert!(recall(&region, 1).is_err(), "{fault:?}");
        assert_eq!(used(&region, 0), 0, "{fault:?}");
        let (absent, away) = region.absent_segments();
        // A list says nothing about bytes.
        assert_eq!(
            (absent.len(), away.len()),
            (0, usize::from(is_away)),
            "{fault:?}"
        );
        if is_away {
            assert!(region.sweep_cold(true, &|| false).is_err(), "{fault:?}");
        } else {
            assert_eq!(region.sweep_cold(true, &|| false).unwrap(), 0, "{fault:?}");
        }
        drop(region);
        site.objects.set_fault(Fault::None);
        read(&site.open(), 1, FIRST, 1, 1).unwrap();
    }
    let region = site.open();
    recall(&region, 1).unwrap();
    read(&region, 1, FIRST, 1, 1).unwrap();
}

#[test]
fn missing_and_short_objects_are_found_by_one_list() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    cool(&region).unwrap();
    let mut names = site.objects.all().into_keys();
    site.objects.delete(&names.next().unwrap()).unwrap();
    assert_eq!(region.absent_segments().0.len(), 1);
    let short = names.next().unwrap();
    site.objects.delete(&short).unwrap();
    site.objects.put(&short, vec![0; 10]).unwrap();
    let (absent, away) = region.absent_segments();
    assert_eq!((absent.len(), away.len()), (2, 0));
    assert!(
        checkpoint(&region, 1)
            .segment_numbers()
            .filter(|s| absent.contains(s))
            .count()
            == 2
    );
}

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

#[test]
fn while_the_store_hangs_nobody_else_waits() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    let others = |id: u128| {
        // All that takes the lock of moves, or that of the list of media.
        drop(seal(&region, id, 20, None).unwrap());
        read(&region, id, 20, id, 1).unwrap();
        region.set_draining(1, true).unwrap();
        region.set_draining(1, false).unwrap();
        assert_eq!(region.media().len(), 2);
        let held = checkpoint(&region, id);
        let bytes = page(id as u64);
        let page: &[u8; PAGE_SIZE] = bytes.as_slice().try_into().unwrap();
        assert!(!held.map(&root(&held)).heal_page(0, page).unwrap());
    };
    let survey = region.survey(&|checkpoint| Some(vec![root(checkpoint)]));
    let slots = region.occupied_slots();
    let moved = while_it_hangs(
        &site,
        || region.cool_slot(&survey, &slots[0], 1, &|| true),
        || others(100),
    );
    assert_eq!(moved.unwrap(), SEGMENT);
    let moved = while_it_hangs(
        &site,
        || region.cool_slot(&survey, &slots[1], 1, &|| true),
        || region.set_draining(1, true).unwrap(),
    );
    assert_eq!(moved.unwrap(), 0, "the medium is drained by now");
    region.set_draining(1, false).unwrap();
    drop(survey);
    let swept = while_it_hangs(&site, || region.sweep_cold(true, &|| false), || others(200));
    assert_eq!(
        swept.unwrap(),
        1,
        "the object of the slot that was not moved"
    );
    let out = region.slots_out(&checkpoint(&region, 1));
    let recalled = while_it_hangs(&site, || region.move_slot(&out[0], 0), || others(300));
    assert_eq!(recalled.unwrap(), SEGMENT);
    let listed = while_it_hangs(&site, || region.absent_segments(), || others(400));
    assert!(listed.0.is_empty());
    read(&region, 1, FIRST, 1, 1).unwrap();
}

#[test]
fn a_slot_with_a_reader_that_begins_while_it_is_moved_out_stays() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    let survey = region.survey(&|checkpoint| Some(vec![root(checkpoint)]));
    let slots = region.occupied_slots();
    let (is_read, asked) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let may_cool = || {
        asked.fetch_add(1, Ordering::SeqCst);
        is_read.load(Ordering::SeqCst) == 0
    };
    let begin = || is_read.store(1, Ordering::SeqCst);
    let cool = || region.cool_slot(&survey, &slots[0], 1, &may_cool);
    assert_eq!(while_it_hangs(&site, cool, begin).unwrap(), 0);
    assert!(asked.load(Ordering::SeqCst) > 1);
    assert!(region.slots_out(&checkpoint(&region, 1)).is_empty());
    // With the reader still there, the store is not even asked.
    let before = site.objects.all().len();
    assert_eq!(
        region.cool_slot(&survey, &slots[0], 1, &may_cool).unwrap(),
        0
    );
    assert_eq!(site.objects.all().len(), before);
    is_read.store(0, Ordering::SeqCst);
    let moved = region.cool_slot(&survey, &slots[0], 1, &may_cool);
    assert_eq!(moved.unwrap(), SEGMENT);
    read(&region, 1, FIRST, 1, 1).unwrap();
}

#[test]
fn objects_of_removed_checkpoints_are_removed_without_a_list() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    drop(seal(&region, 1000, 20, None).unwrap());
    let region = &region;
    cool(region).unwrap();
    // The second checkpoint has its own objects, and shares one.
    let stray = "07070707070707070707070707070707/9-0000000000000001";
    site.objects.put(stray, vec![1]).unwrap();
    region.delete(CheckpointId::new(1)).unwrap();
    let lists = || site.objects.lists.load(Ordering::SeqCst);
    let (before, objects) = (lists(), site.objects.all().len());
    site.objects.set_away(true);
    assert!(region.sweep_cold(false, &|| false).is_err());
    site.objects.set_away(false);
    let removed = region.sweep_cold(false, &|| false).unwrap();
    assert!(removed > 0);
    assert_eq!(site.objects.all().len(), objects - removed as usize);
    assert_eq!(region.sweep_cold(false, &|| false).unwrap(), 0);
    assert_eq!(lists(), before);
    read(region, 1000, 20, 1000, 1).unwrap();
    // What a crash has left is found by a list only.
    assert!(site.objects.all().contains_key(stray));
    assert_eq!(region.sweep_cold(true, &|| false).unwrap(), 1);
    assert_eq!(lists(), before + 1);
}

#[test]
fn what_is_healed_while_a_slot_is_moved_out_stays_healed() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    let held = checkpoint(&region, 1);
    let map = held.map(&root(&held));
    let run = map.lookup(3).unwrap().unwrap();
    let (_, at) = map.splice_source(&run).unwrap().unwrap();
    let at = at + (3 - run.first_index) * PAGE_SIZE as u64;
    let file = std::fs::File::options()
        .write(true)
        .open(site.dir.path().join("first"));
    std::os::unix::fs::FileExt::write_all_at(&file.unwrap(), &[0xee; 64], at).unwrap();
    let survey = region.survey(&|checkpoint| Some(vec![root(checkpoint)]));
    let own = |slot: &OccupiedSlot| slot.segments().contains(&SegmentNo(segment_of(&site, at)));
    let slot = region.occupied_slots().into_iter().find(own).unwrap();
    let bytes = page(4);
    let heal = || {
        let page: &[u8; PAGE_SIZE] = bytes.as_slice().try_into().unwrap();
        assert!(map.heal_page(3, page).unwrap());
    };
    let moved = while_it_hangs(
        &site,
        || region.cool_slot(&survey, &slot, 1, &|| true),
        heal,
    );
    assert_eq!(moved.unwrap(), 0, "another time");
    read(&region, 1, FIRST, 1, 1).unwrap();
    assert_eq!(
        region.cool_slot(&survey, &slot, 1, &|| true).unwrap(),
        SEGMENT
    );
    read(&region, 1, FIRST, 1, 1).unwrap();
}

/// Returns the number of the segment at an offset of the first medium, where none was moved yet.
fn segment_of(site: &Site, at: u64) -> u32 {
    let bytes = std::fs::read(site.dir.path().join("first")).unwrap();
    let (first, _) = Superblock::read_from_prefix(&bytes).unwrap();
    ((at - first.segments_at.get()) / SEGMENT) as u32
}

#[test]
fn a_drained_cold_medium_is_read_and_what_cannot_be_moved_is_named() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    drop(seal(&region, 1000, 20, None).unwrap());
    let moved = cool(&region).unwrap();
    region.set_draining(1, true).unwrap();
    read(&region, 1, FIRST, 1, 1).unwrap();
    assert!(matches!(cool(&region), Ok(0)), "nothing is moved there");
    // The first one: those behind it are moved all the same.
    let gone = site.objects.all().into_keys().next().unwrap();
    drop(region);
    site.objects.delete(&gone).unwrap();
    let region = site.open();
    let drained = region.drain_step(1, u64::MAX).unwrap();
    assert_eq!(drained.moved_bytes, (moved - 1) * SEGMENT);
    assert_eq!(drained.left_bytes, SEGMENT);
    let [stuck] = &drained.stuck[..] else {
        panic!("{:?}", drained.stuck);
    };
    assert!(stuck.error.to_string().contains(&gone), "{}", stuck.error);
    assert!(!stuck.segments.is_empty());
    // The next step does not ask for it again.
    let asked = site.objects.gets.load(Ordering::SeqCst);
    let next = region.drain_others(1, u64::MAX, &drained.stuck).unwrap();
    assert!(next.stuck.is_empty() && next.left_bytes == SEGMENT);
    assert_eq!(site.objects.gets.load(Ordering::SeqCst), asked);
    assert!(region.remove_medium(1).is_err());
    // Away, it says so instead.
    site.objects.set_away(true);
    let away = region.drain_step(1, u64::MAX);
    // The damage is known.
    assert!(away.is_ok_and(|drained| drained.stuck.len() == 1));
    drop(region);
    assert!(site.open().drain_step(1, u64::MAX).is_err());
    site.objects.set_away(false);
    let region = site.open();
    region.delete(CheckpointId::new(1)).unwrap();
    region.delete(CheckpointId::new(1000)).unwrap();
    assert_eq!(region.drain_step(1, u64::MAX).unwrap().left_bytes, 0);
    region.remove_medium(1).unwrap();
    assert!(
        site.objects.all().is_empty(),
        "a removed tier leaves no objects"
    );
}

/// Returns why the cold medium is not there.
fn problem(site: &Site) -> String {
    let mut find = |member: &RegionMember| {
        Ok(FoundMember {
            medium: site.cold(&member.path),
            path: member.path.clone(),
        })
    };
    let (region, _) = Region::open_all(site.file(), RecoverOptions::default(), &mut find).unwrap();
    let media = region.media();
    assert!(media[1].is_cold);
    media[1].problem.clone().unwrap_or_default()
}

#[test]
fn an_index_of_another_time_or_medium_is_refused_by_name() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    let early = std::fs::read(site.index()).unwrap();
    cool(&region).unwrap();
    let first = std::fs::read(site.dir.path().join("first")).unwrap();
    drop(region);
    // Of this start, it could be what a crash has left; it is not of the next one.
    drop(site.open());
    let newest = std::fs::read(site.index()).unwrap();
    std::fs::write(site.index(), &early).unwrap();
    let text = problem(&site);
    assert!(
        text.contains("older copy of the index") && text.contains("--lost"),
        "{text}"
    );
    std::fs::write(site.index(), &newest).unwrap();
    assert_eq!(problem(&site), "");
    read(&site.open(), 1, FIRST, 1, 1).unwrap();
    // Objects were removed since.
    let region = site.open();
    let before = std::fs::read(site.index()).unwrap();
    region.delete(CheckpointId::new(1)).unwrap();
    assert!(region.sweep_cold(true, &|| false).unwrap() > 0);
    drop(region);
    let after = std::fs::read(site.index()).unwrap();
    std::fs::write(site.index(), &before).unwrap();
    assert!(problem(&site).contains("older copy of the index"));
    std::fs::write(site.index(), &after).unwrap();
    assert_eq!(problem(&site), "");
    let (other, _region) = Site::new();
    std::fs::copy(other.index(), site.index()).unwrap();
    let text = problem(&site);
    assert!(text.contains("is that of medium"), "{text}");
    std::fs::write(site.index(), b"").unwrap();
    assert!(problem(&site).contains("empty"));
    std::fs::write(site.index(), &after).unwrap();
    std::fs::write(site.dir.path().join("first"), &first).unwrap();
    assert!(problem(&site).contains("first file"));
}

#[test]
fn an_index_that_was_copied_while_its_medium_was_away_is_an_older_one() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    cool(&region).unwrap();
    drop(region);
    let mut find = |_: &RegionMember| Err("not mounted".to_owned());
    let (region, _) = Region::open_all(site.file(), RecoverOptions::default(), &mut find).unwrap();
    let copied = std::fs::read(site.index()).unwrap();
    assert_eq!(site.add(&region).unwrap(), 1);
    drop(region);
    let newest = std::fs::read(site.index()).unwrap();
    std::fs::write(site.index(), copied).unwrap();
    let text = problem(&site);
    assert!(text.contains("older copy of the index"), "{text}");
    std::fs::write(site.index(), newest).unwrap();
    assert_eq!(problem(&site), "");
}

#[test]
fn a_cold_medium_that_is_opened_without_its_store_says_so() {
    let (site, region) = Site::new();
    drop(seal(&region, 1, FIRST, None).unwrap());
    cool(&region).unwrap();
    drop(region);
    let mut find = |member: &RegionMember| {
        let file = open_sparse_medium(&member.path, 0, &OpenOptions::default());
        Ok(FoundMember {
            medium: file.unwrap(),
            path: member.path.clone(),
        })
    };
    let (region, _) = Region::open_all(site.file(), RecoverOptions::default(), &mut find).unwrap();
    let medium = &region.media()[1];
    let problem = medium.problem.as_deref().unwrap();
    assert!(
        medium.is_cold && problem.contains("cold.store beside it"),
        "{problem}"
    );
}

#[test]
fn a_directory_that_is_not_mounted_is_away_and_another_regions_is_refused() {
    let mounts = tempfile::tempdir_in("/dev/shm").unwrap();
    let (store, away) = (mounts.path().join("store"), mounts.path().join("away"));
    std::fs::create_dir(&store).unwrap();
    let (site, region) = Site::alone(Some(&store));
    site.add(&region).unwrap();
    drop(seal(&region, 1, FIRST, None).unwrap());
    let survey = region.survey(&|checkpoint| Some(vec![root(checkpoint)]));
    let slots = region.occupied_slots();
    region.cool_slot(&survey, &slots[0], 1, &|| true).unwrap();

    std::fs::rename(&store, &away).unwrap();
    std::fs::create_dir(&store).unwrap();
    let error = read(&region, 1, FIRST, 1, 1).unwrap_err();
    assert!(cold_error(&error).is_away(), "{error}");
    let unmounted = region
        .cool_slot(&survey, &slots[1], 1, &|| true)
        .unwrap_err();
    let MediaError::Clean(CleanError::Io(unmounted)) = unmounted else {
        panic!("{unmounted}");
    };
    assert!(
        unmounted.to_string().contains("not the one that was added"),
        "{unmounted}"
    );
    let (absent, problems) = region.absent_segments();
    assert_eq!((absent.len(), problems.len()), (0, 1));
    assert!(region.sweep_cold(true, &|| false).is_err());
    assert_eq!(
        std::fs::read_dir(&store).unwrap().count(),
        0,
        "nothing is written there"
    );

    std::fs::remove_dir(&store).unwrap();
    std::fs::rename(&away, &store).unwrap();
    read(&region, 1, FIRST, 1, 1).unwrap();
    assert_eq!(
        region.cool_slot(&survey, &slots[1], 1, &|| true).unwrap(),
        SEGMENT
    );
    drop(survey);
    assert!(region.absent_segments().0.is_empty());

    let (other, other_region) = Site::alone(Some(&store));
    let taken = other.add(&other_region).unwrap_err().to_string();
    let names = taken.contains("is the cold tier of") && taken.contains("permafrost-region");
    assert!(names, "{taken}");
    read(&region, 1, FIRST, 1, 1).unwrap();
    region.set_draining(1, true).unwrap();
    assert_eq!(region.drain_step(1, u64::MAX).unwrap().left_bytes, 0);
    region.remove_medium(1).unwrap();
    // Now it is free. Its files are made anew.
    let (other, other_region) = Site::alone(Some(&store));
    other.add(&other_region).unwrap();
}

#[test]
fn a_segment_with_room_for_the_next_checkpoint_cools_too() {
    let (_site, region) = Site::new();
    // Too full to be cleaned, which would take its tail.
    drop(seal(&region, 1, 10, None).unwrap());
    let slots = region.occupied_slots();
    let survey = region.survey(&|checkpoint| Some(vec![root(checkpoint)]));
    let moved = region.cool_slot(&survey, &slots[0], 1, &|| true).unwrap();
    assert_eq!(moved, 0, "the next one may go on there");
    drop(survey);
    assert_eq!(cool(&region).unwrap(), 1);
    drop(seal(&region, 100, 5, None).unwrap());
    read(&region, 1, 10, 1, 1).unwrap();
    read(&region, 100, 5, 100, 1).unwrap();
}

/// Gives the region a key.
fn give(region: &Region, number: u8) -> KeyId {
    let id = KeyId::new(number.into()).unwrap();
    let cipher = DataKey::new([number; 32]).cipher(region.usage().uuid.as_bytes());
    region.keys().insert(id, cipher);
    id
}

/// Seals a checkpoint of `pages` pages under a key.
fn seal_under(region: &Arc<Region>, id: u128, pages: u64, key: Option<KeyId>) {
    let mut shadow = region.begin_encrypted(key).unwrap();
    let mut map = shadow.map();
    for index in 0..pages {
        let page = page(id as u64 + index);
        shadow.append(&mut map, index, 0, &page, None).unwrap();
    }
    let root = shadow.finish(map).unwrap().0;
    let id = CheckpointId::new(id);
    shadow.seal(id, &root.to_bytes(), None).unwrap();
}

/// Returns true if a part of a checkpoint's page is in an object as it is.
fn is_plain(site: &Site, id: u64, index: u64) -> bool {
    let page = page(id + index);
    let objects = site.objects.all();
    let mut objects = objects.values();
    objects.any(|object| object.windows(64).any(|part| part == &page[1024..1088]))
}

/// Moves everything from a key to another one; returns the segments that were moved and left.
fn rotate(region: &Region, from: KeyId, to: KeyId) -> (u64, u64) {
    let roots = |checkpoint: &Arc<StoredCheckpoint>| Some(vec![root(checkpoint)]);
    let survey = region.survey_keys(&roots, &[from]);
    let changed = region.change_keys(&survey, to, u64::MAX).unwrap();
    assert!(changed.done);
    (changed.segments, changed.left_segments)
}

#[test]
fn objects_have_nothing_plain_and_keys_change_under_them() {
    const PAGES: u64 = 40;
    let (site, region) = Site::new();
    let [one, two, three] = [1, 2, 3].map(|number| give(&region, number));
    seal_under(&region, 1, PAGES, Some(one));
    seal_under(&region, 1000, PAGES, Some(two));
    seal_under(&region, 5000, PAGES, None);
    let check = || {
        for id in [1, 1000, 5000] {
            read(&region, id, PAGES, id, 1).unwrap();
        }
    };
    let slots = region.occupied_slots();
    region.retire_tails(&slots.iter().collect::<Vec<_>>());
    assert!(cool(&region).unwrap() > 0);
    check();
    assert!(is_plain(&site, 5000, 3), "this is how it would be found");
    for index in [0, 3, 20] {
        assert!(!is_plain(&site, 1, index) && !is_plain(&site, 1000, index));
    }

    // Away, they keep their key, which is needed.
    site.objects.set_away(true);
    let survey = region.survey_keys(&|checkpoint| Some(vec![root(checkpoint)]), &[one]);
    let changed = region.change_keys(&survey, three, u64::MAX).unwrap();
    assert!(changed.done && changed.segments == 0 && changed.left_segments > 0);
    assert!(!region.take_unused_key(one));
    // The next step does not ask for it again.
    let asked = site.objects.gets.load(Ordering::SeqCst);
    let again = region.change_keys(&survey, three, u64::MAX).unwrap();
    assert_eq!(again.left_segments, changed.left_segments);
    assert_eq!(site.objects.gets.load(Ordering::SeqCst), asked);
    drop(survey);
    site.objects.set_away(false);
    let cold = used(&region, 1);
    let (moved, left) = rotate(&region, one, three);
    assert!(moved > 0 && left == 0, "{moved} {left}");
    // Not written anew on the cold medium, whose file would fill up with them.
    assert!(used(&region, 1) < cold && used(&region, 0) > 0);
    assert!(region.take_unused_key(one));
    check();
    recall(&region, 1000).unwrap();
    check();
    region.sweep_cold(true, &|| false).unwrap();
    assert!(cool(&region).unwrap() > 0);
    check();
    assert!(!is_plain(&site, 1, 3) && !is_plain(&site, 1000, 3));
}

#[test]
fn a_medium_that_is_drained_takes_nothing_when_keys_change() {
    const PAGES: u64 = 40;
    let (site, region) = Site::new();
    let path = site.dir.path().join("slow");
    let medium = open_medium(&path, 20 * SEGMENT, &OpenOptions::default()).unwrap();
    let slow = region
        .add_medium(medium, &path, &"hdd".parse().unwrap())
        .unwrap();
    let [one, two] = [1, 2].map(|number| give(&region, number));
    seal_under(&region, 1, PAGES, Some(one));
    seal_under(&region, 1000, PAGES, Some(one));
    for (slot, to) in region
        .occupied_slots()
        .iter()
        .zip([slow, 1].into_iter().cycle())
    {
        let survey = region.survey(&|checkpoint| Some(vec![root(checkpoint)]));
        region.retire_tails(&[slot]);
        match to {
            1 => region.cool_slot(&survey, slot, 1, &|| true).unwrap(),
            _ => region.move_slot(slot, to).unwrap(),
        };
    }
    assert!(used(&region, slow) > 0 && used(&region, 1) > 0);
    region.set_draining(slow, true).unwrap();
    region.set_draining(1, true).unwrap();
    let (moved, left) = rotate(&region, one, two);
    assert!(moved > 0 && left == 0, "{moved} {left}");
    assert_eq!((used(&region, slow), used(&region, 1)), (0, 0));
    assert!(region.take_unused_key(one));
    for id in [1, 1000] {
        read(&region, id, PAGES, id, 1).unwrap();
    }
    region.remove_medium(slow).unwrap();
    region.remove_medium(1).unwrap();
    // Draining moves what is encrypted as it is.
    let (_other, region) = Site::new();
    let one = give(&region, 1);
    seal_under(&region, 1, PAGES, Some(one));
    let slots = region.occupied_slots();
    region.retire_tails(&slots.iter().collect::<Vec<_>>());
    assert!(cool(&region).unwrap() > 0);
    region.set_draining(1, true).unwrap();
    assert_eq!(region.drain_step(1, u64::MAX).unwrap().left_bytes, 0);
    read(&region, 1, PAGES, 1, 1).unwrap();
}
