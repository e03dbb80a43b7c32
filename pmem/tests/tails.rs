//! Small checkpoints share segments: a dump begins behind the last page of a sealed one.

#![allow(missing_docs, clippy::cast_possible_truncation)]

use std::sync::Arc;

use permafrost_pmem::layout::{ROOT_MAGIC, SEGMENT_MAGIC};
use permafrost_pmem::sim::{SimMedium, mix};
use permafrost_pmem::{
    CheckpointId, FormatOptions, MapRoot, Medium, PAGE_SIZE, Region, Shadow, StoredCheckpoint,
};

const SEGMENT: usize = 64 << 10;
const SLOTS: u64 = 20;

fn format() -> Arc<SimMedium> {
    let medium = Arc::new(SimMedium::new((1 + SLOTS as usize) * SEGMENT));
    let options = FormatOptions {
        segment_bytes: SEGMENT as u32,
        journal_records: Some(64),
        uuid: None,
    };
    Region::format(Arc::clone(&medium) as Arc<dyn Medium>, &options).unwrap();
    medium
}

fn open(medium: &Arc<SimMedium>) -> Arc<Region> {
    let medium = Arc::clone(medium) as Arc<dyn Medium>;
    Region::open(medium).unwrap().0
}

/// Opens an image of the region as it is, as after a crash.
fn crashed(region: &Region) -> (Arc<SimMedium>, Arc<Region>) {
    let mut image = vec![0; region.medium().capacity_bytes() as usize];
    region.medium().read(0, &mut image).unwrap();
    let medium = Arc::new(SimMedium::from_image(&image));
    let region = open(&medium);
    (medium, region)
}

fn page(salt: u64) -> Vec<u8> {
    (0..PAGE_SIZE as u64 / 8)
        .flat_map(|i| mix(salt ^ i << 48).to_le_bytes())
        .collect()
}

/// Writes pages with salts from `id` on.
fn fill(shadow: &mut Shadow, id: u64, pages: u64) -> MapRoot {
    let mut map = shadow.map();
    for index in 0..pages {
        let content = page(id + index);
        shadow.append(&mut map, index, 0, &content, None).unwrap();
    }
    shadow.finish(map).unwrap().0
}

fn seal(region: &Arc<Region>, id: u64, pages: u64) -> Arc<StoredCheckpoint> {
    let mut shadow = region.begin();
    let root = fill(&mut shadow, id, pages);
    let sealed = shadow.seal(CheckpointId::new(id.into()), &root.to_bytes(), None);
    sealed.unwrap()
}

fn check(checkpoint: &Arc<StoredCheckpoint>) {
    let id = checkpoint.id().value() as u64;
    let root = MapRoot::try_from(checkpoint.manifest().unwrap().as_slice()).unwrap();
    let map = checkpoint.map(&root);
    for run in map.runs().map(Result::unwrap) {
        let bytes = map.read(&run).unwrap();
        for (bytes, index) in bytes.chunks(PAGE_SIZE).zip(run.first_index..) {
            assert!(bytes == page(id + index), "page {index} of {id}");
        }
    }
}

fn check_all(region: &Region, count: usize) {
    let found = region.checkpoints();
    assert_eq!(found.len(), count);
    found.iter().for_each(check);
}

fn used(region: &Region) -> u64 {
    SLOTS - region.usage().free_bytes / region.usage().segment_bytes
}

#[test]
fn small_checkpoints_share_segments_also_after_a_crash() {
    let medium = format();
    let mut region = open(&medium);
    for id in 1..=20 {
        seal(&region, 100 * id, 1);
        if id % 4 == 0 {
            region = crashed(&region).1;
        }
    }
    check_all(&region, 20);
    // Three pages each, of fifteen: its own, and the root's two, with the map's nodes.
    assert_eq!(used(&region), 4);
}

#[test]
fn an_aborted_dump_leaves_the_tail_as_it_was() {
    let region = open(&format());
    seal(&region, 100, 1);
    for _ in 0..5 {
        let mut shadow = region.begin();
        fill(&mut shadow, 900, 2);
        shadow.flush().unwrap();
    }
    seal(&region, 200, 1);
    assert_eq!(used(&region), 1);
    check_all(&region, 2);
}

#[test]
fn a_tail_has_one_writer() {
    let region = open(&format());
    seal(&region, 100, 1);
    let (mut a, mut b) = (region.begin(), region.begin());
    let (in_a, in_b) = (fill(&mut a, 200, 2), fill(&mut b, 300, 2));
    let seal = |shadow: Shadow, id, root: MapRoot| {
        shadow.seal(CheckpointId::new(id), &root.to_bytes(), None)
    };
    seal(b, 300, in_b).unwrap();
    seal(a, 200, in_a).unwrap();
    assert_eq!(used(&region), 2);
    check_all(&region, 3);
}

/// The pages of a removed checkpoint, which its child refers to, lie between the last root of a segment and its end.
#[test]
fn a_tail_does_not_begin_before_pages_that_others_refer_to() {
    let medium = format();
    let region = open(&medium);
    seal(&region, 100, 1);
    let parent = seal(&region, 200, 4);
    let root = MapRoot::try_from(parent.manifest().unwrap().as_slice()).unwrap();
    // Its child lies in another segment.
    let mut shadow = region.begin();
    fill(&mut shadow, 900, 16);
    let mut map = shadow.map();
    let mut cursor = parent.map(&root).cursor();
    shadow.reference(&mut map, 0, 4, &mut cursor).unwrap();
    let (root, _) = shadow.finish(map).unwrap();
    let id = CheckpointId::new(200);
    shadow.seal(id, &root.to_bytes(), Some(id)).unwrap();
    drop((parent, cursor));
    let (_, region) = crashed(&region);
    for id in 3..=8 {
        seal(&region, 100 * id, 1);
    }
    check_all(&region, 8);
}

#[test]
fn a_tail_that_a_reader_has_is_not_reused() {
    let region = open(&format());
    seal(&region, 100, 1);
    let removed = seal(&region, 200, 1);
    region.delete(removed.id()).unwrap();
    seal(&region, 300, 1);
    check(&removed);
    check_all(&region, 2);
}

/// Free segments are told from those of a checkpoint whose root is damaged.
#[test]
fn only_what_a_damaged_root_may_name_is_kept_for_it() {
    let medium = format();
    let region = open(&medium);
    for id in 1..=3 {
        seal(&region, 100 * id, 40);
    }
    for id in [100, 300] {
        region.delete(CheckpointId::new(id)).unwrap();
    }
    drop(region);
    let mut image = medium.image();
    for at in (SEGMENT..image.len()).step_by(PAGE_SIZE) {
        if image[at..].starts_with(&ROOT_MAGIC) && image[at + 8] == 200 {
            image[at + 100] ^= 1;
        }
    }
    let written = |at: &usize| image[*at..].starts_with(&SEGMENT_MAGIC);
    let written = (SEGMENT..image.len()).step_by(SEGMENT).filter(written);
    let written = written.count() as u64;
    let (region, report) =
        Region::open(Arc::new(SimMedium::from_image(&image)) as Arc<dyn Medium>).unwrap();
    assert_eq!(report.damaged, 1);
    // Its own three or four, of the ten that were written to.
    assert_eq!(report.withheld_bytes, written * SEGMENT as u64);
    assert!(written <= 4, "{written}");
    region.delete(CheckpointId::new(200)).unwrap();
    assert_eq!(used(&region), 0);
}

/// A region that is closed, dropped or only read leaves the segments of its checkpoints as they are.
#[test]
fn dropping_a_region_frees_nothing() {
    let medium = format();
    let region = open(&medium);
    let reader = seal(&region, 100, 40);
    region.delete(reader.id()).unwrap();
    seal(&region, 200, 40);
    let before = medium.image();
    drop(region);
    drop(reader);
    assert!(medium.image() == before);
}

/// Pages that come after the first nodes lie behind the root that these nodes are in.
#[test]
fn a_tail_begins_behind_the_pages_behind_a_root() {
    let medium = format();
    let mut region = open(&medium);
    let dump = |region: &Arc<Region>, id: u64| {
        let mut shadow = region.begin();
        let first = fill(&mut shadow, id, 2);
        let mut map = shadow.map();
        shadow.append(&mut map, 7, 0, &page(id + 50), None).unwrap();
        // With or without a fence before the seal.
        if id.is_multiple_of(200) {
            shadow.flush().unwrap();
        }
        let (second, _) = shadow.finish(map).unwrap();
        assert_eq!(shadow.added_bytes(), 5 * PAGE_SIZE as u64);
        let manifest = [first.to_bytes(), second.to_bytes()].concat();
        shadow
            .seal(CheckpointId::new(id.into()), &manifest, None)
            .unwrap();
    };
    for id in 1..=9 {
        dump(&region, 100 * id);
        if id % 2 == 0 {
            region = crashed(&region).1;
        }
    }
    assert_eq!(used(&region), 3);
    for checkpoint in region.checkpoints() {
        let id = checkpoint.id().value() as u64;
        let manifest = checkpoint.manifest().unwrap();
        let (first, second) = manifest.split_at(32);
        for (root, index, salt) in [(first, 1, id + 1), (second, 7, id + 50)] {
            let map = checkpoint.map(&MapRoot::try_from(root).unwrap());
            let run = map.lookup(index).unwrap().unwrap();
            assert!(map.read(&run).unwrap() == page(salt), "{index} of {id}");
        }
    }
}
