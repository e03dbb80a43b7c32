//! Encrypted checkpoints: nothing of them is readable on the medium, and everything that works on pages works on them.

#![allow(missing_docs, clippy::cast_possible_truncation)]

use std::sync::Arc;

use permafrost_pmem::sim::{SimMedium, mix};
use permafrost_pmem::{
    CheckpointId, DataKey, FormatOptions, HealError, KeyId, MapRoot, Medium, PAGE_SIZE, PageError,
    Region, RunKind, ShadowError, StoredCheckpoint,
};

const SEGMENT: usize = 64 << 10;
const PAGES: u64 = 40;

struct Setup {
    medium: Arc<SimMedium>,
    region: Arc<Region>,
}

fn key(number: u64) -> (KeyId, DataKey) {
    let id = KeyId::new(number).unwrap();
    (id, DataKey::new([number as u8; 32]))
}

fn give(region: &Region, number: u64) -> KeyId {
    let (id, key) = key(number);
    let cipher = key.cipher(region.usage().uuid.as_bytes());
    region.keys().insert(id, cipher);
    id
}

impl Setup {
    fn new(slots: usize) -> Self {
        let medium = Arc::new(SimMedium::new((1 + slots) * SEGMENT));
        let options = FormatOptions {
            segment_bytes: SEGMENT as u32,
            journal_records: Some(64),
            uuid: None,
        };
        Region::format(Arc::clone(&medium) as Arc<dyn Medium>, &options).unwrap();
        Self::opened(medium)
    }

    fn opened(medium: Arc<SimMedium>) -> Self {
        let region = Region::open(Arc::clone(&medium) as Arc<dyn Medium>)
            .unwrap()
            .0;
        Self { medium, region }
    }

    /// Opens what is on the medium, without any key.
    fn again(&self) -> Self {
        Self::opened(Arc::new(SimMedium::from_image(&self.medium.image())))
    }

    fn damage(&self, at: usize) {
        let mut image = self.medium.image();
        image[at] ^= 1;
        // SAFETY: the test reads nothing meanwhile.
        #[expect(unsafe_code, reason = "damages a page behind the region's back")]
        unsafe {
            self.medium.write(at as u64, &image[at..=at]).unwrap();
        }
    }
}

fn page(salt: u64) -> Vec<u8> {
    let words = (0..PAGE_SIZE as u64 / 8).map(|i| mix(salt ^ i << 48).to_le_bytes());
    words.flatten().collect()
}

/// Seals pages with the salts `salt + index`, but for every fifth, which is the parent's.
fn seal(region: &Arc<Region>, id: u64, salt: u64, key: Option<KeyId>, parent: Option<u64>) {
    let mut parent = parent.map(|id| map_of(region, id).cursor());
    let mut shadow = region.begin_encrypted(key).unwrap();
    let mut map = shadow.map();
    for index in 0..PAGES {
        let salt = if index % 5 == 1 && parent.is_some() {
            index
        } else {
            salt + index
        };
        shadow
            .append(&mut map, index, 0, &page(salt), parent.as_mut())
            .unwrap();
    }
    let (root, stats) = shadow.finish(map).unwrap();
    assert_eq!(stats.parent > 0, parent.is_some());
    let mut manifest = root.to_bytes().to_vec();
    manifest.extend(format!("job of customer {id} {:0>100}", "").bytes());
    let id = CheckpointId::new(u128::from(id));
    shadow.seal(id, &manifest, None).unwrap();
}

fn checkpoint(region: &Region, id: u64) -> Arc<StoredCheckpoint> {
    region
        .checkpoint(CheckpointId::new(u128::from(id)))
        .unwrap()
}

fn root_of(checkpoint: &Arc<StoredCheckpoint>) -> Option<MapRoot> {
    MapRoot::try_from(checkpoint.manifest().ok()?.get(..32)?).ok()
}

/// Map roots for a survey: a manifest that is shorter than one names none.
fn roots(checkpoint: &Arc<StoredCheckpoint>) -> Option<Vec<MapRoot>> {
    let manifest = checkpoint.manifest().ok()?;
    Some(
        manifest
            .get(..32)
            .and_then(|_| root_of(checkpoint))
            .into_iter()
            .collect(),
    )
}

fn map_of(region: &Region, id: u64) -> permafrost_pmem::PageMap {
    let checkpoint = checkpoint(region, id);
    checkpoint.map(&root_of(&checkpoint).unwrap())
}

fn check(region: &Region, id: u64, salt: u64, parent: bool) {
    let map = map_of(region, id);
    map.digest().unwrap();
    let mut next = 0;
    for run in map.runs().map(Result::unwrap) {
        map.check_checksums(&run).unwrap();
        let bytes = map.read(&run).unwrap();
        let crcs: Vec<u32> = bytes.chunks(PAGE_SIZE).map(crc32fast::hash).collect();
        assert_eq!(map.checksums(&run).unwrap(), crcs);
        for bytes in bytes.chunks(PAGE_SIZE) {
            let salt = if next % 5 == 1 && parent {
                next
            } else {
                salt + next
            };
            assert!(bytes == page(salt), "page {next} of {id}");
            // A part of a run, too.
            assert!(*map.read_range(&run, next, 1).unwrap() == *bytes);
            next += 1;
        }
    }
    assert_eq!(next, PAGES);
    assert_eq!(checkpoint(region, id).check_root().unwrap(), 0);
}

fn clean(region: &Region) -> u64 {
    let mut survey = region.survey(&roots);
    region.clean(&mut survey, u64::MAX).unwrap().slots
}

fn contains(image: &[u8], bytes: &[u8]) -> bool {
    let first = bytes[0];
    let starts = image.iter().enumerate().filter(|(_, byte)| **byte == first);
    starts
        .into_iter()
        .any(|(at, _)| image[at..].starts_with(bytes))
}

#[test]
fn nothing_of_an_encrypted_checkpoint_is_readable() {
    let setup = Setup::new(40);
    let (one, other) = (give(&setup.region, 1), give(&setup.region, 2));
    seal(&setup.region, 1, 0, Some(one), None);
    seal(&setup.region, 2, 0, Some(other), None);
    seal(&setup.region, 3, 0, None, None);
    // A manifest that does not fit into the root.
    let long = [b"long name of a job ".repeat(400), page(90)].concat();
    let shadow = setup.region.begin_encrypted(Some(one)).unwrap();
    shadow.seal(CheckpointId::new(4), &long, None).unwrap();
    assert_eq!(checkpoint(&setup.region, 4).manifest().unwrap(), long);
    for id in 1..=3 {
        check(&setup.region, id, 0, false);
    }
    // Equal pages of two keys, and of two places, differ.
    let image = setup.medium.image();
    assert!(contains(&image, b"customer 3") && contains(&image, &page(0)[..16]));
    assert!(!contains(&image, b"customer 1") && !contains(&image, b"customer 2"));
    assert!(!contains(&image, b"long name") && !contains(&image, &page(90)[..16]));
    setup.region.delete(CheckpointId::new(3)).unwrap();
    let only_encrypted = Setup::new(40);
    let one = give(&only_encrypted.region, 1);
    seal(&only_encrypted.region, 1, 0, Some(one), None);
    let image = only_encrypted.medium.image();
    let crc = crc32fast::hash(&page(3)).to_le_bytes();
    for index in 0..PAGES {
        assert!(!contains(&image, &page(index)[..16]), "{index}");
    }
    assert!(!contains(&image, &crc));
}

#[test]
fn a_checkpoint_without_its_key_is_locked_and_costs_nothing_else() {
    let setup = Setup::new(40);
    let (one, other) = (give(&setup.region, 1), give(&setup.region, 2));
    seal(&setup.region, 1, 0, Some(one), None);
    seal(&setup.region, 2, 0, Some(other), None);
    seal(&setup.region, 3, 0, None, None);
    for keys in [&[][..], &[2]] {
        let again = setup.again();
        assert!(again.region.failure().is_none() && again.region.damaged().is_empty());
        for &number in keys {
            give(&again.region, number);
            check(&again.region, 2, 0, false);
        }
        check(&again.region, 3, 0, false);
        let locked = checkpoint(&again.region, 1);
        assert_eq!(locked.manifest().unwrap_err().locked(), Some(one));
        assert_eq!(locked.check_root().unwrap(), 0);
        // A map root that is known from elsewhere is of no use either.
        let map = locked.map(map_of(&setup.region, 1).root());
        assert!(matches!(map.digest(), Err(PageError::Locked { .. })));
        assert!(matches!(
            again.region.begin_encrypted(Some(one)),
            Err(ShadowError::Locked { key }) if key == one
        ));
        // Its segments are not cleaned, and not used for others.
        for id in 10..15 {
            seal(&again.region, id, 100 * id, None, None);
        }
        for id in [11, 13, 14] {
            again.region.delete(CheckpointId::new(id)).unwrap();
        }
        clean(&again.region);
        check(&again.region, 10, 1000, false);
        give(&again.region, 1);
        check(&again.region, 1, 0, false);
        again.region.keys().remove(one);
        let free = again.region.usage().free_bytes;
        again.region.delete(CheckpointId::new(1)).unwrap();
        drop((locked, map));
        assert!(again.region.usage().free_bytes > free);
    }
}

#[test]
fn a_wrong_key_is_damage_and_never_content() {
    let setup = Setup::new(40);
    let one = give(&setup.region, 1);
    seal(&setup.region, 1, 0, Some(one), None);
    let again = setup.again();
    let cipher = key(2).1.cipher(again.region.usage().uuid.as_bytes());
    again.region.keys().insert(one, cipher);
    assert!(matches!(
        checkpoint(&again.region, 1).manifest(),
        Err(PageError::MapCorrupt { .. })
    ));
}

#[test]
fn generations_share_encrypted_pages_and_are_cleaned() {
    let setup = Setup::new(40);
    let region = &setup.region;
    let one = give(region, 1);
    seal(region, 1, 0, Some(one), None);
    seal(region, 2, 1000, Some(one), Some(1));
    // Under another key, and in the clear, they share, too.
    let two = give(region, 2);
    seal(region, 3, 2000, Some(two), Some(2));
    seal(region, 4, 3000, None, Some(3));
    region.delete(CheckpointId::new(1)).unwrap();
    region.delete(CheckpointId::new(3)).unwrap();
    assert!(clean(region) > 0);
    check(region, 2, 1000, true);
    check(region, 4, 3000, true);
    let again = setup.again();
    assert!(checkpoint(&again.region, 4).manifest().is_ok());
    give(&again.region, 1);
    give(&again.region, 2);
    check(&again.region, 2, 1000, true);
    check(&again.region, 4, 3000, true);
}

/// Moves everything from some keys to another one; returns the segments that were moved and left.
fn change_keys(region: &Region, from: &[KeyId], to: KeyId) -> (u64, u64) {
    let survey = region.survey_keys(&roots, from);
    let mut moved = 0;
    loop {
        let step = region
            .change_keys(&survey, to, 10 * PAGE_SIZE as u64)
            .unwrap();
        moved += step.segments;
        if step.done {
            return (moved, step.left_segments);
        }
    }
}

#[test]
fn another_key_takes_the_place_of_one_under_readers_and_without_new_maps() {
    let setup = Setup::new(40);
    let region = &setup.region;
    let (one, two) = (give(region, 1), give(region, 2));
    seal(region, 1, 0, Some(one), None);
    seal(region, 2, 1000, Some(one), Some(1));
    seal(region, 3, 2000, None, None);
    let small = region.begin_encrypted(Some(one)).unwrap();
    small.seal(CheckpointId::new(4), b"small", None).unwrap();
    region.delete(CheckpointId::new(1)).unwrap();
    let root = *map_of(region, 2).root();
    let reader = checkpoint(region, 2);
    // A dump under way is left alone, and goes on under its key.
    let mut shadow = region.begin_encrypted(Some(one)).unwrap();
    let mut map = shadow.map();
    shadow.append(&mut map, 0, 0, &page(5), None).unwrap();
    let counted = region.segments_by_key()[&one];
    let (moved, left) = change_keys(region, &[one], two);
    assert_eq!((moved + left, left), (counted, 1));
    let (map, _) = shadow.finish(map).unwrap();
    shadow
        .seal(CheckpointId::new(5), &map.to_bytes(), None)
        .unwrap();
    let (again, left) = change_keys(region, &[one], two);
    assert_eq!((again > 0, left), (true, 0));
    assert_eq!(region.segments_by_key().get(&one), None);
    // The key before is of no use any more.
    region.keys().remove(one);
    check(region, 2, 1000, true);
    assert_eq!(
        reader.map(&root).digest().unwrap(),
        map_of(region, 2).digest().unwrap()
    );
    drop(reader);
    for region in [region, &setup.again().region] {
        give(region, 2);
        check(region, 2, 1000, true);
        check(region, 3, 2000, false);
        assert_eq!(checkpoint(region, 4).manifest().unwrap(), b"small");
        let five = map_of(region, 5);
        assert!(*five.read(&five.lookup(0).unwrap().unwrap()).unwrap() == *page(5));
    }
    // New dumps share with what was moved, and what cannot be read stays where it is.
    let unknown = key(3).0;
    let opened = setup.again();
    let region = &opened.region;
    give(region, 2);
    let survey = region.survey_keys(&|_| None, &[two]);
    assert!(region.change_keys(&survey, unknown, u64::MAX).is_err());
    let three = give(region, 3);
    assert_eq!(
        region
            .change_keys(&survey, three, u64::MAX)
            .unwrap()
            .segments,
        0
    );
    seal(region, 6, 0, Some(three), None);
    check(region, 6, 0, false);
}

#[test]
fn tails_are_shared_by_shadows_of_one_key() {
    let setup = Setup::new(40);
    let one = give(&setup.region, 1);
    let small = |id: u128, key| {
        let shadow = setup.region.begin_encrypted(key).unwrap();
        shadow.seal(CheckpointId::new(id), b"small", None).unwrap();
    };
    for (id, key) in [(1, Some(one)), (2, None), (3, Some(one)), (4, None)] {
        small(id, key);
    }
    let usage = setup.region.usage();
    assert_eq!(
        (usage.capacity_bytes - usage.free_bytes) / SEGMENT as u64,
        2
    );
    let again = setup.again();
    give(&again.region, 1);
    let shadow = again.region.begin_encrypted(Some(one)).unwrap();
    shadow.seal(CheckpointId::new(5), b"small", None).unwrap();
    assert_eq!(again.region.usage().free_bytes, usage.free_bytes);
    for id in 1..=5 {
        assert_eq!(checkpoint(&again.region, id).manifest().unwrap(), b"small");
    }
}

#[test]
fn a_damaged_encrypted_page_is_named_and_healed() {
    let setup = Setup::new(40);
    let region = &setup.region;
    let one = give(region, 1);
    seal(region, 1, 0, Some(one), None);
    let map = map_of(region, 1);
    let run = map.lookup(3).unwrap().unwrap();
    let RunKind::Stored { location, .. } = run.kind else {
        panic!("{run:?}")
    };
    let at = (location.value() + 3 - run.first_index) as usize * PAGE_SIZE;
    setup.damage(at + 77);
    for read in [map.read(&run), map.read_range(&run, 3, 1)] {
        assert!(matches!(read, Err(PageError::Corrupt { index: 3, .. })));
    }
    assert!(map.read_range(&run, 4, 1).is_ok());
    let whole: [u8; PAGE_SIZE] = page(3).try_into().unwrap();
    let other: [u8; PAGE_SIZE] = page(4).try_into().unwrap();
    assert!(matches!(
        map.heal_page(3, &other),
        Err(HealError::OtherContent { .. })
    ));
    assert!(map.heal_page(3, &whole).unwrap());
    assert!(!map.heal_page(3, &whole).unwrap());
    check(region, 1, 0, false);
    // A damaged id of the key in the header: the second copy counts.
    let header = at - at % SEGMENT;
    setup.damage(header + 33);
    check(region, 1, 0, false);
    setup.damage(header + 2041);
    assert!(matches!(map.read(&run), Err(PageError::Locked { .. })));
}

#[test]
fn a_damaged_copy_of_an_encrypted_root_is_found() {
    let setup = Setup::new(40);
    let one = give(&setup.region, 1);
    let shadow = setup.region.begin_encrypted(Some(one)).unwrap();
    shadow
        .seal(CheckpointId::new(1), b"name of a job", None)
        .unwrap();
    let image = setup.medium.image();
    let magic = permafrost_pmem::layout::ROOT_MAGIC;
    let roots: Vec<usize> = (0..image.len())
        .step_by(PAGE_SIZE)
        .filter(|&at| image[at..].starts_with(&magic))
        .collect();
    assert_eq!(roots.len(), 2);
    let checkpoint = checkpoint(&setup.region, 1);
    setup.damage(roots[0] + 300);
    setup.damage(roots[0] + 144);
    assert_eq!(checkpoint.check_root().unwrap(), 1);
    assert_eq!(checkpoint.manifest().unwrap(), b"name of a job");
    setup.damage(roots[1] + 145);
    assert!(matches!(
        checkpoint.manifest(),
        Err(PageError::MapCorrupt { .. })
    ));
}

#[test]
fn a_root_page_that_its_nodes_fill_is_read_again() {
    let setup = Setup::new(8);
    let region = &setup.region;
    let one = give(region, 1);
    // Map nodes of many lengths around a page; the manifest stands elsewhere.
    for (pages, more) in (100..=300).flat_map(|pages| (0..8).map(move |more| (pages, more))) {
        let mut shadow = region.begin_encrypted(Some(one)).unwrap();
        for pages in [pages, more] {
            let mut map = shadow.map();
            for index in 0..pages {
                let flags = (index % 2) as u16;
                shadow.append_zeros(&mut map, index, flags, 1).unwrap();
            }
            shadow.finish(map).unwrap();
        }
        let id = CheckpointId::new(u128::from(pages));
        shadow.seal(id, &[7; 5000], None).unwrap();
        // What the next open will find.
        assert_eq!(
            checkpoint(region, pages).check_root().unwrap(),
            0,
            "{pages}, {more}"
        );
        region.delete(id).unwrap();
    }
}

#[test]
fn a_dump_is_not_sealed_under_a_key_that_was_taken() {
    let setup = Setup::new(8);
    let region = &setup.region;
    let (one, two) = (give(region, 1), give(region, 2));
    let early = region.begin_encrypted(Some(one)).unwrap();
    assert!(region.take_unused_key(one));
    let refused = early.seal(CheckpointId::new(1), b"m", None).unwrap_err();
    assert!(refused.to_string().contains("key"), "{refused}");
    assert!(region.checkpoint(CheckpointId::new(1)).is_none());
    // One that a segment is encrypted with stays.
    let late = region.begin_encrypted(Some(two)).unwrap();
    late.seal(CheckpointId::new(2), b"m", None).unwrap();
    assert!(!region.take_unused_key(two));
    assert_eq!(checkpoint(region, 2).manifest().unwrap(), b"m");
}
