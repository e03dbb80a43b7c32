//! The segment table: where each segment is on the medium.
//!
//! Maps name pages by segment, and never change. A segment can be moved all the same: it is written to another place,
//! made durable there, and its entry of eight bytes is overwritten, which the medium does wholly or not at all. So the
//! cost of moving a segment does not depend on the number of maps and checkpoints that refer to it.
//!
//! The table has two copies, for damage of the medium. A move makes the first copy durable before it writes the second,
//! so after a crash the first counts if it is intact:
//!
//! | first copy | second copy | position | because |
//! | --- | --- | --- | --- |
//! | intact, not 0 | any | the first's | a move writes it first |
//! | 0 | intact | the second's | no move writes 0: the first is damaged, or both are 0 |
//! | damaged | intact | the second's | at worst it is older: the place before the move is not reused until the second is durable |
//! | damaged | damaged | unknown | all pages of the segment are lost |

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::RwLock;

use crate::PAGE_BYTES;
use crate::geometry::Geometry;
use crate::ids::{RegionUuid, SegmentNo, SlotNo};
use crate::layout::{PACKED_ALIGNMENT, TABLE_ENTRY_BYTES, packed_header_bytes};
use crate::slots::Slots;
use permafrost_medium::convert::{to_u64, to_usize};
use permafrost_medium::{Flushed, LostPage, MEDIUM_SPAN, Medium};

/// Bits of an entry for the place of the segment's header, in units of its alignment.
const HEADER_BITS: u32 = 42;
/// Bits for the number of stored pages.
const STORED_BITS: u32 = 10;

/// Entries read at a time.
const CHUNK_BYTES: usize = 64 << 10;

/// Place of a segment on the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    /// Byte offset of the segment's header.
    pub(crate) header_at: u64,
    /// Number of stored pages of a packed segment; `None` for a whole segment, which has a slot to itself.
    pub(crate) packed_pages: Option<u32>,
}

/// Entry of a segment, as it is in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    /// In the slot of its own number.
    Home,
    Moved(Position),
    Damaged,
}

/// Most times that the table grows while a region is open.
const MAX_GROWTHS: usize = 24;

/// Positions of all segments, in DRAM and on the first medium.
pub(crate) struct SegmentTable {
    uuid: RegionUuid,
    slots: Slots,
    /// Entries as of the open, and those of each growth since.
    entries: Box<[AtomicU64]>,
    more: [OnceLock<Box<[AtomicU64]>>; MAX_GROWTHS],
    len: AtomicU32,
    /// Held for reading while an entry is written, and for writing while the table moves on the medium.
    place: RwLock<TablePlace>,
}

/// Place of the table on the first medium.
#[derive(Clone, Copy)]
struct TablePlace {
    /// Byte offset of the first copy; the second follows.
    at: u64,
    /// Bytes of a copy.
    copy_bytes: u64,
}

impl TablePlace {
    fn of(geometry: &Geometry) -> Self {
        Self {
            at: geometry.table_at,
            copy_bytes: geometry.table_bytes(),
        }
    }
}

/// Entries whose two copies differ.
pub(crate) struct Repairs(Vec<SegmentNo>);

impl SegmentTable {
    /// Writes and flushes an empty table: every segment at home.
    pub(crate) fn format(
        medium: &dyn Medium,
        geometry: &Geometry,
        flushed: &mut Flushed,
    ) -> io::Result<()> {
        let zeros = vec![0; to_usize(PAGE_BYTES)];
        let len_bytes = 2 * geometry.table_bytes();
        for at in (geometry.table_at..geometry.table_at + len_bytes).step_by(zeros.len()) {
            // SAFETY: no other code has the region open while it is formatted.
            unsafe { medium.write(at, &zeros)? };
        }
        medium.flush(geometry.table_at, len_bytes, flushed)
    }

    /// Reads the table; `slots` are those of all media. Writes nothing: see [`SegmentTable::repair`].
    pub(crate) fn load(
        medium: &dyn Medium,
        geometry: &Geometry,
        slots: Slots,
        uuid: RegionUuid,
    ) -> io::Result<(Self, Repairs)> {
        let mut entries = Vec::with_capacity(to_usize(u64::from(geometry.segments)));
        let mut repairs = Vec::new();
        let (mut first, mut second) = (vec![0; CHUNK_BYTES], vec![0; CHUNK_BYTES]);
        for at in (0..geometry.table_bytes()).step_by(CHUNK_BYTES) {
            let len = to_usize((geometry.table_bytes() - at).min(to_u64(CHUNK_BYTES)));
            read_pages(medium, geometry.table_at + at, &mut first[..len])?;
            let second_at = geometry.table_at + geometry.table_bytes() + at;
            read_pages(medium, second_at, &mut second[..len])?;
            let pairs = first[..len]
                .as_chunks::<TABLE_ENTRY_BYTES>()
                .0
                .iter()
                .zip(second[..len].as_chunks::<TABLE_ENTRY_BYTES>().0);
            for (first, second) in pairs {
                let Some(segment) = next_number(&entries, geometry) else {
                    break;
                };
                let (first, second) = (u64::from_le_bytes(*first), u64::from_le_bytes(*second));
                let chosen = choose(uuid, &slots, segment, first, second);
                entries.push(AtomicU64::new(chosen));
                if first != second {
                    repairs.push(segment);
                }
            }
        }
        let table = Self {
            uuid,
            slots,
            len: AtomicU32::new(geometry.segments),
            entries: entries.into_boxed_slice(),
            more: Default::default(),
            place: RwLock::new(TablePlace::of(geometry)),
        };
        Ok((table, Repairs(repairs)))
    }

    /// Makes both copies of entries equal that a crash or damage left different. A segment whose position is unknown
    /// and that nothing holds is at home from then on: the next one to take it writes it anew.
    pub(crate) fn repair(
        &self,
        medium: &dyn Medium,
        repairs: &Repairs,
        is_free: impl Fn(SegmentNo) -> bool,
        flushed: &mut Flushed,
    ) -> io::Result<()> {
        for &segment in &repairs.0 {
            if self.entry(segment) == Entry::Damaged {
                if !is_free(segment) {
                    continue;
                }
                if let Some(cell) = self.cell(segment) {
                    cell.store(0, Ordering::Release);
                }
            }
            self.write(medium, segment, flushed)?;
        }
        Ok(())
    }

    /// Writes the table to its place in a larger geometry, with entries for more segments, and makes it durable. Then
    /// `commit` makes it count. After an error it is the old table, if `commit` did not fail, and else unknown which.
    pub(crate) fn relocate<T>(
        &self,
        medium: &dyn Medium,
        geometry: &Geometry,
        commit: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        let mut place = self.place.write();
        self.extend(geometry.segments)?;
        let (to, mut flushed) = (TablePlace::of(geometry), Flushed::new());
        let mut bytes = Vec::with_capacity(CHUNK_BYTES);
        let mut at = 0;
        while at < to.copy_bytes {
            let first = u32::try_from(at / to_u64(TABLE_ENTRY_BYTES)).unwrap_or(u32::MAX);
            let len = (to.copy_bytes - at).min(to_u64(CHUNK_BYTES));
            bytes.clear();
            for segment in (first..).take(to_usize(len) / TABLE_ENTRY_BYTES) {
                bytes.extend_from_slice(&self.raw(SegmentNo(segment)).to_le_bytes());
            }
            for copy in 0..2 {
                let at = to.at + copy * to.copy_bytes + at;
                // SAFETY: a part of the medium that no superblock gives a meaning.
                unsafe { medium.write(at, &bytes)? };
                medium.flush(at, len, &mut flushed)?;
            }
            at += len;
        }
        medium.fence(&mut flushed)?;
        let committed = commit()?;
        *place = to;
        Ok(committed)
    }

    /// Makes room for entries in DRAM.
    fn extend(&self, segments: u32) -> io::Result<()> {
        let more = segments.saturating_sub(self.len());
        if more == 0 {
            return Ok(());
        }
        let entries = (0..more).map(|_| AtomicU64::new(0)).collect();
        let free = self.more.iter().find(|chunk| chunk.get().is_none());
        let free = free.ok_or_else(|| {
            io::Error::other("the region grew too often since it was opened: open it anew")
        })?;
        let _ = free.set(entries);
        self.len.store(segments, Ordering::Release);
        Ok(())
    }

    /// Number of segments that there are entries for.
    pub(crate) fn len(&self) -> u32 {
        self.len.load(Ordering::Acquire)
    }

    /// Slots of all media.
    pub(crate) fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Returns the place of a segment; `None` if that is unknown.
    pub(crate) fn position(&self, segment: SegmentNo) -> Option<Position> {
        match self.entry(segment) {
            Entry::Home if segment.0 < self.slots.count(0) => Some(Position {
                header_at: self.slots.at(SlotNo(segment.0)),
                packed_pages: None,
            }),
            Entry::Moved(position) => Some(position),
            Entry::Home | Entry::Damaged => None,
        }
    }

    /// Returns the slot that a segment is in; `None` if that is unknown.
    pub(crate) fn slot(&self, segment: SegmentNo) -> Option<SlotNo> {
        self.slots.of(self.position(segment)?.header_at)
    }

    /// Returns the medium that the entry of a segment names, be it there or not; the first for one at home.
    pub(crate) fn medium(&self, segment: SegmentNo) -> usize {
        let header = self.raw(segment) & ((1 << HEADER_BITS) - 1);
        to_usize(header * to_u64(PACKED_ALIGNMENT) / MEDIUM_SPAN)
    }

    /// Sets the position of a segment in DRAM. Returns true if the entry on the medium has to be written.
    pub(crate) fn set(&self, segment: SegmentNo, position: Position) -> bool {
        let home = position.packed_pages.is_none()
            && segment.0 < self.slots.count(0)
            && position.header_at == self.slots.at(SlotNo(segment.0));
        let raw = if home {
            0
        } else {
            encode(self.uuid, segment, position)
        };
        let cell = self.cell(segment);
        cell.is_some_and(|cell| cell.swap(raw, Ordering::AcqRel) != raw)
    }

    /// Writes and flushes both copies of an entry: for a segment that no durable record refers to.
    pub(crate) fn write(
        &self,
        medium: &dyn Medium,
        segment: SegmentNo,
        flushed: &mut Flushed,
    ) -> io::Result<()> {
        // Both or an error: a copy that could not be written may be read again after the next open, and would then name
        // a place that was given away.
        self.write_copy(medium, segment, 0, flushed)?;
        self.write_copy(medium, segment, 1, flushed)
    }

    /// Writes and flushes copy 0 or 1 of an entry.
    pub(crate) fn write_copy(
        &self,
        medium: &dyn Medium,
        segment: SegmentNo,
        copy: u64,
        flushed: &mut Flushed,
    ) -> io::Result<()> {
        // What is written after the table has moved goes to its new place; what was written before is in the new one,
        // as it is written from DRAM.
        let place = self.place.read();
        let before = u64::from(segment.0) * to_u64(TABLE_ENTRY_BYTES);
        let at = place.at + copy * place.copy_bytes + before;
        let raw = self.raw(segment);
        // SAFETY: entries are read at open only, and no slice of the table is ever lent. Whoever holds the segment as
        // the only one, or moves it under the lock for moves, is the only one to write its entry.
        unsafe { medium.write(at, &raw.to_le_bytes())? };
        medium.flush(at, to_u64(TABLE_ENTRY_BYTES), flushed)
    }

    fn entry(&self, segment: SegmentNo) -> Entry {
        let Some(cell) = self.cell(segment) else {
            return Entry::Damaged;
        };
        let raw = cell.load(Ordering::Acquire);
        decode(self.uuid, &self.slots, segment, raw)
    }

    fn raw(&self, segment: SegmentNo) -> u64 {
        let cell = self.cell(segment);
        cell.map_or(0, |cell| cell.load(Ordering::Acquire))
    }

    fn cell(&self, segment: SegmentNo) -> Option<&AtomicU64> {
        let mut index = to_usize(u64::from(segment.0));
        if let Some(cell) = self.entries.get(index) {
            return Some(cell);
        }
        index -= self.entries.len();
        for chunk in &self.more {
            let chunk = chunk.get()?;
            if let Some(cell) = chunk.get(index) {
                return Some(cell);
            }
            index -= chunk.len();
        }
        None
    }
}

/// Reads whole pages; one that is lost reads as an entry that does not verify, all over.
fn read_pages(medium: &dyn Medium, at: u64, into: &mut [u8]) -> io::Result<()> {
    for (page, n) in into.chunks_mut(to_usize(PAGE_BYTES)).zip(0..) {
        match medium.read(at + n * PAGE_BYTES, page) {
            Err(error) if LostPage::of(&error).is_some() => page.fill(0xff),
            read => read?,
        }
    }
    Ok(())
}

fn next_number(entries: &[AtomicU64], geometry: &Geometry) -> Option<SegmentNo> {
    let number = u32::try_from(entries.len()).ok()?;
    (number < geometry.segments).then_some(SegmentNo(number))
}

/// Chooses the copy that counts: see the table at the top.
fn choose(uuid: RegionUuid, slots: &Slots, segment: SegmentNo, first: u64, second: u64) -> u64 {
    let intact = |raw| decode(uuid, slots, segment, raw) != Entry::Damaged;
    match (intact(first), intact(second)) {
        (true, _) if first != 0 => first,
        (_, true) => second,
        _ => first,
    }
}

fn encode(uuid: RegionUuid, segment: SegmentNo, position: Position) -> u64 {
    let header = position.header_at / to_u64(PACKED_ALIGNMENT);
    // One more than the pages: a packed segment may store none.
    let stored = position
        .packed_pages
        .map_or(0, |pages| u64::from(pages) + 1);
    let low = header | stored << HEADER_BITS;
    low | check_bits(uuid, segment, low)
}

fn decode(uuid: RegionUuid, slots: &Slots, segment: SegmentNo, raw: u64) -> Entry {
    if raw == 0 {
        return Entry::Home;
    }
    let low = raw & ((1 << (HEADER_BITS + STORED_BITS)) - 1);
    let header_at = (low & ((1 << HEADER_BITS) - 1)) * to_u64(PACKED_ALIGNMENT);
    let packed_pages = u32::try_from(low >> HEADER_BITS)
        .unwrap_or(u32::MAX)
        .checked_sub(1);
    let position = Position {
        header_at,
        packed_pages,
    };
    if raw == low | check_bits(uuid, segment, low) && fits(slots, position) {
        Entry::Moved(position)
    } else {
        Entry::Damaged
    }
}

/// Returns true if the position lies within one slot; a whole segment begins with it.
fn fits(slots: &Slots, position: Position) -> bool {
    let Some(slot) = slots.of(position.header_at) else {
        return false;
    };
    let before = position.header_at - slots.at(slot);
    match position.packed_pages {
        None => before == 0,
        Some(pages) => before + packed_header_bytes(pages) <= slots.segment_bytes(),
    }
}

/// Returns the check of an entry, in its place: the upper bits of a CRC32, never all zero.
fn check_bits(uuid: RegionUuid, segment: SegmentNo, low: u64) -> u64 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(uuid.as_bytes());
    hasher.update(&segment.0.to_le_bytes());
    hasher.update(&low.to_le_bytes());
    let bits = u64::BITS - HEADER_BITS - STORED_BITS;
    let check = u64::from(hasher.finalize()) >> (u32::BITS - bits);
    check.max(1) << (HEADER_BITS + STORED_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots() -> Slots {
        let slots = Slots::new(64 << 10, 1 << 20, 40);
        slots.set_count(15, 9);
        slots
    }

    #[test]
    fn entries_are_read_as_written_and_flipped_bits_are_found() {
        let (g, uuid) = (slots(), RegionUuid::new([7; 16]));
        for packed_pages in [None, Some(0), Some(3)] {
            let header_at = g.at(SlotNo(5)) + packed_pages.map_or(0, |_| 3 * 64);
            let position = Position {
                header_at,
                packed_pages,
            };
            let raw = encode(uuid, SegmentNo(9), position);
            assert_eq!(decode(uuid, &g, SegmentNo(9), raw), Entry::Moved(position));
            assert_eq!(decode(uuid, &g, SegmentNo(8), raw), Entry::Damaged);
            for bit in 0..64 {
                let flipped = raw ^ 1 << bit;
                assert_ne!(
                    decode(uuid, &g, SegmentNo(9), flipped),
                    Entry::Moved(position)
                );
            }
        }
    }

    #[test]
    fn a_position_lies_within_one_slot() {
        let g = slots();
        let at = |slot, pages: u64| g.at(SlotNo(slot)) + pages * PAGE_BYTES;
        let whole = |header_at| Position {
            header_at,
            packed_pages: None,
        };
        let packed = |header_at, pages| Position {
            header_at,
            packed_pages: Some(pages),
        };
        assert!(fits(&g, whole(at(1, 0))) && !fits(&g, whole(at(1, 1))));
        let last = at(2, 0) - packed_header_bytes(8);
        assert!(fits(&g, packed(last, 8)) && !fits(&g, packed(last, 9)));
        assert!(!fits(&g, whole(at(40, 0))) && !fits(&g, whole(0)));
    }

    #[test]
    fn the_first_copy_counts_unless_it_is_damaged() {
        let (g, uuid, segment) = (slots(), RegionUuid::new([7; 16]), SegmentNo(3));
        let entry = |slot| {
            let position = Position {
                header_at: g.at(SlotNo(slot)),
                packed_pages: None,
            };
            encode(uuid, segment, position)
        };
        let (a, b, bad) = (entry(4), entry(6), u64::MAX);
        for (first, second, chosen) in [
            (a, b, a),
            (a, 0, a),
            (a, bad, a),
            (0, b, b),
            (0, 0, 0),
            (bad, b, b),
            (bad, 0, 0),
            (0, bad, 0),
            (bad, bad, bad),
        ] {
            assert_eq!(choose(uuid, &g, segment, first, second), chosen);
        }
    }
}
