//! Looks up, lists, removes and pins checkpoints: those of the registry in a cluster, else those of the catalog.

use std::collections::HashSet;

use permafrost_catalog::{ListPart, in_list_order};
use permafrost_protocol::control::{self, request};
use permafrost_protocol::manifest::{CheckpointRef, JobName};
use permafrost_store::{
    ColdPages, ContentDigest, HeldCheckpoint, MissingObject, ProgressReceiver, PublicationState,
    ReadingError, SealingError, StoreError, checkpoint_name, job_name,
};

use crate::{ClusteredStore, Registered, Registry};

impl ClusteredStore {
    /// Returns the checkpoint that `JOB` or `JOB@GEN` names.
    ///
    /// # Errors
    /// The reference is invalid, or there is no such checkpoint.
    pub fn resolve(&self, reference: &str) -> Result<control::Checkpoint, StoreError> {
        let parsed: CheckpointRef =
            reference
                .parse()
                .map_err(|source| ReadingError::Reference {
                    reference: reference.to_owned(),
                    source,
                })?;
        let found = self.look_up(parsed.job.as_str(), parsed.generation)?;
        found.ok_or_else(|| StoreError::NotFound(MissingObject::Checkpoint(reference.to_owned())))
    }

    /// Lists the checkpoints of a job, or of all jobs, by job and generation, parked ones last.
    ///
    /// # Errors
    /// No such job, or the catalog cannot be read.
    pub fn list(&self, job: Option<&JobName>) -> Result<Vec<control::Checkpoint>, StoreError> {
        let listed = self.listed(job.map(JobName::as_str))?;
        if let Some(job) = job.filter(|_| listed.is_empty()) {
            return Err(StoreError::NotFound(MissingObject::Job(job.to_string())));
        }
        let with_state = |record| self.local.with_state(record);
        Ok(listed.into_iter().map(with_state).collect())
    }

    /// Lists a part of the checkpoints. On a single node the cost depends on the part; in a cluster the registry is
    /// read for all jobs, or for the one.
    ///
    /// # Errors
    /// No such job, or the catalog cannot be read.
    pub fn list_part(&self, part: &ListPart) -> Result<control::Checkpoints, StoreError> {
        let mut listed = match self.registry() {
            Some(_) => part.of(self.listed(part.job())?),
            None => self.local.part(part)?,
        };
        if let Some(job) = part.job()
            && listed.checkpoints.is_empty()
            && part.is_first()
        {
            return Err(StoreError::NotFound(MissingObject::Job(job.to_owned())));
        }
        let with_state = |record| self.local.with_state(record);
        let records = std::mem::take(&mut listed.checkpoints);
        listed.checkpoints = records.into_iter().map(with_state).collect();
        Ok(listed)
    }

    /// Counts the sealed checkpoints and the parked sessions. In a cluster the registry is read.
    ///
    /// # Errors
    /// The catalog cannot be read.
    pub fn count_checkpoints(&self) -> Result<(u64, u64), StoreError> {
        if self.registry().is_none() {
            return Ok(self.local.count());
        }
        let listed = self.listed(None)?;
        let parked = listed.iter().filter(|record| record.generation == 0);
        let parked = parked.count() as u64;
        Ok((listed.len() as u64 - parked, parked))
    }

    /// Removes a checkpoint, or every one of a job. Returns how many were removed.
    ///
    /// # Errors
    /// No such job or checkpoint, or no valid name; it is pinned and `force` is not given, or the last one of its job
    /// that can be restored and neither `last` nor all are requested: then nothing is removed.
    pub fn remove(&self, remove: &request::Remove) -> Result<u64, StoreError> {
        let (reference, force) = (remove.checkpoint.as_str(), remove.force);
        let _removing = self.begin_removal();
        let doomed = if remove.all_generations {
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
        if let ([one], false, false) = (&doomed[..], remove.all_generations, remove.last) {
            self.check_not_last(one)?;
        }
        for record in &doomed {
            self.delete(record)?;
        }
        Ok(doomed.len() as u64)
    }

    /// Takes a checkpoint off the list, and removes it here.
    pub(crate) fn delete(&self, record: &control::Checkpoint) -> Result<(), StoreError> {
        if self.local.holds(&record.id) {
            self.local.check_listed(record)?;
        }
        // First of all: no client must find a half-removed checkpoint.
        self.withdraw(record)?;
        self.local.delete(record)
    }

    /// Pins or unpins a checkpoint.
    ///
    /// # Errors
    /// No such checkpoint; the journal cannot be written.
    pub fn pin(&self, reference: &str, pinned: bool) -> Result<control::Checkpoint, StoreError> {
        // The registry may be slow, and seals wait for the store.
        let mut record = self.resolve(reference)?;
        if self.local.holds(&record.id) {
            self.local.check_listed(&record)?;
        }
        record.pinned = pinned;
        if let Some(registry) = self.registry().filter(|_| !record.nodes.is_empty()) {
            // For all nodes; a rebuild also finds the pin in this node's region.
            registry.set_pinned(&record, pinned)?;
            if !self.local.holds(&record.id) {
                return Ok(record);
            }
        }
        self.local.set_pinned(&record)?;
        Ok(record)
    }

    /// Reads every page that this node has of one checkpoint, of a job's newest, or (empty) of every checkpoint,
    /// and checks them. Pages in a cold tier are fetched for a named checkpoint, and else if `cold` says so.
    ///
    /// # Errors
    /// No such checkpoint, or not here. Damage is no error: the reply lists it.
    pub fn verify(
        &self,
        reference: &str,
        cold: bool,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Verified, StoreError> {
        if !reference.is_empty() {
            return self.verify_named(reference, true, progress);
        }
        self.local.verify(None, cold_pages(cold), progress)
    }

    /// Reads every page that this node has of one checkpoint, or of a job's newest, and checks them. Pages in a cold
    /// tier are fetched if `cold` says so.
    ///
    /// # Errors
    /// Those of [`ClusteredStore::verify`].
    pub fn verify_named(
        &self,
        reference: &str,
        cold: bool,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Verified, StoreError> {
        let record = self.resolve(reference)?;
        let verified = self
            .local
            .verify(Some(record.clone()), cold_pages(cold), progress);
        verified.map_err(|error| named_holders(error, &record))
    }

    /// Refuses a checkpoint that is damaged here, and that no other node holds: before a restore begins rather than
    /// in the middle of it.
    ///
    /// # Errors
    /// [`ReadingError::Damaged`]; no such checkpoint.
    pub fn check_restorable(&self, reference: &str) -> Result<(), StoreError> {
        if !self.local.has_damage() {
            return Ok(());
        }
        let record = self.resolve(reference)?;
        let Some(damage) = self.local.damage(&record.id) else {
            return Ok(());
        };
        let is_other = |node: &String| Some(node.as_str()) != self.node();
        // A copy whose root is damaged can be read until the next start.
        if record.nodes.iter().any(is_other) || self.local.has_damaged_root(&record.id) {
            return Ok(());
        }
        Err(ReadingError::Damaged {
            name: checkpoint_name(&record),
            damage,
        }
        .into())
    }

    /// Returns the cluster's record of a checkpoint that this node holds, with its other holders; `None` where the
    /// cluster does not list it, or there is no cluster.
    ///
    /// # Errors
    /// The registry does not answer.
    pub fn other_holders(
        &self,
        held: &HeldCheckpoint,
    ) -> Result<Option<(control::Checkpoint, Vec<String>)>, StoreError> {
        let Some(registry) = self.registry() else {
            return Ok(None);
        };
        let entry = match &held.record {
            Some(record) if record.generation > 0 => registry
                .find(&record.job, record.generation)?
                .filter(|entry| entry.checkpoint.id == held.id),
            _ => registry
                .list("")?
                .into_iter()
                .find(|entry| entry.checkpoint.id == held.id),
        };
        Ok(entry.map(|entry| {
            let own = self.node();
            let line = entry.into_record();
            let others = line.nodes.iter().filter(|node| Some(node.as_str()) != own);
            let others = others.cloned().collect();
            (line, others)
        }))
    }

    /// Returns the content digest that the registry lists for a checkpoint; `None` without a cluster.
    ///
    /// # Errors
    /// The registry does not list the checkpoint, or does not answer.
    pub fn listed_digest(
        &self,
        record: &control::Checkpoint,
    ) -> Result<Option<ContentDigest>, StoreError> {
        let Some(registry) = self.registry() else {
            return Ok(None);
        };
        let found = registry.find(&record.job, record.generation)?;
        match found {
            Some(entry) if entry.checkpoint.id == record.id => Ok(Some(entry.content_digest)),
            _ => Err(StoreError::NotFound(MissingObject::Checkpoint(
                checkpoint_name(record),
            ))),
        }
    }

    /// Marks this node's copy of a checkpoint in the registry as damaged, or as whole; does nothing where the
    /// cluster does not list it. If the registry cannot be reached, the sweep repeats it later.
    pub fn list_damage(&self, record: &control::Checkpoint, damaged: bool) {
        let Some((registry, node)) = self.registry().zip(self.node()) else {
            return;
        };
        match registry.set_damaged(record, node, damaged) {
            Ok(()) | Err(StoreError::NotFound(_)) => {}
            Err(error) => {
                tracing::warn!(event = "registry-copy-not-marked", id = %record.id, damaged, %error, "the registry does not know yet how this copy stands");
            }
        }
    }

    /// Returns a job's newest checkpoint that counts: in a cluster, the newest listed one.
    pub(crate) fn head(&self, job: &str) -> Result<Option<control::Checkpoint>, StoreError> {
        match self.registry() {
            // A dump would fail without the registry, so it may fail here, before the task is frozen.
            Some(registry) => Ok(registry.find(job, 0)?.map(Registered::into_record)),
            None => self.local.record(job, None),
        }
    }

    /// Returns a job's checkpoint of that generation, or its newest. While the registry does not answer, published
    /// checkpoints of this node can still be read.
    pub(crate) fn look_up(
        &self,
        job: &str,
        generation: Option<u64>,
    ) -> Result<Option<control::Checkpoint>, StoreError> {
        if let Some(registry) = self.registry() {
            match registry.find(job, generation.unwrap_or(0)) {
                Ok(Some(entry)) => return Ok(Some(entry.into_record())),
                Ok(None) => {
                    let own = self.listed(Some(job))?;
                    let own = own.into_iter().filter(|record| {
                        record.generation > 0 && generation.is_none_or(|g| g == record.generation)
                    });
                    return Ok(own.max_by_key(|record| record.generation));
                }
                Err(error) => {
                    tracing::warn!(event = "registry-job-not-asked", %error, job, "registry not asked: this node's own catalog answers");
                }
            }
            let own = self.local.records(Some(job))?.into_iter().filter(|record| {
                generation.is_none_or(|g| g == record.generation)
                    && !self.is_provisional(&record.id)
            });
            return Ok(own.max_by_key(|record| record.generation));
        }
        self.local.record(job, generation)
    }

    /// Lists the checkpoints of a job, or all, by job and generation, parked ones last: those of the registry, and
    /// those of this node that were sealed before it joined a cluster.
    fn listed(&self, job: Option<&str>) -> Result<Vec<control::Checkpoint>, StoreError> {
        let mut own = self.local.records(job)?;
        let Some(registry) = self.registry() else {
            return Ok(own);
        };
        match registry.list(job.unwrap_or_default()) {
            Ok(entries) => {
                own.retain(|record| !self.was_committed_here(&record.id));
                let ids: HashSet<&str> =
                    entries.iter().map(|entry| &*entry.checkpoint.id).collect();
                own.retain(|record| !ids.contains(&*record.id));
                own.extend(entries.into_iter().map(Registered::into_record));
                own.sort_by(in_list_order);
            }
            Err(error) => {
                tracing::warn!(event = "registry-list-not-asked", %error, "registry not asked: this node's own checkpoints are listed");
                own.retain(|record| !self.is_provisional(&record.id));
            }
        }
        Ok(own)
    }

    /// Takes a checkpoint off the cluster's list, if it is on it, and notifies the nodes that hold it.
    pub(crate) fn withdraw(&self, record: &control::Checkpoint) -> Result<(), StoreError> {
        self.withdraw_by(record, &|registry| registry.withdraw(record))
    }

    /// Takes a checkpoint off the cluster's list by `withdraw`, if it is on it, and notifies the nodes that hold it.
    pub(crate) fn withdraw_by(
        &self,
        record: &control::Checkpoint,
        withdraw: &dyn Fn(&dyn Registry) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let Some(services) = &self.services else {
            return Ok(());
        };
        let is_published = |mark: PublicationState| mark.published;
        if record.nodes.is_empty() && !self.local.mark(&record.id).is_some_and(is_published) {
            // The checkpoint was never listed.
            return Ok(());
        }
        withdraw(&*services.registry)?;
        if let Some(replicate) = &services.replicate {
            let others = record.nodes.iter().filter(|node| **node != services.node);
            let others: Vec<String> = others.cloned().collect();
            replicate.withdrawn(&record.id, &others);
        }
        Ok(())
    }

    /// Returns a checkpoint that was sealed here, if it counts: in a cluster, only a listed checkpoint does.
    ///
    /// # Errors
    /// The checkpoint is not known to be listed.
    pub(crate) fn acknowledged(
        &self,
        record: control::Checkpoint,
    ) -> Result<control::Checkpoint, StoreError> {
        if !self.is_provisional(&record.id) {
            return Ok(record);
        }
        let unknown = || {
            StoreError::from(SealingError::Unlisted {
                checkpoint: checkpoint_name(&record),
            })
        };
        let registry = self.registry().ok_or_else(unknown)?;
        let entry = registry.find(&record.job, record.generation)?;
        let entry = entry.filter(|entry| entry.checkpoint.id == record.id);
        let entry = entry.ok_or_else(unknown)?;
        self.local.publish(&record.id)?;
        Ok(entry.into_record())
    }

    /// Returns true if this node's copy of a checkpoint may be dropped, published or not: the cluster lists the
    /// checkpoint without this node as a holder, or has taken it off the list.
    ///
    /// # Errors
    /// The registry does not answer; it lists the copy.
    pub fn may_go(&self, id: &str) -> Result<bool, StoreError> {
        let Some(services) = self.services.as_ref().filter(|_| self.local.holds(id)) else {
            return Ok(false);
        };
        let registry = &services.registry;
        // A checkpoint whose manifest is damaged is looked up by its id.
        let own = self.local.line_of(id);
        let entry = match own.generation {
            generation if generation > 0 => registry.find(&own.job, generation)?,
            _ => {
                let mut entries = registry.list("")?.into_iter();
                entries.find(|entry| entry.checkpoint.id == id)
            }
        };
        match entry.filter(|entry| entry.checkpoint.id == id) {
            Some(entry) if entry.nodes.contains(&services.node) => Err(SealingError::Listed {
                id: id.to_owned(),
                node: services.node.clone(),
            }
            .into()),
            Some(_) => Ok(true),
            None => registry.is_withdrawn(&own),
        }
    }

    pub(crate) fn is_provisional(&self, id: &str) -> bool {
        self.local.mark(id).is_some_and(|mark| mark.provisional)
    }

    /// Returns true for a checkpoint that was sealed for a cluster, listed or not.
    pub(crate) fn was_committed_here(&self, id: &str) -> bool {
        let mark = self.local.mark(id);
        mark.is_some_and(|mark| mark.provisional || mark.published)
    }
}

/// Adds the holders to the error for a listed checkpoint that is not here.
pub(crate) fn named_holders(error: StoreError, record: &control::Checkpoint) -> StoreError {
    match error {
        StoreError::NotFound(_) if !record.nodes.is_empty() => not_here(record),
        error => error,
    }
}

/// Returns the error for a checkpoint that is listed and not on this node.
pub(crate) fn not_here(record: &control::Checkpoint) -> StoreError {
    StoreError::NotFound(MissingObject::Copy {
        checkpoint: checkpoint_name(record),
        holders: record.nodes.clone(),
    })
}

fn cold_pages(fetch: bool) -> ColdPages {
    match fetch {
        true => ColdPages::Fetch,
        false => ColdPages::Leave,
    }
}
