//! Map nodes: each covers an aligned block of indices, with eight slots of equal length.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::MAX_LEVEL;
use crate::PAGE_SIZE;
use crate::checkpoint::StoredCheckpoint;
use crate::error::{MapFault, PageError, SegmentPlace, outside};
use crate::ids::PageNo;
use crate::layout::digest;
use crate::layout::{NODE_MIXED, NODE_SLOTS, NodeHeader, SlotEntry};
use crate::space::Space;
use permafrost_medium::convert::{to_u64, to_usize};

const HEADER: usize = size_of::<NodeHeader>();
const ENTRY: usize = size_of::<SlotEntry>();
/// Bytes of a node with all slots occupied.
pub(super) const NODE_BYTES: usize = HEADER + NODE_SLOTS * ENTRY;

/// Pages in a block of the 8th power `span`; at most what an index can count.
pub(super) fn span_pages(span: u8) -> u64 {
    if u32::from(span) * 3 < u64::BITS {
        1 << (u32::from(span) * 3)
    } else {
        u64::MAX
    }
}

/// Returns the first index of the block of `8^span` pages with the page.
pub(super) fn block_of(index: u64, span: u8) -> u64 {
    if u32::from(span) * 3 < u64::BITS {
        index & !(span_pages(span) - 1)
    } else {
        0
    }
}

/// Place of a node, and its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodeRef {
    pub(super) location: PageNo,
    pub(super) offset: u16,
    pub(super) crc32: u32,
}

impl NodeRef {
    pub(super) fn of(entry: &SlotEntry) -> Self {
        Self {
            location: PageNo(entry.location.get()),
            offset: entry.detail.get(),
            crc32: entry.crc32.get(),
        }
    }

    pub(super) fn entry(self) -> SlotEntry {
        SlotEntry {
            location: U64::new(self.location.0),
            detail: U16::new(self.offset),
            crc32: U32::new(self.crc32),
        }
    }
}

/// Makes an entry for a stored page.
pub(super) fn page_entry(location: PageNo, flags: u16, crc: u32) -> SlotEntry {
    SlotEntry {
        location: U64::new(location.0),
        detail: U16::new(flags),
        crc32: U32::new(crc),
    }
}

/// Makes an entry for a slot full of zeros.
pub(super) fn zeros_entry(flags: u16) -> SlotEntry {
    page_entry(PageNo(0), flags, 0)
}

/// Returns true if an entry is zeros, which are stored nowhere.
pub(super) fn is_zeros(entry: &SlotEntry) -> bool {
    entry.location.get() == 0
}

/// Contents of a node.
#[derive(Clone, Copy)]
pub(super) struct Node {
    pub(super) level: u8,
    pub(super) first_index: u64,
    /// Number of pages below it.
    pub(super) pages: u64,
    /// Flags that all pages below have; `None` if they differ.
    pub(super) flags: Option<u16>,
    pub(super) digest: [u8; 32],
    /// Bitmap of the occupied slots.
    slots: u8,
    entries: [SlotEntry; NODE_SLOTS],
}

impl Node {
    /// Makes a leaf.
    pub(super) fn leaf(first_index: u64, slots: u8, entries: &[SlotEntry; NODE_SLOTS]) -> Self {
        let mut node = Self {
            level: 0,
            first_index,
            pages: u64::from(slots.count_ones()),
            flags: None,
            digest: digest::of_leaf(first_index, slots, entries),
            slots,
            entries: *entries,
        };
        node.flags = common(node.occupied().map(|(_, entry)| Some(entry.detail.get())));
        node
    }

    /// Makes an inner node of children and zeros.
    pub(super) fn inner(
        level: u8,
        first_index: u64,
        slots: u8,
        entries: &[SlotEntry; NODE_SLOTS],
        below: &[Below; NODE_SLOTS],
    ) -> Self {
        let mut node = Self {
            level,
            first_index,
            pages: 0,
            flags: None,
            digest: [0; 32],
            slots,
            entries: *entries,
        };
        let mut below = *below;
        for (slot, entry) in node.occupied() {
            if is_zeros(entry) {
                below[slot] = Below::zeros(level, node.slot_first(slot), entry.detail.get());
            }
        }
        let occupied = || node.occupied().map(|(slot, _)| (slot, &below[slot]));
        let pages = occupied().fold(0, |sum: u64, (_, below)| sum.saturating_add(below.pages));
        let flags = common(occupied().map(|(_, below)| below.flags));
        let digest = digest::of_block(level, occupied().map(|(slot, below)| (slot, below.digest)));
        (node.pages, node.flags, node.digest) = (pages, flags, digest);
        node
    }

    /// Returns the bytes to be stored, and their number.
    pub(super) fn to_bytes(self) -> ([u8; NODE_BYTES], usize) {
        let mut bytes = [0; NODE_BYTES];
        let mixed = if self.flags.is_none() { NODE_MIXED } else { 0 };
        let header = NodeHeader {
            first_index: U64::new(self.first_index),
            pages: U64::new(self.pages),
            digest: self.digest,
            flags: U16::new(self.flags.unwrap_or(0)),
            level: self.level | mixed,
            slots: self.slots,
        };
        bytes[..HEADER].copy_from_slice(header.as_bytes());
        let mut end = HEADER;
        for (_, entry) in self.occupied() {
            bytes[end..end + ENTRY].copy_from_slice(entry.as_bytes());
            end += ENTRY;
        }
        (bytes, end)
    }

    /// Copies a node out of the region and verifies it: its checksum, its place in one of the checkpoint's segments,
    /// and that it is of a level up to `most`.
    pub(super) fn load(
        checkpoint: &StoredCheckpoint,
        at: NodeRef,
        most: u8,
    ) -> Result<Self, PageError> {
        let (space, location) = (checkpoint.space(), at.location);
        let place = space.geometry.place(location, 1);
        let place = place.map_err(|_| outside(location))?;
        if !checkpoint.lease().holds(place.segment) {
            return Err(outside(location));
        }
        let node = Self::read(space, place, at, most);
        // If the page is a root it has a second copy, and the node with it.
        match node.is_err().then(|| space.second_copy(place)).flatten() {
            Some(copy) => Self::read(space, copy, at, most).or(node),
            None => node,
        }
    }

    /// Reads and verifies a node in the page at `place`.
    fn read(space: &Space, place: SegmentPlace, at: NodeRef, most: u8) -> Result<Self, PageError> {
        let location = at.location;
        let malformed = |_| PageError::MapCorrupt {
            location,
            fault: MapFault::Malformed,
        };
        let mut bytes = [0; NODE_BYTES];
        let room = PAGE_SIZE.saturating_sub(usize::from(at.offset));
        if room < HEADER {
            return Err(malformed(()));
        }
        let bytes = &mut bytes[..room.min(NODE_BYTES)];
        let read = space.read_part(place, location, usize::from(at.offset), bytes);
        read.map_err(|error| error.at(location))?;
        // Which bytes the checksum is of follows from one of them: if it is wrong, the checksum is, too.
        let slots = bytes[HEADER - 1];
        let len = HEADER + ENTRY * to_usize_of(slots.count_ones());
        let found = crc32fast::hash(&bytes[..len.min(bytes.len())]);
        if found != at.crc32 {
            if let Some(key) = space.locked(place.segment) {
                return Err(PageError::Locked { location, key });
            }
            let fault = MapFault::Checksum {
                expected: at.crc32,
                found,
            };
            return Err(PageError::MapCorrupt { location, fault });
        }
        let node = Self::parse(bytes).ok_or_else(|| malformed(()))?;
        if node.level > most {
            return Err(malformed(()));
        }
        Ok(node)
    }

    /// Reads a node. The bytes are a writer's, barring a collision; the checks are made all the same, as nothing that
    /// comes from a disk may panic or loop.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (header, rest) = NodeHeader::read_from_prefix(bytes).ok()?;
        let level = header.level & !NODE_MIXED;
        let mut node = Self {
            level,
            first_index: header.first_index.get(),
            pages: header.pages.get(),
            flags: (header.level & NODE_MIXED == 0).then(|| header.flags.get()),
            digest: header.digest,
            slots: header.slots,
            entries: [SlotEntry::new_zeroed(); NODE_SLOTS],
        };
        for (nth, slot) in (0..NODE_SLOTS)
            .filter(|slot| header.slots >> slot & 1 == 1)
            .enumerate()
        {
            let entry = rest.get(nth * ENTRY..(nth + 1) * ENTRY)?;
            node.entries[slot] = SlotEntry::read_from_bytes(entry).ok()?;
        }
        let sensible = level <= MAX_LEVEL
            && node.slots != 0
            && node.first_index == block_of(node.first_index, level + 1)
            && (1..=span_pages(level + 1)).contains(&node.pages)
            && (level > 0 || node.pages == u64::from(node.slots.count_ones()));
        sensible.then_some(node)
    }

    /// Index after the node's block.
    pub(super) fn end_index(&self) -> u64 {
        self.first_index.saturating_add(span_pages(self.level + 1))
    }

    pub(super) fn covers(&self, index: u64) -> bool {
        self.first_index <= index && index < self.end_index()
    }

    /// Returns true if there is a page for each index of the block.
    pub(super) fn is_full(&self) -> bool {
        self.pages == span_pages(self.level + 1)
    }

    /// Returns the slot with the page, as far as the block has it.
    pub(super) fn slot_of(&self, index: u64) -> usize {
        slot_of(index, self.level)
    }

    pub(super) fn slot_first(&self, slot: usize) -> u64 {
        self.first_index
            .saturating_add(to_u64(slot).saturating_mul(span_pages(self.level)))
    }

    pub(super) fn entry(&self, slot: usize) -> Option<&SlotEntry> {
        (self.slots >> slot & 1 == 1).then(|| &self.entries[slot])
    }

    /// Returns the bitmap of the occupied slots.
    pub(super) fn slots(&self) -> u8 {
        self.slots
    }

    /// Returns the occupied slots with their entries, ascending.
    pub(super) fn occupied(&self) -> impl Iterator<Item = (usize, &SlotEntry)> {
        let entries = self.entries.iter().enumerate();
        entries.filter(|(slot, _)| self.slots >> slot & 1 == 1)
    }

    /// Returns true if the nodes have the same pages at the same places.
    pub(super) fn equals(&self, other: &Self) -> bool {
        (self.level, self.first_index, self.slots) == (other.level, other.first_index, other.slots)
            && self.occupied().eq(other.occupied())
    }

    /// Computes the digest of a leaf anew.
    pub(super) fn leaf_digest(&self) -> [u8; 32] {
        digest::of_leaf(self.first_index, self.slots, &self.entries)
    }

    pub(super) fn below(&self) -> Below {
        Below {
            level: self.level,
            first_index: self.first_index,
            pages: self.pages,
            flags: self.flags,
            digest: self.digest,
        }
    }
}

/// Facts about a slot's pages that the node above needs.
#[derive(Clone, Copy)]
pub(super) struct Below {
    pub(super) level: u8,
    pub(super) first_index: u64,
    pages: u64,
    flags: Option<u16>,
    digest: [u8; 32],
}

impl Below {
    pub(super) const NOTHING: Self = Self {
        level: 0,
        first_index: 0,
        pages: 0,
        flags: None,
        digest: [0; 32],
    };

    pub(super) fn digest(&self) -> [u8; 32] {
        self.digest
    }

    fn zeros(span: u8, first_index: u64, flags: u16) -> Self {
        Self {
            level: 0,
            first_index,
            pages: span_pages(span),
            flags: Some(flags),
            digest: digest::of_zeros(span, first_index, flags),
        }
    }
}

/// Returns the slot of a page in a node of that level.
pub(super) fn slot_of(index: u64, level: u8) -> usize {
    to_usize_of(u32::try_from(index >> (u32::from(level) * 3) & 7).unwrap_or(0))
}

fn to_usize_of(count: u32) -> usize {
    to_usize(u64::from(count))
}

/// Returns the flags that all have.
fn common(mut flags: impl Iterator<Item = Option<u16>>) -> Option<u16> {
    let first = flags.next()??;
    flags.all(|flags| flags == Some(first)).then_some(first)
}

/// Converts a run's page count to a length.
pub(super) fn run_len(pages: u32) -> usize {
    to_usize_of(pages) * PAGE_SIZE
}

const _: () = assert!(NODE_BYTES <= PAGE_SIZE && MAX_LEVEL < NODE_MIXED);
