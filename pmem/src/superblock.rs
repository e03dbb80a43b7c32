//! Reading, choosing and writing superblocks.

use std::io;

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use crate::PAGE_BYTES;
use crate::error::{OpenError, SuperblockFault};
use crate::geometry::{Geometry, LAST_SEGMENTS_AT, MIN_SEGMENT_BYTES, SUPERBLOCKS_BYTES};
use crate::ids::RegionUuid;
use crate::layout::{
    FORMAT_VERSION, LISTED_MEMBERS, MEMBER_MAGIC, MemberEntry, RECORD_BYTES, STATE_CLEAN,
    STATE_OPEN, SUPERBLOCK_MAGIC, Superblock,
};
use crate::members::{Members, TierName};
use permafrost_medium::convert::{to_u64, to_usize};
use permafrost_medium::{Flushed, LostPage, Medium, is_zero};

/// State that a superblock holds, and the slot of that superblock.
#[derive(Clone, Debug)]
pub(crate) struct SuperblockState {
    pub(crate) uuid: RegionUuid,
    pub(crate) geometry: Geometry,
    /// Tier of the first medium.
    pub(crate) tier: TierName,
    /// The other media.
    pub(crate) members: Members,
    pub(crate) open: bool,
    pub(crate) generation: u64,
    pub(crate) unsafe_shutdowns: u64,
    /// The slot (0 or 1) that holds this state; the next is written to the other.
    slot: u64,
}

/// The state chosen, and whether the other superblock was unusable.
pub(crate) struct Chosen {
    pub(crate) state: SuperblockState,
    pub(crate) other_damaged: bool,
}

impl SuperblockState {
    pub(crate) fn new(uuid: RegionUuid, geometry: Geometry, tier: TierName) -> Self {
        Self {
            uuid,
            geometry,
            tier,
            members: Members::default(),
            open: false,
            generation: 1,
            unsafe_shutdowns: 0,
            slot: 0,
        }
    }

    /// Returns the state for the next write: one generation on, in the other slot.
    pub(crate) fn next(&self, open: bool, unsafe_shutdowns: u64) -> Self {
        Self {
            open,
            unsafe_shutdowns,
            generation: self.generation.saturating_add(1),
            slot: 1 - self.slot,
            ..self.clone()
        }
    }

    /// Writes a state with another geometry or other members to both superblocks, one after the other, and returns the
    /// second. The first makes it count; once both have it, no damage of one brings the state before back.
    pub(crate) fn commit(
        &self,
        medium: &dyn Medium,
        change: impl FnOnce(&mut Self),
    ) -> io::Result<Self> {
        let mut first = self.next(self.open, self.unsafe_shutdowns);
        change(&mut first);
        first.store(medium, &mut Flushed::new())?;
        let second = first.next(first.open, first.unsafe_shutdowns);
        second.store(medium, &mut Flushed::new())?;
        Ok(second)
    }

    /// Writes the state to its slot and waits until it is durable. A torn write damages this slot only; the other one
    /// has the state before.
    ///
    /// Fences the ranges in `flushed` as well.
    pub(crate) fn store(&self, medium: &dyn Medium, flushed: &mut Flushed) -> io::Result<()> {
        let members = self.members.stored();
        let mut block = Superblock {
            magic: SUPERBLOCK_MAGIC,
            version: U32::new(FORMAT_VERSION),
            state: U32::new(if self.open { STATE_OPEN } else { STATE_CLEAN }),
            uuid: *self.uuid.as_bytes(),
            capacity_bytes: U64::new(self.geometry.capacity_bytes),
            journal_at: U64::new(self.geometry.journal_at),
            segments_at: U64::new(self.geometry.segments_at),
            slots: U32::new(self.geometry.slots),
            segment_bytes: U32::new(self.geometry.segment_bytes),
            journal_records: U32::new(self.geometry.journal_records),
            segments: U32::new(self.geometry.segments),
            generation: U64::new(self.generation),
            unsafe_shutdowns: U64::new(self.unsafe_shutdowns),
            table_at: U64::new(self.geometry.table_at),
            tier: self.tier.stored(),
            members_crc32: U32::new(crc32fast::hash(members.as_bytes())),
            reserved: [0; 8],
            crc32: U32::ZERO,
        };
        block.crc32 = U32::new(checksum(&block));
        let at = self.slot * PAGE_BYTES;
        let mut bytes = block.as_bytes().to_vec();
        bytes.extend_from_slice(members.as_bytes());
        // SAFETY: superblocks are read at open and written under the region's lock only, and no slice
        // of one is ever lent.
        unsafe { medium.write(at, &bytes)? };
        medium.flush(at, to_u64(bytes.len()), flushed)?;
        medium.fence(flushed)
    }
}

/// Zeroes both superblocks' pages, durably: the first step of a format.
pub(crate) fn erase(medium: &dyn Medium) -> io::Result<()> {
    let zeros = vec![0; to_usize(2 * PAGE_BYTES)];
    // SAFETY: as in `store`; no other code has the region open while it is formatted.
    unsafe { medium.write(0, &zeros)? };
    let mut flushed = Flushed::new();
    medium.flush(0, 2 * PAGE_BYTES, &mut flushed)?;
    medium.fence(&mut flushed)
}

/// Reads both superblocks and chooses the newer of those that are intact.
pub(crate) fn load(medium: &dyn Medium) -> Result<Chosen, OpenError> {
    match (load_slot(medium, 0)?, load_slot(medium, 1)?) {
        (Ok(a), Ok(b)) => {
            // Geometry and members differ after a crash between the two writes of a change.
            if a.uuid != b.uuid {
                return Err(OpenError::SuperblocksDisagree);
            }
            let state = if a.generation > b.generation { a } else { b };
            Ok(Chosen {
                state,
                other_damaged: false,
            })
        }
        // Only the first is written: the format or the first open after it was cut short.
        (Ok(state), Err(SuperblockFault::Blank)) => Ok(Chosen {
            state,
            other_damaged: false,
        }),
        // A crash while that slot was written, or a damaged medium: the other has the state before.
        (Ok(state), Err(_)) | (Err(_), Ok(state)) => Ok(Chosen {
            state,
            other_damaged: true,
        }),
        // The first format was cut short before or while its first superblock was written: the second slot
        // is blank until the first open, and nothing is sealed before that.
        (Err(_), Err(SuperblockFault::Blank))
            if is_unfinished(medium)? && is_blank_behind(medium)? =>
        {
            Err(OpenError::NotARegion)
        }
        // Also both blank with something of a region behind them: lost, by no crash.
        (Err(first), Err(second)) => Err(OpenError::BothSuperblocksCorrupt { first, second }),
    }
}

/// Returns true if the first page may be what a crash left of writing its first superblock to a blank one. Other
/// content may be a user's data: it is never formatted over for being no region.
fn is_unfinished(medium: &dyn Medium) -> Result<bool, OpenError> {
    let mut page = vec![0; to_usize(PAGE_BYTES)];
    medium.read(0, &mut page)?;
    // A format has no members.
    let (block, rest) = page.split_at(size_of::<Superblock>());
    let magic = &block[..SUPERBLOCK_MAGIC.len()];
    let ours = magic == SUPERBLOCK_MAGIC || is_zero(magic);
    Ok(ours && is_zero(rest))
}

/// Returns true if there is nothing behind the superblocks but what a first format writes: the first journal half's
/// header.
///
/// Examines the places where a seal always leaves something, whatever the geometry: the first records of the first
/// half (a compaction into the other one erases its header only), and every place where segment 0 can begin, which is
/// the first to be allocated and whose header is never erased. Reads at most 20,512 pages.
fn is_blank_behind(medium: &dyn Medium) -> Result<bool, OpenError> {
    let step = u64::from(MIN_SEGMENT_BYTES);
    let end = medium.capacity_bytes().min(LAST_SEGMENTS_AT + PAGE_BYTES);
    let mut journal = vec![0; to_usize(end.min(step).saturating_sub(SUPERBLOCKS_BYTES))];
    medium.read(SUPERBLOCKS_BYTES, &mut journal)?;
    if !is_zero(journal.get(RECORD_BYTES..).unwrap_or_default()) {
        return Ok(false);
    }
    let mut page = vec![0; to_usize(PAGE_BYTES)];
    for at in (step..end).step_by(to_usize(step)) {
        medium.read(at, &mut page)?;
        if !is_zero(&page) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn load_slot(
    medium: &dyn Medium,
    slot: u64,
) -> Result<Result<SuperblockState, SuperblockFault>, OpenError> {
    let mut page = vec![0; to_usize(PAGE_BYTES)];
    match medium.read(slot * PAGE_BYTES, &mut page) {
        Err(error) if LostPage::of(&error).is_some() => {
            return Ok(Err(SuperblockFault::Unreadable));
        }
        read => read?,
    }
    let Ok((block, behind)) = Superblock::read_from_prefix(&page) else {
        return Ok(Err(SuperblockFault::Blank));
    };
    if is_zero(&page) {
        return Ok(Err(SuperblockFault::Blank));
    }
    if block.magic == MEMBER_MAGIC {
        return Err(OpenError::Member);
    }
    if block.magic != SUPERBLOCK_MAGIC {
        return Ok(Err(SuperblockFault::Magic));
    }
    if block.crc32.get() != checksum(&block) {
        return Ok(Err(SuperblockFault::Checksum));
    }
    if block.version.get() > FORMAT_VERSION {
        return Err(OpenError::NewerVersion {
            found: block.version.get(),
            supported: FORMAT_VERSION,
        });
    }
    if block.version.get() < FORMAT_VERSION {
        return Err(OpenError::OlderVersion {
            found: block.version.get(),
            supported: FORMAT_VERSION,
        });
    }
    let Some(geometry) = Geometry::from_superblock(&block) else {
        return Ok(Err(SuperblockFault::Geometry));
    };
    let Ok((list, _)) = <[MemberEntry; LISTED_MEMBERS]>::read_from_prefix(behind) else {
        return Ok(Err(SuperblockFault::Blank));
    };
    if block.members_crc32.get() != crc32fast::hash(list.as_bytes()) {
        return Ok(Err(SuperblockFault::Checksum));
    }
    let (Some(tier), Some(members)) = (
        TierName::from_stored(&block.tier),
        Members::from_stored(&list),
    ) else {
        return Ok(Err(SuperblockFault::Geometry));
    };
    Ok(Ok(SuperblockState {
        uuid: RegionUuid::new(block.uuid),
        geometry,
        tier,
        members,
        open: block.state.get() != STATE_CLEAN,
        generation: block.generation.get(),
        unsafe_shutdowns: block.unsafe_shutdowns.get(),
        slot,
    }))
}

/// Returns the CRC32 of all bytes but the last four.
fn checksum(block: &Superblock) -> u32 {
    let bytes = block.as_bytes();
    crc32fast::hash(&bytes[..bytes.len() - 4])
}
