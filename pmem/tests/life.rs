//! A region's ordinary life on a plain file: dump, seal, read back, delete, open again.

#![allow(missing_docs, clippy::cast_possible_truncation)]

use std::sync::Arc;

use permafrost_pmem::{
    ATTR_PINNED, CheckpointId, FormatOptions, JournalError, Kept, MapRoot, MapStats, MediumError,
    MediumKind, OpenError, OpenOptions, PAGE_SIZE, PageError, Region, RunKind, SealError, Shadow,
    ShadowError, StoredCheckpoint, create_medium_in_memory, open_medium,
};

const SMALL: FormatOptions = FormatOptions {
    segment_bytes: 64 << 10,
    journal_records: Some(32),
    uuid: None,
};

fn region(bytes: u64) -> Arc<Region> {
    let medium = create_medium_in_memory(bytes).unwrap();
    Region::format(Arc::clone(&medium), &SMALL).unwrap();
    Region::open(medium).unwrap().0
}

/// Pages of recognisable content; `salt` 0 makes zero pages.
fn pages(salts: &[u8]) -> Vec<u8> {
    salts
        .iter()
        .flat_map(|&s| {
            (0..PAGE_SIZE).map(move |i| if s == 0 { 0 } else { s ^ (i % 251) as u8 | 1 })
        })
        .collect()
}

/// Returns a map's content, page by page.
fn content(checkpoint: &Arc<StoredCheckpoint>, root: &MapRoot) -> Vec<(u64, u16, Vec<u8>)> {
    let map = checkpoint.map(root);
    let mut all = Vec::new();
    for run in map.runs() {
        let run = run.unwrap();
        let bytes = match run.kind {
            RunKind::Zero => vec![0; run.pages as usize * PAGE_SIZE],
            RunKind::Stored { .. } => map.read(&run).unwrap().to_vec(),
        };
        for (page, index) in bytes.chunks(PAGE_SIZE).zip(run.first_index..) {
            all.push((index, run.flags, page.to_vec()));
        }
    }
    all
}

#[test]
fn a_checkpoint_survives_close_and_open() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("region");
    let options = OpenOptions::default();
    let id = CheckpointId::random();
    let root = {
        let medium = open_medium(&path, 4 << 20, &options).unwrap();
        assert_eq!(medium.kind(), MediumKind::File);
        assert!(medium.guarantee().dax_errno.is_some());
        assert!(matches!(
            open_medium(&path, 0, &options),
            Err(MediumError::InUse { .. })
        ));
        assert!(matches!(
            Region::open(Arc::clone(&medium)),
            Err(OpenError::NotARegion)
        ));
        Region::format(Arc::clone(&medium), &SMALL).unwrap();
        let (region, report) = Region::open(medium).unwrap();
        assert!(report.clean);
        let mut shadow = region.begin();
        let mut map = shadow.map();
        shadow
            .append(&mut map, 0x10, 3, &pages(&[1, 0, 0, 2]), None)
            .unwrap();
        shadow
            .append(&mut map, 0x100, 3, &pages(&[3; 40]), None)
            .unwrap();
        let (root, stats) = shadow.finish(map).unwrap();
        assert_eq!(
            (stats.pages, stats.stored, stats.zero, stats.parent),
            (44, 42, 2, 0)
        );
        let checkpoint = shadow.seal(id, b"manifest", None).unwrap();
        assert_eq!(checkpoint.manifest().unwrap(), b"manifest");
        region.set_attrs(id, ATTR_PINNED).unwrap();
        region.close().unwrap();
        assert!(matches!(region.delete(id), Err(JournalError::Closed)));
        root
    };
    use std::os::unix::fs::MetadataExt;
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    let (region, report) = Region::open(open_medium(&path, 0, &options).unwrap()).unwrap();
    assert!(report.clean && report.unsafe_shutdowns == 0 && report.checkpoints == 1);
    let checkpoint = region.checkpoint(id).unwrap();
    assert_eq!(checkpoint.attrs(), ATTR_PINNED);
    assert_eq!(checkpoint.manifest().unwrap(), b"manifest");
    let root = MapRoot::try_from(root.to_bytes().as_slice()).unwrap();
    let read = content(&checkpoint, &root);
    assert_eq!(read.len(), 44);
    assert_eq!(read[0], (0x10, 3, pages(&[1])));
    assert_eq!(read[1], (0x11, 3, pages(&[0])));
    assert_eq!(read[3], (0x13, 3, pages(&[2])));
    assert_eq!(read[43], (0x127, 3, pages(&[3])));
    drop(checkpoint);
    drop(region);
    let (_, report) = Region::open(open_medium(&path, 0, &options).unwrap()).unwrap();
    assert!(!report.clean && report.unsafe_shutdowns == 1);
}

#[test]
fn equal_pages_are_stored_once_and_outlive_their_parent() {
    let region = region(4 << 20);
    let mut shadow = region.begin();
    let mut map = shadow.map();
    shadow
        .append(&mut map, 0, 0, &pages(&[1, 2, 0, 4, 5, 6]), None)
        .unwrap();
    let (root, _) = shadow.finish(map).unwrap();
    let parent = CheckpointId::new(1);
    let first = shadow.seal(parent, b"", None).unwrap();

    let mut shadow = region.begin();
    let mut map = shadow.map();
    let mut cursor = first.map(&root).cursor();
    shadow
        .append(&mut map, 0, 0, &pages(&[1, 9, 0]), Some(&mut cursor))
        .unwrap();
    shadow.reference(&mut map, 3, 2, &mut cursor).unwrap();
    shadow
        .append(&mut map, 5, 0, &pages(&[6, 7]), Some(&mut cursor))
        .unwrap();
    drop(cursor);
    let (child_root, stats) = shadow.finish(map).unwrap();
    assert_eq!(
        (stats.pages, stats.stored, stats.zero, stats.parent),
        (7, 2, 1, 4)
    );
    drop(first);
    region.delete(parent).unwrap();
    assert!(region.checkpoint(parent).is_none());
    let child = shadow.seal(CheckpointId::new(2), b"child", None).unwrap();
    assert_eq!(child.segments(), 1, "it begins in the parent's segment");
    let expected = pages(&[1, 9, 0, 4, 5, 6, 7]);
    let read: Vec<u8> = content(&child, &child_root)
        .into_iter()
        .flat_map(|(_, _, p)| p)
        .collect();
    assert!(read == expected);
    assert_eq!(region.exclusive_bytes(&child), 64 << 10);

    let (medium, id) = (Arc::clone(region.medium()), child.id());
    drop((region, child));
    let (region, _) = Region::open(medium).unwrap();
    let child = region.checkpoint(id).unwrap();
    let read: Vec<u8> = content(&child, &child_root)
        .into_iter()
        .flat_map(|(_, _, p)| p)
        .collect();
    assert!(read == expected);
    let usage = region.usage();
    assert_eq!(usage.free_bytes, usage.capacity_bytes - (64 << 10));
}

#[test]
fn holes_that_the_parent_lacks_are_refused() {
    let region = region(2 << 20);
    let mut shadow = region.begin();
    let mut map = shadow.map();
    shadow
        .append(&mut map, 10, 0, &pages(&[1, 2]), None)
        .unwrap();
    let (root, _) = shadow.finish(map).unwrap();
    let first = shadow.seal(CheckpointId::new(1), b"", None).unwrap();
    for (index, pages, missing) in [
        (9, 2, 9),
        (10, 3, 12),
        (12, 1, 12),
        (u64::MAX - 1, 1, u64::MAX - 1),
    ] {
        let mut shadow = region.begin();
        let mut map = shadow.map();
        let refused = shadow.reference(&mut map, index, pages, &mut first.map(&root).cursor());
        assert!(
            matches!(refused, Err(ShadowError::MissingInParent { index }) if index == missing),
            "{refused:?}"
        );
    }
    let mut shadow = region.begin();
    let mut map = shadow.map();
    shadow
        .append(&mut map, 10, 0, &pages(&[1, 2]), None)
        .unwrap();
    for index in [0, 11] {
        let refused = shadow.append(&mut map, index, 0, &pages(&[1]), None);
        assert!(
            matches!(refused, Err(ShadowError::NotAscending { expected: 12, .. })),
            "{refused:?}"
        );
    }
    let refused = shadow.append(&mut map, u64::MAX, 0, &pages(&[1]), None);
    assert!(
        matches!(refused, Err(ShadowError::TooManyPages { .. })),
        "{refused:?}"
    );
    assert!(matches!(
        shadow.append(&mut map, 50, 0, &[1], None),
        Err(ShadowError::NotPages { .. })
    ));
}

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

#[test]
fn blobs_keep_their_length() {
    let region = region(2 << 20);
    for len in [0, 1, 4095, 4096, 4097, 300_000] {
        let blob: Vec<u8> = (0..len)
            .map(|i| {
                if i / 5000 % 3 == 1 {
                    0
                } else {
                    (i % 255) as u8
                }
            })
            .collect();
        let mut shadow = region.begin();
        let (root, _, written) = shadow.write_blob(&mut blob.as_slice()).unwrap();
        assert_eq!(written, len);
        let sealed = shadow.seal(CheckpointId::new(1), &blob, None).unwrap();
        let mut read = Vec::new();
        let map = sealed.map(&root);
        map.read_blob(0, len, |bytes| {
            read.extend_from_slice(bytes);
            Ok(())
        })
        .unwrap();
        assert!(read == blob && sealed.manifest().unwrap() == blob, "{len}");
        assert!(map.read_blob(0, len + 4096, |_| Ok(())).is_err());
        region.delete(CheckpointId::new(1)).unwrap();
    }
}

#[test]
fn a_full_region_says_so_and_a_dropped_shadow_frees_it() {
    let region = region(1 << 20);
    let before = region.usage();
    let mut shadow = region.begin();
    let mut map = shadow.map();
    let full = (0..).find_map(|i| {
        shadow
            .append(&mut map, i * 8, 0, &pages(&[1; 8]), None)
            .err()
    });
    assert!(
        matches!(full, Some(ShadowError::Full { free: 0, .. })),
        "{full:?}"
    );
    assert_eq!(region.usage().free_bytes, 0);
    let refused = region.begin().seal(CheckpointId::new(1), b"x", None);
    assert!(matches!(
        refused,
        Err(SealError::Shadow(ShadowError::Full { .. }))
    ));
    drop((shadow, map));
    assert_eq!(region.usage(), before);
    region
        .begin()
        .seal(CheckpointId::new(1), b"x", None)
        .unwrap();
}

#[test]
fn segments_are_not_reused_under_a_reader() {
    let region = region(1 << 20);
    let mut shadow = region.begin();
    let mut map = shadow.map();
    shadow
        .append(&mut map, 0, 0, &pages(&[5; 20]), None)
        .unwrap();
    let (root, _) = shadow.finish(map).unwrap();
    let reader = shadow
        .seal(CheckpointId::new(1), b"", None)
        .unwrap()
        .map(&root);
    let run = reader.runs().next().unwrap().unwrap();
    let lent = reader.read(&run).unwrap();
    region.delete(CheckpointId::new(1)).unwrap();
    let used = region.usage();
    let mut shadow = region.begin();
    let mut map = shadow.map();
    while shadow
        .append(&mut map, shadow.added_bytes(), 0, &pages(&[6]), None)
        .is_ok()
    {}
    assert!(lent == &pages(&[5; 20])[..lent.len()]);
    assert!(used.free_bytes < used.capacity_bytes);
    drop((reader, shadow, map));
    let usage = region.usage();
    assert_eq!(usage.free_bytes, usage.capacity_bytes);
}

#[test]
fn seals_and_replacements_are_checked() {
    let region = region(1 << 20);
    let (a, b, c) = (
        CheckpointId::new(1),
        CheckpointId::new(2),
        CheckpointId::new(3),
    );
    region.begin().seal(a, b"a", None).unwrap();
    assert!(matches!(region.begin().seal(a, b"", None), Err(SealError::Exists { id }) if id == a));
    let unknown = region.begin().seal(b, b"", Some(c));
    assert!(matches!(unknown, Err(SealError::Journal(JournalError::Unknown { id })) if id == c));
    let parked = region.checkpoint(a).unwrap();
    let mut shadow = region.begin();
    shadow.inherit(&parked);
    shadow.seal(b, b"b", Some(a)).unwrap();
    assert!(region.checkpoint(a).is_none());
    assert!(matches!(
        region.delete(a),
        Err(JournalError::Unknown { .. })
    ));
    assert!(matches!(
        region.set_attrs(a, 1),
        Err(JournalError::Unknown { .. })
    ));
    assert_eq!(
        region
            .checkpoints()
            .iter()
            .map(|c| c.id())
            .collect::<Vec<_>>(),
        [b]
    );
    drop(parked);
    assert_eq!(region.checkpoint(b).unwrap().segments(), 1);
}

#[test]
fn a_small_journal_is_compacted_and_fills_up() {
    let region = region(4 << 20);
    let id = |n: u32| CheckpointId::new(u128::from(n));
    for n in 0..200 {
        region.begin().seal(id(n), &n.to_le_bytes(), None).unwrap();
        if n >= 20 {
            region.delete(id(n - 20)).unwrap();
        }
        if n % 7 == 0 {
            region.set_attrs(id(n), n).unwrap();
        }
    }
    let mut n = 200;
    let full = loop {
        match region.begin().seal(id(n), &n.to_le_bytes(), None) {
            Ok(_) => n += 1,
            Err(error) => break error,
        }
    };
    assert!(
        matches!(full, SealError::Journal(JournalError::Full { records: 32 })),
        "{full}"
    );
    assert_eq!(region.checkpoints().len(), 30);
    let medium = Arc::clone(region.medium());
    drop(region);
    let (region, report) = Region::open(medium).unwrap();
    assert_eq!(report.checkpoints, 30);
    for (checkpoint, expected) in region.checkpoints().iter().zip(180_u32..) {
        assert_eq!(checkpoint.manifest().unwrap(), expected.to_le_bytes());
        assert_eq!(checkpoint.id(), id(expected));
        assert_eq!(
            checkpoint.attrs(),
            if expected % 7 == 0 && expected < 200 {
                expected
            } else {
                0
            }
        );
    }
    for checkpoint in region.checkpoints() {
        region.set_attrs(checkpoint.id(), 0).unwrap();
        region.delete(checkpoint.id()).unwrap();
    }
    let usage = region.usage();
    assert_eq!(usage.free_bytes, usage.capacity_bytes);
}

#[test]
fn a_file_that_is_anothers_or_open_to_others_is_no_region() {
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("region");
    let options = OpenOptions::default();
    let open = || open_medium(&path, 1 << 20, &options).map(drop);
    open().unwrap();
    for mode in [0o644, 0o640, 0o606, 0o610] {
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let refused = open().unwrap_err();
        assert!(
            matches!(refused, MediumError::OpenToOthers { mode: found, .. } if found == mode),
            "{refused}"
        );
        assert!(refused.to_string().contains("chmod 0600"), "{refused}");
    }
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    open().unwrap();
    if std::fs::metadata(&path).unwrap().uid() == 0 {
        // Owned by `nobody`, as a file that another user put there.
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        let refused = open().unwrap_err();
        assert!(
            matches!(
                refused,
                MediumError::ForeignOwner {
                    owner: 65534,
                    user: 0,
                    ..
                }
            ),
            "{refused}"
        );
    }
}

#[test]
fn a_medium_is_left_out_of_core_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a-region-of-its-own");
    let _medium = open_medium(&path, 1 << 20, &OpenOptions::default()).unwrap();
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mappings: Vec<_> = maps.split("a-region-of-its-own").skip(1).collect();
    assert!(!mappings.is_empty(), "it is mapped");
    for mapping in mappings {
        let flags = mapping
            .lines()
            .find_map(|line| line.strip_prefix("VmFlags:"));
        assert!(
            flags.unwrap().split_whitespace().any(|flag| flag == "dd"),
            "{flags:?}"
        );
    }
}

#[test]
fn splice_takes_verified_pages_from_the_mediums_file() {
    use std::os::unix::fs::FileExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("region");
    let medium = open_medium(&path, 2 << 20, &OpenOptions::default()).unwrap();
    Region::format(Arc::clone(&medium), &SMALL).unwrap();
    let (region, _) = Region::open(medium).unwrap();
    let mut shadow = region.begin();
    let mut map = shadow.map();
    // Longer than a segment, with zeros: runs in two segments, between pages of nodes, and one that is stored nowhere.
    let salts: Vec<u8> = (1..=20).chain([0, 0]).collect();
    shadow
        .append(&mut map, 0x10, 3, &pages(&salts), None)
        .unwrap();
    let (root, _) = shadow.finish(map).unwrap();
    let checkpoint = shadow.seal(CheckpointId::new(1), b"", None).unwrap();
    let map = checkpoint.map(&root);
    let runs: Vec<_> = map.runs().map(Result::unwrap).collect();
    assert_eq!(runs.len(), 5);
    for run in &runs {
        let expected = map.read(run).unwrap().to_vec();
        let source = map.splice_source(run).unwrap();
        if run.kind == RunKind::Zero {
            assert!(source.is_none());
            continue;
        }
        let (file, at) = source.expect("a medium with a file");
        let (read, write) = rustix::pipe::pipe().unwrap();
        let mut spliced = Vec::new();
        for page in 0..u64::from(run.pages) {
            let mut from = at + page * PAGE_SIZE as u64;
            let flags = rustix::pipe::SpliceFlags::empty();
            let moved = rustix::pipe::splice(file, Some(&mut from), &write, None, PAGE_SIZE, flags)
                .unwrap();
            assert_eq!(moved, PAGE_SIZE);
            let mut page = [0; PAGE_SIZE];
            std::io::Read::read_exact(
                &mut std::fs::File::from(read.try_clone().unwrap()),
                &mut page,
            )
            .unwrap();
            spliced.extend_from_slice(&page);
        }
        assert!(spliced == expected, "{run:?}");
    }

    // A damaged page is not handed out, nor are its neighbours in the run; other runs are.
    let (_, at) = map.splice_source(&runs[0]).unwrap().unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(b"X", at + PAGE_SIZE as u64 + 5).unwrap();
    let refused = map.splice_source(&runs[0]).map(|_| ());
    assert!(
        matches!(refused, Err(PageError::Corrupt { index: 0x11, .. })),
        "{refused:?}"
    );
    assert!(map.splice_source(&runs[1]).unwrap().is_some());
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
