//! Opens a session: the steps before it takes pages.

use std::sync::Arc;

use permafrost_parking::ParkedShare;
use permafrost_protocol::control;
use uuid::Uuid;

use super::dump::Parent;
use super::jobs::JobGuard;
use super::reader::check_listed_as;
use super::session::{Session, SessionRequest};
use super::{Store, StoreError, check_job, check_origin, forget_old_failures, manifest_of};
use crate::{Follower, SessionError, TransferSlot};

/// Locks and reservations of a session that is being opened. Dropping it gives everything back.
pub struct Opening {
    /// Id of the session.
    pub id: Uuid,
    /// Follower of the dump, begun with the same parent. Default none.
    pub follower: Option<Box<dyn Follower>>,
    /// Checkpoint that the dump is compared with. Default none.
    pub parent: Option<Parent>,
    /// Admission to the medium. Default none.
    pub turn: Option<Box<dyn TransferSlot>>,
    /// Share of the limit for anonymous dumps.
    pub(super) share: Option<ParkedShare>,
    /// Lock on the job; `None` for an anonymous session. Released last.
    pub lock: Option<JobGuard>,
}

impl Store {
    /// Checks that a dump may be opened, and locks its job.
    ///
    /// # Errors
    /// The region takes no writes; the job name or the origin is invalid; a dump of the job is open already; a quota
    /// does not allow it; the catalog cannot be read.
    pub fn begin_session(&self, request: &SessionRequest) -> Result<Opening, StoreError> {
        self.check_writable()?;
        self.reads.release_expired();
        check_origin(request.origin.as_ref())?;
        if request.pre_copy && !request.pre_dump {
            // A whole dump, after which its task may go, would expire.
            return Err(SessionError::NoPreDump.into());
        }
        let (lock, share) = if request.job.is_empty() {
            (None, Some(self.begin_anonymous()?))
        } else {
            (Some(self.lock_job(&request.job, "a dump")?), None)
        };
        self.check_may_open(&request.job)?;
        Ok(Opening {
            id: Uuid::new_v4(),
            lock,
            share,
            turn: None,
            parent: None,
            follower: None,
        })
    }

    /// Opens a session; it takes pages once a connection has been made.
    pub fn open_session(&self, request: SessionRequest, mut opening: Opening) -> Arc<Session> {
        self.counters.dumps_begun.add(1);
        if opening.parent.is_none() {
            self.refresh_shared(&request.job);
        }
        let measured = self.measure(&request, &mut opening);
        let session = Session::new(request, opening, measured);
        let mut sessions = self.sessions();
        forget_old_failures(&mut sessions);
        sessions.insert(session.id.clone(), Arc::clone(&session));
        session
    }

    /// Returns the session of that id, if it is not sealed yet.
    #[must_use]
    pub fn session(&self, id: &str) -> Option<Arc<Session>> {
        self.sessions().get(id).cloned()
    }

    /// Returns the checkpoint that a job's next dump is compared with; `head` is the record of the job's newest. A
    /// damaged one is skipped: comparing saves space, and must not keep a task from being stored.
    #[must_use]
    pub fn parent(&self, head: &control::Checkpoint) -> Option<Parent> {
        let (job, generation) = (&head.job, head.generation);
        if let Some(damage) = self.damage(&head.id) {
            tracing::warn!(
                event = "parent-damaged",
                job,
                generation,
                damage,
                "not compared with: damaged"
            );
            return None;
        }
        let read = || {
            let checkpoint = self.checkpoint(&head.id)?;
            let manifest = manifest_of(&checkpoint)?;
            check_listed_as(head, &manifest)?;
            let held = Arc::new(self.cooling.hold(&head.id));
            self.recall_all(&checkpoint)?;
            Ok::<_, StoreError>(Parent::new(checkpoint, manifest, held))
        };
        match read() {
            Ok(parent) => Some(parent),
            // The record names other holders.
            Err(StoreError::NotFound { .. }) if !head.nodes.is_empty() => None,
            Err(error) => {
                tracing::error!(event = "parent-unreadable", job, generation, %error, "not compared with: damaged or away");
                None
            }
        }
    }

    /// Locks a job against other writers of this store; `holder` names this one in their errors.
    ///
    /// # Errors
    /// The job name is invalid; another writer holds the lock.
    pub fn lock_job(&self, job: &str, holder: &str) -> Result<JobGuard, StoreError> {
        check_job(job)?;
        self.jobs.lock(job, holder).map_err(|holder| {
            SessionError::JobBusy {
                job: job.to_owned(),
                holder,
            }
            .into()
        })
    }

    /// Checks that a dump of the job could begin, as far as this store knows. Called before a request queues, so
    /// that it does not wait in vain.
    ///
    /// # Errors
    /// The job name is invalid; a dump of the job is under way here.
    pub fn check_free(&self, job: &str) -> Result<(), StoreError> {
        self.lock_job(job, "a dump").map(drop)
    }

    /// Reserves room for an anonymous dump.
    fn begin_anonymous(&self) -> Result<ParkedShare, StoreError> {
        let segment_bytes = self.region.usage().segment_bytes;
        let parked = self.catalog.list(Some(""))?;
        let parked_bytes = parked
            .iter()
            .filter(|record| record.generation == 0)
            .map(|record| record.added_bytes.max(segment_bytes))
            .fold(0, u64::saturating_add);
        Ok(self.anonymous.begin(parked_bytes, segment_bytes)?)
    }
}
