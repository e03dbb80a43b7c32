//! Slots of all media: their numbers, and their places in the offsets of a [`MediumSet`](permafrost_medium::MediumSet).

use std::sync::atomic::{AtomicU32, Ordering};

use permafrost_medium::{MAX_MEDIA, MEDIUM_SPAN};

use crate::ids::SlotNo;
use permafrost_medium::convert::{to_u64, to_usize};

/// Bits of a slot's number for its place on its medium; the number of the medium is above them.
const INDEX_BITS: u32 = 24;

/// Most slots of a medium.
pub const MAX_SLOTS: u32 = 1 << INDEX_BITS;

/// Number of slots of each medium, which change while the region is open.
pub struct Slots {
    segment_bytes: u64,
    /// Offset of the first slot of the first medium. On the others it is behind the header, as large as a slot.
    first_at: u64,
    counts: [AtomicU32; MAX_MEDIA],
}

impl Slots {
    /// Makes the slots of a region whose other media have none yet. `first_at` is the offset of the first slot, and a
    /// slot has `segment_bytes`.
    #[must_use]
    pub fn new(segment_bytes: u32, first_at: u64, slots: u32) -> Self {
        let made = Self {
            segment_bytes: u64::from(segment_bytes),
            first_at,
            counts: Default::default(),
        };
        made.set_count(0, slots);
        made
    }

    /// Bytes of a slot.
    pub fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// Number of slots of a medium.
    pub fn count(&self, medium: usize) -> u32 {
        let count = self.counts.get(medium);
        count.map_or(0, |count| count.load(Ordering::Acquire))
    }

    /// Number of slots of all media.
    pub fn total(&self) -> u32 {
        (0..MAX_MEDIA).map(|medium| self.count(medium)).sum()
    }

    /// Sets the number of slots of a medium.
    pub fn set_count(&self, medium: usize, slots: u32) {
        if let Some(count) = self.counts.get(medium) {
            count.store(slots.min(MAX_SLOTS), Ordering::Release);
        }
    }

    /// Returns the number of a slot.
    pub fn number(medium: usize, index: u32) -> SlotNo {
        SlotNo(u32::try_from(medium).unwrap_or(0) << INDEX_BITS | index)
    }

    /// Returns the offset of a slot.
    pub fn at(&self, slot: SlotNo) -> u64 {
        let base = to_u64(slot.medium()) * MEDIUM_SPAN;
        base + self.first_on(slot.medium()) + u64::from(slot.index()) * self.segment_bytes
    }

    /// Returns the slot that an offset lies in.
    pub fn of(&self, at: u64) -> Option<SlotNo> {
        let medium = to_usize(at / MEDIUM_SPAN);
        let before = (at % MEDIUM_SPAN).checked_sub(self.first_on(medium))?;
        let index = u32::try_from(before / self.segment_bytes).ok()?;
        (index < self.count(medium)).then(|| Self::number(medium, index))
    }

    fn first_on(&self, medium: usize) -> u64 {
        if medium == 0 {
            self.first_at
        } else {
            self.segment_bytes
        }
    }
}

impl SlotNo {
    /// Returns the number of the medium that the slot is on.
    pub fn medium(self) -> usize {
        to_usize(u64::from(self.0 >> INDEX_BITS))
    }

    /// Returns the slot's place among those of its medium.
    pub fn index(self) -> u32 {
        self.0 & (MAX_SLOTS - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_and_slots_of_each_medium() {
        let slots = Slots::new(1 << 16, 3 << 16, 2);
        slots.set_count(5, 1);
        assert_eq!(slots.of(3 << 16), Some(SlotNo(0)));
        assert_eq!(slots.of((5 << 16) - 1), Some(SlotNo(1)));
        assert_eq!((slots.of(5 << 16), slots.of(0)), (None, None));
        let far = Slots::number(5, 0);
        assert_eq!(slots.at(far), 5 * MEDIUM_SPAN + (1 << 16));
        assert_eq!(slots.of(slots.at(far) + 9), Some(far));
        assert_eq!(slots.of(slots.at(far) - 1), None);
        assert_eq!(slots.of(6 * MEDIUM_SPAN + (1 << 16)), None);
        assert_eq!(slots.of(u64::MAX), None);
        assert_eq!(slots.total(), 3);
    }
}
