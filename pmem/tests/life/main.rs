//! A region's ordinary life on a plain file: dump, seal, read back, delete, open again.

#![allow(missing_docs, clippy::cast_possible_truncation)]

mod maps;
mod media;

use std::sync::Arc;

use permafrost_pmem::{
    ATTR_PINNED, CheckpointId, FormatOptions, JournalError, MapRoot, MediumError, MediumKind,
    OpenError, OpenOptions, PAGE_SIZE, Region, RunKind, SealError, ShadowError, StoredCheckpoint,
    create_medium_in_memory, open_medium,
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
