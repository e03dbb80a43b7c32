//! The store as one node of a cluster: dumps that are copied while they stream, sealed on all copies under one id,
//! and listed by the registry.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_pmem::{ATTR_PROVISIONAL, ATTR_PUBLISHED, CheckpointId, Shadow, StoredCheckpoint};
use permafrost_protocol::control;
use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::manifest::{JobName, Kind};
use permafrost_protocol::wire::message::Commit;

use super::checking::HeldCheckpoint;
use super::dump::Parent;
use super::elsewhere::not_here;
use super::reader::check_listed_as;
use super::seal::{Contents, Numbering, check_wanted};
use super::{Store, StoreError, digest, job_name, manifest_of};
use crate::clock::unix_ms;
use crate::reader::checkpoint_name;
use crate::{
    CopiesRequest, CopyStreams, Durability, Registered, Registry, Replicate, SealingError,
    SessionError,
};

/// Cluster services that a store uses when it is one node of several.
pub struct ClusterServices {
    /// Name of this node.
    pub node: String,
    /// Begins copies of dumps. `None`: nothing is copied while a dump streams.
    pub replicate: Option<Arc<dyn Replicate>>,
    /// Lists the checkpoints that exist. `None`: this node's own catalog lists them.
    pub registry: Option<Arc<dyn Registry>>,
    /// Durability of a session that requests none.
    pub durability: Durability,
    /// Longest time that CLOSE, and each step of the seal, may wait for copies: the task is frozen meanwhile.
    pub deadline: Duration,
    /// Number of copies that there should be of a checkpoint, this node's included.
    pub wanted_copies: u32,
}

/// Result of looking up a publication whose outcome is unknown.
enum Listed {
    Yes,
    No,
    Unknown,
}

impl Store {
    /// Makes the store a node of a cluster, once. Must be called before the store takes sessions. Returns false if
    /// it already is in a cluster.
    pub fn join(&self, cluster: ClusterServices) -> bool {
        self.cluster.set(cluster).is_ok()
    }

    /// Returns this node's name in the cluster; `None` without a cluster.
    #[must_use]
    pub fn node(&self) -> Option<&str> {
        Some(&self.cluster.get()?.node)
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
            let line = line(entry);
            let others = line.nodes.iter().filter(|node| Some(node.as_str()) != own);
            let others = others.cloned().collect();
            (line, others)
        }))
    }

    /// Returns the time in which this node must have a dump listed; zero without a cluster.
    pub(super) fn commit_deadline(&self) -> Duration {
        self.cluster
            .get()
            .map_or(Duration::ZERO, |cluster| cluster.deadline)
    }

    pub(super) fn registry(&self) -> Option<&dyn Registry> {
        self.cluster.get()?.registry.as_deref()
    }

    /// Begins copies of a dump, if this store replicates.
    ///
    /// # Errors
    /// There are not enough nodes: reported now, before the task is frozen.
    pub(super) fn begin_copies(
        &self,
        session: [u8; 16],
        job: &str,
        parent: Option<&Parent>,
        durability: Option<Durability>,
    ) -> Result<Option<Box<dyn CopyStreams>>, StoreError> {
        let cluster = self.cluster.get();
        let Some((cluster, replicate)) = cluster.and_then(|c| Some((c, c.replicate.as_ref()?)))
        else {
            return match durability {
                None | Some(Durability::Local) => Ok(None),
                Some(Durability::Quorum | Durability::All) => Err(SessionError::NoOtherNode.into()),
            };
        };
        let request = CopiesRequest {
            session,
            job: job.to_owned(),
            parent: parent.map_or_else(String::new, |parent| parent.checkpoint.id().to_string()),
            compared: parent.map_or_else(HashMap::new, |parent| parent.compared().clone()),
            durability: durability.unwrap_or(cluster.durability),
            deadline: cluster.deadline,
        };
        replicate.begin(request).map(Some)
    }

    /// Commits a dump in a cluster. At every moment at which this node can die, the checkpoint is visible entirely
    /// or not at all, which is decided by step 5 alone: a checkpoint exists if the registry lists it, whatever any
    /// node believes.
    ///
    /// 1. Prepare: enough nodes hold pages and images, durable, with one digest. Dying before the end of this
    ///    step leaves segments that nothing refers to: free at once on this node's restart, and on the others when the
    ///    conversation ends.
    /// 2. Reserve a generation. Dying here leaves a gap in the numbers, which nothing minds.
    /// 3. Seal here, provisional. Dying behind it leaves one provisional checkpoint, here. It is not listed, so
    ///    `settle` drops it. Not before step 1, which is the last that can fail for lack of room on the others.
    /// 4. Seal on the copies, provisional, too. Dying after k of n leaves k + 1 provisional ones; each node drops
    ///    its own, as above. Not before step 3: a node that cannot seal its own dump has nothing to tell others.
    /// 5. Publish: one transaction of the registry, which fails if this node's lease is lost. This is the commit.
    ///    Dying before it: as at 4, and the task was told nothing, or that the dump failed. Dying behind it: the
    ///    checkpoint is listed, all copies are durable since step 4, and `settle` publishes the provisional ones.
    /// 6. Mark it published, here and on the copies. If any of that is lost, `settle` asks the registry and does
    ///    it: it never drops what is listed.
    ///
    /// Why `settle` cannot drop what is about to be listed: it waits longer than the deadline of this function
    /// (checked before step 5) and the lease together, and without its lease this node cannot publish.
    pub(super) fn commit_in_cluster(
        &self,
        cluster: &ClusterServices,
        shadow: Shadow,
        contents: Contents,
        mut copies: Option<Box<dyn CopyStreams>>,
        wanted: &dyn Fn() -> bool,
    ) -> Result<control::Checkpoint, StoreError> {
        // 1.
        let content_digest = digest::of_whole(&contents.spaces, &contents.images);
        if let Some(copies) = &mut copies {
            copies.prepare(content_digest)?;
        }
        check_wanted(wanted)?;

        // 2.
        let began = Instant::now();
        let generation = match (contents.kind, &cluster.registry) {
            (Kind::Parked, _) => 0,
            (_, Some(registry)) => registry.reserve_generation(&contents.job)?,
            (_, None) => self.catalog.next_generation(&contents.job)?,
        };
        let numbering = Numbering {
            id: CheckpointId::random(),
            generation,
            created_unix_ms: unix_ms(),
        };
        let commit = Commit {
            checkpoint: numbering.id.to_string(),
            content_digest: content_digest.to_vec(),
            job: contents.job.clone(),
            generation,
            parent_generation: contents.parent_generation,
            created_unix_ms: numbering.created_unix_ms,
            kind: contents.kind.into(),
            origin: contents.origin.clone(),
            session: contents.session.clone(),
            deadline_ms: u64::try_from(cluster.deadline.as_millis()).unwrap_or(u64::MAX),
            taken_by: contents.taken_by.clone(),
        };

        // 3.
        let mut record = self.seal_numbered(
            shadow,
            contents,
            &numbering,
            ATTR_PROVISIONAL,
            content_digest,
        )?;

        // 4.
        let mut nodes = vec![cluster.node.clone()];
        if let Some(copies) = &mut copies {
            match copies.commit(&commit) {
                Ok(others) => nodes.extend(others),
                Err(error) => return Err(self.undo(&record, Some(&mut **copies), error)),
            }
        }
        record.nodes.clone_from(&nodes);
        record.copies_wanted = cluster.wanted_copies;

        // 5. The caller may have given up meanwhile, because its freeze has a limit.
        if let Err(error) = check_wanted(wanted) {
            return Err(self.undo(&record, copies.as_deref_mut(), error));
        }
        if let Some(registry) = &cluster.registry {
            if began.elapsed() > cluster.deadline {
                let late = StoreError::from(SealingError::Late {
                    limit_s: cluster.deadline.as_secs(),
                });
                return Err(self.undo(&record, copies.as_deref_mut(), late));
            }
            let entry = Registered {
                checkpoint: record.clone(),
                content_digest,
                nodes,
                wanted_copies: cluster.wanted_copies,
                damaged: Vec::new(),
            };
            if let Err(error) = registry.publish(&entry, None) {
                match listed_after(&**registry, &record, &error) {
                    Listed::Yes => {}
                    Listed::No => return Err(self.undo(&record, copies.as_deref_mut(), error)),
                    // A node that dropped the copies now might drop a listed checkpoint; one that acknowledged might
                    // acknowledge an unlisted one. The dump counts as failed, so its task lives on. Once the registry
                    // is back, its listing decides, for every node alike (`settle`).
                    Listed::Unknown => {
                        tracing::error!(id = %record.id, job = %record.job, %error, "not known whether it was published; the registry will tell");
                        return Err(error);
                    }
                }
            }
        }

        // 6. The checkpoint exists: nothing from here on is an error of the dump.
        if let Err(error) = self.publish(&record.id) {
            tracing::error!(id = %record.id, %error, "published, and not marked as such here");
        }
        if let Some(copies) = &mut copies {
            copies.published(&record.id);
        }
        Ok(record)
    }

    /// Drops a checkpoint everywhere that was sealed and is not listed; returns the error. `settle` later drops
    /// what cannot be dropped now.
    fn undo(
        &self,
        record: &control::Checkpoint,
        copies: Option<&mut (dyn CopyStreams + 'static)>,
        error: StoreError,
    ) -> StoreError {
        tracing::warn!(id = %record.id, job = %record.job, %error, "rolled back");
        if let Some(copies) = copies {
            copies.roll_back(&record.id);
        }
        if let Err(error) = self.roll_back(&record.id, false) {
            tracing::error!(id = %record.id, %error, "left over here");
        }
        error
    }

    /// Returns a job's newest checkpoint that counts: in a cluster, the newest listed one.
    pub(super) fn head(&self, job: &str) -> Result<Option<control::Checkpoint>, StoreError> {
        match self.registry() {
            // A dump would fail without the registry, so it may fail here, before the task is frozen.
            Some(registry) => Ok(registry.find(job, 0)?.map(line)),
            None => Ok(self.catalog.head(job)?),
        }
    }

    /// Returns a job's checkpoint of that generation, or its newest. While the registry does not answer, published
    /// checkpoints of this node can still be read.
    pub(super) fn look_up(
        &self,
        job: &str,
        generation: Option<u64>,
    ) -> Result<Option<control::Checkpoint>, StoreError> {
        if let Some(registry) = self.registry() {
            match registry.find(job, generation.unwrap_or(0)) {
                Ok(Some(entry)) => return Ok(Some(line(entry))),
                Ok(None) => {
                    let own = self.listed(Some(&job_name(job)?))?;
                    let own = own.into_iter().filter(|record| {
                        record.generation > 0 && generation.is_none_or(|g| g == record.generation)
                    });
                    return Ok(own.max_by_key(|record| record.generation));
                }
                Err(error) => {
                    tracing::warn!(%error, job, "registry not asked: this node's own catalog answers");
                }
            }
            let own = self.catalog.list(Some(job))?.into_iter().filter(|record| {
                generation.is_none_or(|g| g == record.generation)
                    && !self.is_provisional(&record.id)
            });
            return Ok(own.max_by_key(|record| record.generation));
        }
        Ok(match generation {
            Some(generation) => self.catalog.find(job, generation)?,
            None => self.catalog.head(job)?,
        })
    }

    /// Lists the checkpoints of a job, or all, by job and generation, parked ones last: those of the registry, and
    /// those of this node that were sealed before it joined a cluster.
    pub(super) fn listed(
        &self,
        job: Option<&JobName>,
    ) -> Result<Vec<control::Checkpoint>, StoreError> {
        let job = job.map(JobName::as_str);
        let mut own = self.catalog.list(job)?;
        let Some(registry) = self.registry() else {
            return Ok(own);
        };
        match registry.list(job.unwrap_or_default()) {
            Ok(entries) => {
                own.retain(|record| {
                    self.attrs(&record.id) & (ATTR_PROVISIONAL | ATTR_PUBLISHED) == 0
                });
                own.retain(|record| entries.iter().all(|entry| entry.checkpoint.id != record.id));
                own.extend(entries.into_iter().map(line));
                own.sort_by(|a, b| {
                    (a.generation == 0, &a.job, a.generation, &a.session).cmp(&(
                        b.generation == 0,
                        &b.job,
                        b.generation,
                        &b.session,
                    ))
                });
            }
            Err(error) => {
                tracing::warn!(%error, "registry not asked: this node's own checkpoints are listed");
                own.retain(|record| !self.is_provisional(&record.id));
            }
        }
        Ok(own)
    }

    /// Takes a checkpoint off the cluster's list, if it is on it, and notifies the nodes that hold it.
    pub(super) fn withdraw(&self, record: &control::Checkpoint) -> Result<(), StoreError> {
        let Some(cluster) = self.cluster.get() else {
            return Ok(());
        };
        if record.nodes.is_empty() && self.attrs(&record.id) & ATTR_PUBLISHED == 0 {
            // The checkpoint was never listed.
            return Ok(());
        }
        if let Some(registry) = &cluster.registry {
            registry.withdraw(record)?;
        }
        if let Some(replicate) = &cluster.replicate {
            let others = record.nodes.iter().filter(|node| **node != cluster.node);
            let others: Vec<String> = others.cloned().collect();
            replicate.withdrawn(&record.id, &others);
        }
        Ok(())
    }

    /// Returns a checkpoint that was sealed here, if it counts: in a cluster, only a listed checkpoint does.
    ///
    /// # Errors
    /// The checkpoint is not known to be listed.
    pub(super) fn acknowledged(
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
        self.publish(&record.id)?;
        Ok(line(entry))
    }

    /// Returns true if this node's copy of a checkpoint may be dropped, published or not: the cluster lists the
    /// checkpoint without this node as a holder, or has taken it off the list.
    ///
    /// # Errors
    /// The registry does not answer; it lists the copy.
    pub fn may_go(&self, id: &str) -> Result<bool, StoreError> {
        let (Some(cluster), Some(registry)) = (self.cluster.get(), self.registry()) else {
            return Ok(false);
        };
        let Ok(checkpoint) = self.checkpoint(id) else {
            return Ok(false);
        };
        // A checkpoint whose manifest is damaged is looked up by its id.
        let entry = match manifest_of(&checkpoint) {
            Ok(manifest) if manifest.generation > 0 => {
                registry.find(&manifest.job, manifest.generation)?
            }
            _ => {
                let mut entries = registry.list("")?.into_iter();
                entries.find(|entry| entry.checkpoint.id == id)
            }
        };
        match entry.filter(|entry| entry.checkpoint.id == id) {
            Some(entry) if entry.nodes.contains(&cluster.node) => Err(SealingError::Listed {
                id: id.to_owned(),
                node: cluster.node.clone(),
            }
            .into()),
            Some(_) => Ok(true),
            None => registry.is_withdrawn(&self.line_of(id)),
        }
    }

    /// Fails for a parked dump with copies: they are sealed on their nodes without images, and no step can add
    /// images to them yet.
    pub(super) fn check_adoptable(&self, record: &control::Checkpoint) -> Result<(), StoreError> {
        let clustered = self.attrs(&record.id) & (ATTR_PROVISIONAL | ATTR_PUBLISHED) != 0;
        if self.cluster.get().is_none() && !clustered {
            return Ok(());
        }
        Err(SealingError::ParkedInCluster {
            session: record.session.clone(),
        }
        .into())
    }

    /// Returns a listed checkpoint that is to be changed or verified. Its manifest, as far as it can be read, must
    /// match the listing.
    pub(super) fn listed_checkpoint(
        &self,
        record: &control::Checkpoint,
    ) -> Result<Arc<StoredCheckpoint>, StoreError> {
        let checkpoint = self.checkpoint_of(record)?;
        if let Ok(manifest) = manifest_of(&checkpoint) {
            check_listed_as(record, &manifest)?;
        }
        Ok(checkpoint)
    }

    /// Returns a listed checkpoint for reading.
    pub(super) fn checkpoint_of(
        &self,
        record: &control::Checkpoint,
    ) -> Result<Arc<StoredCheckpoint>, StoreError> {
        match self.checkpoint(&record.id) {
            Err(StoreError::NotFound { .. }) if !record.nodes.is_empty() => Err(not_here(record)),
            other => other,
        }
    }

    pub(super) fn is_provisional(&self, id: &str) -> bool {
        self.attrs(id) & ATTR_PROVISIONAL != 0
    }

    /// Returns the attribute bits of a checkpoint; 0 if it is not here.
    fn attrs(&self, id: &str) -> u32 {
        self.checkpoint(id)
            .map_or(0, |checkpoint| checkpoint.attrs())
    }
}

/// Returns the outcome of a failed publication. It is unknown only if the registry did not answer.
fn listed_after(
    registry: &dyn Registry,
    record: &control::Checkpoint,
    error: &StoreError,
) -> Listed {
    if error.code() != ErrorCode::Unavailable {
        return Listed::No;
    }
    // Parked checkpoints have no number to be found by.
    let found = if record.generation == 0 {
        registry.list("").map(|entries| {
            let mut ids = entries.into_iter().map(|entry| entry.checkpoint.id);
            ids.any(|id| id == record.id)
        })
    } else {
        let found = registry.find(&record.job, record.generation);
        found.map(|entry| entry.is_some_and(|entry| entry.checkpoint.id == record.id))
    };
    match found {
        Ok(true) => Listed::Yes,
        // The transaction may still be on its way.
        Ok(false) | Err(_) => Listed::Unknown,
    }
}

/// Returns the listing record of a registered checkpoint. Holders whose copy is damaged come last, so that they
/// are asked last.
fn line(entry: Registered) -> control::Checkpoint {
    let damaged = entry.nodes.iter().filter(|node| entry.is_damaged_on(node));
    control::Checkpoint {
        nodes: entry.good().chain(damaged.clone()).cloned().collect(),
        damaged_nodes: damaged.cloned().collect(),
        copies_wanted: entry.wanted_copies,
        ..entry.checkpoint
    }
}
