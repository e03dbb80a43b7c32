//! Digests of blocks of a page map (docs/format.md, "Content digest").

use sha2::{Digest, Sha256};

use crate::{NODE_SLOTS, SlotEntry};

/// First byte hashed for a leaf's block, a block of blocks, a block of zeros.
const LEAF: u8 = 0;
const BLOCK: u8 = 1;
const ZEROS: u8 = 2;

/// Digest of a map without pages.
#[must_use]
pub fn of_nothing() -> [u8; 32] {
    Sha256::digest([]).into()
}

/// Digest of a block of eight pages: its first index (8 bytes), then for each page there is its slot (1), whether it is
/// stored (1), its flags (2) and its CRC32 (4).
#[must_use]
pub fn of_leaf(first_index: u64, slots: u8, entries: &[SlotEntry; NODE_SLOTS]) -> [u8; 32] {
    let mut bytes = [0; 1 + 8 + 8 * NODE_SLOTS];
    bytes[0] = LEAF;
    bytes[1..9].copy_from_slice(&first_index.to_le_bytes());
    let mut end = 9;
    for (slot, entry) in (0_u8..).zip(entries) {
        if slots >> slot & 1 == 1 {
            let (flags, crc) = (
                entry.detail.get().to_le_bytes(),
                entry.crc32.get().to_le_bytes(),
            );
            let stored = u8::from(entry.location.get() != 0);
            bytes[end..end + 2].copy_from_slice(&[slot, stored]);
            bytes[end + 2..end + 4].copy_from_slice(&flags);
            bytes[end + 4..end + 8].copy_from_slice(&crc);
            end += 8;
        }
    }
    Sha256::digest(&bytes[..end]).into()
}

/// Digest of a block of eight blocks of `8^level` pages: `level`, then for each of them with pages its slot (1) and its
/// digest. If just one has pages, the digest is that one's.
#[must_use]
pub fn of_block(level: u8, below: impl Iterator<Item = (usize, [u8; 32])>) -> [u8; 32] {
    let mut bytes = [0; 2 + 33 * NODE_SLOTS];
    bytes[..2].copy_from_slice(&[BLOCK, level]);
    let mut end = 2;
    let mut last = [0; 32];
    for (slot, digest) in below.take(NODE_SLOTS) {
        bytes[end] = u8::try_from(slot).unwrap_or(u8::MAX);
        bytes[end + 1..end + 33].copy_from_slice(&digest);
        end += 33;
        last = digest;
    }
    if end == 2 + 33 {
        return last;
    }
    Sha256::digest(&bytes[..end]).into()
}

/// Digest of a full block of `8^span` zero pages, at least eight, with equal flags.
#[must_use]
pub fn of_zeros(span: u8, first_index: u64, flags: u16) -> [u8; 32] {
    let mut bytes = [0; 12];
    bytes[..2].copy_from_slice(&[ZEROS, span]);
    bytes[2..10].copy_from_slice(&first_index.to_le_bytes());
    bytes[10..].copy_from_slice(&flags.to_le_bytes());
    Sha256::digest(bytes).into()
}
