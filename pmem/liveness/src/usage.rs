//! Room of a region, and of its media.

use permafrost_layout::ids::RegionUuid;

/// Room on a medium that dumps go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediumUsage {
    /// Number of the medium; the first has 0.
    pub number: usize,
    /// Bytes of its slots, without those that are kept for cleaning.
    pub capacity_bytes: u64,
    /// Bytes of free slots that dumps can use.
    pub free_bytes: u64,
    /// Bytes of a slot.
    pub segment_bytes: u64,
}

impl MediumUsage {
    /// Returns the bytes of slots with segments, or kept for a reader.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.capacity_bytes.saturating_sub(self.free_bytes)
    }
}

/// Space and journal records that a region uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionUsage {
    /// Bytes of all slots that dumps can use.
    pub capacity_bytes: u64,
    /// Bytes of the free ones.
    pub free_bytes: u64,
    /// Number of slots that dumps can use.
    pub segments: u64,
    /// Bytes of a segment.
    pub segment_bytes: u64,
    /// Records in the active journal half, its header included.
    pub journal_records: u64,
    /// Records that a half can have; a full one is compacted.
    pub journal_capacity: u64,
    /// Times the region was opened without having been closed.
    pub unsafe_shutdowns: u64,
    /// UUID of the region.
    pub uuid: RegionUuid,
}
