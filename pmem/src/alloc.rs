//! Allocation of segments, in DRAM: which owners hold which segments; rebuilt from the checkpoints' roots at every
//! open.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::error::ShadowError;
use crate::ids::SegmentNo;
use crate::space::Space;

/// Reference count of every segment, and a bitmap of the free ones.
pub(crate) struct Allocator {
    holders: Vec<u32>,
    /// Bitmap with one bit a segment, set if the segment is free.
    free_bits: Vec<u64>,
    free: u32,
    /// First word that may have a free segment: no word before it has one.
    search_from: usize,
}

impl Allocator {
    /// Makes an allocator with all segments free.
    pub(crate) fn new(segments: u32) -> Self {
        let count = crate::convert::to_usize(u64::from(segments));
        let mut free_bits = vec![u64::MAX; count.div_ceil(64)];
        if let (Some(last), tail @ 1..) = (free_bits.last_mut(), segments % 64) {
            *last = (1 << tail) - 1;
        }
        Self {
            holders: vec![0; count],
            free_bits,
            free: segments,
            search_from: 0,
        }
    }

    pub(crate) fn free(&self) -> u32 {
        self.free
    }

    /// Takes the lowest free segment, with one holder: low ones first keeps extents long, and reuses the memory that
    /// a tmpfs has already mapped.
    fn take(&mut self) -> Option<SegmentNo> {
        for (word, bits) in self.free_bits.iter().enumerate().skip(self.search_from) {
            if *bits != 0 {
                self.search_from = word;
                let index = word * 64 + crate::convert::to_usize(u64::from(bits.trailing_zeros()));
                let segment = SegmentNo(u32::try_from(index).ok()?);
                self.hold(segment);
                return Some(segment);
            }
        }
        self.search_from = self.free_bits.len();
        None
    }

    /// Adds a holder to a segment.
    pub(crate) fn hold(&mut self, segment: SegmentNo) {
        let index = crate::convert::to_usize(u64::from(segment.0));
        self.holders[index] += 1;
        if self.holders[index] == 1 {
            self.free_bits[index / 64] &= !(1 << (index % 64));
            self.free -= 1;
        }
    }

    /// Removes a holder from a segment, which is free after the last.
    fn release(&mut self, segment: SegmentNo) {
        let index = crate::convert::to_usize(u64::from(segment.0));
        self.holders[index] -= 1;
        if self.holders[index] == 0 {
            self.free_bits[index / 64] |= 1 << (index % 64);
            self.free += 1;
            self.search_from = self.search_from.min(index / 64);
        }
    }

    pub(crate) fn is_free(&self, segment: SegmentNo) -> bool {
        self.holders(segment) == 0
    }

    fn holders(&self, segment: SegmentNo) -> u32 {
        self.holders[crate::convert::to_usize(u64::from(segment.0))]
    }
}

/// Consecutive segments: first, and one past the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) first: u32,
    pub(crate) end: u32,
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
        let mut allocator = space.allocator.lock();
        for segment in extents.iter().flat_map(|e| e.first..e.end) {
            allocator.hold(SegmentNo(segment));
        }
        drop(allocator);
        Self {
            space: Arc::clone(space),
            extents,
        }
    }

    pub(crate) fn extents(&self) -> &[Extent] {
        &self.extents
    }

    pub(crate) fn segments(&self) -> u64 {
        self.extents
            .iter()
            .map(|e| u64::from(e.end - e.first))
            .sum()
    }

    /// Returns the number of segments that have no other holder.
    pub(crate) fn exclusive(&self) -> u64 {
        let allocator = self.space.allocator.lock();
        let alone = self.extents.iter().flat_map(|e| e.first..e.end);
        let alone = alone
            .filter(|&s| allocator.holders(SegmentNo(s)) == 1)
            .count();
        crate::convert::to_u64(alone)
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
        let mut allocator = self.space.allocator.lock();
        for segment in self.extents.iter().flat_map(|e| e.first..e.end) {
            allocator.release(SegmentNo(segment));
        }
    }
}

/// A shadow's hold on its segments, growing; given back if the shadow is dropped.
pub(crate) struct Holdings {
    space: Arc<Space>,
    segments: BTreeSet<u32>,
    /// Segment of the last query: nearly always the next one too.
    recent: Option<SegmentNo>,
}

impl Holdings {
    pub(crate) fn new(space: &Arc<Space>) -> Self {
        Self {
            space: Arc::clone(space),
            segments: BTreeSet::new(),
            recent: None,
        }
    }

    /// Takes a free segment.
    pub(crate) fn allocate(&mut self) -> Result<SegmentNo, ShadowError> {
        if let Some(failure) = self.space.failure.get() {
            return Err(ShadowError::Failed(failure.clone()));
        }
        let mut allocator = self.space.allocator.lock();
        loop {
            let Some(segment) = allocator.take() else {
                let segment_bytes = u64::from(self.space.geometry.segment_bytes);
                return Err(ShadowError::Full {
                    needed: segment_bytes,
                    free: u64::from(allocator.free()) * segment_bytes,
                });
            };
            // A segment with a lost page stays allocated and unused: bytes that are written to a lost page are not
            // stored.
            if !self.space.has_lost_page(segment) {
                self.segments.insert(segment.0);
                return Ok(segment);
            }
        }
    }

    /// Holds a segment that a live checkpoint holds, too.
    pub(crate) fn share(&mut self, segment: SegmentNo) {
        if self.recent == Some(segment) {
            return;
        }
        self.recent = Some(segment);
        if self.segments.insert(segment.0) {
            self.space.allocator.lock().hold(segment);
        }
    }

    pub(crate) fn extents(&self) -> Vec<Extent> {
        to_extents(self.segments.iter().copied())
    }

    /// Converts the hold into a checkpoint's.
    pub(crate) fn into_lease(mut self) -> Lease {
        let segments = std::mem::take(&mut self.segments);
        Lease {
            space: Arc::clone(&self.space),
            extents: to_extents(segments.into_iter()),
        }
    }
}

impl Drop for Holdings {
    fn drop(&mut self) {
        let mut allocator = self.space.allocator.lock();
        for &segment in &self.segments {
            allocator.release(SegmentNo(segment));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lowest_free_segment_first_and_none_twice() {
        let mut a = Allocator::new(130);
        let taken: Vec<u32> = std::iter::from_fn(|| a.take()).map(|s| s.0).collect();
        assert_eq!(taken, (0..130).collect::<Vec<_>>());
        assert_eq!(a.free(), 0);
        a.release(SegmentNo(129));
        a.hold(SegmentNo(3));
        a.release(SegmentNo(3));
        a.release(SegmentNo(5));
        assert_eq!(
            (a.take(), a.take(), a.take()),
            (Some(SegmentNo(5)), Some(SegmentNo(129)), None)
        );
    }

    #[test]
    fn extents_join_neighbours() {
        let extents = to_extents([0, 1, 2, 7, 9, 10].into_iter());
        let pairs: Vec<_> = extents.iter().map(|e| (e.first, e.end)).collect();
        assert_eq!(pairs, [(0, 3), (7, 8), (9, 11)]);
    }
}
