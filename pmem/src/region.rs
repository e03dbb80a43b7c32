//! A region: a formatted medium and the checkpoints in it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard, RwLock};

use crate::PAGE_BYTES;
use crate::alloc::Lease;
use crate::by_id::ById;
use crate::checkpoint::{CopyId, Sealed, StoredCheckpoint};
use crate::damage::{RegionFailure, UnreadableCheckpoint};
use crate::encrypted::Encryption;
use crate::error::{CloseError, FormatError, OpenError, ShadowError};
use crate::geometry::{Geometry, least_bytes};
use crate::ids::{CheckpointId, RegionUuid};
use crate::journal::{Change, Journal, JournalDamage, JournalError};
use crate::members::{FindMember, TierName};
use crate::recover::{RecoverOptions, RecoveryReport, RegionSummary, recover};
use crate::shadow::Shadow;
use crate::space::Space;
use crate::superblock::{self, SuperblockState};
use crate::table::SegmentTable;
use permafrost_cipher::{KeyId, Keyring};
use permafrost_liveness::{Liveness, MediumUsage, RegionUsage};
use permafrost_medium::{Flushed, MAX_MEDIA, Medium, MediumKind};

/// Options for formatting a region.
#[derive(Clone, Copy, Debug)]
pub struct FormatOptions {
    /// Bytes of a segment: a power of two from 64 KiB to 2 MiB. Default 1 MiB. Larger segments make runs longer, and
    /// give space back later, as a segment is free when no checkpoint has pages in it.
    pub segment_bytes: u32,
    /// Records in each of the two journal halves, a multiple of 32; two fewer are the most checkpoints
    /// there can be. Default: one for every 32 KiB, from 64 to 4,194,304; 256 bytes each in all.
    pub journal_records: Option<u32>,
    /// Names the region. Default: random.
    pub uuid: Option<RegionUuid>,
}

impl Default for FormatOptions {
    fn default() -> Self {
        Self {
            segment_bytes: 1 << 20,
            journal_records: None,
            uuid: None,
        }
    }
}

/// An open region. All methods may be called from any thread; readers never wait for writers.
pub struct Region {
    space: Arc<Space>,
    /// Held while an operation is decided and made durable.
    journal: Mutex<Journal>,
    /// Changed with the journal held, and only for an instant.
    checkpoints: RwLock<Checkpoints>,
    /// Damaged checkpoints, which cannot be read; changed as `checkpoints` is.
    damaged: RwLock<HashMap<CheckpointId, UnreadableCheckpoint>>,
    journal_damage: Option<JournalDamage>,
    unlisted: HashSet<CheckpointId>,
    superblock: Mutex<SuperblockState>,
    /// Reasons why media are not there, by number.
    problems: Mutex<BTreeMap<usize, String>>,
    /// Live pages, as the last survey has found them.
    liveness: Mutex<Liveness>,
    /// Copies of values that the two locks above guard, for [`Region::usage`], which must not wait for a fence.
    journal_position: AtomicU64,
    unsafe_shutdowns: u64,
}

impl Drop for Region {
    fn drop(&mut self) {
        // The checkpoints give their segments back with the region, which frees none.
        self.space.allocator().is_complete = false;
    }
}

/// Checkpoints that are passed over under one lock.
const LISTED_AT_ONCE: usize = 4096;

/// Sealed checkpoints by id and in the order of their seals.
struct Checkpoints {
    by_id: ById<Arc<Sealed>>,
    by_order: BTreeMap<u64, Arc<Sealed>>,
}

impl Checkpoints {
    fn new(by_id: ById<Arc<Sealed>>) -> Self {
        let mut in_order: Vec<_> = by_id.iter().map(|(_, sealed)| Arc::clone(sealed)).collect();
        in_order.sort_unstable_by_key(|sealed| sealed.order);
        let in_order = in_order.into_iter();
        Self {
            by_order: in_order.map(|sealed| (sealed.order, sealed)).collect(),
            by_id,
        }
    }

    fn insert(&mut self, sealed: Arc<Sealed>) {
        self.by_order.insert(sealed.order, Arc::clone(&sealed));
        self.by_id.insert(sealed.id(), sealed);
    }

    fn remove(&mut self, id: &CheckpointId) -> Option<Arc<Sealed>> {
        let removed = self.by_id.remove(id)?;
        self.by_order.remove(&removed.order);
        Some(removed)
    }
}

/// A checkpoint as [`Region::listed`] returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegionEntry {
    /// Id of the checkpoint in the region.
    pub id: CheckpointId,
    /// Attribute bits of the checkpoint, as last set.
    pub attrs: u32,
    /// Id of this copy.
    pub copy: CopyId,
    /// Number of segments with pages of the checkpoint, inherited ones included.
    pub segments: u64,
}

impl RegionEntry {
    fn of(sealed: &Arc<Sealed>) -> Self {
        Self {
            id: sealed.id(),
            attrs: sealed.attrs(),
            copy: CopyId::new(sealed.order),
            segments: sealed.segments(),
        }
    }
}

/// A checkpoint that the tables no longer have, intact or damaged.
pub(crate) type Forgotten = (Option<Arc<Sealed>>, Option<UnreadableCheckpoint>);

impl Region {
    /// Returns the size of the smallest medium that [`Region::format`] accepts with these options, bytes.
    #[must_use]
    pub fn least_bytes(options: &FormatOptions) -> u64 {
        least_bytes(options.segment_bytes, options.journal_records)
    }

    /// Makes an empty region of the medium, whatever was in it.
    ///
    /// # Errors
    /// [`FormatError`]; after anything but [`FormatError::Io`] nothing was written.
    pub fn format(medium: Arc<dyn Medium>, options: &FormatOptions) -> Result<(), FormatError> {
        let medium = &*medium;
        let geometry = Geometry::plan(
            medium.capacity_bytes(),
            options.segment_bytes,
            options.journal_records,
        )?;
        let uuid = options.uuid.unwrap_or_else(RegionUuid::random);
        // 1. No superblock: a crash from here to step 3 leaves no region, and neither half an old one.
        superblock::erase(medium)?;
        // 2. The journal and the segment table, durable before a superblock refers to them.
        let mut flushed = Flushed::new();
        Journal::format(medium, &geometry.journal(), uuid, &mut flushed)?;
        SegmentTable::format(medium, &geometry, &mut flushed)?;
        medium.fence(&mut flushed)?;
        // 3. The first superblock makes it a region.
        let guarantee = medium.guarantee();
        let is_fast = guarantee.kind == MediumKind::Dax || guarantee.volatile;
        let tier = TierName::known(usize::from(!is_fast));
        SuperblockState::new(uuid, geometry, tier).store(medium, &mut flushed)?;
        // 4. The second copy of the journal's header: before step 3 it could not be told from the remains of a region.
        Journal::write_first_header(medium, &geometry.journal(), uuid, 1, &mut flushed)?;
        medium.fence(&mut flushed)?;
        Ok(())
    }

    /// Reads a region's description, to decide whether to open the region. Reads the superblocks and the journal.
    ///
    /// # Errors
    /// The errors of [`Region::open`]. Nothing is written in any case.
    pub fn summary(medium: &dyn Medium) -> Result<RegionSummary, OpenError> {
        RegionSummary::read(medium)
    }

    /// Opens a region and recovers the state before a crash. Reads the superblocks, the journal and a page or two for
    /// every checkpoint.
    ///
    /// A checkpoint whose root is unreadable is set aside ([`Region::damaged`]) and the rest is opened. A region whose
    /// journal is damaged ([`Region::journal_damage`]) or cannot be written is opened as well, and takes no writes
    /// ([`Region::failure`]).
    ///
    /// # Errors
    /// [`OpenError`]; nothing was written.
    pub fn open(medium: Arc<dyn Medium>) -> Result<(Arc<Self>, RecoveryReport), OpenError> {
        Self::open_with(medium, RecoverOptions::default())
    }

    /// Opens a region as [`Region::open`] does, with options.
    ///
    /// # Errors
    /// The errors of [`Region::open`].
    pub fn open_with(
        medium: Arc<dyn Medium>,
        options: RecoverOptions,
    ) -> Result<(Arc<Self>, RecoveryReport), OpenError> {
        Self::open_all(medium, options, &mut |_| {
            Err("only the first medium was opened".to_owned())
        })
    }

    /// Opens a region as [`Region::open_with`] does, with its other media, which `find` opens. One that is not found is
    /// left out: its pages count as lost while it is, and it is not written to ([`Region::media`] has the reason).
    ///
    /// # Errors
    /// The errors of [`Region::open`].
    pub fn open_all(
        medium: Arc<dyn Medium>,
        options: RecoverOptions,
        find: &mut FindMember<'_>,
    ) -> Result<(Arc<Self>, RecoveryReport), OpenError> {
        let recovered = recover(medium, options, find)?;
        let geometry = &recovered.space.geometry;
        let liveness = Liveness::new(geometry.segments_at / PAGE_BYTES, geometry.segment_pages());
        let region = Self {
            journal_position: AtomicU64::new(recovered.journal.position()),
            unsafe_shutdowns: recovered.report.unsafe_shutdowns,
            space: recovered.space,
            journal: Mutex::new(recovered.journal),
            checkpoints: RwLock::new(Checkpoints::new(recovered.checkpoints)),
            damaged: RwLock::new(recovered.damaged),
            journal_damage: recovered.journal_damage,
            unlisted: recovered.unlisted,
            superblock: Mutex::new(recovered.superblock),
            problems: Mutex::new(recovered.joined.problems),
            liveness: Mutex::new(liveness),
        };
        (0..MAX_MEDIA).for_each(|number| region.space.populate(number));
        if region.failure().is_none() {
            // For information: an error is that of the superblock, and the region's failure.
            let _ = region.note_paths(&recovered.joined.paths);
            // An index that is copied while the region is closed is an older one from here on.
            for number in 1..MAX_MEDIA {
                if region.is_cold(number) {
                    let _ = region.advance_index(number);
                }
            }
        }
        Ok((Arc::new(region), recovered.report))
    }

    /// Returns the first medium that the region is on.
    #[must_use]
    pub fn medium(&self) -> &Arc<dyn Medium> {
        self.space.medium.first()
    }

    /// Returns all checkpoints, in the order of their seals.
    #[must_use]
    pub fn checkpoints(&self) -> Vec<Arc<StoredCheckpoint>> {
        self.in_order(StoredCheckpoint::of)
    }

    /// Returns what is known of all checkpoints without reading anything, in the order of their seals. Takes no
    /// references to them: much cheaper than [`Region::checkpoints`].
    #[must_use]
    pub fn listed(&self) -> Vec<RegionEntry> {
        self.in_order(RegionEntry::of)
    }

    /// Passes over all checkpoints in the order of their seals. Seals wait for a few thousand of them at most.
    fn in_order<T>(&self, of: impl Fn(&Arc<Sealed>) -> T) -> Vec<T> {
        let mut all = Vec::new();
        let mut next = 0;
        loop {
            let table = self.checkpoints.read();
            let part = table.by_order.range(next..).take(LISTED_AT_ONCE);
            let before = all.len();
            for (order, sealed) in part {
                next = order + 1;
                all.push(of(sealed));
            }
            if all.len() == before {
                return all;
            }
        }
    }

    /// Number of checkpoints, without damaged ones.
    #[must_use]
    pub fn count(&self) -> usize {
        self.checkpoints.read().by_id.len()
    }

    /// Returns the checkpoint with this id; `None` if there is none, or it is damaged.
    #[must_use]
    pub fn checkpoint(&self, id: CheckpointId) -> Option<Arc<StoredCheckpoint>> {
        self.checkpoints
            .read()
            .by_id
            .get(&id)
            .map(StoredCheckpoint::of)
    }

    /// Returns the ids and leases of all checkpoints, by the order of their seals.
    pub(crate) fn leases(&self) -> Vec<(u64, (CheckpointId, Arc<Lease>))> {
        self.in_order(|sealed| (sealed.order, (sealed.id(), Arc::clone(sealed.lease()))))
    }

    pub(crate) fn liveness(&self) -> MutexGuard<'_, Liveness> {
        self.liveness.lock()
    }

    /// Returns a number that ascends with each durable change of the region, over all times that it is opened. A
    /// region with a lower number than before is an older copy, or has lost its last changes. The lower 32 bits count
    /// the records of the active journal half.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.journal_position.load(Ordering::Relaxed)
    }

    /// Returns true if a checkpoint is listed, be it damaged.
    #[must_use]
    pub fn lists(&self, id: CheckpointId) -> bool {
        let damaged = self.damaged.read();
        damaged.contains_key(&id) || self.checkpoint(id).is_some()
    }

    /// Returns the checkpoints that are listed and cannot be read, in the order of their seals.
    #[must_use]
    pub fn damaged(&self) -> Vec<UnreadableCheckpoint> {
        let damaged = self.damaged.read();
        let mut all: Vec<_> = damaged.values().cloned().collect();
        drop(damaged);
        all.sort_unstable_by_key(|damaged| damaged.order);
        all
    }

    /// Returns the part of the journal that could not be read when the region was opened.
    #[must_use]
    pub const fn journal_damage(&self) -> Option<&JournalDamage> {
        self.journal_damage.as_ref()
    }

    /// Returns true if a checkpoint was found although no readable record names it ([`RecoverOptions::unlisted`]):
    /// its seal is in an unreadable one, or was cut short, or it was removed.
    #[must_use]
    pub fn is_unlisted(&self, id: CheckpointId) -> bool {
        self.unlisted.contains(&id)
    }

    /// Returns the reason why the region takes no more writes; `None` while it does.
    #[must_use]
    pub fn failure(&self) -> Option<&RegionFailure> {
        self.space.failure.get()
    }

    /// Pages that the medium could not give or take since the region was opened.
    #[must_use]
    pub fn lost_pages(&self) -> u64 {
        self.space.medium.lost_pages()
    }

    /// Begins a checkpoint. Any number of shadows may be written to at once.
    #[must_use]
    pub fn begin(self: &Arc<Self>) -> Shadow {
        Shadow::new(Arc::clone(self), None)
    }

    /// Deletes a checkpoint, durably. Its segments are reused once no reader and no other checkpoint
    /// has them.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn delete(&self, id: CheckpointId) -> Result<(), JournalError> {
        let mut journal = self.journal();
        self.note(journal.change(&self.space.medium, Change::Delete { id }))?;
        self.count_records(&journal);
        let deleted = self.forget(id);
        drop(journal);
        // Last, as it may free many segments; not before the record is durable.
        drop(deleted);
        Ok(())
    }

    /// Sets a checkpoint's attribute bits (see [`crate::ATTR_PINNED`]), durably.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn set_attrs(&self, id: CheckpointId, bits: u32) -> Result<(), JournalError> {
        let mut journal = self.journal();
        self.note(journal.change(&self.space.medium, Change::Attrs { id, bits }))?;
        self.count_records(&journal);
        let table = self.checkpoints.read();
        if let Some(sealed) = table.by_id.get(&id) {
            sealed.store_attrs(bits);
        }
        drop(table);
        let mut damaged = self.damaged.write();
        if let Some(damaged) = damaged.get_mut(&id) {
            damaged.attrs = bits;
        }
        Ok(())
    }

    /// Returns the space and journal records in use.
    #[must_use]
    pub fn usage(&self) -> RegionUsage {
        let segment_bytes = u64::from(self.space.geometry.segment_bytes);
        let allocator = self.space.allocator();
        let counts = allocator
            .order()
            .iter()
            .map(|&medium| allocator.count(medium));
        let segments = counts
            .map(|count| u64::from(count.slots - count.reserved))
            .sum();
        let free = allocator.free_for_dumps();
        drop(allocator);
        RegionUsage {
            capacity_bytes: segments * segment_bytes,
            free_bytes: u64::from(free) * segment_bytes,
            segments,
            segment_bytes,
            journal_records: self.position() & u64::from(u32::MAX),
            journal_capacity: u64::from(self.space.geometry.journal_records),
            unsafe_shutdowns: self.unsafe_shutdowns,
            uuid: self.space.uuid,
        }
    }

    /// Returns the room on each medium that dumps go to. Takes no lock that a change of the media holds.
    #[must_use]
    pub fn usage_of_media(&self) -> Vec<MediumUsage> {
        let segment_bytes = u64::from(self.space.geometry.segment_bytes);
        let allocator = self.space.allocator();
        let of = |&number: &usize| {
            let count = allocator.count(number);
            let spare = count.free.saturating_sub(count.reserved);
            MediumUsage {
                number,
                capacity_bytes: u64::from(count.slots - count.reserved) * segment_bytes,
                free_bytes: u64::from(spare) * segment_bytes,
                segment_bytes,
            }
        };
        allocator.order().iter().map(of).collect()
    }

    /// Bytes of the segments that would be free without this checkpoint.
    #[must_use]
    pub fn exclusive_bytes(&self, checkpoint: &StoredCheckpoint) -> u64 {
        checkpoint.lease().exclusive_bytes()
    }

    /// Marks the region as closed. Reading goes on; operations that would write are refused from now on, shadows not
    /// yet sealed included. Dropping a region does not close it.
    ///
    /// # Errors
    /// [`CloseError`]: the next open counts an unsafe shutdown.
    pub fn close(&self) -> Result<(), CloseError> {
        let mut journal = self.journal();
        match journal.check() {
            Ok(()) => {}
            Err(JournalError::Closed) => return Ok(()),
            Err(_) => return Err(CloseError::Failed),
        }
        let mut superblock = self.superblock.lock();
        let next = superblock.next(false, superblock.unsafe_shutdowns);
        // After an error, too: the superblock may already be marked as closed.
        journal.close();
        self.space.allocator().is_complete = false;
        next.store(&self.space.medium, &mut Flushed::new())?;
        *superblock = next;
        Ok(())
    }

    /// Keys that the region's pages can be read and written with. Pages under others are locked, and cost the rest
    /// nothing.
    #[must_use]
    pub fn keys(&self) -> &Keyring {
        &self.space.keys
    }

    /// Begins a checkpoint whose pages, maps and manifest are encrypted with a key; in the clear with `None`.
    ///
    /// # Errors
    /// [`ShadowError::Locked`]: the region was not given the key.
    pub fn begin_encrypted(self: &Arc<Self>, key: Option<KeyId>) -> Result<Shadow, ShadowError> {
        let key = key.map(|key| Encryption::of(&self.space.keys, key));
        Ok(Shadow::new(Arc::clone(self), key.transpose()?))
    }

    pub(crate) fn superblock(&self) -> MutexGuard<'_, SuperblockState> {
        self.superblock.lock()
    }

    pub(crate) fn problems(&self) -> MutexGuard<'_, BTreeMap<usize, String>> {
        self.problems.lock()
    }

    pub(crate) fn space(&self) -> &Arc<Space> {
        &self.space
    }

    pub(crate) fn journal(&self) -> MutexGuard<'_, Journal> {
        self.journal.lock()
    }

    /// Updates the copies of the journal's counts; to be called after each change of the journal.
    pub(crate) fn count_records(&self, journal: &Journal) {
        self.journal_position
            .store(journal.position(), Ordering::Relaxed);
    }

    /// Passes a result of the journal on; an error of the medium is the region's failure.
    pub(crate) fn note<T>(&self, result: Result<T, JournalError>) -> Result<T, JournalError> {
        if let Err(JournalError::Io(error)) = &result {
            self.space.fail("write the journal", error);
        }
        result
    }

    /// Makes a sealed checkpoint visible to readers; returns the replaced one, for the caller to drop.
    pub(crate) fn publish(
        &self,
        sealed: Arc<Sealed>,
        replaces: Option<CheckpointId>,
    ) -> Option<Forgotten> {
        let mut table = self.checkpoints.write();
        let mut damaged = self.damaged.write();
        let replaced = replaces.map(|id| (table.remove(&id), damaged.remove(&id)));
        table.insert(sealed);
        replaced
    }

    /// Takes a checkpoint from the tables, to be dropped by the caller once it holds no lock.
    fn forget(&self, id: CheckpointId) -> Forgotten {
        let mut table = self.checkpoints.write();
        let mut damaged = self.damaged.write();
        (table.remove(&id), damaged.remove(&id))
    }
}
