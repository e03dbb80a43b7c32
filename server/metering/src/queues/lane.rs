//! One queue, and the threads that wait in it, each parked.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use permafrost_agent::host::Waits;
use permafrost_protocol::control;
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};
use permafrost_scheduling::queue::{
    Ahead, Concurrency, ConcurrencyConfig, FinishedTurn, QueueConfig, QueueEvent, QueueTicket,
    ReservationToken, TransferQueue, TransferRequest, TransferTimes,
};

use super::{
    Admission, AdmittedTransfer, Direction, Entered, QueueCounters, QueuesError, QueuesOptions,
    new_token, token_text,
};
use crate::QueueReport;

/// Interval at which a waiting request checks that its caller is still connected.
const LOOK: Duration = Duration::from_millis(200);

/// Interval at which a waiting request reports its position, and running transfers are checked.
const TELL: Duration = Duration::from_secs(1);

/// Time for which the place of a suspended request is kept: many times the pause that its caller is to make.
const SET_ASIDE: Duration = Duration::from_secs(30);

/// Weight of the last transfer in the average size of transfers; earlier ones fade.
const LAST_COUNTS: f64 = 0.2;

/// A queue in use.
#[derive(Debug)]
pub(super) struct Lane {
    direction: Direction,
    arrival: Duration,
    stall: Duration,
    origin: Instant,
    counters: QueueCounters,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Concurrency limit set by the operator. `None`: use the measured optimum.
    at_once: Option<usize>,
    queue: TransferQueue,
    concurrency: Concurrency,
    pace: TransferTimes,
    turns: HashMap<QueueTicket, Running>,
    waiting: HashMap<QueueTicket, Thread>,
    /// Requests and bytes ahead of each waiting request, as of the last check.
    before: HashMap<QueueTicket, (usize, u64)>,
    /// Integral of the number of running transfers over time since the start, in transfer-seconds.
    run_s: f64,
    changed: Instant,
    looked: Option<Instant>,
    /// Recent average size of a transfer, in bytes.
    typical_bytes: f64,
    stopped: bool,
}

/// An admitted transfer and its progress.
#[derive(Debug)]
struct Running {
    expected: u64,
    moved: Arc<AtomicU64>,
    began: Instant,
    /// [`Inner::run_s`] at the transfer's beginning.
    run_s: f64,
    seen: u64,
    seen_at: Instant,
    idle: bool,
    /// True if the transfer was idle once, so that its duration says nothing about the medium.
    paused: bool,
}

impl Lane {
    pub(super) fn new(
        direction: Direction,
        at_once: Option<usize>,
        options: &QueuesOptions,
    ) -> Self {
        let now = Instant::now();
        let queue = TransferQueue::new(QueueConfig {
            waiting: options.waiting,
            reserved: options.reserved,
            ..QueueConfig::default()
        });
        Self {
            direction,
            arrival: options.arrival,
            stall: options.stall,
            origin: now,
            counters: QueueCounters::default(),
            inner: Mutex::new(Inner {
                at_once,
                queue,
                concurrency: Concurrency::new(ConcurrencyConfig::default()),
                pace: TransferTimes::default(),
                turns: HashMap::new(),
                waiting: HashMap::new(),
                before: HashMap::new(),
                run_s: 0.0,
                changed: now,
                looked: None,
                typical_bytes: 0.0,
                stopped: false,
            }),
        }
    }

    pub(super) fn counters(&self) -> &QueueCounters {
        &self.counters
    }

    /// Waits for admission, for `patience` at most if it is given.
    pub(super) fn enter(
        lane: &Arc<Self>,
        admission: &Admission,
        waits: &mut dyn Waits,
        patience: Option<Duration>,
    ) -> Result<Entered, QueuesError> {
        let since = Instant::now();
        let (ticket, started) = lane.submit(admission, since)?;
        // From here on the request leaves the queue however this function ends.
        let mut place = Place {
            lane,
            ticket: Some(ticket),
        };
        let moved = match started {
            Some(moved) => moved,
            None => match lane.wait(ticket, waits, patience)? {
                Waited::Started(moved) => moved,
                Waited::SetAside(waiting) => {
                    place.ticket = None;
                    return Ok(Entered::Later(waiting));
                }
            },
        };
        place.ticket = None;
        lane.counters.turns.add(1);
        lane.counters.waits.record(since.elapsed());
        Ok(Entered::Turn(AdmittedTransfer::new(
            Arc::clone(lane),
            ticket,
            moved,
        )))
    }

    /// Puts a request into the queue. Returns its byte counter if it is admitted at once.
    fn submit(
        &self,
        admission: &Admission,
        since: Instant,
    ) -> Result<(QueueTicket, Option<Arc<AtomicU64>>), QueuesError> {
        let mut inner = self.inner();
        if inner.stopped {
            return Err(QueuesError::Stopping);
        }
        // Stalled transfers yield now, not at the next request's first check.
        inner.look(self, since, LOOK);
        let now = self.moment(since);
        let bytes = inner.bytes_of(admission);
        let taken = match admission.token {
            Some(token) => inner.queue.present(now, token, bytes),
            None => inner.queue.submit(now, self.request(admission, bytes, now)),
        };
        let ticket = taken.map_err(|error| {
            let token = admission.token.map_or_else(String::new, token_text);
            let error = QueuesError::of(error, self.direction, &token);
            if matches!(error, QueuesError::Full { .. }) {
                self.counters.refused.add(1);
            }
            error
        })?;
        inner.start_next(self, since);
        let started = inner.turns.get(&ticket).map(|turn| Arc::clone(&turn.moved));
        if started.is_none() {
            inner.waiting.insert(ticket, thread::current());
        }
        Ok((ticket, started))
    }

    fn wait(
        &self,
        ticket: QueueTicket,
        waits: &mut dyn Waits,
        patience: Option<Duration>,
    ) -> Result<Waited, QueuesError> {
        let until = patience.map(|patience| Instant::now() + patience);
        let mut told: Option<Instant> = None;
        loop {
            let now = Instant::now();
            if waits.is_gone() {
                self.counters.gone.add(1);
                return Err(QueuesError::Gone);
            }
            if told.is_none_or(|told| now.duration_since(told) >= TELL) {
                told = Some(now);
                let waiting = self.waiting(ticket, now);
                waits.waits(&waiting);
            }
            let left = until.map_or(LOOK, |until| LOOK.min(until.saturating_duration_since(now)));
            thread::park_timeout(left);
            let mut inner = self.inner();
            if inner.stopped {
                return Err(QueuesError::Stopping);
            }
            inner.look(self, Instant::now(), TELL);
            if let Some(turn) = inner.turns.get(&ticket) {
                return Ok(Waited::Started(Arc::clone(&turn.moved)));
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return self.set_aside(&mut inner, ticket).map(Waited::SetAside);
            }
        }
    }

    /// Returns the position of a waiting request.
    fn waiting(&self, ticket: QueueTicket, now: Instant) -> control::Waiting {
        let mut inner = self.inner();
        if !inner.before.contains_key(&ticket) {
            inner.look(self, now, Duration::ZERO);
        }
        inner.standing(ticket)
    }

    fn set_aside(
        &self,
        inner: &mut Inner,
        ticket: QueueTicket,
    ) -> Result<control::Waiting, QueuesError> {
        let token = new_token();
        let waiting = control::Waiting {
            token: token_text(token),
            ..inner.standing(ticket)
        };
        let now = self.moment(Instant::now());
        let kept = inner
            .queue
            .set_aside(now, ticket, token, seconds(SET_ASIDE));
        kept.map_err(|error| QueuesError::of(error, self.direction, &waiting.token))?;
        inner.waiting.remove(&ticket);
        inner.before.remove(&ticket);
        Ok(waiting)
    }

    pub(super) fn run(lane: &Arc<Self>, bytes: u64) -> AdmittedTransfer {
        let now = Instant::now();
        let admission = Admission {
            bytes,
            ..Admission::default()
        };
        let mut inner = lane.inner();
        let moment = lane.moment(now);
        let bytes = inner.bytes_of(&admission);
        inner.count_until(now);
        let ticket = inner
            .queue
            .run(moment, lane.request(&admission, bytes, moment));
        let moved = inner.begin(ticket, bytes, now);
        drop(inner);
        lane.counters.turns.add(1);
        AdmittedTransfer::new(Arc::clone(lane), ticket, moved)
    }

    pub(super) fn reserve(
        &self,
        admission: &Admission,
        lifetime: Duration,
    ) -> Result<control::Reserved, QueuesError> {
        let now = Instant::now();
        let mut inner = self.inner();
        if inner.stopped {
            return Err(QueuesError::Stopping);
        }
        inner.look(self, now, Duration::ZERO);
        let moment = self.moment(now);
        let bytes = inner.bytes_of(admission);
        let request = self.request(admission, bytes, moment);
        let (before, bytes_before) = inner.queue.before(moment, &request);
        let bytes_before = bytes_before.count();
        let token = new_token();
        let made = inner
            .queue
            .reserve(moment, token, request, seconds(lifetime));
        let made = made.map_err(|error| QueuesError::of(error, self.direction, ""))?;
        let lapses_in = made.lapses_at.since(moment);
        Ok(control::Reserved {
            token: token_text(token),
            node: String::new(),
            direction: self.direction.name().to_owned(),
            bytes_before,
            starts_in_ms: inner.starts_in_ms(before, bytes_before),
            lapses_in_ms: whole_ms(lapses_in),
        })
    }

    /// Cancels a reservation. Returns true if there was one.
    pub(super) fn cancel(&self, token: ReservationToken) -> bool {
        self.inner().queue.cancel(token).is_ok()
    }

    pub(super) fn holds(&self, token: ReservationToken) -> bool {
        self.inner().queue.holds(token)
    }

    pub(super) fn report(&self) -> QueueReport {
        let mut inner = self.inner();
        inner.look(self, Instant::now(), LOOK);
        let (running, held_up) = inner.queue.lengths();
        let reserved = inner.queue.reserved();
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let slots = inner.slots();
        QueueReport {
            bytes: inner.queue.queued_bytes().count(),
            running: count(running),
            waiting: count(held_up.saturating_sub(reserved)),
            reserved: count(reserved),
            slots: count(slots),
            automatic: inner.at_once.is_none(),
            bytes_per_s: inner.drain(slots).map(BytesPerSecond::value),
        }
    }

    /// Sets the concurrency limit, and starts what it now admits. Transfers that run go on under a lower limit.
    pub(super) fn limit(&self, at_once: Option<usize>) {
        let mut inner = self.inner();
        inner.at_once = at_once;
        inner.start_next(self, Instant::now());
    }

    /// Returns the transfers that run, the oldest first. O(transfers).
    pub(super) fn transfers(&self) -> Vec<control::TransferStatus> {
        let inner = self.inner();
        let mut turns: Vec<&Running> = inner.turns.values().collect();
        turns.sort_by_key(|turn| turn.began);
        turns
            .into_iter()
            .map(|turn| control::TransferStatus {
                age_ms: u64::try_from(turn.began.elapsed().as_millis()).unwrap_or(u64::MAX),
                moved_bytes: turn.moved.load(Ordering::Relaxed),
                expected_bytes: turn.expected,
                idle: turn.idle,
            })
            .collect()
    }

    pub(super) fn stop(&self) {
        let mut inner = self.inner();
        inner.stopped = true;
        for thread in inner.waiting.values() {
            thread.unpark();
        }
    }

    pub(super) fn follow(&self, ticket: QueueTicket, counter: &Arc<AtomicU64>) {
        if let Some(turn) = self.inner().turns.get_mut(&ticket) {
            turn.moved = Arc::clone(counter);
        }
    }

    pub(super) fn expect(&self, ticket: QueueTicket, bytes: u64) {
        let mut inner = self.inner();
        if let Some(turn) = inner.turns.get_mut(&ticket) {
            turn.expected = bytes;
            let left = bytes.saturating_sub(turn.moved.load(Ordering::Relaxed));
            // The ticket is in the queue as long as its transfer runs.
            let _ = inner.queue.progressed(ticket, Bytes::new(left));
        }
    }

    /// Ends a request, whether it was running or waiting.
    pub(super) fn finish(&self, ticket: QueueTicket) {
        let now = Instant::now();
        let mut inner = self.inner();
        inner.count_until(now);
        inner.waiting.remove(&ticket);
        inner.before.remove(&ticket);
        if let Some(turn) = inner.turns.remove(&ticket) {
            inner.learn(&turn, now);
        }
        if inner.queue.finish(ticket).is_err() {
            tracing::error!(
                event = "queue-turn-unknown",
                ?ticket,
                "a turn ended that was none"
            );
        }
        inner.start_next(self, now);
    }

    fn request(&self, admission: &Admission, bytes: Bytes, now: Moment) -> TransferRequest {
        TransferRequest {
            bytes,
            priority: admission.priority,
            start_by: admission
                .start_within
                .map(|within| now.after(seconds(within))),
        }
    }

    fn moment(&self, at: Instant) -> Moment {
        let since = at.duration_since(self.origin);
        Moment::from_micros(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // No call under the lock can panic half-way.
        self.inner.lock()
    }
}

impl Inner {
    fn bytes_of(&self, admission: &Admission) -> Bytes {
        if admission.bytes > 0 {
            return Bytes::new(admission.bytes);
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a mean of u64; a cast of a float saturates"
        )]
        let typical = self.typical_bytes as u64;
        Bytes::new(typical)
    }

    /// Admits the requests that may run.
    /// Returns the number of transfers that may run at once.
    fn slots(&self) -> usize {
        self.at_once.unwrap_or_else(|| self.concurrency.limit())
    }

    fn start_next(&mut self, lane: &Lane, now: Instant) {
        self.count_until(now);
        self.queue.allow_running(self.slots());
        while let Some(event) = self.queue.poll(lane.moment(now)) {
            match event {
                QueueEvent::Lapsed(_) => lane.counters.lapsed.add(1),
                QueueEvent::Start(ticket) => {
                    let bytes = self.queue.bytes(ticket).unwrap_or_default();
                    self.begin(ticket, bytes, now);
                    self.before.remove(&ticket);
                    if let Some(thread) = self.waiting.remove(&ticket) {
                        thread.unpark();
                    }
                }
            }
        }
    }

    fn begin(&mut self, ticket: QueueTicket, bytes: Bytes, now: Instant) -> Arc<AtomicU64> {
        let moved = Arc::<AtomicU64>::default();
        let turn = Running {
            expected: bytes.count(),
            moved: Arc::clone(&moved),
            began: now,
            run_s: self.run_s,
            seen: 0,
            seen_at: now,
            idle: false,
            paused: false,
        };
        self.turns.insert(ticket, turn);
        moved
    }

    /// Brings [`Self::run_s`] up to date. Must be called before the number of running transfers changes.
    fn count_until(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.changed).as_secs_f64();
        self.run_s += self.queue.lengths().0 as f64 * passed;
        self.changed = self.changed.max(now);
    }

    /// Learns the size and the rate of transfers from one that has ended.
    fn learn(&mut self, turn: &Running, now: Instant) {
        let moved = turn.moved.load(Ordering::Relaxed);
        if moved == 0 {
            return;
        }
        let share = if self.typical_bytes > 0.0 {
            LAST_COUNTS
        } else {
            1.0
        };
        self.typical_bytes += share * (moved as f64 - self.typical_bytes);
        if turn.paused {
            return;
        }
        let elapsed = now.saturating_duration_since(turn.began);
        let turn = FinishedTurn {
            bytes: Bytes::new(moved),
            elapsed: seconds(elapsed),
            beside: (self.run_s - turn.run_s) / elapsed.as_secs_f64(),
        };
        self.pace.finished(&turn);
        self.concurrency.finished(&turn);
    }

    /// Returns the drain rate of the queue, by the full sizes of the transfers in it, not by the bytes that are
    /// left of the running ones.
    fn drain(&self, slots: usize) -> Option<BytesPerSecond> {
        let left = self.queue.queued_bytes();
        let moved = (self.turns.values()).map(|turn| turn.seen.min(turn.expected));
        let whole = left.plus(Bytes::new(moved.sum()));
        // The bytes of transfers that yielded their slot are in the queue, too.
        let (_, held_up) = self.queue.lengths();
        let count = u64::try_from(self.turns.len() + held_up).unwrap_or(u64::MAX);
        let each = (whole.count().checked_div(count)).filter(|each| *each > 0);
        self.pace.drain(each.map(Bytes::new), slots)
    }

    /// Checks all transfers, unless that was done within `period`: updates the bytes left of each, which of them
    /// yield or resume, and the requests and bytes ahead of those that wait.
    fn look(&mut self, lane: &Lane, now: Instant, period: Duration) {
        let looked = self.looked.map(|at| now.saturating_duration_since(at));
        if looked.is_some_and(|passed| passed < period) {
            return;
        }
        self.looked = Some(now);
        self.count_until(now);
        for (ticket, turn) in &mut self.turns {
            let moved = turn.moved.load(Ordering::Relaxed);
            if moved != turn.seen {
                turn.seen = moved;
                turn.seen_at = now;
                let left = turn.expected.saturating_sub(moved);
                // The ticket is in the queue as long as its transfer runs.
                let _ = self.queue.progressed(*ticket, Bytes::new(left));
                if turn.idle {
                    turn.idle = !self.queue.resume(*ticket);
                }
                continue;
            }
            let patience = if moved == 0 { lane.arrival } else { lane.stall };
            if !turn.idle && now.saturating_duration_since(turn.seen_at) >= patience {
                turn.idle = self.queue.idle(*ticket);
                turn.paused = true;
            }
        }
        self.start_next(lane, now);
        self.before = self
            .queue
            .line()
            .map(|(ticket, count, bytes)| (ticket, (count, bytes.count())))
            .collect();
    }

    /// Returns the position of a waiting request as of the last check.
    fn standing(&self, ticket: QueueTicket) -> control::Waiting {
        let (before, bytes_before) = self.before.get(&ticket).copied().unwrap_or_default();
        control::Waiting {
            before: u32::try_from(before).unwrap_or(u32::MAX),
            bytes_before,
            starts_in_ms: self.starts_in_ms(before, bytes_before),
            token: String::new(),
        }
    }

    fn starts_in_ms(&self, before: usize, bytes_before: u64) -> Option<u64> {
        let running = self.queue.lengths().0.min(before);
        let ahead = Ahead {
            running,
            waiting: before - running,
            bytes: Bytes::new(bytes_before),
        };
        let time = self.pace.time(&ahead, self.slots())?;
        Some(whole_ms(time))
    }
}

/// Outcome of waiting.
enum Waited {
    /// The request was admitted; the counter is for the bytes that it moves.
    Started(Arc<AtomicU64>),
    /// The request lost its thread, but keeps its place: its caller has to come again.
    SetAside(control::Waiting),
}

/// Place of a request in the queue, given up if the waiting thread leaves.
struct Place<'a> {
    lane: &'a Lane,
    ticket: Option<QueueTicket>,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.lane.finish(ticket);
        }
    }
}

fn seconds(time: Duration) -> Seconds {
    Seconds::new(time.as_secs_f64()).unwrap_or(Seconds::MAX)
}

fn whole_ms(time: Seconds) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative; a cast of a float saturates"
    )]
    let ms = (time.value() * 1e3).ceil() as u64;
    ms
}
