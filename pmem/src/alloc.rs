//! Allocation of segment numbers and of slots, in DRAM; rebuilt from the checkpoints' roots and the segment table at
//! every open.
//!
//! Checkpoints and shadows hold segments. A held segment occupies the slot that it is in, alone or with other packed
//! ones; a slot is free when nothing in it is held and no reader may have borrowed from it.
//!
//! The pages behind the last one of a sealed checkpoint are a *tail*, in which the next shadow begins: so a small
//! checkpoint does not take a whole segment. A tail has one writer at a time, and begins behind everything that was
//! sealed in its segment while the region was open.

mod holds;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use crate::geometry::Geometry;
use crate::ids::{SegmentNo, SlotNo};
use crate::slots::Slots;
use crate::space::Space;
use crate::table::Position;
use permafrost_cipher::KeyId;
use permafrost_medium::convert::to_usize;
use permafrost_medium::{MAX_MEDIA, Medium};

/// Pages that a tail has at least: the root's two copies lie side by side in one segment.
const MIN_TAIL_PAGES: u32 = 2;
/// Bytes of a free segment's header that are zeroed: a whole segment's magic number, a packed one's checksum.
const BLANK_BYTES: usize = 8;

pub(crate) use holds::{Allocated, Extent, Holdings, Lease, SlotHold, to_extents};
use permafrost_liveness::slots::{MediumSlots, SlotCounts};

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
    /// Held segments with room behind their last page, by medium and key, and that room's first page.
    tails: BTreeMap<(usize, Option<KeyId>, SegmentNo), u32>,
    /// Keys of those that are encrypted.
    tail_keys: HashMap<SegmentNo, KeyId>,
    /// Held segments without a page that a listed checkpoint refers to.
    dead: HashSet<SegmentNo>,
    /// True while every sealed checkpoint has its holders, and the region can be written: what has no holder is free.
    pub(crate) is_complete: bool,
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
            tail_keys: HashMap::new(),
            dead: HashSet::new(),
            is_complete: false,
        }
    }

    /// Remembers that a held segment has room from `page` on, if it is worth it.
    pub(crate) fn offer_tail(
        &mut self,
        geometry: &Geometry,
        (segment, slot): (SegmentNo, SlotNo),
        key: Option<KeyId>,
        page: u32,
    ) {
        if !self.is_free(segment) && page + MIN_TAIL_PAGES <= geometry.segment_pages() {
            self.tails.insert((slot.medium(), key, segment), page);
            self.tail_keys.extend(key.map(|key| (segment, key)));
        }
    }

    /// Notes segments of which a survey has found no live page, and has taken the tails. They stay so: what refers to a
    /// page was written, or has found the page through a listed checkpoint.
    pub(crate) fn add_dead(&mut self, segments: impl Iterator<Item = SegmentNo>) {
        self.dead.extend(segments);
    }

    /// Forgets the other tails: nothing is appended to their segments from now on.
    pub(crate) fn retain_tails(&mut self, keep: impl Fn(SegmentNo) -> bool) {
        self.tails.retain(|&(_, _, segment), _| keep(segment));
        self.tail_keys.retain(|&segment, _| keep(segment));
    }

    /// Forgets the tails that `keep` refuses: nothing is appended to their segments from now on. It gets each segment
    /// with its medium, the first page of its room, and true for the one that the next dump goes on with.
    pub(crate) fn choose_tails(
        &mut self,
        mut keep: impl FnMut((usize, SegmentNo), u32, bool) -> bool,
    ) {
        let mut before = None;
        let keys = &mut self.tail_keys;
        self.tails.retain(|&(medium, key, segment), page| {
            let is_next = before.replace((medium, key)) != Some((medium, key));
            let is_kept = keep((medium, segment), *page, is_next);
            if !is_kept {
                keys.remove(&segment);
            }
            is_kept
        });
    }

    /// Forgets the tails of segments with those keys: nothing is appended to them from now on.
    pub(crate) fn forget_tails_of(&mut self, keys: &[KeyId]) {
        let goes = |key: &KeyId| keys.contains(key);
        self.tails
            .retain(|(_, key, _), _| !key.as_ref().is_some_and(goes));
        self.tail_keys.retain(|_, key| !goes(key));
    }

    /// Takes the first tail on a medium whose segment has that key.
    fn next_tail(&mut self, medium: usize, key: Option<KeyId>) -> Option<(SegmentNo, u32)> {
        let mut suitable = self.tails.range((medium, key, SegmentNo(0))..);
        let (&place, &page) = suitable
            .next()
            .filter(|((on, under, _), _)| (*on, *under) == (medium, key))?;
        self.tails.remove(&place);
        self.tail_keys.remove(&place.2);
        Some((place.2, page))
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
        self.tails.retain(|(on, _, _), _| *on != medium);
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
            let key = self.tail_keys.remove(&segment);
            self.tails.remove(&(slot.medium(), key, segment));
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

    /// Returns the segments that shadows are writing, or the next ones may go on with.
    pub(crate) fn growing(&self) -> HashSet<SegmentNo> {
        let tails = self.tails.keys().map(|(_, _, segment)| *segment);
        tails.chain(self.written.iter().copied()).collect()
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
        let slot = position.and_then(|position| self.table.slots().of(position.header_at));
        // The entry of a free segment may be of an earlier time, and name a slot whose pages are in an object store.
        let medium = slot.and_then(|slot| self.medium.get(slot.medium()));
        if medium.is_none_or(|medium| medium.cold().is_some()) {
            return;
        }
        if let (Some(position), None) = (position, self.failure.get()) {
            // SAFETY: nothing holds the segment, and its place is its own until the lock is released.
            let _ = unsafe { self.medium.write(position.header_at, &[0; BLANK_BYTES]) };
        }
    }

    /// Remembers that a held segment has room from `page` on.
    pub(crate) fn offer_tail(&self, segment: SegmentNo, page: u32) {
        let key = self.key_of(segment);
        let mut allocator = self.allocator();
        if let Some(slot) = self.table.slot(segment) {
            allocator.offer_tail(&self.geometry, (segment, slot), key, page);
        }
    }

    /// Returns a tail with that key on a medium that can be written to; those that cannot are forgotten.
    fn take_tail(
        &self,
        allocator: &mut Allocator,
        medium: usize,
        key: Option<KeyId>,
    ) -> Option<(SegmentNo, u64, u32)> {
        while let Some((segment, page)) = allocator.next_tail(medium, key) {
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
        Some(SlotHold::passed(self, from))
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
