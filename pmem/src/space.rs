//! Medium, geometry and allocator of a region, which checkpoints and shadows share.

use std::io;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use parking_lot::{Mutex, MutexGuard};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use crate::alloc::Allocator;
use crate::damage::RegionFailure;
use crate::error::{MapFault, SegmentError, SegmentPlace};
use crate::geometry::Geometry;
use crate::ids::{RegionUuid, SegmentNo, SlotNo};
use crate::layout::packed_header_bytes;
use crate::layout::{
    PackedHeader, ROOT_MAGIC, SEGMENT_CRCS, SEGMENT_MAGIC, SegmentHeader, StoredPages,
};
use crate::readers::Readers;
use crate::slots::Slots;
use crate::table::SegmentTable;
use crate::{PAGE_BYTES, PAGE_SIZE};
use permafrost_cipher::{KeyId, Keyring};
use permafrost_medium::convert::{to_u64, to_usize};
use permafrost_medium::{Flushed, LostPage, MEDIUM_SPAN, Medium, MediumSet};

pub(crate) const LOCATION: SegmentError = SegmentError::Fault(MapFault::Location);

/// Shared by everything that belongs to one open region.
pub(crate) struct Space {
    pub(crate) medium: MediumSet,
    /// As of the open: what grows is in the table and its slots.
    pub(crate) geometry: Geometry,
    pub(crate) uuid: RegionUuid,
    pub(crate) keys: Keyring,
    pub(crate) table: SegmentTable,
    pub(crate) allocator: Mutex<Allocator>,
    pub(crate) readers: Readers,
    /// Held while a segment is moved, and while a page is healed where it is.
    pub(crate) moving: Mutex<()>,
    /// Pages that were healed where they are: a copy that was made before does not have them.
    pub(crate) healed: AtomicU64,
    /// The first failure after which nothing written can be believed to be durable.
    pub(crate) failure: OnceLock<RegionFailure>,
}

impl Space {
    /// Waits until the ranges that a shadow has flushed are durable. A failure that is not of one page is the
    /// region's.
    pub(crate) fn fence(&self, flushed: &mut Flushed) -> io::Result<()> {
        let fenced = self.medium.fence(flushed);
        if let Err(error) = &fenced
            && LostPage::of(error).is_none()
        {
            self.fail("make written pages durable", error);
        }
        fenced
    }

    /// Records why the region takes no more writes; the first reason counts.
    pub(crate) fn fail(&self, action: &'static str, error: &io::Error) {
        let _ = self.failure.set(RegionFailure::new(action, error));
    }

    /// Has a medium mapped in the background: the free slots first, in the order in which dumps take them.
    pub(crate) fn populate(&self, number: usize) {
        if let Some(medium) = self.medium.get(number) {
            let end = medium.capacity_bytes();
            let free = free_first(self.table.slots(), end, self.allocator().free_slots(number));
            medium.populate(free);
        }
    }

    pub(crate) fn lock_moves(&self) -> MutexGuard<'_, ()> {
        self.moving.lock()
    }

    pub(crate) fn allocator(&self) -> MutexGuard<'_, Allocator> {
        self.allocator.lock()
    }

    /// Returns true if a slot has a lost page: it is not written to again.
    pub(crate) fn has_lost_page(&self, slot: SlotNo) -> bool {
        let at = self.table.slots().at(slot);
        let len_bytes = u64::from(self.geometry.segment_bytes);
        self.medium.check(at, len_bytes).is_err()
    }

    /// Returns true if the header at the segment's position may be the segment's own: it is not blank, and not another
    /// segment's.
    pub(crate) fn is_written(&self, segment: SegmentNo) -> bool {
        let Some(position) = self.table.position(segment) else {
            return false;
        };
        if position.packed_pages.is_some() {
            return !matches!(
                self.packed(segment, position.header_at),
                Err(SegmentError::Fault(_))
            );
        }
        let mut header = [0; std::mem::offset_of!(SegmentHeader, reserved)];
        if self.medium.read(position.header_at, &mut header).is_err() {
            return true;
        }
        let (magic, rest) = header.split_at(SEGMENT_MAGIC.len());
        let others = magic == SEGMENT_MAGIC && rest[..4] != segment.0.to_le_bytes();
        // The magic number of a segment that became free is zeroed.
        !others && magic.iter().any(|&byte| byte != 0)
    }

    /// Returns the bytes that a segment takes of its slot.
    pub(crate) fn segment_bytes(&self, segment: SegmentNo) -> u64 {
        let position = self.table.position(segment);
        match position.and_then(|position| position.packed_pages) {
            Some(pages) => u64::from(pages) * PAGE_BYTES + packed_header_bytes(pages),
            None => u64::from(self.geometry.segment_bytes),
        }
    }

    /// Returns the byte offset of `pages` pages of a segment: consecutive on the medium, as each of them is stored.
    ///
    /// Valid while the caller has a reference to a checkpoint that holds the segment: a segment that is moved meanwhile
    /// stays where it was, too, for the references that exist ([`Readers`]).
    pub(crate) fn locate(&self, place: SegmentPlace, pages: u32) -> Result<u64, SegmentError> {
        let position = self.table.position(place.segment);
        let position = position.ok_or(LOCATION)?;
        if position.packed_pages.is_none() {
            return Ok(position.header_at + u64::from(place.page) * PAGE_BYTES);
        }
        let packed = self.packed(place.segment, position.header_at)?;
        let rank = packed.stored.rank(place.page, pages).ok_or(LOCATION)?;
        Ok(packed.first_at + u64::from(rank) * PAGE_BYTES)
    }

    /// Reads the header of a packed segment.
    pub(crate) fn packed(
        &self,
        segment: SegmentNo,
        header_at: u64,
    ) -> Result<Packed, SegmentError> {
        let mut bytes = [0; size_of::<PackedHeader>()];
        let read = self.medium.read(header_at, &mut bytes);
        read.map_err(SegmentError::Io)?;
        let header = PackedHeader::read_from_bytes(&bytes).map_err(|_| LOCATION)?;
        let packed = Packed {
            stored: StoredPages(header.stored.map(U64::get)),
            first_at: header.first.get().saturating_mul(PAGE_BYTES),
            key: KeyId::new(header.key.get()),
        };
        let end = packed
            .first_at
            .saturating_add(u64::from(packed.stored.count()) * PAGE_BYTES);
        let slots = self.table.slots();
        let slot_at = slots.of(header_at).map(|slot| slots.at(slot));
        let within = slot_at.is_some_and(|at| {
            at <= packed.first_at && end <= at + u64::from(self.geometry.segment_bytes)
        });
        let intact = header.crc32.get() == packed_checksum(self.uuid, &header)
            && header.segment.get() == segment.0;
        if intact && within {
            Ok(packed)
        } else {
            Err(LOCATION)
        }
    }

    /// Returns a copy of a page.
    pub(crate) fn read_page(
        &self,
        place: SegmentPlace,
    ) -> Result<Box<[u8; PAGE_SIZE]>, SegmentError> {
        let at = self.locate(place, 1)?;
        let mut copy = Box::new([0; PAGE_SIZE]);
        let read = self.medium.read(at, copy.as_mut_slice());
        read.map_err(SegmentError::Io)?;
        Ok(copy)
    }

    /// Returns the next page if it is the second copy of a root page at `place`, and intact.
    pub(crate) fn second_copy(&self, place: SegmentPlace) -> Option<SegmentPlace> {
        let page = place.page + 1;
        let copy = SegmentPlace { page, ..place };
        if page >= self.geometry.segment_pages() {
            return None;
        }
        let mut crcs = Vec::new();
        self.read_crcs(place, 2, &mut crcs).ok()?;
        let content = self.read_page(copy).ok()?;
        let crc = U32::new(crc32fast::hash(content.as_slice()));
        (crcs == [crc, crc] && content.starts_with(&ROOT_MAGIC)).then_some(copy)
    }

    /// Appends the CRC32s of `pages` pages in a segment's header to `into`, as they are stored.
    pub(crate) fn read_crcs(
        &self,
        place: SegmentPlace,
        pages: u32,
        into: &mut Vec<U32>,
    ) -> Result<(), SegmentError> {
        let position = self.table.position(place.segment);
        let position = position.ok_or(LOCATION)?;
        // The checksums of a packed segment's pages are as close together as its pages.
        let (first, nth) = match position.packed_pages {
            None => (std::mem::offset_of!(SegmentHeader, crcs), place.page),
            Some(_) => {
                let packed = self.packed(place.segment, position.header_at)?;
                let rank = packed.stored.rank(place.page, pages).ok_or(LOCATION)?;
                (size_of::<PackedHeader>(), rank)
            }
        };
        let entry = to_u64(first) + u64::from(nth) * to_u64(size_of::<U32>());
        let mut bytes = [0; SEGMENT_CRCS * size_of::<U32>()];
        let bytes = &mut bytes[..to_usize(u64::from(pages)) * size_of::<U32>()];
        let read = self.medium.read(position.header_at + entry, bytes);
        read.map_err(SegmentError::Io)?;
        if let Ok(crcs) = <[U32]>::ref_from_bytes(bytes) {
            into.extend_from_slice(crcs);
        }
        Ok(())
    }
}

/// A packed segment, as its header describes it.
pub(crate) struct Packed {
    stored: StoredPages,
    /// Key that the pages are encrypted with.
    pub(crate) key: Option<KeyId>,
    /// Byte offset of the first stored page.
    first_at: u64,
}

/// Returns the checksum that belongs into a packed segment's header.
pub(crate) fn packed_checksum(uuid: RegionUuid, header: &PackedHeader) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(uuid.as_bytes());
    hasher.update(&header.as_bytes()[size_of::<U32>()..]);
    hasher.finalize()
}

/// Returns the ranges of a medium of `end` bytes: those of its free slots, ascending, then all others.
fn free_first(
    slots: &Slots,
    end: u64,
    free_slots: impl Iterator<Item = SlotNo>,
) -> Vec<Range<u64>> {
    let slot_bytes = slots.segment_bytes();
    let mut free: Vec<Range<u64>> = Vec::new();
    for slot in free_slots {
        let at = slots.at(slot) % MEDIUM_SPAN;
        match free.last_mut() {
            Some(before) if before.end == at => before.end += slot_bytes,
            _ => free.push(at..at + slot_bytes),
        }
    }
    let starts = std::iter::once(0).chain(free.iter().map(|range| range.end));
    let ends = free.iter().map(|range| range.start).chain([end]);
    let others: Vec<_> = starts.zip(ends).map(|(start, end)| start..end).collect();
    free.extend(others);
    free
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_slots_are_populated_first() {
        const SEGMENT: u64 = 64 << 10;
        let slots = Slots::new(64 << 10, 5 << 16, 100);
        let at = |slot: u32| slots.at(SlotNo(slot));
        let end = at(100) + 4096;
        let ranges = free_first(&slots, end, [2, 3, 7].map(SlotNo).into_iter());
        assert_eq!(
            ranges,
            [
                at(2)..at(4),
                at(7)..at(8),
                0..at(2),
                at(4)..at(7),
                at(8)..end
            ]
        );
        assert_eq!(at(1) - at(0), SEGMENT);
        let none_free = free_first(&slots, end, std::iter::empty());
        assert_eq!(none_free, std::slice::from_ref(&(0..end)));
    }
}
