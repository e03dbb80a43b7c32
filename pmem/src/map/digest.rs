//! Digest of a map: 32 bytes that identify its content, independent of the storage of its pages.

use sha2::{Digest, Sha256};
use zerocopy::little_endian::U32;

use super::{PageMap, RunKind};
use crate::error::PageError;

/// Bytes hashed for a page: index, flags, CRC32.
const ENTRY_BYTES: usize = 8 + 2 + 4;

/// Bytes hashed at once; otherwise the hash would copy each entry into its own buffer.
const BATCH_BYTES: usize = 64 * ENTRY_BYTES;

/// A digest in the making, over pages in ascending order.
pub(super) struct MapHasher {
    hash: Sha256,
    batch: [u8; BATCH_BYTES],
    filled: usize,
    /// Zero pages that are not hashed yet, because the next call may extend them.
    zeros: Option<ZeroRun>,
}

/// Run of consecutive zero pages with equal flags.
struct ZeroRun {
    first_index: u64,
    end_index: u64,
    flags: u16,
}

impl Default for MapHasher {
    fn default() -> Self {
        Self {
            hash: Sha256::new(),
            batch: [0; BATCH_BYTES],
            filled: 0,
            zeros: None,
        }
    }
}

impl MapHasher {
    /// Pages from `index` on that are not zero, one for each checksum.
    pub(super) fn pages(&mut self, index: u64, flags: u16, crcs: &[U32]) {
        self.end_zeros();
        for (crc, index) in crcs.iter().zip(index..) {
            self.entry(index, flags, crc.get());
        }
    }

    /// Adds zero pages from `index` on. The cost does not depend on their number.
    pub(super) fn zeros(&mut self, index: u64, flags: u16, pages: u64) {
        if pages == 0 {
            return;
        }
        let end_index = index.saturating_add(pages);
        match &mut self.zeros {
            Some(run) if run.end_index == index && run.flags == flags => run.end_index = end_index,
            _ => {
                self.end_zeros();
                self.zeros = Some(ZeroRun {
                    first_index: index,
                    end_index,
                    flags,
                });
            }
        }
    }

    /// Hashes the open run of zeros: its end before its beginning. Pages ascend, so no pages read like that.
    fn end_zeros(&mut self) {
        if let Some(run) = self.zeros.take() {
            self.entry(run.end_index, run.flags, 0);
            self.entry(run.first_index, run.flags, 0);
        }
    }

    fn entry(&mut self, index: u64, flags: u16, crc: u32) {
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
        self.end_zeros();
        self.hash.update(&self.batch[..self.filled]);
        self.hash.finalize().into()
    }
}

impl PageMap {
    /// Computes a SHA-256 over the map's content, which does not depend on the storage of its pages. For each page,
    /// ascending: its index (8 bytes), flags (2) and CRC32 (4), little-endian. A longest run of zero pages with equal
    /// flags counts as two such entries, whatever its length: the index after its last page and the index of its
    /// first, both with its flags and 0. Reads map and checksums, verified, but no page: only a read of the pages
    /// compares them with their checksums.
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
