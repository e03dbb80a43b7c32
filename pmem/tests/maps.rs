//! Maps that share nodes with their parent's: the same content, counts and digest whichever way they came about.

#![allow(missing_docs, clippy::cast_possible_truncation)]

use std::collections::BTreeMap;
use std::sync::Arc;

use permafrost_medium::Medium;
use permafrost_medium::sim::{SimMedium, mix};
use permafrost_pmem::{
    CheckpointId, FormatOptions, Kept, MapRoot, MapStats, MapWriter, PAGE_SIZE, Piece, Region,
    RunKind, Shadow, StoredCheckpoint, create_medium_in_memory,
};

const FORMAT: FormatOptions = FormatOptions {
    segment_bytes: 64 << 10,
    journal_records: Some(1024),
    uuid: None,
};

/// Flags and salt of each page; a page of salt 0 is zero.
type Content = BTreeMap<u64, (u16, u64)>;

fn page(salt: u64) -> Vec<u8> {
    let words = (0..PAGE_SIZE as u64 / 8).map(|i| if salt == 0 { 0 } else { mix(salt << 16 | i) });
    words.flat_map(u64::to_le_bytes).collect()
}

fn region(bytes: u64) -> Arc<Region> {
    let medium = create_medium_in_memory(bytes).unwrap();
    Region::format(Arc::clone(&medium), &FORMAT).unwrap();
    Region::open(medium).unwrap().0
}

fn roots(checkpoint: &Arc<StoredCheckpoint>) -> Option<Vec<MapRoot>> {
    let manifest = checkpoint.manifest().ok()?;
    Some(vec![MapRoot::try_from(manifest.as_slice()).ok()?])
}

fn root(checkpoint: &Arc<StoredCheckpoint>) -> MapRoot {
    roots(checkpoint).unwrap()[0]
}

fn seal(shadow: Shadow, root: &MapRoot, id: u128) -> Arc<StoredCheckpoint> {
    let id = CheckpointId::new(id);
    shadow.seal(id, &root.to_bytes(), None).unwrap()
}

fn read(checkpoint: &Arc<StoredCheckpoint>, mut of_salt: impl FnMut(u64, &[u8]) -> u64) -> Content {
    let map = checkpoint.map(&root(checkpoint));
    let mut content = Content::new();
    for run in map.runs().map(Result::unwrap) {
        let bytes = map.read(&run).unwrap();
        for (nth, index) in (run.first_index..run.end_index()).enumerate() {
            let salt = match run.kind {
                RunKind::Zero => 0,
                RunKind::Stored { .. } => of_salt(index, &bytes[nth * PAGE_SIZE..][..PAGE_SIZE]),
            };
            content.insert(index, (run.flags, salt));
        }
    }
    content
}

fn check(checkpoint: &Arc<StoredCheckpoint>, content: &Content, stats: &MapStats) {
    let found = read(checkpoint, |index, bytes| {
        let salt = content[&index].1;
        assert!(bytes == page(salt), "page {index}");
        salt
    });
    assert_eq!(&found, content);
    let map = checkpoint.map(&root(checkpoint));
    let extents = map.extents().map(Result::unwrap);
    let listed = extents.flat_map(|extent| {
        let indices = extent.first_index..extent.first_index + extent.pages;
        indices.map(move |index| (index, extent.flags))
    });
    assert!(listed.eq(content.iter().map(|(&index, &(flags, _))| (index, flags))));
    assert_eq!(stats.pages, content.len() as u64);
    assert_eq!(
        (map.root().pages(), map.digest().unwrap()),
        (stats.pages, stats.digest)
    );
}

struct Random(u64);

impl Random {
    fn below(&mut self, below: u64) -> u64 {
        self.0 = mix(self.0.wrapping_add(0x9e37_79b9_7f4a_7c15));
        self.0 % below
    }
}

/// Appends the content from the parent on: holes, pages that may be equal, zeros, gaps. Returns the new content, and
/// what a copy is sent: the pieces with the pages of those that were stored.
fn delta(
    random: &mut Random,
    shadow: &mut Shadow,
    parent: Option<&(Arc<StoredCheckpoint>, Content)>,
) -> (MapWriter, Content, Vec<Piece>) {
    let (mut w, mut content, mut pieces) = (shadow.map(), Content::new(), Vec::new());
    w.watch();
    let mut cursor = parent.map(|(parent, _)| parent.map(&root(parent)).cursor());
    let nothing = Content::new();
    let old = parent.map_or(&nothing, |(_, old)| old);
    // Around a boundary of blocks of each size.
    for base in [0, (1 << 33) - 300, u64::MAX - 600] {
        let end = base + 590;
        let mut index = base;
        while index < end {
            let most = if random.below(3) == 0 { 200 } else { 8 };
            let len = 1 + random.below(most);
            let len = len.min(end - index);
            let flags = random.below(12) as u16 / 11;
            match random.below(8) {
                0 => index += len,
                1 => {
                    shadow.append_zeros(&mut w, index, flags, len).unwrap();
                    content.extend((index..index + len).map(|index| (index, (flags, 0))));
                    index += len;
                }
                2 => {
                    let salt = random.below(3) * (1 + random.below(1 << 40));
                    shadow
                        .append(&mut w, index, flags, &page(salt), cursor.as_mut())
                        .unwrap();
                    content.insert(index, (flags, salt));
                    index += 1;
                }
                // Taken over where the parent has it: by a hole, or compared.
                way => {
                    let all = old.range(index..index + len).take_while({
                        let mut next = index;
                        move |(index, _)| std::mem::replace(&mut next, **index + 1) == **index
                    });
                    let all: Content = all.map(|(index, page)| (*index, *page)).collect();
                    let taken = all.len() as u64;
                    let Some(cursor) = cursor.as_mut().filter(|_| taken > 0) else {
                        index += len;
                        continue;
                    };
                    if way < 6 {
                        shadow.reference(&mut w, index, taken, cursor).unwrap();
                    } else {
                        for (index, (flags, salt)) in &all {
                            shadow
                                .append(&mut w, *index, *flags, &page(*salt), Some(cursor))
                                .unwrap();
                        }
                    }
                    content.extend(all);
                    index += taken;
                }
            }
            pieces.extend(w.pieces());
        }
    }
    (w, content, pieces)
}

/// Makes a copy as another node does: from the pieces of the dump, and its own copy of the parent.
fn copy(
    region: &Arc<Region>,
    pieces: &[Piece],
    content: &Content,
    parent: Option<&Arc<StoredCheckpoint>>,
    id: u128,
) -> (Arc<StoredCheckpoint>, MapStats) {
    let mut shadow = region.begin();
    let mut w = shadow.map();
    let mut cursor = parent.map(|parent| parent.map(&root(parent)).cursor());
    for piece in pieces {
        let (first, pages, flags) = (piece.first_index, piece.pages, piece.flags);
        match (piece.kept, cursor.as_mut()) {
            (Kept::Zero, _) => shadow.append_zeros(&mut w, first, flags, pages).unwrap(),
            (Kept::Parent, Some(cursor)) => {
                shadow
                    .reference_as(&mut w, first, flags, pages, cursor)
                    .unwrap();
            }
            _ => {
                for index in first..first + pages {
                    let bytes = page(content[&index].1);
                    shadow.append(&mut w, index, flags, &bytes, None).unwrap();
                }
            }
        }
    }
    let (root, stats) = shadow.finish(w).unwrap();
    (seal(shadow, &root, id), stats)
}

#[test]
fn deltas_equal_a_plain_model_and_have_the_digest_of_a_full_dump_and_of_a_copy() {
    let seed: u64 = std::env::var("PERMAFROST_SEED").map_or(0x7ee, |seed| seed.parse().unwrap());
    println!("PERMAFROST_SEED={seed}");
    let mut random = Random(seed);
    for chain in 0..12 {
        let (here, there, anew) = (region(96 << 20), region(96 << 20), region(48 << 20));
        let mut parent: Option<(Arc<StoredCheckpoint>, Content)> = None;
        let mut copied: Option<Arc<StoredCheckpoint>> = None;
        let mut seen = BTreeMap::new();
        for id in 1..=10 {
            let mut shadow = here.begin();
            let (w, content, pieces) = delta(&mut random, &mut shadow, parent.as_ref());
            let (root, stats) = shadow.finish(w).unwrap();
            let checkpoint = seal(shadow, &root, id);
            check(&checkpoint, &content, &stats);
            let (copy, of_copy) = copy(&there, &pieces, &content, copied.as_ref(), id);
            check(&copy, &content, &of_copy);

            let mut shadow = anew.begin();
            let mut w = shadow.map();
            for (&index, &(flags, salt)) in &content {
                shadow
                    .append(&mut w, index, flags, &page(salt), None)
                    .unwrap();
            }
            let (_, full) = shadow.finish(w).unwrap();
            assert_eq!(full.digest, stats.digest, "chain {chain}, {id}");
            assert_eq!(full.digest, of_copy.digest, "chain {chain}, {id}");
            if let Some(other) = seen.insert(full.digest, content.clone()) {
                assert_eq!(other, content);
            }
            (parent, copied) = (Some((checkpoint, content)), Some(copy));
            // The parents' segments must be held by those that share nodes with them.
            for region in [&here, &there] {
                if id > 1 && random.below(2) == 0 {
                    region.delete(CheckpointId::new(id - 1)).unwrap();
                }
            }
        }
    }
}

/// Dumps `pages` pages, of which those in `changed` have another content than the parent's, by holes.
fn dump(
    region: &Arc<Region>,
    id: u128,
    pages: u64,
    changed: &[u64],
    parent: Option<&Arc<StoredCheckpoint>>,
) -> (Arc<StoredCheckpoint>, MapStats, u64) {
    let mut shadow = region.begin();
    let mut w = shadow.map();
    let mut cursor = parent.map(|parent| parent.map(&root(parent)).cursor());
    let mut index = 0;
    for &next in changed.iter().chain([&pages]) {
        if let Some(cursor) = cursor.as_mut() {
            shadow
                .reference(&mut w, index, next - index, cursor)
                .unwrap();
        }
        if next < pages {
            let salt = 1 + next + ((id as u64) << 32);
            shadow.append(&mut w, next, 0, &page(salt), None).unwrap();
        }
        index = next + 1;
    }
    let (root, stats) = shadow.finish(w).unwrap();
    let added = shadow.added_bytes();
    (seal(shadow, &root, id), stats, added)
}

#[test]
fn a_delta_writes_and_hashes_the_path_to_what_changed() {
    const PAGES: u64 = 8_192;
    let region = region(128 << 20);
    let all: Vec<u64> = (0..PAGES).collect();
    let (mut parent, full, _) = dump(&region, 1, PAGES, &all, None);
    // 1,024 leaves, 128, 16 and 2 nodes, and the root.
    assert_eq!(full.nodes, 1_171);
    let mut random = Random(5);
    for id in 2..300 {
        let mut changed: Vec<u64> = (0..8).map(|_| random.below(PAGES)).collect();
        changed.sort_unstable();
        changed.dedup();
        let (next, stats, added) = dump(&region, id, PAGES, &changed, Some(&parent));
        let count = changed.len() as u64;
        assert_eq!((stats.stored, stats.parent), (count, PAGES - count));
        assert!(stats.nodes <= 5 * count, "{} nodes of {count}", stats.nodes);
        // Two pages of nodes at most, however fragmented the map is, and one that the end of a segment leaves unused.
        assert!(added <= (count + 3) * PAGE_SIZE as u64);
        region.delete(parent.id()).unwrap();
        parent = next;
    }
    assert_eq!(read(&parent, |_, _| 1).len() as u64, PAGES);
    // Compared page by page, and all equal: nothing is written, not even a node.
    let mut shadow = region.begin();
    let mut w = shadow.map();
    let map = parent.map(&root(&parent));
    let mut cursor = map.clone().cursor();
    for run in map.runs().map(Result::unwrap) {
        let bytes = map.read(&run).unwrap();
        let at = run.first_index;
        shadow
            .append(&mut w, at, 0, &bytes, Some(&mut cursor))
            .unwrap();
    }
    let (again, stats) = shadow.finish(w).unwrap();
    assert_eq!(
        (again, stats.parent, shadow.added_bytes()),
        (root(&parent), PAGES, 0)
    );
}

/// Otherwise a chain of dumps would hold each segment that an ancestor ever had.
#[test]
fn segments_without_a_live_page_are_not_inherited_for_ever() {
    const PAGES: u64 = 256;
    let region = region(64 << 20);
    let all: Vec<u64> = (0..PAGES).collect();
    let (mut parent, ..) = dump(&region, 1, PAGES, &all, None);
    let mut random = Random(6);
    let mut most = 0;
    for id in 2..400 {
        let first = random.below(PAGES - 30);
        let changed: Vec<u64> = (first..first + 30).collect();
        let (next, ..) = dump(&region, id, PAGES, &changed, Some(&parent));
        region.delete(parent.id()).unwrap();
        parent = next;
        if id % 8 == 0 {
            let mut survey = region.survey(&roots);
            region.clean(&mut survey, u64::MAX).unwrap();
        }
        most = most.max(parent.segments());
    }
    // Each dump fills three segments; a page lives for about ten dumps.
    assert!(most < 150, "{most} segments");
    assert_eq!(read(&parent, |_, _| 1).len() as u64, PAGES);
    drop(region.survey(&roots));
}

#[test]
fn damage_in_a_shared_node_is_that_of_the_checkpoints_that_use_it() {
    const PAGES: u64 = 512;
    let medium = Arc::new(SimMedium::new(8 << 20));
    let shared = || Arc::clone(&medium) as Arc<dyn Medium>;
    Region::format(shared(), &FORMAT).unwrap();
    let (region, _) = Region::open(shared()).unwrap();
    let all: Vec<u64> = (0..PAGES).collect();
    let (first, ..) = dump(&region, 1, PAGES, &all, None);
    let (second, ..) = dump(&region, 2, PAGES, &[100], Some(&first));
    let (third, ..) = dump(&region, 3, PAGES, &[300], Some(&second));
    drop((first, second, third));
    region.close().unwrap();
    let image = medium.image();
    // Leaves begin with the first index of their block and the number of their pages.
    let leaves = |first_index: u64| -> Vec<usize> {
        let begin = [first_index.to_le_bytes(), 8_u64.to_le_bytes()].concat();
        let places = image.windows(16).enumerate();
        places
            .filter(|(_, bytes)| *bytes == begin)
            .map(|(at, _)| at)
            .collect()
    };
    let readable = |region: &Region, id: u128, index: u64| {
        let checkpoint = region.checkpoint(CheckpointId::new(id)).unwrap();
        let map = checkpoint.map(&root(&checkpoint));
        map.lookup(index)
            .is_ok_and(|run| map.read(&run.unwrap()).is_ok())
    };
    // Of the block with page 100 there are two leaves, of that with page 200 a single one. The roots of the second and
    // the third checkpoint contain their nodes, in two copies, of which one will do, also for the one that shares them.
    for (index, of_leaf, damaged) in [
        (100, 0, &[1_u128][..]),
        (100, 1, &[]),
        (100, 2, &[]),
        (200, 0, &[1, 2, 3]),
        (300, 1, &[]),
    ] {
        let at = leaves(index / 8 * 8)[of_leaf];
        let mut flipped = image.clone();
        flipped[at + 60] ^= 1;
        let (region, _) = Region::open(Arc::new(SimMedium::from_image(&flipped))).unwrap();
        for id in 1..=3 {
            assert_eq!(
                readable(&region, id, index),
                !damaged.contains(&id),
                "{index} {id}"
            );
            assert!(readable(&region, id, index ^ 8));
        }
        // A hole over it is taken without reading it: its pages and their digest are those of the parent.
        let parent = region.checkpoint(CheckpointId::new(3)).unwrap();
        let (child, stats, _) = dump(&region, 4, PAGES, &[400], Some(&parent));
        assert_eq!(stats.parent, PAGES - 1);
        assert_eq!(readable(&region, 4, index), !damaged.contains(&3));
        assert_eq!(
            child.map(&root(&child)).digest().is_ok(),
            !damaged.contains(&3)
        );
    }

    // A data page that all share is healed for all of them.
    let (region, _) = Region::open(Arc::new(SimMedium::from_image(&image))).unwrap();
    let checkpoint = region.checkpoint(CheckpointId::new(1)).unwrap();
    let RunKind::Stored { location, .. } = checkpoint
        .map(&root(&checkpoint))
        .lookup(200)
        .unwrap()
        .unwrap()
        .kind
    else {
        panic!("a stored page")
    };
    let mut flipped = image.clone();
    flipped[location.value() as usize * PAGE_SIZE + 9] ^= 1;
    let (region, _) = Region::open(Arc::new(SimMedium::from_image(&flipped))).unwrap();
    assert!((1..=3).all(|id| !readable(&region, id, 200)));
    let third = region.checkpoint(CheckpointId::new(3)).unwrap();
    let good: [u8; PAGE_SIZE] = page(201 + (1 << 32)).try_into().unwrap();
    assert!(third.map(&root(&third)).heal_page(200, &good).unwrap());
    assert!((1..=3).all(|id| readable(&region, id, 200)));
}
