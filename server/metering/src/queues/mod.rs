//! The queues of this node: sequential checkpoint and restore (paper 000, §5.2.2) for threads that wait.
//!
//! ```text
//!  Open ──▶ enter ─▶ Queue (scheduling: who is next) ─▶ Turn ─▶ session ─▶ sealed, failed, discarded: Turn dropped
//!             │ waits: progress once a second, hang-ups and stops noticed      │
//!             └ the task runs on meanwhile                bytes, time, how many ran ─▶ Concurrency: how many may
//! ```
//!
//! A region has one of each direction: dumps write, restores read. Every request waits before anything is
//! frozen. A bare `criu --page-server` arrives with its task frozen: it [runs](Queues::run) at once and is
//! counted.
//!
//! **An admitted transfer that moves nothing** gives its slot to the next one: a session whose dump does not
//! come within [`arrival`](QueuesOptions::arrival), a CRIU that is stopped for [`stall`](QueuesOptions::stall).
//! It is counted again, at once, when it goes on: so a client that opens a session and never sends does not
//! hold up others, and a late one is not frozen in vain. Waiting threads and [`report`](Queues::report) check
//! the admitted transfers: without either, nothing runs here.

mod error;
mod lane;
mod reservations;
#[cfg(test)]
mod tests;
mod turn;

use std::sync::Arc;
use std::time::Duration;

use crate::QueueReport;
use permafrost_agent::host::Waits;
use permafrost_protocol::control::{self, request};
pub use permafrost_scheduling::estimator::Direction;
use permafrost_scheduling::queue::{Priority, ReservationToken};
use permafrost_store::{Counter, Timings};

use self::lane::Lane;

pub use error::QueuesError;
pub use reservations::{Others, Owner, Reservations};
pub use turn::{AdmittedTransfer, Entered};

/// Options of the queues.
#[derive(Clone, Copy, Debug)]
pub struct QueuesOptions {
    /// Number of dumps that run at once; `None`: the number that is found to maximize the throughput. Default
    /// `None`.
    pub dumps_at_once: Option<usize>,
    /// Number of restores that run at once; `None`: the number that is found to maximize the throughput. Default
    /// `None`.
    pub restores_at_once: Option<usize>,
    /// Maximum number of requests that wait or are reserved in a queue: each that waits here is a thread, and a lazy
    /// restore eight. Default 1024.
    pub waiting: usize,
    /// Maximum number of reservations among them. Default 256.
    pub reserved: usize,
    /// Time after which an admitted transfer that has moved nothing yet gives its slot to the next one. Longer than
    /// CRIU mostly needs from its start to the first page. Default 2 s.
    pub arrival: Duration,
    /// Time after which an admitted transfer that has stopped moving bytes gives its slot to the next one: longer
    /// than a slow medium needs to make the last bytes durable. Default 10 s.
    pub stall: Duration,
}

impl Default for QueuesOptions {
    fn default() -> Self {
        Self {
            dumps_at_once: None,
            restores_at_once: None,
            waiting: 1024,
            reserved: 256,
            arrival: Duration::from_secs(2),
            stall: Duration::from_secs(10),
        }
    }
}

/// Returns the approximate bytes that a dump will move: its client's figure, or the size of its task's memory.
#[must_use]
pub fn expected_bytes(open: &request::Open) -> u64 {
    match (open.expected_bytes, &open.origin) {
        (0, Some(origin)) => origin.resident_bytes,
        (said, _) => said,
    }
}

/// Request for admission.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    /// Approximate bytes that it will move; 0 if unknown: then the recent average of transfers is used.
    pub bytes: u64,
    /// Priority among waiting requests.
    pub priority: Priority,
    /// Time within which it should start.
    pub start_within: Option<Duration>,
    /// Token of the reservation that was made for it.
    pub token: Option<ReservationToken>,
}

impl Admission {
    /// Builds an admission from the fields of a request.
    ///
    /// # Errors
    /// [`QueuesError::BadToken`].
    pub fn new(
        bytes: u64,
        priority: u32,
        deadline_ms: Option<u64>,
        reservation: &str,
    ) -> Result<Self, QueuesError> {
        let token = (!reservation.is_empty()).then(|| parse_token(reservation));
        Ok(Self {
            bytes,
            priority: Priority::new(u8::try_from(priority).unwrap_or(u8::MAX)),
            start_within: deadline_ms.map(Duration::from_millis),
            token: token.transpose()?,
        })
    }
}

/// Counters of a queue since the start.
#[derive(Debug, Default)]
pub struct QueueCounters {
    /// Time from the request to its admission, for requests that did not wait, too.
    pub waits: Timings,
    /// Transfers that were admitted.
    pub turns: Counter,
    /// Requests that were refused because too many waited.
    pub refused: Counter,
    /// Callers that disconnected while they waited.
    pub gone: Counter,
    /// Reservations that were not taken up.
    pub lapsed: Counter,
}

/// The queues of a node.
#[derive(Debug)]
pub struct Queues {
    lanes: [Arc<Lane>; 2],
}

impl Queues {
    /// Creates empty queues.
    #[must_use]
    pub fn new(options: QueuesOptions) -> Arc<Self> {
        let fixed = [options.dumps_at_once, options.restores_at_once];
        let mut at = fixed.into_iter();
        let lanes = Direction::ALL
            .map(|direction| Arc::new(Lane::new(direction, at.next().flatten(), &options)));
        Arc::new(Self { lanes })
    }

    /// Replaces the concurrency limits, `None` for the measured optimum. Requests that wait start if the new limits
    /// admit them; transfers that run go on.
    pub fn limit(&self, dumps_at_once: Option<usize>, restores_at_once: Option<usize>) {
        self.lane(Direction::Write).limit(dumps_at_once);
        self.lane(Direction::Read).limit(restores_at_once);
    }

    fn lane(&self, direction: Direction) -> &Arc<Lane> {
        match direction {
            Direction::Write => &self.lanes[0],
            Direction::Read => &self.lanes[1],
        }
    }

    /// Waits for admission. Blocks; about once a second `waits` is given the position of the request, and is asked
    /// whether it still wants to wait. If nothing is ahead of it this takes a few microseconds.
    ///
    /// # Errors
    /// [`QueuesError`]: too many wait; there is no such reservation; the caller has gone; the daemon stops.
    pub fn enter(
        &self,
        direction: Direction,
        admission: &Admission,
        waits: &mut dyn Waits,
    ) -> Result<AdmittedTransfer, QueuesError> {
        match Lane::enter(self.lane(direction), admission, waits, None)? {
            Entered::Turn(turn) => Ok(turn),
            // Without a limit to its time no request is set aside.
            Entered::Later(_) => Err(QueuesError::Gone),
        }
    }

    /// Waits for admission as [`Self::enter`] does, for a caller that cannot receive progress: after `patience` its
    /// place is kept under a token, with which it has to come again.
    ///
    /// # Errors
    /// Those of [`Self::enter`].
    pub fn enter_within(
        &self,
        direction: Direction,
        admission: &Admission,
        patience: Duration,
    ) -> Result<Entered, QueuesError> {
        let lane = self.lane(direction);
        Lane::enter(
            lane,
            admission,
            &mut permafrost_agent::host::Patiently,
            Some(patience),
        )
    }

    /// Admits a transfer that cannot be made to wait: it counts among the running ones, and in the bytes ahead of
    /// others.
    #[must_use]
    pub fn run(&self, direction: Direction, bytes: u64) -> AdmittedTransfer {
        Lane::run(self.lane(direction), bytes)
    }

    /// Reserves a place in a queue. The node is the caller's to fill in.
    ///
    /// # Errors
    /// [`QueuesError::Full`], [`QueuesError::BadDirection`].
    pub fn reserve(&self, reserve: &request::Reserve) -> Result<control::Reserved, QueuesError> {
        let direction =
            Direction::named(&reserve.direction).ok_or_else(|| QueuesError::BadDirection {
                direction: reserve.direction.clone(),
            })?;
        let admission = Admission::new(reserve.bytes, reserve.priority, reserve.deadline_ms, "")?;
        let lifetime = match reserve.lifetime_ms {
            0 => Duration::MAX,
            ms => Duration::from_millis(ms),
        };
        self.lane(direction).reserve(&admission, lifetime)
    }

    /// Cancels a reservation.
    ///
    /// # Errors
    /// [`QueuesError::BadToken`], [`QueuesError::NoReservation`].
    pub fn cancel(&self, token: &str) -> Result<(), QueuesError> {
        let parsed = parse_token(token)?;
        let cancelled = self.lanes.iter().any(|lane| lane.cancel(parsed));
        cancelled.then_some(()).ok_or(QueuesError::NoReservation {
            direction: Direction::Write,
            token: token.to_owned(),
        })
    }

    /// Returns true if there is a reservation with this token.
    #[must_use]
    pub fn holds(&self, token: &str) -> bool {
        parse_token(token).is_ok_and(|token| self.lanes.iter().any(|lane| lane.holds(token)))
    }

    /// Returns the state of the queues: writes, then reads. O(requests).
    #[must_use]
    pub fn report(&self) -> [QueueReport; 2] {
        [self.lanes[0].report(), self.lanes[1].report()]
    }

    /// Returns the state of the queues for `permafrost status`.
    #[must_use]
    pub fn status(&self) -> Vec<control::QueueStatus> {
        let reports = Direction::ALL.into_iter().zip(self.report());
        reports
            .map(|(direction, report)| control::QueueStatus {
                transfers: self.lane(direction).transfers(),
                direction: direction.name().to_owned(),
                running: report.running,
                waiting: report.waiting,
                reserved: report.reserved,
                bytes: report.bytes,
                slots: report.slots,
                automatic: report.automatic,
                bytes_per_s: report.bytes_per_s,
            })
            .collect()
    }

    /// Returns the counters: of writes, then of reads.
    #[must_use]
    pub fn counters(&self) -> [&QueueCounters; 2] {
        [self.lanes[0].counters(), self.lanes[1].counters()]
    }

    /// Refuses all waiting requests, and all later ones. Admitted transfers go on.
    pub fn stop(&self) {
        for lane in &self.lanes {
            lane.stop();
        }
    }
}

/// Formats a token.
pub fn token_text(token: ReservationToken) -> String {
    format!("{:032x}", token.0)
}

fn parse_token(text: &str) -> Result<ReservationToken, QueuesError> {
    let plain = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = plain.then(|| u128::from_str_radix(text, 16).ok()).flatten();
    number
        .map(ReservationToken)
        .ok_or_else(|| QueuesError::BadToken {
            token: text.to_owned(),
        })
}

/// Returns 128 random bits: a token that can be guessed can be stolen.
fn new_token() -> ReservationToken {
    // Six bits of a UUID are fixed; rotated by a quarter, random bits of the second one cover them.
    let (one, other) = (uuid::Uuid::new_v4(), uuid::Uuid::new_v4());
    ReservationToken(one.as_u128() ^ other.as_u128().rotate_left(32))
}
