//! A session: a dump that is not yet sealed, from its opening to its end.
//!
//! ```text
//! Open ──first byte──▶ Receiving ──CLOSE──▶ Closed ──Seal──▶ Images ──all in──▶ Sealing ──▶ (gone: a checkpoint)
//!   │                    │     └────CLOSE, nobody seals────────────────────────▶ │
//!   └──────discarded─────┴──────error, EOF, discarded──┬────────┴─────────────────┘ failed
//!                                                      ▼
//!                                                   Failed
//! ```
//!
//! A session that ends with CLOSE is sealed as a parked checkpoint before CLOSE is answered. While a session is
//! being sealed, only the sealing thread ends it: no session is both sealed and discarded.

mod sealing;

use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use permafrost_criu::frontend::{PageSink, SinkError};
use permafrost_pmem::PAGE_SIZE;
use permafrost_protocol::control::{ErrorCode, ReportedError, SessionStatus};
use permafrost_protocol::manifest::{AddressSpace, Origin};
use permafrost_protocol::pageserver::SpaceId;
use tokio::sync::watch;
use uuid::Uuid;

pub(super) use self::sealing::Sealing;
use super::counters::Counters;
use super::dump::{Dump, DumpBuilder, Parent};
use super::jobs::JobGuard;
use super::measured::Measured;
use super::parking::Share;
use super::{Store, StoreError, parked};
use crate::SessionError;
use crate::TransferSlot;
use crate::clock::unix_ms;
use crate::{CopyStreams, Durability};

/// Request to open a session.
pub struct SessionRequest {
    /// Job; empty for an anonymous session.
    pub job: String,
    /// True for a dump by `criu pre-dump`.
    pub pre_dump: bool,
    /// True if a seal follows CLOSE, so that CLOSE need not park the pages.
    pub seal_follows: bool,
    /// Facts about the dump's origin.
    pub origin: Option<Origin>,
    /// True if the dump is not to be compared with the job's newest checkpoint.
    pub no_parent: bool,
    /// True if CRIU has the parent's inventory, so that it may be told that there is a parent.
    pub parent_images: bool,
    /// Durability that must be reached before CLOSE and the seal are answered; by default that of the cluster's
    /// configuration.
    pub durability: Option<Durability>,
    /// True if the tasks run on this machine, not on an agent's.
    pub from_here: bool,
    /// Client that opens the session, as it was authenticated: see [`permafrost_protocol::manifest::TakenBy`].
    pub taken_by: String,
}

/// A dump that is not sealed yet.
pub struct Session {
    /// Session id, 32 hex digits.
    pub id: String,
    /// Request that it was opened with.
    pub request: SessionRequest,
    /// Generation that the dump is compared with, 0 for none.
    pub parent_generation: u64,
    /// Origin of the parent generation.
    pub parent_origin: Option<Origin>,
    opened: Instant,
    /// Bytes of zero pages that were announced and not sent.
    zeros: AtomicU64,
    /// Bytes of pages received.
    moved: Arc<AtomicU64>,
    counters: Arc<Counters>,
    /// Client that brought the pages, where it is not the one that opened the session.
    brought_by: OnceLock<String>,
    state: Mutex<State>,
    ended: watch::Sender<bool>,
}

struct State {
    phase: Phase,
    since: Instant,
    /// Keeps the parent's segments; moved to the dump when it starts.
    parent: Option<Parent>,
    /// Copies on other nodes; moved to the dump when it starts.
    copies: Option<Box<dyn CopyStreams>>,
    /// Keeps other dumps of the job away until the session is over.
    job_guard: Option<JobGuard>,
    /// Admission to the medium.
    turn: Option<Box<dyn TransferSlot>>,
    /// Time at which its pages began to come, milliseconds since the Unix epoch; 0 before.
    begun_unix_ms: u64,
    /// Ends the connection that brings the pages.
    hang_up: Option<Box<dyn FnOnce() + Send>>,
    measured: Measured,
    /// Its share of the limit for anonymous dumps; moved to the sink when it starts.
    share: Option<Share>,
}

enum Phase {
    Open,
    Receiving,
    Closed(Box<Dump>),
    /// The small images are being received.
    Images,
    Sealing,
    Failed {
        code: ErrorCode,
        reason: String,
    },
}

impl Phase {
    fn name(&self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Receiving => "receiving",
            Self::Closed(_) => "closed",
            Self::Images | Self::Sealing => "sealing",
            Self::Failed { .. } => "failed",
        }
    }

    /// Returns true if pages or images are being received, or sealed.
    fn is_taking(&self) -> bool {
        matches!(self, Self::Receiving | Self::Images | Self::Sealing)
    }
}

impl State {
    fn enter(&mut self, phase: Phase) -> Phase {
        self.since = Instant::now();
        std::mem::replace(&mut self.phase, phase)
    }

    /// Fails the session and returns everything it held. The caller drops that without the lock, because dropping
    /// calls the registry and other nodes.
    #[must_use = "it is dropped once the lock is released"]
    fn fail(&mut self, code: ErrorCode, reason: &str) -> Released {
        let phase = self.enter(Phase::Failed {
            code,
            reason: reason.to_owned(),
        });
        self.measured.failed();
        Released {
            _phase: phase,
            _parent: self.parent.take(),
            _copies: self.copies.take(),
            _job_guard: self.job_guard.take(),
            _turn: self.turn.take(),
            _share: self.share.take(),
        }
    }
}

/// Everything that a session held.
struct Released {
    _phase: Phase,
    _parent: Option<Parent>,
    _copies: Option<Box<dyn CopyStreams>>,
    _job_guard: Option<JobGuard>,
    _turn: Option<Box<dyn TransferSlot>>,
    _share: Option<Share>,
}

impl Session {
    pub(super) fn new(
        id: Uuid,
        request: SessionRequest,
        parent: Option<Parent>,
        job_guard: Option<JobGuard>,
        copies: Option<Box<dyn CopyStreams>>,
        turn: Option<Box<dyn TransferSlot>>,
        measured: Measured,
    ) -> Arc<Self> {
        let now = Instant::now();
        let turn = turn.map(|mut turn| {
            turn.follow(Arc::clone(&measured.moved));
            turn
        });
        Arc::new(Self {
            id: id.simple().to_string(),
            request,
            parent_generation: parent
                .as_ref()
                .map_or(0, |parent| parent.manifest.generation),
            parent_origin: parent
                .as_ref()
                .and_then(|parent| parent.manifest.origin.clone()),
            opened: now,
            zeros: AtomicU64::new(0),
            moved: Arc::clone(&measured.moved),
            counters: Arc::clone(&measured.counters),
            brought_by: OnceLock::new(),
            state: Mutex::new(State {
                phase: Phase::Open,
                since: now,
                parent,
                copies,
                job_guard,
                turn,
                begun_unix_ms: 0,
                hang_up: None,
                measured,
                share: None,
            }),
            ended: watch::Sender::new(false),
        })
    }

    /// Sets the session's share of the limit for anonymous dumps.
    pub(super) fn bounded_by(&self, share: Option<Share>) {
        self.state().share = share;
    }

    /// Records that another client than the opener sends the pages: they are that client's memory.
    pub fn brought_by(&self, client: String) {
        // One connection sends the pages, so it is set once.
        let _ = self.brought_by.set(client);
    }

    /// Returns the client that the manifest is to name.
    pub(super) fn taken_by(&self) -> String {
        let client = self.brought_by.get().unwrap_or(&self.request.taken_by);
        client.clone()
    }

    /// Returns a channel that turns true when the session takes no more pages: closed, failed or discarded.
    #[must_use]
    pub fn ended(&self) -> watch::Receiver<bool> {
        self.ended.subscribe()
    }

    /// Returns the state of the session for people.
    #[must_use]
    pub fn status(&self) -> SessionStatus {
        let state = self.state();
        SessionStatus {
            session: self.id.clone(),
            job: self.request.job.clone(),
            state: state.phase.name().to_owned(),
            received_bytes: self.moved.load(Ordering::Relaxed) + self.zeros.load(Ordering::Relaxed),
            error: if let Phase::Failed { reason, .. } = &state.phase {
                reason.clone()
            } else {
                String::new()
            },
            age_s: self.opened.elapsed().as_secs(),
        }
    }

    /// Returns the sink for the one connection that brings the session's pages; `hang_up` ends that connection.
    ///
    /// # Errors
    /// Another connection is or was at it.
    pub fn start(
        self: &Arc<Self>,
        store: &Arc<Store>,
        hang_up: Box<dyn FnOnce() + Send>,
    ) -> Result<SessionSink, StoreError> {
        let mut state = self.state();
        if !matches!(state.phase, Phase::Open) {
            return Err(SessionError::NotOpen {
                session: self.id.clone(),
                phase: state.phase.name(),
            }
            .into());
        }
        state.enter(Phase::Receiving);
        state.hang_up = Some(hang_up);
        state.begun_unix_ms = unix_ms();
        state.measured.begun();
        let builder = DumpBuilder::new(store.region(), state.parent.take(), state.copies.take())
            .until(self.ended());
        Ok(SessionSink {
            store: Arc::clone(store),
            session: Arc::clone(self),
            builder: Some(builder),
            share: state.share.take(),
            failure: ErrorCode::SessionFailed,
        })
    }

    /// Registers the function that ends the connection which is going to send the pages, before it sends any.
    pub fn expect_from(&self, hang_up: Box<dyn FnOnce() + Send>) {
        let mut state = self.state();
        if matches!(state.phase, Phase::Failed { .. }) {
            drop(state);
            hang_up();
        } else {
            state.hang_up = Some(hang_up);
        }
    }

    /// Ends a session from outside: frees everything it holds and disconnects the sender of its pages. Returns
    /// false when the session is being sealed, and goes on.
    pub(super) fn discard(&self, code: ErrorCode, reason: &str) -> bool {
        let (released, hang_up) = {
            let mut state = self.state();
            let released = match state.phase {
                Phase::Sealing => return false,
                Phase::Failed { .. } => return true,
                _ => state.fail(code, reason),
            };
            (released, state.hang_up.take())
        };
        drop(released);
        if let Some(hang_up) = hang_up {
            hang_up();
        }
        self.log_failure(reason);
        true
    }

    /// Discards the session if it has been waiting for `limit`: for its dump, or for its seal.
    pub(super) fn discard_if_idle(&self, limit: Duration) -> bool {
        let idle = {
            let state = self.state();
            !state.phase.is_taking() && state.since.elapsed() >= limit
        };
        // If a connection took the session up in between, it would be discarded for being late by a moment: an error
        // that its client sees.
        idle && self.discard(ErrorCode::SessionFailed, "nobody came for it in time")
    }

    /// Returns true if its pages or images are being received, or sealed.
    pub(super) fn is_taking(&self) -> bool {
        self.state().phase.is_taking()
    }

    /// Returns the time at which the session failed, if it did.
    pub(super) fn failed_since(&self) -> Option<Instant> {
        let state = self.state();
        matches!(state.phase, Phase::Failed { .. }).then_some(state.since)
    }

    /// Returns the known origin of a dump that ends with CLOSE. The tasks are still frozen.
    pub(super) fn parked_origin(&self, spaces: &[AddressSpace]) -> Origin {
        let mut origin = self.request.origin.clone().unwrap_or_default();
        origin.pages_begun_unix_ms = self.state().begun_unix_ms;
        origin.pages_closed_unix_ms = unix_ms();
        if origin.processes.is_empty() {
            origin.processes = parked::look_at(spaces, self.request.from_here);
        }
        origin
    }

    /// Takes the dump for sealing. It can still be discarded until [`Sealing::images_are_in`].
    pub(super) fn begin_seal(&self) -> Result<(Dump, Sealing<'_>), StoreError> {
        let mut state = self.state();
        match state.enter(Phase::Images) {
            Phase::Closed(dump) => Ok((*dump, Sealing::new(self))),
            other => {
                let error = match &other {
                    Phase::Failed { code, reason } => self.failed(*code, reason),
                    unready => SessionError::NotClosed {
                        session: self.id.clone(),
                        phase: unready.name(),
                    }
                    .into(),
                };
                state.enter(other);
                Err(error)
            }
        }
    }

    /// Moves the session from receiving to `next`, unless it was discarded meanwhile.
    fn leave_receiving(&self, next: Phase) -> Result<(), StoreError> {
        let mut state = self.state();
        match &state.phase {
            Phase::Failed { code, reason } => Err(self.failed(*code, reason)),
            _ => {
                state.enter(next);
                Ok(())
            }
        }
    }

    fn failed(&self, code: ErrorCode, reason: &str) -> StoreError {
        StoreError::Session(SessionError::Failed {
            session: self.id.clone(),
            code,
            reason: reason.to_owned(),
        })
    }

    fn is_over(&self) -> bool {
        *self.ended.borrow()
    }

    /// Returns the time since the session was opened.
    pub(super) fn age(&self) -> Duration {
        self.opened.elapsed()
    }

    /// Calls `ask` with the session's measurements.
    pub(super) fn measured<T>(&self, ask: impl FnOnce(&mut Measured) -> T) -> T {
        ask(&mut self.state().measured)
    }

    fn log_failure(&self, reason: &str) {
        tracing::warn!(session = %self.id, job = %self.request.job, reason, "session failed");
        self.counters.dumps_failed.add(1);
        self.measured(|measured| measured.tell_failure(&self.request.job, &self.id, reason));
        self.ended.send_replace(true);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A state is changed by assignments, so it is whole even if a thread died holding it.
        self.state.lock()
    }
}

/// A session as the page-server front end's sink.
pub struct SessionSink {
    store: Arc<Store>,
    session: Arc<Session>,
    builder: Option<DumpBuilder>,
    /// Its share of the limit for anonymous dumps.
    share: Option<Share>,
    /// Error code for the session's failure: an error of the client unless the store set another.
    failure: ErrorCode,
}

impl SessionSink {
    /// Ends the dump at CLOSE: makes the pages durable, and keeps them for their seal or parks them.
    fn finish(&mut self, builder: DumpBuilder) -> Result<(), StoreError> {
        let dump = builder.finish()?;
        if let Some(share) = &mut self.share {
            share.grow_to(dump.shadow.added_bytes())?;
        }
        self.session
            .measured(|measured| measured.closed(dump.waited));
        if self.session.request.seal_follows {
            self.session
                .leave_receiving(Phase::Closed(Box::new(dump)))?;
            self.session.ended.send_replace(true);
            return Ok(());
        }
        self.session.leave_receiving(Phase::Sealing)?;
        let sealing = Sealing::new(&self.session);
        if dump.spaces.iter().all(|space| space.pages == 0) {
            // There is nothing to keep, and no client could adopt it.
            self.store.forget_session(&self.session.id);
            sealing.done();
            return Ok(());
        }
        match self.store.park(&self.session, dump) {
            Ok(()) => {
                if let Some(share) = self.share.take() {
                    share.park();
                }
                sealing.done();
                self.session.counters.dumps_parked.add(1);
                Ok(())
            }
            Err(error) => {
                sealing.failed(&error);
                Err(error)
            }
        }
    }

    fn with<T>(
        &mut self,
        take: impl FnOnce(&mut DumpBuilder) -> Result<T, StoreError>,
    ) -> Result<T, SinkError> {
        if self.session.is_over() {
            // Discarded from outside in mid-dump: its resources are needed by others.
            self.builder = None;
        }
        let builder = self.builder.as_mut().ok_or_else(over)?;
        let taken = take(builder).and_then(|taken| {
            if let Some(share) = &mut self.share {
                share.grow_to(builder.added_bytes())?;
            }
            Ok(taken)
        });
        self.refused(taken)
    }

    /// Converts an error to the front end's type; the session is going to end with this error.
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

impl SessionSink {
    /// Appends zero pages that are announced and not sent. The cost does not depend on their number.
    ///
    /// # Errors
    /// Those of appending pages.
    pub fn zeros(&mut self, first_index: u64, flags: u16, pages: u64) -> Result<(), SinkError> {
        let bytes = pages.saturating_mul(PAGE_SIZE as u64);
        self.session.zeros.fetch_add(bytes, Ordering::Relaxed);
        self.with(|builder| builder.zeros(first_index, flags, pages))
    }
}

impl PageSink for SessionSink {
    fn open(&mut self, space: SpaceId) -> Result<bool, SinkError> {
        // If CRIU is told of a parent without having its images, its detection of reused pids fails.
        let told = self.session.request.parent_images;
        self.with(|builder| Ok(builder.open(space, None)? && told))
    }

    fn has_parent(&mut self, space: SpaceId) -> Result<bool, SinkError> {
        let told = self.session.request.parent_images;
        self.with(|builder| Ok(builder.has_parent(space) && told))
    }

    fn pages(&mut self, vaddr: u64, flags: u16, bytes: &[u8]) -> Result<(), SinkError> {
        self.session
            .moved
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.session.counters.received_bytes.add(bytes.len() as u64);
        self.with(|builder| builder.pages(vaddr, flags, bytes))
    }

    fn hole(&mut self, vaddr: u64, nr_pages: u64) -> Result<(), SinkError> {
        self.with(|builder| builder.hole(vaddr, nr_pages))
    }

    fn close(&mut self) -> Result<(), SinkError> {
        let builder = self.builder.take().ok_or_else(over)?;
        let closed = self.finish(builder);
        self.refused(closed)
    }

    fn abort(&mut self, reason: &str) {
        self.builder = None;
        self.share = None;
        let mut state = self.session.state();
        if matches!(state.phase, Phase::Receiving) {
            let released = state.fail(self.failure, reason);
            drop(state);
            drop(released);
            self.session.log_failure(reason);
        }
    }
}

impl Drop for SessionSink {
    fn drop(&mut self) {
        // A thread that panics must not leave the job locked.
        self.abort("its connection was dropped");
        // The callback holds the connection open.
        self.session.state().hang_up = None;
    }
}

impl permafrost_agent::host::DumpSession for Session {
    fn id(&self) -> &str {
        &self.id
    }

    fn job(&self) -> &str {
        &self.request.job
    }

    fn parent(&self) -> (u64, Option<Origin>) {
        (self.parent_generation, self.parent_origin.clone())
    }

    fn ended(&self) -> watch::Receiver<bool> {
        Session::ended(self)
    }
}
