//! The magics in the heads of image files (`criu/include/magic.h`).

/// First word of every image but the inventory and the service files (since CRIU 1.1's images).
pub const COMMON_MAGIC: u32 = 0x5456_4319;
/// First word of service files: statistics, irmap-cache.
pub const SERVICE_MAGIC: u32 = 0x5510_5940;
/// Only word in the head of `inventory.img`.
pub const INVENTORY_MAGIC: u32 = 0x5831_3116;
/// `pagemap-N.img` and `pagemap-shmem-N.img`.
pub const PAGEMAP_MAGIC: u32 = 0x5608_4025;
/// Type of `pstree.img`.
pub const PSTREE_MAGIC: u32 = 0x5027_3030;
/// `stats-dump` and `stats-restore` (which have no `.img`).
pub const STATS_MAGIC: u32 = 0x5709_3306;
/// Type of `mm-N.img`.
pub const MM_MAGIC: u32 = 0x5749_2820;
/// Type of `files.img`.
pub const FILES_MAGIC: u32 = 0x5630_3138;

/// Type of `core-N.img`.
pub(super) const CORE_MAGIC: u32 = 0x5505_3847;
/// Type of `ids-N.img`.
pub(super) const IDS_MAGIC: u32 = 0x5443_2030;
/// Type of `fdinfo-N.img`.
pub(super) const FDINFO_MAGIC: u32 = 0x5621_3732;

/// Head of an image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// [`COMMON_MAGIC`] and the type's magic: 8 bytes.
    Common(u32),
    /// [`SERVICE_MAGIC`] and the type's magic: 8 bytes.
    Service(u32),
    /// [`INVENTORY_MAGIC`] alone: 4 bytes.
    Inventory,
}

impl Head {
    /// Returns the words of the head, in order.
    #[must_use]
    pub fn words(self) -> (u32, Option<u32>) {
        match self {
            Self::Common(magic) => (COMMON_MAGIC, Some(magic)),
            Self::Service(magic) => (SERVICE_MAGIC, Some(magic)),
            Self::Inventory => (INVENTORY_MAGIC, None),
        }
    }

    /// Returns the length of the head, bytes.
    #[must_use]
    pub fn len_bytes(self) -> usize {
        match self {
            Self::Common(_) | Self::Service(_) => 8,
            Self::Inventory => 4,
        }
    }
}
