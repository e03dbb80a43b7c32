//! Nodes of page maps: their bytes, their digests, and the blocks that they cover.

use permafrost_medium::PAGE_SIZE;
use permafrost_medium::convert::{to_u64, to_usize};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::digest;
use crate::ids::PageNo;
use crate::{NODE_MIXED, NODE_SLOTS, NodeHeader, SlotEntry};

/// Highest level of a node: its block has as many pages as an index can count.
pub const MAX_LEVEL: u8 = 21;

/// Bytes of a node before its entries.
pub const NODE_HEADER_BYTES: usize = size_of::<NodeHeader>();
/// Bytes of an entry.
pub const NODE_ENTRY_BYTES: usize = size_of::<SlotEntry>();
/// Bytes of a node with all slots occupied.
pub const NODE_BYTES: usize = NODE_HEADER_BYTES + NODE_SLOTS * NODE_ENTRY_BYTES;

/// Returns the number of pages in a block of the 8th power `span`; at most what an index can count.
#[must_use]
pub fn span_pages(span: u8) -> u64 {
    if u32::from(span) * 3 < u64::BITS {
        1 << (u32::from(span) * 3)
    } else {
        u64::MAX
    }
}

/// Returns the first index of the block of `8^span` pages with the page.
#[must_use]
pub fn block_of(index: u64, span: u8) -> u64 {
    if u32::from(span) * 3 < u64::BITS {
        index & !(span_pages(span) - 1)
    } else {
        0
    }
}

/// Place of a node, and its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeRef {
    /// Page that has the node.
    pub location: PageNo,
    /// Offset of the node's first byte in the page.
    pub offset: u16,
    /// CRC32 of the node's bytes.
    pub crc32: u32,
}

impl NodeRef {
    /// Returns the node that an entry of the node above refers to.
    #[must_use]
    pub fn of(entry: &SlotEntry) -> Self {
        Self {
            location: PageNo(entry.location.get()),
            offset: entry.detail.get(),
            crc32: entry.crc32.get(),
        }
    }

    /// Returns the entry for the node above.
    #[must_use]
    pub fn entry(self) -> SlotEntry {
        SlotEntry {
            location: U64::new(self.location.0),
            detail: U16::new(self.offset),
            crc32: U32::new(self.crc32),
        }
    }
}

/// Makes an entry for a stored page.
#[must_use]
pub fn page_entry(location: PageNo, flags: u16, crc: u32) -> SlotEntry {
    SlotEntry {
        location: U64::new(location.0),
        detail: U16::new(flags),
        crc32: U32::new(crc),
    }
}

/// Makes an entry for a slot full of zeros.
#[must_use]
pub fn zeros_entry(flags: u16) -> SlotEntry {
    page_entry(PageNo(0), flags, 0)
}

/// Returns true if an entry is zeros, which are stored nowhere.
#[must_use]
pub fn is_zeros(entry: &SlotEntry) -> bool {
    entry.location.get() == 0
}

/// Contents of a node.
#[derive(Clone, Copy, Debug)]
pub struct MapNode {
    /// Level of the node: its slots have `8^level` pages each.
    pub level: u8,
    /// First index of the block.
    pub first_index: u64,
    /// Number of pages below it.
    pub pages: u64,
    /// Flags that all pages below have; `None` if they differ.
    pub flags: Option<u16>,
    /// Digest of the block.
    pub digest: [u8; 32],
    /// Bitmap of the occupied slots.
    slots: u8,
    entries: [SlotEntry; NODE_SLOTS],
}

impl MapNode {
    /// Makes a leaf.
    #[must_use]
    pub fn leaf(first_index: u64, slots: u8, entries: &[SlotEntry; NODE_SLOTS]) -> Self {
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
    #[must_use]
    pub fn inner(
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
    #[must_use]
    pub fn to_bytes(self) -> ([u8; NODE_BYTES], usize) {
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
        bytes[..NODE_HEADER_BYTES].copy_from_slice(header.as_bytes());
        let mut end = NODE_HEADER_BYTES;
        for (_, entry) in self.occupied() {
            bytes[end..end + NODE_ENTRY_BYTES].copy_from_slice(entry.as_bytes());
            end += NODE_ENTRY_BYTES;
        }
        (bytes, end)
    }

    /// Reads a node. The bytes are a writer's, barring a collision; the checks are made all the same, as nothing that
    /// comes from a disk may panic or loop.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
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
            let entry = rest.get(nth * NODE_ENTRY_BYTES..(nth + 1) * NODE_ENTRY_BYTES)?;
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
    #[must_use]
    pub fn end_index(&self) -> u64 {
        self.first_index.saturating_add(span_pages(self.level + 1))
    }

    /// Returns true if the index is in the block.
    #[must_use]
    pub fn covers(&self, index: u64) -> bool {
        self.first_index <= index && index < self.end_index()
    }

    /// Returns true if there is a page for each index of the block.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.pages == span_pages(self.level + 1)
    }

    /// Returns the slot with the page, as far as the block has it.
    #[must_use]
    pub fn slot_of(&self, index: u64) -> usize {
        slot_of(index, self.level)
    }

    /// Returns the first index of a slot.
    #[must_use]
    pub fn slot_first(&self, slot: usize) -> u64 {
        self.first_index
            .saturating_add(to_u64(slot).saturating_mul(span_pages(self.level)))
    }

    /// Returns the entry of a slot, if it is occupied.
    #[must_use]
    pub fn entry(&self, slot: usize) -> Option<&SlotEntry> {
        (self.slots >> slot & 1 == 1).then(|| &self.entries[slot])
    }

    /// Returns the bitmap of the occupied slots.
    #[must_use]
    pub fn slots(&self) -> u8 {
        self.slots
    }

    /// Returns the occupied slots with their entries, ascending.
    pub fn occupied(&self) -> impl Iterator<Item = (usize, &SlotEntry)> {
        let entries = self.entries.iter().enumerate();
        entries.filter(|(slot, _)| self.slots >> slot & 1 == 1)
    }

    /// Returns true if the nodes have the same pages at the same places.
    #[must_use]
    pub fn equals(&self, other: &Self) -> bool {
        (self.level, self.first_index, self.slots) == (other.level, other.first_index, other.slots)
            && self.occupied().eq(other.occupied())
    }

    /// Computes the digest of a leaf anew.
    #[must_use]
    pub fn leaf_digest(&self) -> [u8; 32] {
        digest::of_leaf(self.first_index, self.slots, &self.entries)
    }

    /// Returns the facts that the node above needs.
    #[must_use]
    pub fn below(&self) -> Below {
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
#[derive(Clone, Copy, Debug)]
pub struct Below {
    /// Level of the node that covers the slot; 0 for zeros.
    pub level: u8,
    /// First index of that node's block.
    pub first_index: u64,
    pages: u64,
    flags: Option<u16>,
    digest: [u8; 32],
}

impl Below {
    /// Facts about an empty slot.
    pub const NOTHING: Self = Self {
        level: 0,
        first_index: 0,
        pages: 0,
        flags: None,
        digest: [0; 32],
    };

    /// Returns the digest of the slot's block.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
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
#[must_use]
pub fn slot_of(index: u64, level: u8) -> usize {
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

const _: () = assert!(NODE_BYTES <= PAGE_SIZE && MAX_LEVEL < NODE_MIXED);
