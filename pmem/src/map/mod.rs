//! Page maps: the pages of an object and their locations.
//!
//! A map is a tree of small nodes, many to a page of the region. A node covers an aligned block of indices: a leaf
//! eight pages, one of level n eight blocks of `8^n` pages. So the map of a checkpoint has the same blocks as its
//! parent's, and refers to those nodes of the parent below which nothing changed. Every reference carries the CRC32
//! of its target, up to the [`MapRoot`] in the manifest, so stale, misplaced and damaged pages alike do not verify.
//! An entry of a leaf refers straight to its page, in whichever checkpoint's segments it is.

mod cursor;
mod digest;
mod heal;
mod node;
mod pieces;
mod proof;
mod reader;
mod visit;
mod writer;
mod written;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

pub use cursor::MapCursor;
pub(crate) use cursor::ParentPage;
pub use pieces::{Kept, Piece};
pub use proof::{ProofRecord, ProofScope};
pub use reader::{PageExtent, PageMap, Runs};
pub use writer::{MapStats, MapWriter};
pub(crate) use written::WrittenObjects;

use self::node::{MAX_LEVEL, NodeRef};
use crate::error::{MapFault, PageError};
use crate::ids::PageNo;
use crate::layout::MapRootBytes;

/// Reference to a page map: 32 bytes for a manifest. Valid within the checkpoint that it was written for, and in
/// those that inherit from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapRoot(MapRootBytes);

impl MapRoot {
    /// Root of a map without pages.
    pub(crate) const EMPTY: Self = Self(MapRootBytes {
        node: U64::ZERO,
        crc32: U32::ZERO,
        offset: U16::ZERO,
        level: U16::ZERO,
        pages: U64::ZERO,
        reserved: U64::ZERO,
    });

    fn new(at: NodeRef, level: u8, stats: &MapStats) -> Self {
        Self(MapRootBytes {
            node: U64::new(at.location.0),
            crc32: U32::new(at.crc32),
            offset: U16::new(at.offset),
            level: U16::new(level.into()),
            pages: U64::new(stats.pages),
            reserved: U64::ZERO,
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

    /// Returns true if the map has no page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pages() == 0
    }

    pub(crate) const fn stored(&self) -> MapRootBytes {
        self.0
    }

    fn node(&self) -> NodeRef {
        NodeRef {
            location: PageNo(self.0.node.get()),
            offset: self.0.offset.get(),
            crc32: self.0.crc32.get(),
        }
    }

    fn level(&self) -> u8 {
        u8::try_from(self.0.level.get()).unwrap_or(MAX_LEVEL)
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
        let sensible = root.level.get() <= MAX_LEVEL.into()
            && root.reserved.get() == 0
            && empty == (root.pages.get() == 0)
            && (!empty || root == Self::EMPTY.0);
        if sensible {
            Ok(Self(root))
        } else {
            Err(refuse())
        }
    }
}

/// Finds pages in other checkpoints that may equal those of a dump.
pub trait FindEqual: Send {
    /// Returns a place that may have a page which equals the one at `index`, by its CRC32.
    fn find(&mut self, index: u64, crc32: u32) -> Option<(&mut MapCursor, u64)>;
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
}
