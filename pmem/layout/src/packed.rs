//! Sizes of packed segments.

use permafrost_medium::PAGE_SIZE;
use permafrost_medium::convert::to_u64;

use crate::{PACKED_ALIGNMENT, PackedHeader, StoredPages};

const PAGE_BYTES: u64 = PAGE_SIZE as u64;

/// Largest share of a slot, in quarters, that its live pages and their headers may fill for the slot to be cleaned:
/// what fuller ones would give is not worth the writes.
const SPARSE_QUARTERS: u64 = 3;

/// Bytes of a packed segment's header with its checksums, and of the gap to the next one.
#[must_use]
pub fn packed_header_bytes(pages: u32) -> u64 {
    let bytes = to_u64(size_of::<PackedHeader>()) + u64::from(pages) * to_u64(size_of::<u32>());
    bytes.next_multiple_of(to_u64(PACKED_ALIGNMENT))
}

/// Size of packed segments.
#[derive(Clone, Copy, Debug, Default)]
pub struct PackedSize {
    /// Number of their pages.
    pub pages: u32,
    /// Bytes of their headers.
    pub header_bytes: u64,
}

impl PackedSize {
    /// Returns the size of a segment with these pages.
    #[must_use]
    pub fn of(live: &StoredPages) -> Self {
        Self {
            pages: live.count(),
            header_bytes: packed_header_bytes(live.count()),
        }
    }

    /// Returns the size of both.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            pages: self.pages.saturating_add(other.pages),
            header_bytes: self.header_bytes + other.header_bytes,
        }
    }

    /// Returns true if a slot of `segment_pages` with no more than this is worth cleaning.
    #[must_use]
    pub fn is_sparse(self, segment_pages: u32) -> bool {
        self.all_pages() <= u64::from(segment_pages) * SPARSE_QUARTERS / 4
    }

    /// Returns the number of pages that the headers take.
    #[must_use]
    pub fn header_pages(self) -> u64 {
        self.header_bytes.div_ceil(PAGE_BYTES)
    }

    /// Returns the number of pages that the segments take together, with their headers in front of them.
    #[must_use]
    pub fn all_pages(self) -> u64 {
        u64::from(self.pages) + self.header_pages()
    }
}
