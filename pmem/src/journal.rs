//! Journal of a region: one record makes a checkpoint exist, or no longer.
//!
//! The journal has two halves. Records are appended to the active half, one at a time, each durable before the next
//! is begun: so a crash tears at most the last. When the active half is full, the live state is written to the other
//! half, and a header record there makes that half active. Epochs are never used twice, not even by a compaction that
//! a crash cut short, so records that are left over in a half never count.

use std::collections::HashMap;

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::PAGE_SIZE;
use crate::error::JournalError;
use crate::geometry::Geometry;
use crate::ids::{CheckpointId, PageNo, RegionUuid};
use crate::layout::{
    RECORD_ATTRS, RECORD_BYTES, RECORD_DELETE, RECORD_HEADER, RECORD_REPLACES, RECORD_SEAL,
    RecordCopy,
};
use permafrost_medium::convert::{to_u64, to_usize};
use permafrost_medium::{Flushed, Medium};

mod replay;

pub(crate) use replay::{REMNANT_BYTES, Replayed, replay};

/// A live checkpoint, as the journal has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) root: PageNo,
    pub(crate) root_crc32: u32,
    pub(crate) attrs: u32,
    /// Ascends with every seal.
    pub(crate) order: u64,
}

/// Change that a journal record makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Seal {
        id: CheckpointId,
        root: PageNo,
        root_crc32: u32,
        attrs: u32,
        replaces: Option<CheckpointId>,
    },
    Delete {
        id: CheckpointId,
    },
    Attrs {
        id: CheckpointId,
        bits: u32,
    },
}

/// A change that has passed all checks and has its place.
#[must_use]
pub(crate) struct Prepared {
    /// `None`: a compaction for its own sake.
    change: Option<Change>,
    place: Place,
}

enum Place {
    /// The next slot of the active half.
    Append,
    /// The compacted other half, written and flushed with the change in it; its header commits.
    Flip { epoch: u32, records: u32 },
}

/// The journal of an open region.
pub(crate) struct Journal {
    uuid: RegionUuid,
    geometry: Geometry,
    half: u8,
    epoch: u32,
    /// Highest epoch ever seen or used.
    last_epoch: u32,
    /// Slot of the next record.
    next: u32,
    live: HashMap<CheckpointId, Live>,
    next_order: u64,
    /// Ranges that were flushed and that the next fence waits for.
    flushed: Flushed,
    failed: bool,
    closed: bool,
}

impl Journal {
    /// Writes and flushes the journal of a new region: an empty first half, and a second half without a header.
    /// Zeroes both: records of an earlier region with this uuid would count.
    pub(crate) fn format(
        medium: &dyn Medium,
        geometry: &Geometry,
        uuid: RegionUuid,
        flushed: &mut Flushed,
    ) -> std::io::Result<()> {
        let zeros = vec![0; PAGE_SIZE];
        let end = geometry.journal_at + 2 * geometry.half_bytes();
        for at in (geometry.journal_at..end).step_by(PAGE_SIZE) {
            // SAFETY: no other code has the region open while it is formatted.
            unsafe { medium.write(at, &zeros)? };
        }
        let header = encode(uuid, header_record(1, 0));
        // SAFETY: as above.
        unsafe { medium.write(half_at(geometry, 0), &header)? };
        medium.flush(geometry.journal_at, end - geometry.journal_at, flushed)
    }

    pub(crate) fn live(&self) -> &HashMap<CheckpointId, Live> {
        &self.live
    }

    /// Ascends with every change: the epoch, and behind it the records of the active half in use, its header included.
    pub(crate) fn position(&self) -> u64 {
        u64::from(self.epoch) << 32 | u64::from(self.next)
    }

    /// Returns the order that the next seal gets.
    pub(crate) fn next_order(&self) -> u64 {
        self.next_order
    }

    pub(crate) fn check(&self) -> Result<(), JournalError> {
        if self.failed {
            return Err(JournalError::Failed);
        }
        if self.closed {
            Err(JournalError::Closed)
        } else {
            Ok(())
        }
    }

    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    /// Marks the journal as failed: from here on it is unknown what is durable, and the journal takes no more
    /// records.
    pub(crate) fn fail(&mut self) {
        self.failed = true;
    }

    /// Finds a place for the change. If the active half is full, writes the compacted state with the
    /// change applied to the other one, flushed but not fenced.
    ///
    /// A slot is kept free of seals, so that deleting is possible however full the journal is.
    pub(crate) fn prepare(
        &mut self,
        medium: &dyn Medium,
        change: Change,
    ) -> Result<Prepared, JournalError> {
        self.check()?;
        for id in [change.removes(), change.touches()].into_iter().flatten() {
            if !self.live.contains_key(&id) {
                return Err(JournalError::Unknown { id });
            }
        }
        let kept_free = u32::from(matches!(change, Change::Seal { .. }));
        if self.next + kept_free < self.geometry.journal_records {
            return Ok(Prepared {
                change: Some(change),
                place: Place::Append,
            });
        }
        self.prepare_compaction(medium, Some(change), kept_free)
    }

    fn prepare_compaction(
        &mut self,
        medium: &dyn Medium,
        change: Option<Change>,
        kept_free: u32,
    ) -> Result<Prepared, JournalError> {
        let mut live = self.live.clone();
        if let Some(change) = change {
            apply(&mut live, self.next_order, change);
        }
        let records = u32::try_from(live.len()).unwrap_or(u32::MAX);
        if records.saturating_add(1 + kept_free) > self.geometry.journal_records {
            return Err(JournalError::Full {
                records: self.geometry.journal_records,
            });
        }
        let Some(epoch) = self.last_epoch.checked_add(1) else {
            return Err(JournalError::Full {
                records: self.geometry.journal_records,
            });
        };
        self.last_epoch = epoch;
        let mut live: Vec<_> = live.into_iter().collect();
        live.sort_unstable_by_key(|(_, l)| l.order);
        let mut bytes = Vec::with_capacity(live.len() * RECORD_BYTES);
        for ((id, l), sequence) in live.into_iter().zip(1..) {
            let seal = Change::Seal {
                id,
                root: l.root,
                root_crc32: l.root_crc32,
                attrs: l.attrs,
                replaces: None,
            };
            bytes.extend_from_slice(&encode(self.uuid, seal.to_record(epoch, sequence)));
        }
        let at = half_at(&self.geometry, 1 - self.half) + to_u64(RECORD_BYTES);
        // SAFETY: under the journal's lock; no slice of the journal is ever lent.
        let written = unsafe { medium.write(at, &bytes) };
        written.and_then(|()| medium.flush(at, to_u64(bytes.len()), &mut self.flushed))?;
        Ok(Prepared {
            change,
            place: Place::Flip { epoch, records },
        })
    }

    /// Writes the one record that makes the change happen, and waits until it is durable.
    ///
    /// After an error it is unknown whether the change happened: the journal takes no more.
    pub(crate) fn commit(
        &mut self,
        medium: &dyn Medium,
        prepared: &Prepared,
    ) -> Result<(), JournalError> {
        let (at, record) = match prepared.place {
            Place::Append => {
                let at = half_at(&self.geometry, self.half)
                    + u64::from(self.next) * to_u64(RECORD_BYTES);
                let record = prepared.change.map(|c| c.to_record(self.epoch, self.next));
                (at, record.unwrap_or_else(|| header_record(self.epoch, 0)))
            }
            Place::Flip { epoch, records } => (
                half_at(&self.geometry, 1 - self.half),
                header_record(epoch, records),
            ),
        };
        if let Err(error) = self.write_record(medium, prepared, at, record) {
            self.failed = true;
            return Err(error.into());
        }
        if let Some(change) = prepared.change {
            apply(&mut self.live, self.next_order, change);
            self.next_order += u64::from(matches!(change, Change::Seal { .. }));
        }
        match prepared.place {
            Place::Append => self.next += 1,
            Place::Flip { epoch, records } => {
                let old = half_at(&self.geometry, self.half);
                self.half = 1 - self.half;
                self.epoch = epoch;
                self.next = records + 1;
                // So that damage to the new header is found, and never taken for the state before. If
                // a crash undoes it, the old half's lower epoch still loses: no fence needed.
                // SAFETY: under the journal's lock; no slice of the journal is ever lent.
                let erased = unsafe { medium.write(old, &[0; RECORD_BYTES]) };
                // The change has happened: an error shows at the next fence, not here.
                let _ = erased
                    .and_then(|()| medium.flush(old, to_u64(RECORD_BYTES), &mut self.flushed));
            }
        }
        Ok(())
    }

    fn write_record(
        &mut self,
        medium: &dyn Medium,
        prepared: &Prepared,
        at: u64,
        record: RecordCopy,
    ) -> std::io::Result<()> {
        if matches!(prepared.place, Place::Flip { .. }) {
            // The header makes the compacted records count: it is written after they are durable.
            medium.fence(&mut self.flushed)?;
        }
        let bytes = encode(self.uuid, record);
        // SAFETY: under the journal's lock; no slice of the journal is ever lent.
        unsafe { medium.write(at, &bytes)? };
        medium.flush(at, to_u64(bytes.len()), &mut self.flushed)?;
        medium.fence(&mut self.flushed)
    }

    /// Prepares and commits a change on its own.
    pub(crate) fn change(
        &mut self,
        medium: &dyn Medium,
        change: Change,
    ) -> Result<(), JournalError> {
        let prepared = self.prepare(medium, change)?;
        self.commit(medium, &prepared)
    }

    /// Writes the live state to the other half, which becomes active: damage in this half no longer counts.
    pub(crate) fn compact(&mut self, medium: &dyn Medium) -> Result<(), JournalError> {
        self.check()?;
        let prepared = self.prepare_compaction(medium, None, 0)?;
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

/// Applies a change that is known to make sense.
fn apply(live: &mut HashMap<CheckpointId, Live>, order: u64, change: Change) {
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
            live.insert(
                id,
                Live {
                    root,
                    root_crc32,
                    attrs,
                    order,
                },
            );
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

/// Encodes a record's two copies, with their checksums.
fn encode(uuid: RegionUuid, mut record: RecordCopy) -> [u8; RECORD_BYTES] {
    record.crc32 = U32::new(checksum(uuid, &record));
    let mut bytes = [0; RECORD_BYTES];
    for copy in bytes.chunks_exact_mut(size_of::<RecordCopy>()) {
        copy.copy_from_slice(record.as_bytes());
    }
    bytes
}

fn checksum(uuid: RegionUuid, record: &RecordCopy) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(uuid.as_bytes());
    hasher.update(&record.as_bytes()[size_of::<U32>()..]);
    hasher.finalize()
}

fn half_at(geometry: &Geometry, half: u8) -> u64 {
    geometry.journal_at + u64::from(half) * geometry.half_bytes()
}

fn half_len(geometry: &Geometry) -> usize {
    to_usize(geometry.half_bytes())
}
