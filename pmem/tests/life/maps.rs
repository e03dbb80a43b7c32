//! Maps of many pages and objects, and their digest.

use std::sync::Arc;

use permafrost_pmem::{CheckpointId, Kept, MapRoot, MapStats, PAGE_SIZE, Region, Shadow};

use super::{content, pages, region};

#[test]
fn large_maps_have_several_levels() {
    let region = region(64 << 20);
    let mut shadow = region.begin();
    let mut map = shadow.map();
    // Alternating flags: every page is a run of its own, 40,000 runs make three levels.
    let zero = pages(&[0]);
    for index in 0..40_000 {
        shadow
            .append(&mut map, index * 3, (index % 2) as u16, &zero, None)
            .unwrap();
    }
    let (root, stats) = shadow.finish(map).unwrap();
    assert_eq!((stats.pages, root.pages()), (40_000, 40_000));
    let sealed = shadow.seal(CheckpointId::new(7), b"", None).unwrap();
    let map = sealed.map(&root);
    let mut indices = map.runs().map(|r| r.unwrap().first_index);
    assert!((0..40_000).all(|i| indices.next() == Some(i * 3)) && indices.next().is_none());
    let mut cursor = map.clone().cursor();
    for index in [
        0,
        1,
        2,
        3,
        119_997,
        119_998,
        5,
        60_000,
        60_001,
        59_999,
        0,
        u64::MAX,
    ] {
        let expected = (index % 3 == 0 && index < 120_000).then_some(index);
        assert_eq!(
            cursor.lookup(index).unwrap().map(|r| r.first_index),
            expected,
            "{index}"
        );
        assert_eq!(
            map.lookup(index).unwrap().map(|r| r.first_index),
            expected,
            "{index}"
        );
        let next = index.div_ceil(3) * 3;
        assert_eq!(
            cursor.seek(index).unwrap().map(|r| r.first_index),
            (next < 120_000).then_some(next)
        );
    }
}

/// Checks that the digest identifies a map's content: equal for pages appended, compared, referred to or split
/// otherwise, computed while they come or from the sealed map; another one for any difference.
#[test]
fn a_maps_digest_is_that_of_its_content() {
    use sha2::{Digest, Sha256};

    let region = region(8 << 20);
    let bytes = pages(&[1, 0, 2, 3, 0, 0, 4]);
    // Two blocks of eight pages, 96 to 103 and 104 to 111, in slots 4 and 5 of the one above.
    let leaf = |first_index: u64, pages: &[usize]| -> [u8; 32] {
        let mut hash = Sha256::new_with_prefix([0]);
        hash.update(first_index.to_le_bytes());
        for at in pages {
            let page = &bytes[at * PAGE_SIZE..][..PAGE_SIZE];
            let stored = u8::from(page.iter().any(|&byte| byte != 0));
            let crc = if stored == 1 {
                crc32fast::hash(page)
            } else {
                0
            };
            hash.update([(100 + at) as u8 % 8, stored, 5, 0]);
            hash.update(crc.to_le_bytes());
        }
        hash.finalize().into()
    };
    let mut expected = Sha256::new_with_prefix([1, 1]);
    for (slot, digest) in [(4, leaf(96, &[0, 1, 2, 3])), (5, leaf(104, &[4, 5, 6]))] {
        expected.update([slot]);
        expected.update(digest);
    }
    let expected: [u8; 32] = expected.finalize().into();

    let mut shadow = region.begin();
    let mut map = shadow.map();
    map.watch();
    shadow.append(&mut map, 100, 5, &bytes, None).unwrap();
    let kept: Vec<_> = map
        .pieces()
        .map(|p| (p.first_index, p.pages, p.kept))
        .collect();
    assert_eq!(
        kept,
        [
            (100, 1, Kept::Stored),
            (101, 1, Kept::Zero),
            (102, 2, Kept::Stored),
            (104, 2, Kept::Zero),
            (106, 1, Kept::Stored)
        ]
    );
    assert_eq!(map.pieces().count(), 0);
    let (root, stats) = shadow.finish(map).unwrap();
    assert_eq!(stats.digest, expected);
    let parent = shadow.seal(CheckpointId::random(), b"", None).unwrap();
    assert_eq!(parent.map(&root).digest().unwrap(), expected);

    // Half compared, half referred to with flags of its own.
    let mut shadow = region.begin();
    let mut cursor = parent.map(&root).cursor();
    let mut map = shadow.map();
    let half = &bytes[..3 * PAGE_SIZE];
    shadow
        .append(&mut map, 100, 5, half, Some(&mut cursor))
        .unwrap();
    shadow
        .reference_as(&mut map, 103, 5, 4, &mut cursor)
        .unwrap();
    let (_, stats) = shadow.finish(map).unwrap();
    assert_eq!((stats.digest, stats.stored), (expected, 0));

    for (first_index, flags, bytes) in [
        (101, 5, bytes.clone()),
        (100, 4, bytes.clone()),
        (100, 5, bytes[PAGE_SIZE..].to_vec()),
        (100, 5, pages(&[1, 0, 2, 3, 0, 0, 8])),
    ] {
        let stats = shadow_map(&region, first_index, flags, &bytes);
        assert_ne!(stats.digest, expected);
    }
}

/// Appends 2^45 pages, all that an address space can have: a step for each would take days.
#[test]
fn a_run_of_zeros_costs_the_same_whatever_its_length() {
    let region = region(8 << 20);
    let (first, pages) = (7_u64, (1_u64 << 45) - 7);
    let mut shadow = region.begin();
    let mut map = shadow.map();
    map.watch();
    // In two parts, the first of them a page that was sent.
    shadow
        .append(&mut map, first, 1, &[0; PAGE_SIZE], None)
        .unwrap();
    shadow
        .append_zeros(&mut map, first + 1, 1, pages - 1)
        .unwrap();
    let pieces: Vec<_> = map.pieces().collect();
    assert_eq!((pieces.len(), pieces[0].pages), (1, pages));
    let (root, stats) = shadow.finish(map).unwrap();
    assert_eq!((stats.pages, stats.zero, stats.stored), (pages, pages, 0));
    let parent = shadow.seal(CheckpointId::random(), b"", None).unwrap();
    assert_eq!(parent.map(&root).digest().unwrap(), stats.digest);

    // Referred to as the parent's.
    let mut shadow = region.begin();
    let mut map = shadow.map();
    let mut cursor = parent.map(&root).cursor();
    shadow
        .reference(&mut map, first, pages, &mut cursor)
        .unwrap();
    let (_, again) = shadow.finish(map).unwrap();
    assert_eq!((again.digest, again.parent), (stats.digest, pages));
}

fn shadow_map(region: &Arc<Region>, first_index: u64, flags: u16, bytes: &[u8]) -> MapStats {
    let mut shadow = region.begin();
    let mut map = shadow.map();
    shadow
        .append(&mut map, first_index, flags, bytes, None)
        .unwrap();
    shadow.finish(map).unwrap().1
}

/// Writes objects whose pages are given by salts, from index 5 on; returns their roots and statistics.
fn siblings(shadow: &mut Shadow, objects: &[&[u8]]) -> Vec<(MapRoot, MapStats)> {
    let write = |salts: &&[u8]| {
        let mut map = shadow.map();
        map.share_with_siblings();
        shadow.append(&mut map, 5, 1, &pages(salts), None).unwrap();
        shadow.finish(map).unwrap()
    };
    objects.iter().map(write).collect()
}

#[test]
fn pages_of_several_objects_at_one_index_are_stored_once() {
    let region = region(4 << 20);
    let mut shadow = region.begin();
    let objects: [&[u8]; 4] = [
        &[1, 2, 3, 0, 4],
        &[1, 9, 3, 0, 4, 7],
        // The same pages at other places are others; a zero page is none.
        &[2, 1, 4, 3, 0],
        &[1, 9, 0, 3, 4, 7],
    ];
    let written = siblings(&mut shadow, &objects);
    let counts: Vec<_> = written.iter().map(|(_, s)| (s.stored, s.sibling)).collect();
    assert_eq!(counts, [(4, 0), (2, 3), (4, 0), (0, 5)]);
    // An object that does not ask for it is stored as a whole.
    let mut map = shadow.map();
    shadow
        .append(&mut map, 5, 1, &pages(&[1, 2]), None)
        .unwrap();
    let (_, stats) = shadow.finish(map).unwrap();
    assert_eq!((stats.stored, stats.sibling), (2, 0));
    let id = CheckpointId::random();
    let first = shadow.seal(id, b"m", None).unwrap();
    for ((root, _), salts) in written.iter().zip(objects) {
        let expected = pages(salts);
        let found: Vec<u8> = content(&first, root)
            .into_iter()
            .flat_map(|p| p.2)
            .collect();
        assert!(found == expected);
    }

    // The next generation has a process more, which was forked from the first one: its pages are the parent's.
    let mut shadow = region.begin();
    let mut map = shadow.map();
    map.share_with_siblings();
    let mut parent = first.map(&written[0].0).cursor();
    shadow
        .append(&mut map, 5, 1, &pages(&[1, 2, 8]), Some(&mut parent))
        .unwrap();
    drop(parent);
    let (root, stats) = shadow.finish(map).unwrap();
    assert_eq!((stats.stored, stats.parent, stats.sibling), (1, 2, 0));
    let forked = siblings(&mut shadow, &[&[1, 2, 8, 6]]);
    assert_eq!((forked[0].1.stored, forked[0].1.sibling), (1, 3));
    let second = shadow.seal(CheckpointId::random(), b"m", Some(id)).unwrap();
    drop(first);
    for (root, salts) in [(root, &[1, 2, 8][..]), (forked[0].0, &[1, 2, 8, 6])] {
        let found: Vec<u8> = content(&second, &root)
            .into_iter()
            .flat_map(|p| p.2)
            .collect();
        assert!(found == pages(salts));
    }
}
