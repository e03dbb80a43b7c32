//! Pages that are encrypted: the key of a segment, reading its pages, and writing them.
//!
//! The key is the segment's, not the checkpoint's: pages and nodes that generations share are stored once, whichever
//! keys their generations were written under, and a change of keys moves segments, as cleaning does. The header where a
//! segment is says which key its pages have there, so place and key are always found together.

use std::mem::offset_of;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{SegmentError, SegmentPlace, ShadowError};
use crate::ids::{PageNo, SegmentNo};
use crate::layout::SegmentHeader;
use crate::space::Space;
use crate::table::Position;
use crate::{PAGE_BYTES, PAGE_SIZE};
use permafrost_cipher::{BLOCK_BYTES, KeyId, Keyring, PageCipher, UnknownKey};
use permafrost_medium::Medium;
use permafrost_medium::convert::to_u64;

/// All bytes of a page.
pub(crate) const WHOLE_PAGE: Range<usize> = 0..PAGE_SIZE;

/// Key that pages are written with.
#[derive(Clone)]
pub(crate) struct Encryption {
    pub(crate) id: KeyId,
    pub(crate) cipher: Arc<PageCipher>,
}

impl Encryption {
    pub(crate) fn of(keys: &Keyring, id: KeyId) -> Result<Self, ShadowError> {
        let cipher = keys.get(id);
        let cipher = cipher.map_err(|UnknownKey(key)| ShadowError::Locked { key })?;
        Ok(Self { id, cipher })
    }

    /// Encrypts parts of a page in place.
    pub(crate) fn apply(&self, number: PageNo, parts: &[Range<usize>], page: &mut [u8; PAGE_SIZE]) {
        for part in parts {
            let bytes = &mut page[part.clone()];
            self.cipher.encrypt_part(number.0, part.start, bytes);
        }
    }
}

impl Space {
    /// Returns the key of the pages of a segment that is at a position; `None` if they are in the clear.
    pub(crate) fn key_at(
        &self,
        segment: SegmentNo,
        position: Position,
    ) -> Result<Option<KeyId>, SegmentError> {
        if position.packed_pages.is_some() {
            return Ok(self.packed(segment, position.header_at)?.key);
        }
        let read = |offset: usize| {
            let mut bytes = [0; size_of::<u64>()];
            let read = self
                .medium
                .read(position.header_at + to_u64(offset), &mut bytes);
            read.map(|()| KeyId::new(u64::from_le_bytes(bytes)))
        };
        // A header that cannot be read is met by whoever needs it: the page may be intact.
        let first = read(offset_of!(SegmentHeader, key)).unwrap_or(None);
        if first.is_some_and(|key| self.keys.get(key).is_ok()) {
            return Ok(first);
        }
        let second = read(offset_of!(SegmentHeader, key_again)).unwrap_or(None);
        let is_known = second.is_some_and(|key| self.keys.get(key).is_ok());
        Ok(if is_known { second } else { first.or(second) })
    }

    /// Returns the key of a held segment's pages; `None` if they are in the clear, or it cannot be found.
    pub(crate) fn key_of(&self, segment: SegmentNo) -> Option<KeyId> {
        let position = self.table.position(segment)?;
        self.key_at(segment, position).ok()?
    }

    /// Returns the byte offset of `pages` pages of a segment, as [`locate`](Self::locate) does, and their cipher; `None`
    /// if they are in the clear. A region that was never given a key does not look for any: whoever then finds a page
    /// that does not verify asks [`locked`](Self::locked).
    pub(crate) fn locate_encrypted(
        &self,
        place: SegmentPlace,
        pages: u32,
    ) -> Result<(u64, Option<Arc<PageCipher>>), SegmentError> {
        if self.keys.is_unused() {
            return Ok((self.locate(place, pages)?, None));
        }
        loop {
            let position = self.table.position(place.segment);
            let at = self.locate(place, pages)?;
            let Some(position) = position else {
                return Ok((at, None));
            };
            let key = self.key_at(place.segment, position)?;
            // Moved in between: place and key may not belong together.
            if self.table.position(place.segment) == Some(position) {
                let cipher = key.map(|key| self.keys.get(key)).transpose()?;
                return Ok((at, cipher));
            }
        }
    }

    /// Returns the key that a segment is encrypted with, if the region does not have it.
    pub(crate) fn locked(&self, segment: SegmentNo) -> Option<KeyId> {
        self.key_of(segment)
            .filter(|&key| self.keys.get(key).is_err())
    }

    /// Reads a part of a page, decrypted if the page is encrypted: under `number`, which is that of the first copy for
    /// the second copy of a root page.
    pub(crate) fn read_part(
        &self,
        place: SegmentPlace,
        number: PageNo,
        offset: usize,
        into: &mut [u8],
    ) -> Result<(), SegmentError> {
        let (at, cipher) = self.locate_encrypted(place, 1)?;
        let Some(cipher) = cipher else {
            let read = self.medium.read(at + to_u64(offset), into);
            return read.map_err(SegmentError::Io);
        };
        let first = offset - offset % BLOCK_BYTES;
        let end = (offset + into.len())
            .next_multiple_of(BLOCK_BYTES)
            .min(PAGE_SIZE);
        let mut page = [0; PAGE_SIZE];
        let blocks = &mut page[first..end];
        let read = self.medium.read(at + to_u64(first), blocks);
        read.map_err(SegmentError::Io)?;
        cipher.decrypt_part(number.0, first, blocks);
        into.copy_from_slice(&page[offset..offset + into.len()]);
        Ok(())
    }
}

/// Decrypts consecutive pages in place.
pub(crate) fn decrypt_pages(cipher: &PageCipher, first: PageNo, pages: &mut [u8]) {
    let (pages, _) = pages.as_chunks_mut::<PAGE_SIZE>();
    for (page, number) in pages.iter_mut().zip(first.0..) {
        cipher.decrypt(number, page);
    }
}

const _: () = assert!(permafrost_cipher::PAGE_BYTES == PAGE_SIZE && PAGE_BYTES.is_multiple_of(16));
