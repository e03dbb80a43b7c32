//! Messages about the keys for encryption at rest.

use prost::Message;
use serde::Serialize;

/// Keys of a node.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct KeyList {
    /// Keys, by namespace and age.
    #[prost(message, repeated, tag = "1")]
    pub keys: Vec<KeyStatus>,
    /// Segments that were encrypted with the new key; 0 for other requests.
    #[prost(uint64, tag = "2")]
    pub moved_segments: u64,
    /// Checkpoints that were removed with their keys; 0 for other requests.
    #[prost(uint64, tag = "3")]
    pub removed_checkpoints: u64,
}

/// A key of a namespace, without the key itself.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct KeyStatus {
    /// Name of the namespace; empty for dumps that have no job yet.
    #[prost(string, tag = "1")]
    pub namespace: String,
    /// Id of the key, 16 hex digits.
    #[prost(string, tag = "2")]
    pub id: String,
    /// Time when it was made, seconds since 1970.
    #[prost(uint64, tag = "3")]
    pub created_unix_s: u64,
    /// True if new checkpoints get it.
    #[prost(bool, tag = "4")]
    pub current: bool,
    /// Segments in use that are encrypted with it.
    #[prost(uint64, tag = "5")]
    pub segments: u64,
}
