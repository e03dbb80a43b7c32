//! Pages that are encrypted: the key of a segment, reading its pages, and writing them.
//!
//! The key is the segment's, not the checkpoint's: pages and nodes that generations share are stored once, whichever
//! keys their generations were written under, and a change of keys moves segments, as cleaning does. The header where a
//! segment is says which key its pages have there, so place and key are always found together.

use std::collections::HashMap;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::Arc;

use crate::clean::Survey;
use crate::error::{CleanError, SegmentError, SegmentPlace, ShadowError};
use crate::ids::{PageNo, SegmentNo};
use crate::layout::{RootPage, SegmentHeader};
use crate::region::Region;
use crate::root::encrypted_parts;
use crate::space::{LOCATION, Space};
use crate::table::Position;
use crate::{PAGE_BYTES, PAGE_SIZE};
use permafrost_cipher::{BLOCK_BYTES, KeyId, Keyring, PageCipher, UnknownKey};
use permafrost_medium::Medium;
use permafrost_medium::convert::{to_u64, to_usize};
use zerocopy::FromBytes;

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

    /// Returns a page with parts of it encrypted.
    pub(crate) fn encrypted(
        &self,
        number: PageNo,
        parts: &[Range<usize>],
        page: &[u8; PAGE_SIZE],
    ) -> [u8; PAGE_SIZE] {
        if parts == [WHOLE_PAGE] {
            let mut encrypted = [0; PAGE_SIZE];
            self.cipher.encrypt_to(number.0, page, &mut encrypted);
            return encrypted;
        }
        let mut encrypted = *page;
        self.apply(number, parts, &mut encrypted);
        encrypted
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

    /// Returns the key of a held segment's pages as [`key_of`](Self::key_of) does, but fails if the header cannot be
    /// read.
    pub(crate) fn key_for_sure(&self, segment: SegmentNo) -> Result<Option<KeyId>, SegmentError> {
        loop {
            let position = self.table.position(segment);
            let position_now = position.ok_or(LOCATION)?;
            let mut bytes = [0; size_of::<u64>()];
            let key = self.key_at(segment, position_now)?;
            if position_now.packed_pages.is_none() {
                let at = position_now.header_at + to_u64(offset_of!(SegmentHeader, key));
                let read = self.medium.read(at, &mut bytes);
                read.map_err(SegmentError::Io)?;
            }
            if self.table.position(segment) == position {
                return Ok(key);
            }
        }
    }

    /// Returns the byte offset of `pages` pages of a segment, as [`locate`](Self::locate) does, and their cipher;
    /// `None` if they are in the clear. A region that was never given a key does not look for any: whoever then finds
    /// a page that does not verify asks [`locked`](Self::locked).
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

/// Change of the key of pages.
pub(crate) struct KeyChange<'a> {
    from: Arc<PageCipher>,
    pub(crate) to: &'a Encryption,
    /// Pages of roots, with the number that each is encrypted under.
    roots: &'a HashMap<PageNo, PageNo>,
}

impl KeyChange<'_> {
    /// Encrypts a stored page with the other key.
    pub(crate) fn apply(&self, number: PageNo, page: &mut [u8; PAGE_SIZE]) {
        let Some(&first) = self.roots.get(&number) else {
            self.from.decrypt(number.0, page);
            self.to.apply(number, &[WHOLE_PAGE], page);
            return;
        };
        let Ok(root) = RootPage::ref_from_bytes(page) else {
            return;
        };
        for part in encrypted_parts(root) {
            self.from
                .decrypt_part(first.0, part.start, &mut page[part.clone()]);
            self.to.apply(first, &[part], page);
        }
    }
}

/// Result of a step of [`Region::change_keys`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reencrypted {
    /// Segments that were moved.
    pub segments: u64,
    /// Bytes written: moved pages and their headers.
    pub written_bytes: u64,
    /// Segments that have such a key and cannot be moved now: dumps are writing to them, pages of them are damaged, or
    /// checkpoints that refer to them are locked or damaged.
    pub left_segments: u64,
    /// True if nothing more can be moved now.
    pub done: bool,
}

impl Region {
    /// Counts the segments in use by their keys.
    #[must_use]
    pub fn segments_by_key(&self) -> HashMap<KeyId, u64> {
        let mut counts = HashMap::new();
        for segment in self.held_segments() {
            if let Some(key) = self.space().key_of(segment) {
                *counts.entry(key).or_default() += 1;
            }
        }
        counts
    }

    /// Takes a key from the keyring if no segment is encrypted with it: no dump is sealed under it from then on, and it
    /// can be erased. Returns false if one is, or may be: one whose header cannot be read, or that is on a medium which
    /// is not there.
    #[must_use]
    pub fn take_unused_key(&self, id: KeyId) -> bool {
        let cipher = self.space().keys.remove(id);
        // A seal that found the key has its segments when it gives back the journal.
        drop(self.journal());
        let may_have =
            |segment| !matches!(self.space().key_for_sure(segment), Ok(key) if key != Some(id));
        let is_here = self.media().iter().all(|medium| medium.problem.is_none());
        let is_unused = is_here && !self.held_segments().any(may_have);
        if let (false, Some(cipher)) = (is_unused, cipher) {
            self.space().keys.give_back(id, cipher);
        }
        is_unused
    }

    fn held_segments(&self) -> impl Iterator<Item = SegmentNo> {
        let space = self.space();
        let is_held = |segment: &SegmentNo| !space.allocator().is_free(*segment);
        (0..space.table.len()).map(SegmentNo).filter(is_held)
    }

    /// Moves segments with the keys of a survey ([`Region::survey_keys`]), about `max_bytes` of pages: under the key
    /// `to` from then on. Dumps and readers go on meanwhile. A crash leaves each segment with the one or the other
    /// key, whole.
    ///
    /// # Errors
    /// [`CleanError`]; nothing is lost, and what was moved before stays moved.
    pub fn change_keys(
        &self,
        survey: &Survey,
        to: KeyId,
        max_bytes: u64,
    ) -> Result<Reencrypted, CleanError> {
        let space = self.space();
        let to = Encryption::of(&space.keys, to).map_err(|_| CleanError::Locked { key: to })?;
        let (mut changed, mut left) = (Reencrypted::default(), 0);
        for &key in survey.keys.iter().filter(|key| **key != to.id) {
            let has_key = |segment: &SegmentNo| space.key_of(*segment) == Some(key);
            let mut segments: Vec<_> = self.held_segments().filter(has_key).collect();
            let Ok(from) = space.keys.get(key) else {
                left += segments.len();
                continue;
            };
            let change = KeyChange {
                from,
                to: &to,
                roots: &survey.roots,
            };
            let before = segments.len();
            segments.retain(|s| survey.live.contains_key(s) && !survey.stuck.lock().contains(s));
            left += before - segments.len();
            for batch in survey.batches(space, &segments) {
                if changed.written_bytes >= max_bytes {
                    return Ok(changed);
                }
                self.journal().check()?;
                let segments = to_u64(batch.segments().len());
                // Before the move locks anything. What is away or damaged stays, and keeps its key; later steps do not
                // ask for it again.
                let Ok(_fetched) = batch.fetch(space) else {
                    survey.stuck.lock().extend(batch.segments());
                    left += batch.segments().len();
                    continue;
                };
                let takes_slots = space.allocator().order().contains(&batch.medium());
                let done = match self.move_batch(survey, batch.medium(), &[batch], Some(&change)) {
                    // Away from a medium that is drained or cold, where nothing has room: another time.
                    Err(CleanError::Full) if !takes_slots => {
                        left += to_usize(segments);
                        continue;
                    }
                    done => done?,
                };
                changed.written_bytes += done.written_bytes;
                changed.segments += segments - done.damaged_segments;
                left += to_usize(done.damaged_segments);
            }
        }
        (changed.left_segments, changed.done) = (to_u64(left), true);
        Ok(changed)
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
