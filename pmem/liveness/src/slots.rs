//! Slots of one medium: reference counts, and a bitmap of the free ones.

use permafrost_medium::convert::to_usize;

/// Slots from which on one is kept free of dumps, for cleaning. Smaller media are cleaned while a slot is free.
const SLOTS_WITH_RESERVE: u32 = 64;

/// Number of free slots, of so many on a medium, that dumps leave to cleaning.
#[must_use]
pub fn reserved_slots(slots: u32) -> u32 {
    u32::from(slots >= SLOTS_WITH_RESERVE)
}

/// Reference counts of one medium's slots, and a bitmap of the free ones.
#[derive(Default)]
pub struct MediumSlots {
    /// For each slot, the held segments in it, and the holds on the slot itself.
    pub occupants: Vec<u32>,
    /// Bitmap with one bit a slot, set if the slot is free.
    pub free_bits: Vec<u64>,
    /// Number of free slots.
    pub free: u32,
    /// Slots with a lost page, which stay occupied with nothing in them.
    pub retired: u32,
    /// First word that may have a free slot: no word before it has one.
    search_from: usize,
}

impl MediumSlots {
    /// Adds free slots, so that there are `slots`.
    pub fn extend(&mut self, slots: u32) {
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
    pub fn take(&mut self) -> Option<u32> {
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

    /// Adds an occupant of a slot.
    pub fn occupy(&mut self, slot: u32) {
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

    /// Removes an occupant of a slot, which is free without one.
    pub fn vacate(&mut self, slot: u32) {
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

    /// Number of all slots.
    #[must_use]
    pub fn count(&self) -> u32 {
        u32::try_from(self.occupants.len()).unwrap_or(u32::MAX)
    }

    /// Slots kept free of dumps, for cleaning.
    pub fn reserved(&self) -> u32 {
        reserved_slots(self.count())
    }
}

/// Slots of a medium, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotCounts {
    /// Number of all slots.
    pub slots: u32,
    /// Free ones, those that are kept for cleaning included.
    pub free: u32,
    /// Those kept for cleaning.
    pub reserved: u32,
    /// Those with a lost page, which nothing is in.
    pub retired: u32,
}

impl SlotCounts {
    /// Slots with segments, or kept for a reader.
    pub fn used(self) -> u32 {
        self.slots - self.free - self.retired
    }

    /// Returns true if at least an eighth of the slots is free.
    pub fn has_spare(self) -> bool {
        self.free >= self.slots / 8
    }
}
