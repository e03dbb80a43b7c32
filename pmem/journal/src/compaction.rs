//! Compaction: the live state is written to the other half, and that half becomes the active one.
//!
//! It goes on step by step, while changes are appended to the active half, so that no seal waits for it. It goes
//! through the records of the active half in their order, up to the last one, and carries over those that are in
//! force:
//!
//! ```text
//! active half  │H│s│d│s│a│s│s│d│s│s│ …      s: seal, d: deletion, a: attributes
//!                        ▲ cursor  ▲ next, appended meanwhile
//! other half   │ │s│s│ …                    no header: counts for nothing
//! ```
//!
//! A checkpoint may be removed after its record was carried over. Then the record that removes it, which comes behind
//! the cursor, is carried over as well. When the cursor has arrived at the end, the next change goes to the other
//! half, with the header that makes it active.

use std::collections::HashSet;

use zerocopy::FromBytes;

use super::{
    Change, Journal, JournalError, Place, PreparedChange, apply, checksum, header_record, record_at,
};
use permafrost_layout::ids::CheckpointId;
use permafrost_layout::{RECORD_BYTES, RecordCopy};
use permafrost_medium::Medium;
use permafrost_medium::convert::{to_u64, to_usize};

/// Records that a change carries over, unless the active half is about to be full.
const LEAST_STEP: u32 = 8;

/// A compaction under way.
pub(super) struct Compaction {
    epoch: u32,
    /// Next record of the active half to be looked at.
    cursor: u32,
    /// First record that was appended since it began.
    begun_at: u32,
    /// Next free place in the other half.
    next: u32,
    /// Checkpoints that were removed after their record was carried over, and whose removal was not.
    removed: HashSet<CheckpointId>,
}

impl Compaction {
    /// Notes that a checkpoint, whose record is at `slot` of the active half, is removed.
    pub(super) fn note_removal(&mut self, id: CheckpointId, slot: u32) {
        if slot < self.cursor {
            self.removed.insert(id);
        }
    }
}

impl Journal {
    /// Begins a compaction if the active half is three quarters full, and enough of its records are no longer in force.
    pub(super) fn begin_compaction(&mut self) {
        let records = self.place.records;
        let free = records - self.next;
        let live = u32::try_from(self.live.len()).unwrap_or(u32::MAX);
        let superseded = (self.next - 1).saturating_sub(live);
        if self.compaction.is_none()
            && !self.compacts_at_once
            && free <= records / 4
            && superseded > free / 2
            && let Ok(epoch) = self.next_epoch()
        {
            self.compaction = Some(Compaction {
                epoch,
                cursor: 1,
                begun_at: self.next,
                next: 1,
                removed: HashSet::new(),
            });
        }
    }

    /// Carries some records over. Gives the place of the next change if that is in the other half: all records are
    /// there, and there is room for the change and `kept_free` more.
    pub(super) fn step(
        &mut self,
        medium: &dyn Medium,
        kept_free: u32,
    ) -> Result<Option<Place>, JournalError> {
        let Some(mut compaction) = self.compaction.take() else {
            return Ok(None);
        };
        let left = self.next - compaction.cursor;
        let free = (self.place.records - self.next).max(1);
        let step = LEAST_STEP.max(left.div_ceil(free) + 1).min(left);
        let mut carried = Vec::new();
        for slot in compaction.cursor..compaction.cursor + step {
            let Some(record) = self.read_record(medium, slot) else {
                // Damaged since it was written: the state in memory is written when this half is full.
                self.compacts_at_once = true;
                return Ok(None);
            };
            compaction.cursor = slot;
            let place = compaction.next + u32::try_from(carried.len()).unwrap_or(0);
            if let Some(change) = self.carry_over(&mut compaction, &record, place) {
                carried.push(change.to_record(compaction.epoch, place));
            }
            compaction.cursor = slot + 1;
        }
        let end = compaction.next + u32::try_from(carried.len()).unwrap_or(0);
        if end + 1 + kept_free > self.place.records {
            // Too many removals beside the live state, which fits alone.
            self.compacts_at_once = true;
            return Ok(None);
        }
        self.write_records(medium, 1 - self.half, compaction.next, &carried)?;
        compaction.next = end;
        if compaction.cursor == self.next {
            return Ok(Some(Place::Flip {
                epoch: compaction.epoch,
                next: end + 1,
                writes_change: true,
            }));
        }
        self.compaction = Some(compaction);
        Ok(None)
    }

    /// Returns the change by which a record is in force, if it is; it gets `place` in the other half.
    fn carry_over(
        &mut self,
        compaction: &mut Compaction,
        record: &RecordCopy,
        place: u32,
    ) -> Option<Change> {
        let change = Change::from_record(record)?;
        let removed = change.removes().filter(|id| compaction.removed.remove(id));
        let (active, other) = (usize::from(self.half), usize::from(1 - self.half));
        let slot = compaction.cursor;
        match change {
            Change::Seal {
                id,
                root,
                root_crc32,
                ..
            } => match self.live.get_mut(&id) {
                Some(live) if live.slots[active] == slot => {
                    live.slots[other] = place;
                    Some(Change::Seal {
                        id,
                        root,
                        root_crc32,
                        attrs: live.attrs,
                        replaces: removed,
                    })
                }
                _ => removed.map(|id| Change::Delete { id }),
            },
            Change::Delete { .. } => removed.map(|id| Change::Delete { id }),
            // The seal was carried over with the attributes of that time.
            Change::Attrs { id, .. } => {
                let live = self.live.get(&id)?;
                let bits = live.attrs;
                let is_later = slot >= compaction.begun_at && live.slots[active] < slot;
                is_later.then_some(Change::Attrs { id, bits })
            }
        }
    }

    /// Reads a record of the active half from the copy that is intact.
    fn read_record(&self, medium: &dyn Medium, slot: u32) -> Option<RecordCopy> {
        (0..2).find_map(|copy| {
            let mut bytes = [0; RECORD_BYTES];
            let at = record_at(&self.place, copy, self.half, slot);
            medium.read(at, &mut bytes).ok()?;
            let record = RecordCopy::read_from_bytes(&bytes).ok()?;
            let intact = record.crc32.get() == checksum(self.uuid, &record)
                && record.epoch.get() == self.epoch
                && record.sequence.get() == slot;
            intact.then_some(record)
        })
    }

    /// Writes the whole live state, with the change applied, to the other half, at once: of a damaged half, or if the
    /// half is full of records in force.
    pub(super) fn write_state(
        &mut self,
        medium: &dyn Medium,
        change: Option<Change>,
        kept_free: u32,
    ) -> Result<PreparedChange, JournalError> {
        self.compaction = None;
        let other = 1 - self.half;
        let mut state: Vec<_> = self.live.iter().map(|(id, live)| (*id, *live)).collect();
        if let Some(change) = change {
            let mut live = state.into_iter().collect();
            apply(&mut live, change, self.next_order, (other, 0));
            state = live.iter().map(|(id, live)| (*id, *live)).collect();
        }
        let records = u32::try_from(state.len()).unwrap_or(u32::MAX);
        if records.saturating_add(1 + kept_free) > self.place.records {
            return Err(JournalError::Full {
                records: self.place.records,
            });
        }
        let epoch = self.next_epoch()?;
        state.sort_unstable_by_key(|(_, live)| live.order);
        let mut written = Vec::with_capacity(to_usize(u64::from(records)));
        for ((id, live), place) in state.into_iter().zip(1..) {
            let seal = Change::Seal {
                id,
                root: live.root,
                root_crc32: live.root_crc32,
                attrs: live.attrs,
                replaces: None,
            };
            written.push(seal.to_record(epoch, place));
            if let Some(live) = self.live.get_mut(&id) {
                live.slots[usize::from(other)] = place;
            }
        }
        self.write_records(medium, other, 1, &written)?;
        Ok(PreparedChange {
            change,
            place: Place::Flip {
                epoch,
                next: records + 1,
                writes_change: false,
            },
        })
    }

    /// Makes the other half the active one by its header, durably; the records before `next` are written and flushed.
    pub(super) fn flip(
        &mut self,
        medium: &dyn Medium,
        epoch: u32,
        next: u32,
    ) -> std::io::Result<()> {
        // The header makes the compacted records count: it is written after they are durable.
        medium.fence(&mut self.flushed)?;
        let other = 1 - self.half;
        self.write_records(medium, other, 0, &[header_record(epoch, next - 1)])?;
        medium.fence(&mut self.flushed)
    }

    /// Makes the numbers those of the other half, which is active now.
    pub(super) fn after_flip(&mut self, medium: &dyn Medium, epoch: u32, next: u32) {
        let old = self.half;
        self.half = 1 - old;
        self.epoch = epoch;
        self.next = next;
        (self.compaction, self.compacts_at_once) = (None, false);
        // So that damage to the new header is found, and never taken for the state before. If a crash undoes it, the
        // old half's lower epoch still loses: no fence needed.
        for copy in 0..2 {
            let at = record_at(&self.place, copy, old, 0);
            // SAFETY: under the journal's lock; no slice of the journal is lent once the region is open.
            let erased = unsafe { medium.write(at, &[0; RECORD_BYTES]) };
            // The change has happened: an error shows at the next fence, not here.
            let _ = erased.and_then(|()| {
                let len_bytes = to_u64(RECORD_BYTES);
                medium.flush(at, len_bytes, &mut self.flushed)
            });
        }
    }

    fn next_epoch(&mut self) -> Result<u32, JournalError> {
        let epoch = self.last_epoch.checked_add(1);
        let epoch = epoch.ok_or(JournalError::Full {
            records: self.place.records,
        })?;
        self.last_epoch = epoch;
        Ok(epoch)
    }
}
