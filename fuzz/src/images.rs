//! CRIU image files, over any bytes: nothing panics, and images that are read are equal when written and read again.

use permafrost_protocol::images::{
    Fields, Head, ImageName, ImageReader, Inventory, PAGEMAP_MAGIC, Pagemap, PagemapReader, Stats,
    pagemap_name, read_pstree, write_pstree,
};

/// Checks all properties. The first byte chooses the file's kind: 4 and above give the rest a fitting head first,
/// which the fuzzer would otherwise have to find.
pub fn check(input: &[u8]) {
    let Some((&choice, rest)) = input.split_first() else {
        return;
    };
    let heads = [
        Head::Common(PAGEMAP_MAGIC),
        Head::Inventory,
        Head::Common(0x5027_3030),
        Head::Service(0x5709_3306),
    ];
    let head = heads[usize::from(choice & 3)];
    let mut bytes = Vec::new();
    if choice & 4 != 0 {
        let (first, second) = head.words();
        bytes.extend(first.to_le_bytes());
        bytes.extend(second.into_iter().flat_map(u32::to_le_bytes));
    }
    bytes.extend_from_slice(rest);

    check_framing(&bytes, head);
    match choice & 3 {
        0 => check_pagemap(&bytes),
        1 => {
            if let Ok(inventory) = Inventory::read(&bytes) {
                assert_eq!(Inventory::read(&inventory.write()), Ok(inventory));
            }
        }
        2 => {
            if let Ok(processes) = read_pstree(&bytes) {
                assert_eq!(read_pstree(&write_pstree(&processes)), Ok(processes));
            }
        }
        _ => {
            if let Ok(stats) = Stats::read(&bytes) {
                assert_eq!(Stats::read(&stats.write()), Ok(stats));
            }
        }
    }
    if let Some(mut fields) = Fields::parse(rest) {
        assert_eq!(fields.encode(), rest);
        fields.set_varint(8, 300);
        let again = Fields::parse(&fields.encode()).expect("an edited message is a message");
        assert_eq!(again, fields);
        assert_eq!(again.varint(8), Some(300));
    }
    if let Ok(name) = std::str::from_utf8(rest)
        && let ImageName::Pagemap(space) = ImageName::parse(name)
    {
        assert_eq!(pagemap_name(space), name);
    }
}

/// Records lie one after another and cover the file up to its end or its first error.
fn check_framing(bytes: &[u8], head: Head) {
    let Ok(mut records) = ImageReader::new(bytes, head) else {
        return;
    };
    let mut at = head.len_bytes();
    while let Ok(Some(record)) = records.next_record() {
        assert_eq!(record.offset, at);
        at += 4 + record.bytes.len();
        assert_eq!(records.offset(), at);
    }
    assert!(at <= bytes.len());
    assert!(
        matches!(records.next_record(), Ok(None)),
        "after its end or an error a reader has ended"
    );
}

fn check_pagemap(bytes: &[u8]) {
    if let Ok(pagemap) = Pagemap::read(bytes) {
        let mut end = 0;
        for entry in &pagemap.entries {
            assert!(entry.vaddr >= end && entry.nr_pages > 0);
            end = entry.end();
        }
        let again = Pagemap::read(&pagemap.write()).expect("a written pagemap is read");
        assert_eq!(again.pages_id, pagemap.pages_id);
        // Merged and split entries differ; their pages do not.
        assert_eq!(normal(&again), normal(&pagemap));
    }
    if let Ok(reader) = PagemapReader::new(bytes) {
        let mut failed = false;
        for entry in reader {
            assert!(!failed, "after an error a reader has ended");
            failed = entry.is_err();
        }
    }
}

fn normal(pagemap: &Pagemap) -> Vec<(u64, u64, u16)> {
    let mut runs: Vec<(u64, u64, u16)> = Vec::new();
    for entry in &pagemap.entries {
        match runs.last_mut() {
            Some((_, end, flags)) if *end == entry.vaddr && *flags == entry.flags => {
                *end = entry.end()
            }
            _ => runs.push((entry.vaddr, entry.end(), entry.flags)),
        }
    }
    runs
}
