//! Allocation of segment numbers and of slots, in DRAM; rebuilt from the checkpoints' roots and the segment table at
//! every open.
//!
//! Checkpoints and shadows hold segments. A held segment occupies the slot that it is in, alone or with other packed
//! ones; a slot is free when nothing in it is held and no reader may have borrowed from it.
//!
//! The pages behind the last one of a sealed checkpoint are a *tail*, in which the next shadow begins: so a small
//! checkpoint does not take a whole segment. A tail has one writer at a time, and begins behind everything that was
//! sealed in its segment while the region was open.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use crate::error::ShadowError;
use crate::geometry::{Geometry, reserved_slots};
use crate::ids::{SegmentNo, SlotNo};
use crate::slots::Slots;
use crate::space::Space;
use crate::table::Position;
use permafrost_medium::convert::to_usize;
use permafrost_medium::{MAX_MEDIA, Medium};

/// Pages that a tail has at least: the root's two copies lie side by side in one segment.
const MIN_TAIL_PAGES: u32 = 2;
/// Bytes of a free segment's header that are zeroed: a whole segment's magic number, a packed one's checksum.
const BLANK_BYTES: usize = 8;

/// Reference counts of segments and slots, and the free slots of each medium.
pub(crate) struct Allocator {
    /// Holders of each segment.
    holders: Vec<u32>,
    /// Held segments that a shadow is writing.
    written: HashSet<SegmentNo>,
    /// Free segments whose entry in the table a dropped shadow wrote: a crash may leave that or the one before.
    unsure: HashSet<SegmentNo>,
    /// Slots of each medium.
    media: Vec<MediumSlots>,
    /// Media that slots are taken from, the fastest first.
    order: Vec<usize>,
    /// Number from which a free segment is searched that is not the one of its slot.
    next_number: u32,
    /// Held segments with room behind their last page, by medium, and that room's first page.
    tails: BTreeMap<(usize, SegmentNo), u32>,
    /// Held segments without a page that a listed checkpoint refers to.
    dead: HashSet<SegmentNo>,
    /// True while every sealed checkpoint has its holders, and the region can be written: what has no holder is free.
    pub(crate) is_complete: bool,
}

/// Reference counts of one medium's slots, and a bitmap of the free ones.
#[derive(Default)]
struct MediumSlots {
    /// For each slot, the held segments in it, and the holds on the slot itself.
    occupants: Vec<u32>,
    /// Bitmap with one bit a slot, set if the slot is free.
    free_bits: Vec<u64>,
    free: u32,
    /// Slots with a lost page, which stay occupied with nothing in them.
    retired: u32,
    /// First word that may have a free slot: no word before it has one.
    search_from: usize,
}

impl MediumSlots {
    /// Adds free slots, so that there are `slots`.
    fn extend(&mut self, slots: u32) {
        let (from, to) = (self.occupants.len(), to_usize(u64::from(slots)));
        if to <= from {
            return;
        }
        self.occupants.resize(to, 0);
        self.free_bits.resize(to.div_ceil(64), 0);
        // The word that is full in part, and whole ones behind it.
        let (first, last) = (from / 64, (to - 1) / 64);
        for word in first..=last {
            let low = if word == first { from % 64 } else { 0 };
            let high = if word == last { (to - 1) % 64 } else { 63 };
            self.free_bits[word] |= u64::MAX << low & u64::MAX >> (63 - high);
        }
        self.free += u32::try_from(to - from).unwrap_or(0);
        self.search_from = self.search_from.min(first);
    }

    /// Occupies the lowest free slot: low ones first keeps extents long, and reuses the memory that a tmpfs has already
    /// mapped.
    fn take(&mut self) -> Option<u32> {
        for (word, bits) in self.free_bits.iter().enumerate().skip(self.search_from) {
            if *bits != 0 {
                self.search_from = word;
                let index = word * 64 + to_usize(u64::from(bits.trailing_zeros()));
                let index = u32::try_from(index).ok()?;
                self.occupy(index);
                return Some(index);
            }
        }
        self.search_from = self.free_bits.len();
        None
    }

    fn occupy(&mut self, slot: u32) {
        let index = to_usize(u64::from(slot));
        // A medium that is gone has no slots.
        let Some(occupants) = self.occupants.get_mut(index) else {
            return;
        };
        *occupants += 1;
        if *occupants == 1 {
            self.free_bits[index / 64] &= !(1 << (index % 64));
            self.free -= 1;
        }
    }

    fn vacate(&mut self, slot: u32) {
        let index = to_usize(u64::from(slot));
        let Some(occupants) = self.occupants.get_mut(index) else {
            return;
        };
        *occupants -= 1;
        if *occupants == 0 {
            self.free_bits[index / 64] |= 1 << (index % 64);
            self.free += 1;
            self.search_from = self.search_from.min(index / 64);
        }
    }

    fn count(&self) -> u32 {
        u32::try_from(self.occupants.len()).unwrap_or(u32::MAX)
    }

    /// Slots kept free of dumps, for cleaning.
    fn reserved(&self) -> u32 {
        reserved_slots(self.count())
    }
}

/// Slots of a medium, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlotCounts {
    /// Number of all slots.
    pub(crate) slots: u32,
    /// Free ones, those that are kept for cleaning included.
    pub(crate) free: u32,
    /// Those kept for cleaning.
    pub(crate) reserved: u32,
    /// Those with a lost page, which nothing is in.
    pub(crate) retired: u32,
}

impl SlotCounts {
    /// Slots with segments, or kept for a reader.
    pub(crate) fn used(self) -> u32 {
        self.slots - self.free - self.retired
    }
}

impl Allocator {
    /// Makes an allocator with all segments free, and no slots.
    pub(crate) fn new(segments: u32) -> Self {
        let media = (0..MAX_MEDIA).map(|_| MediumSlots::default());
        Self {
            holders: vec![0; to_usize(u64::from(segments))],
            written: HashSet::new(),
            unsure: HashSet::new(),
            media: media.collect(),
            order: Vec::new(),
            next_number: 0,
            tails: BTreeMap::new(),
            dead: HashSet::new(),
            is_complete: false,
        }
    }

    /// Remembers that a held segment has room from `page` on, if it is worth it.
    pub(crate) fn offer_tail(
        &mut self,
        geometry: &Geometry,
        (segment, slot): (SegmentNo, SlotNo),
        page: u32,
    ) {
        if !self.is_free(segment) && page + MIN_TAIL_PAGES <= geometry.segment_pages() {
            self.tails.insert((slot.medium(), segment), page);
        }
    }

    /// Notes segments of which a survey has found no live page, and has taken the tails. They stay so: what refers to a
    /// page was written, or has found the page through a listed checkpoint.
    pub(crate) fn add_dead(&mut self, segments: impl Iterator<Item = SegmentNo>) {
        self.dead.extend(segments);
    }

    /// Forgets the other tails: nothing is appended to their segments from now on.
    pub(crate) fn retain_tails(&mut self, keep: impl Fn(SegmentNo) -> bool) {
        self.tails.retain(|&(_, segment), _| keep(segment));
    }

    /// Takes the first tail on a medium.
    fn next_tail(&mut self, medium: usize) -> Option<(SegmentNo, u32)> {
        let mut on_it = self.tails.range((medium, SegmentNo(0))..);
        let (&place, &page) = on_it.next().filter(|((on, _), _)| *on == medium)?;
        self.tails.remove(&place);
        Some((place.1, page))
    }

    /// Adds segment numbers, so that there are `segments`.
    pub(crate) fn extend_numbers(&mut self, segments: u32) {
        let segments = to_usize(u64::from(segments)).max(self.holders.len());
        self.holders.resize(segments, 0);
    }

    /// Adds slots of a medium, so that there are `slots`.
    pub(crate) fn extend_medium(&mut self, medium: usize, slots: u32) {
        self.media[medium].extend(slots);
    }

    /// Forgets a medium that is gone.
    pub(crate) fn remove_medium(&mut self, medium: usize) {
        self.media[medium] = MediumSlots::default();
        self.tails.retain(|(on, _), _| *on != medium);
    }

    /// Sets the media that slots are taken from, the fastest first.
    pub(crate) fn set_order(&mut self, order: Vec<usize>) {
        self.order = order;
    }

    /// Media that slots are taken from, the fastest first.
    pub(crate) fn order(&self) -> &[usize] {
        &self.order
    }

    /// Returns the free slots of a medium, ascending.
    pub(crate) fn free_slots(&self, medium: usize) -> impl Iterator<Item = SlotNo> {
        let words = self.media[medium].free_bits.iter().zip(0_u32..);
        words.flat_map(move |(bits, word)| {
            let set = move |bit: &u32| bits >> bit & 1 == 1;
            let slot = move |bit| Slots::number(medium, word * 64 + bit);
            (0..64).filter(set).map(slot)
        })
    }

    /// Counts the slots of a medium.
    pub(crate) fn count(&self, medium: usize) -> SlotCounts {
        let slots = &self.media[medium];
        SlotCounts {
            slots: slots.count(),
            free: slots.free,
            reserved: slots.reserved(),
            retired: slots.retired,
        }
    }

    fn take_slot(&mut self, medium: usize) -> Option<SlotNo> {
        let index = self.media.get_mut(medium)?.take()?;
        Some(Slots::number(medium, index))
    }

    /// Returns a segment that nothing holds: the one of this slot if possible, which needs no entry in the table.
    fn free_number(&mut self, slot: SlotNo) -> Option<SegmentNo> {
        let own = SegmentNo(slot.index());
        if slot.medium() == 0 && self.is_free(own) {
            return Some(own);
        }
        // Behind those that the first medium's slots have for themselves, if there are.
        let count = u32::try_from(self.holders.len()).unwrap_or(u32::MAX);
        let from = self.next_number.max(self.media[0].count().min(count));
        let mut numbers = (from..count).chain(0..from).map(SegmentNo);
        let found = numbers.find(|&number| self.is_free(number))?;
        self.next_number = found.0;
        Some(found)
    }

    fn occupy(&mut self, slot: SlotNo) {
        if let Some(slots) = self.media.get_mut(slot.medium()) {
            slots.occupy(slot.index());
        }
    }

    fn vacate(&mut self, slot: SlotNo) {
        if let Some(slots) = self.media.get_mut(slot.medium()) {
            slots.vacate(slot.index());
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
        self.dead.remove(&segment);
        if let Some(slot) = slot {
            self.tails.remove(&(slot.medium(), segment));
            self.vacate(slot);
        }
        true
    }

    /// Number of free slots that dumps can take.
    pub(crate) fn free_for_dumps(&self) -> u32 {
        let free = |medium: &usize| {
            let count = self.count(*medium);
            count.free.saturating_sub(count.reserved)
        };
        self.order.iter().map(free).sum()
    }

    pub(crate) fn is_free(&self, segment: SegmentNo) -> bool {
        self.holders(segment) == 0
    }

    /// Returns true if a shadow is writing the segment: it is not to be moved.
    pub(crate) fn is_written(&self, segment: SegmentNo) -> bool {
        self.written.contains(&segment)
    }

    /// Number of held segments in a slot, and of holds on it.
    pub(crate) fn occupants(&self, slot: SlotNo) -> u32 {
        let slots = self.media.get(slot.medium());
        let occupants = slots.and_then(|s| s.occupants.get(to_usize(u64::from(slot.index()))));
        occupants.copied().unwrap_or(0)
    }

    /// Holders of a segment.
    pub(crate) fn holders(&self, segment: SegmentNo) -> u32 {
        let holders = self.holders.get(to_usize(u64::from(segment.0)));
        holders.copied().unwrap_or(0)
    }
}

impl Space {
    /// Adds a holder to segments.
    fn hold(&self, segments: impl Iterator<Item = SegmentNo>) {
        let mut allocator = self.allocator();
        for segment in segments {
            allocator.hold(segment, self.table.slot(segment));
        }
    }

    /// Removes a holder from segments.
    fn release(&self, segments: impl Iterator<Item = SegmentNo>) {
        let mut allocator = self.allocator();
        for segment in segments {
            let slot = self.table.slot(segment);
            if allocator.release(segment, slot) && allocator.is_complete {
                self.blank(segment);
            }
        }
    }

    /// Zeroes the first bytes of a free segment's header, which tells it from one that a damaged root may name. Under
    /// the allocator's lock: no shadow has taken the segment yet. Nothing depends on it: not flushed, errors are
    /// ignored.
    fn blank(&self, segment: SegmentNo) {
        let position = self.table.position(segment);
        if let (Some(position), None) = (position, self.failure.get()) {
            // SAFETY: nothing holds the segment, and its place is its own until the lock is released.
            let _ = unsafe { self.medium.write(position.header_at, &[0; BLANK_BYTES]) };
        }
    }

    /// Remembers that a held segment has room from `page` on.
    pub(crate) fn offer_tail(&self, segment: SegmentNo, page: u32) {
        let mut allocator = self.allocator();
        if let Some(slot) = self.table.slot(segment) {
            allocator.offer_tail(&self.geometry, (segment, slot), page);
        }
    }

    /// Returns a tail on a medium that can be written to; those that cannot are forgotten.
    fn take_tail(&self, allocator: &mut Allocator, medium: usize) -> Option<(SegmentNo, u64, u32)> {
        while let Some((segment, page)) = allocator.next_tail(medium) {
            let position = self.table.position(segment);
            let Some(at) = position.filter(|at| at.packed_pages.is_none()) else {
                continue;
            };
            let slot = self.table.slots().of(at.header_at);
            if slot.is_some_and(|slot| !self.has_lost_page(slot)) {
                return Some((segment, at.header_at, page));
            }
        }
        None
    }

    /// Occupies a free slot of a medium without a lost page; `spare` slots are left. A slot with a lost page stays
    /// occupied and unused: bytes that are written to a lost page are not stored.
    fn take_slot(&self, allocator: &mut Allocator, medium: usize, spare: u32) -> Option<SlotNo> {
        while allocator.count(medium).free > spare {
            let slot = allocator.take_slot(medium)?;
            if !self.has_lost_page(slot) {
                return Some(slot);
            }
            allocator.media[medium].retired += 1;
        }
        None
    }

    /// Occupies a free slot for a dump, of the fastest medium that has one.
    fn take_fastest_slot(&self, allocator: &mut Allocator) -> Option<SlotNo> {
        (0..allocator.order.len()).find_map(|place| {
            let medium = allocator.order[place];
            let spare = allocator.media[medium].reserved();
            self.take_slot(allocator, medium, spare)
        })
    }

    /// Changes where a held segment is, for readers from now on; the caller has made its pages durable there. Returns a
    /// hold on the slot that it was in.
    pub(crate) fn move_segment(
        self: &Arc<Self>,
        segment: SegmentNo,
        to: Position,
    ) -> Option<SlotHold> {
        let mut allocator = self.allocator();
        let from = self.table.slot(segment)?;
        allocator.occupy(self.table.slots().of(to.header_at)?);
        self.table.set(segment, to);
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
    /// Takes a free slot of a medium for cleaning, the reserved one if need be; `None` if there is none.
    pub(crate) fn take_on(space: &Arc<Space>, medium: usize) -> Option<Self> {
        let slot = space.take_slot(&mut space.allocator(), medium, 0)?;
        Some(Self {
            space: Arc::clone(space),
            slot,
        })
    }

    /// Takes a free slot of the first of some media that has one for more than cleaning.
    pub(crate) fn take_spare(space: &Arc<Space>, media: &[usize]) -> Option<Self> {
        let mut allocator = space.allocator();
        let slot = media.iter().find_map(|&medium| {
            let spare = allocator.count(medium).reserved;
            space.take_slot(&mut allocator, medium, spare)
        })?;
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

    /// Takes hold of segments that `choose` finds to be held, under one lock.
    pub(crate) fn of_held<T>(
        space: &Arc<Space>,
        choose: impl FnOnce(&mut Allocator) -> (Vec<Extent>, T),
    ) -> (Self, T) {
        let mut allocator = space.allocator();
        let (extents, chosen) = choose(&mut allocator);
        for segment in segments(&extents) {
            allocator.hold(segment, None);
        }
        drop(allocator);
        let space = Arc::clone(space);
        (Self { space, extents }, chosen)
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
    /// Those that it has allocated.
    own: Vec<SegmentNo>,
    /// Segment of the last query: nearly always the next one too.
    recent: Option<SegmentNo>,
    /// Lease of the checkpoint whose segments were taken last.
    inherited: Option<Arc<Lease>>,
    /// Tail that is being written to, as it was taken.
    tail: Option<(SegmentNo, u32)>,
}

impl Holdings {
    pub(crate) fn new(space: &Arc<Space>) -> Self {
        Self {
            space: Arc::clone(space),
            segments: BTreeSet::new(),
            own: Vec::new(),
            recent: None,
            inherited: None,
            tail: None,
        }
    }

    /// Takes the tail of a segment, or else a free segment and a slot for it.
    pub(crate) fn begin(&mut self) -> Result<Allocated, ShadowError> {
        let space = &self.space;
        let mut allocator = space.allocator();
        // Of the fastest medium with room: a tail before a slot, but no tail of a slower one before a slot of a faster.
        let mut found = None;
        for medium in allocator.order.clone() {
            found = space.take_tail(&mut allocator, medium);
            let count = allocator.count(medium);
            if found.is_some() || count.free > count.reserved {
                break;
            }
        }
        let Some((segment, header_at, first_page)) = found else {
            drop(allocator);
            return self.allocate();
        };
        self.tail = Some((segment, first_page));
        if self.segments.insert(segment.0) {
            allocator.hold(segment, None);
        }
        allocator.written.insert(segment);
        self.own.push(segment);
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
        let taken = space.take_fastest_slot(&mut allocator);
        let number = taken.and_then(|slot| allocator.free_number(slot));
        let (Some(slot), Some(segment)) = (taken, number) else {
            if let Some(slot) = taken {
                allocator.vacate(slot);
            }
            let segment_bytes = u64::from(space.geometry.segment_bytes);
            return Err(ShadowError::Full {
                needed: segment_bytes,
                free: u64::from(allocator.free_for_dumps()) * segment_bytes,
            });
        };
        let header_at = space.table.slots().at(slot);
        let position = Position {
            header_at,
            packed_pages: None,
        };
        let changed = space.table.set(segment, position);
        let needs_entry = changed || allocator.unsure.contains(&segment);
        // The segment occupies the slot from here on.
        allocator.hold(segment, None);
        allocator.written.insert(segment);
        self.own.push(segment);
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

    /// Holds all segments that a checkpoint holds, but not those without a live page: nothing in them can be referred
    /// to.
    pub(crate) fn inherit(&mut self, lease: &Arc<Lease>) {
        if self
            .inherited
            .as_ref()
            .is_some_and(|last| Arc::ptr_eq(last, lease))
        {
            return;
        }
        self.inherited = Some(Arc::clone(lease));
        let mut allocator = self.space.allocator();
        for segment in lease.segments() {
            if !allocator.dead.contains(&segment) && self.segments.insert(segment.0) {
                let slot = self.space.table.slot(segment);
                allocator.hold(segment, slot);
            }
        }
    }

    pub(crate) fn extents(&self) -> Vec<Extent> {
        to_extents(self.segments.iter().copied())
    }

    /// Converts the hold into a checkpoint's.
    pub(crate) fn into_lease(mut self) -> Lease {
        self.tail = None;
        let segments = std::mem::take(&mut self.segments);
        // Sealed: the fence of the data was the entries', too.
        self.end_writing(true);
        Lease {
            space: Arc::clone(&self.space),
            extents: to_extents(segments.into_iter()),
        }
    }
}

impl Holdings {
    /// Lets its own segments be moved from here on; their entries in the table are durable, or may not be.
    fn end_writing(&mut self, durable: bool) {
        let mut allocator = self.space.allocator();
        for segment in self.own.drain(..) {
            allocator.written.remove(&segment);
            if durable {
                allocator.unsure.remove(&segment);
            } else {
                allocator.unsure.insert(segment);
            }
        }
    }
}

impl Drop for Holdings {
    fn drop(&mut self) {
        self.end_writing(false);
        self.space
            .release(self.segments.iter().copied().map(SegmentNo));
        // What was written there is referred to by nothing: the tail is as it was.
        if let Some((segment, page)) = self.tail {
            self.space.offer_tail(segment, page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocator(segments: u32, slots: u32) -> Allocator {
        let mut allocator = Allocator::new(segments);
        allocator.extend_medium(0, slots);
        allocator
    }

    #[test]
    fn lowest_free_slot_first_and_none_twice() {
        let mut a = allocator(260, 0);
        // Grown twice, in the middle of a word of the bitmap.
        for slots in [70, 130] {
            a.extend_medium(0, slots);
        }
        let taken: Vec<u32> = std::iter::from_fn(|| a.take_slot(0)).map(|s| s.0).collect();
        assert_eq!(taken, (0..130).collect::<Vec<_>>());
        assert_eq!(a.count(0).free, 0);
        a.vacate(SlotNo(129));
        a.occupy(SlotNo(3));
        a.vacate(SlotNo(3));
        a.vacate(SlotNo(5));
        assert_eq!(
            (a.take_slot(0), a.take_slot(0), a.take_slot(0)),
            (Some(SlotNo(5)), Some(SlotNo(129)), None)
        );
    }

    #[test]
    fn a_segment_occupies_its_slot_while_it_has_holders() {
        let mut a = allocator(16, 2);
        let (segment, slot) = (SegmentNo(9), Some(SlotNo(1)));
        a.hold(segment, slot);
        a.hold(segment, slot);
        a.hold(SegmentNo(1), slot);
        assert_eq!((a.count(0).free, a.holders(segment)), (1, 2));
        a.release(segment, slot);
        a.release(segment, slot);
        assert_eq!(a.count(0).free, 1);
        a.release(SegmentNo(1), slot);
        assert_eq!(a.count(0).free, 2);
    }

    #[test]
    fn a_slot_gets_its_own_number_or_another_free_one() {
        let mut a = allocator(4, 2);
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
