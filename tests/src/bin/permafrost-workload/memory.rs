//! Private memory, and the checksum kept beside it.

use permafrost_protocol::PAGE_SIZE;
use permafrost_tests::contents::{Contents, fill, page_checksum};

/// Filled memory: one anonymous mapping, page-aligned so that each of its pages is one page of contents.
pub(crate) struct Memory {
    bytes: Vec<u8>,
    /// Offset of the first whole page.
    start: usize,
    contents: Contents,
    seed: u64,
    /// Per page, the generation in which it was last written.
    generations: Vec<u32>,
    generation: u32,
    /// Exclusive or of the checksums of what was written: kept, never recomputed from memory.
    checksum: u64,
}

/// Result of a verification of all pages.
pub(crate) struct Found {
    /// Pages that are not what they should be.
    pub(crate) bad_pages: u64,
    /// Checksum of what is there.
    pub(crate) checksum: u64,
}

impl Memory {
    pub(crate) fn filled(size_bytes: usize, contents: Contents, seed: u64) -> Self {
        let pages = size_bytes / PAGE_SIZE;
        let bytes = vec![0; (pages + 1) * PAGE_SIZE];
        let start = bytes.as_ptr().align_offset(PAGE_SIZE);
        let mut memory = Self {
            bytes,
            start,
            contents,
            seed,
            generations: vec![0; pages],
            generation: 0,
            checksum: 0,
        };
        for index in 0..pages {
            memory.write(index);
        }
        memory
    }

    pub(crate) fn pages(&self) -> u64 {
        as_u64(self.generations.len())
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    pub(crate) fn checksum_kept(&self) -> u64 {
        self.checksum
    }

    /// Writes `percent` of the pages anew, consecutive ones, elsewhere every time.
    pub(crate) fn modify(&mut self, percent: u64) {
        self.generation += 1;
        let pages = self.generations.len();
        let count = usize::try_from(self.pages() * percent / 100).unwrap_or(pages);
        // A prime step, so that the places are spread over generations.
        let first =
            usize::try_from(u64::from(self.generation) * 7919).unwrap_or(0) % (pages - count + 1);
        for index in first..first + count {
            let old = self.generations[index];
            self.checksum ^= self.expected(index, old).1;
            self.generations[index] = self.generation;
            self.write(index);
        }
    }

    pub(crate) fn verify(&self) -> Found {
        let mut found = Found {
            bad_pages: 0,
            checksum: 0,
        };
        for (index, &generation) in self.generations.iter().enumerate() {
            let page = &self.bytes[self.start + index * PAGE_SIZE..][..PAGE_SIZE];
            found.checksum ^= page_checksum(as_u64(index), page);
            if *page != self.expected(index, generation).0 {
                found.bad_pages += 1;
            }
        }
        found
    }

    fn write(&mut self, index: usize) {
        let (page, checksum) = self.expected(index, self.generations[index]);
        self.bytes[self.start + index * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(&page);
        self.checksum ^= checksum;
    }

    fn expected(&self, index: usize, generation: u32) -> ([u8; PAGE_SIZE], u64) {
        let mut page = [0; PAGE_SIZE];
        fill(
            self.contents,
            self.seed,
            as_u64(index),
            generation,
            &mut page,
        );
        let checksum = page_checksum(as_u64(index), &page);
        (page, checksum)
    }
}

/// A page count or index fits 64 bits.
fn as_u64(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}
