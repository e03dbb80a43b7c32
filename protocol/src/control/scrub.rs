//! Messages about scrubs.

use prost::Message;
use serde::Serialize;

/// Result of a scrub.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Scrubbed {
    /// Number of checkpoints that were read.
    #[prost(uint64, tag = "1")]
    pub checkpoints: u64,
    /// Number of pages that were read.
    #[prost(uint64, tag = "2")]
    pub pages: u64,
    /// Checkpoints that were found damaged, healed or not.
    #[prost(message, repeated, tag = "3")]
    pub damaged: Vec<DamagedCheckpoint>,
    /// Number of pages in a cold tier that were not verified: it was not asked for them, or is away.
    #[prost(uint64, tag = "4")]
    pub unverified_pages: u64,
    /// Reason why the cold tier gave none of those that it was asked for; empty for none.
    #[prost(string, tag = "5")]
    pub away: String,
}

/// A checkpoint that a scrub found damaged.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct DamagedCheckpoint {
    /// Name of the checkpoint: `JOB@GEN`, `session SESSION`, or `checkpoint ID` where no name is known.
    #[prost(string, tag = "1")]
    pub checkpoint: String,
    /// Checkpoint id, 32 hex digits.
    #[prost(string, tag = "2")]
    pub id: String,
    /// Damaged parts, by name and address; the first 64.
    #[prost(string, repeated, tag = "3")]
    pub damage: Vec<String>,
    /// True if it was healed: a fresh copy has taken its place, and verifies.
    #[prost(bool, tag = "4")]
    pub mended: bool,
    /// Reason why it was not healed.
    #[prost(string, tag = "5")]
    pub reason: String,
    /// Node whose copy it is; empty for the node that answers.
    #[prost(string, tag = "6")]
    pub node: String,
}

/// State of the scrub.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct ScrubStatus {
    /// Period within which every checkpoint is verified, seconds; 0: only on request.
    #[prost(uint64, tag = "1")]
    pub period_s: u64,
    /// Time since the last verification (or the seal) of the checkpoint for which it is longest ago, seconds; 0
    /// without checkpoints.
    #[prost(uint64, tag = "2")]
    pub oldest_s: u64,
    /// Pages read since the daemon started.
    #[prost(uint64, tag = "3")]
    pub pages: u64,
    /// Checkpoints found damaged since it started.
    #[prost(uint64, tag = "4")]
    pub damaged: u64,
    /// Number of those that were healed.
    #[prost(uint64, tag = "5")]
    pub mended: u64,
    /// Checkpoints that are damaged now.
    #[prost(uint64, tag = "6")]
    pub quarantined: u64,
    /// Pages in a cold tier that the last looks at their checkpoints have not verified: only that their objects are
    /// there, by a list.
    #[prost(uint64, tag = "7")]
    pub unverified_pages: u64,
}
