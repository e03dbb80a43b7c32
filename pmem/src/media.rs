//! Media of an open region: listed, added, grown and removed while it is in use.
//!
//! The superblocks list the media, and a change of the list, or of the size of the first medium, is one superblock:
//! before it is durable nothing of the change counts, and what it refers to was made durable before. Nothing relies
//! on the change before the other superblock has it too, as damage of one must not bring the state before back.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use permafrost_medium::{ColdStore, Guarantee, MAX_MEDIA, MEDIUM_SPAN, Medium};

use crate::error::{GrowError, MediaError};
use crate::geometry::MAX_SEGMENTS;
use crate::ids::{RegionUuid, SegmentNo};
use crate::journal::JournalError;
use crate::layout::MEMBER_PATH;
use crate::members::{
    MediumBeginning, MediumState, RegionMember, TierName, check_cold, examine, identity,
    is_storable, slots_in, write_header,
};
use crate::region::Region;
use crate::space::Space;
use crate::superblock::SuperblockState;

/// A medium of a region, and the room on it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RegionMedium {
    /// Number of the medium; the first has 0.
    pub number: usize,
    /// Names the medium; the first has the region's.
    pub uuid: RegionUuid,
    /// Tier of the medium.
    pub tier: TierName,
    /// State of the medium.
    pub state: MediumState,
    /// Path at which it was last found; empty for the first.
    pub path: PathBuf,
    /// Bytes of the medium that the region uses, its own structures included.
    pub size_bytes: u64,
    /// Bytes of its slots, without those that are kept for cleaning.
    pub capacity_bytes: u64,
    /// Bytes of free slots that dumps can use.
    pub free_bytes: u64,
    /// Bytes of slots with segments, or kept for a reader.
    pub used_bytes: u64,
    /// Pages lost since it was opened.
    pub lost_pages: u64,
    /// Durability that it guarantees; `None` while it is not there.
    pub guarantee: Option<Guarantee>,
    /// Reason why it is not there.
    pub problem: Option<String>,
    /// True if most of its pages are in an object store, also while it is not there.
    pub is_cold: bool,
    /// Address of the object store that most of its pages are in: dumps do not go there. `None` for none.
    pub store: Option<String>,
}

impl Region {
    /// Returns the media, the first one first.
    #[must_use]
    pub fn media(&self) -> Vec<RegionMedium> {
        let superblock = self.superblock().clone();
        let space = self.space();
        let problems = self.problems().clone();
        let is_cold = |number| {
            superblock
                .members
                .get(number)
                .is_some_and(|member| member.cold.is_some())
        };
        let of = |number, uuid, tier: &TierName, state, path: &Path, size_bytes| {
            let count = space.allocator().count(number);
            let bytes = |slots: u32| u64::from(slots) * u64::from(space.geometry.segment_bytes);
            let medium = space.medium.get(number);
            let takes_dumps = state == MediumState::Active && medium.is_some();
            let spare = count.free.saturating_sub(count.reserved);
            RegionMedium {
                number,
                uuid,
                tier: tier.clone(),
                state,
                path: path.to_owned(),
                size_bytes,
                capacity_bytes: bytes(count.slots - count.reserved),
                free_bytes: if takes_dumps { bytes(spare) } else { 0 },
                used_bytes: bytes(count.used()),
                is_cold: is_cold(number),
                lost_pages: medium.as_ref().map_or(0, |medium| medium.lost_pages()),
                store: medium
                    .as_ref()
                    .and_then(|medium| Some(medium.cold()?.address().to_owned())),
                guarantee: medium.map(|medium| medium.guarantee().clone()),
                problem: problems.get(&number).cloned(),
            }
        };
        let (uuid, tier) = (superblock.uuid, &superblock.tier);
        let size_bytes = superblock.geometry.end_bytes();
        let first = of(
            0,
            uuid,
            tier,
            MediumState::Active,
            Path::new(""),
            size_bytes,
        );
        let others = superblock.members.iter();
        let others = others.map(|m| {
            of(
                m.number,
                m.uuid,
                &m.tier,
                m.state,
                &m.path,
                m.capacity_bytes,
            )
        });
        std::iter::once(first).chain(others).collect()
    }

    /// Adds a medium, or brings one back that was not there. Returns its number.
    ///
    /// # Errors
    /// [`MediaError`].
    pub fn add_medium(
        &self,
        medium: Arc<dyn Medium>,
        path: &Path,
        tier: &TierName,
    ) -> Result<usize, MediaError> {
        if !is_storable(path) {
            return Err(MediaError::PathTooLong { most: MEMBER_PATH });
        }
        let uuid = RegionUuid::random();
        // With no lock, as it asks the object store, which may refuse: it can be another medium's.
        let adopted = match medium.cold() {
            Some(cold) if is_new(&*medium)? => {
                self.adopt(cold, uuid)?;
                Some(cold)
            }
            _ => None,
        };
        let added = self.add_examined(&medium, uuid, path, tier);
        if let (Err(_), Some(cold)) = (&added, adopted) {
            // Made for nothing. A marker that is left is taken over by the next addition to this region.
            let _ = cold.release();
        }
        let (number, is_back) = added?;
        if is_back {
            // An index that was copied while it was away is an older one from here on. It is in use: an error that comes
            // now is no error of the addition.
            let _ = self.advance_index(number);
        }
        Ok(number)
    }

    /// Makes store and index those of a medium that is to be added.
    fn adopt(&self, cold: &dyn ColdStore, uuid: RegionUuid) -> Result<(), MediaError> {
        let superblock = self.superblock().clone();
        let is_listed = |uuid| {
            let mut members = superblock.members.iter();
            members.any(|member| *member.uuid.as_bytes() == uuid)
        };
        let own = identity(self.space().uuid, uuid);
        cold.adopt(own, FIRST_GENERATION, &is_listed)
            .map_err(MediaError::Store)
    }

    /// Returns the number of the medium, and true for one that came back.
    fn add_examined(
        &self,
        medium: &Arc<dyn Medium>,
        uuid: RegionUuid,
        path: &Path,
        tier: &TierName,
    ) -> Result<(usize, bool), MediaError> {
        let medium = Arc::clone(medium);
        self.change_media(|superblock, space| match examine(&*medium)? {
            MediumBeginning::Member {
                region,
                uuid,
                removed: false,
                ..
            } => {
                if region != space.uuid {
                    return Err(MediaError::Foreign { region });
                }
                let listed = superblock.members.iter().find(|member| member.uuid == uuid);
                let listed = listed.ok_or(MediaError::Unlisted)?.clone();
                self.bring_back(superblock, &listed, medium, path)?;
                Ok((listed.number, true))
            }
            MediumBeginning::Region => Err(MediaError::Region),
            MediumBeginning::Newer => Err(MediaError::Newer),
            MediumBeginning::Other => Err(MediaError::NotBlank),
            MediumBeginning::Blank | MediumBeginning::Member { .. } => {
                let number = add_new(superblock, space, medium, uuid, path, tier)?;
                Ok((number, false))
            }
        })
    }

    /// Makes a medium larger, its file included. Dumps and readers go on meanwhile.
    ///
    /// # Errors
    /// [`MediaError`]; the size is the old one.
    pub fn grow_medium(&self, number: usize, bytes: u64) -> Result<(), MediaError> {
        self.change_media(|superblock, space| match number {
            0 => grow_first(superblock, space, bytes),
            _ => grow_member(superblock, space, number, bytes),
        })
    }

    /// Sets whether segments are moved away from a medium ([`Region::drain_step`]) and none is written to it, durably.
    ///
    /// # Errors
    /// [`MediaError`].
    pub fn set_draining(&self, number: usize, draining: bool) -> Result<(), MediaError> {
        self.change_media(|superblock, space| {
            let mut member = find(superblock, number)?;
            if draining && space.medium.get(number).is_none() {
                return Err(MediaError::Missing { number });
            }
            let order = space.allocator().order().to_vec();
            if draining && order.iter().all(|&other| other == number) {
                return Err(MediaError::NoOther);
            }
            member.state = if draining {
                MediumState::Draining
            } else {
                MediumState::Active
            };
            commit(superblock, space, |next| {
                next.members = next.members.with(member)
            })
        })
    }

    /// Removes a medium that was drained. Its file can be deleted afterwards.
    ///
    /// # Errors
    /// [`MediaError`].
    pub fn remove_medium(&self, number: usize) -> Result<(), MediaError> {
        let removed = self.change_media(|superblock, space| {
            let member = find(superblock, number)?;
            let medium = space.medium.get(number);
            let medium = medium.ok_or(MediaError::Missing { number })?;
            let slots = space.allocator().count(number).used();
            if slots > 0 || member.state != MediumState::Draining {
                return Err(MediaError::InUse { number, slots });
            }
            commit(superblock, space, |next| {
                next.members = next.members.without(number);
            })?;
            forget(space, number);
            // SAFETY: a reader that has lent bytes of the medium keeps the slots that they are in, and no slot is in
            // use. None is taken any more: the medium is being drained.
            unsafe { space.medium.remove(number) };
            // What follows only lets the file be added elsewhere: the list has it no longer.
            let segment_bytes = space.geometry.segment_bytes;
            let _ = write_header(&*medium, space.uuid, &member, segment_bytes, true);
            Ok(medium)
        })?;
        if let Some(cold) = removed.cold() {
            // With no lock, as it asks the store. What is left there keeps it from being added to another region only.
            let _ = cold.blocks_out().and_then(|all| {
                all.into_iter().try_for_each(|at| cold.forget(at))?;
                cold.remove(&cold.unneeded(true)?)
            });
            let _ = cold.release();
        }
        Ok(())
    }

    /// Removes a medium that is not there, with all that is on it: its pages count as damaged for good, and are
    /// healed from other copies where there are some.
    ///
    /// # Errors
    /// [`MediaError`].
    pub fn accept_lost_medium(&self, number: usize) -> Result<(), MediaError> {
        self.change_media(|superblock, space| {
            find(superblock, number)?;
            if space.medium.get(number).is_some() {
                return Err(MediaError::Present { number });
            }
            commit(superblock, space, |next| {
                next.members = next.members.without(number);
            })?;
            forget(space, number);
            self.problems().remove(&number);
            Ok(())
        })
    }

    /// Gives the index of a cold medium another generation, so that older copies of it are refused from here on.
    ///
    /// # Errors
    /// [`MediaError`]: the index has this generation or the next one.
    pub(crate) fn advance_index(&self, number: usize) -> Result<(), MediaError> {
        self.change_media(|superblock, space| {
            let mut member = find(superblock, number)?;
            let medium = space.medium.get(number);
            let medium = medium.ok_or(MediaError::Missing { number })?;
            let (Some(generation), Some(cold)) = (member.cold, medium.cold()) else {
                return Ok(());
            };
            let next = generation.wrapping_add(1);
            // 1. The index: it may be one ahead of the list. 2. The list. A crash in between leaves both usable.
            cold.set_generation(next)?;
            member.cold = Some(next);
            commit(superblock, space, |next| {
                next.members = next.members.with(member)
            })
        })
    }

    /// Notes where the media of an open region were found.
    pub(crate) fn note_paths(&self, found: &[(usize, PathBuf)]) -> Result<(), MediaError> {
        let moved = |superblock: &SuperblockState| {
            let mut members = superblock.members.clone();
            for (number, path) in found.iter().filter(|(_, path)| is_storable(path)) {
                if let Some(member) = superblock.members.get(*number) {
                    let path = path.clone();
                    members = members.with(RegionMember {
                        path,
                        ..member.clone()
                    });
                }
            }
            (members != superblock.members).then_some(members)
        };
        if moved(&self.superblock()).is_none() {
            return Ok(());
        }
        self.change_media(|superblock, space| match moved(superblock) {
            Some(members) => commit(superblock, space, |next| next.members = members),
            None => Ok(()),
        })
    }

    fn bring_back(
        &self,
        superblock: &mut SuperblockState,
        member: &RegionMember,
        medium: Arc<dyn Medium>,
        path: &Path,
    ) -> Result<(), MediaError> {
        let (space, number) = (self.space(), member.number);
        if space.medium.get(number).is_some() {
            return Err(MediaError::Listed { number });
        }
        check_length(&*medium, member)?;
        check_cold(&*medium, member, space.uuid).map_err(|problem| MediaError::Cold { problem })?;
        let found = RegionMember {
            path: path.to_owned(),
            ..member.clone()
        };
        commit(superblock, space, |next| {
            next.members = next.members.with(found)
        })?;
        space.medium.insert(number, medium);
        self.problems().remove(&number);
        set_order(superblock, space);
        Ok(())
    }

    /// Calls `change` with the superblock that counts, while no segment is moved.
    fn change_media<T>(
        &self,
        change: impl FnOnce(&mut SuperblockState, &Arc<Space>) -> Result<T, MediaError>,
    ) -> Result<T, MediaError> {
        self.journal().check()?;
        let space = self.space();
        let changed = {
            let _moving = space.lock_moves();
            let mut superblock = self.superblock();
            // Closed since.
            if !superblock.open {
                return Err(JournalError::Closed.into());
            }
            let changed = change(&mut superblock, space);
            if changed.is_ok() {
                set_order(&superblock, space);
            }
            changed
        };
        if let Err(MediaError::Superblock(error)) = &changed {
            space.fail("write the list of media", error);
            self.journal().fail();
        }
        changed
    }
}

/// Returns true if a medium is to be added as a new one.
fn is_new(medium: &dyn Medium) -> Result<bool, MediaError> {
    let found = examine(medium)?;
    Ok(matches!(
        found,
        MediumBeginning::Blank | MediumBeginning::Member { removed: true, .. }
    ))
}

/// Generation of the index of a cold medium that is added.
const FIRST_GENERATION: u32 = 1;

/// Returns the member with a number.
fn find(superblock: &SuperblockState, number: usize) -> Result<RegionMember, MediaError> {
    if number == 0 {
        return Err(MediaError::First);
    }
    let member = superblock.members.get(number);
    member.cloned().ok_or(MediaError::Unknown { number })
}

/// Makes a change of the superblocks durable.
fn commit(
    superblock: &mut SuperblockState,
    space: &Space,
    change: impl FnOnce(&mut SuperblockState),
) -> Result<(), MediaError> {
    let committed = superblock.commit(&space.medium, change);
    *superblock = committed.map_err(MediaError::Superblock)?;
    Ok(())
}

/// Fails if a medium is shorter than the region has it.
pub(crate) fn check_length(medium: &dyn Medium, member: &RegionMember) -> Result<(), MediaError> {
    let (expected, found) = (member.capacity_bytes, medium.capacity_bytes());
    if found < expected {
        return Err(MediaError::Truncated { expected, found });
    }
    Ok(())
}

/// Sets the media that slots are taken from, the fastest first: not cold ones, which only cooling moves slots to.
pub(crate) fn set_order(superblock: &SuperblockState, space: &Space) {
    let members = superblock.members.iter();
    let active = members.filter(|member| {
        member.state == MediumState::Active
            && space
                .medium
                .get(member.number)
                .is_some_and(|medium| medium.cold().is_none())
    });
    let active = active.map(|member| (member.tier.speed(), member.number));
    let mut order: Vec<_> = active.chain([(superblock.tier.speed(), 0)]).collect();
    order.sort_unstable();
    let order = order.into_iter().map(|(_, number)| number);
    space.allocator().set_order(order.collect());
}

/// Forgets the slots of a medium that the region has no longer.
fn forget(space: &Space, number: usize) {
    let mut allocator = space.allocator();
    allocator.remove_medium(number);
    space.table.slots().set_count(number, 0);
}

fn add_new(
    superblock: &mut SuperblockState,
    space: &Space,
    medium: Arc<dyn Medium>,
    uuid: RegionUuid,
    path: &Path,
    tier: &TierName,
) -> Result<usize, MediaError> {
    let segment_bytes = space.geometry.segment_bytes;
    let capacity_bytes =
        medium.capacity_bytes() / u64::from(segment_bytes) * u64::from(segment_bytes);
    let slots = slots_in(capacity_bytes, segment_bytes);
    if slots == 0 {
        return Err(GrowError::TooSmall {
            asked_bytes: medium.capacity_bytes(),
            least_bytes: 2 * u64::from(segment_bytes),
        }
        .into());
    }
    check_numbers(superblock, space, slots, capacity_bytes)?;
    if medium.guarantee().volatile && !space.medium.first().guarantee().volatile {
        return Err(MediaError::Volatile);
    }
    let member = RegionMember {
        number: free_number(superblock, space)?,
        uuid,
        capacity_bytes,
        tier: tier.clone(),
        state: MediumState::Active,
        cold: medium.cold().map(|_| FIRST_GENERATION),
        path: path.to_owned(),
    };
    let number = member.number;
    // 1. The header, durable before the superblock names it.
    write_header(&*medium, space.uuid, &member, segment_bytes, false)?;
    // 2. The superblock: from here on the medium is one of the region's.
    commit(superblock, space, |next| {
        next.members = next.members.with(member)
    })?;
    // 3. Its slots can be taken.
    space.medium.insert(number, medium);
    space.table.slots().set_count(number, slots);
    space.allocator().extend_medium(number, slots);
    space.populate(number);
    Ok(number)
}

/// Returns a number that no medium has, and that no segment names whose medium was lost.
fn free_number(superblock: &SuperblockState, space: &Space) -> Result<usize, MediaError> {
    let mut used = [false; MAX_MEDIA];
    for member in superblock.members.iter() {
        used[member.number] = true;
    }
    let allocator = space.allocator();
    for segment in (0..space.table.len()).map(SegmentNo) {
        let medium = space.table.medium(segment);
        if medium < MAX_MEDIA && !allocator.is_free(segment) {
            used[medium] = true;
        }
    }
    let free = (1..MAX_MEDIA).find(|&number| !used[number]);
    free.ok_or(MediaError::TooMany)
}

/// Fails if there are too few segment numbers for so many more slots, or the medium is too large.
fn check_numbers(
    superblock: &SuperblockState,
    space: &Space,
    more: u32,
    capacity_bytes: u64,
) -> Result<(), MediaError> {
    let slots = u64::from(space.table.slots().total()) + u64::from(more);
    if capacity_bytes > MEDIUM_SPAN || slots > u64::from(MAX_SEGMENTS) {
        return Err(GrowError::TooLarge.into());
    }
    match superblock.geometry.least_bytes_for(slots) {
        Some(least_bytes) => Err(MediaError::TooFewNumbers { least_bytes }),
        None => Ok(()),
    }
}

fn grow_first(
    superblock: &mut SuperblockState,
    space: &Space,
    bytes: u64,
) -> Result<(), MediaError> {
    let slots = space.table.slots();
    let others = slots.total() - slots.count(0);
    let old = superblock.geometry;
    let grown = old.grown(bytes, others)?;
    let first = space.medium.first();
    // 1. Room. A crash from here to step 3 leaves a file that is longer than the region, which is no harm.
    if first.capacity_bytes() < grown.end_bytes() {
        first.grow(bytes).map_err(MediaError::NoRoom)?;
    }
    // 2. The segment table, durable in its new place. 3. The superblock: from here on the region has the new size.
    let next = space.table.relocate(&space.medium, &grown, || {
        superblock.commit(&space.medium, |next| next.geometry = grown)
    });
    *superblock = next.map_err(MediaError::Superblock)?;
    // 4. The new slots, and the place of the old table, can be taken.
    slots.set_count(0, grown.slots);
    let mut allocator = space.allocator();
    allocator.extend_numbers(grown.segments);
    allocator.extend_medium(0, grown.slots);
    drop(allocator);
    first.populate(std::iter::once(old.capacity_bytes..grown.capacity_bytes).collect());
    Ok(())
}

fn grow_member(
    superblock: &mut SuperblockState,
    space: &Space,
    number: usize,
    bytes: u64,
) -> Result<(), MediaError> {
    let member = find(superblock, number)?;
    let medium = space.medium.get(number);
    let medium = medium.ok_or(MediaError::Missing { number })?;
    let segment_bytes = u64::from(space.geometry.segment_bytes);
    let capacity_bytes = bytes / segment_bytes * segment_bytes;
    if capacity_bytes <= member.capacity_bytes {
        return Err(GrowError::TooSmall {
            asked_bytes: bytes,
            least_bytes: member.capacity_bytes + segment_bytes,
        }
        .into());
    }
    let (old, new) = (
        member.slots(space.geometry.segment_bytes),
        slots_in(capacity_bytes, space.geometry.segment_bytes),
    );
    check_numbers(superblock, space, new.saturating_sub(old), capacity_bytes)?;
    if medium.capacity_bytes() < capacity_bytes {
        medium.grow(capacity_bytes).map_err(MediaError::NoRoom)?;
    }
    let member_end = member.capacity_bytes;
    let grown = RegionMember {
        capacity_bytes,
        ..member
    };
    // The list counts; the header says that the medium had so many bytes.
    write_header(
        &*medium,
        space.uuid,
        &grown,
        space.geometry.segment_bytes,
        false,
    )?;
    commit(superblock, space, |next| {
        next.members = next.members.with(grown)
    })?;
    space.table.slots().set_count(number, new);
    space.allocator().extend_medium(number, new);
    medium.populate(std::iter::once(member_end..capacity_bytes).collect());
    Ok(())
}
