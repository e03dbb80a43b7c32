//! Messages about cleaning: moving pages together, so that space between them becomes free.

use prost::Message;
use serde::Serialize;

/// Result of cleaning, one region a node.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct GcReport {
    /// Regions that were examined.
    #[prost(message, repeated, tag = "1")]
    pub regions: Vec<RegionGc>,
}

/// Result of cleaning a region.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct RegionGc {
    /// Node whose region it is; empty for the node that answers.
    #[prost(string, tag = "1")]
    pub node: String,
    /// Bytes of the region in use before.
    #[prost(uint64, tag = "2")]
    pub used_bytes: u64,
    /// Bytes of the pages that checkpoints refer to.
    #[prost(uint64, tag = "3")]
    pub live_bytes: u64,
    /// Bytes that were not cleaned because dumps under way, readers or damaged checkpoints refer to them.
    #[prost(uint64, tag = "4")]
    pub skipped_bytes: u64,
    /// Bytes that cleaning could free, about: an estimate from before.
    #[prost(uint64, tag = "5")]
    pub reclaimable_bytes: u64,
    /// Bytes that were freed; 0 for a dry run.
    #[prost(uint64, tag = "6")]
    pub freed_bytes: u64,
    /// Bytes that were written: moved pages and their headers.
    #[prost(uint64, tag = "7")]
    pub written_bytes: u64,
    /// Segments that stay where they are because a page of them is damaged.
    #[prost(uint64, tag = "8")]
    pub damaged_segments: u64,
}
