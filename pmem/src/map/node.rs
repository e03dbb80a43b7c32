//! Map nodes: built entry by entry, read as verified copies.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use super::StoredRun;
use crate::PAGE_SIZE;
use crate::checkpoint::StoredCheckpoint;
use crate::error::{MapFault, PageError, outside};
use crate::ids::PageNo;
use crate::layout::{ChildEntry, INNER_ENTRIES, LEAF_ENTRIES, NODE_MAGIC, NodeHeader, RunEntry};
use permafrost_medium::convert::to_usize;

const HEADER: usize = size_of::<NodeHeader>();

/// Entry of a node: a run in leaves, a child above.
#[derive(Clone, Copy)]
pub(super) enum Entry {
    Run(RunEntry),
    Child(ChildEntry),
}

impl Entry {
    pub(super) fn child(first_index: u64, node: PageNo, crc32: u32) -> Self {
        Self::Child(ChildEntry {
            first_index: U64::new(first_index),
            node: U64::new(node.0),
            crc32: U32::new(crc32),
            reserved: U32::ZERO,
        })
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Run(run) => run.as_bytes(),
            Self::Child(child) => child.as_bytes(),
        }
    }
}

/// A node being filled.
pub(super) struct NodeBuilder {
    level: u16,
    entries: u16,
    first_index: u64,
    end_index: u64,
    page: Box<[u8; PAGE_SIZE]>,
}

impl NodeBuilder {
    pub(super) fn new(level: u16) -> Self {
        Self {
            level,
            entries: 0,
            first_index: 0,
            end_index: 0,
            page: Box::new([0; PAGE_SIZE]),
        }
    }

    pub(super) fn is_full(&self) -> bool {
        let most = if self.level == 0 {
            LEAF_ENTRIES
        } else {
            INNER_ENTRIES
        };
        usize::from(self.entries) == most
    }

    /// Appends an entry for the indices from `first` up to `end`. Not to be called on a full node.
    pub(super) fn push(&mut self, entry: &Entry, first: u64, end: u64) {
        let bytes = entry.bytes();
        let at = HEADER + usize::from(self.entries) * bytes.len();
        self.page[at..at + bytes.len()].copy_from_slice(bytes);
        if self.entries == 0 {
            self.first_index = first;
        }
        self.end_index = end;
        self.entries += 1;
    }

    pub(super) const fn level(&self) -> u16 {
        self.level
    }

    pub(super) const fn bounds(&self) -> (u64, u64) {
        (self.first_index, self.end_index)
    }

    /// Returns the finished page.
    pub(super) fn page(&mut self) -> &[u8; PAGE_SIZE] {
        let header = NodeHeader {
            magic: NODE_MAGIC,
            level: U16::new(self.level),
            entries: U16::new(self.entries),
            first_index: U64::new(self.first_index),
            end_index: U64::new(self.end_index),
            reserved: U64::ZERO,
        };
        self.page[..HEADER].copy_from_slice(header.as_bytes());
        &self.page
    }

    /// Empties the node, at its level.
    pub(super) fn clear(&mut self) {
        self.entries = 0;
        self.page.fill(0);
    }
}

/// A verified copy of a node.
pub(super) struct Node {
    pub(super) level: u16,
    pub(super) entries: usize,
    pub(super) first_index: u64,
    pub(super) end_index: u64,
    location: PageNo,
    page: Box<[u8; PAGE_SIZE]>,
}

impl Node {
    /// Copies a node out of the region and verifies it: its checksum, its level, its place in one of
    /// the checkpoint's segments.
    pub(super) fn load(
        checkpoint: &StoredCheckpoint,
        location: PageNo,
        crc32: u32,
        level: u16,
    ) -> Result<Self, PageError> {
        let space = checkpoint.space();
        let place = space
            .geometry
            .place(location, 1)
            .map_err(|_| outside(location))?;
        if !checkpoint.lease().holds(place.segment) {
            return Err(outside(location));
        }
        let page = space.read_page(place).map_err(|error| error.at(location))?;
        let found = crc32fast::hash(page.as_slice());
        if found != crc32 {
            let fault = MapFault::Checksum {
                expected: crc32,
                found,
            };
            return Err(PageError::MapCorrupt { location, fault });
        }
        // From here on the page is a writer's, barring a collision; the checks are made all the same, as nothing that
        // comes from a disk may panic or loop.
        let malformed = PageError::MapCorrupt {
            location,
            fault: MapFault::Malformed,
        };
        let Ok((header, _)) = NodeHeader::read_from_prefix(page.as_slice()) else {
            return Err(malformed);
        };
        let most = if level == 0 {
            LEAF_ENTRIES
        } else {
            INNER_ENTRIES
        };
        let entries = usize::from(header.entries.get());
        let node = Self {
            level,
            entries,
            first_index: header.first_index.get(),
            end_index: header.end_index.get(),
            location,
            page,
        };
        let well_formed = header.magic == NODE_MAGIC
            && header.level.get() == level
            && (1..=most).contains(&entries)
            && node.first_index < node.end_index
            && node.ascends();
        if well_formed {
            Ok(node)
        } else {
            Err(malformed)
        }
    }

    /// Entries lie within the bounds, ascend and do not overlap.
    fn ascends(&self) -> bool {
        let mut next = self.first_index;
        for i in 0..self.entries {
            let (first, end) = if self.level == 0 {
                match StoredRun::from_entry(self.run_entry(i)) {
                    Some(run) => (run.first_index, run.end_index()),
                    None => return false,
                }
            } else {
                let first = self.child(i).first_index.get();
                (first, first.saturating_add(1))
            };
            if first < next || (i == 0 && first != self.first_index) || end > self.end_index {
                return false;
            }
            next = end;
        }
        self.level > 0 || next == self.end_index
    }

    pub(super) fn run(&self, i: usize) -> Result<StoredRun, PageError> {
        StoredRun::from_entry(self.run_entry(i)).ok_or(PageError::MapCorrupt {
            location: self.location,
            fault: MapFault::Malformed,
        })
    }

    fn run_entry(&self, i: usize) -> &RunEntry {
        static NONE: RunEntry = RunEntry {
            first_index: U64::ZERO,
            location: U64::ZERO,
            pages: U32::ZERO,
            flags: U16::ZERO,
            kind: U16::ZERO,
            crcs_crc32: U32::ZERO,
            reserved: U32::ZERO,
        };
        // Entries are aligned to nothing; i is below the entry count, which fits the page.
        entry_at(&self.page, i).unwrap_or(&NONE)
    }

    pub(super) fn child(&self, i: usize) -> &ChildEntry {
        static NONE: ChildEntry = ChildEntry {
            first_index: U64::ZERO,
            node: U64::ZERO,
            crc32: U32::ZERO,
            reserved: U32::ZERO,
        };
        entry_at(&self.page, i).unwrap_or(&NONE)
    }

    /// Returns the first run that ends after `index`; there is one if `index < end_index`.
    pub(super) fn run_after(&self, index: u64) -> usize {
        self.partition(|i| {
            let run = self.run_entry(i);
            run.first_index
                .get()
                .saturating_add(u64::from(run.pages.get()))
                <= index
        })
    }

    /// Returns the last child that begins at or before `index`, or the first.
    pub(super) fn child_for(&self, index: u64) -> usize {
        self.partition(|i| self.child(i).first_index.get() <= index)
            .saturating_sub(1)
    }

    fn partition(&self, before: impl Fn(usize) -> bool) -> usize {
        let (mut low, mut high) = (0, self.entries);
        while low < high {
            let middle = low.midpoint(high);
            if before(middle) {
                low = middle + 1
            } else {
                high = middle
            }
        }
        low
    }
}

fn entry_at<T: FromBytes + zerocopy::Immutable + zerocopy::KnownLayout + zerocopy::Unaligned>(
    page: &[u8; PAGE_SIZE],
    i: usize,
) -> Option<&T> {
    let at = HEADER + i * size_of::<T>();
    T::ref_from_bytes(page.get(at..at + size_of::<T>())?).ok()
}

/// Converts a run's page count to a length.
pub(super) fn run_len(pages: u32) -> usize {
    to_usize(u64::from(pages)) * PAGE_SIZE
}
