//! Measures dumps for the cost model: when a dump begins, at its CLOSE, and when it is sealed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control;
use permafrost_scheduling::quantity::Bytes;
use permafrost_scheduling::size::{DumpKind, Memory};

use super::Store;
use super::counters::Counters;
use super::dump::tap_of;
use super::opening::Opening;
use super::session::{Session, SessionRequest};
use crate::{Beginning, DumpDone, Observer, Ongoing, RestoreDone, StoreEvent, Transferred};

/// Measurements of one session.
pub(super) struct Measured {
    pub(super) counters: Arc<Counters>,
    observer: Arc<dyn Observer>,
    kind: DumpKind,
    /// Its pages are passed on while it streams.
    copied: bool,
    /// Number of bytes of pages received.
    pub(super) moved: Arc<AtomicU64>,
    ticket: Option<Box<dyn Ongoing>>,
    /// Time of the first byte, and the bytes that all dumps had received by then.
    began: Option<(Instant, u64)>,
    transferred: Option<Transferred>,
}

impl Measured {
    /// Records that the first byte has come.
    pub(super) fn begun(&mut self) {
        self.began = Some((Instant::now(), self.all_bytes()));
    }

    /// Records that CLOSE can be answered; `waited` is the time spent waiting for its follower.
    pub(super) fn closed(&mut self, waited: Duration) {
        let now = self.all_bytes();
        self.transferred = self.began.map(|(began, before)| Transferred {
            elapsed: began.elapsed(),
            waited,
            all_bytes: now.saturating_sub(before),
        });
    }

    /// Records that the session will not become a checkpoint.
    pub(super) fn failed(&mut self) {
        self.ticket = None;
    }

    /// Publishes the failure as an event.
    pub(super) fn tell_failure(&self, job: &str, session: &str, reason: &str) {
        self.observer.tell(&|| StoreEvent::Failed {
            job: job.to_owned(),
            session: session.to_owned(),
            reason: reason.to_owned(),
        });
    }

    /// Returns the bytes that all dumps, and copies of checkpoints, have brought to this store.
    fn all_bytes(&self) -> u64 {
        let counters = &self.counters;
        counters.received_bytes.value() + counters.copies_received_bytes.value()
    }
}

impl Store {
    /// Returns the observer that measures dumps and restores.
    #[must_use]
    pub fn observer(&self) -> &dyn Observer {
        &*self.observer
    }

    /// Begins to measure a session that is being opened.
    pub(super) fn measure(&self, request: &SessionRequest, opening: &mut Opening) -> Measured {
        let kind = match opening.parent {
            Some(_) => DumpKind::Incremental,
            None => DumpKind::Full,
        };
        let copied = tap_of(&mut opening.follower).is_some_and(|tap| tap.any());
        let moved = Arc::<AtomicU64>::default();
        let ticket = self.observer.dump_begins(&Beginning {
            job: &request.job,
            program: program_of(request),
            kind,
            copied,
            memory: memory_of(request),
            moved: Arc::clone(&moved),
        });
        Measured {
            counters: Arc::clone(&self.counters),
            observer: Arc::clone(&self.observer),
            kind,
            copied,
            moved,
            ticket: Some(ticket),
            began: None,
            transferred: None,
        }
    }

    /// Reports a session that has become a checkpoint to the observer.
    pub(super) fn measured(&self, session: &Session, sealed: &control::Checkpoint) {
        let whole = session.request.seal_follows.then(|| session.age());
        let Some((ticket, done)) = session.measured(|measured| {
            let ticket = measured.ticket.take()?;
            let done = DumpDone {
                job: &session.request.job,
                program: program_of(&session.request),
                generation: sealed.generation,
                id: &sealed.id,
                kind: measured.kind,
                copied: measured.copied,
                tier: ticket.tier(),
                moved_bytes: measured.moved.load(Ordering::Relaxed),
                stored_bytes: sealed.added_bytes,
                memory: memory_of(&session.request),
                transferred: measured.transferred?,
                whole,
                expected: ticket.expected(),
            };
            Some((ticket, done))
        }) else {
            return;
        };
        // The restore no longer runs, even if the observer is called later.
        drop(ticket);
        self.observer.dumped(&done);
    }

    /// Begins to measure a restore of `bytes` bytes.
    #[must_use]
    pub fn restoring(&self, bytes: u64) -> Restoring {
        Restoring {
            ticket: self.observer.restore_begins(bytes),
            since: Instant::now(),
            start: None,
        }
    }

    /// Reports a restore of `checkpoint` that was served to the observer; `here` is true if this store's copy was
    /// read.
    pub fn restored(
        &self,
        checkpoint: &control::Checkpoint,
        here: bool,
        restoring: Restoring,
        bytes: u64,
    ) {
        if here {
            self.cooling.record(&checkpoint.id);
        }
        let ticket = restoring.ticket;
        ticket.read_so_far(bytes);
        let (expected, all_bytes) = (ticket.expected(), ticket.all_read());
        let (since, start) = (restoring.since, restoring.start);
        drop(ticket);
        self.observer.restored(&RestoreDone {
            checkpoint,
            bytes,
            start,
            elapsed: since.elapsed().saturating_sub(start.unwrap_or_default()),
            all_bytes,
            here,
            expected,
        });
    }
}

/// A restore under way.
pub struct Restoring {
    ticket: Box<dyn Ongoing>,
    since: Instant,
    /// Time from the request until CRIU connected.
    start: Option<Duration>,
}

impl Restoring {
    /// Records that CRIU has connected for its images.
    pub fn begun(&mut self) {
        self.start = Some(self.since.elapsed());
    }

    /// Records the total bytes given to the restore so far.
    pub fn progress(&self, bytes: u64) {
        self.ticket.read_so_far(bytes);
    }
}

fn program_of(request: &SessionRequest) -> &str {
    request
        .origin
        .as_ref()
        .map_or("", |origin| origin.program.as_str())
}

fn memory_of(request: &SessionRequest) -> Memory {
    let Some(origin) = &request.origin else {
        return Memory::default();
    };
    let resident = origin.resident_bytes;
    Memory {
        resident: (resident > 0).then_some(Bytes::new(resident)),
        dirty: origin
            .dirty_pages
            .map(|pages| Bytes::new(pages.saturating_mul(PAGE_BYTES))),
    }
}
