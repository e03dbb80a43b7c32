//! Faults of stored structures: differences between them and what a writer makes.

/// Fault of a superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SuperblockFault {
    /// The page is all zero.
    #[error("blank")]
    Blank,
    /// Does not start as a superblock does.
    #[error("no superblock")]
    Magic,
    /// The checksum does not match.
    #[error("checksum does not match")]
    Checksum,
    /// Intact, yet describes an impossible region.
    #[error("impossible geometry")]
    Geometry,
    /// The medium returns an error for it.
    #[error("unreadable")]
    Unreadable,
}

/// Fault of a page map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MapFault {
    /// The node differs from the one that its parent refers to: it is damaged, stale or misplaced.
    #[error("node has CRC32 {found:08x}, its parent says {expected:08x}")]
    Checksum {
        /// CRC32 by the parent.
        expected: u32,
        /// CRC32 of the page.
        found: u32,
    },
    /// The page checksums in the segment's header differ from those with which the run was written.
    #[error("page checksums of the run have CRC32 {found:08x}, the run says {expected:08x}")]
    PageChecksums {
        /// CRC32 by the run.
        expected: u32,
        /// CRC32 of the table.
        found: u32,
    },
    /// The medium returns an error for it.
    #[error("cannot be read: media error")]
    Unreadable,
    /// The page is not a node of the expected level, or its entries do not ascend.
    #[error("not a well-formed node")]
    Malformed,
    /// The segment table does not tell where the segment is, or its header does not tell which pages are stored.
    #[error("the location of the page's segment is damaged")]
    Location,
    /// Refers to a page outside the segments of its checkpoint.
    #[error("refers to a page outside the checkpoint's segments")]
    Outside,
    /// Both copies of the root page, which has the manifest, are damaged.
    #[error("neither copy of the root page is intact")]
    RootPage,
    /// 32 bytes that no writer makes.
    #[error("not a map root")]
    Root,
    /// A blob's pages do not add up to its length.
    #[error("blob of {len_bytes} bytes has no page {index}")]
    BlobGap {
        /// Expected length of the blob.
        len_bytes: u64,
        /// First missing page.
        index: u64,
    },
}
