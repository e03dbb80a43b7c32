//! A session: a dump that is not sealed yet, from its opening to its end.
//!
//! ```text
//! Open ──connect──▶ Receiving ──CLOSE──▶ Closed ──Seal──▶ Sealing ──▶ (gone: a checkpoint)
//!   ▲                │   │                  │                │
//!   └──left silent───┘   └──error, EOF──▶ Failed ◀──refused──┘
//! ```
//!
//! A session whose CLOSE is CRIU's last word is made a parked checkpoint before CLOSE is answered, and is gone too.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use permafrost_client::frontend::{PageSink, SinkError};
use permafrost_protocol::control::{ErrorCode, SessionStatus};
use permafrost_protocol::manifest::Origin;
use permafrost_protocol::pageserver::SpaceId;
use tokio::sync::watch;

use super::dump::{Dump, DumpBuilder, Parent};
use super::jobs::JobGuard;
use super::{Store, StoreError};

/// What a session is opened with.
pub struct SessionRequest {
    /// Job; empty for an anonymous session.
    pub job: String,
    /// From `criu pre-dump`.
    pub pre_dump: bool,
    /// A seal follows CLOSE, so CLOSE need not park the pages.
    pub seal_follows: bool,
    /// Where the dump is taken.
    pub origin: Option<Origin>,
    /// Do not compare with the job's newest checkpoint.
    pub no_parent: bool,
    /// CRIU has the parent's inventory, and may be told that there is a parent.
    pub parent_images: bool,
}

/// A dump that is not sealed yet.
pub struct Session {
    /// 32 hex digits.
    pub id: String,
    /// What it was opened with.
    pub request: SessionRequest,
    /// What it is compared with.
    pub parent: Option<Parent>,
    /// Keeps other dumps of the job away until the session is over.
    job_guard: Mutex<Option<JobGuard>>,
    pub(super) opened: Instant,
    received: AtomicU64,
    phase: Mutex<Phase>,
    ended: watch::Sender<bool>,
}

pub(super) enum Phase {
    Open,
    Receiving,
    Closed(Box<Dump>),
    Sealing,
    Failed { code: ErrorCode, reason: String },
}

impl Phase {
    fn name(&self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Receiving => "receiving",
            Self::Closed(_) => "closed",
            Self::Sealing => "sealing",
            Self::Failed { .. } => "failed",
        }
    }
}

impl Session {
    pub(super) fn new(
        request: SessionRequest,
        parent: Option<Parent>,
        job_guard: Option<JobGuard>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id: uuid::Uuid::new_v4().simple().to_string(),
            request,
            parent,
            job_guard: Mutex::new(job_guard),
            opened: Instant::now(),
            received: AtomicU64::new(0),
            phase: Mutex::new(Phase::Open),
            ended: watch::Sender::new(false),
        })
    }

    /// Turns true when the session takes no more pages: closed, failed or discarded.
    #[must_use]
    pub fn ended(&self) -> watch::Receiver<bool> {
        self.ended.subscribe()
    }

    fn is_over(&self) -> bool {
        *self.ended.borrow()
    }

    pub(super) fn end(&self) {
        self.ended.send_replace(true);
    }

    /// Lets the next dump of the job begin.
    pub(super) fn release_job(&self) {
        self.job_guard
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }

    /// Its state for people.
    #[must_use]
    pub fn status(&self) -> SessionStatus {
        let phase = self.phase();
        SessionStatus {
            session: self.id.clone(),
            job: self.request.job.clone(),
            state: phase.name().to_owned(),
            received_bytes: self.received.load(Ordering::Relaxed),
            error: if let Phase::Failed { reason, .. } = &*phase {
                reason.clone()
            } else {
                String::new()
            },
            age_s: self.opened.elapsed().as_secs(),
        }
    }

    pub(super) fn phase(&self) -> MutexGuard<'_, Phase> {
        // A phase is replaced in one assignment, so it is whole even if a thread died holding it.
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The session, for the one connection that brings its pages.
    ///
    /// # Errors
    /// Another connection is or was at it.
    pub fn start(self: &Arc<Self>, store: &Arc<Store>) -> Result<SessionSink, StoreError> {
        let mut phase = self.phase();
        if !matches!(*phase, Phase::Open) {
            return Err(StoreError::Conflict {
                message: format!(
                    "session {} is {} and takes no other connection",
                    self.id,
                    phase.name()
                ),
                hint: "open a session for every dump",
            });
        }
        *phase = Phase::Receiving;
        let builder = DumpBuilder::new(store.region(), self.parent.clone());
        Ok(SessionSink {
            store: Arc::clone(store),
            session: Arc::clone(self),
            builder: Some(builder),
            failure: ErrorCode::SessionFailed,
        })
    }

    /// The connection left without a word: the next one may try.
    pub fn reopen(&self) {
        let mut phase = self.phase();
        if matches!(*phase, Phase::Receiving) {
            *phase = Phase::Open;
        }
    }

    /// Notes the failure that the session ends with; the first one counts.
    pub fn fail(&self, code: ErrorCode, reason: &str) {
        {
            let mut phase = self.phase();
            if matches!(*phase, Phase::Failed { .. }) {
                return;
            }
            *phase = Phase::Failed {
                code,
                reason: reason.to_owned(),
            };
        }
        self.release_job();
        tracing::warn!(session = %self.id, job = %self.request.job, reason, "session failed");
        self.end();
    }

    /// Takes the dump for sealing.
    pub(super) fn take_closed(&self) -> Result<Dump, StoreError> {
        let mut phase = self.phase();
        match std::mem::replace(&mut *phase, Phase::Sealing) {
            Phase::Closed(dump) => Ok(*dump),
            other => {
                let error = match &other {
                    Phase::Failed { code, reason } => StoreError::SessionFailed {
                        session: self.id.clone(),
                        code: *code,
                        reason: reason.clone(),
                    },
                    unready => StoreError::Conflict {
                        message: format!(
                            "session {} is {}, not closed: CRIU's CLOSE has not come",
                            self.id,
                            unready.name()
                        ),
                        hint: "seal after CRIU has sent all pages (the post-dump action)",
                    },
                };
                *phase = other;
                Err(error)
            }
        }
    }
}

/// A session as the page-server front end's sink.
pub struct SessionSink {
    store: Arc<Store>,
    session: Arc<Session>,
    builder: Option<DumpBuilder>,
    /// Why the session failed, if it does; what the client does wrong unless the store said otherwise.
    failure: ErrorCode,
}

impl SessionSink {
    /// What CLOSE asks for: the pages durable, and either waiting for their seal or parked.
    fn finish(&self, builder: DumpBuilder) -> Result<(), StoreError> {
        let dump = builder.finish()?;
        if !self.session.request.seal_follows {
            return self.store.park(&self.session, dump);
        }
        let mut phase = self.session.phase();
        if let Phase::Failed { code, reason } = &*phase {
            return Err(StoreError::SessionFailed {
                session: self.session.id.clone(),
                code: *code,
                reason: reason.clone(),
            });
        }
        *phase = Phase::Closed(Box::new(dump));
        Ok(())
    }

    fn with<T>(
        &mut self,
        take: impl FnOnce(&mut DumpBuilder) -> Result<T, StoreError>,
    ) -> Result<T, SinkError> {
        if self.session.is_over() {
            // Discarded from outside in mid-dump: what it holds is wanted by others.
            self.builder = None;
        }
        let taken = take(self.builder.as_mut().ok_or_else(over)?);
        self.refused(taken)
    }

    /// As the front end wants it; the session is going to end with this error.
    fn refused<T>(&mut self, result: Result<T, StoreError>) -> Result<T, SinkError> {
        result.map_err(|error| {
            self.failure = error.code();
            error.to_refusal()
        })
    }
}

fn over() -> SinkError {
    const EINVAL: i32 = 22;
    SinkError {
        message: "the session is over".to_owned(),
        status: EINVAL,
    }
}

impl PageSink for SessionSink {
    fn open(&mut self, space: SpaceId) -> Result<bool, SinkError> {
        // CRIU that is told of a parent it has no images of fails in its detection of reused pids.
        let told = self.session.request.parent_images;
        self.with(|builder| Ok(builder.open(space, None)? && told))
    }

    fn has_parent(&mut self, space: SpaceId) -> Result<bool, SinkError> {
        let told = self.session.request.parent_images;
        self.with(|builder| Ok(builder.has_parent(space) && told))
    }

    fn pages(&mut self, vaddr: u64, flags: u16, bytes: &[u8]) -> Result<(), SinkError> {
        self.session
            .received
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.with(|builder| builder.pages(vaddr, flags, bytes))
    }

    fn hole(&mut self, vaddr: u64, nr_pages: u64) -> Result<(), SinkError> {
        self.with(|builder| builder.hole(vaddr, nr_pages))
    }

    fn close(&mut self) -> Result<(), SinkError> {
        let builder = self.builder.take().ok_or_else(over)?;
        let closed = self.finish(builder);
        self.refused(closed)?;
        self.session.end();
        Ok(())
    }

    fn abort(&mut self, reason: &str) {
        self.builder = None;
        self.session.fail(self.failure, reason);
    }
}

impl Drop for SessionSink {
    fn drop(&mut self) {
        // A thread that dies of a defect must not leave the job locked.
        if matches!(*self.session.phase(), Phase::Receiving) {
            self.session
                .fail(ErrorCode::Internal, "its connection was dropped");
        }
    }
}
