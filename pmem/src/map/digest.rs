//! What a map holds, told in 32 bytes: the same wherever and however its pages are stored.

use std::sync::LazyLock;

use sha2::{Digest, Sha256};
use zerocopy::little_endian::U32;

use super::{PageMap, RunKind};
use crate::PAGE_SIZE;
use crate::error::PageError;

/// Bytes hashed for a page: index, flags, CRC32.
const ENTRY_BYTES: usize = 8 + 2 + 4;

/// Entries hashed at once; the hash's own buffer would be asked for each of them otherwise.
const BATCH_BYTES: usize = 64 * ENTRY_BYTES;

/// What stands for a page of zeros, which is stored nowhere.
static ZERO_PAGE_CRC32: LazyLock<u32> = LazyLock::new(|| crc32fast::hash(&[0; PAGE_SIZE]));

/// A digest in the making, over pages in ascending order.
pub(super) struct MapHasher {
    hash: Sha256,
    batch: [u8; BATCH_BYTES],
    filled: usize,
}

impl Default for MapHasher {
    fn default() -> Self {
        Self {
            hash: Sha256::new(),
            batch: [0; BATCH_BYTES],
            filled: 0,
        }
    }
}

impl MapHasher {
    /// Pages from `index` on, one for each checksum.
    pub(super) fn pages(&mut self, index: u64, flags: u16, crcs: &[U32]) {
        for (crc, index) in crcs.iter().zip(index..) {
            self.page(index, flags, crc.get());
        }
    }

    /// Pages of zeros from `index` on.
    pub(super) fn zeros(&mut self, index: u64, flags: u16, pages: u64) {
        let crc = *ZERO_PAGE_CRC32;
        for index in (index..).take(crate::convert::to_usize(pages)) {
            self.page(index, flags, crc);
        }
    }

    fn page(&mut self, index: u64, flags: u16, crc: u32) {
        let Some(entry) = self.batch[self.filled..].first_chunk_mut::<ENTRY_BYTES>() else {
            return;
        };
        entry[..8].copy_from_slice(&index.to_le_bytes());
        entry[8..10].copy_from_slice(&flags.to_le_bytes());
        entry[10..].copy_from_slice(&crc.to_le_bytes());
        self.filled += ENTRY_BYTES;
        if self.filled == BATCH_BYTES {
            self.hash.update(self.batch);
            self.filled = 0;
        }
    }

    pub(super) fn finish(mut self) -> [u8; 32] {
        self.hash.update(&self.batch[..self.filled]);
        self.hash.finalize().into()
    }
}

impl PageMap {
    /// SHA-256 over what the map holds, the same wherever and however its pages are stored: for each page,
    /// ascending, its index (8 bytes), flags (2) and CRC32 (4), little-endian. A page of zeros has the CRC32 of
    /// one. Reads map and checksums, verified, but no page: that the pages are what their checksums say is what
    /// reading them shows.
    ///
    /// # Errors
    /// [`PageError::MapCorrupt`].
    pub fn digest(&self) -> Result<[u8; 32], PageError> {
        let mut hasher = MapHasher::default();
        let mut cursor = self.clone().cursor();
        for run in self.runs() {
            let run = run?;
            match run.kind {
                RunKind::Zero => hasher.zeros(run.first_index, run.flags, u64::from(run.pages)),
                RunKind::Stored { location, .. } => {
                    let stored = cursor
                        .checksums(run, 0, run.pages)?
                        .ok_or_else(|| crate::error::outside(location))?;
                    hasher.pages(run.first_index, run.flags, stored.crcs);
                }
            }
        }
        Ok(hasher.finish())
    }
}

const _: () = assert!(BATCH_BYTES.is_multiple_of(ENTRY_BYTES));
