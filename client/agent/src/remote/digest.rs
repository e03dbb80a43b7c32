//! Digests of data that nodes send, for comparison with the manifest before CRIU gets the end of the data.

use std::sync::LazyLock;

use permafrost_protocol::PAGE_SIZE;
use sha2::{Digest, Sha256};

static ZERO_PAGE_CRC32: LazyLock<u32> = LazyLock::new(|| crc32fast::hash(&[0; PAGE_SIZE]));

/// Slots of a block.
pub(super) const SLOTS: u8 = 8;
/// Largest blocks are those of `8^22` pages: all indices.
pub(super) const MAX_SPAN: u8 = 22;
/// First byte hashed for a block of pages, a block of blocks, a block of zeros.
const LEAF: u8 = 0;
const BLOCK: u8 = 1;
const ZEROS: u8 = 2;

/// Digest of a page map under construction (docs/format.md, "Content digest"): a tree over aligned blocks of indices,
/// of which one of each size is open.
#[derive(Clone, Default)]
pub struct MapDigest {
    pages: u64,
    /// Open blocks, from those of eight pages up.
    open: Vec<Block>,
}

/// Block of eight slots of equal length.
#[derive(Clone, Default)]
pub(super) struct Block {
    first_index: u64,
    pub(super) slots: [Option<Part>; SLOTS as usize],
}

/// Pages in a slot.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Part {
    /// A page: its flags and CRC32.
    Page(u16, u32),
    /// Zero pages in the whole slot, with these flags.
    Zeros(u16),
    Digest([u8; 32]),
}

/// Pages in a block of `8^span`; at most what an index can count.
pub(super) fn span_pages(span: u8) -> u64 {
    1_u64.checked_shl(3 * u32::from(span)).unwrap_or(u64::MAX)
}

pub(super) fn block_of(index: u64, span: u8) -> u64 {
    match 1_u64.checked_shl(3 * u32::from(span)) {
        Some(pages) => index / pages * pages,
        None => 0,
    }
}

impl MapDigest {
    /// Adds whole pages from `index` on.
    pub fn pages(&mut self, index: u64, flags: u16, bytes: &[u8]) {
        for (page, index) in bytes.chunks_exact(PAGE_SIZE).zip(index..) {
            let crc = crc32fast::hash(page);
            if crc == *ZERO_PAGE_CRC32 && page.iter().all(|byte| *byte == 0) {
                self.zeros(index, flags, 1);
            } else {
                self.place(index, 0, Part::Page(flags, crc));
                self.pages += 1;
            }
        }
    }

    /// Adds stored pages from `index` on by their CRC32s.
    pub(super) fn checksums(&mut self, index: u64, flags: u16, crcs: &[u32]) {
        for (crc, index) in crcs.iter().zip(index..) {
            self.place(index, 0, Part::Page(flags, *crc));
        }
        self.pages = self.pages.saturating_add(crcs.len() as u64);
    }

    /// Adds the end of a small image, from page `index` on: its last page is filled with zeros.
    pub fn image_end(&mut self, index: u64, bytes: &[u8]) {
        let whole = bytes.len() / PAGE_SIZE * PAGE_SIZE;
        self.pages(index, 0, &bytes[..whole]);
        if whole < bytes.len() {
            let mut last = [0; PAGE_SIZE];
            last[..bytes.len() - whole].copy_from_slice(&bytes[whole..]);
            self.pages(index + (whole / PAGE_SIZE) as u64, 0, &last);
        }
    }

    /// Adds zero pages from `index` on. The cost hardly depends on their number.
    pub fn zeros(&mut self, mut index: u64, flags: u16, pages: u64) {
        // Indices end with 64 bits: a node that sends more has another digest in any case.
        let mut pages = pages.min(u64::MAX - index);
        self.pages = self.pages.saturating_add(pages);
        while pages > 0 {
            // The largest block that begins here.
            let fits =
                |span: &u8| span_pages(*span) <= pages && index.is_multiple_of(span_pages(*span));
            let span = (0..MAX_SPAN).rev().find(fits).unwrap_or(0);
            self.place(index, span, Part::Zeros(flags));
            index += span_pages(span);
            pages -= span_pages(span);
        }
    }

    /// Puts `8^span` pages, or some of them, into the block above; blocks that are before them are complete.
    fn place(&mut self, index: u64, span: u8, part: Part) {
        for below in 0..span {
            self.close(below);
        }
        let first_index = block_of(index, span + 1);
        let level = usize::from(span);
        if self.open.len() <= level {
            self.open.resize_with(level + 1, Block::default);
        }
        if self.open[level].first_index != first_index {
            self.close(span);
            self.open[level].first_index = first_index;
        }
        let slot = usize::try_from(index / span_pages(span) % u64::from(SLOTS)).unwrap_or(0);
        self.open[level].slots[slot] = Some(part);
    }

    /// Ends the open block of `8^(level + 1)` pages, if there is one, and puts it into the one above.
    fn close(&mut self, level: u8) {
        let Some(block) = self.open.get_mut(usize::from(level)) else {
            return;
        };
        let block = std::mem::take(block);
        if let Some(part) = block.part(level) {
            self.place(block.first_index, level + 1, part);
        }
    }

    /// Returns the digest of what was added.
    #[must_use]
    pub fn finish(mut self) -> [u8; 32] {
        for level in 0..MAX_SPAN {
            let at = usize::from(level);
            let Some(open) = self.open.get_mut(at) else {
                break;
            };
            let block = std::mem::take(open);
            let above = self.open[at + 1..].iter().any(Block::is_begun);
            match block.part(level) {
                Some(part) if above => self.place(block.first_index, level + 1, part),
                Some(part) => return part.digest(level + 1, block.first_index),
                None => {}
            }
        }
        Sha256::digest([]).into()
    }

    /// Returns true if the number of pages and the digest match the manifest's. A checkpoint sealed before
    /// manifests had digests records the number of pages only.
    pub(super) fn is(self, pages: u64, map_digest: &[u8]) -> bool {
        self.pages == pages && (map_digest.is_empty() || self.finish() == map_digest)
    }
}

impl Block {
    /// Returns a block without pages.
    pub(super) fn at(first_index: u64) -> Self {
        Self {
            first_index,
            ..Self::default()
        }
    }

    fn is_begun(&self) -> bool {
        self.slots.iter().any(Option::is_some)
    }

    /// Returns the pages of the block as a part of the one above.
    pub(super) fn part(&self, level: u8) -> Option<Part> {
        if let Some(zeros @ Part::Zeros(_)) = self.slots[0]
            && self.slots.iter().all(|slot| *slot == Some(zeros))
        {
            return Some(zeros);
        }
        if !self.is_begun() {
            return None;
        }
        let mut hash = Sha256::new();
        if level == 0 {
            hash.update([LEAF]);
            hash.update(self.first_index.to_le_bytes());
            for (slot, part) in (0_u8..).zip(self.slots) {
                let (stored, flags, crc) = match part {
                    Some(Part::Page(flags, crc)) => (1, flags, crc),
                    Some(Part::Zeros(flags)) => (0, flags, 0),
                    _ => continue,
                };
                hash.update([slot, stored]);
                hash.update(flags.to_le_bytes());
                hash.update(crc.to_le_bytes());
            }
            return Some(Part::Digest(hash.finalize().into()));
        }
        hash.update([BLOCK, level]);
        let first_of = |slot| self.first_index + u64::from(slot) * span_pages(level);
        let mut digests = (0_u8..)
            .zip(self.slots)
            .filter_map(|(slot, part)| Some((slot, part?.digest(level, first_of(slot)))));
        let (slot, first) = digests.next()?;
        let Some(second) = digests.next() else {
            return Some(Part::Digest(first));
        };
        for (slot, digest) in [(slot, first), second].into_iter().chain(digests) {
            hash.update([slot]);
            hash.update(digest);
        }
        Some(Part::Digest(hash.finalize().into()))
    }
}

impl Part {
    /// Returns the digest of the part, which is a block of `8^span` pages.
    pub(super) fn digest(self, span: u8, first_index: u64) -> [u8; 32] {
        match self {
            Self::Digest(digest) => digest,
            Self::Zeros(flags) | Self::Page(flags, _) => {
                let mut hash = Sha256::new_with_prefix([ZEROS, span]);
                hash.update(first_index.to_le_bytes());
                hash.update(flags.to_le_bytes());
                hash.finalize().into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_knows_pages_flags_and_places() {
        let pages = [[7; PAGE_SIZE], [0; PAGE_SIZE]].concat();
        let digest = |index, flags, bytes: &[u8]| {
            let mut digest = MapDigest::default();
            digest.pages(index, flags, bytes);
            digest.finish()
        };
        let expected = digest(5, 1, &pages);
        let mut in_parts = MapDigest::default();
        in_parts.pages(5, 1, &pages[..PAGE_SIZE]);
        in_parts.zeros(6, 1, 1);
        assert!(in_parts.is(2, &expected));

        let mut flipped = pages.clone();
        flipped[9] ^= 1;
        for other in [
            digest(5, 1, &flipped),
            digest(5, 2, &pages),
            digest(6, 1, &pages),
        ] {
            assert_ne!(expected, other);
        }
        let mut short = MapDigest::default();
        short.pages(5, 1, &pages[..PAGE_SIZE]);
        assert!(!short.is(2, &[]));
    }

    /// Uses 2^40 pages: hashing each of them would take days.
    #[test]
    fn a_run_of_zeros_has_one_digest_however_it_is_split() {
        let (first, pages) = (3_u64, 1_u64 << 40);
        let mut whole = MapDigest::default();
        whole.zeros(first, 1, pages);
        let mut parts = MapDigest::default();
        parts.zeros(first, 1, 2);
        parts.zeros(first + 2, 1, 0);
        parts.pages(first + 2, 1, &[0; PAGE_SIZE]);
        parts.zeros(first + 3, 1, pages - 3);
        assert!(parts.is(pages, &whole.clone().finish()));
        for (first, flags, pages) in [(first + 1, 1, pages - 1), (first, 2, pages), (first, 1, 5)] {
            let mut other = MapDigest::default();
            other.zeros(first, flags, pages);
            assert_ne!(other.finish(), whole.clone().finish());
        }
    }

    #[test]
    fn an_images_last_page_is_filled_with_zeros() {
        let mut filled = vec![3; 5000];
        let of_image = |bytes: &[u8]| {
            let mut digest = MapDigest::default();
            digest.image_end(0, bytes);
            digest
        };
        let short = of_image(&filled);
        filled.resize(2 * PAGE_SIZE, 0);
        let expected = of_image(&filled).finish();
        assert!(short.is(2, &expected));
        assert!(of_image(&[]).is(0, &Sha256::new().finalize()));
    }
}
