//! Slots that are moved out and in, and what is freed meanwhile.

use std::sync::atomic::{AtomicUsize, Ordering};

use permafrost_cold::{ColdError, Objects as _};
use permafrost_pmem::{
    CheckpointId, CleanError, MediaError, OccupiedSlot, PAGE_SIZE, SegmentNo, ShadowError,
};

use super::{
    FIRST, PAGES, SEGMENT, Site, checkpoint, cool, page, read, recall, root, seal, segment_of,
    used, while_it_hangs,
};

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
