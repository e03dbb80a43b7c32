//! CRIU images: what CRIU 4.2.1 wrote is read, what we write reads back, damage never panics.

use permafrost_protocol::images::{
    DumpStats, Head, ImageError, ImageReader, ImageWriter, Inventory, MM_MAGIC, PSTREE_MAGIC,
    Pagemap, PagemapEntry, Process, RestoreStats, Stats, read_pstree, write_pstree,
};
use proptest::prelude::*;

const PAGEMAP_OF_CRIU: &[u8] = include_bytes!("fixtures/criu-4.2.1-images/pagemap-15992.img");
const SHARED_PAGEMAP_OF_CRIU: &[u8] =
    include_bytes!("fixtures/criu-4.2.1-images/pagemap-shmem-1141.img");
const INVENTORY_OF_CRIU: &[u8] = include_bytes!("fixtures/criu-4.2.1-images/inventory.img");
const PSTREE_OF_CRIU: &[u8] = include_bytes!("fixtures/criu-4.2.1-images/pstree.img");
const STATS_OF_CRIU: &[u8] = include_bytes!("fixtures/criu-4.2.1-images/stats-dump");
const MM_OF_CRIU: &[u8] = include_bytes!("fixtures/criu-4.2.1-images/mm-15992.img");

/// Decoder of a kind of image: returns true if it accepts the bytes.
type Decoder = fn(&[u8]) -> bool;

/// Every decoder, with a file that CRIU wrote.
const ALL: [(&[u8], Decoder); 6] = [
    (PAGEMAP_OF_CRIU, |bytes| Pagemap::read(bytes).is_ok()),
    (SHARED_PAGEMAP_OF_CRIU, |bytes| Pagemap::read(bytes).is_ok()),
    (INVENTORY_OF_CRIU, |bytes| Inventory::read(bytes).is_ok()),
    (PSTREE_OF_CRIU, |bytes| read_pstree(bytes).is_ok()),
    (STATS_OF_CRIU, |bytes| Stats::read(bytes).is_ok()),
    (MM_OF_CRIU, |bytes| {
        ImageReader::new(bytes, Head::Common(MM_MAGIC))
            .is_ok_and(|mut records| records.all(|record| record.is_ok()))
    }),
];

#[test]
fn what_criu_wrote_is_read() {
    let pagemap = Pagemap::read(PAGEMAP_OF_CRIU).unwrap();
    assert_eq!(pagemap.pages_id, 65_538);
    let present: u64 = pagemap.entries.iter().map(|entry| entry.nr_pages).sum();
    assert_eq!(
        present * 4096,
        7_925_760,
        "the length of the pages file beside it"
    );
    let shared = Pagemap::read(SHARED_PAGEMAP_OF_CRIU).unwrap();
    assert_eq!(shared.pages_id, 65_537);
    assert_eq!(shared.entries.len(), 21);
    assert_eq!(
        shared.entries[0],
        PagemapEntry {
            vaddr: 4096,
            nr_pages: 2,
            flags: 4
        }
    );

    let inventory = Inventory::read(INVENTORY_OF_CRIU).unwrap();
    assert_eq!(
        inventory.dump_criu_run_id.as_deref(),
        Some("77d59e24-028f-4e7b-a06e-65cfbe255c59")
    );
    assert_eq!(inventory.pre_dump_mode, None);

    let processes = read_pstree(PSTREE_OF_CRIU).unwrap();
    let pids: Vec<_> = processes
        .iter()
        .map(|process| (process.pid, process.ppid))
        .collect();
    assert_eq!(pids, [(15_992, 0), (15_994, 15_992)]);
    assert_eq!(processes[0].threads, [15_992]);

    let stats = DumpStats::read(STATS_OF_CRIU).unwrap();
    assert!(stats.frozen_time > 0);
    assert_eq!(stats.pages_written, (7_925_760 + 7_929_856) / 4096);
    assert_eq!(stats.shpages_written, Some(172_032 / 4096));
    assert_eq!(
        RestoreStats::read(STATS_OF_CRIU),
        Err(ImageError::MissingRecord {
            record: "restore statistics"
        })
    );
}

#[test]
fn what_criu_wrote_is_written_byte_for_byte_where_nothing_is_left_out() {
    assert_eq!(
        write_pstree(&read_pstree(PSTREE_OF_CRIU).unwrap()),
        PSTREE_OF_CRIU
    );
    assert_eq!(Stats::read(STATS_OF_CRIU).unwrap().write(), STATS_OF_CRIU);
}

#[test]
fn a_rewritten_pagemap_says_the_same() {
    let pagemap = Pagemap::read(PAGEMAP_OF_CRIU).unwrap();
    let merged = Pagemap::read(&pagemap.write()).unwrap();
    // Neighbours with equal flags were merged, so that only the single pages can be compared.
    assert!(merged.entries.len() <= pagemap.entries.len());
    assert_eq!(single_pages(&merged), single_pages(&pagemap));
    assert_eq!(merged.pages_id, pagemap.pages_id);
}

fn single_pages(pagemap: &Pagemap) -> Vec<(u64, u16)> {
    let pages = |entry: &PagemapEntry| {
        let flags = entry.flags;
        (0..entry.nr_pages)
            .map(move |page| page * 4096)
            .zip(std::iter::repeat((entry.vaddr, flags)))
    };
    pagemap
        .entries
        .iter()
        .flat_map(pages)
        .map(|(at, (vaddr, flags))| (vaddr + at, flags))
        .collect()
}

#[test]
fn an_end_anywhere_but_between_records_is_an_error() {
    for (bytes, taken) in ALL {
        let head = if bytes[..4] == INVENTORY_OF_CRIU[..4] {
            4
        } else {
            8
        };
        let mut between = vec![];
        let mut at = head;
        while at < bytes.len() {
            at += 4 + u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
            between.push(at);
        }
        assert_eq!(between.last(), Some(&bytes.len()));
        for cut in 0..bytes.len() {
            // Between records a file that is cut is one with fewer records, if it may have fewer.
            let may_be_taken = between.contains(&cut) || cut == head;
            assert!(
                may_be_taken || !taken(&bytes[..cut]),
                "cut at {cut} of {}",
                bytes.len()
            );
        }
        assert!(taken(bytes));
    }
}

#[test]
fn a_flipped_bit_is_refused_or_changes_what_is_read() {
    let original = Pagemap::read(SHARED_PAGEMAP_OF_CRIU).unwrap();
    let mut bytes = SHARED_PAGEMAP_OF_CRIU.to_vec();
    let (mut refused, mut same) = (0, Vec::new());
    for bit in 0..bytes.len() * 8 {
        bytes[bit / 8] ^= 1 << (bit % 8);
        match Pagemap::read(&bytes) {
            Err(_) => refused += 1,
            Ok(read) if read == original => same.push(bit / 8),
            Ok(_) => {}
        }
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
    assert!(refused > 100, "only {refused} flipped bits were noticed");
    // compat_nr_pages is ignored beside nr_pages, also when its key becomes that of another known field.
    for byte in same {
        let near_compat = (0..4)
            .any(|back| bytes[byte - back..].starts_with(&[0x10, 0]) || bytes[byte - back] == 0x10);
        assert!(near_compat, "a bit flipped in byte {byte} went unnoticed");
    }
    for (bytes, taken) in ALL {
        let mut bytes = bytes.to_vec();
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            let is_head = bit < 32;
            assert!(
                !taken(&bytes) || !is_head,
                "a damaged magic must be refused"
            );
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

#[test]
fn another_kind_of_image_is_named_by_its_magic() {
    assert_eq!(
        Pagemap::read(PSTREE_OF_CRIU),
        Err(ImageError::BadMagic {
            offset: 4,
            expected: 0x5608_4025,
            found: PSTREE_MAGIC
        })
    );
    assert!(matches!(
        Inventory::read(PSTREE_OF_CRIU),
        Err(ImageError::BadMagic { offset: 0, .. })
    ));
    assert!(matches!(
        Stats::read(INVENTORY_OF_CRIU),
        Err(ImageError::BadMagic { offset: 0, .. })
    ));
}

#[test]
fn an_inventory_of_another_version_or_with_more_records_is_refused() {
    for version in [0, 1, 3] {
        let bytes = Inventory {
            img_version: version,
            ..Inventory::default()
        }
        .write();
        assert_eq!(
            Inventory::read(&bytes),
            Err(ImageError::UnsupportedVersion { version })
        );
    }
    let mut bytes = INVENTORY_OF_CRIU.to_vec();
    bytes.extend([0; 4]);
    let offset = INVENTORY_OF_CRIU.len();
    assert_eq!(
        Inventory::read(&bytes),
        Err(ImageError::TrailingBytes {
            offset,
            extra_bytes: 4
        })
    );
    let empty = ImageWriter::new(Head::Inventory).finish();
    assert_eq!(
        Inventory::read(&empty),
        Err(ImageError::MissingRecord {
            record: "inventory entry"
        })
    );
}

#[test]
fn a_record_of_four_gigabytes_is_refused_before_anything_is_allocated() {
    let mut image = ImageWriter::new(Head::Common(PSTREE_MAGIC)).finish();
    image.extend(u32::MAX.to_le_bytes());
    let missing_bytes = u32::MAX as usize;
    assert_eq!(
        read_pstree(&image),
        Err(ImageError::Truncated {
            offset: 12,
            missing_bytes
        })
    );
}

fn entries() -> impl Strategy<Value = Vec<PagemapEntry>> {
    let flags = prop_oneof![Just(1_u16), Just(2), Just(4), Just(6)];
    proptest::collection::vec((0_u64..1 << 20, 1_u64..1 << 20, flags), 0..40).prop_map(|runs| {
        let mut vaddr = 0;
        let mut entries: Vec<PagemapEntry> = Vec::new();
        for (gap, nr_pages, flags) in runs {
            vaddr += gap * 4096;
            match entries.last_mut() {
                Some(last) if last.end() == vaddr && last.flags == flags => {
                    last.nr_pages += nr_pages
                }
                _ => entries.push(PagemapEntry {
                    vaddr,
                    nr_pages,
                    flags,
                }),
            }
            vaddr += nr_pages * 4096;
        }
        entries
    })
}

fn process() -> impl Strategy<Value = Process> {
    (any::<[u32; 4]>(), any::<Vec<u32>>()).prop_map(|([pid, ppid, pgid, sid], threads)| Process {
        pid,
        ppid,
        pgid,
        sid,
        threads,
    })
}

proptest! {
    #[test]
    fn pagemaps_round_trip(pages_id: u32, entries in entries()) {
        let pagemap = Pagemap { pages_id, entries };
        prop_assert_eq!(Pagemap::read(&pagemap.write()), Ok(pagemap));
    }

    #[test]
    fn process_trees_round_trip(processes in proptest::collection::vec(process(), 1..5)) {
        prop_assert_eq!(read_pstree(&write_pstree(&processes)), Ok(processes));
    }

    #[test]
    fn statistics_round_trip(numbers: [u32; 4], pages: [u64; 3], lazy: u64, pipes: Option<u64>) {
        let [freezing_time, frozen_time, memdump_time, memwrite_time] = numbers;
        let [pages_scanned, pages_skipped_parent, pages_written] = pages;
        let dump = DumpStats {
            freezing_time, frozen_time, memdump_time, memwrite_time,
            pages_scanned, pages_skipped_parent, pages_written, pages_lazy: lazy, page_pipes: pipes,
            ..DumpStats::default()
        };
        let bytes = Stats { dump: Some(dump.clone()), restore: None }.write();
        prop_assert_eq!(DumpStats::read(&bytes), Ok(dump));
        let restore = RestoreStats {
            pages_compared: pages_scanned, pages_skipped_cow: lazy, forking_time: freezing_time,
            restore_time: frozen_time, pages_restored: pipes,
        };
        let bytes = Stats { dump: None, restore: Some(restore.clone()) }.write();
        prop_assert_eq!(RestoreStats::read(&bytes), Ok(restore));
    }

    #[test]
    fn arbitrary_records_never_panic(tail: Vec<u8>) {
        for (bytes, taken) in ALL {
            let head = if bytes[..4] == INVENTORY_OF_CRIU[..4] { 4 } else { 8 };
            taken(&[&bytes[..head], &tail].concat());
            let len = u32::try_from(tail.len()).unwrap();
            taken(&[&bytes[..head], &len.to_le_bytes(), &tail].concat());
        }
    }
}
