//! Journal of a region: one record makes a checkpoint exist, or no longer.
//!
//! The journal has two halves, and two copies of each, at a distance: no one damaged sector has both copies of a
//! record. Records are appended to the active half, one at a time, each durable before the next is begun: so a crash
//! tears at most the last. When the active half is nearly full, the live state is written to the other half
//! ([`compaction`]), and a header record there makes that half active. Epochs are never used twice, not even by a
//! compaction that a crash cut short, so records that are left over in a half never count.

#![allow(
    unsafe_code,
    reason = "the journal says where it writes, so it makes the promises that a medium asks for"
)]

use std::io;

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use permafrost_layout::by_id::ById;
use permafrost_layout::ids::{CheckpointId, PageNo, RegionUuid};
use permafrost_layout::{
    RECORD_ATTRS, RECORD_BYTES, RECORD_DELETE, RECORD_HEADER, RECORD_REPLACES, RECORD_SEAL,
    RecordCopy,
};
use permafrost_medium::convert::to_u64;
use permafrost_medium::{Flushed, Medium, PAGE_SIZE};

mod compaction;
mod error;
mod replay;

use compaction::Compaction;
pub use error::{JournalDamage, JournalError, JournalFault, ReplayError};
pub use replay::{REMNANT_BYTES, Repair, Replayed, replay};

/// [`PAGE_SIZE`] as an offset.
const PAGE_BYTES: u64 = PAGE_SIZE as u64;

/// Place of a journal on its medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalPlace {
    /// Byte offset of the first copy of half 0; half 1 follows, and behind it the second copies of both.
    pub at: u64,
    /// Records in each half, its header included.
    pub records: u32,
}

impl JournalPlace {
    /// Bytes of a copy of a half: whole pages.
    #[must_use]
    pub fn half_bytes(&self) -> u64 {
        (u64::from(self.records) * to_u64(RECORD_BYTES)).next_multiple_of(PAGE_BYTES)
    }

    /// Bytes of both copies of both halves.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        4 * self.half_bytes()
    }
}

/// A live checkpoint, as the journal has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Live {
    /// Page number of its root.
    pub root: PageNo,
    /// CRC32 of that page.
    pub root_crc32: u32,
    /// Attribute bits of the checkpoint.
    pub attrs: u32,
    /// Ascends with every seal.
    pub order: u64,
    /// Place of its record in each half; counts for the active half, and behind the cursor of a compaction for the
    /// other.
    slots: [u32; 2],
}

/// Change that a journal record makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A checkpoint exists from here on.
    Seal {
        /// Id of the checkpoint.
        id: CheckpointId,
        /// Page number of its root.
        root: PageNo,
        /// CRC32 of that page.
        root_crc32: u32,
        /// Attribute bits of the checkpoint.
        attrs: u32,
        /// Checkpoint that is deleted in the same instant; may have the same id.
        replaces: Option<CheckpointId>,
    },
    /// A checkpoint no longer exists.
    Delete {
        /// Id of the checkpoint.
        id: CheckpointId,
    },
    /// A checkpoint's attributes change.
    Attrs {
        /// Id of the checkpoint.
        id: CheckpointId,
        /// All attribute bits from here on.
        bits: u32,
    },
}

/// A change that has passed all checks and has its place.
#[must_use]
pub struct PreparedChange {
    /// `None`: a compaction for its own sake.
    change: Option<Change>,
    place: Place,
}

enum Place {
    /// The next slot of the active half.
    Append,
    /// The other half, whose header commits. The compacted records are written and flushed; the change is among them,
    /// or still to be written behind them. The place behind it is `next`.
    Flip {
        epoch: u32,
        next: u32,
        writes_change: bool,
    },
}

/// The journal of an open region.
pub struct Journal {
    uuid: RegionUuid,
    place: JournalPlace,
    half: u8,
    epoch: u32,
    /// Highest epoch ever seen or used.
    last_epoch: u32,
    /// Slot of the next record.
    next: u32,
    live: ById<Live>,
    next_order: u64,
    compaction: Option<Compaction>,
    /// True if the next compaction writes the state at once: one that went step by step did not work.
    compacts_at_once: bool,
    /// Ranges that were flushed and that the next fence waits for.
    flushed: Flushed,
    failed: bool,
    closed: bool,
}

impl Journal {
    /// Writes and flushes the journal of a new region: an empty first half, and a second half without a header.
    /// Zeroes both: records of an earlier region with this uuid would count. Of the header only the first copy is
    /// written, so that a format cut short leaves a known range that is not blank.
    ///
    /// # Errors
    /// The medium failed.
    pub fn format(
        medium: &dyn Medium,
        place: &JournalPlace,
        uuid: RegionUuid,
        flushed: &mut Flushed,
    ) -> io::Result<()> {
        let zeros = vec![0; PAGE_SIZE];
        let end = place.at + place.len_bytes();
        for at in (place.at..end).step_by(PAGE_SIZE) {
            // SAFETY: no other code has the region open while it is formatted.
            unsafe { medium.write(at, &zeros)? };
        }
        medium.flush(place.at, end - place.at, flushed)?;
        Self::write_first_header(medium, place, uuid, 0, flushed)
    }

    /// Writes and flushes a copy of a new region's header; the second one after the superblock.
    ///
    /// # Errors
    /// The medium failed.
    pub fn write_first_header(
        medium: &dyn Medium,
        place: &JournalPlace,
        uuid: RegionUuid,
        copy: u8,
        flushed: &mut Flushed,
    ) -> io::Result<()> {
        let (at, header) = (
            record_at(place, copy, 0, 0),
            encode(uuid, header_record(1, 0)),
        );
        // SAFETY: no other code has the region open while it is formatted.
        unsafe { medium.write(at, &header)? };
        medium.flush(at, to_u64(RECORD_BYTES), flushed)
    }

    /// Returns the live checkpoints.
    #[must_use]
    pub fn live(&self) -> &ById<Live> {
        &self.live
    }

    /// Ascends with every change: the epoch, and behind it the records of the active half in use, its header included.
    #[must_use]
    pub fn position(&self) -> u64 {
        u64::from(self.epoch) << 32 | u64::from(self.next)
    }

    /// Returns the order that the next seal gets.
    #[must_use]
    pub fn next_order(&self) -> u64 {
        self.next_order
    }

    /// Checks that the journal takes records.
    ///
    /// # Errors
    /// [`JournalError::Failed`], [`JournalError::Closed`].
    pub fn check(&self) -> Result<(), JournalError> {
        if self.failed {
            return Err(JournalError::Failed);
        }
        if self.closed {
            Err(JournalError::Closed)
        } else {
            Ok(())
        }
    }

    /// Takes no more records from here on.
    pub fn close(&mut self) {
        self.closed = true;
    }

    /// Marks the journal as failed: from here on it is unknown what is durable, and the journal takes no more
    /// records.
    pub fn fail(&mut self) {
        self.failed = true;
    }

    /// Finds a place for the change. Does a step of a compaction that is under way. If the active half is full, writes
    /// the compacted state with the change applied to the other one, flushed but not fenced.
    ///
    /// A slot is kept free of seals, so that deleting is possible however full the journal is.
    ///
    /// # Errors
    /// [`JournalError`]; nothing has changed.
    pub fn prepare(
        &mut self,
        medium: &dyn Medium,
        change: Change,
    ) -> Result<PreparedChange, JournalError> {
        self.check()?;
        for id in [change.removes(), change.touches()].into_iter().flatten() {
            if !self.live.contains_key(&id) {
                return Err(JournalError::Unknown { id });
            }
        }
        let kept_free = u32::from(matches!(change, Change::Seal { .. }));
        let place = match self.step(medium, kept_free)? {
            Some(flip) => flip,
            None if self.next + kept_free < self.place.records => Place::Append,
            None => return self.write_state(medium, Some(change), kept_free),
        };
        Ok(PreparedChange {
            change: Some(change),
            place,
        })
    }

    /// Writes the one record that makes the change happen, and waits until it is durable.
    ///
    /// After an error it is unknown whether the change happened: the journal takes no more.
    ///
    /// # Errors
    /// [`JournalError::Io`].
    pub fn commit(
        &mut self,
        medium: &dyn Medium,
        prepared: &PreparedChange,
    ) -> Result<(), JournalError> {
        if let Err(error) = self.write_prepared(medium, prepared) {
            self.failed = true;
            return Err(error.into());
        }
        let written = match prepared.place {
            Place::Append => (self.half, self.next),
            Place::Flip { next, .. } => (1 - self.half, next - 1),
        };
        if let Some(change) = prepared.change {
            let removed = change
                .removes()
                .and_then(|id| Some((id, self.live.get(&id)?)));
            if let (Some(compaction), Some((id, live))) = (&mut self.compaction, removed) {
                compaction.note_removal(id, live.slots[usize::from(self.half)]);
            }
            apply(&mut self.live, change, self.next_order, written);
            self.next_order += u64::from(matches!(change, Change::Seal { .. }));
        }
        match prepared.place {
            Place::Append => {
                self.next += 1;
                self.begin_compaction();
            }
            Place::Flip { epoch, next, .. } => self.after_flip(medium, epoch, next),
        }
        Ok(())
    }

    fn write_prepared(&mut self, medium: &dyn Medium, prepared: &PreparedChange) -> io::Result<()> {
        let record = |epoch, slot| prepared.change.map(|change| change.to_record(epoch, slot));
        match prepared.place {
            Place::Append => {
                let record = record(self.epoch, self.next);
                self.write_records(medium, self.half, self.next, record.as_slice())?;
                medium.fence(&mut self.flushed)
            }
            Place::Flip {
                epoch,
                next,
                writes_change,
            } => {
                let record = record(epoch, next - 1).filter(|_| writes_change);
                self.write_records(medium, 1 - self.half, next - 1, record.as_slice())?;
                self.flip(medium, epoch, next)
            }
        }
    }

    /// Writes and flushes both copies of consecutive records.
    fn write_records(
        &mut self,
        medium: &dyn Medium,
        half: u8,
        first: u32,
        records: &[RecordCopy],
    ) -> io::Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        let encoded = records.iter().map(|&record| encode(self.uuid, record));
        let bytes = encoded.collect::<Vec<_>>().concat();
        for copy in 0..2 {
            let at = record_at(&self.place, copy, half, first);
            // SAFETY: under the journal's lock; no slice of the journal is lent once the region is open.
            unsafe { medium.write(at, &bytes)? };
            medium.flush(at, to_u64(bytes.len()), &mut self.flushed)?;
        }
        Ok(())
    }

    /// Prepares and commits a change on its own.
    ///
    /// # Errors
    /// Those of [`Journal::prepare`] and [`Journal::commit`].
    pub fn change(&mut self, medium: &dyn Medium, change: Change) -> Result<(), JournalError> {
        let prepared = self.prepare(medium, change)?;
        self.commit(medium, &prepared)
    }

    /// Writes the live state to the other half, which becomes active: damage in this half no longer counts.
    ///
    /// # Errors
    /// Those of [`Journal::commit`]; the journal takes no records.
    pub fn compact(&mut self, medium: &dyn Medium) -> Result<(), JournalError> {
        self.check()?;
        let prepared = self.write_state(medium, None, 0)?;
        self.commit(medium, &prepared)
    }
}

impl Change {
    fn removes(self) -> Option<CheckpointId> {
        match self {
            Self::Seal { replaces, .. } => replaces,
            Self::Delete { id } => Some(id),
            Self::Attrs { .. } => None,
        }
    }

    /// Returns true if it seals under an id that another checkpoint has, and keeps.
    fn is_taken(self, known: impl Fn(CheckpointId) -> bool) -> bool {
        matches!(self, Self::Seal { id, replaces, .. } if replaces != Some(id) && known(id))
    }

    fn touches(self) -> Option<CheckpointId> {
        match self {
            Self::Attrs { id, .. } => Some(id),
            Self::Seal { .. } | Self::Delete { .. } => None,
        }
    }

    fn to_record(self, epoch: u32, sequence: u32) -> RecordCopy {
        let mut record = RecordCopy {
            crc32: U32::ZERO,
            kind: U16::ZERO,
            flags: U16::ZERO,
            epoch: U32::new(epoch),
            sequence: U32::new(sequence),
            id: [0; 16],
            replaces: [0; 16],
            root: U64::ZERO,
            root_crc32: U32::ZERO,
            attrs: U32::ZERO,
        };
        match self {
            Self::Seal {
                id,
                root,
                root_crc32,
                attrs,
                replaces,
            } => {
                record.kind = U16::new(RECORD_SEAL);
                record.id = id.to_bytes();
                record.root = U64::new(root.0);
                record.root_crc32 = U32::new(root_crc32);
                record.attrs = U32::new(attrs);
                if let Some(replaces) = replaces {
                    record.flags = U16::new(RECORD_REPLACES);
                    record.replaces = replaces.to_bytes();
                }
            }
            Self::Delete { id } => {
                record.kind = U16::new(RECORD_DELETE);
                record.id = id.to_bytes();
            }
            Self::Attrs { id, bits } => {
                record.kind = U16::new(RECORD_ATTRS);
                record.id = id.to_bytes();
                record.attrs = U32::new(bits);
            }
        }
        record
    }

    fn from_record(record: &RecordCopy) -> Option<Self> {
        let id = CheckpointId::from_bytes(record.id);
        let replaces = record.flags.get() & RECORD_REPLACES != 0;
        match record.kind.get() {
            RECORD_SEAL => Some(Self::Seal {
                id,
                root: PageNo(record.root.get()),
                root_crc32: record.root_crc32.get(),
                attrs: record.attrs.get(),
                replaces: replaces.then(|| CheckpointId::from_bytes(record.replaces)),
            }),
            RECORD_DELETE => Some(Self::Delete { id }),
            RECORD_ATTRS => Some(Self::Attrs {
                id,
                bits: record.attrs.get(),
            }),
            _ => None,
        }
    }
}

/// Applies a change that is known to make sense, and whose record is in a half, at a slot.
fn apply(live: &mut ById<Live>, change: Change, order: u64, (half, slot): (u8, u32)) {
    if let Some(removed) = change.removes() {
        live.remove(&removed);
    }
    match change {
        Change::Seal {
            id,
            root,
            root_crc32,
            attrs,
            ..
        } => {
            let mut slots = [0; 2];
            slots[usize::from(half)] = slot;
            let sealed = Live {
                root,
                root_crc32,
                attrs,
                order,
                slots,
            };
            live.insert(id, sealed);
        }
        Change::Delete { .. } => {}
        Change::Attrs { id, bits } => {
            if let Some(l) = live.get_mut(&id) {
                l.attrs = bits;
            }
        }
    }
}

fn header_record(epoch: u32, compacted: u32) -> RecordCopy {
    let mut record = Change::Delete {
        id: CheckpointId::new(0),
    }
    .to_record(epoch, 0);
    record.kind = U16::new(RECORD_HEADER);
    record.attrs = U32::new(compacted);
    record
}

/// Encodes a record with its checksum.
fn encode(uuid: RegionUuid, mut record: RecordCopy) -> [u8; RECORD_BYTES] {
    record.crc32 = U32::new(checksum(uuid, &record));
    let mut bytes = [0; RECORD_BYTES];
    bytes.copy_from_slice(record.as_bytes());
    bytes
}

fn checksum(uuid: RegionUuid, record: &RecordCopy) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(uuid.as_bytes());
    hasher.update(&record.as_bytes()[size_of::<U32>()..]);
    hasher.finalize()
}

/// Returns the byte offset of copy 0 or 1 of a record.
fn record_at(place: &JournalPlace, copy: u8, half: u8, slot: u32) -> u64 {
    let halves = u64::from(2 * copy + half);
    place.at + halves * place.half_bytes() + u64::from(slot) * to_u64(RECORD_BYTES)
}
