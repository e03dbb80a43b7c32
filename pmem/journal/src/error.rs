//! Faults and errors of the journal.

use std::io;

use permafrost_layout::ids::CheckpointId;

/// Fault of the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JournalFault {
    /// Neither half has a header.
    #[error("neither half has a valid header")]
    NoHeader,
    /// A record is damaged that a compaction had made durable before its header.
    #[error("record {record} of {compacted} compacted ones is damaged")]
    Compacted {
        /// Place of the record in the half.
        record: u32,
        /// Number of compacted records, from the header.
        compacted: u32,
    },
    /// Damaged in the middle: a torn write can only be the last.
    #[error("record {record} is damaged, record {later} after it is not")]
    Hole {
        /// First damaged record.
        record: u32,
        /// A valid one after it.
        later: u32,
    },
    /// The copies of a record are both valid and differ.
    #[error("the two copies of record {record} differ")]
    CopiesDiffer {
        /// Place of the record in the half.
        record: u32,
    },
    /// The record is intact, but no writer makes it: an unknown kind, a second seal of an id, a delete of a
    /// checkpoint that does not exist.
    #[error("record {record} makes no sense after those before it")]
    Senseless {
        /// Place of the record in the half.
        record: u32,
    },
    /// The header of the half with the newest records is damaged: the number of compacted records is unknown.
    #[error("the header of the newest half is damaged")]
    Header,
    /// The medium returns an error for records at the place of the next record: one of them may be a record.
    #[error("records {first} to {last} cannot be read")]
    Unreadable {
        /// The first one.
        first: u32,
        /// The last one.
        last: u32,
    },
}

/// Unreadable records of a journal. Checkpoints that were sealed in these records are missing, and checkpoints that
/// were deleted in them exist again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JournalDamage {
    /// Faults, in the order of the records.
    pub faults: Vec<JournalFault>,
    /// Records that cannot be read; each may have sealed or deleted a checkpoint.
    pub records_lost: u64,
    /// Checkpoints that later records name, and that no readable record seals.
    pub checkpoints_lost: Vec<CheckpointId>,
}

/// Writing the journal failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The checkpoint does not exist.
    #[error("no checkpoint {id}")]
    Unknown {
        /// Id of the checkpoint.
        id: CheckpointId,
    },
    /// Live checkpoints fill it.
    #[error("journal is full: {records} records, all live; delete checkpoints")]
    Full {
        /// Records of a half.
        records: u32,
    },
    /// An earlier write of the journal failed: it is unknown what is durable until the region is opened again.
    /// Reading goes on.
    #[error("journal failed earlier: open the region anew")]
    Failed,
    /// The region was closed.
    #[error("region is closed")]
    Closed,
    /// The medium failed now; whether the operation happened shows at the next open.
    #[error("write journal")]
    Io(#[from] io::Error),
}

/// Reading the journal failed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// It does not say which checkpoints there are.
    #[error("journal at byte {at:#x} is damaged: {fault}")]
    Corrupt {
        /// Byte offset of the half.
        at: u64,
        /// Fault of the journal half.
        fault: JournalFault,
    },
    /// The medium failed.
    #[error("read journal")]
    Io(#[from] io::Error),
}
