//! Holds on segments and slots: those of checkpoints, of shadows, and of cleaning.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Allocator;
use crate::error::ShadowError;
use crate::ids::{SegmentNo, SlotNo};
use crate::space::Space;
use crate::table::Position;
use permafrost_cipher::KeyId;

/// Hold on a slot, whatever is in it.
pub(crate) struct SlotHold {
    space: Arc<Space>,
    pub(crate) slot: SlotNo,
}

impl SlotHold {
    /// Takes over a hold that is counted already.
    pub(super) fn passed(space: &Arc<Space>, slot: SlotNo) -> Self {
        let space = Arc::clone(space);
        Self { space, slot }
    }

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

    /// Takes the tail of a segment whose pages have that key, or else a free segment and a slot for it.
    pub(crate) fn begin(&mut self, key: Option<KeyId>) -> Result<Allocated, ShadowError> {
        let space = &self.space;
        let mut allocator = space.allocator();
        // Of the fastest medium with room: a tail before a slot, but no tail of a slower one before a slot of a faster.
        let mut found = None;
        for medium in allocator.order.clone() {
            found = space.take_tail(&mut allocator, medium, key);
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
        // What was written there is referred to by nothing: the tail is as it was. Offered while this holds the segment:
        // a survey sees either that, or the tail, and never a segment that only looks as if nobody went on with it.
        if let Some((segment, page)) = self.tail {
            self.space.offer_tail(segment, page);
        }
        self.space
            .release(self.segments.iter().copied().map(SegmentNo));
    }
}
