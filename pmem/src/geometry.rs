//! Offsets and sizes of a region's parts.

use crate::PAGE_BYTES;
use crate::error::{FormatError, GrowError, NotInSegments, SegmentPlace};
use crate::ids::{PageNo, SegmentNo};
use crate::journal::JournalPlace;
pub(crate) use crate::layout::headers::MAX_SEGMENT_BYTES;
use crate::layout::{RECORD_BYTES, Superblock, TABLE_ENTRY_BYTES};
use permafrost_medium::MEDIUM_SPAN;
use permafrost_medium::convert::to_u64;

/// Bytes of the two superblocks, a page each.
pub(crate) const SUPERBLOCKS_BYTES: u64 = 2 * PAGE_BYTES;
pub(crate) const MIN_SEGMENT_BYTES: u32 = 64 << 10;
/// Numbers of journal records are multiples of this.
const RECORDS_GRAIN: u32 = 32;
const MAX_JOURNAL_RECORDS: u32 = 1 << 22;
/// Bytes of a medium for each record of a journal half, where the number is not given: most checkpoints are larger. The
/// journal then takes a 128th of the medium.
const BYTES_PER_RECORD: u64 = 32 << 10;
/// Records of a journal half where their number is not given, at least.
const LEAST_RECORDS: u32 = 64;
/// Segment numbers for each slot: cleaning puts the pages of several sparse segments into one slot, and a small
/// checkpoint needs a segment number but not a slot.
const SEGMENTS_PER_SLOT: u64 = 32;
/// Most segment numbers of a region; more slots than these there cannot be either.
pub(crate) const MAX_SEGMENTS: u32 = 1 << 24;
/// Highest byte offset that slot 0 can have.
pub(crate) const LAST_SEGMENTS_AT: u64 = (SUPERBLOCKS_BYTES
    + 4 * MAX_JOURNAL_RECORDS as u64 * RECORD_BYTES as u64
    + 2 * MAX_SEGMENTS as u64 * TABLE_ENTRY_BYTES as u64)
    .next_multiple_of(MAX_SEGMENT_BYTES as u64);
/// Least segment numbers for each slot with which media are added.
const LEAST_SEGMENTS_PER_SLOT: u64 = 2;

/// Sizes and offsets of a region's parts, consistent by construction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) capacity_bytes: u64,
    pub(crate) journal_at: u64,
    pub(crate) journal_records: u32,
    pub(crate) table_at: u64,
    pub(crate) segments_at: u64,
    pub(crate) slots: u32,
    pub(crate) segments: u32,
    pub(crate) segment_bytes: u32,
}

impl Geometry {
    /// Lays out a medium of `medium_bytes`. `journal_records` per half; `None`: one for every 32 KiB, from 64 to 4 Mi.
    pub(crate) fn plan(
        medium_bytes: u64,
        segment_bytes: u32,
        journal_records: Option<u32>,
    ) -> Result<Self, FormatError> {
        if !valid_segment_bytes(segment_bytes) {
            return Err(FormatError::SegmentSize { segment_bytes });
        }
        let records = journal_records.unwrap_or_else(|| {
            let scaled = u32::try_from(medium_bytes / BYTES_PER_RECORD).unwrap_or(u32::MAX);
            let records = scaled.clamp(LEAST_RECORDS, MAX_JOURNAL_RECORDS);
            records / RECORDS_GRAIN * RECORDS_GRAIN
        });
        if !valid_journal_records(records) {
            return Err(FormatError::JournalSize {
                journal_records: records,
            });
        }
        let journal_end = journal_end(records);
        let slot_bytes = u64::from(segment_bytes);
        let capacity = || FormatError::Capacity {
            capacity_bytes: medium_bytes,
            needed_bytes: least_bytes(segment_bytes, journal_records),
        };
        // The table is as large as it would be if it and the journal had slots, too.
        let most = medium_bytes.saturating_sub(journal_end) / slot_bytes;
        let most = u32::try_from(most)
            .ok()
            .filter(|most| *most <= MAX_SEGMENTS);
        let segments = segments_for(most.ok_or_else(capacity)?);
        let table_end = journal_end + 2 * table_bytes(segments);
        let segments_at = table_end.next_multiple_of(slot_bytes);
        let slots = medium_bytes.saturating_sub(segments_at) / slot_bytes;
        let slots = u32::try_from(slots).map_err(|_| capacity())?;
        if slots == 0 {
            return Err(capacity());
        }
        Ok(Self {
            capacity_bytes: segments_at + u64::from(slots) * slot_bytes,
            journal_at: SUPERBLOCKS_BYTES,
            journal_records: records,
            table_at: journal_end,
            segments_at,
            slots,
            segments,
            segment_bytes,
        })
    }

    /// Returns the geometry that an intact superblock describes; `None` if it is impossible.
    pub(crate) fn from_superblock(block: &Superblock) -> Option<Self> {
        let geometry = Self {
            capacity_bytes: block.capacity_bytes.get(),
            journal_at: block.journal_at.get(),
            journal_records: block.journal_records.get(),
            table_at: block.table_at.get(),
            segments_at: block.segments_at.get(),
            slots: block.slots.get(),
            segments: block.segments.get(),
            segment_bytes: block.segment_bytes.get(),
        };
        let segment_bytes = u64::from(geometry.segment_bytes);
        let possible = valid_segment_bytes(geometry.segment_bytes)
            && valid_journal_records(geometry.journal_records)
            && geometry.slots > 0
            && (geometry.slots..=MAX_SEGMENTS).contains(&geometry.segments)
            && geometry.journal_at == SUPERBLOCKS_BYTES
            && geometry.has_table()
            && geometry.segments_at.is_multiple_of(segment_bytes)
            && geometry
                .segments_at
                .checked_add(u64::from(geometry.slots) * segment_bytes)
                == Some(geometry.capacity_bytes);
        possible.then_some(geometry)
    }

    /// Returns the place of the journal.
    pub(crate) fn journal(&self) -> JournalPlace {
        JournalPlace {
            at: self.journal_at,
            records: self.journal_records,
        }
    }

    /// Returns true if the table is in front of the slots or behind them.
    fn has_table(&self) -> bool {
        let journal_end = journal_end(self.journal_records);
        let in_front = self.table_at == journal_end
            && self.segments_at >= self.table_at + 2 * table_bytes(self.segments);
        let behind = self.segments_at >= journal_end
            && self.table_at >= self.capacity_bytes
            && self.table_at < MEDIUM_SPAN
            && self.table_at.is_multiple_of(PAGE_BYTES);
        in_front || behind
    }

    /// Returns the geometry of the region on a medium of `medium_bytes`, which has grown; `other_slots` are those of
    /// other media.
    ///
    /// The new segment table is behind the slots, and overlaps no part of the region as it is: so the old one counts
    /// until a superblock names the new one. It is as large as a table for all slots should be. The next growth puts
    /// slots in its place.
    pub(crate) fn grown(&self, medium_bytes: u64, other_slots: u32) -> Result<Self, GrowError> {
        let slot_bytes = u64::from(self.segment_bytes);
        let needed =
            |slots: u32| segments_for(slots.saturating_add(other_slots)).max(self.segments);
        // With one slot more, behind which the table has room.
        let least_slots = self.end_bytes().saturating_sub(self.segments_at);
        let least_slots = least_slots
            .div_ceil(slot_bytes)
            .max(u64::from(self.slots) + 1);
        let least_slots = u32::try_from(least_slots).map_err(|_| GrowError::TooLarge)?;
        let end_with = |slots: u32| {
            self.segments_at + u64::from(slots) * slot_bytes + 2 * table_bytes(needed(slots))
        };
        if end_with(least_slots) > medium_bytes {
            return Err(GrowError::TooSmall {
                asked_bytes: medium_bytes,
                least_bytes: end_with(least_slots),
            });
        }
        // The table is as large as it would be if it had slots, too.
        let room = medium_bytes - self.segments_at;
        let most = u32::try_from(room / slot_bytes).unwrap_or(u32::MAX);
        let slots = room.saturating_sub(2 * table_bytes(needed(most))) / slot_bytes;
        let slots = u32::try_from(slots).unwrap_or(u32::MAX).max(least_slots);
        let total = slots.checked_add(other_slots);
        if total.is_none_or(|total| total > MAX_SEGMENTS) || medium_bytes > MEDIUM_SPAN {
            return Err(GrowError::TooLarge);
        }
        let segments = needed(slots);
        let capacity_bytes = self.segments_at + u64::from(slots) * slot_bytes;
        Ok(Self {
            capacity_bytes,
            slots,
            segments,
            table_at: capacity_bytes,
            ..*self
        })
    }

    /// Returns the least bytes of the first medium with which there are enough segment numbers for `slots` slots on all
    /// media; `None` if there are enough now.
    pub(crate) fn least_bytes_for(&self, slots: u64) -> Option<u64> {
        if slots * LEAST_SEGMENTS_PER_SLOT <= u64::from(self.segments) {
            return None;
        }
        let segments = segments_for(u32::try_from(slots).unwrap_or(u32::MAX));
        let more = (2 * table_bytes(segments)).next_multiple_of(u64::from(self.segment_bytes));
        Some(self.end_bytes() + more + u64::from(self.segment_bytes))
    }

    /// Bytes of the medium that the region needs.
    pub(crate) fn end_bytes(&self) -> u64 {
        let table_end = self.table_at + 2 * self.table_bytes();
        self.capacity_bytes.max(table_end)
    }

    /// Pages of a segment, its header included.
    pub(crate) fn segment_pages(&self) -> u32 {
        self.segment_bytes >> PAGE_BYTES.trailing_zeros()
    }

    /// Bytes of one copy of the segment table.
    pub(crate) fn table_bytes(&self) -> u64 {
        table_bytes(self.segments)
    }

    /// Returns the page number of a page of a segment.
    pub(crate) fn page_no(&self, segment: SegmentNo, page: u32) -> PageNo {
        let before = u64::from(segment.0) * u64::from(self.segment_pages());
        PageNo(self.segments_at / PAGE_BYTES + before + u64::from(page))
    }

    /// Returns the position of `pages` pages from `first`: all in one segment, none of them its header.
    pub(crate) fn place(&self, first: PageNo, pages: u32) -> Result<SegmentPlace, NotInSegments> {
        let area = self.segments_at / PAGE_BYTES;
        let page = first.0.checked_sub(area).ok_or(NotInSegments)?;
        let per_segment = u64::from(self.segment_pages());
        let segment = u32::try_from(page / per_segment).map_err(|_| NotInSegments)?;
        let page = u32::try_from(page % per_segment).map_err(|_| NotInSegments)?;
        // Whether the table has so many is for those to tell who look there.
        let fits = segment < MAX_SEGMENTS
            && page > 0
            && pages > 0
            && u64::from(page) + u64::from(pages) <= per_segment;
        if fits {
            Ok(SegmentPlace {
                segment: SegmentNo(segment),
                page,
            })
        } else {
            Err(NotInSegments)
        }
    }
}

/// Returns the size of the smallest region: with one segment. The default number of records is the minimum of
/// [`Geometry::plan`].
pub(crate) fn least_bytes(segment_bytes: u32, journal_records: Option<u32>) -> u64 {
    let records = journal_records.unwrap_or(LEAST_RECORDS);
    let segment_bytes = u64::from(segment_bytes);
    let journal_end = journal_end(records);
    // A table of a page a copy is enough for so few slots.
    (journal_end + 2 * table_bytes(1)).next_multiple_of(segment_bytes) + segment_bytes
}

fn segments_for(slots: u32) -> u32 {
    let segments = (u64::from(slots) * SEGMENTS_PER_SLOT).min(u64::from(MAX_SEGMENTS));
    u32::try_from(segments).unwrap_or(MAX_SEGMENTS).max(1)
}

/// Bytes of one copy of a segment table: whole pages.
fn table_bytes(segments: u32) -> u64 {
    (u64::from(segments) * to_u64(TABLE_ENTRY_BYTES)).next_multiple_of(PAGE_BYTES)
}

/// Byte offset behind a journal with so many records in each half.
fn journal_end(records: u32) -> u64 {
    let at = SUPERBLOCKS_BYTES;
    at + JournalPlace { at, records }.len_bytes()
}

fn valid_segment_bytes(bytes: u32) -> bool {
    bytes.is_power_of_two() && (MIN_SEGMENT_BYTES..=MAX_SEGMENT_BYTES).contains(&bytes)
}

fn valid_journal_records(records: u32) -> bool {
    (RECORDS_GRAIN..=MAX_JOURNAL_RECORDS).contains(&records)
        && records.is_multiple_of(RECORDS_GRAIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap_and_fill_the_medium() {
        for (bytes, segment) in [
            (1 << 20, 64 << 10),
            (4 << 30, 1 << 20),
            (256 << 10, 64 << 10),
        ] {
            let g = Geometry::plan(bytes, segment, None).unwrap();
            assert!(g.journal_at + g.journal().len_bytes() <= g.table_at);
            assert!(g.table_at + 2 * g.table_bytes() <= g.segments_at);
            assert!(g.slots <= g.segments);
            assert!(g.capacity_bytes <= bytes && bytes - g.capacity_bytes < u64::from(segment));
        }
    }

    #[test]
    fn impossible_sizes_are_refused() {
        assert!(matches!(
            Geometry::plan(1 << 20, 4096, None),
            Err(FormatError::SegmentSize { .. })
        ));
        assert!(matches!(
            Geometry::plan(1 << 20, 1 << 16, Some(33)),
            Err(FormatError::JournalSize { .. })
        ));
        assert!(matches!(
            Geometry::plan(1 << 16, 1 << 16, None),
            Err(FormatError::Capacity { .. })
        ));
    }

    #[test]
    fn the_least_size_is_enough_and_a_byte_less_is_not() {
        for (segment, records) in [(1 << 20, None), (64 << 10, None), (2 << 20, Some(1024))] {
            let least = least_bytes(segment, records);
            assert_eq!(Geometry::plan(least, segment, records).unwrap().slots, 1);
            let Err(FormatError::Capacity { needed_bytes, .. }) =
                Geometry::plan(least - 1, segment, records)
            else {
                panic!("{least} bytes are not the least");
            };
            assert_eq!(needed_bytes, least);
        }
    }

    #[test]
    fn growth_overlaps_nothing_that_counts() {
        let mut g = Geometry::plan(1 << 20, 64 << 10, Some(64)).unwrap();
        for medium_bytes in [2_u64 << 20, (2 << 20) + (200 << 10), 64 << 20, 1 << 30] {
            let grown = g.grown(medium_bytes, 3).unwrap();
            assert!(grown.slots > g.slots && grown.segments >= grown.slots);
            assert!(grown.table_at >= g.end_bytes() && grown.table_at >= grown.capacity_bytes);
            assert!(grown.end_bytes() <= medium_bytes && grown.has_table());
            let Err(GrowError::TooSmall { least_bytes, .. }) = grown.grown(medium_bytes, 3) else {
                panic!("{medium_bytes} bytes are no growth");
            };
            assert!(grown.grown(least_bytes, 3).is_ok());
            assert!(grown.grown(least_bytes - 1, 3).is_err());
            g = grown;
        }
        assert!(matches!(g.grown(1 << 50, 0), Err(GrowError::TooLarge)));
    }

    #[test]
    fn pages_are_placed_in_segments_only() {
        let g = Geometry::plan(1 << 20, 64 << 10, Some(64)).unwrap();
        let first = g.page_no(SegmentNo(2), 1);
        assert_eq!(
            g.place(first, 15).unwrap(),
            SegmentPlace {
                segment: SegmentNo(2),
                page: 1
            }
        );
        assert!(g.place(first, 16).is_err(), "crosses into the next segment");
        assert!(g.place(g.page_no(SegmentNo(2), 0), 1).is_err(), "a header");
        assert!(g.place(PageNo(1), 1).is_err(), "a superblock");
        assert!(g.place(PageNo(u64::MAX), 1).is_err());
        assert!(
            g.place(g.page_no(SegmentNo(MAX_SEGMENTS), 1), 1).is_err(),
            "past the end"
        );
    }
}
