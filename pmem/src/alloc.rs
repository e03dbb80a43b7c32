//! Allocation of segment numbers and of slots, in DRAM; rebuilt from the checkpoints' roots and the segment table at
//! every open.
//!
//! Checkpoints and shadows hold segments. A held segment occupies the slot that it is in, alone or with other packed
//! ones; a slot is free when nothing in it is held and no reader may have borrowed from it.
//!
//! The pages behind the last one of a sealed checkpoint are a *tail*, in which the next shadow begins: so a small
//! checkpoint does not take a whole segment. A tail has one writer at a time, and begins behind everything that was sealed
//! in its segment while the region was open.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::error::ShadowError;
use crate::geometry::Geometry;
use crate::ids::{SegmentNo, SlotNo};
use crate::space::Space;
use crate::table::Position;
use permafrost_medium::convert::to_usize;

/// Pages that a tail has at least: the root's two copies lie side by side in one segment.
const MIN_TAIL_PAGES: u32 = 2;
/// Bytes of a free segment's header that are zeroed: a whole segment's magic number, a packed one's checksum.
const BLANK_BYTES: usize = 8;

/// Reference counts of segments and slots, and a bitmap of the free slots.
pub(crate) struct Allocator {
    /// Holders of each segment.
    holders: Vec<u32>,
    /// For each slot, the held segments in it, and the holds on the slot itself.
    occupants: Vec<u32>,
    /// Bitmap with one bit a slot, set if the slot is free.
    free_bits: Vec<u64>,
    free: u32,
    /// First word that may have a free slot: no word before it has one.
    search_from: usize,
    /// Number from which a free segment is searched that is not the one of its slot.
    next_number: u32,
    /// Held segments with room behind their last page, and that room's first page.
    tails: BTreeMap<u32, u32>,
    /// True while every sealed checkpoint has its holders, and the region can be written: what has no holder is free.
    pub(crate) is_complete: bool,
}

impl Allocator {
    /// Makes an allocator with all segments and slots free.
    pub(crate) fn new(segments: u32, slots: u32) -> Self {
        let count = to_usize(u64::from(slots));
        let mut free_bits = vec![u64::MAX; count.div_ceil(64)];
        if let (Some(last), tail @ 1..) = (free_bits.last_mut(), slots % 64) {
            *last = (1 << tail) - 1;
        }
        Self {
            holders: vec![0; to_usize(u64::from(segments))],
            occupants: vec![0; count],
            free_bits,
            free: slots,
            search_from: 0,
            next_number: slots,
            tails: BTreeMap::new(),
            is_complete: false,
        }
    }

    /// Remembers that a held segment has room from `page` on, if it is worth it.
    pub(crate) fn offer_tail(&mut self, geometry: &Geometry, segment: SegmentNo, page: u32) {
        if !self.is_free(segment) && page + MIN_TAIL_PAGES <= geometry.segment_pages() {
            self.tails.insert(segment.0, page);
        }
    }

    /// Forgets the other tails: nothing is appended to their segments from now on.
    pub(crate) fn retain_tails(&mut self, keep: impl Fn(SegmentNo) -> bool) {
        self.tails.retain(|&segment, _| keep(SegmentNo(segment)));
    }

    /// Returns the free slots, ascending.
    pub(crate) fn free_slots(&self) -> impl Iterator<Item = SlotNo> {
        let words = self.free_bits.iter().zip(0_u32..);
        words.flat_map(|(bits, word)| {
            let set = move |bit: &u32| bits >> bit & 1 == 1;
            (0..64).filter(set).map(move |bit| SlotNo(word * 64 + bit))
        })
    }

    /// Number of free slots.
    pub(crate) fn free(&self) -> u32 {
        self.free
    }

    /// Occupies the lowest free slot: low ones first keeps extents long, and reuses the memory that a tmpfs has already
    /// mapped.
    fn take_slot(&mut self) -> Option<SlotNo> {
        for (word, bits) in self.free_bits.iter().enumerate().skip(self.search_from) {
            if *bits != 0 {
                self.search_from = word;
                let index = word * 64 + to_usize(u64::from(bits.trailing_zeros()));
                let slot = SlotNo(u32::try_from(index).ok()?);
                self.occupy(slot);
                return Some(slot);
            }
        }
        self.search_from = self.free_bits.len();
        None
    }

    /// Returns a segment that nothing holds: the one of this slot if possible, which needs no entry in the table.
    fn free_number(&mut self, slot: SlotNo) -> Option<SegmentNo> {
        let own = SegmentNo(slot.0);
        if self.is_free(own) {
            return Some(own);
        }
        let count = u32::try_from(self.holders.len()).unwrap_or(u32::MAX);
        let numbers = (self.next_number..count).chain(0..self.next_number);
        let found = numbers
            .map(SegmentNo)
            .find(|&number| self.is_free(number))?;
        self.next_number = found.0;
        Some(found)
    }

    fn occupy(&mut self, slot: SlotNo) {
        let index = to_usize(u64::from(slot.0));
        self.occupants[index] += 1;
        if self.occupants[index] == 1 {
            self.free_bits[index / 64] &= !(1 << (index % 64));
            self.free -= 1;
        }
    }

    fn vacate(&mut self, slot: SlotNo) {
        let index = to_usize(u64::from(slot.0));
        self.occupants[index] -= 1;
        if self.occupants[index] == 0 {
            self.free_bits[index / 64] |= 1 << (index % 64);
            self.free += 1;
            self.search_from = self.search_from.min(index / 64);
        }
    }

    /// Adds a holder to a segment, which is in `slot`; `None` if that is unknown.
    fn hold(&mut self, segment: SegmentNo, slot: Option<SlotNo>) {
        let index = to_usize(u64::from(segment.0));
        self.holders[index] += 1;
        if let (1, Some(slot)) = (self.holders[index], slot) {
            self.occupy(slot);
        }
    }

    /// Removes a holder from a segment; returns true if it was the last, and the segment is free.
    fn release(&mut self, segment: SegmentNo, slot: Option<SlotNo>) -> bool {
        let index = to_usize(u64::from(segment.0));
        self.holders[index] -= 1;
        if self.holders[index] > 0 {
            return false;
        }
        self.tails.remove(&segment.0);
        slot.inspect(|&slot| self.vacate(slot));
        true
    }

    pub(crate) fn is_free(&self, segment: SegmentNo) -> bool {
        self.holders(segment) == 0
    }

    /// Number of held segments in a slot, and of holds on it.
    pub(crate) fn occupants(&self, slot: SlotNo) -> u32 {
        self.occupants[to_usize(u64::from(slot.0))]
    }

    pub(crate) fn holders(&self, segment: SegmentNo) -> u32 {
        self.holders[to_usize(u64::from(segment.0))]
    }
}

impl Space {
    /// Adds a holder to segments.
    fn hold(&self, segments: impl Iterator<Item = SegmentNo>) {
        let mut allocator = self.allocator();
        for segment in segments {
            allocator.hold(segment, self.table.slot(&self.geometry, segment));
        }
    }

    /// Removes a holder from segments.
    fn release(&self, segments: impl Iterator<Item = SegmentNo>) {
        let mut allocator = self.allocator();
        for segment in segments {
            let slot = self.table.slot(&self.geometry, segment);
            if allocator.release(segment, slot) && allocator.is_complete {
                self.blank(segment);
            }
        }
    }

    /// Zeroes the first bytes of a free segment's header, which tells it from one that a damaged root may name. Under the
    /// allocator's lock: no shadow has taken the segment yet. Nothing depends on it: not flushed, errors are ignored.
    fn blank(&self, segment: SegmentNo) {
        let position = self.table.position(&self.geometry, segment);
        if let (Some(position), None) = (position, self.failure.get()) {
            // SAFETY: nothing holds the segment, and its place is its own until the lock is released.
            let _ = unsafe { self.medium.write(position.header_at, &[0; BLANK_BYTES]) };
        }
    }

    /// Returns a tail that can be written to; those that cannot are forgotten.
    fn take_tail(&self, allocator: &mut Allocator) -> Option<(SegmentNo, u64, u32)> {
        while let Some((number, page)) = allocator.tails.pop_first() {
            let segment = SegmentNo(number);
            let position = self.table.position(&self.geometry, segment);
            let Some(at) = position.filter(|at| at.packed_pages.is_none()) else {
                continue;
            };
            let slot = self.geometry.slot_of(at.header_at);
            if slot.is_some_and(|slot| !self.has_lost_page(slot)) {
                return Some((segment, at.header_at, page));
            }
        }
        None
    }

    /// Occupies a free slot without a lost page; `spare` slots are left. A slot with a lost page stays occupied and
    /// unused: bytes that are written to a lost page are not stored.
    fn take_slot(&self, allocator: &mut Allocator, spare: u32) -> Option<SlotNo> {
        while allocator.free() > spare {
            let slot = allocator.take_slot()?;
            if !self.has_lost_page(slot) {
                return Some(slot);
            }
        }
        None
    }

    /// Changes where a held segment is, for readers from now on; the caller has made its pages durable there. Returns a
    /// hold on the slot that it was in.
    pub(crate) fn move_segment(
        self: &Arc<Self>,
        segment: SegmentNo,
        to: Position,
    ) -> Option<SlotHold> {
        let mut allocator = self.allocator();
        let from = self.table.slot(&self.geometry, segment)?;
        allocator.occupy(self.geometry.slot_of(to.header_at)?);
        self.table.set(&self.geometry, segment, to);
        // What the segment occupied is passed to the hold.
        Some(SlotHold {
            space: Arc::clone(self),
            slot: from,
        })
    }
}

/// Hold on a slot, whatever is in it.
pub(crate) struct SlotHold {
    space: Arc<Space>,
    pub(crate) slot: SlotNo,
}

impl SlotHold {
    /// Takes a free slot for cleaning, the reserved one if need be; `None` if there is none.
    pub(crate) fn take(space: &Arc<Space>) -> Option<Self> {
        let slot = space.take_slot(&mut space.allocator(), 0)?;
        Some(Self {
            space: Arc::clone(space),
            slot,
        })
    }
}

impl Drop for SlotHold {
    fn drop(&mut self) {
        self.space.allocator().vacate(self.slot);
    }
}

/// Consecutive segments: first, and one past the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) first: u32,
    pub(crate) end: u32,
}

fn segments(extents: &[Extent]) -> impl Iterator<Item = SegmentNo> {
    extents.iter().flat_map(|e| e.first..e.end).map(SegmentNo)
}

/// Joins ascending segments to extents.
pub(crate) fn to_extents(segments: impl Iterator<Item = u32>) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    for segment in segments {
        match extents.last_mut() {
            Some(last) if last.end == segment => last.end += 1,
            _ => extents.push(Extent {
                first: segment,
                end: segment + 1,
            }),
        }
    }
    extents
}

/// A checkpoint's hold on its segments; given back when the last reader drops it, so that no segment is
/// reused under one.
pub(crate) struct Lease {
    space: Arc<Space>,
    /// Ascending, not touching.
    extents: Vec<Extent>,
}

impl Lease {
    /// Takes hold of segments that a recovered root refers to.
    pub(crate) fn recover(space: &Arc<Space>, extents: Vec<Extent>) -> Self {
        space.hold(segments(&extents));
        Self {
            space: Arc::clone(space),
            extents,
        }
    }

    pub(crate) fn extents(&self) -> &[Extent] {
        &self.extents
    }

    pub(crate) fn count(&self) -> u64 {
        self.extents
            .iter()
            .map(|e| u64::from(e.end - e.first))
            .sum()
    }

    /// Returns the held segments, ascending.
    pub(crate) fn segments(&self) -> impl Iterator<Item = SegmentNo> {
        segments(&self.extents)
    }

    /// Returns the bytes of the segments that have no other holder.
    pub(crate) fn exclusive_bytes(&self) -> u64 {
        let allocator = self.space.allocator();
        let alone = self.segments().filter(|&s| allocator.holders(s) == 1);
        alone.map(|segment| self.space.segment_bytes(segment)).sum()
    }

    /// Returns true if the segment is held. O(log extents).
    pub(crate) fn holds(&self, segment: SegmentNo) -> bool {
        let after = self.extents.partition_point(|e| e.first <= segment.0);
        after > 0 && segment.0 < self.extents[after - 1].end
    }

    /// Never gives the segments back: only the next open shows whether they are in use.
    pub(crate) fn leak(mut self) {
        self.extents.clear();
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.space.release(segments(&self.extents));
    }
}

/// A segment taken by a shadow.
pub(crate) struct Allocated {
    pub(crate) segment: SegmentNo,
    /// Byte offset of its slot.
    pub(crate) header_at: u64,
    /// Place in it of the first page for the shadow: 1, or the beginning of a tail.
    pub(crate) first_page: u32,
    /// True if its entry in the segment table has to be written before a record refers to it.
    pub(crate) needs_entry: bool,
}

/// A shadow's hold on its segments, growing; given back if the shadow is dropped.
pub(crate) struct Holdings {
    space: Arc<Space>,
    segments: BTreeSet<u32>,
    /// Segment of the last query: nearly always the next one too.
    recent: Option<SegmentNo>,
    /// Tail that is being written to, as it was taken.
    tail: Option<(SegmentNo, u32)>,
}

impl Holdings {
    pub(crate) fn new(space: &Arc<Space>) -> Self {
        Self {
            space: Arc::clone(space),
            segments: BTreeSet::new(),
            recent: None,
            tail: None,
        }
    }

    /// Takes the tail of a segment, or else a free segment and a slot for it.
    pub(crate) fn begin(&mut self) -> Result<Allocated, ShadowError> {
        let space = &self.space;
        let mut allocator = space.allocator();
        let Some((segment, header_at, first_page)) = space.take_tail(&mut allocator) else {
            drop(allocator);
            return self.allocate();
        };
        self.tail = Some((segment, first_page));
        if self.segments.insert(segment.0) {
            allocator.hold(segment, None);
        }
        Ok(Allocated {
            segment,
            header_at,
            first_page,
            needs_entry: false,
        })
    }

    /// Takes a free segment and a slot for it.
    pub(crate) fn allocate(&mut self) -> Result<Allocated, ShadowError> {
        let space = &self.space;
        if let Some(failure) = space.failure.get() {
            return Err(ShadowError::Failed(failure.clone()));
        }
        let mut allocator = space.allocator();
        let spare = space.geometry.reserved_slots();
        let taken = space.take_slot(&mut allocator, spare);
        let number = taken.and_then(|slot| allocator.free_number(slot));
        let (Some(slot), Some(segment)) = (taken, number) else {
            if let Some(slot) = taken {
                allocator.vacate(slot);
            }
            let segment_bytes = u64::from(space.geometry.segment_bytes);
            return Err(ShadowError::Full {
                needed: segment_bytes,
                free: u64::from(allocator.free().saturating_sub(spare)) * segment_bytes,
            });
        };
        let header_at = space.geometry.slot_at(slot);
        let position = Position {
            header_at,
            packed_pages: None,
        };
        let needs_entry = space.table.set(&space.geometry, segment, position);
        // The segment occupies the slot from here on.
        allocator.hold(segment, None);
        self.segments.insert(segment.0);
        Ok(Allocated {
            segment,
            header_at,
            first_page: 1,
            needs_entry,
        })
    }

    /// Holds a segment that a live checkpoint holds, too.
    pub(crate) fn share(&mut self, segment: SegmentNo) {
        if self.recent == Some(segment) {
            return;
        }
        self.recent = Some(segment);
        if self.segments.insert(segment.0) {
            self.space.hold(std::iter::once(segment));
        }
    }

    pub(crate) fn extents(&self) -> Vec<Extent> {
        to_extents(self.segments.iter().copied())
    }

    /// Converts the hold into a checkpoint's.
    pub(crate) fn into_lease(mut self) -> Lease {
        self.tail = None;
        let segments = std::mem::take(&mut self.segments);
        Lease {
            space: Arc::clone(&self.space),
            extents: to_extents(segments.into_iter()),
        }
    }
}

impl Drop for Holdings {
    fn drop(&mut self) {
        self.space
            .release(self.segments.iter().copied().map(SegmentNo));
        // What was written there is referred to by nothing: the tail is as it was.
        if let Some((segment, page)) = self.tail {
            let geometry = &self.space.geometry;
            self.space.allocator().offer_tail(geometry, segment, page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lowest_free_slot_first_and_none_twice() {
        let mut a = Allocator::new(260, 130);
        let taken: Vec<u32> = std::iter::from_fn(|| a.take_slot()).map(|s| s.0).collect();
        assert_eq!(taken, (0..130).collect::<Vec<_>>());
        assert_eq!(a.free(), 0);
        a.vacate(SlotNo(129));
        a.occupy(SlotNo(3));
        a.vacate(SlotNo(3));
        a.vacate(SlotNo(5));
        assert_eq!(
            (a.take_slot(), a.take_slot(), a.take_slot()),
            (Some(SlotNo(5)), Some(SlotNo(129)), None)
        );
    }

    #[test]
    fn a_segment_occupies_its_slot_while_it_has_holders() {
        let mut a = Allocator::new(16, 2);
        let (segment, slot) = (SegmentNo(9), Some(SlotNo(1)));
        a.hold(segment, slot);
        a.hold(segment, slot);
        a.hold(SegmentNo(1), slot);
        assert_eq!((a.free(), a.holders(segment)), (1, 2));
        a.release(segment, slot);
        a.release(segment, slot);
        assert_eq!(a.free(), 1);
        a.release(SegmentNo(1), slot);
        assert_eq!(a.free(), 2);
    }

    #[test]
    fn a_slot_gets_its_own_number_or_another_free_one() {
        let mut a = Allocator::new(4, 2);
        assert_eq!(a.free_number(SlotNo(1)), Some(SegmentNo(1)));
        for held in [1, 2, 3] {
            a.hold(SegmentNo(held), None);
        }
        assert_eq!(a.free_number(SlotNo(1)), Some(SegmentNo(0)));
        a.hold(SegmentNo(0), None);
        assert_eq!(a.free_number(SlotNo(0)), None);
    }

    #[test]
    fn extents_join_neighbours() {
        let extents = to_extents([0, 1, 2, 7, 9, 10].into_iter());
        let pairs: Vec<_> = extents.iter().map(|e| (e.first, e.end)).collect();
        assert_eq!(pairs, [(0, 3), (7, 8), (9, 11)]);
    }
}
