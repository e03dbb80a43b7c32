//! Encrypted slots, and keys that change under them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use permafrost_pmem::{
    CheckpointId, DataKey, KeyId, OpenOptions, Region, StoredCheckpoint, open_medium,
};

use super::{SEGMENT, Site, cool, page, read, recall, root, used};

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
