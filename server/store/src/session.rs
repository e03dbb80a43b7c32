//! A session: a dump that is not yet sealed, from its opening to its end.
//!
//! Its phases are those of [`permafrost_agent::phases`].
//!
//! A session that ends with CLOSE is sealed as a parked checkpoint before CLOSE is answered. While a session is
//! being sealed, only the sealing thread ends it: no session is both sealed and discarded.

mod sealing;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use permafrost_agent::phases::{LeftPhase, SessionFailure, SessionPhases};
use permafrost_criu::frontend::{PageSink, SinkError};
use permafrost_pmem::PAGE_SIZE;
use permafrost_protocol::control::{self, ErrorCode, ReportedError, SessionStatus};
use permafrost_protocol::manifest::{AddressSpace, Origin};
use permafrost_protocol::pageserver::SpaceId;
use tokio::sync::watch;

pub(super) use self::sealing::Sealing;
use super::counters::Counters;
use super::dump::{Dump, DumpBuilder, Parent};
use super::jobs::JobGuard;
use super::measured::Measured;
use super::opening::Opening;
use super::{Store, StoreError, parked};
use crate::clock::unix_ms;
use crate::{Follower, SessionError, TransferSlot};
use permafrost_parking::ParkedShare;

/// Request to open a session.
pub struct SessionRequest {
    /// Job; empty for an anonymous session.
    pub job: String,
    /// True for a dump by `criu pre-dump`.
    pub pre_dump: bool,
    /// True for a round of a pre-copy, which is a pre-dump.
    pub pre_copy: bool,
    /// True if a seal follows CLOSE, so that CLOSE need not park the pages.
    pub seal_follows: bool,
    /// Facts about the dump's origin.
    pub origin: Option<Origin>,
    /// True if the dump is not to be compared with the job's newest checkpoint.
    pub no_parent: bool,
    /// True if CRIU has the parent's inventory, so that it may be told that there is a parent.
    pub parent_images: bool,
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

/// Resources of an open session, for its dump.
struct Opened {
    /// Keeps the parent's segments.
    parent: Option<Parent>,
    /// Follower of the dump.
    follower: Option<Box<dyn Follower>>,
    /// Its share of the limit for anonymous dumps.
    share: Option<ParkedShare>,
}

type Phases = SessionPhases<Opened, Box<Dump>>;

struct State {
    phases: Phases,
    /// Keeps other dumps of the job away until the session is over.
    job_guard: Option<JobGuard>,
    /// Admission to the medium.
    turn: Option<Box<dyn TransferSlot>>,
    /// Time at which its pages began to come, milliseconds since the Unix epoch; 0 before.
    begun_unix_ms: u64,
    measured: Measured,
}

impl State {
    /// Fails the session, unless it is over.
    fn fail(&mut self, code: ErrorCode, reason: &str) -> Option<Released> {
        let left = self.phases.fail(Instant::now(), failure(code, reason))?;
        Some(self.release(left))
    }

    /// Takes everything that a failed session held. The caller drops it without the lock, because a follower may
    /// take long to end.
    fn release(&mut self, left: LeftPhase<Opened, Box<Dump>>) -> Released {
        self.measured.failed();
        Released {
            left,
            job_guard: self.job_guard.take(),
            turn: self.turn.take(),
        }
    }
}

/// Everything that a session held.
#[must_use = "it is dropped once the lock is released"]
struct Released {
    left: LeftPhase<Opened, Box<Dump>>,
    job_guard: Option<JobGuard>,
    turn: Option<Box<dyn TransferSlot>>,
}

impl Released {
    /// Drops everything, and then ends the connection that brings the pages: its client may dump again at once.
    fn hang_up(self) {
        drop((self.job_guard, self.turn));
        self.left.hang_up();
    }
}

fn failure(code: ErrorCode, reason: &str) -> control::Error {
    let reason = reason.to_owned();
    SessionFailure { code, reason }.into()
}

impl Session {
    pub(super) fn new(request: SessionRequest, opening: Opening, measured: Measured) -> Arc<Self> {
        let Opening {
            id,
            follower,
            parent,
            turn,
            share,
            lock,
        } = opening;
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
                phases: Phases::new(
                    now,
                    Opened {
                        parent,
                        follower,
                        share,
                    },
                ),
                job_guard: lock,
                turn,
                begun_unix_ms: 0,
                measured,
            }),
            ended: watch::Sender::new(false),
        })
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
            state: state.phases.name().to_owned(),
            received_bytes: self.moved.load(Ordering::Relaxed) + self.zeros.load(Ordering::Relaxed),
            error: (state.phases.failure())
                .map(|failure| failure.message.clone())
                .unwrap_or_default(),
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
        // Before the lock: a namespace's first key is written to a file.
        let shadow = store.begin_shadow(&self.request.job)?;
        let mut state = self.state();
        let opened = state
            .phases
            .start(Instant::now(), &self.id, hang_up)
            .map_err(SessionError::from)?;
        state.begun_unix_ms = unix_ms();
        state.measured.begun();
        let builder = DumpBuilder::new(shadow, opened.parent, opened.follower)
            .sharing(store.page_finder(&self.request.job))
            .until(self.ended());
        Ok(SessionSink {
            store: Arc::clone(store),
            session: Arc::clone(self),
            builder: Some(builder),
            share: opened.share,
            failure: ErrorCode::SessionFailed,
        })
    }

    /// Registers the function that ends the connection which is going to send the pages, before it sends any.
    pub fn expect_from(&self, hang_up: Box<dyn FnOnce() + Send>) {
        let failed = self.state().phases.expect(hang_up);
        if let Some(hang_up) = failed {
            hang_up();
        }
    }

    /// Ends a session from outside, unless it is over: frees everything it holds and disconnects the sender of its
    /// pages.
    ///
    /// # Errors
    /// It is being sealed, and goes on.
    pub(super) fn discard(&self, code: ErrorCode, reason: &str) -> Result<(), SessionError> {
        let released = {
            let mut state = self.state();
            let error = failure(code, reason);
            let left = state.phases.discard(Instant::now(), &self.id, error)?;
            left.map(|left| state.release(left))
        };
        if let Some(released) = released {
            released.hang_up();
            self.log_failure(reason);
        }
        Ok(())
    }

    /// Discards the session if it has been waiting for `limit`: for its dump, or for its seal. Returns true if it did.
    pub(super) fn discard_if_idle(&self, limit: Duration) -> bool {
        let idle = self.state().phases.is_idle(Instant::now(), limit);
        // If a connection took the session up in between, it would be discarded for being late by a moment: an error
        // that its client sees.
        idle && self
            .discard(ErrorCode::SessionFailed, "nobody came for it in time")
            .is_ok()
    }

    /// Returns true if its pages or images are being received, or sealed.
    pub(super) fn is_taking(&self) -> bool {
        self.state().phases.is_taking()
    }

    /// Returns the time at which the session failed, if it did.
    pub(super) fn failed_since(&self) -> Option<Instant> {
        self.state().phases.over_since()
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
        let dump = self.state().phases.begin_seal(Instant::now(), &self.id);
        let dump = dump.map_err(SessionError::from)?;
        Ok((*dump, Sealing::new(self)))
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
        tracing::warn!(event = "session-failed", session = %self.id, job = %self.request.job, reason, "session failed");
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
    share: Option<ParkedShare>,
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
            let (now, id) = (Instant::now(), &self.session.id);
            let closed = self.session.state().phases.close(now, id, Box::new(dump));
            closed.map_err(|(failed, _)| SessionError::from(failed))?;
            self.session.ended.send_replace(true);
            return Ok(());
        }
        let sealing = Sealing::of_received(&self.session)?;
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

    fn is_slow(&self) -> bool {
        self.builder.as_ref().is_some_and(DumpBuilder::is_slow)
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
        if state.phases.is_receiving() {
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
        self.session.state().phases.disconnected();
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
