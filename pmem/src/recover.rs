//! Opening a region: recovers the sealed set after a crash.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::PAGE_BYTES;
use crate::alloc::{Allocator, Lease, to_extents};
use crate::by_id::ById;
use crate::checkpoint::{Sealed, StoredCheckpoint};
use crate::damage::UnreadableCheckpoint;
use crate::error::OpenError;
use crate::geometry::SUPERBLOCKS_BYTES;
use crate::ids::{CheckpointId, RegionUuid, SegmentNo};
use crate::journal::{self, Journal, JournalDamage, JournalError, Live, Repair, Replayed};
use crate::media;
use crate::members::{self, FindMember, HEADERS_BYTES, Joined};
use crate::readers::Readers;
use crate::root;
use crate::slots::Slots;
use crate::space::Space;
use crate::superblock::{self, Chosen, SuperblockState};
use crate::table::{Repairs, SegmentTable};
use permafrost_cipher::Keyring;
use permafrost_medium::convert::{to_u64, to_usize};
use permafrost_medium::{Flushed, LostPage, MEDIUM_SPAN, Medium, MediumSet};

/// Options for opening a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecoverOptions {
    /// True to write to a region although its journal is damaged. Checkpoints that were sealed in unreadable records
    /// are then lost for good: their segments are free. Default: false, such a region is for reading only.
    pub accept_loss: bool,
    /// True to write nothing, and to take no writes. Default: false.
    pub read_only: bool,
    /// True to look for checkpoints that no readable record names, if the journal is damaged
    /// ([`Region::is_unlisted`](crate::Region::is_unlisted)). Only with `read_only`; touches each page. Default:
    /// false.
    pub unlisted: bool,
}

impl RecoverOptions {
    /// Sets the option [`RecoverOptions::accept_loss`].
    #[must_use]
    pub const fn accept_loss(mut self, accept: bool) -> Self {
        self.accept_loss = accept;
        self
    }

    /// Sets the option [`RecoverOptions::read_only`].
    #[must_use]
    pub const fn read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only;
        self
    }

    /// Sets the option [`RecoverOptions::unlisted`].
    #[must_use]
    pub const fn unlisted(mut self, unlisted: bool) -> Self {
        self.unlisted = unlisted;
        self
    }
}

/// Findings of opening a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecoveryReport {
    /// True if the region had been closed. If not, it was in use when its host or process died.
    pub clean: bool,
    /// Number of times that the region had not been closed, this one included.
    pub unsafe_shutdowns: u64,
    /// Number of checkpoints found, without damaged ones.
    pub checkpoints: u64,
    /// Checkpoints that are listed and cannot be read ([`Region::damaged`](crate::Region::damaged)).
    pub damaged: u64,
    /// Bytes of free segments that are kept for the damaged checkpoints, as they may be theirs.
    pub withheld_bytes: u64,
    /// True if the last journal write was cut short: that operation did not happen.
    pub torn_record: bool,
    /// True if one superblock was unusable; the other one served, and the damaged one is rewritten.
    pub superblock_damaged: bool,
    /// Number of journal records with one damaged copy, rewritten from the other.
    pub records_repaired: u64,
    /// Root pages whose first copy is damaged; the second is read only then. Left as they are: sealed pages are never
    /// written to.
    pub root_copies_damaged: u64,
}

/// Contents of a region's superblocks and journal, read without opening it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RegionSummary {
    /// Name of the region.
    pub uuid: RegionUuid,
    /// Position that [`Region::position`](crate::Region::position) would return.
    pub position: u64,
    /// True if records of the journal cannot be read.
    pub journal_damaged: bool,
    listed: HashSet<CheckpointId>,
}

impl RegionSummary {
    /// Reads the superblocks and the journal, and writes nothing.
    pub(crate) fn read(medium: &dyn Medium) -> Result<Self, OpenError> {
        let (chosen, replayed) = read_journal(medium)?;
        Ok(Self {
            uuid: chosen.state.uuid,
            position: replayed.journal.position(),
            journal_damaged: replayed.damage.is_some(),
            listed: replayed.journal.live().iter().map(|(id, _)| *id).collect(),
        })
    }

    /// Returns true if a checkpoint is listed, be it damaged.
    #[must_use]
    pub fn lists(&self, id: CheckpointId) -> bool {
        self.listed.contains(&id)
    }
}

/// An open region's parts.
pub(crate) struct Recovered {
    pub(crate) space: Arc<Space>,
    pub(crate) journal: Journal,
    pub(crate) journal_damage: Option<JournalDamage>,
    pub(crate) superblock: SuperblockState,
    pub(crate) joined: Joined,
    pub(crate) checkpoints: ById<Arc<Sealed>>,
    pub(crate) damaged: HashMap<CheckpointId, UnreadableCheckpoint>,
    pub(crate) unlisted: HashSet<CheckpointId>,
    pub(crate) report: RecoveryReport,
}

/// Reads a region and marks it as open. O(checkpoints) page reads, and the journal.
///
/// The function reads and checks everything first, so a refusal has written nothing.
pub(crate) fn recover(
    medium: Arc<dyn Medium>,
    options: RecoverOptions,
    find: &mut FindMember<'_>,
) -> Result<Recovered, OpenError> {
    // 1. Superblocks, journal, the other media, and the segment table. The slots of a medium that is not there are
    //    counted, too: what is in them is not free.
    let (chosen, mut replayed) = read_journal(&*medium)?;
    let found = chosen.state;
    let medium = MediumSet::new(medium);
    let joined = members::join(&medium, &found.members, found.uuid, find);
    let geometry = found.geometry;
    let mut allocator = Allocator::new(geometry.segments);
    let slots = Slots::new(geometry.segment_bytes, geometry.segments_at, geometry.slots);
    allocator.extend_medium(0, geometry.slots);
    for member in found.members.iter() {
        let count = member.slots(geometry.segment_bytes);
        slots.set_count(member.number, count);
        allocator.extend_medium(member.number, count);
    }
    let (table, repairs) = SegmentTable::load(&medium, &geometry, slots, found.uuid)?;
    let space = Arc::new(Space {
        medium,
        geometry: found.geometry,
        uuid: found.uuid,
        keys: Keyring::default(),
        table,
        allocator: Mutex::new(allocator),
        readers: Readers::default(),
        moving: Mutex::default(),
        healed: AtomicU64::new(0),
        failure: OnceLock::new(),
    });

    // 2. Roots: the segments of each checkpoint. Segments of shadows that a crash or a shutdown cut short are in no
    //    root and therefore free, with nothing to undo.
    let mut roots = Roots::load(&space, replayed.journal.live(), !joined.problems.is_empty())?;
    let unlisted = if options.unlisted && options.read_only && replayed.damage.is_some() {
        roots.find_unlisted(&space, replayed.journal.next_order())
    } else {
        HashSet::new()
    };

    if replayed.damage.is_none() && roots.damaged.is_empty() {
        offer_tails(&space, std::mem::take(&mut roots.ends));
    }

    // 3. Write what opening changes. A medium that cannot take that can still be read.
    let unsafe_shutdowns = found.unsafe_shutdowns.saturating_add(u64::from(found.open));
    let mut superblock = found.clone();
    let written = if options.read_only {
        Err(io::Error::other("it was opened for reading only"))
    } else if let Some(damage) = replayed.damage.as_ref().filter(|_| !options.accept_loss) {
        // Nothing is written: segments that are free by this journal may belong to checkpoints that the unreadable
        // records sealed.
        let (records, first) = (damage.records_lost, &damage.faults[0]);
        Err(io::Error::other(format!(
            "the journal is damaged ({records} records cannot be read; first: {first})"
        )))
    } else {
        mark_open(&space, &mut replayed, &repairs, &found, unsafe_shutdowns).map(|state| {
            superblock = state;
            space.allocator().is_complete = true;
        })
    };
    if let Err(error) = written {
        space.fail("open the region for writing", &error);
        replayed.journal.fail();
    } else {
        repair_headers(&space, &found, &joined);
    }
    media::set_order(&superblock, &space);

    let report = RecoveryReport {
        clean: !found.open,
        unsafe_shutdowns,
        checkpoints: to_u64(roots.checkpoints.len()),
        damaged: to_u64(roots.damaged.len()),
        withheld_bytes: roots.withheld_bytes,
        torn_record: replayed.torn,
        superblock_damaged: chosen.other_damaged,
        records_repaired: replayed.records_repaired,
        root_copies_damaged: roots.copies_damaged,
    };
    Ok(Recovered {
        space,
        journal: replayed.journal,
        journal_damage: replayed.damage,
        superblock,
        joined,
        checkpoints: roots.checkpoints,
        damaged: roots.damaged,
        unlisted,
        report,
    })
}

/// Reads the superblocks and the journal.
fn read_journal(medium: &dyn Medium) -> Result<(Chosen, Replayed), OpenError> {
    // 1. Superblocks; a crash while one was written leaves the other.
    let chosen = superblock::load(medium)?;
    let found = &chosen.state;
    let (expected, capacity) = (found.geometry.end_bytes(), medium.capacity_bytes());
    if capacity < expected {
        return Err(OpenError::Truncated {
            expected,
            found: capacity,
        });
    }

    // 2. Journal: the live checkpoints. A crash while a record was written has it there or not there;
    //    a crash in a compaction leaves the half that was active before.
    let replayed = journal::replay(medium, &found.geometry.journal(), found.uuid)?;
    Ok((chosen, replayed))
}

/// The checkpoints that the journal lists.
#[derive(Default)]
struct Roots {
    checkpoints: ById<Arc<Sealed>>,
    damaged: HashMap<CheckpointId, UnreadableCheckpoint>,
    copies_damaged: u64,
    /// Segments that roots are in.
    ends: HashMap<SegmentNo, SegmentEnd>,
    /// Bytes of the segments that are kept for the damaged checkpoints.
    withheld_bytes: u64,
}

impl Roots {
    fn load(space: &Arc<Space>, live: &ById<Live>, is_partial: bool) -> Result<Self, OpenError> {
        let mut roots = Self::default();
        // In the order of their places: memory is read ahead.
        let mut in_order: Vec<_> = live.iter().collect();
        in_order.sort_unstable_by_key(|(_, live)| live.root.0);
        for (&id, live) in in_order {
            let root = match root::load(space, id, live.root, live.root_crc32, false) {
                Ok(root) => root,
                Err(error @ OpenError::RootCorrupt { .. }) => {
                    let damaged = UnreadableCheckpoint::new(id, live, error);
                    roots.damaged.insert(id, damaged);
                    continue;
                }
                Err(error) => return Err(error),
            };
            roots.copies_damaged += root.damaged_copies;
            if let Ok(place) = space.geometry.place(live.root, 2) {
                let end = roots.ends.entry(place.segment).or_default();
                end.page = end.page.max(place.page + 2 + root.pages_behind);
                end.roots += 1;
            }
            let lease = root::hold(space, &root);
            let manifest = (root.manifest, root.manifest_bytes);
            let place = (live.root, live.root_crc32);
            let (attrs, order) = (live.attrs, live.order);
            let sealed = Sealed::new(id, space, lease, place, manifest, attrs, order);
            roots.checkpoints.insert(id, Arc::new(sealed));
        }
        if !roots.damaged.is_empty() {
            let own = live.iter().filter(|(id, _)| roots.damaged.contains_key(id));
            let own = own.filter_map(|(_, live)| space.geometry.place(live.root, 2).ok());
            let own: HashSet<_> = own.map(|place| place.segment).collect();
            let withheld = Arc::new(withhold(space, &own, is_partial));
            roots.withheld_bytes = withheld.exclusive_bytes();
            for damaged in roots.damaged.values_mut() {
                damaged.withheld = Some(Arc::clone(&withheld));
            }
        }
        Ok(roots)
    }

    /// Adds checkpoints whose roots no record names, and returns their ids. Among them are removed ones whose
    /// segments are not overwritten yet, and ones whose seal was cut short.
    /// They come behind the others, from `order` on.
    fn find_unlisted(&mut self, space: &Arc<Space>, order: u64) -> HashSet<CheckpointId> {
        let mut found = HashSet::new();
        let mut orders = order..;
        for (id, page, crc32) in root::search(space) {
            if self.checkpoints.contains_key(&id) || self.damaged.contains_key(&id) {
                continue;
            }
            let Ok(root) = root::load(space, id, page, crc32, false) else {
                continue;
            };
            let lease = root::hold(space, &root);
            let manifest = (root.manifest, root.manifest_bytes);
            let Some(order) = orders.next() else { break };
            let sealed = Sealed::new(id, space, lease, (page, crc32), manifest, 0, order);
            let sealed = Arc::new(sealed);
            // Otherwise it was removed, and overwritten since.
            let manifest = StoredCheckpoint::of(&sealed).manifest();
            if manifest.map_or_else(|error| error.locked().is_some(), |_| true) {
                self.checkpoints.insert(id, sealed);
                found.insert(id);
            }
        }
        found
    }
}

/// Roots in a segment.
#[derive(Default)]
struct SegmentEnd {
    /// Place behind the pages of the checkpoint whose root is the last in the segment.
    page: u32,
    /// Number of roots.
    roots: u32,
}

/// Offers the tails of segments. A checkpoint's last segment is the one with its root, which says how many of its pages
/// are behind it. So a segment ends there behind its last root: if all its holders have their roots there. Another one
/// may refer to pages behind it, which a removed checkpoint wrote.
fn offer_tails(space: &Space, ends: HashMap<SegmentNo, SegmentEnd>) {
    for (segment, end) in ends {
        if space.allocator().holders(segment) == end.roots {
            space.offer_tail(segment, end.page);
        }
    }
}

/// Takes hold of the free segments that a damaged root may name. The header of a segment that becomes free is
/// blanked, so these are the ones whose header is not: the damaged checkpoint's own, those of dumps that a crash cut
/// short, and those whose blanking a crash undid. And of the `own` ones that damaged roots are in, as other
/// checkpoints that hold them may be removed. While a medium is not there the roots on it are not lost, so all
/// segments are kept that they may share.
fn withhold(space: &Arc<Space>, own: &HashSet<SegmentNo>, held_too: bool) -> Lease {
    let all = (0..space.table.len()).map(SegmentNo);
    let free = |segment: &SegmentNo| space.allocator().is_free(*segment);
    let withheld = |segment: &SegmentNo| match free(segment) {
        true => own.contains(segment) || space.is_written(*segment) && is_alone(space, *segment),
        false => own.contains(segment) || held_too,
    };
    let used: Vec<_> = all.filter(withheld).map(|segment| segment.0).collect();
    Lease::recover(space, to_extents(used.into_iter()))
}

/// Returns true if a free segment may be where its entry says: a whole one has its slot to itself, so the entry is from
/// before if another segment is there.
fn is_alone(space: &Space, segment: SegmentNo) -> bool {
    let position = space.table.position(segment);
    let slot = position.and_then(|at| space.table.slots().of(at.header_at));
    let is_packed = position.is_some_and(|at| at.packed_pages.is_some());
    is_packed || slot.is_some_and(|slot| space.allocator().occupants(slot) == 0)
}

/// Writes headers of media anew of which one copy is damaged. A medium that does not take that can still be read.
fn repair_headers(space: &Space, found: &SuperblockState, joined: &Joined) {
    for &number in &joined.damaged_headers {
        if let (Some(member), Some(medium)) = (found.members.get(number), space.medium.get(number))
        {
            let segment_bytes = space.geometry.segment_bytes;
            let written = members::write_header(&*medium, space.uuid, member, segment_bytes, false);
            // The other copy serves.
            drop(written);
        }
    }
}

/// Makes durable what opening has read, and goes on from. A process that was killed leaves writes in the caches that it
/// had not waited for: they are read like any others, and a power cut undoes them.
fn fence_found(space: &Space, found: &SuperblockState) -> io::Result<()> {
    let geometry = &space.geometry;
    // After a clean close too: a dropped shadow has written entries that no fence waited for.
    let mut ranges = vec![
        (0, 0, SUPERBLOCKS_BYTES),
        (0, geometry.table_at, 2 * geometry.table_bytes()),
    ];
    if found.open {
        ranges.push((0, geometry.journal_at, geometry.journal().len_bytes()));
        let headers = found.members.iter();
        ranges.extend(headers.map(|member| (member.number, 0, HEADERS_BYTES)));
    }
    let mut flushed = Flushed::new();
    for (number, at, len_bytes) in ranges {
        let Some(medium) = space.medium.get(number) else {
            continue;
        };
        // A lost page has nothing that could be made durable.
        let step = match medium.check(at, len_bytes) {
            Ok(()) => len_bytes,
            Err(_) => PAGE_BYTES,
        };
        let base = to_u64(number) * MEDIUM_SPAN;
        for at in (at..at + len_bytes).step_by(to_usize(step)) {
            match space.medium.flush(base + at, step, &mut flushed) {
                Err(error) if LostPage::of(&error).is_some() => {}
                result => result?,
            }
        }
    }
    space.medium.fence(&mut flushed)
}

/// Writes the changes of recovery: 1. repaired records and pages, 2. remnants, 3. entries of the segment table, 4.
/// after damage the compacted journal, 5. the superblock.
fn mark_open(
    space: &Space,
    replayed: &mut Replayed,
    repairs: &Repairs,
    found: &SuperblockState,
    unsafe_shutdowns: u64,
) -> io::Result<SuperblockState> {
    fence_found(space, found)?;
    let mut flushed = Flushed::new();
    // 1. Repair records of which a crash left one copy, and pages of the journal that were lost. Writing equal bytes over an
    //    intact record changes no chunk of it, so a crash here cannot lose it.
    // 2. Zero the first chunk of torn records that crashes left, so that no later record that is torn in its turn
    //    completes them. A crash here leaves a chunk as it is or zero: still torn.
    for repair in &replayed.repairs {
        let (at, bytes): (_, &[u8]) = match repair {
            Repair::Record(at, record) => (*at, record),
            Repair::Page(at, page) => {
                // SAFETY: no other code has the region yet, and no slice of the journal is lent.
                unsafe { space.medium.rewrite_page(*at, page)? };
                continue;
            }
            Repair::Remnant(at) => (*at, &[0; journal::REMNANT_BYTES]),
        };
        // SAFETY: as above.
        unsafe { space.medium.write(at, bytes)? };
        space.medium.flush(at, to_u64(bytes.len()), &mut flushed)?;
    }

    // 3. Make the copies of entries equal that a crash in the middle of a move left different: the place that does not
    //    count is free from here on. A crash here leaves one of them as it was, and the same choice.
    let is_free = |segment| space.allocator().is_free(segment);
    space
        .table
        .repair(&space.medium, repairs, is_free, &mut flushed)?;

    // 4. Leave a damaged half behind: write the state of its readable records to the other one.
    if replayed.damage.is_some() {
        space.medium.fence(&mut flushed)?;
        let compacted = replayed.journal.compact(&space.medium);
        compacted.map_err(|error| match error {
            JournalError::Io(error) => error,
            other => io::Error::other(other),
        })?;
    }

    // 5. Mark the region as open, in the superblock that was not chosen. A crash while it is written
    //    leaves the chosen one: the next open counts this one as never having happened.
    let superblock = found.next(true, unsafe_shutdowns);
    // Its fence is for steps 1 to 3, too; nothing is appended before it.
    superblock.store(&space.medium, &mut flushed)?;
    Ok(superblock)
}
