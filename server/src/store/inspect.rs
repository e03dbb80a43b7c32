//! Looking at what is stored: listings, details, verification, and the small changes (remove, pin).

use permafrost_pmem::{ATTR_PINNED, MediumKind, PAGE_SIZE, PageMap, RunKind};
use permafrost_protocol::control;
use permafrost_protocol::manifest::{AddressSpace, Manifest, SpaceType};

use super::dump::map_root;
use super::error::index_of;
use super::{Progress, Store, StoreError, manifest_of};

const PAGE_BYTES: u64 = PAGE_SIZE as u64;

impl Store {
    /// Checkpoints of a job, or all with an empty name, by job and generation, parked ones last.
    ///
    /// # Errors
    /// No such job, or the catalog cannot be read.
    pub fn list(&self, job: &str) -> Result<Vec<control::Checkpoint>, StoreError> {
        let listed = self.catalog.list((!job.is_empty()).then_some(job))?;
        if listed.is_empty() && !job.is_empty() {
            return Err(StoreError::NotFound {
                what: format!("job {job}"),
            });
        }
        Ok(listed)
    }

    /// One checkpoint in full.
    ///
    /// # Errors
    /// No such checkpoint, or a damaged manifest.
    pub fn show(&self, reference: &str) -> Result<control::Detail, StoreError> {
        let record = self.resolve(reference)?;
        let checkpoint = self.checkpoint(&record.id)?;
        Ok(control::Detail {
            manifest: Some(manifest_of(&checkpoint)?),
            segments: checkpoint.segments(),
            exclusive_bytes: self.region.exclusive_bytes(&checkpoint),
            checkpoint: Some(record),
        })
    }

    /// Removes a checkpoint, or every one of a job. How many.
    ///
    /// # Errors
    /// No such checkpoint; it is pinned and `force` is not given, then nothing is removed.
    pub fn remove(
        &self,
        reference: &str,
        all_generations: bool,
        force: bool,
    ) -> Result<u64, StoreError> {
        let doomed = if all_generations {
            self.list(reference)?
                .into_iter()
                .filter(|record| record.generation > 0)
                .collect()
        } else {
            vec![self.resolve(reference)?]
        };
        if let Some(pinned) = doomed.iter().find(|record| record.pinned && !force) {
            return Err(StoreError::Conflict {
                message: format!("{}@{} is pinned", pinned.job, pinned.generation),
                hint: "unpin it first, or use --force",
            });
        }
        for record in &doomed {
            self.delete(record)?;
        }
        Ok(doomed.len() as u64)
    }

    /// Pins or unpins a checkpoint.
    ///
    /// # Errors
    /// No such checkpoint; the journal cannot be written.
    pub fn pin(&self, reference: &str, pinned: bool) -> Result<control::Checkpoint, StoreError> {
        let mut record = self.resolve(reference)?;
        let checkpoint = self.checkpoint(&record.id)?;
        let attrs = if pinned {
            checkpoint.attrs() | ATTR_PINNED
        } else {
            checkpoint.attrs() & !ATTR_PINNED
        };
        self.region.set_attrs(checkpoint.id(), attrs)?;
        record.pinned = pinned;
        self.catalog.put(&record)?;
        Ok(record)
    }

    /// Reads every page of one checkpoint, of a job's newest, or (empty) of everything, and checks it.
    ///
    /// # Errors
    /// No such checkpoint. Damage is no error: it is what the answer lists.
    pub fn verify(
        &self,
        reference: &str,
        progress: Progress<'_>,
    ) -> Result<control::Verified, StoreError> {
        let records = if reference.is_empty() {
            self.catalog.list(None)?
        } else {
            vec![self.resolve(reference)?]
        };
        let total = records.iter().map(|record| record.memory_bytes).sum();
        let mut result = control::Verified::default();
        for record in &records {
            let name = checkpoint_name(record);
            let checkpoint = self.checkpoint(&record.id)?;
            match manifest_of(&checkpoint) {
                Ok(manifest) => {
                    self.verify_one(&name, &checkpoint, &manifest, &mut result, total, progress)?
                }
                Err(error) => result.damage.push(format!("{name}: {error}")),
            }
            result.checkpoints += 1;
        }
        progress(total, total);
        Ok(result)
    }

    /// State of the region.
    #[must_use]
    pub fn region_status(&self) -> control::RegionStatus {
        let usage = self.region.usage();
        let guarantee = &self.place.guarantee;
        control::RegionStatus {
            path: self.place.path.to_string_lossy().into_owned(),
            uuid: usage.uuid.to_string(),
            medium: match guarantee.kind {
                MediumKind::Dax => "dax",
                MediumKind::File => "file",
                MediumKind::Simulated => "simulated",
            }
            .to_owned(),
            guarantee: guarantee.to_string(),
            capacity_bytes: usage.capacity_bytes,
            free_bytes: usage.free_bytes,
            unsafe_shutdowns: usage.unsafe_shutdowns,
            journal_records: usage.journal_records,
            journal_capacity: usage.journal_capacity,
        }
    }

    fn verify_one(
        &self,
        name: &str,
        checkpoint: &std::sync::Arc<permafrost_pmem::Checkpoint>,
        manifest: &Manifest,
        result: &mut control::Verified,
        total: u64,
        progress: Progress<'_>,
    ) -> Result<(), StoreError> {
        for image in &manifest.images {
            let map = checkpoint.map(&map_root(&image.map_root)?);
            verify_map(
                &map,
                |_| format!("{name}: image {}", image.name),
                result,
                &mut |_| {},
            );
        }
        for space in &manifest.spaces {
            let map = checkpoint.map(&map_root(&space.map_root)?);
            let place = |index: u64| {
                format!(
                    "{name}: {} address {:#x}",
                    space_name(space),
                    index * PAGE_BYTES
                )
            };
            verify_map(&map, place, result, &mut |pages| {
                progress(pages * PAGE_BYTES, total)
            });
        }
        Ok(())
    }
}

/// Reads every run of a map; what fails is noted by its place, and the next run is read.
fn verify_map(
    map: &PageMap,
    place: impl Fn(u64) -> String,
    result: &mut control::Verified,
    seen: &mut dyn FnMut(u64),
) {
    for run in map.runs() {
        match run {
            Ok(run) => {
                result.pages += u64::from(run.pages);
                if !matches!(run.kind, RunKind::Zero)
                    && let Err(error) = map.read(&run)
                {
                    result.damage.push(format!(
                        "{}: {error}",
                        place(index_of(&error).unwrap_or(run.first_index))
                    ));
                }
                seen(result.pages);
            }
            Err(error) => {
                // What lies behind a damaged map page cannot even be named.
                result
                    .damage
                    .push(format!("{}: {error}", place(index_of(&error).unwrap_or(0))));
                return;
            }
        }
    }
}

/// How people name it.
pub(super) fn checkpoint_name(record: &control::Checkpoint) -> String {
    if record.generation == 0 {
        format!("session {}", record.session)
    } else {
        format!("{}@{}", record.job, record.generation)
    }
}

pub(super) fn space_name(space: &AddressSpace) -> String {
    match space.space_type() {
        SpaceType::Process => format!("process {}", space.id),
        SpaceType::SharedMemory => format!("shared memory {}", space.id),
    }
}
