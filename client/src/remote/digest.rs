//! Digests of what comes from nodes, compared with those of the manifest before CRIU gets the last of it.

use std::sync::LazyLock;

use sha2::{Digest, Sha256};

const PAGE_BYTES: usize = 4096;

static ZERO_PAGE_CRC32: LazyLock<u32> = LazyLock::new(|| crc32fast::hash(&[0; PAGE_BYTES]));

/// The digest of a page map in the making (docs/format.md, "Content digest"): over each page, ascending, its index,
/// flags and CRC32.
#[derive(Clone, Default)]
pub struct MapDigest {
    hash: Sha256,
    pages: u64,
}

impl MapDigest {
    /// Whole pages from `index` on.
    pub fn pages(&mut self, index: u64, flags: u16, bytes: &[u8]) {
        for (page, index) in bytes.chunks_exact(PAGE_BYTES).zip(index..) {
            self.page(index, flags, crc32fast::hash(page));
        }
    }

    /// Pages of zeros from `index` on.
    pub fn zeros(&mut self, index: u64, flags: u16, pages: u64) {
        let crc = *ZERO_PAGE_CRC32;
        for index in index..index.saturating_add(pages) {
            self.page(index, flags, crc);
        }
    }

    fn page(&mut self, index: u64, flags: u16, crc: u32) {
        let mut entry = [0; 14];
        entry[..8].copy_from_slice(&index.to_le_bytes());
        entry[8..10].copy_from_slice(&flags.to_le_bytes());
        entry[10..].copy_from_slice(&crc.to_le_bytes());
        self.hash.update(entry);
        self.pages += 1;
    }

    /// Whether that was all, and what the manifest says. One sealed before manifests had digests says how many
    /// pages there are, and nothing else.
    pub(super) fn is(self, pages: u64, map_digest: &[u8]) -> bool {
        self.pages == pages
            && (map_digest.is_empty() || self.hash.finalize().as_slice() == map_digest)
    }
}

/// The digest of a small image: its bytes as pages from index 0, the last one filled with zeros.
pub(super) fn of_image(bytes: &[u8]) -> MapDigest {
    let mut digest = MapDigest::default();
    let whole = bytes.len() / PAGE_BYTES * PAGE_BYTES;
    digest.pages(0, 0, &bytes[..whole]);
    if whole < bytes.len() {
        let mut last = [0; PAGE_BYTES];
        last[..bytes.len() - whole].copy_from_slice(&bytes[whole..]);
        digest.pages((whole / PAGE_BYTES) as u64, 0, &last);
    }
    digest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_knows_pages_flags_and_places() {
        let pages = [[7; PAGE_BYTES], [0; PAGE_BYTES]].concat();
        let digest = |index, flags, bytes: &[u8]| {
            let mut digest = MapDigest::default();
            digest.pages(index, flags, bytes);
            digest.hash.finalize()
        };
        let expected = digest(5, 1, &pages);
        let mut in_parts = MapDigest::default();
        in_parts.pages(5, 1, &pages[..PAGE_BYTES]);
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
        short.pages(5, 1, &pages[..PAGE_BYTES]);
        assert!(!short.is(2, &[]));
    }

    #[test]
    fn an_images_last_page_is_filled_with_zeros() {
        let mut filled = vec![3; 5000];
        let short = of_image(&filled);
        filled.resize(2 * PAGE_BYTES, 0);
        let expected = of_image(&filled).hash.finalize();
        assert!(short.is(2, &expected));
        assert!(of_image(&[]).is(0, &Sha256::new().finalize()));
    }
}
