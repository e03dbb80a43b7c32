//! A region's medium, geometry and allocator: what checkpoints and shadows share.

use std::io;
use std::sync::{Arc, Mutex};

use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

use crate::PAGE_SIZE;
use crate::alloc::Allocator;
use crate::convert::{to_u64, to_usize};
use crate::error::SegmentPlace;
use crate::geometry::Geometry;
use crate::ids::{PageNo, RegionUuid};
use crate::layout::SegmentHeader;
use crate::medium::Medium;

/// Shared by everything that belongs to one open region.
pub(crate) struct Space {
    pub(crate) medium: Arc<dyn Medium>,
    pub(crate) geometry: Geometry,
    pub(crate) uuid: RegionUuid,
    pub(crate) allocator: Mutex<Allocator>,
}

impl Space {
    /// A copy of a page.
    pub(crate) fn read_page(&self, page: PageNo) -> io::Result<Box<[u8; PAGE_SIZE]>> {
        let mut copy = Box::new([0; PAGE_SIZE]);
        self.medium.read(page.offset_bytes(), copy.as_mut_slice())?;
        Ok(copy)
    }

    /// The CRC32s that a segment's header has for `pages` pages, appended to `into` as they are stored.
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
