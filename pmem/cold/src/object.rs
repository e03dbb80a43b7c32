//! The bytes of an object: pages of a block, compressed, and a checksum.
//!
//! ```text
//!   0 ┌────────────────────────────────┐
//!     │ magic "PFCOLD01"               │
//!   8 │ UUID of the medium             │ 16 bytes
//!  24 │ number of the block            │ u64
//!  32 │ number of the object           │ u64
//!  40 │ pages that are in it           │ bitmap, 8 × u64
//! 104 │ 0: stored as they are, 1: zstd │ u64
//! 112 │ pages, ascending               │
//!     ├────────────────────────────────┤
//!     │ SHA-256 of all before          │ 32 bytes
//!     └────────────────────────────────┘
//! ```

use permafrost_medium::PAGE_SIZE;
use permafrost_medium::convert::to_usize;
use sha2::{Digest as _, Sha256};

use crate::index::Pages;

const MAGIC: [u8; 8] = *b"PFCOLD01";
const HEADER_BYTES: usize = 112;
const DIGEST_BYTES: usize = 32;
/// Level of compression: the default of zstd.
const LEVEL: i32 = 3;

/// Names of what an object belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ObjectId {
    pub(crate) medium: [u8; 16],
    pub(crate) block: u64,
    pub(crate) number: u64,
}

/// Pages of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlockPages {
    pub(crate) pages: Pages,
    /// Contents of the pages, ascending.
    pub(crate) bytes: Vec<u8>,
}

impl BlockPages {
    /// Returns a page of the block; `None` if it is not among these.
    pub(crate) fn page(&self, page: u32) -> Option<&[u8]> {
        let rank = self.pages.rank(page)?;
        self.bytes.chunks_exact(PAGE_SIZE).nth(rank)
    }
}

/// Returns the bytes of an object. Compressed only if that makes it smaller: encrypted pages do not become so.
pub(crate) fn encode(id: &ObjectId, block: &BlockPages) -> Vec<u8> {
    let compressed = zstd::bulk::compress(&block.bytes, LEVEL).ok();
    let compressed = compressed.filter(|bytes| bytes.len() < block.bytes.len());
    let mut bytes = Vec::with_capacity(HEADER_BYTES + block.bytes.len() + DIGEST_BYTES);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&id.medium);
    bytes.extend_from_slice(&id.block.to_le_bytes());
    bytes.extend_from_slice(&id.number.to_le_bytes());
    for word in block.pages.0 {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.extend_from_slice(&u64::from(compressed.is_some()).to_le_bytes());
    bytes.extend_from_slice(compressed.as_ref().unwrap_or(&block.bytes));
    let digest = Sha256::digest(&bytes);
    bytes.extend_from_slice(&digest);
    bytes
}

/// Reads an object, and checks it whole; the reason if it is not what [`encode`] made of this id.
pub(crate) fn decode(id: &ObjectId, bytes: &[u8]) -> Result<BlockPages, &'static str> {
    let before = bytes.len().checked_sub(DIGEST_BYTES).ok_or("it is short")?;
    let (contents, digest) = bytes.split_at(before);
    if Sha256::digest(contents).as_slice() != digest {
        return Err("its checksum does not match");
    }
    let (header, pages) = contents
        .split_at_checked(HEADER_BYTES)
        .ok_or("it is short")?;
    let word = |at: usize| -> u64 {
        let bytes = header.get(at..at + 8).and_then(|b| b.try_into().ok());
        u64::from_le_bytes(bytes.unwrap_or_default())
    };
    let found = ObjectId {
        medium: header[8..24].try_into().unwrap_or_default(),
        block: word(24),
        number: word(32),
    };
    if header[..8] != MAGIC || found != *id {
        return Err("it is another object");
    }
    let listed = Pages(std::array::from_fn(|n| word(40 + 8 * n)));
    let len = to_usize(u64::from(listed.count())) * PAGE_SIZE;
    let bytes = match word(104) {
        0 => pages.to_vec(),
        1 => zstd::bulk::decompress(pages, len).map_err(|_| "it cannot be decompressed")?,
        _ => return Err("its compression is unknown"),
    };
    if bytes.len() != len {
        return Err("its pages are not all there");
    }
    Ok(BlockPages {
        pages: listed,
        bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: ObjectId = ObjectId {
        medium: [3; 16],
        block: 9,
        number: 77,
    };

    fn block(salt: u8) -> BlockPages {
        let pages = Pages::of([1, 5, 511].into_iter());
        let noise = (0..3 * PAGE_SIZE).map(|n| match salt {
            0 => 7,
            _ => u8::try_from(n.wrapping_mul(2_654_435_761) >> 13 & 0xff).unwrap(),
        });
        BlockPages {
            pages,
            bytes: noise.collect(),
        }
    }

    #[test]
    fn an_object_is_read_as_written_and_compressed_only_if_smaller() {
        let small = encode(&ID, &block(0));
        assert!(small.len() < 1000);
        assert_eq!(decode(&ID, &small).unwrap(), block(0));
        let page = decode(&ID, &small).unwrap();
        assert_eq!(page.page(5).unwrap().len(), PAGE_SIZE);
        assert!(page.page(6).is_none());
        let random: Vec<u8> = (0..3 * PAGE_SIZE / 32)
            .flat_map(|n| Sha256::digest(n.to_le_bytes()))
            .collect();
        let block = BlockPages {
            bytes: random,
            ..block(0)
        };
        let large = encode(&ID, &block);
        assert_eq!(large.len(), HEADER_BYTES + 3 * PAGE_SIZE + DIGEST_BYTES);
        assert_eq!(decode(&ID, &large).unwrap(), block);
    }

    #[test]
    fn garbage_is_never_taken_for_an_object() {
        let bytes = encode(&ID, &block(1));
        for at in (0..bytes.len()).step_by(97) {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1;
            decode(&ID, &flipped).unwrap_err();
            decode(&ID, &bytes[..at]).unwrap_err();
        }
        let others = [
            ObjectId { block: 8, ..ID },
            ObjectId { number: 76, ..ID },
            ObjectId {
                medium: [4; 16],
                ..ID
            },
        ];
        for other in others {
            assert_eq!(decode(&other, &bytes).unwrap_err(), "it is another object");
        }
    }
}
