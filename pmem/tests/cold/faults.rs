//! Stores that answer garbage, lack objects, hang, or were left by a crash.

use permafrost_cold::Objects as _;
use permafrost_pmem::PAGE_SIZE;

use super::{
    FIRST, Fault, PAGES, SEGMENT, Site, checkpoint, cold_error, cool, page, read, recall, root,
    seal, used, while_it_hangs,
};

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
