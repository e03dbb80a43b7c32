//! Lists and verifies stored checkpoints, and pins them.

use std::collections::{BTreeMap, HashSet};

use permafrost_pmem::{ATTR_PINNED, CopyId, MediumKind};
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control;
use permafrost_protocol::manifest::{Kind, Manifest};

use super::checking::HeldCheckpoint;
use super::reader::check_listed_as;
use super::{ProgressReceiver, Store, StoreError, kind_name, manifest_of};
use crate::ColdPages;
use crate::clock::unix_ms;
use permafrost_catalog::ListPart;

impl Store {
    /// Lists the checkpoints of a job, or of all jobs, as the catalog has them: by job and generation, parked ones
    /// last.
    ///
    /// # Errors
    /// The catalog cannot be read.
    pub fn records(&self, job: Option<&str>) -> Result<Vec<control::Checkpoint>, StoreError> {
        Ok(self.catalog.list(job)?)
    }

    /// Lists a part of the checkpoints, as the catalog has them.
    ///
    /// # Errors
    /// The catalog cannot be read.
    pub fn part(&self, part: &ListPart) -> Result<control::Checkpoints, StoreError> {
        Ok(self.catalog.part(part)?)
    }

    /// Counts the sealed checkpoints and the parked sessions of the catalog, without reading it.
    #[must_use]
    pub fn count(&self) -> (u64, u64) {
        let kinds = self.stored.kinds();
        let parked = kinds.get(kind_name(Kind::Parked)).copied().unwrap_or(0);
        (kinds.values().sum::<u64>() - parked, parked)
    }

    /// Counts the checkpoints of the region by kind, without reading it; those that the catalog lacks are `unknown`.
    #[must_use]
    pub fn count_kinds(&self) -> BTreeMap<String, u64> {
        let mut kinds = self.stored.kinds();
        let known = kinds.values().sum::<u64>();
        let unknown = (self.region.count() as u64).saturating_sub(known);
        kinds.insert("unknown".to_owned(), unknown);
        kinds
    }

    /// Returns the catalog's record of a job's checkpoint of that generation, or of its newest.
    ///
    /// # Errors
    /// The catalog cannot be read.
    pub fn record(
        &self,
        job: &str,
        generation: Option<u64>,
    ) -> Result<Option<control::Checkpoint>, StoreError> {
        Ok(match generation {
            Some(generation) => self.catalog.find(job, generation)?,
            None => self.catalog.head(job)?,
        })
    }

    /// Returns the record of a parked session.
    ///
    /// # Errors
    /// The catalog cannot be read.
    pub fn parked(&self, session: &str) -> Result<Option<control::Checkpoint>, StoreError> {
        Ok(self.catalog.parked(session)?)
    }

    /// Adds the known damage and, of a parked checkpoint, the end of its retention to a record, for people: never to
    /// be stored.
    #[must_use]
    pub fn with_state(&self, mut record: control::Checkpoint) -> control::Checkpoint {
        record.damaged = self.damage(&record.id).unwrap_or_default();
        // In a cluster the nodes list it.
        if record.nodes.is_empty()
            && let bytes @ 1.. = self.cold_bytes(&record.id)
        {
            record.cold = vec![control::ColdCopy {
                node: String::new(),
                bytes,
            }];
        }
        if record.generation == 0 {
            let kept = self.parked_for(&record.id);
            let left = self.retention.parked.saturating_sub(kept);
            let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
            record.expires_unix_ms = unix_ms().saturating_add(left_ms);
        }
        record
    }

    /// Returns the bytes of the region that come back from an object store before the checkpoint is read.
    #[must_use]
    pub fn cold_bytes(&self, id: &str) -> u64 {
        if !self.region.has_cold() {
            return 0;
        }
        let checkpoint = self.checkpoint(id);
        checkpoint.map_or(0, |checkpoint| self.region.bytes_out(&checkpoint))
    }

    /// Returns the manifest of this store's copy of a checkpoint.
    ///
    /// # Errors
    /// There is no copy here, or its manifest is damaged.
    pub fn manifest(&self, id: &str) -> Result<Manifest, StoreError> {
        manifest_of(&self.checkpoint(id)?)
    }

    /// Returns true if a checkpoint is being read from this store, or was a moment ago.
    #[must_use]
    pub fn is_in_use(&self, id: &str) -> bool {
        self.reads.has(id)
    }

    /// Returns the ids of the checkpoints that are being read from this store, or were a moment ago.
    #[must_use]
    pub fn in_use(&self) -> Vec<String> {
        self.reads.all()
    }

    /// Checks that this store's copy of a listed checkpoint, as far as it can be read, is of the job and generation
    /// that are listed.
    ///
    /// # Errors
    /// There is no copy here; [`StoreError::Mislisted`].
    pub fn check_listed(&self, record: &control::Checkpoint) -> Result<(), StoreError> {
        match manifest_of(&self.checkpoint(&record.id)?) {
            Ok(manifest) => check_listed_as(record, &manifest),
            Err(_) => Ok(()),
        }
    }

    /// Stores the pin of a record: in the region, and with the record in the catalog.
    ///
    /// # Errors
    /// There is no copy here, or it is listed as another one; the journal or the catalog cannot be written.
    pub fn set_pinned(&self, record: &control::Checkpoint) -> Result<(), StoreError> {
        let _index = self.index();
        self.check_listed(record)?;
        let checkpoint = self.checkpoint(&record.id)?;
        let attrs = if record.pinned {
            checkpoint.attrs() | ATTR_PINNED
        } else {
            checkpoint.attrs() & !ATTR_PINNED
        };
        self.region.set_attrs(checkpoint.id(), attrs)?;
        // What is determined when a checkpoint is listed would be out of date there.
        let stored = control::Checkpoint {
            damaged: String::new(),
            damaged_nodes: Vec::new(),
            cold: Vec::new(),
            ..record.clone()
        };
        Ok(self.catalog.put(&stored)?)
    }

    /// Reads every page of a checkpoint, or of every checkpoint, and checks them. Pages in a cold tier are fetched if
    /// `cold` says so, and else counted.
    ///
    /// # Errors
    /// There is no copy here, or it is listed as another one. Damage is no error: the reply lists it.
    pub fn verify(
        &self,
        checkpoint: Option<control::Checkpoint>,
        cold: ColdPages,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Verified, StoreError> {
        let everything = checkpoint.is_none();
        let records = match checkpoint {
            None => self.catalog.list(None)?,
            Some(record) => {
                self.check_listed(&record)?;
                vec![record]
            }
        };
        let total = records.iter().map(|record| record.memory_bytes).sum();
        let mut result = control::Verified::default();
        let listed: HashSet<String> = records.iter().map(|record| record.id.clone()).collect();
        for record in records {
            let held = HeldCheckpoint {
                id: record.id.clone(),
                record: Some(record),
                bytes: 0,
                copy: CopyId::default(),
            };
            let checked = self.check_with(&held, None, cold, &mut |pages, _| {
                result.pages += pages;
                progress((result.pages * PAGE_BYTES).min(total), total);
                true
            });
            match checked {
                Ok(checked) => {
                    result.damage.extend(checked.damage);
                    result.unverified_pages += checked.unverified_pages;
                    if result.away.is_empty() {
                        result.away = checked.away;
                    }
                }
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
        for checkpoint in self.region.listed() {
            let id = checkpoint.id.to_string();
            if listed.contains(&id) {
                continue;
            }
            let Some(checkpoint) = self.region.checkpoint(checkpoint.id) else {
                continue;
            };
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
        self.reads.release_expired();
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
