//! Messages about the media of a region.

use prost::Message;
use serde::Serialize;

/// Media of regions, one region a node.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct RegionMedia {
    /// Media, the first one of each region first.
    #[prost(message, repeated, tag = "1")]
    pub media: Vec<MediumStatus>,
    /// Bytes that draining, cooling or warming has moved, or would move; 0 for other requests.
    #[prost(uint64, tag = "2")]
    pub moved_bytes: u64,
    /// Parts of checkpoints that draining could not move, as their objects are missing or damaged: the first 64.
    #[prost(string, repeated, tag = "3")]
    pub not_moved: Vec<String>,
}

/// A medium of a region.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct MediumStatus {
    /// Node whose region it is part of; empty for the node that answers.
    #[prost(string, tag = "1")]
    pub node: String,
    /// Number of the medium in the region; the first has 0.
    #[prost(uint32, tag = "2")]
    pub number: u32,
    /// Names the medium; the first has the region's UUID.
    #[prost(string, tag = "3")]
    pub uuid: String,
    /// Tier of the medium: `nvm`, `ssd`, `hdd` or the operator's name.
    #[prost(string, tag = "4")]
    pub tier: String,
    /// State of the medium: `active`, `draining` or `missing`.
    #[prost(string, tag = "5")]
    pub state: String,
    /// Path of its file, or where it was when it was last there.
    #[prost(string, tag = "6")]
    pub path: String,
    /// Bytes of the file that the region uses.
    #[prost(uint64, tag = "7")]
    pub size_bytes: u64,
    /// Bytes of its segments that dumps can use.
    #[prost(uint64, tag = "8")]
    pub capacity_bytes: u64,
    /// Bytes of the free ones; 0 unless it is active.
    #[prost(uint64, tag = "9")]
    pub free_bytes: u64,
    /// Bytes of segments in use, or kept for a reader.
    #[prost(uint64, tag = "10")]
    pub used_bytes: u64,
    /// Pages that it could not give or take since it was opened.
    #[prost(uint64, tag = "11")]
    pub lost_pages: u64,
    /// Durability that it guarantees, in words; empty while it is missing.
    #[prost(string, tag = "12")]
    pub guarantee: String,
    /// Reason why it is missing; empty unless it is.
    #[prost(string, tag = "13")]
    pub problem: String,
    /// Address of the object store that most of its pages are in; empty for none, and while it is missing.
    #[prost(string, tag = "14")]
    pub store: String,
}
