//! The index of an archive: what is needed beside the members' contents to put the same tar together again.

use prost::{Message, Oneof};

use crate::ArchiveError;

/// Name of the index among the images.
pub const INDEX_NAME: &str = "archive.img";

/// Prefix of the names of members that are kept under a number.
pub(crate) const NUMBERED_PREFIX: &str = "archive-";

/// Version of the index.
const VERSION: u32 = 1;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Index {
    #[prost(uint32, tag = "1")]
    version: u32,
    /// Parts of the tar, in order.
    #[prost(message, repeated, tag = "2")]
    pub(crate) parts: Vec<Part>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Part {
    #[prost(oneof = "Content", tags = "1, 2")]
    pub(crate) content: Option<Content>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Content {
    /// Bytes of the tar itself: headers, padding, the end.
    #[prost(bytes, tag = "1")]
    Bytes(Vec<u8>),
    /// Contents of a member.
    #[prost(message, tag = "2")]
    File(StoredFile),
}

/// Contents of a member, in a file of the images directory.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct StoredFile {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(uint64, tag = "2")]
    pub(crate) len_bytes: u64,
    /// CRC32 of the contents.
    #[prost(fixed32, tag = "3")]
    pub(crate) crc32: u32,
}

impl Index {
    pub(crate) fn new(parts: Vec<Content>) -> Self {
        let parts = parts.into_iter().map(|content| Part {
            content: Some(content),
        });
        Self {
            version: VERSION,
            parts: parts.collect(),
        }
    }

    pub(crate) fn read(bytes: &[u8]) -> Result<Self, ArchiveError> {
        Self::decode(bytes)
            .ok()
            .filter(|index| index.version == VERSION)
            .ok_or(ArchiveError::BadIndex)
    }
}
