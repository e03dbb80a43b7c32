//! Digests of data that nodes send, for comparison with the manifest before CRIU gets the end of the data.

use std::sync::LazyLock;

use permafrost_protocol::PAGE_SIZE;
use sha2::{Digest, Sha256};

static ZERO_PAGE_CRC32: LazyLock<u32> = LazyLock::new(|| crc32fast::hash(&[0; PAGE_SIZE]));

/// Digest of a page map under construction (docs/format.md, "Content digest"): over each page, ascending, its
/// index, flags and CRC32, and over each run of zero pages its end and its beginning.
#[derive(Clone, Default)]
pub struct MapDigest {
    hash: Sha256,
    pages: u64,
    /// Zero pages that are not hashed yet, because the next call may extend them: first index, index after the last,
    /// flags.
    zeros: Option<(u64, u64, u16)>,
}

impl MapDigest {
    /// Adds whole pages from `index` on.
    pub fn pages(&mut self, index: u64, flags: u16, bytes: &[u8]) {
        for (page, index) in bytes.chunks_exact(PAGE_SIZE).zip(index..) {
            let crc = crc32fast::hash(page);
            if crc == *ZERO_PAGE_CRC32 && page.iter().all(|byte| *byte == 0) {
                self.zeros(index, flags, 1);
            } else {
                self.end_zeros();
                self.entry(index, flags, crc);
                self.pages += 1;
            }
        }
    }

    /// Adds the end of a small image, from page `index` on: its last page is filled with zeros.
    pub(super) fn image_end(&mut self, index: u64, bytes: &[u8]) {
        let whole = bytes.len() / PAGE_SIZE * PAGE_SIZE;
        self.pages(index, 0, &bytes[..whole]);
        if whole < bytes.len() {
            let mut last = [0; PAGE_SIZE];
            last[..bytes.len() - whole].copy_from_slice(&bytes[whole..]);
            self.pages(index + (whole / PAGE_SIZE) as u64, 0, &last);
        }
    }

    /// Adds zero pages from `index` on. The cost does not depend on their number.
    pub fn zeros(&mut self, index: u64, flags: u16, pages: u64) {
        if pages == 0 {
            return;
        }
        self.pages = self.pages.saturating_add(pages);
        let end = index.saturating_add(pages);
        match &mut self.zeros {
            Some((_, open_end, open_flags)) if *open_end == index && *open_flags == flags => {
                *open_end = end;
            }
            _ => {
                self.end_zeros();
                self.zeros = Some((index, end, flags));
            }
        }
    }

    fn end_zeros(&mut self) {
        if let Some((first, end, flags)) = self.zeros.take() {
            self.entry(end, flags, 0);
            self.entry(first, flags, 0);
        }
    }

    fn entry(&mut self, index: u64, flags: u16, crc: u32) {
        let mut entry = [0; 14];
        entry[..8].copy_from_slice(&index.to_le_bytes());
        entry[8..10].copy_from_slice(&flags.to_le_bytes());
        entry[10..].copy_from_slice(&crc.to_le_bytes());
        self.hash.update(entry);
    }

    pub(super) fn finish(mut self) -> [u8; 32] {
        self.end_zeros();
        self.hash.finalize().into()
    }

    /// Returns true if the number of pages and the digest match the manifest's. A checkpoint sealed before
    /// manifests had digests records the number of pages only.
    pub(super) fn is(self, pages: u64, map_digest: &[u8]) -> bool {
        self.pages == pages && (map_digest.is_empty() || self.finish() == map_digest)
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
