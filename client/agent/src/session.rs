//! A dump through an agent: a session of a node, and the one stream that brings its pages to the node.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::phases::{LeftPhase, PhaseError, SessionFailure, SessionPhases};
use parking_lot::{Mutex, MutexGuard};
use permafrost_criu::frontend::{PageSink, SinkError};
use permafrost_protocol::PAGE_SIZE;
use permafrost_protocol::control::{self, ErrorCode, SessionOpened, SessionStatus, request};
use permafrost_protocol::images::FIRST_SERVED_PAGES_ID;
use permafrost_protocol::manifest::Origin;
use permafrost_protocol::pageserver::SpaceId;
use permafrost_transport::peer::{DumpSender, PeerError};
use tokio::sync::watch;

use super::images::Served;
use super::nodes::refusal;
use crate::host;

static ZERO_PAGE: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// A dump that is being sent to a node.
pub struct RemoteDump {
    id: String,
    /// Name of the node that has the session: it makes the decisions, and passes the pages on to others.
    pub(super) node: String,
    pub(super) request: request::Open,
    parent_generation: u64,
    parent_origin: Option<Origin>,
    /// Address spaces that CRIU may be told the parent has.
    parent_spaces: Vec<SpaceId>,
    opened: Instant,
    received: AtomicU64,
    phases: Mutex<Phases>,
    ended: watch::Sender<bool>,
}

type Phases = SessionPhases<DumpSender, (DumpSender, Served)>;

impl host::DumpSession for RemoteDump {
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
        self.ended.subscribe()
    }
}

impl RemoteDump {
    pub(super) fn new(
        node: &str,
        request: request::Open,
        opened: SessionOpened,
        parent_spaces: Vec<SpaceId>,
        sender: DumpSender,
    ) -> Arc<Self> {
        let now = Instant::now();
        Arc::new(Self {
            id: opened.session,
            node: node.to_owned(),
            request,
            parent_generation: opened.parent_generation,
            parent_origin: opened.parent_origin,
            parent_spaces,
            opened: now,
            received: AtomicU64::new(0),
            phases: Mutex::new(Phases::new(now, sender)),
            ended: watch::Sender::new(false),
        })
    }

    /// Returns the session's state for listings.
    pub(super) fn status(&self) -> SessionStatus {
        let phases = self.phases();
        SessionStatus {
            session: self.id.clone(),
            job: self.request.job.clone(),
            state: phases.name().to_owned(),
            received_bytes: self.received.load(Ordering::Relaxed),
            error: (phases.failure())
                .map(|failure| failure.message.clone())
                .unwrap_or_default(),
            age_s: self.opened.elapsed().as_secs(),
        }
    }

    /// Assigns the session to the one connection that brings its pages.
    pub(super) fn start(
        self: &Arc<Self>,
        deadline: Duration,
        hang_up: Box<dyn FnOnce() + Send>,
    ) -> Result<Sink, control::Error> {
        let sender = self.phases().start(Instant::now(), &self.id, hang_up)?;
        Ok(Sink {
            session: Arc::clone(self),
            sender: Some(sender),
            served: Served::default(),
            next_index: 0,
            deadline,
            failure: None,
        })
    }

    /// Takes the sender of the dump for sealing. The session can still be discarded until [`Self::images_are_in`].
    pub(super) fn begin_seal(&self) -> Result<(DumpSender, Served), PhaseError> {
        self.phases().begin_seal(Instant::now(), &self.id)
    }

    /// Ends the time in which the session can be discarded: the node has all of the dump.
    pub(super) fn images_are_in(&self) -> Result<(), PhaseError> {
        self.phases().seal(Instant::now(), &self.id)
    }

    /// Records that the node has parked or sealed the session.
    pub(super) fn done(&self) {
        self.phases().done(Instant::now());
        self.ended.send_replace(true);
    }

    /// Records that the dump has failed.
    pub(super) fn fail(&self, error: control::Error) {
        let reason = error.message.clone();
        let left = self.phases().fail(Instant::now(), error);
        self.failed(left.map(drop), &reason);
    }

    /// Ends the session from outside, unless it is over.
    ///
    /// # Errors
    /// It is being sealed, and goes on.
    pub(super) fn discard(&self, reason: &str) -> Result<(), PhaseError> {
        let error = session_failed(reason);
        let left = self.phases().discard(Instant::now(), &self.id, error)?;
        // The sender of the dump is dropped with the phase, and the node forgets the dump.
        self.failed(left.map(LeftPhase::hang_up), reason);
        Ok(())
    }

    /// Tells of a failure, unless the session was over before.
    fn failed(&self, is_news: Option<()>, reason: &str) {
        if is_news.is_some() {
            tracing::warn!(event = "session-failed", session = %self.id, job = %self.request.job, node = %self.node, reason, "session failed");
            self.ended.send_replace(true);
        }
    }

    /// Returns true if the session has waited for `limit`, for its dump or for its seal, or has been over for
    /// so long.
    pub(super) fn is_idle(&self, limit: Duration) -> bool {
        self.phases().is_idle(Instant::now(), limit)
    }

    /// Returns the time since which the session is over, if it is.
    pub(super) fn over_since(&self) -> Option<Instant> {
        self.phases().over_since()
    }

    /// Returns true if the node keeps the session as a parked one, or as a checkpoint.
    pub(super) fn is_done(&self) -> bool {
        self.phases().is_done()
    }

    fn is_over(&self) -> bool {
        *self.ended.borrow()
    }

    fn phases(&self) -> MutexGuard<'_, Phases> {
        // A state is changed by assignments, so it is whole even if a thread died holding it.
        self.phases.lock()
    }
}

/// Sink of the page-server front end for a session: zero pages are sent as numbers only, all others with their
/// bytes.
pub struct Sink {
    session: Arc<RemoteDump>,
    sender: Option<DumpSender>,
    served: Served,
    /// Lowest page index of the open space that may still come.
    next_index: u64,
    deadline: Duration,
    /// Error of the node, if it made the sink fail.
    failure: Option<control::Error>,
}

impl Sink {
    fn with(
        &mut self,
        send: impl FnOnce(&mut DumpSender) -> Result<(), PeerError>,
    ) -> Result<(), SinkError> {
        if self.session.is_over() {
            self.sender = None;
        }
        let sent = send(self.sender.as_mut().ok_or_else(over)?);
        self.told(sent)
    }

    fn told<T>(&mut self, result: Result<T, PeerError>) -> Result<T, SinkError> {
        result.map_err(|error| {
            let error = refusal(&error);
            let told = to_sink(&error);
            self.failure = Some(error);
            told
        })
    }

    /// Returns the index of the page at `vaddr`, after a check that the pages ascend: the node takes no others.
    fn ascending(&mut self, vaddr: u64, pages: u64) -> Result<u64, SinkError> {
        let index = vaddr / PAGE_SIZE as u64;
        if self.served.spaces.is_empty() || index < self.next_index {
            return Err(invalid(format!(
                "pages at {vaddr:#x} overlap or descend, or are of no address space"
            )));
        }
        self.next_index = index.saturating_add(pages);
        Ok(index)
    }
}

impl PageSink for Sink {
    fn open(&mut self, space: SpaceId) -> Result<bool, SinkError> {
        if self.served.spaces.iter().any(|(known, _)| *known == space) {
            return Err(invalid(format!("{space} is opened a second time")));
        }
        let counted = u32::try_from(self.served.spaces.len()).unwrap_or(u32::MAX);
        let pages_id = FIRST_SERVED_PAGES_ID.saturating_add(counted);
        let space_type = u16::try_from(i32::from(space.space_type)).unwrap_or(u16::MAX);
        self.with(|sender| sender.space(space_type, space.id, pages_id))?;
        self.served.spaces.push((space, pages_id));
        self.next_index = 0;
        self.has_parent(space)
    }

    fn has_parent(&mut self, space: SpaceId) -> Result<bool, SinkError> {
        Ok(self.session.parent_spaces.contains(&space))
    }

    fn pages(&mut self, vaddr: u64, flags: u16, bytes: &[u8]) -> Result<(), SinkError> {
        self.session
            .received
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        let index = self.ascending(vaddr, (bytes.len() / PAGE_SIZE) as u64)?;
        self.with(|sender| send_pages(sender, index, flags, bytes))
    }

    fn hole(&mut self, vaddr: u64, nr_pages: u64) -> Result<(), SinkError> {
        let mut index = self.ascending(vaddr, nr_pages)?;
        let mut left = nr_pages;
        while left > 0 {
            let pages = u32::try_from(left).unwrap_or(u32::MAX);
            self.with(|sender| sender.parent(index, 0, pages))?;
            index += u64::from(pages);
            left -= u64::from(pages);
        }
        Ok(())
    }

    fn close(&mut self) -> Result<(), SinkError> {
        if self.session.is_over() {
            return Err(over());
        }
        let mut sender = self.sender.take().ok_or_else(over)?;
        let closed = sender.close(Instant::now() + self.deadline);
        self.told(closed)?;
        let (now, id) = (Instant::now(), &self.session.id);
        let mut phases = self.session.phases();
        let next = if self.session.request.seal_follows {
            let dump = (sender, std::mem::take(&mut self.served));
            phases.close(now, id, dump).map_err(|(failed, _)| failed)
        } else {
            // Parked: the node has sent its last reply.
            phases.seal(now, id).map(|()| phases.done(now))
        };
        drop(phases);
        next.map_err(|_| over())?;
        self.session.ended.send_replace(true);
        Ok(())
    }

    fn abort(&mut self, reason: &str) {
        self.sender = None;
        let receiving = self.session.phases().is_receiving();
        if receiving {
            let failure = self.failure.take();
            self.session
                .fail(failure.unwrap_or_else(|| session_failed(reason)));
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        // A thread that dies of a defect must not leave the job locked.
        self.abort("its connection was dropped");
        self.session.phases().disconnected();
    }
}

/// Sends pages; of zero pages only their number.
pub(super) fn send_pages(
    sender: &mut DumpSender,
    mut index: u64,
    flags: u16,
    bytes: &[u8],
) -> Result<(), PeerError> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let zero = is_zero(rest);
        let alike = rest
            .chunks(PAGE_SIZE)
            .take_while(|page| (**page == ZERO_PAGE) == zero)
            .count();
        let (run, behind) = rest.split_at((alike * PAGE_SIZE).min(rest.len()));
        if zero {
            let pages = u32::try_from(alike).unwrap_or(u32::MAX);
            sender.zero(index, flags, pages)?;
        } else {
            sender.pages(index, flags, run)?;
        }
        index += alike as u64;
        rest = behind;
    }
    Ok(())
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.get(..PAGE_SIZE).is_some_and(|page| page == ZERO_PAGE)
}

fn to_sink(error: &control::Error) -> SinkError {
    const EIO: i32 = 5;
    const EINVAL: i32 = 22;
    const ENOSPC: i32 = 28;
    SinkError {
        message: error.message.clone(),
        status: match error.code() {
            ErrorCode::NoSpace => ENOSPC,
            ErrorCode::Invalid => EINVAL,
            _ => EIO,
        },
    }
}

fn over() -> SinkError {
    invalid("the session is over".to_owned())
}

fn invalid(message: String) -> SinkError {
    const EINVAL: i32 = 22;
    SinkError {
        message,
        status: EINVAL,
    }
}

fn session_failed(reason: &str) -> control::Error {
    let reason = reason.to_owned();
    SessionFailure {
        code: ErrorCode::SessionFailed,
        reason,
    }
    .into()
}
