//! Reading the journal at open.

use std::borrow::Cow;
use std::io;

use zerocopy::FromBytes;

use super::{
    Change, Journal, JournalDamage, JournalFault, JournalPlace, Live, PAGE_BYTES, ReplayError,
    apply, checksum, encode, record_at,
};
use permafrost_layout::by_id::ById;
use permafrost_layout::ids::{CheckpointId, RegionUuid};
use permafrost_layout::{RECORD_BYTES, RECORD_HEADER, RecordCopy};
use permafrost_medium::convert::{to_u64, to_usize};
use permafrost_medium::{Flushed, LostPage, Medium, PAGE_SIZE};

/// Bytes to zero of a remnant: the chunk that is written atomically and has the checksum.
pub const REMNANT_BYTES: usize = 8;

/// A write of opening, which makes both copies of the journal whole again.
pub enum Repair {
    /// A copy of a record, at this offset.
    Record(u64, [u8; RECORD_BYTES]),
    /// A page that was lost, at this offset.
    Page(u64, Box<[u8; PAGE_SIZE]>),
    /// The first chunk of a torn copy, to be zeroed. A crash left it in another place than the last record's: a later
    /// record has chunks in common with the torn one (its epoch and place), and if a crash kept just those, it would
    /// complete the torn one.
    Remnant(u64),
}

/// The journal as found.
pub struct Replayed {
    /// The journal, which takes records.
    pub journal: Journal,
    /// True if a crash cut the last write short: that operation did not happen.
    pub torn: bool,
    /// To be written before anything is appended: first the copies of records and lost pages, then the remnants.
    pub repairs: Vec<Repair>,
    /// Number of records of which one copy was damaged.
    pub records_repaired: u64,
    /// Damage that no crash explains. The journal is not to be appended to before it was compacted.
    pub damage: Option<JournalDamage>,
}

/// Reads both halves and replays the active one. Writes nothing.
///
/// Damaged records are skipped: the readable ones count, in their order, and the report lists the others.
///
/// # Errors
/// [`ReplayError`].
pub fn replay(
    medium: &dyn Medium,
    place: &JournalPlace,
    uuid: RegionUuid,
) -> Result<Replayed, ReplayError> {
    // Lent, a journal for a million checkpoints takes no memory. Pages that are lost meanwhile read as zeros.
    if let Ok(halves) = Half::both(place, uuid, |at, len| lend(medium, at, len)) {
        let replayed = replay_halves(&halves, place, uuid);
        if medium.check(place.at, place.len_bytes()).is_ok() {
            return replayed;
        }
    }
    let halves = Half::both(place, uuid, |at, len| copy_pages(medium, at, len))?;
    replay_halves(&halves, place, uuid)
}

fn replay_halves(
    halves: &[Half<'_>; 2],
    place: &JournalPlace,
    uuid: RegionUuid,
) -> Result<Replayed, ReplayError> {
    let last_epoch = halves.iter().map(Half::highest_epoch).max().unwrap_or(0);
    let Some(start) = Start::choose(halves) else {
        return Err(ReplayError::Corrupt {
            at: place.at,
            fault: JournalFault::NoHeader,
        });
    };
    let active = &halves[usize::from(start.half)];
    let mut read = Records {
        half: start.half,
        ..Records::default()
    };
    read.damage.faults.extend(start.fault);
    read.all(active, start.epoch, start.compacted, place.records);

    // A crash while the next record was written leaves neither a valid copy nor the bytes before.
    let next = read.next;
    let torn = active
        .remnants(next..next.saturating_add(1))
        .next()
        .is_some();
    let idle = &halves[usize::from(1 - start.half)];
    let all = 0..place.records;
    let remnants = active
        .remnants(next..place.records)
        .chain(idle.remnants(all))
        .map(Repair::Remnant);
    let mut repairs = read.repairs;
    repairs.extend(halves.iter().flat_map(Half::lost_pages));
    repairs.extend(remnants);
    let journal = Journal {
        uuid,
        place: *place,
        half: start.half,
        epoch: start.epoch,
        last_epoch,
        next,
        live: read.live,
        next_order: read.next_order,
        compaction: None,
        compacts_at_once: false,
        flushed: Flushed::new(),
        failed: false,
        closed: false,
    };
    let is_damaged = !read.damage.faults.is_empty();
    Ok(Replayed {
        journal,
        torn: torn && !is_damaged,
        repairs,
        records_repaired: read.records_repaired,
        damage: is_damaged.then_some(read.damage),
    })
}

/// The half to be replayed.
struct Start {
    half: u8,
    epoch: u32,
    /// Records that were durable before the header was.
    compacted: u32,
    fault: Option<JournalFault>,
}

impl Start {
    fn choose(halves: &[Half<'_>; 2]) -> Option<Self> {
        // By header: a crash in a compaction before its header was durable leaves records after none, which do not
        // count; a crash after a flip, before the old header's erasure was durable, leaves two: the newer one counts.
        let by_header = (0..2_u8).zip(halves).filter_map(|(half, read)| {
            let header = read.header()?;
            Some(Self {
                half,
                epoch: header.epoch.get(),
                compacted: header.attrs.get(),
                fault: None,
            })
        });
        // Without a header: the half whose header is neither intact nor erased. With one, a header that merely is not
        // intact was being written when a crash came, and the other half counts; but one that cannot be read may
        // have been, and stands before the newer records, whether the erasure of the other was lost or not.
        let some_header = halves.iter().any(|half| half.header().is_some());
        let by_records = (0..2_u8).zip(halves).filter_map(|(half, read)| {
            let counts = if some_header {
                read.is_unreadable(0)
            } else {
                read.has_damaged_header()
            };
            (counts && read.header().is_none()).then_some(Self {
                half,
                epoch: read.highest_epoch(),
                compacted: 0,
                fault: Some(JournalFault::Header),
            })
        });
        let mut found: Vec<_> = by_header.chain(by_records).collect();
        found.sort_by_key(|start| (start.epoch, start.fault.is_none()));
        let newest = found.pop()?;
        // No two compactions have one epoch.
        let doubtful = found
            .last()
            .is_some_and(|other| other.epoch == newest.epoch);
        (!doubtful).then_some(newest)
    }
}

/// The changes that the records of a half make.
#[derive(Default)]
struct Records {
    live: ById<Live>,
    next_order: u64,
    /// Slot after the last one.
    next: u32,
    half: u8,
    repairs: Vec<Repair>,
    records_repaired: u64,
    damage: JournalDamage,
}

impl Records {
    fn all(&mut self, half: &Half<'_>, epoch: u32, compacted: u32, slots: u32) {
        let last = (0..slots).rev().find(|&slot| half.has(slot, epoch));
        // Compacted records were durable before the header was written: no crash takes them away.
        let sure = compacted.saturating_add(1).min(slots);
        let end = last.map_or(0, |last| last + 1).max(sure);
        for slot in 0..end {
            self.record(half, slot, epoch, compacted, last);
        }
        self.next = end;
        // Behind the last record there are none, but where the slots cannot be read there may be.
        let unreadable = (end..slots)
            .take_while(|&slot| half.is_unreadable(slot))
            .count();
        if let Ok(unreadable @ 1..) = u32::try_from(unreadable) {
            self.next = end + unreadable;
            self.damage.records_lost += u64::from(unreadable);
            self.damage.faults.push(JournalFault::Unreadable {
                first: end,
                last: end + unreadable - 1,
            });
        }
    }

    fn record(
        &mut self,
        half: &Half<'_>,
        slot: u32,
        epoch: u32,
        compacted: u32,
        last: Option<u32>,
    ) {
        let (record, copies) = match half.record(slot, epoch) {
            Ok(Some(found)) => found,
            // The header: its fault is known, or it would not be missing here.
            Ok(None) if slot == 0 => return,
            Ok(None) => {
                // Every record is durable before the next one is begun, and compacted ones before their header: no
                // crash explains it.
                let fault = match last.filter(|&last| last > slot) {
                    Some(_) if slot > compacted => JournalFault::Hole {
                        record: slot,
                        later: (slot..)
                            .find(|&later| half.has(later, epoch))
                            .unwrap_or(slot),
                    },
                    _ => JournalFault::Compacted {
                        record: slot,
                        compacted,
                    },
                };
                return self.lose(fault);
            }
            Err(fault) => return self.lose(fault),
        };
        if copies < 2 {
            // A crash that tore one copy of the last record, or a damaged one.
            self.records_repaired += 1;
            let bytes = encode(half.uuid, record);
            let at = to_usize(u64::from(slot)) * RECORD_BYTES;
            for copy in &half.copies {
                // One on a lost page is written with the page.
                if !copy.is_unreadable(slot)
                    && copy.bytes.get(at..at + RECORD_BYTES) != Some(&bytes)
                {
                    self.repairs
                        .push(Repair::Record(copy.at + to_u64(at), bytes));
                }
            }
        }
        if slot > 0 {
            self.change(slot, &record);
        }
    }

    fn lose(&mut self, fault: JournalFault) {
        self.damage.records_lost += 1;
        self.damage.faults.push(fault);
    }

    /// Applies a record. After lost records it may name a checkpoint that was sealed or deleted in one of them.
    fn change(&mut self, slot: u32, record: &RecordCopy) {
        let Some(change) = Change::from_record(record) else {
            return self.lose(JournalFault::Senseless { record: slot });
        };
        let known = |id: CheckpointId| self.live.contains_key(&id);
        let unknown = change.removes().into_iter().chain(change.touches());
        let unknown: Vec<_> = unknown.filter(|&id| !known(id)).collect();
        let again = change.is_taken(known);
        if (again || !unknown.is_empty()) && self.damage.records_lost == 0 {
            self.damage
                .faults
                .push(JournalFault::Senseless { record: slot });
        }
        match change {
            Change::Attrs { id, .. } if !unknown.is_empty() => {
                self.damage.checkpoints_lost.push(id);
            }
            _ => {}
        }
        if let Some(removed) = change.removes() {
            self.damage.checkpoints_lost.retain(|&lost| lost != removed);
        }
        apply(&mut self.live, change, self.next_order, (self.half, slot));
        self.next_order += 1;
    }
}

/// A copy of a half, as read.
struct HalfCopy<'m> {
    at: u64,
    bytes: Cow<'m, [u8]>,
    /// Pages of it that the medium returned an error for, ascending.
    unreadable: Vec<usize>,
}

impl HalfCopy<'_> {
    fn is_unreadable(&self, slot: u32) -> bool {
        let page = to_usize(u64::from(slot)) * RECORD_BYTES / PAGE_SIZE;
        self.unreadable.binary_search(&page).is_ok()
    }
}

/// Half of the journal, in two copies.
struct Half<'m> {
    uuid: RegionUuid,
    copies: [HalfCopy<'m>; 2],
}

/// Lends a copy of a half; fails if a page of it is known to be lost.
fn lend<'m>(medium: &'m dyn Medium, at: u64, len: usize) -> io::Result<HalfCopy<'m>> {
    // SAFETY: the journal is not written to before the region is open, and the slice does not live until then.
    let bytes = Cow::Borrowed(unsafe { medium.bytes(at, len)? });
    Ok(HalfCopy {
        at,
        bytes,
        unreadable: Vec::new(),
    })
}

/// Copies a half's copy page by page; lost ones are zeros.
fn copy_pages<'m>(medium: &dyn Medium, at: u64, len: usize) -> io::Result<HalfCopy<'m>> {
    let (mut bytes, mut unreadable) = (vec![0; len], Vec::new());
    for (page, bytes) in bytes.chunks_mut(PAGE_SIZE).enumerate() {
        if let Err(error) = medium.read(at + to_u64(page) * PAGE_BYTES, bytes) {
            LostPage::of(&error).ok_or(error)?;
            bytes.fill(0);
            unreadable.push(page);
        }
    }
    Ok(HalfCopy {
        at,
        bytes: Cow::Owned(bytes),
        unreadable,
    })
}

impl<'m> Half<'m> {
    fn both(
        place: &JournalPlace,
        uuid: RegionUuid,
        read: impl Fn(u64, usize) -> io::Result<HalfCopy<'m>>,
    ) -> io::Result<[Self; 2]> {
        let len = to_usize(place.half_bytes());
        let half = |half| {
            let copy = |copy| read(record_at(place, copy, half, 0), len);
            let copies = [copy(0)?, copy(1)?];
            io::Result::Ok(Self { uuid, copies })
        };
        Ok([half(0)?, half(1)?])
    }

    /// Returns true if neither copy of a slot can be read. A record is durable in both: where one can be read and has
    /// none, there was none, or it is damaged.
    fn is_unreadable(&self, slot: u32) -> bool {
        self.copies.iter().all(|copy| copy.is_unreadable(slot))
    }

    /// Returns the lost pages, with the intact records of the other copy.
    fn lost_pages(&self) -> impl Iterator<Item = Repair> {
        let both = [(0, 1), (1, 0)].into_iter();
        both.flat_map(|(lost, other)| {
            let (lost, other) = (&self.copies[lost], &self.copies[other]);
            lost.unreadable.iter().filter_map(|&page| {
                if other.unreadable.binary_search(&page).is_ok() {
                    return None;
                }
                let mut content = Box::new(*other.bytes.as_chunks::<PAGE_SIZE>().0.get(page)?);
                for copy in content.as_chunks_mut::<RECORD_BYTES>().0 {
                    if self.intact(copy).is_none() {
                        copy.fill(0);
                    }
                }
                Some(Repair::Page(lost.at + to_u64(page) * PAGE_BYTES, content))
            })
        })
    }

    /// Returns true if a slot has a record of this epoch, damaged in one copy at most or contradicting itself.
    fn has(&self, slot: u32, epoch: u32) -> bool {
        !matches!(self.record(slot, epoch), Ok(None))
    }

    /// Returns true if the header is neither intact nor erased.
    fn has_damaged_header(&self) -> bool {
        self.is_unreadable(0) || self.remnants(0..1).next().is_some()
    }

    fn intact(&self, bytes: &[u8]) -> Option<RecordCopy> {
        let record = RecordCopy::read_from_bytes(bytes).ok()?;
        (record.crc32.get() == checksum(self.uuid, &record)).then_some(record)
    }

    /// Returns the copies of a slot that are intact, of any epoch.
    fn copies(&self, slot: u32) -> impl Iterator<Item = RecordCopy> {
        let at = to_usize(u64::from(slot)) * RECORD_BYTES;
        let copies = self.copies.iter();
        copies.filter_map(move |copy| {
            let bytes = copy.bytes.get(at..at + RECORD_BYTES)?;
            // Most slots are blank.
            (!is_blank(bytes)).then(|| self.intact(bytes))?
        })
    }

    /// Returns the record of this epoch in a slot, and the number of its intact copies.
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

    /// Returns the header, if there is one.
    fn header(&self) -> Option<RecordCopy> {
        self.copies(0)
            .find(|r| r.kind.get() == RECORD_HEADER && r.sequence.get() == 0)
    }

    /// Returns the highest epoch of all slots, also of unfinished compactions.
    fn highest_epoch(&self) -> u32 {
        let slots = self.copies[0].bytes.len() / RECORD_BYTES;
        let slots = u32::try_from(slots).unwrap_or(u32::MAX);
        (0..slots)
            .flat_map(|slot| self.copies(slot))
            .map(|r| r.epoch.get())
            .max()
            .unwrap_or(0)
    }

    /// Offsets of the copies in these slots that are not intact and whose first chunk, which has the
    /// checksum, is not blank.
    fn remnants(&self, slots: std::ops::Range<u32>) -> impl Iterator<Item = u64> {
        slots.flat_map(move |slot| {
            let at = to_usize(u64::from(slot)) * RECORD_BYTES;
            self.copies.iter().filter_map(move |copy| {
                let bytes = copy.bytes.get(at..at + RECORD_BYTES)?;
                let is_remnant = !is_blank(bytes) && self.intact(bytes).is_none();
                is_remnant.then_some(copy.at + to_u64(at))
            })
        })
    }
}

/// Returns true if the chunk with the checksum is zero, which it is in no intact copy.
fn is_blank(copy: &[u8]) -> bool {
    copy[..REMNANT_BYTES].iter().all(|&byte| byte == 0)
}
