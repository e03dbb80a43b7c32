//! The index of an archive: what is needed beside the members' contents to put the same tar together again.

use prost::encoding::{DecodeContext, decode_key, skip_field};
use prost::{DecodeError, Message, Oneof};

use crate::ArchiveError;
use crate::unpack::MAX_MEMBERS;

/// Name of the index among the images.
pub const INDEX_NAME: &str = "archive.img";

/// Prefix of the names of members that are kept under a number.
pub(crate) const NUMBERED_PREFIX: &str = "archive-";

/// Version of the index.
const VERSION: u32 = 1;

/// Number of the parts' field.
const PARTS_TAG: u32 = 2;

/// Most parts: headers and contents of each member, and the end. A part takes two bytes encoded and many more decoded.
const MAX_PARTS: usize = 2 * MAX_MEMBERS + 1;

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
        if !count_parts(bytes).is_ok_and(|parts| parts <= MAX_PARTS) {
            return Err(ArchiveError::BadIndex);
        }
        Self::decode(bytes)
            .ok()
            .filter(|index| index.version == VERSION)
            .ok_or(ArchiveError::BadIndex)
    }
}

/// Returns the number of parts of an encoded index.
fn count_parts(mut bytes: &[u8]) -> Result<usize, DecodeError> {
    let mut parts = 0;
    while !bytes.is_empty() {
        let (tag, wire_type) = decode_key(&mut bytes)?;
        skip_field(wire_type, tag, &mut bytes, DecodeContext::default())?;
        parts += usize::from(tag == PARTS_TAG);
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_with_too_many_parts_is_refused() {
        let encoded = |parts| Index::new(vec![Content::Bytes(Vec::new()); parts]).encode_to_vec();
        let index = Index::read(&encoded(MAX_PARTS)).unwrap();
        assert_eq!(index.parts.len(), MAX_PARTS);
        let refused = Index::read(&encoded(MAX_PARTS + 1));
        assert!(matches!(refused, Err(ArchiveError::BadIndex)));
    }
}
