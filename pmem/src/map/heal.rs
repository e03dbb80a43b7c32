//! Writing a damaged page anew, in its place.
//!
//! # Why this overwrites nothing live
//!
//! A sealed page is the bytes that its checksum demands. Only a page that does not have them is written to, and only
//! with those bytes, so there is no reader to whom anything but an error changes:
//!
//! - whoever has verified the page has these very bytes already;
//! - whoever is verifying it gets an error, as before, or the bytes that were sealed;
//! - a crash leaves each 8-byte chunk damaged or right. The checksum still decides: the page is found damaged again, or
//!   is healed.
//!
//! Checksum, map, root and journal stay as they are, so healing a page heals it for every checkpoint that shares it.

use super::{PageMap, RunKind};
use crate::PAGE_SIZE;
use crate::convert::to_usize;
use crate::error::{HealError, PageError};

impl PageMap {
    /// Writes a damaged page anew, durably; whether it was damaged. `page` comes from another copy of the checkpoint and
    /// is compared with this map's own checksum. Costs one fence.
    ///
    /// # Errors
    /// [`HealError`]: then the page is as damaged as it was.
    pub fn heal_page(&self, index: u64, page: &[u8; PAGE_SIZE]) -> Result<bool, HealError> {
        let run = self.lookup(index)?;
        let Some((
            run,
            RunKind::Stored {
                location,
                crcs_crc32,
            },
        )) = run.map(|run| (run, run.kind))
        else {
            return Err(HealError::NotStored { index });
        };
        let (_, crcs) = self.verified_checksums(location, run.pages, crcs_crc32)?;
        let skip = index - run.first_index;
        let location = location.plus(skip);
        let expected = crcs.get(to_usize(skip)).map_or(0, |crc| crc.get());
        let found = crc32fast::hash(page);
        if found != expected {
            return Err(HealError::OtherContent {
                index,
                expected,
                found,
            });
        }
        let medium = &self.checkpoint.space().medium;
        // One that cannot even be read is damaged; writing it may be what heals the medium.
        let is_whole = || -> std::io::Result<bool> {
            let mut present = [0; PAGE_SIZE];
            medium.read(location.offset_bytes(), &mut present)?;
            Ok(present == *page)
        };
        if is_whole().is_ok_and(|whole| whole) {
            return Ok(false);
        }
        // SAFETY: the segment is held by this map's checkpoint. Borrowers of the page have verified it to be `page`, or
        // take nothing from it but that it is damaged: see above.
        unsafe { medium.rewrite_page(location.offset_bytes(), page) }.map_err(HealError::Write)?;
        match is_whole() {
            Ok(true) => Ok(true),
            Ok(false) => Err(HealError::NotKept { index }),
            Err(error) => Err(PageError::Io(error).into()),
        }
    }
}
