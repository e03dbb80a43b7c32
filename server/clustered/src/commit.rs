//! Seals a dump on all of its copies under one id, and lists it.

use std::sync::Arc;
use std::time::Instant;

use permafrost_protocol::control::{self, ErrorCode, ReportedError as _};
use permafrost_protocol::manifest::Kind;
use permafrost_protocol::wire::message::Commit;
use permafrost_store::{
    DumpTap, Follower, Numbering, PreparedDump, SealingError, Store, StoreError, check_wanted,
};

use crate::{ClusterServices, CopyStreams, Registered, Registry};

/// Part of the cluster in a dump of this node.
pub(crate) struct ClusterDump {
    pub(crate) services: Arc<ClusterServices>,
    /// Generation that is reserved for the dump; 0 for one without a job.
    pub(crate) generation: u64,
    /// CopyStreams on other nodes; `None`: nothing is copied while the dump streams.
    pub(crate) copies: Option<Box<dyn CopyStreams>>,
}

/// Result of looking up a publication whose outcome is unknown.
enum Listed {
    Yes,
    No,
    Unknown,
}

impl Follower for ClusterDump {
    fn tap(&mut self) -> Option<&mut dyn DumpTap> {
        let copies = self.copies.as_deref_mut()?;
        Some(copies)
    }

    /// Commits a dump in a cluster. At every moment at which this node can die, the checkpoint is visible entirely
    /// or not at all, which is decided by step 4 alone: a checkpoint exists if the registry lists it, whatever any
    /// node believes.
    ///
    /// 1. A generation was reserved when the dump was opened, before its task was frozen. Dying from then on leaves a gap
    ///    in the numbers, which nothing minds.
    /// 2. Prepare: enough nodes hold pages and images, durable, with one digest. Dying before the end of this
    ///    step leaves segments that nothing refers to: free at once on this node's restart, and on the others when the
    ///    conversation ends.
    /// 3. Seal here and on the copies at the same time, provisional. Dying meanwhile leaves some provisional
    ///    checkpoints. They are not listed, so each node's `settle` drops its own. Not before step 2, which is the last
    ///    that can fail for lack of room. If this node cannot seal its own, the copies are rolled back.
    /// 4. Publish: one transaction of the registry, which fails if this node's lease is lost. This is the commit.
    ///    Dying before it: as at 3, and the task was told nothing, or that the dump failed. Dying behind it: the
    ///    checkpoint is listed, all copies are durable since step 3, and `settle` publishes the provisional ones.
    /// 5. Mark it published, here and on the copies. If any of that is lost, `settle` asks the registry and does
    ///    it: it never drops what is listed.
    ///
    /// Why `settle` cannot drop what is about to be listed: it waits longer than the deadline of this function
    /// (checked before step 4) and the lease together, and without its lease this node cannot publish.
    fn seal(
        self: Box<Self>,
        dump: PreparedDump<'_>,
        wanted: &dyn Fn() -> bool,
    ) -> Result<control::Checkpoint, StoreError> {
        let Self {
            services,
            generation,
            mut copies,
        } = *self;
        let (store, registry) = (dump.store(), &*services.registry);
        // 2.
        let content_digest = dump.digest();
        if let Some(copies) = &mut copies {
            copies.prepare(content_digest)?;
        }
        check_wanted(wanted)?;

        // 3.
        let began = Instant::now();
        let contents = dump.contents();
        let generation = match contents.kind {
            Kind::Parked => 0,
            _ => generation,
        };
        let numbering = Numbering {
            commit_deadline: services.deadline,
            ..Numbering::new(generation)
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
            deadline_ms: u64::try_from(services.deadline.as_millis()).unwrap_or(u64::MAX),
            taken_by: contents.taken_by.clone(),
        };

        let seal_here = || dump.seal(&numbering);
        let sealed = match &mut copies {
            Some(copies) => copies.commit(&commit, Box::new(seal_here)),
            None => seal_here().map(|record| (record, Vec::new())),
        };
        let (mut record, others) = match sealed {
            Ok(sealed) => sealed,
            Err(error) => return Err(undo(store, &commit, copies.as_deref_mut(), error)),
        };
        let nodes: Vec<_> = std::iter::once(services.node.clone())
            .chain(others)
            .collect();
        record.nodes.clone_from(&nodes);
        record.copies_wanted = services.wanted_copies;

        // 4. The caller may have given up meanwhile, because its freeze has a limit.
        if let Err(error) = check_wanted(wanted) {
            return Err(undo(store, &commit, copies.as_deref_mut(), error));
        }
        if began.elapsed() > services.deadline {
            let late = StoreError::from(SealingError::Late {
                limit_s: services.deadline.as_secs(),
            });
            return Err(undo(store, &commit, copies.as_deref_mut(), late));
        }
        let entry = Registered {
            checkpoint: record.clone(),
            content_digest,
            nodes,
            wanted_copies: services.wanted_copies,
            damaged: Vec::new(),
            cold: Vec::new(),
        };
        if let Err(error) = registry.publish(&entry, None) {
            match listed_after(registry, &record, &error) {
                Listed::Yes => {}
                Listed::No => return Err(undo(store, &commit, copies.as_deref_mut(), error)),
                // A node that dropped the copies now might drop a listed checkpoint; one that acknowledged might
                // acknowledge an unlisted one. The dump counts as failed, so its task lives on. Once the registry
                // is back, its listing decides, for every node alike (`settle`).
                Listed::Unknown => {
                    tracing::error!(event = "publication-unknown", id = %record.id, job = %record.job, %error, "not known whether it was published; the registry will tell");
                    return Err(error);
                }
            }
        }

        // 5. The checkpoint exists: nothing from here on is an error of the dump.
        if let Err(error) = store.publish(&record.id) {
            tracing::error!(event = "publication-not-marked", id = %record.id, %error, "published, and not marked as such here");
        }
        if let Some(copies) = &mut copies {
            copies.published(&record.id);
        }
        Ok(record)
    }
}

/// Drops a checkpoint everywhere that may have been sealed and is not listed; returns the error. `settle` later drops
/// what cannot be dropped now.
fn undo(
    store: &Store,
    commit: &Commit,
    copies: Option<&mut (dyn CopyStreams + 'static)>,
    error: StoreError,
) -> StoreError {
    let id = &commit.checkpoint;
    tracing::warn!(event = "dump-rolled-back", id, job = commit.job, %error, "rolled back");
    if let Some(copies) = copies {
        copies.roll_back(id);
    }
    if let Err(error) = store.roll_back(id, false) {
        tracing::error!(event = "rolled-back-copy-left", id, %error, "left over here");
    }
    error
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
