//! Reading the journal at open.

use std::collections::HashMap;

use zerocopy::FromBytes;

use super::{Change, Journal, apply, checksum, encode, half_at, half_len};
use crate::convert::{to_u64, to_usize};
use crate::error::{JournalFault, OpenError};
use crate::geometry::Geometry;
use crate::ids::RegionUuid;
use crate::layout::{RECORD_BYTES, RECORD_HEADER, RecordCopy};
use crate::medium::Medium;

/// Bytes to zero of a remnant: the chunk that is written atomically and has the checksum.
pub(crate) const REMNANT_BYTES: usize = 8;

/// The journal as found.
pub(crate) struct Replayed {
    pub(crate) journal: Journal,
    /// The last write was cut short by a crash: that operation did not happen.
    pub(crate) torn: bool,
    /// Records with a damaged copy: offset and intact content.
    pub(crate) repairs: Vec<(u64, [u8; RECORD_BYTES])>,
    /// Offsets of what crashes left of torn copies elsewhere. Their first chunk must be zeroed before
    /// anything is appended: a later record has chunks in common with the torn one (its epoch and
    /// place), and if a crash kept just those, it would complete the torn one.
    pub(crate) remnants: Vec<u64>,
}

/// Reads both halves and replays the active one. Writes nothing.
pub(crate) fn replay(
    medium: &dyn Medium,
    geometry: &Geometry,
    uuid: RegionUuid,
) -> Result<Replayed, OpenError> {
    let halves = [
        Half::read(medium, geometry, uuid, 0)?,
        Half::read(medium, geometry, uuid, 1)?,
    ];
    let last_epoch = halves.iter().map(Half::highest_epoch).max().unwrap_or(0);
    let headers = [halves[0].header(), halves[1].header()];
    let half = match &headers {
        // A crash in a compaction before its header was durable, or none was ever begun: the half with
        // records after no header does not count.
        [Some(_), None] => 0,
        [None, Some(_)] => 1,
        // A crash after a flip, before the old header's erasure was durable: the newer one counts.
        [Some(a), Some(b)] if a.epoch.get() > b.epoch.get() => 0,
        [Some(a), Some(b)] if a.epoch.get() < b.epoch.get() => 1,
        _ => {
            return Err(OpenError::JournalCorrupt {
                at: half_at(geometry, 0),
                fault: JournalFault::NoHeader,
            });
        }
    };
    let active = &halves[usize::from(half)];
    let corrupt = |fault| OpenError::JournalCorrupt {
        at: half_at(geometry, half),
        fault,
    };
    // Chosen above because it has one.
    let Some(header) = headers[usize::from(half)] else {
        return Err(corrupt(JournalFault::NoHeader));
    };
    let (epoch, compacted) = (header.epoch.get(), header.attrs.get());
    let mut live = HashMap::new();
    let mut next_order = 0;
    let mut repairs = Vec::new();
    let mut next = 0;
    for slot in 0..geometry.journal_records {
        let Some((record, copies)) = active.record(slot, epoch).map_err(corrupt)? else {
            break;
        };
        next = slot + 1;
        if copies < 2 {
            // A crash that tore one copy of the last record, or a damaged one.
            repairs.push((
                active.at + to_u64(RECORD_BYTES) * u64::from(slot),
                encode(uuid, record),
            ));
        }
        if slot == 0 {
            continue;
        }
        let change = Change::from_record(&record).filter(|change| {
            let known = |id| live.contains_key(&id);
            change
                .removes()
                .into_iter()
                .chain(change.touches())
                .all(known)
                && !change.is_taken(known)
        });
        let change = change.ok_or_else(|| corrupt(JournalFault::Senseless { record: slot }))?;
        apply(&mut live, next_order, change);
        next_order += 1;
    }
    if next <= compacted {
        // They were durable before the header was written: no crash explains it.
        return Err(corrupt(JournalFault::Compacted {
            record: next,
            compacted,
        }));
    }
    for later in next..geometry.journal_records {
        // Every record is durable before the one after it is begun: no crash explains it.
        if active.record(later, epoch).map_err(corrupt)?.is_some() {
            return Err(corrupt(JournalFault::Hole {
                record: next,
                later,
            }));
        }
    }
    // A crash while the next record was written leaves neither a valid copy nor what was there before.
    let torn = active
        .remnants(next..next.saturating_add(1))
        .next()
        .is_some();
    let idle = &halves[usize::from(1 - half)];
    let all = 0..geometry.journal_records;
    let remnants = active
        .remnants(next..geometry.journal_records)
        .chain(idle.remnants(all));
    let remnants = remnants.collect();
    let journal = Journal {
        uuid,
        geometry: *geometry,
        half,
        epoch,
        last_epoch,
        next,
        live,
        next_order,
        failed: false,
        closed: false,
    };
    Ok(Replayed {
        journal,
        torn,
        repairs,
        remnants,
    })
}

/// One half, as read.
struct Half {
    at: u64,
    uuid: RegionUuid,
    bytes: Vec<u8>,
}

impl Half {
    fn read(
        medium: &dyn Medium,
        geometry: &Geometry,
        uuid: RegionUuid,
        half: u8,
    ) -> Result<Self, OpenError> {
        let mut bytes = vec![0; half_len(geometry)];
        let at = half_at(geometry, half);
        medium.read(at, &mut bytes)?;
        Ok(Self { at, uuid, bytes })
    }

    /// The copies of a slot that are intact, whatever their epoch.
    fn copies(&self, slot: u32) -> impl Iterator<Item = RecordCopy> {
        let at = to_usize(u64::from(slot)) * RECORD_BYTES;
        let bytes = self.bytes.get(at..at + RECORD_BYTES).unwrap_or_default();
        bytes
            .chunks_exact(size_of::<RecordCopy>())
            .filter_map(|copy| {
                let record = RecordCopy::read_from_bytes(copy).ok()?;
                (record.crc32.get() == checksum(self.uuid, &record)).then_some(record)
            })
    }

    /// The record of this epoch in a slot, and how many of its copies are intact.
    fn record(&self, slot: u32, epoch: u32) -> Result<Option<(RecordCopy, u32)>, JournalFault> {
        let mut found = None;
        for copy in self.copies(slot) {
            if copy.epoch.get() != epoch || copy.sequence.get() != slot {
                continue;
            }
            found = match found {
                None => Some((copy, 1)),
                Some((first, n)) if first == copy => Some((first, n + 1)),
                Some(_) => return Err(JournalFault::CopiesDiffer { record: slot }),
            };
        }
        Ok(found)
    }

    /// The header, if there is one.
    fn header(&self) -> Option<RecordCopy> {
        self.copies(0)
            .find(|r| r.kind.get() == RECORD_HEADER && r.sequence.get() == 0)
    }

    /// Over all slots, left-overs of compactions that never were included.
    fn highest_epoch(&self) -> u32 {
        let slots = u32::try_from(self.bytes.len() / RECORD_BYTES).unwrap_or(u32::MAX);
        (0..slots)
            .flat_map(|slot| self.copies(slot))
            .map(|r| r.epoch.get())
            .max()
            .unwrap_or(0)
    }

    /// Offsets of the copies in these slots that are not intact and whose first chunk, which has the
    /// checksum, is not blank.
    fn remnants(&self, slots: std::ops::Range<u32>) -> impl Iterator<Item = u64> {
        let copy_bytes = size_of::<RecordCopy>();
        let records = to_usize(u64::from(slots.start)) * RECORD_BYTES
            ..to_usize(u64::from(slots.end)) * RECORD_BYTES;
        let end = records.end.min(self.bytes.len());
        (records.start..end)
            .step_by(copy_bytes)
            .filter_map(move |at| {
                let copy = self.bytes.get(at..at + copy_bytes)?;
                let record = RecordCopy::read_from_bytes(copy).ok()?;
                let intact = record.crc32.get() == checksum(self.uuid, &record);
                let blank = copy[..REMNANT_BYTES].iter().all(|&b| b == 0);
                (!intact && !blank).then_some(self.at + to_u64(at))
            })
    }
}
