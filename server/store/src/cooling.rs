//! Cooling: parts of checkpoints that nobody uses move to slower tiers of the region, and those of checkpoints that are
//! often restored back to the fastest one. `permafrost-cooling` decides what moves; this module gathers what it decides
//! by, and `permafrost-pmem` moves slots.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use permafrost_cooling::{
    CoolingRules, MediumRoom, Move, Restores, SlotUse, Tiers, plan, plan_down, plan_up,
};
use permafrost_pmem::{
    CleanError, MediaError, MediumState, OccupiedSlot, RegionMedium, SegmentNo, StoredCheckpoint,
    Survey,
};
use permafrost_protocol::control::request;
use permafrost_protocol::manifest::CheckpointRef;

use super::clean::{LastSurvey, map_roots};
use super::error::{MissingObject, ReadingError, RegionMediaError};
use super::in_use::{ReadGuard, Reads};
use super::{ProgressReceiver, Store, StoreError};
use crate::clock::unix_ms;

/// Longest part of the time that deciding what moves may take in the background: one of so many.
const PLAN_PARTS: u32 = 8;

/// Longest time in which a pass in the background moves segments.
const LONGEST_PASS: Duration = Duration::from_secs(60);

/// Time between two lists of the object stores for objects that crashes have left; those of removed checkpoints are
/// known without one.
const LIST_EVERY: Duration = Duration::from_secs(86_400);

/// Time after which a store that was away is listed again.
const LIST_AGAIN: Duration = Duration::from_secs(3600);

/// Least time between two decisions in the background.
const LEAST_PAUSE: Duration = Duration::from_secs(10);

/// Rules of cooling, and the uses of checkpoints that it decides by.
pub(super) struct CoolingState {
    rules: Mutex<CoolingRules>,
    /// Restores of checkpoints since the store was opened, by id.
    restores: Mutex<Restores>,
    /// Time at which the store was opened: what is not in the catalog counts as used then.
    opened: Instant,
    /// Checkpoints that are being read, or that dumps are compared with.
    held: Arc<Reads>,
    /// Room on media that recalls under way will fill, by number, in bytes.
    promised: Mutex<HashMap<usize, u64>>,
    /// Time of the next list of the object stores; `None`: at once.
    next_list: Mutex<Option<Instant>>,
}

/// Room that recalls were promised, until this is dropped.
struct Promise<'a> {
    promised: &'a Mutex<HashMap<usize, u64>>,
    medium: usize,
    bytes: u64,
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        if let Some(promised) = self.promised.lock().get_mut(&self.medium) {
            *promised = promised.saturating_sub(self.bytes);
        }
    }
}

/// Uses of a segment: that of the checkpoint with pages in it which was used last.
#[derive(Clone, Copy)]
struct SegmentUse {
    idle: Duration,
    in_newest: bool,
}

/// Slots, and where they are to go.
#[derive(Default)]
struct Planned {
    slots: Vec<OccupiedSlot>,
    moves: Vec<Move>,
    /// True if they move to slower tiers: then what a reader holds stays.
    down: bool,
}

impl CoolingState {
    pub(super) fn new(rules: CoolingRules) -> Self {
        Self {
            rules: Mutex::new(rules),
            restores: Mutex::default(),
            opened: Instant::now(),
            held: Arc::default(),
            promised: Mutex::default(),
            next_list: Mutex::default(),
        }
    }

    /// Keeps a checkpoint from being cooled until the result is dropped, and records that it is used.
    pub(super) fn hold(&self, id: &str) -> ReadGuard {
        self.restores.lock().begin(id, Instant::now());
        self.held.begin(id, false)
    }

    /// Records that a checkpoint is restored.
    pub(super) fn record(&self, id: &str) {
        self.restores.lock().record(id, Instant::now());
    }
}

impl Store {
    /// Replaces the rules by which segments move to slower tiers; they hold from the next decision on.
    pub fn set_cooling(&self, rules: CoolingRules) {
        *self.cooling.rules.lock() = rules;
    }

    /// Moves segments to slower tiers by the rules, or those of one checkpoint to the next slower tier.
    ///
    /// # Errors
    /// No such checkpoint; a medium or the segment table fails, or the region takes no writes.
    pub(super) fn cool(
        &self,
        request: &request::Media,
        progress: ProgressReceiver<'_>,
    ) -> Result<u64, StoreError> {
        let _cleaning = self.lock_cleaning();
        let planned = match request.checkpoint.as_str() {
            "" => self.plan_cooling()?,
            name => {
                let mut planned = self.plan_for(&*self.checkpoint_named(name)?, plan_down);
                planned.down = true;
                planned
            }
        };
        self.move_planned(&planned, request.dry_run, progress)
    }

    /// Moves the segments of a checkpoint to the fastest tier with room.
    ///
    /// # Errors
    /// Those of [`Store::cool`].
    pub(super) fn warm(
        &self,
        request: &request::Media,
        progress: ProgressReceiver<'_>,
    ) -> Result<u64, StoreError> {
        let checkpoint = self.checkpoint_named(&request.checkpoint)?;
        let _cleaning = self.lock_cleaning();
        let up = |tiers, slots: &[SlotUse]| plan_up(tiers, slots, None);
        let planned = self.plan_for(&checkpoint, up);
        if !request.dry_run {
            // It counts as used, and does not cool again at once.
            self.cooling.record(&checkpoint.id().to_string());
        }
        drop(checkpoint);
        self.move_planned(&planned, request.dry_run, progress)
    }

    /// Moves segments by the rules, and what is often restored back, a step at a time. Returns true if it moved
    /// anything.
    ///
    /// # Errors
    /// Those of [`Store::cool`].
    pub(super) fn cool_some(
        &self,
        last: &mut LastSurvey,
        stopped: &dyn Fn() -> bool,
    ) -> Result<bool, StoreError> {
        let too_soon = last.next_cooling.is_some_and(|next| Instant::now() < next);
        if too_soon || self.tiers().count() < 2 || self.region.failure().is_some() {
            return Ok(false);
        }
        let began = Instant::now();
        let mut planned = vec![self.plan_cooling()?];
        let within = self.cooling.rules.lock().above_percent;
        let often = self.cooling.restores.lock().take_often();
        for id in often {
            // Removed since, or damaged.
            if let Ok(checkpoint) = self.checkpoint(&id) {
                let up = |tiers, slots: &[SlotUse]| plan_up(tiers, slots, within);
                planned.push(self.plan_for(&checkpoint, up));
            }
        }
        planned
            .iter()
            .for_each(|planned| self.retire_tails(planned));
        let pause = began.elapsed().saturating_mul(PLAN_PARTS).max(LEAST_PAUSE);
        last.next_cooling = Instant::now().checked_add(pause);
        let (mut moves, mut moved) = (
            planned
                .iter()
                .flat_map(|planned| planned.moves.iter().map(move |m| (planned, m))),
            0,
        );
        let mut survey = None;
        self.work_in_steps(stopped, &mut || {
            // The survey keeps what is removed from becoming free, and what was decided grows old: the rest is planned
            // anew at the next pass.
            if began.elapsed() > LONGEST_PASS {
                return Ok(true);
            }
            let Some((planned, next)) = moves.next() else {
                return Ok(true);
            };
            moved += self.move_one(planned, next, &mut survey)?;
            Ok(false)
        })?;
        drop(survey);
        if moved > 0 {
            tracing::info!(
                event = "tiering-done",
                moved,
                "segments moved between tiers"
            );
        }
        Ok(moved > 0)
    }

    /// Removes objects that nothing needs. Asks the object store: to be called without a lock.
    pub(super) fn sweep_objects(&self, stopped: &dyn Fn() -> bool) {
        if !self.region.has_cold() {
            return;
        }
        let now = Instant::now();
        let next = *self.cooling.next_list.lock();
        let list = next.is_none_or(|next| next <= now);
        let swept = self.region.sweep_cold(list, stopped);
        if list {
            let pause = swept.as_ref().map_or(LIST_AGAIN, |_| LIST_EVERY);
            *self.cooling.next_list.lock() = now.checked_add(pause);
        }
        if let Err(error) = swept {
            // Tried again at the next pass: what is left takes room only.
            let error: &dyn std::error::Error = &error;
            tracing::warn!(
                event = "objects-not-removed",
                error,
                "objects that nothing needs not removed"
            );
        }
    }

    /// Moves what was planned, all at once, or only counts it.
    fn move_planned(
        &self,
        planned: &Planned,
        dry_run: bool,
        progress: ProgressReceiver<'_>,
    ) -> Result<u64, StoreError> {
        let segment_bytes = self.region.usage().segment_bytes;
        let total = planned.moves.len() as u64 * segment_bytes;
        if dry_run {
            return Ok(total);
        }
        self.check_writable()?;
        self.retire_tails(planned);
        let (mut moved, mut survey) = (0, None);
        for next in &planned.moves {
            moved += self.move_one(planned, next, &mut survey)?;
            progress(moved, total);
        }
        Ok(moved)
    }

    /// Moves segments of a checkpoint that are in an object store to the fastest tier with room. Those for which there
    /// is none stay, and are read where they are.
    ///
    /// # Errors
    /// The store is away or its objects are damaged.
    pub(super) fn recall(&self, checkpoint: &StoredCheckpoint) -> Result<(), StoreError> {
        // Of those that stay one is fetched now: a reader should not begin if the store is away.
        match self.recall_most(checkpoint)?.first() {
            Some(slot) => {
                let there = self.region.probe_slot(slot).map_err(MediaError::Store);
                Ok(there.map_err(RegionMediaError::from)?)
            }
            None => Ok(()),
        }
    }

    /// Moves segments of a checkpoint that are in an object store to the fastest tier with room, for a dump to be
    /// compared with: that does not wait for a store.
    ///
    /// # Errors
    /// Those of [`Store::recall`]; there is no room for all of them.
    pub(super) fn recall_all(&self, checkpoint: &StoredCheckpoint) -> Result<(), StoreError> {
        let left = self.recall_most(checkpoint)?;
        if left.is_empty() {
            return Ok(());
        }
        let full = RegionMediaError::NoRoomToRecall {
            checkpoint: checkpoint.id().to_string(),
            needed: left.len() as u64 * self.region.usage().segment_bytes,
        };
        Err(full.into())
    }

    /// Moves segments of a checkpoint that are in an object store to the fastest tier with room. Returns the slots for
    /// which there is none.
    fn recall_most(&self, checkpoint: &StoredCheckpoint) -> Result<Vec<OccupiedSlot>, StoreError> {
        if !self.region.has_cold() {
            return Ok(Vec::new());
        }
        let slots = self.region.slots_out(checkpoint);
        // A region that takes no writes is read where it is.
        if slots.is_empty() || self.region.failure().is_some() {
            return Ok(slots);
        }
        let uses: Vec<_> = slots.iter().map(unaged).collect();
        let (moves, promises) = self.plan_recall(&uses);
        let planned = Planned {
            slots,
            moves,
            down: false,
        };
        let (began, mut bytes) = (Instant::now(), 0);
        for (next, promise) in planned.moves.iter().zip(promises) {
            // A dump may have taken the room meanwhile: then it stays where it is.
            bytes += self.move_one(&planned, next, &mut None)?;
            drop(promise);
        }
        if bytes > 0 {
            self.observer.recalled(bytes, began.elapsed());
        }
        Ok(self.region.slots_out(checkpoint))
    }

    /// Plans moves to media that are no object stores, into room that no other recall was promised.
    fn plan_recall(&self, uses: &[SlotUse]) -> (Vec<Move>, Vec<Promise<'_>>) {
        let bytes = self.region.usage().segment_bytes;
        let mut promised = self.cooling.promised.lock();
        let mut rooms = self.rooms();
        rooms.retain(|room| !self.region.is_cold(room.number));
        for room in &mut rooms {
            let taken = promised.get(&room.number).copied().unwrap_or(0);
            room.free_bytes = room.free_bytes.saturating_sub(taken);
        }
        let moves = plan_up(Tiers::new(&rooms, bytes), uses, None);
        let promises = moves.iter().map(|next| {
            *promised.entry(next.to).or_default() += bytes;
            Promise {
                promised: &self.cooling.promised,
                medium: next.to,
                bytes,
            }
        });
        let promises = promises.collect();
        drop(promised);
        (moves, promises)
    }

    /// Makes a planned move; returns the bytes moved: none if what was to move has gone, if a reader has what is to
    /// move to a slower tier, or what had room has none any more. To a cold medium it needs a survey, which is made
    /// once.
    fn move_one(
        &self,
        planned: &Planned,
        next: &Move,
        survey: &mut Option<Survey>,
    ) -> Result<u64, StoreError> {
        let (slot, to) = (&planned.slots[next.slot], next.to);
        // Planned some time ago, maybe.
        if planned.down && is_in(slot, &self.segments_held()) {
            return Ok(0);
        }
        let moved = if self.region.is_cold(to) {
            let survey = survey.get_or_insert_with(|| self.region.survey(&map_roots));
            // A reader may begin while the object store is asked.
            let may_cool = || !planned.down || !is_in(slot, &self.segments_held());
            self.region.cool_slot(survey, slot, to, &may_cool)
        } else {
            self.region.move_slot(slot, to)
        };
        let moved = match moved {
            Err(MediaError::Clean(CleanError::Full)) => 0,
            moved => moved.map_err(RegionMediaError::from)?,
        };
        self.counters.tiered_bytes.add(moved);
        Ok(moved)
    }

    /// Lets no dump go on in segments that are to move to an object store: they could not be moved there for as long as
    /// there are small dumps.
    fn retire_tails(&self, planned: &Planned) {
        let to_cold = planned
            .moves
            .iter()
            .filter(|next| self.region.is_cold(next.to));
        let slots: Vec<_> = to_cold.map(|next| &planned.slots[next.slot]).collect();
        if !slots.is_empty() {
            self.region.retire_tails(&slots);
        }
    }

    /// Returns the segments of checkpoints that are being read, or that dumps are compared with.
    fn segments_held(&self) -> HashSet<SegmentNo> {
        let mut ids = self.reads.all();
        ids.extend(self.cooling.held.all());
        let checkpoints = ids.iter().filter_map(|id| self.checkpoint(id).ok());
        let segments = checkpoints.flat_map(|found| found.segment_numbers().collect::<Vec<_>>());
        segments.collect()
    }

    /// Returns the ids of the checkpoints with pages in some segments.
    pub(super) fn ids_with(&self, segments: &HashSet<SegmentNo>) -> Vec<String> {
        if segments.is_empty() {
            return Vec::new();
        }
        let has_one = |id: &permafrost_pmem::CheckpointId| {
            let checkpoint = self.region.checkpoint(*id);
            checkpoint.is_some_and(|found| found.segment_numbers().any(|s| segments.contains(&s)))
        };
        let ids = self.region.listed().into_iter().map(|entry| entry.id);
        ids.filter(has_one).map(|id| id.to_string()).collect()
    }

    fn plan_cooling(&self) -> Result<Planned, StoreError> {
        let tiers = self.tiers();
        if tiers.count() < 2 {
            return Ok(Planned::default());
        }
        let slots = self.region.occupied_slots();
        let used = self.segment_uses()?;
        let held = self.segments_held();
        let uses = slots.iter().map(|slot| slot_use(slot, &used, &held));
        let moves = plan(&self.cooling.rules.lock(), tiers, &uses.collect::<Vec<_>>());
        Ok(Planned {
            slots,
            moves,
            down: true,
        })
    }

    /// Plans moves of the slots with segments of a checkpoint.
    fn plan_for(
        &self,
        checkpoint: &StoredCheckpoint,
        plan: impl FnOnce(Tiers, &[SlotUse]) -> Vec<Move>,
    ) -> Planned {
        let own: std::collections::HashSet<SegmentNo> = checkpoint.segment_numbers().collect();
        let has_own = |slot: &OccupiedSlot| slot.segments().iter().any(|s| own.contains(s));
        let mut slots = self.region.occupied_slots();
        slots.retain(has_own);
        let uses: Vec<_> = slots.iter().map(unaged).collect();
        let moves = plan(self.tiers(), &uses);
        Planned {
            slots,
            moves,
            down: false,
        }
    }

    /// Returns the media that segments can be moved to, by tier.
    fn tiers(&self) -> Tiers {
        Tiers::new(&self.rooms(), self.region.usage().segment_bytes)
    }

    fn rooms(&self) -> Vec<MediumRoom<SpeedKey>> {
        let media = self.region.media().into_iter();
        let usable = media.filter(|m| m.state == MediumState::Active && m.guarantee.is_some());
        let room = |medium: RegionMedium| MediumRoom {
            number: medium.number,
            tier: SpeedKey::of(&medium),
            capacity_bytes: medium.capacity_bytes,
            free_bytes: medium.free_bytes,
        };
        usable.map(room).collect()
    }

    /// Returns when each segment was used last, by the checkpoints that hold it.
    fn segment_uses(&self) -> Result<HashMap<SegmentNo, SegmentUse>, StoreError> {
        let (now, now_ms) = (Instant::now(), unix_ms());
        let records = self.catalog.list(None)?;
        let mut newest: HashMap<&str, u64> = HashMap::new();
        for record in &records {
            let newest = newest.entry(&record.job).or_default();
            *newest = record.generation.max(*newest);
        }
        let dumped: HashMap<&str, SegmentUse> = records
            .iter()
            .map(|record| {
                let idle_ms = now_ms.saturating_sub(record.created_unix_ms);
                let used = SegmentUse {
                    idle: Duration::from_millis(idle_ms),
                    // So are all parked ones, which have no job and generation 0.
                    in_newest: newest.get(&*record.job) == Some(&record.generation),
                };
                (record.id.as_str(), used)
            })
            .collect();
        let restored = self.cooling.restores.lock().clone();
        let unlisted = SegmentUse {
            idle: now - self.cooling.opened,
            in_newest: false,
        };
        let mut uses: HashMap<SegmentNo, SegmentUse> = HashMap::new();
        for entry in self.region.listed() {
            let Some(checkpoint) = self.region.checkpoint(entry.id) else {
                continue;
            };
            let id = entry.id.to_string();
            let mut used = dumped.get(id.as_str()).copied().unwrap_or(unlisted);
            if let Some(idle) = restored.idle(&id, now) {
                used.idle = used.idle.min(idle);
            }
            for segment in checkpoint.segment_numbers() {
                let all = uses.entry(segment).or_insert(used);
                all.idle = all.idle.min(used.idle);
                all.in_newest |= used.in_newest;
            }
        }
        let mut restores = self.cooling.restores.lock();
        restores.retain(|id| dumped.contains_key(id));
        drop(restores);
        Ok(uses)
    }

    /// Returns this store's copy of `JOB` or `JOB@GEN`.
    fn checkpoint_named(&self, name: &str) -> Result<std::sync::Arc<StoredCheckpoint>, StoreError> {
        let parsed: CheckpointRef = name.parse().map_err(|source| ReadingError::Reference {
            reference: name.to_owned(),
            source,
        })?;
        let record = self.record(parsed.job.as_str(), parsed.generation)?;
        let missing = || StoreError::NotFound(MissingObject::Checkpoint(name.to_owned()));
        self.checkpoint(&record.ok_or_else(missing)?.id)
    }
}

/// Returns true if a segment of a slot is one of some.
fn is_in(slot: &OccupiedSlot, segments: &HashSet<SegmentNo>) -> bool {
    slot.segments()
        .iter()
        .any(|segment| segments.contains(segment))
}

/// Returns the use of a slot; it stays if one of its segments is `held`, or is of no checkpoint: a dump or a reader has
/// it.
fn slot_use(
    slot: &OccupiedSlot,
    uses: &HashMap<SegmentNo, SegmentUse>,
    held: &HashSet<SegmentNo>,
) -> SlotUse {
    let all = slot.segments().iter().map(|s| uses.get(s));
    let all: Option<Vec<_>> = match is_in(slot, held) {
        true => None,
        false => all.collect(),
    };
    let last = all
        .as_ref()
        .and_then(|all| all.iter().map(|used| used.idle).min());
    SlotUse {
        medium: slot.medium(),
        idle: last,
        in_newest: all.is_some_and(|all| all.iter().any(|used| used.in_newest)),
    }
}

/// Returns a slot of which only the place matters.
fn unaged(slot: &OccupiedSlot) -> SlotUse {
    SlotUse {
        medium: slot.medium(),
        idle: None,
        in_newest: false,
    }
}

/// Orders tiers, the fastest first, and cold ones last.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SpeedKey(bool, usize, String);

impl SpeedKey {
    pub(super) fn of(medium: &RegionMedium) -> Self {
        let (place, name) = medium.tier.speed();
        Self(medium.store.is_some(), place, name.to_owned())
    }
}
