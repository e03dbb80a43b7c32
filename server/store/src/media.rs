//! Media of the region: listed, added, grown, drained and removed on request.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_cold::{create_cold, is_cold, open_cold, remove_cold};
use permafrost_objects::connect;
use permafrost_pmem::{
    MediaError, Medium, MediumKind, MediumState, OpenOptions, RegionMedium, StuckSlot, TierName,
    member_uuid, open_medium,
};
use permafrost_protocol::control::{MediumStatus, RegionMedia, request};
use permafrost_scheduling::cost::TierRoom;

use super::cooling::SpeedKey;
use super::error::RegionMediaError;
use super::{ProgressReceiver, Store, StoreError};

/// Bytes that are moved at a time, between two looks at whoever waits.
const STEP_BYTES: u64 = 16 << 20;

/// Time for which draining waits for dumps and readers that have the last slots.
const PATIENCE: Duration = Duration::from_secs(10);

/// Maximum number of slots that cannot be moved and are described one by one.
const MAX_STUCK: usize = 64;

/// Time between two looks at what dumps and readers have.
const PAUSE: Duration = Duration::from_millis(50);

impl Store {
    /// Lists the media, or changes them.
    ///
    /// # Errors
    /// [`StoreError::Media`].
    pub fn media(
        &self,
        request: &request::Media,
        progress: ProgressReceiver<'_>,
    ) -> Result<RegionMedia, StoreError> {
        let (mut moved_bytes, mut stuck) = (0, Vec::new());
        match request.action.as_str() {
            "ls" => {}
            "add" => self.add_medium(request)?,
            "grow" => {
                let number = self.medium_named(&request.medium)?;
                let grown = self.region.grow_medium(number, request.size_bytes);
                grown.map_err(RegionMediaError::from)?;
                tracing::info!(
                    event = "region-grown",
                    medium = number,
                    bytes = request.size_bytes,
                    "region grown"
                );
            }
            "drain" => {
                let number = self.medium_named(&request.medium)?;
                self.set_draining(number, true)?;
                (moved_bytes, stuck) = self.drain(number, progress)?;
            }
            "cool" => moved_bytes = self.cool(request, progress)?,
            "warm" => moved_bytes = self.warm(request, progress)?,
            "undrain" => self.set_draining(self.medium_named(&request.medium)?, false)?,
            "remove" => {
                let number = self.medium_named(&request.medium)?;
                let removed = self.region.remove_medium(number);
                removed.map_err(RegionMediaError::from)?;
                tracing::info!(
                    event = "region-medium-removed",
                    medium = number,
                    "medium removed from the region"
                );
            }
            "give-up" => {
                let number = self.medium_named(&request.medium)?;
                let lost = self.region.accept_lost_medium(number);
                lost.map_err(RegionMediaError::from)?;
                tracing::warn!(
                    event = "region-medium-loss-accepted",
                    medium = number,
                    "loss of a medium accepted"
                );
            }
            action => {
                let action = action.to_owned();
                return Err(RegionMediaError::Action { action }.into());
            }
        }
        let media = self.region.media();
        Ok(RegionMedia {
            media: media.iter().map(|medium| self.status_of(medium)).collect(),
            moved_bytes,
            not_moved: stuck,
        })
    }

    /// Moves segments away from media that are being drained, while `stopped` returns false and there is something to
    /// move. Returns true if it moved anything.
    ///
    /// # Errors
    /// Those of [`Store::media`].
    pub(super) fn drain_some(&self, stopped: &dyn Fn() -> bool) -> Result<bool, StoreError> {
        let mut moved = false;
        for medium in self.region.media() {
            if medium.state != MediumState::Draining || medium.guarantee.is_none() {
                continue;
            }
            let mut stuck = Vec::new();
            while !stopped() {
                let step = self.region.drain_others(medium.number, STEP_BYTES, &stuck);
                let step = step.map_err(RegionMediaError::from)?;
                stuck.extend(step.stuck);
                if step.moved_bytes == 0 {
                    break;
                }
                self.counters.moved_bytes.add(step.moved_bytes);
                moved = true;
            }
            // Those that cannot be moved are named to whoever drains, and found by the scrub.
        }
        Ok(moved)
    }

    fn set_draining(&self, number: usize, draining: bool) -> Result<(), StoreError> {
        let set = self.region.set_draining(number, draining);
        Ok(set.map_err(RegionMediaError::from)?)
    }

    /// Moves all segments of a medium away. What dumps and readers still have after some time is left to the
    /// background. Returns the bytes moved, and descriptions of what cannot be moved.
    fn drain(
        &self,
        number: usize,
        progress: ProgressReceiver<'_>,
    ) -> Result<(u64, Vec<String>), StoreError> {
        let segment_bytes = self.region.usage().segment_bytes;
        let (mut moved_bytes, mut since) = (0, Instant::now());
        let mut stuck = Vec::new();
        loop {
            let step = self.region.drain_others(number, STEP_BYTES, &stuck);
            let step = step.map_err(RegionMediaError::from)?;
            stuck.extend(step.stuck);
            moved_bytes += step.moved_bytes;
            self.counters.moved_bytes.add(step.moved_bytes);
            progress(moved_bytes, moved_bytes + step.left_bytes);
            let is_all = |stuck: &[_]| step.left_bytes <= stuck.len() as u64 * segment_bytes;
            if is_all(&stuck) {
                // Those whose checkpoints were removed meanwhile become free.
                stuck.retain(|slot: &StuckSlot| {
                    !self
                        .ids_with(&slot.segments.iter().copied().collect())
                        .is_empty()
                });
            }
            if is_all(&stuck) || step.waiting && since.elapsed() >= PATIENCE {
                return Ok((moved_bytes, self.described(&stuck)));
            }
            if step.waiting {
                std::thread::sleep(PAUSE);
            } else {
                since = Instant::now();
            }
        }
    }

    /// Describes slots that cannot be moved, by the checkpoints with pages in them: the first ones.
    fn described(&self, stuck: &[StuckSlot]) -> Vec<String> {
        let describe = |slot: &StuckSlot| {
            let ids = self
                .ids_with(&slot.segments.iter().copied().collect())
                .into_iter();
            let names = ids.map(|id| self.held_copy(&id).map_or(id, |held| held.name()));
            format!("{}: {}", names.collect::<Vec<_>>().join(", "), slot.error)
        };
        stuck.iter().take(MAX_STUCK).map(describe).collect()
    }

    fn add_medium(&self, request: &request::Media) -> Result<(), StoreError> {
        self.check_writable()?;
        let path = resolved(Path::new(&request.medium))?;
        // Its own lock would say that some process has it.
        let uuid = member_uuid(&path).ok().flatten();
        let listed = self.region.media();
        let own = listed
            .iter()
            .find(|m| Some(m.uuid) == uuid && m.guarantee.is_some());
        if let Some(medium) = own {
            let number = medium.number;
            return Err(RegionMediaError::from(MediaError::Listed { number }).into());
        }
        let found = std::fs::metadata(&path).map_or(0, |file| file.len());
        if found == 0 && request.size_bytes == 0 {
            return Err(RegionMediaError::NoSize { path }.into());
        }
        if found > 0 && request.size_bytes > 0 && found != request.size_bytes {
            return Err(RegionMediaError::OtherSize { path, found }.into());
        }
        let medium = self.open_member(&path, request)?;
        let guarantee = medium.guarantee().clone();
        let medium_is_cold = medium.cold().is_some();
        let fast = guarantee.kind == MediumKind::Dax || guarantee.volatile;
        let tier = match request.tier.as_str() {
            "" if medium_is_cold => "cold".parse().map_err(RegionMediaError::from)?,
            "" => TierName::known(usize::from(!fast)),
            name => name.parse().map_err(RegionMediaError::from)?,
        };
        let added = self.region.add_medium(medium, &path, &tier);
        if added.is_err() && found == 0 {
            // Made for nothing.
            let _ = std::fs::remove_file(&path);
            remove_cold(&path);
        }
        let number = added.map_err(RegionMediaError::from)?;
        tracing::info!(event = "region-medium-added", medium = number, path = %path.display(), %tier, %guarantee, "medium added to the region");
        Ok(())
    }

    /// Opens the file of a medium to add, or makes it.
    fn open_member(
        &self,
        path: &Path,
        request: &request::Media,
    ) -> Result<Arc<dyn Medium>, RegionMediaError> {
        let (size_bytes, options) = (request.size_bytes, OpenOptions::default());
        if !request.store.is_empty() {
            let block_bytes = self.region.usage().segment_bytes;
            return Ok(create_cold(
                path,
                size_bytes,
                (&request.store, &connect),
                block_bytes,
            )?);
        }
        if is_cold(path) {
            return Ok(open_cold(path, &options, &connect)?);
        }
        Ok(open_medium(path, size_bytes, &options)?)
    }

    /// Returns the number of the medium with a number, a UUID or a path.
    fn medium_named(&self, name: &str) -> Result<usize, StoreError> {
        let media = self.region.media();
        let path = resolved(Path::new(name)).unwrap_or_else(|_| PathBuf::from(name));
        let has_name = |medium: &&RegionMedium| {
            let own = if medium.number == 0 {
                &self.place.path
            } else {
                &medium.path
            };
            medium.number.to_string() == name || medium.uuid.to_string() == name || *own == path
        };
        match media.iter().find(has_name) {
            Some(medium) => Ok(medium.number),
            None => {
                let name = name.to_owned();
                Err(RegionMediaError::NotFound { name }.into())
            }
        }
    }

    /// Returns the room on each tier of the region, the fastest first.
    #[must_use]
    pub fn tier_rooms(&self) -> Vec<TierRoom> {
        let mut media = self.region.media();
        media.retain(|medium| medium.guarantee.is_some());
        media.sort_by_key(SpeedKey::of);
        let mut rooms: Vec<TierRoom> = Vec::new();
        for medium in media {
            let (tier, cold) = (medium.tier.name(), medium.store.is_some());
            if rooms
                .last()
                .is_none_or(|last| last.tier != tier || last.cold != cold)
            {
                rooms.push(TierRoom {
                    tier: tier.to_owned(),
                    cold,
                    ..TierRoom::default()
                });
            }
            if let Some(room) = rooms.last_mut() {
                room.capacity_bytes += medium.capacity_bytes;
                room.free_bytes += medium.free_bytes;
            }
        }
        rooms
    }

    fn status_of(&self, medium: &RegionMedium) -> MediumStatus {
        let path = if medium.number == 0 {
            &self.place.path
        } else {
            &medium.path
        };
        let state = match (&medium.guarantee, medium.state) {
            (None, _) => "missing",
            (_, MediumState::Active) => "active",
            (_, MediumState::Draining) => "draining",
        };
        MediumStatus {
            node: String::new(),
            number: u32::try_from(medium.number).unwrap_or(u32::MAX),
            uuid: medium.uuid.to_string(),
            tier: medium.tier.to_string(),
            state: state.to_owned(),
            path: path.to_string_lossy().into_owned(),
            size_bytes: medium.size_bytes,
            capacity_bytes: medium.capacity_bytes,
            free_bytes: medium.free_bytes,
            used_bytes: medium.used_bytes,
            lost_pages: medium.lost_pages,
            guarantee: medium
                .guarantee
                .as_ref()
                .map_or_else(String::new, ToString::to_string),
            problem: medium.problem.clone().unwrap_or_default(),
            store: medium.store.clone().unwrap_or_default(),
        }
    }
}

/// Returns the path without symbolic links, of a file that may not be there yet.
fn resolved(path: &Path) -> Result<PathBuf, RegionMediaError> {
    let refuse = || RegionMediaError::Path {
        path: path.to_owned(),
    };
    if !path.is_absolute() {
        return Err(refuse());
    }
    if let Ok(resolved) = path.canonicalize() {
        return Ok(resolved);
    }
    let (parent, name) = (path.parent(), path.file_name());
    let parent = parent.and_then(|parent| parent.canonicalize().ok());
    Ok(parent.ok_or_else(refuse)?.join(name.ok_or_else(refuse)?))
}
