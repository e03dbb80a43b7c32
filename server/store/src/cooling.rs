//! Cooling: parts of checkpoints that nobody uses move to slower tiers of the region, and those of checkpoints that are
//! often restored back to the fastest one. `permafrost-cooling` decides what moves; this module gathers what it decides
//! by, and `permafrost-pmem` moves slots.

use std::collections::HashMap;
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
use super::{ProgressReceiver, Store, StoreError};
use crate::clock::unix_ms;

/// Longest part of the time that deciding what moves may take in the background: one of so many.
const PLAN_PARTS: u32 = 8;

/// Least time between two decisions in the background.
const LEAST_PAUSE: Duration = Duration::from_secs(10);

/// Rules of cooling, and the uses of checkpoints that it decides by.
pub(super) struct CoolingState {
    rules: CoolingRules,
    /// Restores of checkpoints since the store was opened, by id.
    restores: Mutex<Restores>,
    /// Time at which the store was opened: what is not in the catalog counts as used then.
    opened: Instant,
}

/// Uses of a segment: that of the checkpoint with pages in it which was used last.
#[derive(Clone, Copy)]
struct SegmentUse {
    idle: Duration,
    in_newest: bool,
}

/// Slots, and where they are to go.
struct Planned {
    slots: Vec<OccupiedSlot>,
    moves: Vec<Move>,
}

impl CoolingState {
    pub(super) fn new(rules: CoolingRules) -> Self {
        Self {
            rules,
            restores: Mutex::default(),
            opened: Instant::now(),
        }
    }

    /// Records that a checkpoint is restored.
    pub(super) fn record(&self, id: &str) {
        self.restores.lock().record(id, Instant::now());
    }
}

impl Store {
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
            name => self.plan_for(&*self.checkpoint_named(name)?, plan_down),
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
        let within = self.cooling.rules.above_percent;
        let often = self.cooling.restores.lock().take_often();
        for id in often {
            // Removed since, or damaged.
            if let Ok(checkpoint) = self.checkpoint(&id) {
                let up = |tiers, slots: &[SlotUse]| plan_up(tiers, slots, within);
                planned.push(self.plan_for(&checkpoint, up));
            }
        }
        let pause = began.elapsed().saturating_mul(PLAN_PARTS).max(LEAST_PAUSE);
        last.next_cooling = Instant::now().checked_add(pause);
        let (mut moves, mut moved) = (
            planned
                .iter()
                .flat_map(|planned| planned.moves.iter().map(|m| (&planned.slots[m.slot], m.to))),
            0,
        );
        let mut survey = None;
        self.work_in_steps(stopped, &mut || {
            let Some((slot, to)) = moves.next() else {
                return Ok(true);
            };
            moved += self.move_one(slot, to, &mut survey)?;
            Ok(false)
        })?;
        drop(survey);
        if self.region.has_cold()
            && let Err(error) = self.region.sweep_cold()
        {
            // Tried again at the next pass: what is left takes room only.
            let error: &dyn std::error::Error = &error;
            tracing::warn!(error, "objects that nothing needs not removed");
        }
        if moved > 0 {
            tracing::info!(moved, "segments moved between tiers");
        }
        Ok(moved > 0)
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
        let (mut moved, mut survey) = (0, None);
        for next in &planned.moves {
            moved += self.move_one(&planned.slots[next.slot], next.to, &mut survey)?;
            progress(moved, total);
        }
        Ok(moved)
    }

    /// Moves segments of a checkpoint that are in an object store to the fastest tier with room: pages are lent from
    /// mapped media only.
    ///
    /// # Errors
    /// The store is away or its objects are damaged; there is no room.
    pub(super) fn recall(&self, checkpoint: &StoredCheckpoint) -> Result<(), StoreError> {
        if !self.region.has_cold() {
            return Ok(());
        }
        let slots = self.region.slots_out(checkpoint);
        let uses: Vec<_> = slots.iter().map(unaged).collect();
        let moves = plan_up(self.tiers(), &uses, None);
        if moves.len() < slots.len() {
            let missing = (slots.len() - moves.len()) as u64;
            let full = RegionMediaError::NoRoomToRecall {
                checkpoint: checkpoint.id().to_string(),
                needed: missing * self.region.usage().segment_bytes,
            };
            return Err(full.into());
        }
        let (began, mut bytes) = (Instant::now(), 0);
        for next in moves {
            bytes += self.move_one(&slots[next.slot], next.to, &mut None)?;
        }
        self.observer.recalled(bytes, began.elapsed());
        Ok(())
    }

    /// Moves a slot; returns the bytes moved: none if what was to move has gone, or what had room has none any more.
    /// To a cold medium it needs a survey, which is made once.
    fn move_one(
        &self,
        slot: &OccupiedSlot,
        to: usize,
        survey: &mut Option<Survey>,
    ) -> Result<u64, StoreError> {
        let moved = if self.region.is_cold(to) {
            let survey = survey.get_or_insert_with(|| self.region.survey(&map_roots));
            self.region.cool_slot(survey, slot, to)
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

    fn plan_cooling(&self) -> Result<Planned, StoreError> {
        let tiers = self.tiers();
        if tiers.count() < 2 {
            return Ok(Planned {
                slots: Vec::new(),
                moves: Vec::new(),
            });
        }
        let slots = self.region.occupied_slots();
        let used = self.segment_uses()?;
        let uses: Vec<_> = slots.iter().map(|slot| slot_use(slot, &used)).collect();
        let moves = plan(&self.cooling.rules, tiers, &uses);
        Ok(Planned { slots, moves })
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
        Planned { slots, moves }
    }

    /// Returns the media that segments can be moved to, by tier.
    fn tiers(&self) -> Tiers {
        let media = self.region.media().into_iter();
        let usable = media.filter(|m| m.state == MediumState::Active && m.guarantee.is_some());
        let rooms: Vec<_> = usable
            .map(|medium| MediumRoom {
                number: medium.number,
                tier: SpeedKey::of(&medium),
                capacity_bytes: medium.capacity_bytes,
                free_bytes: medium.free_bytes,
            })
            .collect();
        Tiers::new(&rooms, self.region.usage().segment_bytes)
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

/// Returns the use of a slot; it stays if one of its segments is of no checkpoint: a dump or a reader has it.
fn slot_use(slot: &OccupiedSlot, uses: &HashMap<SegmentNo, SegmentUse>) -> SlotUse {
    let all: Option<Vec<_>> = slot.segments().iter().map(|s| uses.get(s)).collect();
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
