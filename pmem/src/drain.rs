//! Moving whole slots to other media: a medium is drained, segments are cooled and warmed.
//!
//! A segment is moved as cleaning moves it, by one entry of the segment table; but as it is, with its dead pages and
//! with damaged ones, so no map has to be read, and a medium is emptied however damaged its checkpoints are.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use permafrost_medium::convert::to_u64;
use permafrost_medium::{Flushed, LostPage, Medium, is_damaged_object};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use crate::alloc::{Lease, SlotHold, to_extents};
use crate::clean::{Survey, move_durably};
use crate::cool::{self, fetch_slot};
use crate::error::{CleanError, MediaError};
use crate::ids::{SegmentNo, SlotNo};
use crate::layout::PackedHeader;
use crate::members::{MediumState, TierName};
use crate::region::Region;
use crate::space::{Space, packed_checksum};
use crate::superblock::SuperblockState;
use crate::table::Position;
use crate::{PAGE_BYTES, PAGE_SIZE};

/// Result of a step of draining.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Drained {
    /// Bytes of the slots that were moved.
    pub moved_bytes: u64,
    /// Bytes of the slots that still have segments, or pages that a reader has lent.
    pub left_bytes: u64,
    /// True if nothing could be moved now: dumps are writing to what is left, or readers have it.
    pub waiting: bool,
    /// Slots that cannot be moved: their object is missing or damaged.
    pub stuck: Vec<StuckSlot>,
}

/// A slot that cannot be moved away.
#[derive(Debug)]
pub struct StuckSlot {
    /// Segments in it.
    pub segments: Vec<SegmentNo>,
    /// Reason why it cannot be moved.
    pub error: io::Error,
}

/// A slot with segments that can be moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OccupiedSlot {
    pub(crate) slot: SlotNo,
    segments: Vec<SegmentNo>,
}

impl OccupiedSlot {
    /// Returns the number of the medium that the slot was on.
    #[must_use]
    pub fn medium(&self) -> usize {
        self.slot.medium()
    }

    /// Returns the segments that were in it.
    #[must_use]
    pub fn segments(&self) -> &[SegmentNo] {
        &self.segments
    }
}

impl Region {
    /// Returns the slots with segments, without those that a dump is writing to.
    #[must_use]
    pub fn occupied_slots(&self) -> Vec<OccupiedSlot> {
        let slots = movable(self.space(), |_| true).into_iter();
        slots
            .map(|(slot, segments)| OccupiedSlot { slot, segments })
            .collect()
    }

    /// Moves the segments of a slot to a medium, if they are still there and no dump is writing to them. Dumps and
    /// readers go on meanwhile. Returns the bytes that were moved.
    ///
    /// # Errors
    /// [`MediaError`]; nothing is lost.
    pub fn move_slot(&self, from: &OccupiedSlot, to: usize) -> Result<u64, MediaError> {
        self.journal().check()?;
        let space = self.space();
        let moved = move_slot(space, from, None, &|| {
            // One that is drained or removed since takes nothing.
            let takes = space.allocator().order().contains(&to);
            takes.then_some(to).into_iter().collect()
        })?;
        Ok(u64::from(moved) * u64::from(space.geometry.segment_bytes))
    }

    /// Moves segments of a medium that is being drained, about `max_bytes`. Dumps and readers go on meanwhile. A slot
    /// whose object is damaged stays, and the others are moved.
    ///
    /// # Errors
    /// [`MediaError`]; nothing is lost, and what was moved before stays moved. An object store is away.
    pub fn drain_step(&self, number: usize, max_bytes: u64) -> Result<Drained, MediaError> {
        self.drain_others(number, max_bytes, &[])
    }

    /// Moves segments as [`drain_step`](Self::drain_step) does, but those that are known to be stuck: each would cost a
    /// request to the object store.
    ///
    /// # Errors
    /// Those of [`drain_step`](Self::drain_step).
    pub fn drain_others(
        &self,
        number: usize,
        max_bytes: u64,
        stuck: &[StuckSlot],
    ) -> Result<Drained, MediaError> {
        let known: HashSet<SegmentNo> = stuck.iter().flat_map(|s| &s.segments).copied().collect();
        let space = self.space();
        let superblock = self.superblock().clone();
        let member = superblock.members.get(number);
        let member = member.ok_or(MediaError::Unknown { number })?;
        if member.state != MediumState::Draining {
            return Err(MediaError::InUse {
                number,
                slots: space.allocator().count(number).used(),
            });
        }
        if space.medium.get(number).is_none() {
            return Err(MediaError::Missing { number });
        }
        let targets = targets(&superblock, space, &member.tier);
        let mut drained = Drained::default();
        for (slot, segments) in movable(space, |medium| medium == number) {
            if drained.moved_bytes >= max_bytes {
                break;
            }
            if segments.iter().any(|segment| known.contains(segment)) {
                continue;
            }
            self.journal().check()?;
            let slot = OccupiedSlot { slot, segments };
            match move_slot(space, &slot, None, &|| targets.clone()) {
                Ok(true) => drained.moved_bytes += u64::from(space.geometry.segment_bytes),
                Ok(false) => {}
                Err(MediaError::Clean(CleanError::Io(error))) if is_damaged_object(&error) => {
                    drained.stuck.push(StuckSlot {
                        segments: slot.segments,
                        error,
                    });
                }
                Err(error) => return Err(error),
            }
        }
        let left = space.allocator().count(number).used();
        drained.left_bytes = u64::from(left) * u64::from(space.geometry.segment_bytes);
        drained.waiting = max_bytes > 0 && drained.moved_bytes == 0 && left > 0;
        Ok(drained)
    }
}

/// Returns the slots of some media with the held segments in them, without slots that a dump is writing to.
fn movable(space: &Space, on: impl Fn(usize) -> bool) -> BTreeMap<SlotNo, Vec<SegmentNo>> {
    let mut slots: BTreeMap<SlotNo, Vec<SegmentNo>> = BTreeMap::new();
    let allocator = space.allocator();
    for segment in (0..space.table.len()).map(SegmentNo) {
        if allocator.is_free(segment) {
            continue;
        }
        let slot = space.table.slot(segment);
        if let Some(slot) = slot.filter(|slot| on(slot.medium())) {
            slots.entry(slot).or_default().push(segment);
        }
    }
    slots.retain(|_, segments| !segments.iter().any(|&s| allocator.is_written(s)));
    slots
}

/// Returns the media that segments of a tier are moved to: those as fast or slower first, so that draining a slow
/// medium does not fill a fast one.
fn targets(superblock: &SuperblockState, space: &Space, from: &TierName) -> Vec<usize> {
    let order = space.allocator().order().to_vec();
    let is_slower = |number: &usize| {
        let member = superblock.members.get(*number);
        member
            .map_or(&superblock.tier, |member| &member.tier)
            .speed()
            >= from.speed()
    };
    let (mut slower, faster): (Vec<_>, Vec<_>) = order.into_iter().partition(is_slower);
    slower.extend(faster.into_iter().rev());
    slower
}

/// Moves the segments of a slot to the first of some media with room; returns false if there is nothing to move any
/// more.
///
/// With a survey most pages go to the object store of that medium: then the survey knows all segments of the slot.
pub(crate) fn move_slot(
    space: &Arc<Space>,
    occupied: &OccupiedSlot,
    out: Option<&Survey>,
    targets: &dyn Fn() -> Vec<usize>,
) -> Result<bool, MediaError> {
    let from = occupied.slot;
    // Before the lock, as it may ask an object store.
    let _fetched = fetch_slot(space, from).map_err(CleanError::Io)?;
    let mut moving = space.lock_moves();
    let Some((_lease, segments)) = hold_all(space, from, &occupied.segments) else {
        return Ok(false);
    };
    let to = SlotHold::take_spare(space, &targets()).ok_or(CleanError::Full)?;
    let slots = space.table.slots();
    let (from_at, to_at) = (slots.at(from), slots.at(to.slot));
    let mut flushed = Flushed::new();
    copy_slot(space, from_at, to_at, &mut flushed).map_err(CleanError::Io)?;
    let mut moves = Vec::with_capacity(segments.len());
    for &segment in &segments {
        let Some(position) = space.table.position(segment) else {
            continue;
        };
        let header_at = to_at + (position.header_at - from_at);
        if position.packed_pages.is_some() {
            let patched = move_header(space, segment, position.header_at, header_at, &mut flushed);
            patched.map_err(CleanError::Io)?;
        }
        moves.push((
            segment,
            Position {
                header_at,
                ..position
            },
        ));
    }
    space.fence(&mut flushed).map_err(CleanError::Io)?;
    if let Some(survey) = out {
        let healed = space.healed.load(Ordering::Relaxed);
        // Nothing names the copy, and the segments are held: no lock is needed while the store is asked.
        drop(moving);
        let gone_out = cool::move_out(space, survey, &segments, (from_at, to.slot));
        gone_out.map_err(CleanError::Io)?;
        moving = space.lock_moves();
        // Moved or healed meanwhile, or the target is being drained: the copy is not what it should be.
        let is_there = |segment: &SegmentNo| space.table.slot(*segment) == Some(from);
        let is_same = space.healed.load(Ordering::Relaxed) == healed;
        if !is_same || !segments.iter().all(is_there) || !targets().contains(&to.slot.medium()) {
            return Ok(false);
        }
    }
    move_durably(space, &moves, &mut flushed)?;
    drop(moving);
    Ok(true)
}

/// Holds the segments that are still held and in a slot, if no dump is writing to one of them: from here on they stay
/// as they are.
fn hold_all(
    space: &Arc<Space>,
    slot: SlotNo,
    segments: &[SegmentNo],
) -> Option<(Lease, Vec<SegmentNo>)> {
    let (lease, written) = Lease::of_held(space, |allocator| {
        let here = |segment: &SegmentNo| {
            !allocator.is_free(*segment) && space.table.slot(*segment) == Some(slot)
        };
        let here: Vec<_> = segments.iter().copied().filter(here).collect();
        // From here on nothing is appended to them.
        allocator.retain_tails(|segment| !here.contains(&segment));
        let written = here.iter().any(|&segment| allocator.is_written(segment));
        (to_extents(here.iter().map(|segment| segment.0)), written)
    });
    let held: Vec<_> = lease.segments().collect();
    (!written && !held.is_empty()).then_some((lease, held))
}

/// Copies a slot, whole. A page that is lost becomes zeros, which its checksum tells from what it was.
fn copy_slot(space: &Space, from: u64, to: u64, flushed: &mut Flushed) -> io::Result<()> {
    let len_bytes = u64::from(space.geometry.segment_bytes);
    let mut page = [0; PAGE_SIZE];
    for at in (0..len_bytes).step_by(PAGE_SIZE) {
        match space.medium.read(from + at, &mut page) {
            Err(error) if LostPage::of(&error).is_some() => page.fill(0),
            read => read?,
        }
        // SAFETY: the slot is held by this move alone, and no entry names it: nobody reads it.
        unsafe { space.medium.write_streaming(to + at, &page)? };
    }
    space.medium.flush_streamed(to, len_bytes, flushed)
}

/// Writes the header of a packed segment as it is in its new place. A damaged one stays damaged.
fn move_header(
    space: &Space,
    segment: SegmentNo,
    from: u64,
    to: u64,
    flushed: &mut Flushed,
) -> io::Result<()> {
    let mut bytes = [0; size_of::<PackedHeader>()];
    if space.medium.read(to, &mut bytes).is_err() {
        return Ok(());
    }
    let Ok(mut header) = PackedHeader::read_from_bytes(&bytes) else {
        return Ok(());
    };
    let intact = header.crc32.get() == packed_checksum(space.uuid, &header)
        && header.segment.get() == segment.0;
    if !intact {
        return Ok(());
    }
    let moved = header
        .first
        .get()
        .wrapping_mul(PAGE_BYTES)
        .wrapping_sub(from);
    header.first = U64::new(to.wrapping_add(moved) / PAGE_BYTES);
    header.crc32 = U32::new(packed_checksum(space.uuid, &header));
    // SAFETY: as in `copy_slot`.
    unsafe { space.medium.write(to, header.as_bytes())? };
    space.medium.flush(to, to_u64(bytes.len()), flushed)
}
