//! Cleaning: what checkpoints refer to is packed into fewer slots, under readers, and stays exact.

#![allow(missing_docs, clippy::cast_possible_truncation)]

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::sync::Arc;

use permafrost_pmem::layout::{PackedHeader, Superblock, TABLE_ENTRY_BYTES};
use permafrost_pmem::sim::{SimMedium, mix};
use permafrost_pmem::{
    CheckpointId, CleanError, Cleaned, FormatOptions, MapRoot, Medium, PAGE_SIZE, PageError,
    Region, RunKind, ShadowError, StoredCheckpoint, StoredRun, create_medium_in_memory,
};

const SEGMENT: usize = 64 << 10;

/// Content of an address space: the salt of each page.
type Content = BTreeMap<u64, u64>;

fn page(salt: u64) -> Vec<u8> {
    (0..PAGE_SIZE as u64 / 8)
        .flat_map(|i| mix(salt ^ i << 48).to_le_bytes())
        .collect()
}

fn format(slots: usize) -> Arc<dyn Medium> {
    let medium: Arc<dyn Medium> = Arc::new(SimMedium::new((1 + slots) * SEGMENT));
    let options = FormatOptions {
        segment_bytes: SEGMENT as u32,
        journal_records: Some(64),
        uuid: None,
    };
    Region::format(Arc::clone(&medium), &options).unwrap();
    medium
}

fn open(medium: &Arc<dyn Medium>) -> Arc<Region> {
    Region::open(Arc::clone(medium)).unwrap().0
}

/// Manifests of these tests are map roots.
fn roots(checkpoint: &Arc<StoredCheckpoint>) -> Option<Vec<MapRoot>> {
    let manifest = checkpoint.manifest().ok()?;
    manifest
        .chunks(32)
        .map(|root| MapRoot::try_from(root).ok())
        .collect()
}

/// Seals `content`, with unchanged pages of the parent referred to.
fn seal(
    region: &Arc<Region>,
    id: u128,
    parent: Option<u128>,
    content: &Content,
) -> Result<(), ShadowError> {
    let parent = parent.map(|id| region.checkpoint(CheckpointId::new(id)).unwrap());
    let mut parent = parent.map(|parent| parent.map(&roots(&parent).unwrap()[0]).cursor());
    let mut shadow = region.begin();
    let mut map = shadow.map();
    for (&index, &salt) in content {
        shadow.append(&mut map, index, 0, &page(salt), parent.as_mut())?;
    }
    let (root, _) = shadow.finish(map)?;
    shadow
        .seal(CheckpointId::new(id), &root.to_bytes(), None)
        .map(drop)
        .map_err(|error| match error {
            permafrost_pmem::SealError::Shadow(error) => error,
            error => panic!("{error}"),
        })
}

fn check(region: &Region, id: u128, content: &Content) {
    let checkpoint = region.checkpoint(CheckpointId::new(id)).unwrap();
    let map = checkpoint.map(&roots(&checkpoint).unwrap()[0]);
    let mut found = Content::new();
    for run in map.runs().map(Result::unwrap) {
        let bytes = map.read(&run).unwrap();
        for (bytes, index) in bytes.chunks(PAGE_SIZE).zip(run.first_index..) {
            let salt = content[&index];
            assert!(bytes == page(salt), "page {index} of {id}");
            found.insert(index, salt);
        }
    }
    assert_eq!(&found, content, "{id}");
}

fn clean(region: &Region) -> Cleaned {
    let mut survey = region.survey(&roots);
    region.clean(&mut survey, u64::MAX).unwrap()
}

/// Seals small checkpoints, from id 4 on, until the region is full.
fn fill(region: &Arc<Region>) {
    for id in 4_u64.. {
        if seal(region, id.into(), None, &Content::from([(0, id)])).is_err() {
            break;
        }
    }
}

fn free_slots(region: &Region) -> u64 {
    region.usage().free_bytes / region.usage().segment_bytes
}

/// Returns a region in which checkpoint 2 refers to one page of each of many slots, and its content.
fn sparse(medium: &Arc<dyn Medium>, slots: u64) -> (Arc<Region>, Content) {
    let region = open(medium);
    let first: Content = (0..slots * 15).map(|index| (index, index + 1)).collect();
    seal(&region, 1, None, &first).unwrap();
    let second: Content = first
        .into_iter()
        .filter(|(index, _)| index % 15 == 3)
        .collect();
    seal(&region, 2, Some(1), &second).unwrap();
    region.delete(CheckpointId::new(1)).unwrap();
    (region, second)
}

#[test]
fn what_cleaning_would_free_is_what_it_frees() {
    // Pages of each segment that stay referred to: two of them fit together, or none.
    for (kept, frees) in [(6, true), (10, false)] {
        let medium = format(40);
        let region = open(&medium);
        let first: Content = (0..20 * 15).map(|index| (index, index + 1)).collect();
        seal(&region, 1, None, &first).unwrap();
        let second: Content = first.into_iter().filter(|(i, _)| i % 15 < kept).collect();
        seal(&region, 2, Some(1), &second).unwrap();
        region.delete(CheckpointId::new(1)).unwrap();
        let survey = region.survey(&roots);
        let reclaimable = survey.reclaimable_bytes(SEGMENT as u64) / SEGMENT as u64;
        drop(survey);
        let before = free_slots(&region);
        clean(&region);
        assert_eq!(free_slots(&region) - before, reclaimable);
        // One with map nodes may become free besides.
        assert_eq!(reclaimable > 4, frees, "{reclaimable}");
        check(&region, 2, &second);
    }
}

#[test]
fn sparse_segments_share_slots_and_read_the_same_after_another_open() {
    let medium = format(40);
    let (region, content) = sparse(&medium, 20);
    let before = free_slots(&region);
    let survey = region.survey(&roots);
    assert!(survey.reclaimable_bytes(SEGMENT as u64) >= 15 * SEGMENT as u64);
    assert_eq!(survey.unknown_bytes(), 0);
    drop(survey);
    let cleaned = clean(&region);
    assert!(
        cleaned.done && cleaned.slots >= 20 && cleaned.damaged_segments == 0,
        "{cleaned:?}"
    );
    let after = free_slots(&region);
    // Twenty live pages with a header each: three slots of sixteen pages, and the slot of checkpoint 2's own map.
    assert!(after >= before + 16, "{before} {after}");
    check(&region, 2, &content);
    // Nothing is left that is worth it.
    assert_eq!(clean(&region).slots, 0);

    drop(region);
    let region = open(&medium);
    assert_eq!(free_slots(&region), after);
    check(&region, 2, &content);
    // The freed slots are of use: their own numbers are taken by segments that are elsewhere now.
    let third: Content = (0..(after - 2) * 15 - 16)
        .map(|index| (index, 7 * index + 1))
        .collect();
    seal(&region, 3, Some(2), &third).unwrap();
    check(&region, 2, &content);
    check(&region, 3, &third);
    drop(region);
    let region = open(&medium);
    check(&region, 2, &content);
    check(&region, 3, &third);
    region.delete(CheckpointId::new(2)).unwrap();
    region.delete(CheckpointId::new(3)).unwrap();
    assert_eq!(region.usage().free_bytes, region.usage().capacity_bytes);
}

#[test]
fn a_reader_keeps_the_slots_that_it_borrows_from() {
    let medium = format(40);
    let (region, content) = sparse(&medium, 20);
    let checkpoint = region.checkpoint(CheckpointId::new(2)).unwrap();
    let map = checkpoint.map(&roots(&checkpoint).unwrap()[0]);
    let runs: Vec<StoredRun> = map.runs().map(Result::unwrap).collect();
    let lent: Vec<_> = runs.iter().map(|run| map.read(run).unwrap()).collect();
    let before = free_slots(&region);
    assert!(clean(&region).slots >= 20);
    // The segments are in other slots, and the ones before are kept for the reader.
    assert!(free_slots(&region) < before);
    // A slot takes fifteen pages, of which one or two are the map's.
    let more: Content = (0..free_slots(&region) * 13 - 8)
        .map(|index| (index, index + 1000))
        .collect();
    seal(&region, 3, None, &more).unwrap();
    for (run, bytes) in runs.iter().zip(&lent) {
        assert!(**bytes == page(content[&run.first_index]));
        map.confirm(run, run.first_index, run.pages).unwrap();
        // Read anew, from the other place.
        assert!(map.read(run).unwrap() == *bytes);
    }
    let now = free_slots(&region);
    drop((map, checkpoint));
    assert!(free_slots(&region) >= now + 20);
}

#[test]
fn what_dumps_and_readers_refer_to_is_left_alone() {
    let medium = format(40);
    let (region, content) = sparse(&medium, 20);
    // A dump under way has taken pages of its parent, which is then removed.
    let parent = region.checkpoint(CheckpointId::new(2)).unwrap();
    let mut cursor = parent.map(&roots(&parent).unwrap()[0]).cursor();
    drop(parent);
    let mut shadow = region.begin();
    let mut map = shadow.map();
    for &index in content.keys() {
        shadow.reference(&mut map, index, 1, &mut cursor).unwrap();
    }
    region.delete(CheckpointId::new(2)).unwrap();
    let survey = region.survey(&roots);
    assert_eq!(
        (
            survey.live_bytes(),
            survey.reclaimable_bytes(SEGMENT as u64)
        ),
        (0, 0)
    );
    drop(survey);
    assert_eq!(clean(&region).slots, 0);
    let (root, _) = shadow.finish(map).unwrap();
    shadow
        .seal(CheckpointId::new(3), &root.to_bytes(), None)
        .unwrap();
    drop(cursor);
    check(&region, 3, &content);
    assert!(clean(&region).slots >= 20);
    check(&region, 3, &content);
}

#[test]
fn nothing_is_appended_to_what_a_survey_moves() {
    let medium = format(40);
    let (region, content) = sparse(&medium, 20);
    // The last segment of checkpoint 2 has a tail, and few pages.
    let survey = &mut region.survey(&roots);
    let more = Content::from([(0, 7)]);
    seal(&region, 3, None, &more).unwrap();
    assert!(region.clean(survey, u64::MAX).unwrap().slots > 20);
    for region in [region, open(&medium)] {
        check(&region, 2, &content);
        check(&region, 3, &more);
    }
}

#[test]
fn a_full_region_has_room_again() {
    let medium = format(70);
    let (region, content) = sparse(&medium, 60);
    let more: Content = (0..20 * 15).map(|index| (index, index + 1000)).collect();
    assert!(matches!(
        seal(&region, 3, None, &more),
        Err(ShadowError::Full { .. })
    ));
    // Fill it to the last slot that dumps may take: one is kept for cleaning.
    fill(&region);
    assert_eq!(region.usage().free_bytes, 0);
    assert!(clean(&region).slots >= 60);
    seal(&region, 3, None, &more).unwrap();
    check(&region, 2, &content);
    check(&region, 3, &more);
}

#[test]
fn a_region_without_any_free_slot_says_so() {
    // Too small for a reserved slot.
    let medium = format(12);
    let (region, content) = sparse(&medium, 8);
    fill(&region);
    let mut survey = region.survey(&roots);
    assert!(matches!(
        region.clean(&mut survey, u64::MAX),
        Err(CleanError::Full)
    ));
    drop(survey);
    // The first ones, which share segments.
    for id in 4..12 {
        region.delete(CheckpointId::new(id)).unwrap();
    }
    assert!(clean(&region).slots > 4);
    check(&region, 2, &content);
}

/// Random changes, generation by generation, of which random ones are removed while the region is cleaned.
#[test]
fn generations_of_random_changes_stay_exact_and_small() {
    let seed: u64 = std::env::var("PERMAFROST_SEED").map_or(0x5eed, |seed| seed.parse().unwrap());
    println!("PERMAFROST_SEED={seed}");
    let mut state = seed;
    let mut random = |below: u64| {
        state = mix(state.wrapping_add(0x9e37_79b9_7f4a_7c15));
        state % below
    };
    let mut written = 0;
    const PAGES: u64 = 6_000;
    let medium = create_medium_in_memory(96 << 20).unwrap();
    let options = FormatOptions {
        segment_bytes: 256 << 10,
        journal_records: Some(1024),
        uuid: None,
    };
    Region::format(Arc::clone(&medium), &options).unwrap();
    let mut region = open(&medium);
    let mut content: Content = (0..PAGES).map(|index| (index, index + 1)).collect();
    let mut kept: BTreeMap<u128, Content> = BTreeMap::new();
    seal(&region, 1, None, &content).unwrap();
    kept.insert(1, content.clone());
    for id in 2..=1000_u128 {
        let parent = region.checkpoint(CheckpointId::new(id - 1)).unwrap();
        let mut cursor = parent.map(&roots(&parent).unwrap()[0]).cursor();
        let mut shadow = region.begin();
        let mut map = shadow.map();
        for _ in 0..PAGES / 100 {
            content.insert(
                random(PAGES),
                u64::try_from(id).unwrap() << 32 | random(1 << 30),
            );
        }
        for (&index, &salt) in &content {
            if kept[&(id - 1)][&index] == salt {
                shadow.reference(&mut map, index, 1, &mut cursor).unwrap();
            } else {
                shadow
                    .append(&mut map, index, 0, &page(salt), None)
                    .unwrap();
            }
        }
        let (root, _) = shadow.finish(map).unwrap();
        shadow
            .seal(CheckpointId::new(id), &root.to_bytes(), None)
            .unwrap();
        drop((cursor, parent));
        kept.insert(id, content.clone());
        while kept.len() > 4 {
            // Never the parent of the next one.
            let nth = random(kept.len() as u64 - 1) as usize;
            let id = *kept.keys().nth(nth).unwrap();
            region.delete(CheckpointId::new(id)).unwrap();
            kept.remove(&id);
        }
        if id % 7 == 0 {
            let cleaned = clean(&region);
            written += cleaned.written_bytes;
        }
        if id % 61 == 0 {
            let (id, content) = kept.iter().nth(random(kept.len() as u64) as usize).unwrap();
            check(&region, *id, content);
            drop(region);
            region = open(&medium);
        }
    }
    clean(&region);
    let survey = region.survey(&roots);
    let (used, live) = (survey.used_bytes(), survey.live_bytes());
    drop(survey);
    println!("{used} bytes used for {live} live ones; {written} bytes written by cleaning");
    assert!(
        used * 2 <= live * 3,
        "{used} bytes used for {live} live ones"
    );
    for (id, content) in &kept {
        check(&region, *id, content);
    }
}

#[test]
fn damage_in_packed_segments_is_found_and_healed() {
    let medium = format(40);
    let (region, content) = sparse(&medium, 20);
    clean(&region);
    region.close().unwrap();
    drop(region);
    let mut image = vec![0; medium.capacity_bytes() as usize];
    medium.read(0, &mut image).unwrap();
    let reopen = |image: &[u8]| {
        let medium: Arc<dyn Medium> = Arc::new(SimMedium::from_image(image));
        open(&medium)
    };
    let salt = content[&3];
    let at = image
        .chunks(PAGE_SIZE)
        .rposition(|found| found == page(salt))
        .unwrap()
        * PAGE_SIZE;

    // A page.
    let mut damaged = image.clone();
    damaged[at + 9] ^= 1;
    let region = reopen(&damaged);
    let checkpoint = region.checkpoint(CheckpointId::new(2)).unwrap();
    let map = checkpoint.map(&roots(&checkpoint).unwrap()[0]);
    let run = map.lookup(3).unwrap().unwrap();
    assert!(matches!(
        map.read(&run),
        Err(PageError::Corrupt { index: 3, .. })
    ));
    assert!(map.heal_page(3, &page(salt).try_into().unwrap()).unwrap());
    check(&region, 2, &content);

    // The header that says which pages are stored, and where. The first one of a slot is at its beginning.
    let header = (0..at)
        .step_by(SEGMENT)
        .rev()
        .find(|&slot| image[slot..slot + 8] != *b"PFSEGMNT")
        .unwrap();
    let number = u32::from_le_bytes(image[header + 4..][..4].try_into().unwrap());
    assert!(number < 40);
    for offset in [
        offset_of!(PackedHeader, crc32),
        offset_of!(PackedHeader, segment),
        offset_of!(PackedHeader, first),
        offset_of!(PackedHeader, stored),
        offset_of!(PackedHeader, stored) + 63,
    ] {
        let mut damaged = image.clone();
        damaged[header + offset] ^= 1;
        let region = reopen(&damaged);
        let checkpoint = region.checkpoint(CheckpointId::new(2)).unwrap();
        let map = checkpoint.map(&roots(&checkpoint).unwrap()[0]);
        let errors = map
            .runs()
            .filter(|run| map.read(run.as_ref().unwrap()).is_err());
        assert_eq!(errors.count(), 1, "{offset}");
        // Neither moved nor lost by cleaning.
        assert_eq!(clean(&region).slots, 0);
    }

    // Any one copy of the table.
    let field = |offset| u32::from_le_bytes(image[offset..offset + 4].try_into().unwrap()) as usize;
    let table = field(offset_of!(Superblock, table_at));
    let entries = field(offset_of!(Superblock, segments));
    let table_bytes = (entries * TABLE_ENTRY_BYTES).next_multiple_of(PAGE_SIZE);
    for copy in [table, table + table_bytes] {
        let mut damaged = image.clone();
        damaged[copy..copy + table_bytes].fill(0xa5);
        check(&reopen(&damaged), 2, &content);
        damaged[copy..copy + table_bytes].fill(0);
        check(&reopen(&damaged), 2, &content);
    }
    // Both of them: nothing is served from a wrong place.
    let mut damaged = image.clone();
    damaged[table..table + 2 * table_bytes].fill(0xa5);
    let region = reopen(&damaged);
    assert_eq!(region.damaged().len(), 1);
    assert!(region.checkpoint(CheckpointId::new(2)).is_none());
}

#[test]
fn a_damaged_page_keeps_its_segment_where_it_is() {
    let medium = format(40);
    let (region, content) = sparse(&medium, 20);
    let checkpoint = region.checkpoint(CheckpointId::new(2)).unwrap();
    let map = checkpoint.map(&roots(&checkpoint).unwrap()[0]);
    let RunKind::Stored { location, .. } = map.lookup(48).unwrap().unwrap().kind else {
        panic!()
    };
    drop((map, checkpoint, region));
    let mut image = vec![0; medium.capacity_bytes() as usize];
    medium.read(0, &mut image).unwrap();
    image[location.value() as usize * PAGE_SIZE] ^= 1;
    let medium: Arc<dyn Medium> = Arc::new(SimMedium::from_image(&image));
    let region = open(&medium);
    let cleaned = clean(&region);
    assert_eq!(cleaned.damaged_segments, 1);
    assert!(cleaned.slots >= 19);
    let checkpoint = region.checkpoint(CheckpointId::new(2)).unwrap();
    let map = checkpoint.map(&roots(&checkpoint).unwrap()[0]);
    assert!(
        map.heal_page(48, &page(content[&48]).try_into().unwrap())
            .unwrap()
    );
    check(&region, 2, &content);
}
