//! Damage on the medium: served by the other copy, or refused with name and place; never wrong data, never a panic,
//! never a write to a region that was refused.

#![allow(missing_docs, clippy::cast_possible_truncation)]

mod journal;
mod roots;

use std::fs::Permissions;
use std::mem::offset_of;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use permafrost_pmem::layout::{
    FORMAT_VERSION, NodeHeader, RECORD_BYTES, ROOT_MAGIC, SEGMENT_MAGIC, SUPERBLOCK_MAGIC,
    SlotEntry, Superblock,
};
use permafrost_pmem::sim::{SimMedium, mix};
use permafrost_pmem::{
    CheckpointId, FormatOptions, MapRoot, Medium, OpenError, OpenOptions, PAGE_SIZE, PageError,
    RecoveryReport, Region, RunKind, SuperblockFault, open_medium,
};

const FORMAT: FormatOptions = FormatOptions {
    segment_bytes: 64 << 10,
    journal_records: Some(32),
    uuid: None,
};
const CAPACITY: usize = 6 * (64 << 10);
const PAGES: u64 = 20;
/// Bytes of a copy of a journal half: a page, half of which is used.
const HALF: usize = PAGE_SIZE;
/// Bytes of the journal: two halves, and behind them their second copies.
const JOURNAL: std::ops::Range<usize> = 2 * PAGE_SIZE..2 * PAGE_SIZE + 4 * HALF;

/// Returns the offsets of both copies of a record of the first half.
fn copies(record: usize) -> [usize; 2] {
    [0, 2 * HALF].map(|copy| JOURNAL.start + copy + record * RECORD_BYTES)
}

fn open(image: &[u8]) -> Result<(Arc<Region>, RecoveryReport), OpenError> {
    let medium = Arc::new(SimMedium::from_image(image));
    let result = Region::open(Arc::clone(&medium) as Arc<dyn Medium>);
    if result.is_err() {
        assert!(medium.image() == image, "refused, and yet written to");
    }
    result
}

fn page(salt: u64) -> Vec<u8> {
    (0..PAGE_SIZE as u64 / 8)
        .flat_map(|i| mix(salt << 32 | i).to_le_bytes())
        .collect()
}

/// Returns a closed region with two checkpoints, the second one's pages partly the first one's; and the map roots.
fn sealed() -> (Vec<u8>, [MapRoot; 2]) {
    let medium = Arc::new(SimMedium::new(CAPACITY));
    let shared = || Arc::clone(&medium) as Arc<dyn Medium>;
    Region::format(shared(), &FORMAT).unwrap();
    let (region, _) = Region::open(shared()).unwrap();
    let mut roots = Vec::new();
    for id in 1..=2 {
        let mut shadow = region.begin();
        let mut map = shadow.map();
        let mut parent = roots.first().map(|root| {
            region
                .checkpoint(CheckpointId::new(1))
                .unwrap()
                .map(root)
                .cursor()
        });
        for index in 0..PAGES {
            let salt = if index % 4 == 0 {
                index + 100 * id
            } else {
                index
            };
            shadow
                .append(&mut map, index, 0, &page(salt), parent.as_mut())
                .unwrap();
        }
        roots.push(shadow.finish(map).unwrap().0);
        shadow
            .seal(CheckpointId::new(id.into()), &id.to_le_bytes(), None)
            .unwrap();
    }
    region.set_attrs(CheckpointId::new(2), 1).unwrap();
    region.close().unwrap();
    (medium.image(), [roots[0], roots[1]])
}

/// Reads everything; pages that are read without an error must be right. Returns true if all could be read.
fn check(region: &Region, roots: &[MapRoot; 2]) -> bool {
    if region.journal_damage().is_some() || !region.damaged().is_empty() {
        return false;
    }
    let found: Vec<_> = region
        .checkpoints()
        .iter()
        .map(|c| (c.id().value(), c.attrs()))
        .collect();
    assert_eq!(found, [(1, 0), (2, 1)]);
    let mut whole = true;
    for (checkpoint, id) in region.checkpoints().iter().zip(1_u64..) {
        match checkpoint.manifest() {
            Ok(manifest) => assert_eq!(manifest, id.to_le_bytes()),
            Err(_) => whole = false,
        }
        let map = checkpoint.map(&roots[id as usize - 1]);
        let mut next = 0;
        for run in map.runs() {
            let Ok(run) = run else {
                whole = false;
                break;
            };
            assert_eq!(run.first_index, next);
            next = run.end_index();
            assert!(matches!(run.kind, RunKind::Stored { .. }) && run.flags == 0);
            match map.read(&run) {
                Ok(bytes) => {
                    for (bytes, index) in bytes.chunks(PAGE_SIZE).zip(run.first_index..) {
                        let salt = if index % 4 == 0 {
                            index + 100 * id
                        } else {
                            index
                        };
                        assert!(bytes == page(salt), "page {index} of {id}");
                    }
                }
                Err(_) => whole = false,
            }
        }
        assert!(!whole || next == PAGES);
    }
    whole
}

#[test]
fn either_superblock_serves_alone() {
    let (image, roots) = sealed();
    for at in [0, PAGE_SIZE] {
        let mut damaged = image.clone();
        damaged[at + offset_of!(Superblock, uuid)] ^= 1;
        let (region, report) = open(&damaged).unwrap();
        assert!(report.superblock_damaged && check(&region, &roots));
        // The damaged one is written at the latest when both states have been gone through.
        region.close().unwrap();
        let mut image = vec![0; CAPACITY];
        region.medium().read(0, &mut image).unwrap();
        assert!(!open(&image).unwrap().1.superblock_damaged);
    }
}

#[test]
fn two_damaged_superblocks_are_refused() {
    let (mut image, _) = sealed();
    image[40] ^= 1;
    image[PAGE_SIZE + 40] ^= 1;
    assert!(matches!(
        open(&image),
        Err(OpenError::BothSuperblocksCorrupt { .. })
    ));
    image[..PAGE_SIZE].fill(0xff);
    assert!(matches!(
        open(&image),
        Err(OpenError::BothSuperblocksCorrupt { .. })
    ));
}

#[test]
fn blank_and_foreign_media_are_no_regions() {
    assert!(matches!(
        open(&vec![0; CAPACITY]),
        Err(OpenError::NotARegion)
    ));
    assert!(matches!(
        open(&vec![0xa5; CAPACITY]),
        Err(OpenError::BothSuperblocksCorrupt { .. })
    ));
    assert!(open(&[0; PAGE_SIZE]).is_err());
    // A user's file that happens to be blank where the second superblock would be.
    let mut foreign = vec![0; CAPACITY];
    foreign[..100].fill(b'x');
    assert!(matches!(
        open(&foreign),
        Err(OpenError::BothSuperblocksCorrupt { .. })
    ));
    // A first superblock that a crash cut short.
    foreign[..100].fill(0);
    foreign[32..48].fill(7);
    assert!(matches!(open(&foreign), Err(OpenError::NotARegion)));
}

#[test]
fn lost_superblocks_are_refused_while_anything_of_a_region_is_left() {
    let (image, _) = sealed();
    let (journal, segments) = (2 * PAGE_SIZE, 64 << 10);
    assert!(image[segments..].starts_with(&SEGMENT_MAGIC));
    let refused = |image: &[u8], what: &str| {
        let error = open(image).map(|_| ()).unwrap_err();
        assert!(
            matches!(
                error,
                OpenError::BothSuperblocksCorrupt {
                    second: SuperblockFault::Blank,
                    ..
                }
            ),
            "{what}: {error}"
        );
    };
    // As by `dd if=/dev/zero bs=8k count=1`.
    let mut blanked = image.clone();
    blanked[..journal].fill(0);
    refused(&blanked, "superblocks blank");
    let mut torn = blanked.clone();
    torn[..8].copy_from_slice(&SUPERBLOCK_MAGIC);
    refused(&torn, "superblock torn");
    let mut no_journal = image.clone();
    no_journal[..segments].fill(0);
    refused(&no_journal, "journal blank, too");
    let mut no_segments = blanked.clone();
    no_segments[segments..].fill(0);
    refused(&no_segments, "segments blank, too");
    // The second half in force, and the extents of the first lost with the superblocks.
    no_segments[journal..journal + HALF].fill(0);
    no_segments[journal + HALF..][..RECORD_BYTES].fill(7);
    refused(&no_segments, "only a header of the second half left");
    // A larger segment size moves the first one, the journal's size does, too.
    for segments in [128 << 10, 5 << 16] {
        let mut later = vec![0; CAPACITY];
        later[segments..segments + 8].copy_from_slice(&SEGMENT_MAGIC);
        refused(&later, "a segment further back");
    }
}

#[test]
fn an_unfinished_first_format_is_no_region() {
    let medium = Arc::new(SimMedium::new(CAPACITY));
    Region::format(Arc::clone(&medium) as Arc<dyn Medium>, &FORMAT).unwrap();
    let mut image = medium.image();
    assert!(image[2 * PAGE_SIZE..][..RECORD_BYTES] != [0; RECORD_BYTES]);
    // The journal is written, but for the header's second copy; the first superblock not at all, or in part.
    image[copies(0)[1]..][..RECORD_BYTES].fill(0);
    image[32..40].fill(0);
    assert!(matches!(open(&image), Err(OpenError::NotARegion)));
    image[..PAGE_SIZE].fill(0);
    assert!(matches!(open(&image), Err(OpenError::NotARegion)));
}

/// Changes a superblock and makes its checksum right again.
fn forge(image: &mut [u8], change: impl Fn(&mut [u8])) {
    for block in [0, PAGE_SIZE] {
        let block = &mut image[block..block + size_of::<Superblock>()];
        change(block);
        let crc = crc32fast::hash(&block[..offset_of!(Superblock, crc32)]);
        block[offset_of!(Superblock, crc32)..].copy_from_slice(&crc.to_le_bytes());
    }
}

#[test]
fn newer_versions_are_refused() {
    let (mut image, _) = sealed();
    forge(&mut image, |b| {
        b[offset_of!(Superblock, version)] = FORMAT_VERSION as u8 + 1
    });
    let refused = open(&image);
    assert!(
        matches!(refused, Err(OpenError::NewerVersion { found, supported: FORMAT_VERSION }) if found == FORMAT_VERSION + 1)
    );
}

#[test]
fn impossible_geometry_is_refused() {
    let (image, _) = sealed();
    for (at, len) in [
        (offset_of!(Superblock, capacity_bytes), 8),
        (offset_of!(Superblock, journal_at), 8),
        (offset_of!(Superblock, segments_at), 8),
        (offset_of!(Superblock, segments), 4),
        (offset_of!(Superblock, segment_bytes), 4),
        (offset_of!(Superblock, journal_records), 4),
    ] {
        for value in [0, 1, 0x7f, 0xff] {
            let mut image = image.clone();
            forge(&mut image, |b| b[at..at + len].fill(value));
            assert!(open(&image).is_err(), "{at} {value:#x}");
        }
    }
}

#[test]
fn a_truncated_file_is_refused_without_a_fault() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("region");
    std::fs::write(&path, sealed().0).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    for len in [CAPACITY - 1, CAPACITY - PAGE_SIZE, 256 << 10] {
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(len as u64).unwrap();
        let medium = open_medium(&path, 0, &OpenOptions::default()).unwrap();
        let refused = Region::open(medium).map(|_| ());
        assert!(
            matches!(refused, Err(OpenError::Truncated { expected, .. }) if expected == CAPACITY as u64)
        );
    }
    std::fs::File::create(&path).unwrap().set_len(1000).unwrap();
    assert!(open_medium(&path, 0, &OpenOptions::default()).is_err());
}

#[test]
fn a_flipped_bit_in_a_page_is_refused_by_index_and_place() {
    let (image, roots) = sealed();
    let (region, _) = open(&image).unwrap();
    for (id, root) in (1..).zip(&roots) {
        let map = region.checkpoint(CheckpointId::new(id)).unwrap().map(root);
        for run in map.runs().map(Result::unwrap) {
            let RunKind::Stored {
                location: first, ..
            } = run.kind
            else {
                continue;
            };
            for page in 0..u64::from(run.pages) {
                let at = first.value() * PAGE_SIZE as u64 + page * PAGE_SIZE as u64;
                let mut damaged = image.clone();
                let byte = at as usize + mix(at) as usize % PAGE_SIZE;
                damaged[byte] ^= 1 << (mix(at) >> 32 & 7);
                let (region, _) = open(&damaged).unwrap();
                let checkpoint = region.checkpoint(CheckpointId::new(id)).unwrap();
                let error = checkpoint.map(root).read(&run).map(|_| ()).unwrap_err();
                let PageError::Corrupt {
                    index, location, ..
                } = &error
                else {
                    panic!("{error}")
                };
                assert_eq!(
                    (*index, location.value() * PAGE_SIZE as u64),
                    (run.first_index + page, at)
                );
                assert!(
                    error
                        .to_string()
                        .contains(&format!("{index:#x} at page {:#x}", location.value())),
                    "{error}"
                );
                // Only the requested pages count.
                for good in (0..u64::from(run.pages)).filter(|&good| good != page) {
                    checkpoint
                        .map(root)
                        .read_range(&run, run.first_index + good, 1)
                        .unwrap();
                }
            }
        }
    }
}

/// Flips a bit of every byte of a range in turn; returns the number of flips after which everything could still be
/// read.
fn flip_each(image: &[u8], range: impl Iterator<Item = usize>, roots: &[MapRoot; 2]) -> usize {
    let mut whole = 0;
    for at in range {
        let mut damaged = image.to_vec();
        damaged[at] ^= 1 << (mix(at as u64) & 7);
        if let Ok((region, _)) = open(&damaged) {
            whole += usize::from(check(&region, roots));
        }
    }
    whole
}

#[test]
fn a_flipped_bit_in_superblocks_journal_or_roots_costs_nothing() {
    let (image, roots) = sealed();
    let superblocks = [
        0..size_of::<Superblock>(),
        PAGE_SIZE..PAGE_SIZE + size_of::<Superblock>(),
    ];
    // Records in use and the one behind them, and some bytes of the rest.
    let records = copies(0).map(|at| at..at + 5 * RECORD_BYTES);
    for at in JOURNAL.step_by(61) {
        assert_eq!(flip_each(&image, at..at + 1, &roots), 1, "{at}");
    }
    let root_pages = (0..CAPACITY)
        .step_by(PAGE_SIZE)
        .filter(|&at| image[at..].starts_with(&ROOT_MAGIC));
    let root_pages: Vec<_> = root_pages.map(|at| at..at + PAGE_SIZE).collect();
    assert_eq!(root_pages.len(), 4);
    for range in superblocks.into_iter().chain(records).chain(root_pages) {
        assert_eq!(
            flip_each(&image, range.clone(), &roots),
            range.len(),
            "{range:?}"
        );
    }
}

#[test]
fn a_flipped_bit_in_segment_headers_or_maps_is_never_wrong_data() {
    let (image, roots) = sealed();
    let mut headers = 0;
    for at in (0..CAPACITY).step_by(PAGE_SIZE) {
        if image[at..].starts_with(&SEGMENT_MAGIC) {
            headers += 1;
            // Everything but the checksums in use is informative.
            assert!(flip_each(&image, at..at + PAGE_SIZE, &roots) > PAGE_SIZE - 16 * 4);
        }
    }
    assert!(headers >= 3, "{headers}");
    // The second map shares no leaf with the first, as each has a page that changed. Both have a node above their
    // leaves.
    for root in &roots {
        let root = root.to_bytes();
        let page = u64::from_le_bytes(root[..8].try_into().unwrap()) as usize * PAGE_SIZE;
        let node = page + usize::from(u16::from_le_bytes([root[12], root[13]]));
        let slots = node + offset_of!(NodeHeader, slots);
        assert_eq!(image[slots].count_ones(), 3);
        let end = slots + 1 + 3 * size_of::<SlotEntry>();
        assert_eq!(flip_each(&image, node..end, &roots), 0);
        // The leaves are before it in the page: none of their bytes, nor any between, is without effect.
        assert_eq!(flip_each(&image, node - 3 * 52..node, &roots), 0);
    }
}

fn ids(region: &Region) -> Vec<u128> {
    region
        .checkpoints()
        .iter()
        .map(|c| c.id().value())
        .collect()
}
