//! Cleaning: sparse segments of the region are packed, so that space that removed checkpoints have left in them becomes
//! free. `permafrost-pmem` finds live pages and moves them; this module names the maps of a checkpoint, and limits the
//! rate.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use permafrost_pmem::{KeyId, MapRoot, MediumUsage, Region, StoredCheckpoint, Survey, has_grown};
use permafrost_protocol::control::{GcReport, RegionGc};

use super::dump::map_root;
use super::{ProgressReceiver, Store, StoreError, manifest_of};

/// Bytes that are moved at a time, between two looks at what else runs.
const STEP_BYTES: u64 = 4 << 20;

/// Share of the time that background cleaning works, as one part of so many: while dumps come in, and else.
const PARTS: [u32; 2] = [8, 2];

/// Longest part of the time that background cleaning spends on finding live pages: one of so many.
const SURVEY_PARTS: u32 = 8;

/// State of the store's cleaning.
#[derive(Default)]
pub(super) struct CleaningState {
    /// Held while the region is cleaned.
    last: Mutex<LastSurvey>,
    /// Bytes in use after the last survey and the pass that followed.
    used_then: AtomicU64,
    /// Requests that wait for it: background cleaning gives way to them.
    requests: AtomicUsize,
}

/// The last time that live pages were looked for, and the next time that cooling is decided on.
#[derive(Default)]
pub(super) struct LastSurvey {
    /// Position of the region then.
    position: u64,
    /// Bytes of each medium that the last pass should have freed, and could not because of damage.
    in_vain: BTreeMap<usize, u64>,
    /// Earliest time of the next one in the background.
    next: Option<Instant>,
    /// Earliest time at which cooling is decided on next in the background.
    pub(super) next_cooling: Option<Instant>,
}

impl CleaningState {
    pub(super) fn of(region: &Region) -> Self {
        Self {
            used_then: used(region).into(),
            ..Self::default()
        }
    }

    fn lock(&self) -> MutexGuard<'_, LastSurvey> {
        self.last.lock()
    }
}

impl Store {
    /// Packs sparse segments, all that are worth it, or only measures them.
    ///
    /// # Errors
    /// The region takes no writes, its medium fails, or no slot is free to move segments to.
    pub fn gc(
        &self,
        dry_run: bool,
        progress: ProgressReceiver<'_>,
    ) -> Result<GcReport, StoreError> {
        let mut last = self.lock_cleaning();
        last.in_vain.clear();
        let mut survey = self.survey(&mut last);
        let segment_bytes = self.region.usage().segment_bytes;
        let mut report = RegionGc {
            used_bytes: survey.used_bytes(),
            live_bytes: survey.live_bytes(),
            skipped_bytes: survey.unknown_bytes(),
            reclaimable_bytes: survey.reclaimable_bytes(segment_bytes),
            ..RegionGc::default()
        };
        let mut done = dry_run;
        if !dry_run {
            self.check_writable()?;
        }
        while !done {
            done = self.clean_step(&mut survey, &mut report)?;
            let total = report.reclaimable_bytes.max(report.freed_bytes);
            progress(report.freed_bytes, total);
        }
        Ok(GcReport {
            regions: vec![report],
        })
    }

    /// Waits until nothing is cleaned in the background, and keeps it so.
    pub(super) fn lock_cleaning(&self) -> MutexGuard<'_, LastSurvey> {
        self.cleaning.requests.fetch_add(1, Ordering::Relaxed);
        let last = self.cleaning.lock();
        self.cleaning.requests.fetch_sub(1, Ordering::Relaxed);
        last
    }

    /// Moves segments away from media that are drained, and between tiers; then cleans in the background, if something
    /// has changed since the last pass and it [is worth it](MediumUsage::is_worth_cleaning). Yields to dumps. Ends early if
    /// `stopped` returns true. Returns true if it moved anything.
    ///
    /// # Errors
    /// Those of [`Store::gc`].
    pub fn clean_in_background(&self, stopped: &dyn Fn() -> bool) -> Result<bool, StoreError> {
        let drained = self.drain_some(stopped).unwrap_or_else(|error| {
            // Cleaning may make the room that it lacks.
            let error: &dyn std::error::Error = &error;
            tracing::warn!(
                event = "drain-failed",
                error,
                "segments not moved away from a drained medium"
            );
            false
        });
        let mut last = self.cleaning.lock();
        let cooled = self.cool_some(&mut last, stopped).unwrap_or_else(|error| {
            // A tier that is away must not keep the others from being cleaned.
            let error: &dyn std::error::Error = &error;
            tracing::warn!(
                event = "tiering-failed",
                error,
                "segments not moved between tiers"
            );
            false
        });
        let cleaned = self.clean_some(&mut last, stopped);
        drop(last);
        self.sweep_objects(stopped);
        Ok(cleaned? || drained || cooled)
    }

    /// Cleans the region, if it is worth it and a pass may have another outcome than the last one. Returns true if it
    /// freed anything.
    fn clean_some(
        &self,
        last: &mut LastSurvey,
        stopped: &dyn Fn() -> bool,
    ) -> Result<bool, StoreError> {
        let (usage, position) = (self.region.usage_of_media(), self.region.position());
        let too_soon = last.next.is_some_and(|next| Instant::now() < next);
        if too_soon || last.position == position || self.region.failure().is_some() {
            return Ok(false);
        }
        // Where even an emptied medium would give too little, nothing is looked for.
        let may_be_worth = |usage: &MediumUsage| usage.is_worth_cleaning(usage.used_bytes());
        if !usage.iter().any(may_be_worth) {
            return Ok(false);
        }
        let mut survey = self.survey(last);
        let by_medium = survey.reclaimable_by_medium(self.region.usage().segment_bytes);
        // Each medium by itself: much that is in use on a slow one must not keep a fast one full.
        let is_worth = |usage: &MediumUsage| {
            let of = |bytes: &BTreeMap<usize, u64>| bytes.get(&usage.number).copied().unwrap_or(0);
            usage.is_worth_cleaning(of(&by_medium).saturating_sub(of(&last.in_vain)))
        };
        if !usage.iter().any(is_worth) {
            return Ok(false);
        }
        let mut report = RegionGc::default();
        self.work_in_steps(stopped, &mut || self.clean_step(&mut survey, &mut report))?;
        let (freed, written) = (report.freed_bytes, report.written_bytes);
        // Damaged segments stay where they are, and would be tried again and again. Media are not told apart in what was
        // freed: at worst one is tried again.
        last.in_vain.clear();
        if report.damaged_segments > 0 {
            let left = by_medium.into_iter();
            last.in_vain = left
                .map(|(medium, bytes)| (medium, bytes.saturating_sub(freed)))
                .collect();
        }
        drop(survey);
        self.cleaning
            .used_then
            .store(used(&self.region), Ordering::Relaxed);
        tracing::info!(event = "region-cleaned", freed, written, "region cleaned");
        Ok(freed > 0)
    }

    /// Cleans in the background, as [`Store::clean_in_background`] does, if the region has grown so much since live pages
    /// were looked for that it should not wait for the next interval. Costs a look at the free slots where it has not.
    ///
    /// # Errors
    /// Those of [`Store::gc`].
    pub fn clean_if_grown(&self, stopped: &dyn Fn() -> bool) -> Result<bool, StoreError> {
        let then = self.cleaning.used_then.load(Ordering::Relaxed);
        if !has_grown(then, used(&self.region), self.region.usage().segment_bytes) {
            return Ok(false);
        }
        let mut last = self.cleaning.lock();
        self.clean_some(&mut last, stopped)
    }

    /// Repeats a step until it returns true. Rests between steps, longer while dumps come in; ends early if `stopped`
    /// returns true, and when a request waits.
    pub(super) fn work_in_steps(
        &self,
        stopped: &dyn Fn() -> bool,
        step: &mut dyn FnMut() -> Result<bool, StoreError>,
    ) -> Result<(), StoreError> {
        let stopped = &|| stopped() || self.cleaning.requests.load(Ordering::Relaxed) > 0;
        while !stopped() {
            let began = Instant::now();
            if step()? {
                break;
            }
            let [busy, idle] = PARTS;
            let parts = if self.is_receiving() { busy } else { idle };
            rest(began.elapsed() * (parts - 1), stopped);
        }
        Ok(())
    }

    /// Finds the live pages of the region.
    fn survey(&self, last: &mut LastSurvey) -> Survey {
        self.survey_keys(last, &[])
    }

    /// Finds the live pages of the region, to move segments with those keys to another one.
    pub(super) fn survey_keys(&self, last: &mut LastSurvey, keys: &[KeyId]) -> Survey {
        let began = Instant::now();
        // Before it: what is sealed or removed meanwhile counts as new.
        last.position = self.region.position();
        let survey = self.region.survey_keys(&map_roots, keys);
        self.cleaning
            .used_then
            .store(used(&self.region), Ordering::Relaxed);
        last.next = began
            .elapsed()
            .checked_mul(SURVEY_PARTS)
            .map(|rest| Instant::now() + rest);
        survey
    }

    /// Moves some segments; returns true if nothing more is worth it.
    fn clean_step(&self, survey: &mut Survey, report: &mut RegionGc) -> Result<bool, StoreError> {
        let segment_bytes = self.region.usage().segment_bytes;
        let cleaned = self.region.clean(survey, STEP_BYTES)?;
        let freed = cleaned.slots.saturating_sub(cleaned.filled) * segment_bytes;
        report.freed_bytes += freed;
        report.written_bytes += cleaned.written_bytes;
        report.damaged_segments += cleaned.damaged_segments;
        self.counters.cleaned_bytes.add(freed);
        self.counters.moved_bytes.add(cleaned.written_bytes);
        Ok(cleaned.done)
    }
}

/// Returns the bytes in use of media that dumps go to.
fn used(region: &Region) -> u64 {
    let media = region.usage_of_media();
    media.iter().map(MediumUsage::used_bytes).sum()
}

/// Returns the roots of all maps that a checkpoint's manifest names; `None` if it cannot be read.
pub(super) fn map_roots(checkpoint: &Arc<StoredCheckpoint>) -> Option<Vec<MapRoot>> {
    let manifest = manifest_of(checkpoint).ok()?;
    let packs = manifest.images.chunk_by(|a, b| a.map_root == b.map_root);
    let images = packs.filter_map(|packed| Some(&packed.first()?.map_root));
    let spaces = manifest.spaces.iter().map(|space| &space.map_root);
    images
        .chain(spaces)
        .map(|root| map_root(root).ok())
        .collect()
}

/// Waits, in pieces in which `stopped` is asked.
fn rest(time: Duration, stopped: &dyn Fn() -> bool) {
    let until = Instant::now() + time;
    while !stopped() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(Duration::from_millis(100)));
    }
}
