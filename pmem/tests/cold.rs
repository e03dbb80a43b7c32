//! Slots on a cold medium, whose pages are in an object store.

#![allow(missing_docs, clippy::cast_possible_truncation)]

use std::path::Path;
use std::sync::Arc;

use permafrost_cold::{ColdMedium, MemoryObjects, Objects};
use permafrost_pmem::sim::mix;
use permafrost_pmem::{
    CheckpointId, FormatOptions, FoundMember, MapRoot, MediaError, Medium, OpenOptions, PAGE_SIZE,
    PageError, RecoverOptions, Region, RegionMember, ShadowError, StoredCheckpoint, open_medium,
    open_sparse_medium,
};

const SEGMENT: u64 = 64 << 10;
const PAGES: u64 = SEGMENT / PAGE_SIZE as u64;

/// A region with a cold medium beside its first, and its object store.
struct Site {
    dir: tempfile::TempDir,
    objects: Arc<MemoryObjects>,
}

impl Site {
    fn new() -> (Self, Arc<Region>) {
        let site = Self {
            dir: tempfile::tempdir_in("/dev/shm").unwrap(),
            objects: Arc::default(),
        };
        let medium = site.file();
        let format = FormatOptions {
            segment_bytes: SEGMENT as u32,
            journal_records: Some(64),
            uuid: None,
        };
        Region::format(Arc::clone(&medium), &format).unwrap();
        let region = Region::open(medium).unwrap().0;
        let path = site.dir.path().join("cold");
        let tier = "cold".parse().unwrap();
        region.add_medium(site.cold(&path), &path, &tier).unwrap();
        (site, region)
    }

    fn file(&self) -> Arc<dyn Medium> {
        let path = self.dir.path().join("first");
        open_medium(&path, 30 * SEGMENT, &OpenOptions::default()).unwrap()
    }

    fn cold(&self, path: &Path) -> Arc<dyn Medium> {
        let file = open_sparse_medium(path, 40 * SEGMENT, &OpenOptions::default()).unwrap();
        let objects = Arc::clone(&self.objects) as Arc<dyn Objects>;
        let index = self.dir.path().join("index");
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
    let survey = region.survey(&|checkpoint| Some(vec![root(checkpoint)]));
    let mut moved = 0;
    for slot in region.occupied_slots() {
        if slot.medium() == 0 {
            moved += region.cool_slot(&survey, &slot, 1)? / SEGMENT;
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
    assert!(read(&region, 1, FIRST, 1, 1).unwrap_err().is_not_recalled());
    let away = recall(&region, 1).unwrap_err();
    let MediaError::Clean(permafrost_pmem::CleanError::Io(away)) = away else {
        panic!("{away}");
    };
    assert!(permafrost_cold::ColdError::of(&away).is_some(), "{away}");
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
    assert_eq!(region.sweep_cold().unwrap(), moved);
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
    let removed = region.sweep_cold().unwrap();
    assert!(removed > 0 && removed < moved);
    drop(region);
    let region = site.open();
    assert_eq!(region.sweep_cold().unwrap(), 0);
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
    assert!(
        read(&region, 5000, FIRST, 1, 2)
            .unwrap_err()
            .is_not_recalled()
    );
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
    region.cool_slot(&survey, &slots[0], 1).unwrap();
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
    assert_eq!(region.sweep_cold().unwrap(), 2);
    recall(&region, 1).unwrap();
    read(&region, 1, FIRST, 1, 1).unwrap();
}
