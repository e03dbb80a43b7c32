//! Errors of adding, growing and removing a region's media.

use std::io;

use super::CleanError;
use crate::ids::RegionUuid;
use crate::journal::JournalError;

/// A region does not grow.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GrowError {
    /// Less than a segment more, with the segment table that goes with it.
    #[error("{asked_bytes} bytes are too few to grow to: at least {least_bytes} are needed")]
    TooSmall {
        /// Size that was requested, bytes.
        asked_bytes: u64,
        /// The least that would do.
        least_bytes: u64,
    },
    /// More than the format can count.
    #[error("a region has at most 16777216 segments, and 16 TiB on a medium")]
    TooLarge,
}

/// Changing the media of a region failed. The media are as they were, except after [`MediaError::Superblock`]: then the
/// next open shows which ones there are, and the region takes no more writes until then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// The region takes no writes.
    #[error("the region takes no writes")]
    Journal(#[from] JournalError),
    /// The requested size is refused.
    #[error(transparent)]
    Grow(#[from] GrowError),
    /// No medium has this number.
    #[error("the region has no medium {number}")]
    Unknown {
        /// Number that was given.
        number: usize,
    },
    /// The first medium has the superblocks and the journal.
    #[error("medium 0 has the list of all checkpoints: it can grow, but not be drained or removed")]
    First,
    /// The medium is not there.
    #[error(
        "medium {number} is not there: bring its file back and add it again, or accept its loss with `permafrost region rm --lost`"
    )]
    Missing {
        /// Number of the medium.
        number: usize,
    },
    /// The medium is there, so there is no loss to accept.
    #[error("medium {number} is there: drain and remove it instead")]
    Present {
        /// Number of the medium.
        number: usize,
    },
    /// The medium has segments, or readers have pages of it.
    #[error("medium {number} has {slots} slots in use: drain it first")]
    InUse {
        /// Number of the medium.
        number: usize,
        /// Slots in use.
        slots: u32,
    },
    /// No other medium takes segments.
    #[error("no other medium takes segments: add one first")]
    NoOther,
    /// The file has something else.
    #[error(
        "the file is neither empty nor a member of this region: name a new file, or delete this one if nothing in it is needed"
    )]
    NotBlank,
    /// The file is a region of its own.
    #[error("the file is a region of its own: name a new file")]
    Region,
    /// The file is a member of another region.
    #[error(
        "the file belongs to region {region}: name a new file, or delete this one if nothing in it is needed"
    )]
    Foreign {
        /// Region that it belongs to.
        region: RegionUuid,
    },
    /// The file has this region's header, and the region does not list it.
    #[error(
        "the file has a header of this region, which does not list it: its addition was cut short, its loss was accepted, or \
         the region's first file is an older copy; delete this file if nothing in it is needed"
    )]
    Unlisted,
    /// The file is a member already.
    #[error("the file is medium {number} of this region already")]
    Listed {
        /// Number of the medium.
        number: usize,
    },
    /// The medium is not the cold one that the region lists, or its index is not the one that belongs to it.
    #[error("{problem}")]
    Cold {
        /// Difference, and what to do.
        problem: String,
    },
    /// The object store of a cold medium cannot be taken.
    #[error(transparent)]
    Store(io::Error),
    /// The header is of a newer build.
    #[error("the file was written by a newer build")]
    Newer,
    /// The file is shorter than the region has it.
    #[error("the file has {found} bytes, and the region has {expected} of it: it was truncated")]
    Truncated {
        /// Bytes that the region uses.
        expected: u64,
        /// Bytes of the medium.
        found: u64,
    },
    /// All numbers are in use, or segments whose loss was accepted still name them.
    #[error("a region has at most 16 media")]
    TooMany,
    /// There are too few segment numbers for so many slots.
    #[error(
        "the segment table is too small for so many slots: grow medium 0 to at least {least_bytes} bytes first"
    )]
    TooFewNumbers {
        /// Bytes to which the first medium has to grow.
        least_bytes: u64,
    },
    /// The medium does not outlive a power failure, and the first does.
    #[error(
        "the file is in memory, and the region survives power failures: name a file on a disk or on persistent memory"
    )]
    Volatile,
    /// The path is too long for the list.
    #[error("the path has more than {most} bytes: move the file, or name it by a shorter path")]
    PathTooLong {
        /// The most that can be stored.
        most: usize,
    },
    /// The file cannot grow.
    #[error(
        "the file does not grow, and is as it was: make room on its file system, or add another file"
    )]
    NoRoom(#[source] io::Error),
    /// Writing the superblock or the segment table failed.
    #[error("write the list of media")]
    Superblock(#[source] io::Error),
    /// Moving segments failed.
    #[error(transparent)]
    Clean(#[from] CleanError),
    /// The medium failed.
    #[error("read or write the medium")]
    Io(#[from] io::Error),
}
