//! Which pages a lazy restore brings later.

use super::{Mapping, Pagemap, PagemapEntry};
use crate::PAGE_BYTES;
use crate::pageserver::{PE_LAZY, PE_PRESENT};

impl Pagemap {
    /// Marks the pages as lazy that are in mappings which can be. CRIU does so when it dumps a process, but not if the
    /// stack pointer of one of its threads is the address of a page, as that of one thread in 256 is: `is_stack` in
    /// `criu/mem.c` compares places in pages, and so takes each page for one of the stack. The process would not be
    /// restored lazily. `mappings` are ascending.
    pub fn mark_lazy(&mut self, mappings: &[Mapping]) {
        let mut marked = Vec::with_capacity(self.entries.len());
        for entry in &self.entries {
            if entry.flags != PE_PRESENT {
                marked.push(*entry);
                continue;
            }
            let mut rest = *entry;
            let first = mappings.partition_point(|mapping| mapping.end <= entry.vaddr);
            let lazy = mappings[first..]
                .iter()
                .take_while(|mapping| mapping.start < entry.end())
                .filter(|mapping| mapping.can_be_lazy());
            for mapping in lazy {
                marked.extend(rest.split_off_before(mapping.start));
                marked.extend(
                    rest.split_off_before(mapping.end)
                        .map(|entry| PagemapEntry {
                            flags: PE_PRESENT | PE_LAZY,
                            ..entry
                        }),
                );
            }
            marked.extend(rest.split_off_before(u64::MAX));
        }
        self.entries = marked;
    }
}

impl PagemapEntry {
    /// Takes the pages before `address` away from the entry, and returns them if there are any.
    fn split_off_before(&mut self, address: u64) -> Option<Self> {
        let bytes = address.saturating_sub(self.vaddr);
        let nr_pages = (bytes / PAGE_BYTES).min(self.nr_pages);
        let before = Self { nr_pages, ..*self };
        self.vaddr += nr_pages * PAGE_BYTES;
        self.nr_pages -= nr_pages;
        (nr_pages > 0).then_some(before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_mappings_that_can_be_lazy_are_marked() {
        let mapping = |start, end, flags| Mapping {
            start,
            end,
            flags,
            ..Mapping::default()
        };
        let mappings = [
            mapping(0x1000, 0x3000, 2),    // of a file
            mapping(0x3000, 0x6000, 0x22), // anonymous
            mapping(0x6000, 0x7000, 0x22),
            mapping(0x8000, 0x9000, 0x2022), // locked
            mapping(0x9000, 0xa000, 0x22),
        ];
        let entry = |(vaddr, nr_pages, flags)| PagemapEntry {
            vaddr,
            nr_pages,
            flags,
        };
        let marked = |entries: &[(u64, u64, u16)]| {
            let mut pagemap = Pagemap {
                pages_id: 1,
                entries: entries.iter().copied().map(entry).collect(),
            };
            pagemap.mark_lazy(&mappings);
            pagemap.entries
        };
        let expected = |entries: &[(u64, u64, u16)]| -> Vec<_> {
            entries.iter().copied().map(entry).collect()
        };
        assert_eq!(
            marked(&[(0x2000, 4, 4), (0x6000, 1, 6), (0x8000, 3, 4)]),
            expected(&[
                (0x2000, 1, 4),
                (0x3000, 3, 6),
                (0x6000, 1, 6),
                (0x8000, 1, 4),
                (0x9000, 1, 6),
                (0xa000, 1, 4),
            ])
        );
        // The pages of a parent checkpoint, and what is not in a known mapping, stay what they are.
        let others = [(0x3000, 1, 1), (0x7000, 1, 4), (0x4000_0000, 2, 4)];
        assert_eq!(marked(&others), expected(&others));
        assert_eq!(marked(&[]), []);
    }
}
