//! Medium, geometry and allocator of a region, which checkpoints and shadows share.

use std::io;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

use crate::PAGE_SIZE;
use crate::alloc::Allocator;
use crate::convert::{to_u64, to_usize};
use crate::damage::RegionFailure;
use crate::error::SegmentPlace;
use crate::geometry::Geometry;
use crate::ids::{PageNo, RegionUuid, SegmentNo};
use crate::layout::SegmentHeader;
use crate::medium::{Flushed, LostPage, Medium};

/// Shared by everything that belongs to one open region.
pub(crate) struct Space {
    pub(crate) medium: Arc<dyn Medium>,
    pub(crate) geometry: Geometry,
    pub(crate) uuid: RegionUuid,
    pub(crate) allocator: Mutex<Allocator>,
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

    /// Returns true if a segment has a lost page: it is not written to again.
    pub(crate) fn has_lost_page(&self, segment: SegmentNo) -> bool {
        let at = self.geometry.segment_at(segment);
        let len_bytes = u64::from(self.geometry.segment_bytes);
        self.medium.check(at, len_bytes).is_err()
    }

    /// Returns a copy of a page.
    pub(crate) fn read_page(&self, page: PageNo) -> io::Result<Box<[u8; PAGE_SIZE]>> {
        let mut copy = Box::new([0; PAGE_SIZE]);
        self.medium.read(page.offset_bytes(), copy.as_mut_slice())?;
        Ok(copy)
    }

    /// Appends the CRC32s of `pages` pages in a segment's header to `into`, as they are stored.
    pub(crate) fn read_crcs(
        &self,
        place: SegmentPlace,
        pages: u32,
        into: &mut Vec<U32>,
    ) -> io::Result<()> {
        let entry = to_u64(std::mem::offset_of!(SegmentHeader, crcs))
            + u64::from(place.page) * to_u64(size_of::<U32>());
        let mut bytes = [0; size_of::<SegmentHeader>()];
        let bytes = &mut bytes[..to_usize(u64::from(pages)) * size_of::<U32>()];
        self.medium
            .read(self.geometry.segment_at(place.segment) + entry, bytes)?;
        if let Ok(crcs) = <[U32]>::ref_from_bytes(bytes) {
            into.extend_from_slice(crcs);
        }
        Ok(())
    }
}
