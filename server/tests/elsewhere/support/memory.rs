//! Memory of a process, and its comparison with what a restore returns.

use std::collections::BTreeMap;
use std::path::Path;

use permafrost_pmem::PAGE_SIZE;
use permafrost_protocol::images::Pagemap;
pub(crate) const PID: u32 = 7;
const FIRST: u64 = 0x400;

/// Memory of a process: pages by index.
pub(crate) type Memory = BTreeMap<u64, Vec<u8>>;

/// Returns pages that are all different, with zeros and gaps among them.
pub(crate) fn memory(pages: u64) -> Memory {
    let page = |n: u64| {
        let mut page = vec![0; PAGE_SIZE];
        if n % 97 < 90 {
            for (word, at) in page.as_chunks_mut::<8>().0.iter_mut().zip(1_u64..) {
                *word = (n + 1)
                    .wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ at)
                    .to_le_bytes();
            }
        }
        page
    };
    (0..pages)
        .map(|n| (FIRST + n + n / 200 * 3, page(n)))
        .collect()
}

/// Returns the pages file that CRIU would have made.
pub(crate) fn flat(memory: &Memory) -> Vec<u8> {
    memory.values().flatten().copied().collect()
}

pub(crate) fn small_images() -> [(&'static str, Vec<u8>); 4] {
    [
        ("core-7.img", b"the registers of a process".repeat(900)),
        ("empty.img", Vec::new()),
        ("inventory.img", b"what there is".to_vec()),
        ("mm-7.img", vec![3; 5000]),
    ]
}

pub(crate) fn check_images(dir: &Path, memory: &Memory) {
    let read = |name: &str| std::fs::read(dir.join(name)).unwrap();
    for (name, bytes) in small_images() {
        assert!(read(name) == bytes, "{name}");
    }
    check_pagemap(&read(&format!("pagemap-{PID}.img")), memory);
    assert!(read("pages-65537.img") == flat(memory));
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 6);
}

pub(crate) fn check_pagemap(image: &[u8], memory: &Memory) {
    let pagemap = Pagemap::read(image).unwrap();
    let entries = pagemap.entries.iter();
    let indices: Vec<u64> = entries
        .flat_map(|entry| {
            let first = entry.vaddr / PAGE_SIZE as u64;
            first..first + entry.nr_pages
        })
        .collect();
    assert!(memory.keys().eq(&indices), "{} pages", indices.len());
}
