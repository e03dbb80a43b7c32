//! Healing a damaged page in its place.
//!
//! # Why this overwrites nothing live
//!
//! A sealed page has the bytes that match its checksum. Only a page without them is written to, and only with those
//! bytes, so the only change that a reader can see is that an error ends:
//!
//! - a reader that has verified the page already has exactly these bytes;
//! - a reader that is verifying the page gets an error, as before, or the sealed bytes;
//! - a crash leaves each 8-byte chunk damaged or right. The next verification finds the page damaged again, or
//!   healed.
//!
//! Checksum, map, root and journal stay as they are, so healing a page heals it for every checkpoint that shares it.

use super::{PageMap, ParentPage};
use crate::PAGE_SIZE;
use crate::cool::fetch_slot;
use crate::error::{HealError, PageError};
use permafrost_medium::{Medium, is_damaged_object};
use std::sync::atomic::Ordering;

impl PageMap {
    /// Heals a damaged page, durably; returns true if it was damaged. `page` comes from another copy of the
    /// checkpoint and is compared with this map's own checksum. Costs one fence.
    ///
    /// # Errors
    /// [`HealError`]: the page is still damaged.
    pub fn heal_page(&self, index: u64, page: &[u8; PAGE_SIZE]) -> Result<bool, HealError> {
        let found = self.clone().cursor().page(index)?;
        let Some(ParentPage::Stored {
            location,
            place,
            crc: expected,
        }) = found
        else {
            return Err(HealError::NotStored { index });
        };
        let found = crc32fast::hash(page);
        if found != expected {
            return Err(HealError::OtherContent {
                index,
                expected,
                found,
            });
        }
        let space = self.checkpoint.space();
        // Before the lock, as it may ask an object store. What is away is not damaged.
        let slot = space.table.slot(place.segment);
        let fetched = slot.map_or(Ok(None), |slot| fetch_slot(space, slot));
        let _fetched = match fetched {
            Err(error) if !is_damaged_object(&error) => return Err(PageError::Io(error).into()),
            fetched => fetched,
        };
        // A move would otherwise copy the page while it is written, or leave the healed one behind.
        let _moving = space.lock_moves();
        let located = space.locate_encrypted(place, 1);
        let (at, cipher) = located.map_err(|error| error.at(location))?;
        if cipher.is_none() && !space.keys.is_unused() {
            // A page in the clear is not written over an encrypted one whose key cannot be read.
            let known = space.key_for_sure(place.segment);
            known.map_err(|error| error.at(location))?;
        }
        if let (None, Some(key)) = (&cipher, space.locked(place.segment)) {
            return Err(PageError::Locked { location, key }.into());
        }
        let mut stored = *page;
        if let Some(cipher) = cipher {
            cipher.encrypt(location.0, &mut stored);
        }
        let page = &stored;
        let medium = &space.medium;
        // One that cannot even be read is damaged; writing it may be what heals the medium.
        let is_whole = || -> std::io::Result<bool> {
            let mut present = [0; PAGE_SIZE];
            medium.read(at, &mut present)?;
            Ok(present == *page)
        };
        if is_whole().is_ok_and(|whole| whole) {
            return Ok(false);
        }
        // SAFETY: the segment is held by this map's checkpoint. Borrowers of the page have verified it to be `page`, or
        // take nothing from it but that it is damaged: see above.
        unsafe { medium.rewrite_page(at, page) }.map_err(HealError::Write)?;
        space.healed.fetch_add(1, Ordering::Relaxed);
        match is_whole() {
            Ok(true) => Ok(true),
            Ok(false) => Err(HealError::NotKept { index }),
            Err(error) => Err(PageError::Io(error).into()),
        }
    }
}
