//! Moving slots to a cold medium, most of whose pages are in an object store.
//!
//! ```text
//! slot on a mapped medium ──copy──▶ slot on the cold one ──▶ object, index, holes ──▶ segment table
//! ```
//!
//! The pages go to the object store before an entry of the segment table names the new slot. So nobody has lent pages
//! that become holes, and a store that is away leaves the segment where it was. What opening, listing and a survey
//! read stays on the node: headers, roots, manifests and map nodes. Recalling a slot is [`Region::move_slot`] to a
//! mapped medium.
//!
//! No lock is held while a store is asked: it may take long. Objects are fetched before a move begins, and written
//! between its two halves; what has changed meanwhile makes the move begin anew another time.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;

use permafrost_medium::convert::to_u64;
use permafrost_medium::{ColdStore, FetchedPages, MAX_MEDIA, MEDIUM_SPAN};

use crate::PAGE_BYTES;
use crate::checkpoint::StoredCheckpoint;
use crate::clean::Survey;
use crate::drain::{OccupiedSlot, move_slot};
use crate::error::{CleanError, MediaError, SegmentPlace};
use crate::ids::{SegmentNo, SlotNo};
use crate::layout::packed_header_bytes;
use crate::members::MediumState;
use crate::region::Region;
use crate::space::Space;

/// Free slots whose objects are forgotten while no segment can be moved.
const FORGOTTEN_AT_ONCE: usize = 64;

/// Objects that are removed between two looks at whether to stop.
const REMOVED_AT_ONCE: usize = 16;

impl Region {
    /// Returns true if a medium that is there keeps pages in an object store.
    #[must_use]
    pub fn has_cold(&self) -> bool {
        (1..MAX_MEDIA).any(|number| self.is_cold(number))
    }

    /// Returns true if a medium keeps pages in an object store.
    #[must_use]
    pub fn is_cold(&self, number: usize) -> bool {
        self.space().is_cold(number)
    }

    /// Moves the segments of a slot to a cold medium, as [`Region::move_slot`] does. Returns the bytes of the slot; 0
    /// also if the survey does not know all of its live pages, or if a dump may go on writing to it. `may_cool` is called
    /// before its pages are put into the object store, and again afterwards: if it returns false, nothing is moved.
    ///
    /// # Errors
    /// [`MediaError`]; nothing is lost. The object store may be away.
    pub fn cool_slot(
        &self,
        survey: &Survey,
        from: &OccupiedSlot,
        to: usize,
        may_cool: &dyn Fn() -> bool,
    ) -> Result<u64, MediaError> {
        self.journal().check()?;
        let space = self.space();
        if !may_cool() || !from.segments().iter().all(|&segment| survey.knows(segment)) {
            return Ok(0);
        }
        let moved = move_slot(space, from, Some(survey), &|| {
            // A reader may have begun while the store was asked.
            if !may_cool() {
                return Vec::new();
            }
            let superblock = self.superblock();
            let member = superblock.members.get(to);
            let takes = member.is_some_and(|m| m.state == MediumState::Active) && space.is_cold(to);
            takes.then_some(to).into_iter().collect()
        })?;
        Ok(u64::from(moved) * u64::from(space.geometry.segment_bytes))
    }

    /// Returns the slots with segments of a checkpoint whose pages are in an object store.
    #[must_use]
    pub fn slots_out(&self, checkpoint: &StoredCheckpoint) -> Vec<OccupiedSlot> {
        let on_cold = self.slot_numbers_out(checkpoint);
        if on_cold.is_empty() {
            return Vec::new();
        }
        let mut all = self.occupied_slots();
        all.retain(|occupied| on_cold.contains(&occupied.slot));
        all
    }

    /// Returns the bytes of the slots with segments of a checkpoint whose pages are in an object store.
    #[must_use]
    pub fn bytes_out(&self, checkpoint: &StoredCheckpoint) -> u64 {
        let slots = to_u64(self.slot_numbers_out(checkpoint).len());
        slots * u64::from(self.space().geometry.segment_bytes)
    }

    fn slot_numbers_out(&self, checkpoint: &StoredCheckpoint) -> HashSet<SlotNo> {
        let space = self.space();
        let is_out = |slot: SlotNo| {
            let medium = space.medium.get(slot.medium());
            let at = space.table.slots().at(slot) % MEDIUM_SPAN;
            medium.is_some_and(|medium| medium.cold().is_some_and(|cold| cold.is_out(at)))
        };
        let slots = checkpoint.segment_numbers();
        let mut slots: HashSet<_> = slots.filter_map(|s| space.table.slot(s)).collect();
        slots.retain(|slot| space.is_cold(slot.medium()) && is_out(*slot));
        slots
    }

    /// Removes objects of slots that are free until `stopped` returns true; with `list` also those that a crash has left,
    /// by a list of the store. Returns their number. No lock is held while the object store is asked.
    ///
    /// # Errors
    /// [`MediaError`]: an object store is away.
    pub fn sweep_cold(&self, list: bool, stopped: &dyn Fn() -> bool) -> Result<u64, MediaError> {
        self.journal().check()?;
        let space = self.space();
        let (mut removed, mut failed) = (0, None);
        for number in 1..MAX_MEDIA {
            let Some(medium) = space.medium.get(number) else {
                continue;
            };
            let Some(cold) = medium.cold() else { continue };
            match self.sweep_medium((number, cold), list, stopped) {
                Ok(objects) => removed += objects,
                // A store that is away must not keep the objects of others.
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(removed), Err)
    }

    fn sweep_medium(
        &self,
        (number, cold): (usize, &dyn ColdStore),
        list: bool,
        stopped: &dyn Fn() -> bool,
    ) -> Result<u64, MediaError> {
        forget_free(self.space(), number, cold).map_err(CleanError::Io)?;
        let unneeded = cold.unneeded(list).map_err(CleanError::Io)?;
        let mut removed = 0;
        if !unneeded.is_empty() {
            // An index from before names them.
            self.advance_index(number)?;
        }
        for some in unneeded.chunks(REMOVED_AT_ONCE) {
            if stopped() {
                break;
            }
            removed += cold.remove(some).map_err(CleanError::Io)?;
        }
        Ok(removed)
    }

    /// Lists the object stores, and returns the segments whose objects are missing or do not have the size that was
    /// written; and media whose store is away, each with the reason.
    #[must_use]
    pub fn absent_segments(&self) -> (HashSet<SegmentNo>, Vec<(usize, io::Error)>) {
        let space = self.space();
        let (mut absent, mut away) = (HashSet::new(), Vec::new());
        for number in 1..MAX_MEDIA {
            let Some(medium) = space.medium.get(number) else {
                continue;
            };
            let Some(cold) = medium.cold() else { continue };
            match cold.absent() {
                Ok(blocks) => absent.extend(blocks.into_iter().map(|at| (number, at))),
                Err(error) => away.push((number, error)),
            }
        }
        if absent.is_empty() {
            return (HashSet::new(), away);
        }
        let place = |slot: SlotNo| (slot.medium(), space.table.slots().at(slot) % MEDIUM_SPAN);
        let allocator = space.allocator();
        let segments = (0..space.table.len()).map(SegmentNo);
        let is_absent = |segment: &SegmentNo| {
            let slot = space.table.slot(*segment);
            !allocator.is_free(*segment) && slot.is_some_and(|slot| absent.contains(&place(slot)))
        };
        (segments.filter(is_absent).collect(), away)
    }

    /// Asks the object store for the pages of a slot: fails now where reading them would fail later.
    ///
    /// # Errors
    /// The store is away, or the object is missing or damaged.
    pub fn probe_slot(&self, slot: &OccupiedSlot) -> io::Result<()> {
        fetch_slot(self.space(), slot.slot).map(drop)
    }

    /// Lets nothing be appended to the segments of these slots from now on, so that they can be moved out.
    pub fn retire_tails(&self, slots: &[&OccupiedSlot]) {
        let segments: HashSet<_> = slots.iter().flat_map(|slot| slot.segments()).collect();
        let mut allocator = self.space().allocator();
        allocator.retain_tails(|segment| !segments.contains(&segment));
    }
}

/// Forgets the objects of free slots of a medium. Asks no object store.
fn forget_free(space: &Arc<Space>, number: usize, cold: &dyn ColdStore) -> io::Result<()> {
    for part in cold.blocks_out()?.chunks(FORGOTTEN_AT_ONCE) {
        // No slot is taken meanwhile, as only moves take slots of a cold medium.
        let _moving = space.lock_moves();
        let slots = space.table.slots();
        let free: HashSet<u64> = {
            let allocator = space.allocator();
            let free = allocator.free_slots(number);
            free.map(|slot| slots.at(slot) % MEDIUM_SPAN).collect()
        };
        for &at in part.iter().filter(|at| free.contains(at)) {
            cold.forget(at)?;
        }
    }
    Ok(())
}

/// Fetches the pages of a slot that are in an object store, so that they are read from memory while the result is kept.
/// To be called with no lock, before a move or a heal that reads them under one.
pub(crate) fn fetch_slot(space: &Space, slot: SlotNo) -> io::Result<Option<FetchedPages>> {
    let medium = space.medium.get(slot.medium());
    let Some(cold) = medium.as_ref().and_then(|medium| medium.cold()) else {
        return Ok(None);
    };
    let at = space.table.slots().at(slot) % MEDIUM_SPAN;
    cold.fetch_block(at).map(Some)
}

impl Space {
    /// Returns true if a medium keeps pages in an object store.
    pub(crate) fn is_cold(&self, number: usize) -> bool {
        let medium = self.medium.get(number);
        medium.is_some_and(|medium| medium.cold().is_some())
    }
}

/// Moves the pages of a slot that nothing names yet to the object store: the copies of `segments`, which are held and in
/// the slot at `from_at`. To be called with no lock.
pub(crate) fn move_out(
    space: &Arc<Space>,
    survey: &Survey,
    segments: &[SegmentNo],
    (from_at, to): (u64, SlotNo),
) -> io::Result<()> {
    let medium = space.medium.get(to.medium());
    let Some(cold) = medium.as_ref().and_then(|medium| medium.cold()) else {
        return Ok(());
    };
    let page_at = |at: u64| u32::try_from((at - from_at) / PAGE_BYTES).unwrap_or(u32::MAX);
    let (mut kept, mut out) = (Vec::new(), Vec::new());
    for &segment in segments {
        let unknown = || io::Error::other(format!("the place of segment {} is damaged", segment.0));
        let position = space.table.position(segment).ok_or_else(unknown)?;
        let header_bytes = position
            .packed_pages
            .map_or(PAGE_BYTES, packed_header_bytes);
        kept.extend(page_at(position.header_at)..=page_at(position.header_at + header_bytes - 1));
        for (page, stays) in survey.pages(segment) {
            // A page that cannot be found is in no place that could be given up.
            let at = space.locate(SegmentPlace { segment, page }, 1);
            let page = page_at(at.map_err(|_| unknown())?);
            if stays { &mut kept } else { &mut out }.push(page);
        }
    }
    let kept_too: HashSet<u32> = kept.iter().copied().collect();
    out.retain(|page| !kept_too.contains(page));
    let at = space.table.slots().at(to) % MEDIUM_SPAN;
    let len_bytes = u64::from(space.geometry.segment_bytes);
    cold.move_out(at, len_bytes, &kept, &out)?;
    Ok(())
}
