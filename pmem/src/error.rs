//! Errors: one enum for each family of operations.

use std::io;

use crate::damage::RegionFailure;
use crate::ids::{CheckpointId, PageNo, SegmentNo};
use crate::journal::{JournalError, JournalFault, ReplayError};
use permafrost_cipher::{KeyId, UnknownKey};
use permafrost_medium::LostPage;

mod media;

pub use media::{GrowError, MediaError};
pub use permafrost_layout::{MapFault, SuperblockFault};

/// Cleaning stopped. Checkpoints are as they were.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CleanError {
    /// No slot is free to move segments to.
    #[error("no free space to move segments to: remove a checkpoint first")]
    Full,
    /// The region was not given the key that segments are to be encrypted with.
    #[error("key {key} is not here")]
    Locked {
        /// Id of the key.
        key: KeyId,
    },
    /// The region takes no writes.
    #[error("clean region")]
    Journal(#[from] JournalError),
    /// The medium failed.
    #[error("move segments")]
    Io(#[from] io::Error),
}

/// Formatting failed; the medium holds no region.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The segment size is not a power of two from 64 KiB to 2 MiB.
    #[error("a segment has a power of two of bytes from 65536 to 2097152, not {segment_bytes}")]
    SegmentSize {
        /// Segment size that was requested, bytes.
        segment_bytes: u32,
    },
    /// A journal half that holds no checkpoint.
    #[error(
        "a journal half has from 32 to 1048576 records in whole pages (a multiple of 32), not {journal_records}"
    )]
    JournalSize {
        /// Number of records that was requested.
        journal_records: u32,
    },
    /// The medium has no room for a single segment, or for more segments than the format can count.
    #[error(
        "{capacity_bytes} bytes do not make a region with these segments and journal, which needs at least {needed_bytes}"
    )]
    Capacity {
        /// The medium's capacity.
        capacity_bytes: u64,
        /// The least that would do.
        needed_bytes: u64,
    },
    /// The medium failed.
    #[error("write region")]
    Io(#[from] io::Error),
}

/// Opening a region was refused. Nothing has been written to it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Blank, or a format that was cut short: no checkpoint was ever in it. Format it.
    #[error("no region here: the medium is blank or its first format did not finish")]
    NotARegion,
    /// The file is a medium beside another region's first.
    #[error(
        "this is a further medium of a region: name the region's first file; `permafrost region ls` lists the others"
    )]
    Member,
    /// Neither superblock is usable; if both are blank, there is something of a region behind them.
    #[error("both superblocks are damaged (first: {first}; second: {second})")]
    BothSuperblocksCorrupt {
        /// The first one's fault.
        first: SuperblockFault,
        /// The second one's.
        second: SuperblockFault,
    },
    /// Both superblocks are intact and of different regions.
    #[error("the two superblocks describe different regions")]
    SuperblocksDisagree,
    /// Written by a newer build.
    #[error("format version {found}; this build reads up to {supported}")]
    NewerVersion {
        /// Format version of the region.
        found: u32,
        /// Newest format version that this build reads.
        supported: u32,
    },
    /// Written by an older build.
    #[error(
        "format version {found}; this build reads version {supported} only: export the checkpoints with the build that wrote \
         them, or name a new file"
    )]
    OlderVersion {
        /// Format version of the region.
        found: u32,
        /// Format version that this build reads.
        supported: u32,
    },
    /// The medium ends before the region does.
    #[error("the region has {expected} bytes, the medium only {found}: it was truncated")]
    Truncated {
        /// Length of the region by its superblock, bytes.
        expected: u64,
        /// The medium's capacity.
        found: u64,
    },
    /// The journal is damaged.
    #[error("journal at byte {at:#x} is damaged: {fault}")]
    JournalCorrupt {
        /// Byte offset of the half.
        at: u64,
        /// Fault of the journal half.
        fault: JournalFault,
    },
    /// Both copies of a checkpoint's root page are damaged.
    #[error("root page of checkpoint {id} at {page} is damaged in both copies")]
    RootCorrupt {
        /// Id of the checkpoint.
        id: CheckpointId,
        /// Page number of the first copy.
        page: PageNo,
    },
    /// The medium failed.
    #[error("read region")]
    Io(#[from] io::Error),
}

impl From<ReplayError> for OpenError {
    fn from(error: ReplayError) -> Self {
        match error {
            ReplayError::Corrupt { at, fault } => Self::JournalCorrupt { at, fault },
            ReplayError::Io(error) => Self::Io(error),
        }
    }
}

/// Reading pages failed. Nothing unverified leaves the crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// The content of a page differs from the sealed content.
    #[error("page {index:#x} at {location} has CRC32 {found:08x} instead of {expected:08x}")]
    Corrupt {
        /// Index of the page in the map.
        index: u64,
        /// Location of the page in the region.
        location: PageNo,
        /// CRC32 of the page when it was written.
        expected: u32,
        /// CRC32 of the page as read.
        found: u32,
    },
    /// The medium cannot give a page.
    #[error("page {index:#x} at {location} cannot be read: media error")]
    Lost {
        /// Index of the page in the map.
        index: u64,
        /// Location of the page in the region.
        location: PageNo,
    },
    /// A page is encrypted with a key that the region was not given. That is no damage.
    #[error("page at {location} is encrypted with key {key}, which is not here")]
    Locked {
        /// Location of the page in the region.
        location: PageNo,
        /// Id of the key.
        key: KeyId,
    },
    /// A map is damaged.
    #[error("page map at {location} is damaged: {fault}")]
    MapCorrupt {
        /// Node or run.
        location: PageNo,
        /// Fault of the map.
        fault: MapFault,
    },
    /// The medium failed.
    #[error("read page")]
    Io(#[from] io::Error),
}

impl PageError {
    /// Returns the index of the damaged page, if it is a page of the map and not of the region's own.
    #[must_use]
    pub const fn index(&self) -> Option<u64> {
        match self {
            Self::Corrupt { index, .. } | Self::Lost { index, .. } => Some(*index),
            Self::Locked { .. } | Self::MapCorrupt { .. } | Self::Io(_) => None,
        }
    }

    /// Returns the key that is needed, if that is all that is missing.
    #[must_use]
    pub const fn locked(&self) -> Option<KeyId> {
        match self {
            Self::Locked { key, .. } => Some(*key),
            _ => None,
        }
    }

    /// Returns the I/O error, if it is one: the medium's, or that of the object store that the page is in.
    #[must_use]
    pub const fn io(&self) -> Option<&io::Error> {
        match self {
            Self::Io(error) => Some(error),
            _ => None,
        }
    }
}

/// Error of healing a damaged page.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HealError {
    /// The map or the checksum of the page cannot be read.
    #[error(transparent)]
    Page(#[from] PageError),
    /// The map has no such page, or it is a zero page, which is not stored.
    #[error("page {index:#x} is not stored")]
    NotStored {
        /// Index of the page in the map.
        index: u64,
    },
    /// The offered bytes differ from the sealed ones.
    #[error("page {index:#x} is offered with CRC32 {found:08x} instead of {expected:08x}")]
    OtherContent {
        /// Index of the page in the map.
        index: u64,
        /// CRC32 of the sealed page.
        expected: u32,
        /// CRC32 of the offered page.
        found: u32,
    },
    /// The medium takes no write there.
    #[error("write page anew")]
    Write(#[source] io::Error),
    /// The medium took the write, and has something else.
    #[error("page {index:#x} was written anew, and is damaged again")]
    NotKept {
        /// Index of the page in the map.
        index: u64,
    },
}

/// Copying a blob out failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BlobError {
    /// Reading the blob failed.
    #[error(transparent)]
    Page(#[from] PageError),
    /// The receiver refused.
    #[error("pass on blob")]
    Sink(#[source] io::Error),
}

/// Error of writing to a shadow. After it the shadow can only be dropped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShadowError {
    /// The region has no free segment.
    #[error("region is full: {needed} bytes needed, {free} free")]
    Full {
        /// Bytes of the segments that were requested.
        needed: u64,
        /// Bytes of the free segments.
        free: u64,
    },
    /// Pages come in strictly ascending order.
    #[error("page {index:#x} after page {expected:#x} was expected next: pages must ascend")]
    NotAscending {
        /// Index of the page that came.
        index: u64,
        /// The least that may come.
        expected: u64,
    },
    /// The caller referred to a page of the parent that the parent does not have.
    #[error("page {index:#x} is said to be in the parent, which lacks it")]
    MissingInParent {
        /// Index of the page.
        index: u64,
    },
    /// The length is not a whole number of pages.
    #[error("{len_bytes} bytes are not a whole number of pages")]
    NotPages {
        /// Number of bytes that came.
        len_bytes: usize,
    },
    /// More pages than a map can index.
    #[error("{pages} pages from page {index:#x} pass the end of the index space")]
    TooManyPages {
        /// Index of the first page.
        index: u64,
        /// Number of pages.
        pages: u64,
    },
    /// The parent is of another region.
    #[error("parent and shadow are in different regions")]
    ForeignRegion,
    /// The parent cannot be read.
    #[error("parent: {0}")]
    Corrupt(#[from] PageError),
    /// The region was not given the key that the shadow is to be encrypted with.
    #[error("key {key} is not here")]
    Locked {
        /// Id of the key.
        key: KeyId,
    },
    /// Reading the source of a blob failed.
    #[error("read blob")]
    Source(#[source] io::Error),
    /// The region takes no writes any more.
    #[error("the region takes no writes: {0}")]
    Failed(RegionFailure),
    /// The medium failed.
    #[error("write pages")]
    Io(#[from] io::Error),
}

/// Error of sealing. Unless a variant states otherwise, the checkpoint does not exist.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// The id is taken.
    #[error("checkpoint {id} exists already")]
    Exists {
        /// Id of the checkpoint.
        id: CheckpointId,
    },
    /// The shadow's data.
    #[error(transparent)]
    Shadow(#[from] ShadowError),
    /// The journal; with [`JournalError::Io`] it shows at the next open whether the seal happened.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

/// Closing failed; the next open counts an unsafe shutdown, nothing else is lost.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// Writing the superblock.
    #[error("write superblock")]
    Io(#[from] io::Error),
    /// The journal had failed: the next open shows what is durable.
    #[error("journal failed earlier: the region stays marked as open")]
    Failed,
}

/// Makes the error of a run or node at a place where none can be.
pub(crate) fn outside(location: PageNo) -> PageError {
    PageError::MapCorrupt {
        location,
        fault: MapFault::Outside,
    }
}

/// Reading a part of a segment failed.
#[derive(Debug)]
pub(crate) enum SegmentError {
    /// The location is damaged.
    Fault(MapFault),
    /// The segment is encrypted with a key that is not here.
    Locked(KeyId),
    /// The medium returned an error.
    Io(io::Error),
}

impl From<UnknownKey> for SegmentError {
    fn from(UnknownKey(key): UnknownKey) -> Self {
        Self::Locked(key)
    }
}

impl SegmentError {
    /// Makes the error of a reader that wanted the page at `location`.
    pub(crate) fn at(self, location: PageNo) -> PageError {
        match self {
            Self::Fault(fault) => PageError::MapCorrupt { location, fault },
            Self::Locked(key) => PageError::Locked { location, key },
            Self::Io(error) => match LostPage::of(&error) {
                Some(_) => PageError::MapCorrupt {
                    location,
                    fault: MapFault::Unreadable,
                },
                None => PageError::Io(error),
            },
        }
    }
}

/// A page of a segment header is not part of any run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotInSegments;

/// Position of a page in its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentPlace {
    /// Number of the segment.
    pub(crate) segment: SegmentNo,
    /// Page in the segment, at least 1.
    pub(crate) page: u32,
}
