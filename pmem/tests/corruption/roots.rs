//! Damage in roots and maps of checkpoints, and what it costs those that share their pages.

use std::mem::offset_of;

use permafrost_pmem::layout::{ROOT_MAGIC, SEGMENT_MAGIC, SegmentHeader};
use permafrost_pmem::{
    CheckpointId, MapRoot, MapStats, OpenError, PAGE_SIZE, PageError, RunKind, SealError,
    ShadowError,
};

use super::{CAPACITY, PAGES, ids, open, page, sealed};

/// Returns the image with both copies of a checkpoint's root damaged.
fn root_lost(image: &[u8], id: usize) -> Vec<u8> {
    let mut damaged = image.to_vec();
    for at in (0..CAPACITY)
        .step_by(PAGE_SIZE)
        .filter(|&at| image[at..].starts_with(&ROOT_MAGIC))
        .skip(2 * (id - 1))
        .take(2)
    {
        damaged[at + 8] ^= 1;
    }
    damaged
}

#[test]
fn a_root_damaged_in_both_copies_costs_its_checkpoint_only() {
    let (image, _) = sealed();
    let (region, report) = open(&root_lost(&image, 1)).unwrap();
    assert_eq!((report.checkpoints, report.damaged), (1, 1));
    assert_eq!(ids(&region), [2]);
    let damaged = region.damaged();
    assert_eq!(damaged[0].id, CheckpointId::new(1));
    assert!(matches!(*damaged[0].reason, OpenError::RootCorrupt { id, .. } if id == damaged[0].id));
    // It is still listed at the next open, and by a compaction.
    for id in 100..150 {
        let sealed = region.begin().seal(CheckpointId::new(id), b"", None);
        sealed.unwrap();
        region.delete(CheckpointId::new(id)).unwrap();
    }
    assert!(matches!(
        region.begin().seal(damaged[0].id, b"", None),
        Err(SealError::Exists { .. })
    ));
    region.close().unwrap();
    let mut image = vec![0; CAPACITY];
    region.medium().read(0, &mut image).unwrap();
    let (region, _) = open(&image).unwrap();
    assert_eq!(region.damaged()[0].id, CheckpointId::new(1));
    region.delete(CheckpointId::new(1)).unwrap();
    assert!(region.damaged().is_empty());
    region
        .begin()
        .seal(CheckpointId::new(1), b"", None)
        .unwrap();
    assert_eq!(ids(&region), [2, 1]);
}

#[test]
fn what_may_belong_to_a_damaged_root_is_not_overwritten_before_it_is_deleted() {
    let (image, _) = sealed();
    // The second checkpoint's root: pages that the first one has are the first one's.
    let damaged = root_lost(&image, 2);
    let (region, report) = open(&damaged).unwrap();
    assert!(report.withheld_bytes > 0);
    let mut shadow = region.begin();
    let full = loop {
        let mut map = shadow.map();
        let pages: Vec<u8> = (0..64).flat_map(|n| page(1000 + n)).collect();
        if let Err(error) = shadow.append(&mut map, 0, 0, &pages, None) {
            break error;
        }
    };
    assert!(matches!(full, ShadowError::Full { .. }), "{full}");
    drop(shadow);
    let free_before = region.usage().free_bytes;
    let mut now = vec![0; CAPACITY];
    region.medium().read(0, &mut now).unwrap();
    let used = |at: usize| image[at..].starts_with(&SEGMENT_MAGIC);
    for at in (64 << 10..CAPACITY)
        .step_by(64 << 10)
        .filter(|&at| used(at))
    {
        assert!(now[at..at + (64 << 10)] == damaged[at..at + (64 << 10)]);
    }
    region.delete(CheckpointId::new(2)).unwrap();
    assert_eq!(
        region.usage().free_bytes,
        free_before + report.withheld_bytes
    );
}

/// Dumps the content of checkpoint 2, compared with it, as checkpoint 3, and reads that back whole.
fn child_of_damaged(image: &[u8], roots: &[MapRoot; 2]) -> MapStats {
    let (region, _) = open(image).unwrap();
    let parent = region.checkpoint(CheckpointId::new(2)).unwrap();
    let mut cursor = parent.map(&roots[1]).cursor();
    let mut shadow = region.begin();
    let mut map = shadow.map();
    let salt = |index| if index % 4 == 0 { index + 200 } else { index };
    for index in 0..PAGES {
        let page = page(salt(index));
        shadow
            .append(&mut map, index, 0, &page, Some(&mut cursor))
            .unwrap();
    }
    let (root, stats) = shadow.finish(map).unwrap();
    let child = shadow.seal(CheckpointId::new(3), b"", None).unwrap();
    let map = child.map(&root);
    let mut next = 0;
    for run in map.runs().map(Result::unwrap) {
        assert_eq!(run.first_index, next);
        next = run.end_index();
        let bytes = map.read(&run).unwrap();
        for (bytes, index) in bytes.chunks(PAGE_SIZE).zip(run.first_index..) {
            assert!(bytes == page(salt(index)), "page {index}");
        }
    }
    assert_eq!(next, PAGES);
    assert_eq!(stats.parent + stats.stored, PAGES);
    stats
}

#[test]
fn a_damaged_parent_costs_a_compared_child_space_only() {
    let (image, roots) = sealed();
    let whole = child_of_damaged(&image, &roots);
    assert_eq!((whole.parent, whole.parent_damaged), (PAGES, 0));

    let (region, _) = open(&image).unwrap();
    let parent = region.checkpoint(CheckpointId::new(2)).unwrap();
    let run = parent.map(&roots[1]).lookup(5).unwrap().unwrap();
    let RunKind::Stored { location, .. } = run.kind else {
        panic!("{run:?}")
    };
    let at =
        (location.value() * PAGE_SIZE as u64 + (5 - run.first_index) * PAGE_SIZE as u64) as usize;

    // A damaged page: stored again, and only that one.
    let mut damaged = image.clone();
    damaged[at + 77] ^= 4;
    let stats = child_of_damaged(&damaged, &roots);
    assert_eq!((stats.stored, stats.parent_damaged), (1, 1));

    // Its segment's checksums: the map has them, too.
    let mut damaged = image.clone();
    let (segment, place) = (at & !0xffff, at % (64 << 10) / PAGE_SIZE);
    damaged[segment + offset_of!(SegmentHeader, crcs) + 4 * place] ^= 4;
    let (region, _) = open(&damaged).unwrap();
    let parent = region.checkpoint(CheckpointId::new(2)).unwrap();
    let map = parent.map(&roots[1]);
    map.read(&run).unwrap();
    assert!(run.pages == 1 || map.read_range(&run, run.first_index, 1).is_err());
    assert!(map.check_checksums(&run).is_err());

    // The map's topmost node: all pages, and a hole is refused.
    let root = roots[1].to_bytes();
    let node = u64::from_le_bytes(root[..8].try_into().unwrap()) as usize * PAGE_SIZE
        + usize::from(u16::from_le_bytes([root[12], root[13]]));
    let mut damaged = image;
    damaged[node + 60] ^= 4;
    let stats = child_of_damaged(&damaged, &roots);
    assert_eq!((stats.stored, stats.parent_damaged), (PAGES, PAGES));
    let (region, _) = open(&damaged).unwrap();
    let parent = region.checkpoint(CheckpointId::new(2)).unwrap();
    let mut shadow = region.begin();
    let mut map = shadow.map();
    let refused = shadow.reference(&mut map, 5, 1, &mut parent.map(&roots[1]).cursor());
    assert!(
        matches!(
            refused,
            Err(ShadowError::Corrupt(PageError::MapCorrupt { .. }))
        ),
        "{refused:?}"
    );
}
