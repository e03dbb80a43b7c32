//! Memory of a process tree, read from `/proc`, for the prediction of its next dump.
//!
//! A dump holds the anonymous and the shared pages of every process, and those that were swapped out; of files
//! only the pages of its own mapping that a process has changed, which are anonymous too. Pages that processes
//! share count for each process, because that is how they are dumped where they are shared since a fork.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;

use permafrost_protocol::PAGE_BYTES;

/// Size of a page's entry in `/proc/PID/pagemap`, bytes.
const ENTRY: usize = 8;

/// Bit 55: the page was written since the bits were last cleared (Documentation/admin-guide/mm/soft-dirty.rst
/// of the kernel).
const SOFT_DIRTY: u64 = 1 << 55;

/// Bit 63: the page is in memory; bit 62: it was swapped out. Other pages are not dumped.
const THERE: u64 = 1 << 63 | 1 << 62;

/// Number of entries read at once: those of 128 MiB.
const AT_ONCE: u64 = 32 << 10;

/// Returns the number of pages of a tree's processes written since its soft-dirty bits were last cleared. `None` if the
/// kernel does not keep these bits, or the caller may not read them. Reads 8 bytes for each mapped page of the
/// tree's address space: 2 ms for a GiB.
#[must_use]
pub fn dirty_pages(tree: &[u32]) -> Option<u64> {
    if !keeps_soft_dirty()? {
        return None;
    }
    let mut pages = 0;
    for &pid in tree {
        match dirty_of(pid) {
            Ok(dirty) => pages += dirty,
            // The process has ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(_) => return None,
        }
    }
    Some(pages)
}

/// Returns true if this kernel keeps soft-dirty bits: a page that was just written must have one. A kernel
/// without CONFIG_MEM_SOFT_DIRTY shows 0 for every page.
fn keeps_soft_dirty() -> Option<bool> {
    let mut pages = vec![0_u8; 2 * usize::try_from(PAGE_BYTES).ok()?];
    // The second of the two is touched to its end or the first is, wherever they begin.
    pages.fill(1);
    let written = std::hint::black_box(&pages);
    let first = written.as_ptr().addr() as u64 / PAGE_BYTES;
    let pagemap = File::open("/proc/self/pagemap").ok()?;
    let dirty = count_dirty(&pagemap, first, first + 2).ok()?;
    Some(dirty > 0)
}

fn dirty_of(pid: u32) -> io::Result<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let mut dirty = 0;
    for (first, end) in maps.lines().filter_map(mapped) {
        dirty += count_dirty(&pagemap, first, end)?;
    }
    Ok(dirty)
}

/// Returns the page numbers (first, and behind the last) of a writable mapping in a line of `/proc/PID/maps`.
/// Returns `None` for other lines and for the kernel's own mappings, which are not dumped.
fn mapped(line: &str) -> Option<(u64, u64)> {
    let mut words = line.split_whitespace();
    let (from, to) = words.next()?.split_once('-')?;
    let permissions = words.next()?;
    let name = words.nth(3).unwrap_or("");
    if !permissions.contains('w') || name.starts_with("[v") {
        return None;
    }
    let page = |address| Some(u64::from_str_radix(address, 16).ok()? / PAGE_BYTES);
    Some((page(from)?, page(to)?))
}

fn count_dirty(pagemap: &File, mut page: u64, end: u64) -> io::Result<u64> {
    let mut entries = vec![0; usize::try_from(AT_ONCE).unwrap_or(0) * ENTRY];
    let mut dirty = 0;
    while page < end {
        let wanted = usize::try_from((end - page).min(AT_ONCE)).unwrap_or(0) * ENTRY;
        let read = pagemap.read_at(&mut entries[..wanted], page * ENTRY as u64)? / ENTRY;
        if read == 0 {
            // The range was unmapped meanwhile.
            break;
        }
        let (read_entries, _) = entries[..read * ENTRY].as_chunks::<ENTRY>();
        let is_dirty = |entry: &&[u8; ENTRY]| {
            let entry = u64::from_ne_bytes(**entry);
            entry & SOFT_DIRTY != 0 && entry & THERE != 0
        };
        dirty += read_entries.iter().filter(is_dirty).count() as u64;
        page += read as u64;
    }
    Ok(dirty)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_maps_name_their_pages() {
        let line =
            "7f0000400000-7f0000402000 rw-p 00000000 00:00 0                          [heap]";
        assert_eq!(mapped(line), Some((0x7_f000_0400, 0x7_f000_0402)));
        assert_eq!(mapped(&line.replace("rw-p", "r-xp")), None);
        assert_eq!(mapped(&line.replace("[heap]", "[vvar]")), None);
        assert!(mapped("400000-401000 rw-p 0 00:00 0").is_some());
        for broken in ["", "x", "400000 rw-p", "g-h rw-p 0 0 0"] {
            assert_eq!(mapped(broken), None, "{broken:?}");
        }
    }

    #[test]
    fn dirty_pages_are_counted_where_the_kernel_keeps_them_and_unknown_where_not() {
        let own = std::process::id();
        let dirty = dirty_pages(&[own]);
        if keeps_soft_dirty() == Some(true) {
            let fresh = vec![1_u8; 8 << 20];
            let then = dirty_pages(&[own]).unwrap();
            assert!(std::hint::black_box(&fresh).len() == 8 << 20);
            assert!(then >= 2048, "{then}, {dirty:?}");
        } else {
            assert_eq!(dirty, None);
        }
    }
}
