//! Queue of one direction of one tier: sequential checkpoint and restore (paper 000, §5.2.2).
//!
//! A bounded number of requests runs at once, the rest wait. A state machine without a clock: the caller passes
//! requests and the time in, and [`poll`](TransferQueue::poll) returns the requests that may start and those that have
//! lapsed.
//!
//! **Order.** Each request has a time at which it is *due*: its arrival plus a patience that is shorter the higher
//! its priority. The request that is due first starts first. A latest start may bring a request forward inside its
//! own priority's band, and never past the next priority's. A due time never changes, and every request is due after
//! its arrival. So no request that arrives after another one is due goes before it: no request starves.
//!
//! **Reservations** keep a place by a token, and are due like any request. They delay no other request: while a
//! reservation is not taken up, the requests behind it start; a caller that presents the token in time gets the
//! reserved place. Others lapse.

mod concurrency;
mod pace;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use permafrost_api_types::quantity::{Bytes, Moment, Seconds};

pub use concurrency::{Concurrency, ConcurrencyConfig, FinishedTurn};
pub use pace::{Ahead, TransferTimes};
pub use permafrost_api_types::reserve::Priority;

/// A dump or a restore that wants to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferRequest {
    /// Number of bytes that it will move.
    pub bytes: Bytes,
    /// Priority of the request.
    pub priority: Priority,
    /// Latest time at which it should start.
    pub start_by: Option<Moment>,
}

/// Number of an accepted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct QueueTicket(u64);

/// Secret that takes a reservation up. Made by the caller, who has randomness: a token that can be guessed can be
/// stolen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ReservationToken(pub u128);

/// Limits and order of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// Number of requests that run at once. 1: the paper's. Two large writes on one medium mostly take turns.
    pub running: usize,
    /// Maximum number of requests that wait or are reserved. 4096.
    pub waiting: usize,
    /// Maximum number of reservations: a caller that reserves and never comes must not keep others out. 1024.
    pub reserved: usize,
    /// Time that a request waits longer than one of the next priority. 10 s.
    pub patience: Seconds,
    /// Maximum lifetime of a reservation. 5 minutes.
    pub longest_reservation: Seconds,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            running: 1,
            waiting: 4096,
            reserved: 1024,
            patience: Seconds::from_millis(10_000),
            longest_reservation: Seconds::from_millis(300_000),
        }
    }
}

/// Event that the queue reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueEvent {
    /// The request may start; it runs from now until it is [finished](TransferQueue::finish).
    Start(QueueTicket),
    /// The reservation was not taken up, and is gone.
    Lapsed(QueueTicket),
}

/// Error of a queue operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum QueueError {
    /// The maximum number of requests waits already.
    #[error("{limit} requests wait already")]
    Full {
        /// Maximum number of requests that wait.
        limit: usize,
    },
    /// Two reservations cannot have one token.
    #[error("the token is in use")]
    TokenInUse,
    /// The reservation does not exist: it was taken up, has lapsed, or never was.
    #[error("there is no reservation with this token")]
    NoReservation,
    /// The request does not exist: it has finished, was cancelled, or never was.
    #[error("there is no such request")]
    NoRequest,
}

/// A place that was reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservedPlace {
    /// Request of the reservation.
    pub ticket: QueueTicket,
    /// Time at which it lapses.
    pub lapses_at: Moment,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Reserved {
        token: ReservationToken,
        lapses_at: Moment,
    },
    Waiting,
    Running,
    /// The request runs, and does not use its slot.
    Idle,
}

/// Position of a request in the queue: by the time at which it is due, then by priority, then in order of arrival.
type Place = (Moment, std::cmp::Reverse<Priority>, QueueTicket);

#[derive(Clone, Copy, Debug)]
struct Entry {
    due: Moment,
    request: TransferRequest,
    state: State,
}

impl Entry {
    const fn place(&self, ticket: QueueTicket) -> Place {
        (self.due, std::cmp::Reverse(self.request.priority), ticket)
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct TransferQueue {
    config: QueueConfig,
    /// The latest time that was passed in: it does not run backwards here.
    now: Moment,
    next: u64,
    entries: BTreeMap<QueueTicket, Entry>,
    /// Waiting requests, the next one first.
    line: BTreeSet<Place>,
    tokens: HashMap<ReservationToken, QueueTicket>,
    lapses: BTreeSet<(Moment, QueueTicket)>,
    running: usize,
    idle: usize,
}

impl TransferQueue {
    /// Makes an empty queue.
    #[must_use]
    pub fn new(config: QueueConfig) -> Self {
        Self {
            config,
            now: Moment::default(),
            next: 0,
            entries: BTreeMap::new(),
            line: BTreeSet::new(),
            tokens: HashMap::new(),
            lapses: BTreeSet::new(),
            running: 0,
            idle: 0,
        }
    }

    /// Accepts a request.
    ///
    /// # Errors
    ///
    /// [`QueueError::Full`].
    pub fn submit(
        &mut self,
        now: Moment,
        request: TransferRequest,
    ) -> Result<QueueTicket, QueueError> {
        self.admit(now, request, State::Waiting)
    }

    /// Reserves a place for `lifetime`, or for as long as reservations hold at most.
    ///
    /// # Errors
    ///
    /// [`QueueError::Full`], [`QueueError::TokenInUse`].
    pub fn reserve(
        &mut self,
        now: Moment,
        token: ReservationToken,
        request: TransferRequest,
        lifetime: Seconds,
    ) -> Result<ReservedPlace, QueueError> {
        if self.tokens.contains_key(&token) {
            return Err(QueueError::TokenInUse);
        }
        let limit = self.config.reserved;
        if self.tokens.len() >= limit {
            return Err(QueueError::Full { limit });
        }
        self.advance(now);
        let lifetime = lifetime.min(self.config.longest_reservation);
        let lapses_at = self.now.after(lifetime);
        let ticket = self.admit(now, request, State::Reserved { token, lapses_at })?;
        self.tokens.insert(token, ticket);
        self.lapses.insert((lapses_at, ticket));
        Ok(ReservedPlace { ticket, lapses_at })
    }

    /// Takes up a reservation: from now on it waits in its place, with the `bytes` that are known by now.
    ///
    /// # Errors
    ///
    /// [`QueueError::NoReservation`], also for one that has lapsed and was not polled for yet.
    pub fn present(
        &mut self,
        now: Moment,
        token: ReservationToken,
        bytes: Bytes,
    ) -> Result<QueueTicket, QueueError> {
        self.advance(now);
        let now = self.now;
        let ticket = *self.tokens.get(&token).ok_or(QueueError::NoReservation)?;
        let entry = (self.entries.get_mut(&ticket)).ok_or(QueueError::NoReservation)?;
        let State::Reserved { lapses_at, .. } = entry.state else {
            return Err(QueueError::NoReservation);
        };
        if lapses_at <= now {
            return Err(QueueError::NoReservation);
        }
        entry.state = State::Waiting;
        entry.request.bytes = bytes;
        self.line.insert(entry.place(ticket));
        self.tokens.remove(&token);
        self.lapses.remove(&(lapses_at, ticket));
        Ok(ticket)
    }

    /// Turns a waiting request into a reservation that keeps its place: for a caller that leaves and returns.
    ///
    /// # Errors
    ///
    /// [`QueueError::TokenInUse`]; [`QueueError::NoRequest`], also for one that does not wait.
    pub fn set_aside(
        &mut self,
        now: Moment,
        ticket: QueueTicket,
        token: ReservationToken,
        lifetime: Seconds,
    ) -> Result<ReservedPlace, QueueError> {
        if self.tokens.contains_key(&token) {
            return Err(QueueError::TokenInUse);
        }
        self.advance(now);
        let lapses_at = self
            .now
            .after(lifetime.min(self.config.longest_reservation));
        let entry = (self.entries.get_mut(&ticket)).ok_or(QueueError::NoRequest)?;
        if entry.state != State::Waiting {
            return Err(QueueError::NoRequest);
        }
        entry.state = State::Reserved { token, lapses_at };
        self.line.remove(&entry.place(ticket));
        self.tokens.insert(token, ticket);
        self.lapses.insert((lapses_at, ticket));
        Ok(ReservedPlace { ticket, lapses_at })
    }

    /// Gives a reservation up.
    ///
    /// # Errors
    ///
    /// [`QueueError::NoReservation`].
    pub fn cancel(&mut self, token: ReservationToken) -> Result<(), QueueError> {
        let ticket = *self.tokens.get(&token).ok_or(QueueError::NoReservation)?;
        self.remove(ticket);
        Ok(())
    }

    /// Returns whether a place is kept under this token.
    #[must_use]
    pub fn holds(&self, token: ReservationToken) -> bool {
        self.tokens.contains_key(&token)
    }

    /// Adds a request that runs already and cannot be made to wait: it counts, and may exceed the limit.
    pub fn run(&mut self, now: Moment, request: TransferRequest) -> QueueTicket {
        self.advance(now);
        self.running += 1;
        self.insert(request, State::Running)
    }

    /// Marks a running request as idle: it gives its slot to another. Returns false if it did not run.
    pub fn idle(&mut self, ticket: QueueTicket) -> bool {
        self.switch(ticket, State::Running, State::Idle)
    }

    /// Marks an idle request as running, at once: the limit may be exceeded for a while. Returns false if it was not
    /// idle.
    pub fn resume(&mut self, ticket: QueueTicket) -> bool {
        self.switch(ticket, State::Idle, State::Running)
    }

    fn switch(&mut self, ticket: QueueTicket, from: State, to: State) -> bool {
        let Some(entry) = self.entries.get_mut(&ticket) else {
            return false;
        };
        if entry.state != from {
            return false;
        }
        entry.state = to;
        if to == State::Running {
            self.running += 1;
            self.idle -= 1;
        } else {
            self.running -= 1;
            self.idle += 1;
        }
        true
    }

    /// Returns the next event, if there is one now; to be called until it returns `None`.
    pub fn poll(&mut self, now: Moment) -> Option<QueueEvent> {
        self.advance(now);
        if let Some(&(lapses_at, ticket)) = self.lapses.first()
            && lapses_at <= self.now
        {
            self.remove(ticket);
            return Some(QueueEvent::Lapsed(ticket));
        }
        if self.running >= self.config.running {
            return None;
        }
        let (_, _, ticket) = self.line.pop_first()?;
        let entry = self.entries.get_mut(&ticket)?;
        entry.state = State::Running;
        self.running += 1;
        Some(QueueEvent::Start(ticket))
    }

    /// Returns the time of the next lapse: then [`poll`](Self::poll) has an event although no other method was
    /// called.
    #[must_use]
    pub fn next_lapse(&self) -> Option<Moment> {
        self.lapses.first().map(|&(lapses_at, _)| lapses_at)
    }

    /// Sets the number of bytes that a running request still has to move.
    ///
    /// # Errors
    ///
    /// [`QueueError::NoRequest`].
    pub fn progressed(&mut self, ticket: QueueTicket, left: Bytes) -> Result<(), QueueError> {
        let entry = (self.entries.get_mut(&ticket)).ok_or(QueueError::NoRequest)?;
        entry.request.bytes = left;
        Ok(())
    }

    /// Ends a request, whether it ran, waited or was reserved.
    ///
    /// # Errors
    ///
    /// [`QueueError::NoRequest`].
    pub fn finish(&mut self, ticket: QueueTicket) -> Result<(), QueueError> {
        match self.remove(ticket) {
            Some(_) => Ok(()),
            None => Err(QueueError::NoRequest),
        }
    }

    /// Sets the number of requests that may run at once. Those that run go on; with 0 nothing starts.
    pub fn allow_running(&mut self, running: usize) {
        self.config.running = running;
    }

    /// Bytes of all that run, wait and are reserved.
    #[must_use]
    pub fn queued_bytes(&self) -> Bytes {
        self.sum(|_, _| true)
    }

    /// Returns the number of bytes that a request still has to move; `None` if there is no such request.
    #[must_use]
    pub fn bytes(&self, ticket: QueueTicket) -> Option<Bytes> {
        Some(self.entries.get(&ticket)?.request.bytes)
    }

    /// Returns the bytes that a request would have before it if it came now: of those that run, and of those that are
    /// due earlier. O(requests).
    #[must_use]
    pub fn bytes_before(&self, now: Moment, request: &TransferRequest) -> Bytes {
        self.before(now, request).1
    }

    /// Returns the number of requests that would go before this one if it came now, and their bytes. O(requests).
    #[must_use]
    pub fn before(&self, now: Moment, request: &TransferRequest) -> (usize, Bytes) {
        let due = self.due(self.now.max(now), request);
        let place = (
            due,
            std::cmp::Reverse(request.priority),
            QueueTicket(u64::MAX),
        );
        let before = |ticket, entry: &Entry| {
            matches!(entry.state, State::Running | State::Idle) || entry.place(ticket) < place
        };
        let mut count = 0;
        let bytes = self.sum(|ticket, entry| {
            let before = before(ticket, entry);
            count += usize::from(before);
            before
        });
        (count, bytes)
    }

    /// Returns the number of requests that run, and of those that wait or are reserved.
    #[must_use]
    pub fn lengths(&self) -> (usize, usize) {
        (self.running, self.held_up())
    }

    /// Returns the number of reservations.
    #[must_use]
    pub fn reserved(&self) -> usize {
        self.tokens.len()
    }

    /// Returns for each waiting request, the first one first, the number of requests before it and the bytes that
    /// they still have to move. A reservation is not counted before it is taken up. O(requests).
    pub fn line(&self) -> impl Iterator<Item = (QueueTicket, usize, Bytes)> {
        let active = |state| matches!(state, State::Running | State::Idle);
        let running = self.sum(|_, entry| active(entry.state));
        let count = self.running + self.idle;
        let line = self.line.iter();
        line.scan((count, running), |before, &(_, _, ticket)| {
            let here = *before;
            let bytes = self.entries.get(&ticket)?.request.bytes;
            *before = (here.0 + 1, here.1.plus(bytes));
            Some((ticket, here.0, here.1))
        })
    }

    /// Returns the number of requests that wait or are reserved.
    fn held_up(&self) -> usize {
        self.entries.len() - self.running - self.idle
    }

    fn sum(&self, mut of: impl FnMut(QueueTicket, &Entry) -> bool) -> Bytes {
        let entries = self
            .entries
            .iter()
            .filter(|(ticket, entry)| of(**ticket, entry));
        entries.fold(Bytes::ZERO, |sum, (_, entry)| sum.plus(entry.request.bytes))
    }

    fn advance(&mut self, now: Moment) {
        self.now = self.now.max(now);
    }

    fn admit(
        &mut self,
        now: Moment,
        request: TransferRequest,
        state: State,
    ) -> Result<QueueTicket, QueueError> {
        self.advance(now);
        let limit = self.config.waiting;
        if self.held_up() >= limit {
            return Err(QueueError::Full { limit });
        }
        Ok(self.insert(request, state))
    }

    fn insert(&mut self, request: TransferRequest, state: State) -> QueueTicket {
        let ticket = QueueTicket(self.next);
        self.next += 1;
        let due = self.due(self.now, &request);
        let entry = Entry {
            due,
            request,
            state,
        };
        if state == State::Waiting {
            self.line.insert(entry.place(ticket));
        }
        self.entries.insert(ticket, entry);
        ticket
    }

    /// Returns the time at which a request that arrives now is due: within its priority's band, as soon as it should
    /// start.
    fn due(&self, now: Moment, request: &TransferRequest) -> Moment {
        let mut earliest = now;
        for _ in request.priority.level()..Priority::MAX.level() {
            earliest = earliest.after(self.config.patience);
        }
        let latest = earliest.after(self.config.patience);
        request.start_by.unwrap_or(latest).clamp(earliest, latest)
    }

    fn remove(&mut self, ticket: QueueTicket) -> Option<Entry> {
        let entry = self.entries.remove(&ticket)?;
        match entry.state {
            State::Running => self.running -= 1,
            State::Idle => self.idle -= 1,
            State::Waiting => {
                self.line.remove(&entry.place(ticket));
            }
            State::Reserved { token, lapses_at } => {
                self.tokens.remove(&token);
                self.lapses.remove(&(lapses_at, ticket));
            }
        }
        Some(entry)
    }
}

#[cfg(test)]
mod tests;
