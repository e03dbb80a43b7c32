//! Lists, shows and verifies stored checkpoints, and makes small changes (remove, pin).

use std::collections::HashSet;
use std::sync::Weak;

use permafrost_pmem::{ATTR_PINNED, MediumKind};
use permafrost_protocol::control;
use permafrost_protocol::manifest::{JobName, Manifest};

use super::anywhere::Anywhere;
use super::checking::HeldCheckpoint;
use super::reader::PAGE_BYTES;
use super::{ProgressReceiver, Store, StoreError, job_name, manifest_of};
use crate::clock::unix_ms;
use crate::reader::checkpoint_name;
use crate::{MissingObject, SealingError};

impl Store {
    /// Lists the checkpoints of a job, or of all jobs, by job and generation, parked ones last.
    ///
    /// # Errors
    /// No such job, or the catalog cannot be read.
    pub fn list(&self, job: Option<&JobName>) -> Result<Vec<control::Checkpoint>, StoreError> {
        let mut listed = self.listed(job)?;
        for parked in listed.iter_mut().filter(|record| record.generation == 0) {
            let left = self
                .retention
                .parked
                .saturating_sub(self.parked_for(&parked.id));
            parked.expires_unix_ms =
                unix_ms().saturating_add(u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
        }
        if let Some(job) = job.filter(|_| listed.is_empty()) {
            return Err(StoreError::NotFound(MissingObject::Job(job.to_string())));
        }
        Ok(listed
            .into_iter()
            .map(|record| self.with_damage(record))
            .collect())
    }

    /// Returns all details of one checkpoint. For one that is not here, the space that it takes here is zero.
    ///
    /// # Errors
    /// No such checkpoint; a damaged manifest, and no other node has a copy.
    pub fn show(&self, reference: &str) -> Result<control::Detail, StoreError> {
        let shown = Anywhere::open(self, self.resolve(reference)?)?;
        let (segments, exclusive_bytes) = match &shown.here {
            Some(here) => {
                let checkpoint = here.checkpoint();
                (
                    checkpoint.segments(),
                    self.region.exclusive_bytes(checkpoint),
                )
            }
            None => (0, 0),
        };
        Ok(control::Detail {
            manifest: Some(shown.manifest),
            segments,
            exclusive_bytes,
            checkpoint: Some(self.with_damage(shown.record)),
            agent: String::new(),
        })
    }

    /// Removes a checkpoint, or every one of a job. Returns how many were removed.
    ///
    /// # Errors
    /// No such job or checkpoint, or no valid name; it is pinned and `force` is not given, then nothing is removed.
    pub fn remove(
        &self,
        reference: &str,
        all_generations: bool,
        force: bool,
    ) -> Result<u64, StoreError> {
        let doomed = if all_generations {
            self.list(Some(&job_name(reference)?))?
                .into_iter()
                .filter(|record| record.generation > 0)
                .collect()
        } else {
            vec![self.resolve(reference)?]
        };
        if let Some(pinned) = doomed.iter().find(|record| record.pinned && !force) {
            return Err(SealingError::Pinned {
                checkpoint: checkpoint_name(pinned),
            }
            .into());
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
        // The registry may be slow, and seals wait for the index.
        let mut record = self.resolve(reference)?;
        if self.checkpoint(&record.id).is_ok() {
            self.listed_checkpoint(&record)?;
        }
        record.pinned = pinned;
        if let Some(registry) = self.registry().filter(|_| !record.nodes.is_empty()) {
            // For all nodes; a rebuild also finds the pin in this node's region.
            registry.set_pinned(&record, pinned)?;
            if self.checkpoint(&record.id).is_err() {
                return Ok(record);
            }
        }
        let _index = self.index();
        let checkpoint = self.listed_checkpoint(&record)?;
        let attrs = if pinned {
            checkpoint.attrs() | ATTR_PINNED
        } else {
            checkpoint.attrs() & !ATTR_PINNED
        };
        self.region.set_attrs(checkpoint.id(), attrs)?;
        self.catalog.put(&record)?;
        Ok(record)
    }

    /// Reads every page that this node has of one checkpoint, of a job's newest, or (empty) of every checkpoint,
    /// and checks them.
    ///
    /// # Errors
    /// No such checkpoint, or not here. Damage is no error: the reply lists it.
    pub fn verify(
        &self,
        reference: &str,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Verified, StoreError> {
        let everything = reference.is_empty();
        let records = if everything {
            self.catalog.list(None)?
        } else {
            let record = self.resolve(reference)?;
            self.listed_checkpoint(&record)?;
            vec![record]
        };
        let total = records.iter().map(|record| record.memory_bytes).sum();
        let mut result = control::Verified::default();
        let listed: HashSet<String> = records.iter().map(|record| record.id.clone()).collect();
        for record in records {
            let held = HeldCheckpoint {
                id: record.id.clone(),
                record: Some(record),
                bytes: 0,
                copy: Weak::new(),
            };
            let checked = self.check(&held, None, &mut |pages, _| {
                result.pages += pages;
                progress((result.pages * PAGE_BYTES).min(total), total);
                true
            });
            match checked {
                Ok(checked) => result.damage.extend(checked.damage),
                // The checkpoint was removed after it was listed.
                Err(StoreError::NotFound { .. }) if everything => continue,
                Err(error) => return Err(error),
            }
            result.checkpoints += 1;
        }
        if everything {
            result.damage.extend(self.unlisted(&listed));
        }
        Ok(result)
    }

    /// Returns the checkpoints that the region has and the catalog lacks: those whose manifest is damaged, or whose
    /// number is another's. (A checkpoint sealed at this moment is neither.)
    fn unlisted(&self, listed: &HashSet<String>) -> Vec<String> {
        let _index = self.index();
        let mut damage = Vec::new();
        for checkpoint in self.region.checkpoints() {
            let id = checkpoint.id().to_string();
            if listed.contains(&id) {
                continue;
            }
            match manifest_of(&checkpoint) {
                Ok(manifest) if self.names(&manifest, &id) => {}
                Ok(manifest) => damage.push(format!(
                    "checkpoint {id}: another one is {}@{}",
                    manifest.job, manifest.generation
                )),
                Err(error) => damage.push(format!("checkpoint {id}, not listed: {error}")),
            }
        }
        damage
    }

    /// Returns true if the catalog has that checkpoint.
    fn names(&self, manifest: &Manifest, id: &str) -> bool {
        let found = if manifest.generation == 0 {
            self.catalog.parked(&manifest.session)
        } else {
            self.catalog.find(&manifest.job, manifest.generation)
        };
        matches!(found, Ok(Some(record)) if record.id == id)
    }

    /// Returns the state of the region.
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
            failure: self
                .region
                .failure()
                .map_or_else(String::new, ToString::to_string),
            lost_pages: self.region.lost_pages(),
            unreadable: self.region.damaged().len() as u64,
            volatile: guarantee.volatile,
        }
    }
}
