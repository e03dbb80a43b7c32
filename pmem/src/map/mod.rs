//! Page maps: the pages of an object and their locations.
//!
//! A map is a B-tree of 4096-byte nodes, written once, in ascending order, while the pages come in: a writer holds
//! one node a level. Leaves hold runs. Every reference carries the CRC32 of its target, up to the [`MapRoot`] in the
//! manifest, so stale, misplaced and damaged pages alike do not verify. Maps are flat: a run refers straight to its
//! pages, in whichever checkpoint's segments they are.

mod cursor;
mod digest;
mod heal;
mod node;
mod pieces;
mod reader;
mod visit;
mod writer;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

pub use cursor::MapCursor;
pub(crate) use cursor::ParentPage;
pub use pieces::{Kept, Piece};
pub use reader::{PageMap, Runs};
pub use writer::{MapStats, MapWriter};

use crate::error::{MapFault, PageError};
use crate::ids::PageNo;
use crate::layout::{MapRootBytes, RUN_STORED, RUN_ZERO, RunEntry};

/// Levels a map can have: 127 runs of at least a page, times 169 a level, exceed 2^64 pages well before.
const MAX_LEVEL: u16 = 8;

/// Reference to a page map: 32 bytes for a manifest. Valid within the checkpoint that it was written for, and in
/// those that inherit from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapRoot(MapRootBytes);

impl MapRoot {
    /// Root of a map without pages.
    pub(crate) const EMPTY: Self = Self(MapRootBytes {
        node: U64::ZERO,
        crc32: U32::ZERO,
        level: U16::ZERO,
        reserved: U16::ZERO,
        pages: U64::ZERO,
        runs: U64::ZERO,
    });

    pub(crate) fn new(node: PageNo, crc32: u32, level: u16, stats: &MapStats) -> Self {
        Self(MapRootBytes {
            node: U64::new(node.0),
            crc32: U32::new(crc32),
            level: U16::new(level),
            reserved: U16::ZERO,
            pages: U64::new(stats.pages),
            runs: U64::new(stats.runs),
        })
    }

    /// Returns the root as stored.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(self.0.as_bytes());
        bytes
    }

    /// Pages in the map.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.0.pages.get()
    }

    /// Runs in the map.
    #[must_use]
    pub fn runs(&self) -> u64 {
        self.0.runs.get()
    }

    /// Returns true if the map has no page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pages() == 0
    }

    pub(crate) const fn stored(&self) -> MapRootBytes {
        self.0
    }

    fn node(&self) -> PageNo {
        PageNo(self.0.node.get())
    }
}

impl TryFrom<&[u8]> for MapRoot {
    type Error = PageError;

    fn try_from(bytes: &[u8]) -> Result<Self, PageError> {
        let refuse = || PageError::MapCorrupt {
            location: PageNo(0),
            fault: MapFault::Root,
        };
        let root = MapRootBytes::read_from_bytes(bytes).map_err(|_| refuse())?;
        let empty = root.node.get() == 0;
        let sensible = root.level.get() <= MAX_LEVEL
            && root.reserved.get() == 0
            && empty == (root.pages.get() == 0)
            && root.runs.get() <= root.pages.get()
            && (!empty || root == Self::EMPTY.0);
        if sensible {
            Ok(Self(root))
        } else {
            Err(refuse())
        }
    }
}

/// Consecutive pages of an object, kept in one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredRun {
    /// Index of the first page: a virtual page number, or a page of a file.
    pub first_index: u64,
    /// Number of pages, at least 1.
    pub pages: u32,
    /// The writer's flags.
    pub flags: u16,
    /// Kind of storage of the pages.
    pub kind: RunKind,
}

/// Storage of a run's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunKind {
    /// Zero pages, stored nowhere.
    Zero,
    /// Pages one after the other in the region, within one segment.
    Stored {
        /// The first one.
        location: PageNo,
        /// CRC32 of the pages' CRC32s.
        crcs_crc32: u32,
    },
}

impl StoredRun {
    /// Returns the index after the last page.
    #[must_use]
    pub const fn end_index(&self) -> u64 {
        self.first_index.saturating_add(self.pages as u64)
    }

    /// Returns true if the run has the page.
    #[must_use]
    pub const fn contains(&self, index: u64) -> bool {
        self.first_index <= index && index < self.end_index()
    }

    fn to_entry(self) -> RunEntry {
        let (kind, location, crc) = match self.kind {
            RunKind::Zero => (RUN_ZERO, 0, 0),
            RunKind::Stored {
                location,
                crcs_crc32,
            } => (RUN_STORED, location.0, crcs_crc32),
        };
        RunEntry {
            first_index: U64::new(self.first_index),
            location: U64::new(location),
            pages: U32::new(self.pages),
            flags: U16::new(self.flags),
            kind: U16::new(kind),
            crcs_crc32: U32::new(crc),
            reserved: U32::ZERO,
        }
    }

    fn from_entry(entry: &RunEntry) -> Option<Self> {
        let kind = match entry.kind.get() {
            RUN_ZERO => RunKind::Zero,
            RUN_STORED => RunKind::Stored {
                location: PageNo(entry.location.get()),
                crcs_crc32: entry.crcs_crc32.get(),
            },
            _ => return None,
        };
        let (first_index, pages) = (entry.first_index.get(), entry.pages.get());
        first_index.checked_add(u64::from(pages))?;
        (pages > 0).then_some(Self {
            first_index,
            pages,
            flags: entry.flags.get(),
            kind,
        })
    }
}
