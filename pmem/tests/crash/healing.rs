//! Healing of a damaged page: a crash at any time leaves it damaged or healed, and touches nothing else.

use std::sync::Arc;

use permafrost_pmem::sim::{MediumEvent, Replay, SimMedium};
use permafrost_pmem::{
    CheckpointId, FormatOptions, HealError, MapRoot, Medium, PAGE_SIZE, PageError, PageMap, Region,
    RunKind,
};

use super::scenario::CAPACITY;

const PAGES: u64 = 6;
const BAD: u64 = 3;

fn page(salt: u64) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    for (chunk, at) in page.chunks_exact_mut(8).zip(1_u64..) {
        chunk.copy_from_slice(&permafrost_pmem::sim::mix(salt << 32 | at).to_le_bytes());
    }
    page
}

/// Returns a region whose checkpoints 1 and 2 share all pages, with their roots and the place of page `BAD`.
fn two_that_share() -> (Vec<u8>, [MapRoot; 2], usize) {
    let medium = Arc::new(SimMedium::new(CAPACITY));
    let shared = || Arc::clone(&medium) as Arc<dyn Medium>;
    let options = FormatOptions {
        segment_bytes: 64 << 10,
        journal_records: Some(32),
        uuid: None,
    };
    Region::format(shared(), &options).unwrap();
    let (region, _) = Region::open(shared()).unwrap();
    let mut roots = Vec::new();
    for id in 1..=2 {
        let mut shadow = region.begin();
        let mut map = shadow.map();
        let parent = roots.first();
        let first = region.checkpoint(CheckpointId::new(1));
        let mut parent = parent.and_then(|root| Some(first?.map(root).cursor()));
        for index in 0..PAGES {
            let pages = page(index);
            shadow
                .append(&mut map, index, 0, &pages, parent.as_mut())
                .unwrap();
        }
        roots.push(shadow.finish(map).unwrap().0);
        shadow.seal(CheckpointId::new(id), b"m", None).unwrap();
    }
    let map = map_of(&region, 2, &roots[1]);
    let run = map.lookup(BAD).unwrap().unwrap();
    let RunKind::Stored { location, .. } = run.kind else {
        panic!("a page of zeros")
    };
    let at = location.plus(BAD - run.first_index).value() * PAGE_SIZE as u64;
    region.close().unwrap();
    (
        medium.image(),
        [roots[0], roots[1]],
        usize::try_from(at).unwrap(),
    )
}

fn map_of(region: &Region, id: u128, root: &MapRoot) -> PageMap {
    region.checkpoint(CheckpointId::new(id)).unwrap().map(root)
}

fn read(map: &PageMap, index: u64) -> Result<Vec<u8>, PageError> {
    let run = map.lookup(index)?.unwrap();
    map.read_range(&run, index, 1)
        .map(std::borrow::Cow::into_owned)
}

#[test]
fn a_crash_leaves_the_page_damaged_or_healed_and_all_else_as_it_was() {
    let (mut image, roots, at) = two_that_share();
    for byte in &mut image[at + 100..at + 900] {
        *byte = !*byte;
    }
    let medium = Arc::new(SimMedium::from_image(&image));
    let (region, _) = Region::open(Arc::clone(&medium) as Arc<dyn Medium>).unwrap();
    let before = medium.image();
    let _ = medium.take_log();
    let map = map_of(&region, 2, &roots[1]);
    assert!(matches!(
        read(&map, BAD),
        Err(PageError::Corrupt { index: BAD, .. })
    ));
    assert!(map.heal_page(BAD, &page(BAD)).unwrap());
    for (id, root) in [1, 2].into_iter().zip(&roots) {
        assert_eq!(read(&map_of(&region, id, root), BAD).unwrap(), page(BAD));
    }
    let log = medium.take_log();
    let (mut damaged, mut healed) = (0, 0);
    let mut replay = Replay::new(before.clone());
    for event in log.iter().chain([&MediumEvent::Fence(Vec::new())]) {
        for seed in 0..200 {
            let after = replay.crash(seed);
            let right = page(BAD);
            for (chunk, at) in right.chunks(8).zip((at..).step_by(8)) {
                let now = &after[at..at + 8];
                assert!(now == chunk || now == &before[at..at + 8]);
            }
            assert!(
                after[..at] == before[..at] && after[at + PAGE_SIZE..] == before[at + PAGE_SIZE..]
            );
            let medium = Arc::new(SimMedium::from_image(&after));
            let (region, _) = Region::open(medium as Arc<dyn Medium>).unwrap();
            let map = map_of(&region, 1, &roots[0]);
            match read(&map, BAD) {
                Ok(found) => {
                    assert_eq!(found, page(BAD));
                    healed += 1;
                }
                Err(_) => damaged += 1,
            }
            for other in (0..PAGES).filter(|index| *index != BAD) {
                assert_eq!(read(&map, other).unwrap(), page(other));
            }
        }
        replay.apply(event);
    }
    assert!(damaged > 0 && healed > 0, "{damaged} {healed}");
    // Acknowledged, it stays.
    let (region, _) = Region::open(Arc::new(SimMedium::from_image(&replay.crash(0)))).unwrap();
    assert_eq!(
        read(&map_of(&region, 1, &roots[0]), BAD).unwrap(),
        page(BAD)
    );
}

#[test]
fn a_page_that_verifies_is_never_written_to_and_other_bytes_never_written() {
    let (mut image, roots, at) = two_that_share();
    let medium = Arc::new(SimMedium::from_image(&image));
    let (region, _) = Region::open(Arc::clone(&medium) as Arc<dyn Medium>).unwrap();
    let _ = medium.take_log();
    let map = map_of(&region, 1, &roots[0]);
    assert!(!map.heal_page(BAD, &page(BAD)).unwrap());
    assert!(matches!(
        map.heal_page(BAD, &page(7)),
        Err(HealError::OtherContent { index: BAD, .. })
    ));
    assert!(matches!(
        map.heal_page(PAGES, &page(7)),
        Err(HealError::NotStored { index: PAGES })
    ));
    assert!(medium.take_log().is_empty());

    image[at] ^= 1;
    let medium = Arc::new(SimMedium::from_image(&image));
    let (region, _) = Region::open(Arc::clone(&medium) as Arc<dyn Medium>).unwrap();
    let _ = medium.take_log();
    let map = map_of(&region, 1, &roots[0]);
    map.heal_page(BAD, &page(7)).unwrap_err();
    assert!(medium.take_log().is_empty());
    // A medium that takes no write there leaves the damage, and returns an error.
    medium.fail_from(0);
    assert!(matches!(
        map.heal_page(BAD, &page(BAD)),
        Err(HealError::Write(_))
    ));
    read(&map, BAD).unwrap_err();
}
