//! The queues of this node: sequential checkpoint and restore (paper 000, §5.2.2) for threads that wait.
//!
//! ```text
//!  Open ──▶ enter ─▶ Queue (scheduling: who is next) ─▶ Turn ─▶ session ─▶ sealed, failed, discarded: Turn dropped
//!             │ waits: progress once a second, hang-ups and stops noticed      │
//!             └ the task runs on meanwhile                bytes, time, how many ran ─▶ Concurrency: how many may
//! ```
//!
//! A region has one of each direction: dumps write, restores read. All that waits, waits before anything is frozen. A
//! bare `criu --page-server` arrives with its task frozen: it [runs](Queues::run) at once and is counted.
//!
//! **A turn that moves nothing** gives its place to the next: a session whose dump does not come within
//! [`arrival`](QueuesOptions::arrival), a CRIU that is stopped for [`stall`](QueuesOptions::stall). It is counted again,
//! at once, when it goes on: so nobody who opens and never comes holds up the others, and nobody who comes late is
//! frozen in vain. Turns are looked at by whoever waits, and by
//! [`report`](Queues::report): while nobody asks nothing runs here.

mod error;
mod lane;
mod reservations;
#[cfg(test)]
mod tests;
mod turn;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use permafrost_agent::host::Waits;
use permafrost_protocol::control::{self, request};
use permafrost_scheduling::queue::{Priority, Token};
use permafrost_store::{Count, Timings};
use serde::Serialize;

use self::lane::Lane;

pub use error::QueuesError;
pub use reservations::{Others, Owner, Reservations};
pub use turn::{Entered, Turn};

/// What a queue is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Dumps.
    Write,
    /// Restores.
    Read,
}

impl Direction {
    /// Both, in the order in which they are listed.
    pub const ALL: [Self; 2] = [Self::Write, Self::Read];

    /// `write` or `read`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
        }
    }

    /// What waits in it.
    #[must_use]
    pub const fn many(self) -> &'static str {
        match self {
            Self::Write => "dumps",
            Self::Read => "restores",
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Direction {
    type Err = QueuesError;

    fn from_str(text: &str) -> Result<Self, QueuesError> {
        let found = Self::ALL.into_iter().find(|known| known.name() == text);
        found.ok_or_else(|| QueuesError::BadDirection {
            direction: text.to_owned(),
        })
    }
}

/// How the queues behave.
#[derive(Clone, Copy, Debug)]
pub struct QueuesOptions {
    /// How many dumps run at once; `None`: as many as are found to raise what is moved. Default `None`.
    pub dumps_at_once: Option<usize>,
    /// The same of restores. Default `None`.
    pub restores_at_once: Option<usize>,
    /// How many wait or are reserved in a queue at most: each that waits here is a thread. Default 1024.
    pub waiting: usize,
    /// Of these, how many are reserved. Default 256.
    pub reserved: usize,
    /// A turn that has moved nothing yet gives its place to the next after so long. Longer than CRIU mostly needs from
    /// its start to the first page. Default 2 s.
    pub arrival: Duration,
    /// One that moves nothing any more gives its place to the next after so long: longer than a slow medium needs to
    /// make the last of it durable. Default 10 s.
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

/// About how much the dump will move that is opened, bytes: what its client says, or the memory that its task has.
#[must_use]
pub fn expected_bytes(open: &request::Open) -> u64 {
    match (open.expected_bytes, &open.origin) {
        (0, Some(origin)) => origin.resident_bytes,
        (said, _) => said,
    }
}

/// What wants a turn.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    /// About how much it will move, bytes; 0 while nobody knows: then what turns have moved of late is taken.
    pub bytes: u64,
    /// Who goes first where several wait.
    pub priority: Priority,
    /// It should start within this time.
    pub start_within: Option<Duration>,
    /// The place that was reserved for it.
    pub token: Option<Token>,
}

impl Admission {
    /// As a request says it.
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

/// How a queue stands.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct QueueReport {
    /// Bytes that all of them still have to move.
    pub bytes: u64,
    /// How many run.
    pub running: u32,
    /// How many wait.
    pub waiting: u32,
    /// Places that are reserved and not taken up.
    pub reserved: u32,
    /// How many may run at once.
    pub slots: u32,
    /// That many was found best; otherwise an operator has said so.
    pub automatic: bool,
    /// What empties it, bytes a second: what those that run at once move together, by what turns of their size have
    /// taken of late, starts included.
    pub bytes_per_s: Option<f64>,
}

/// What a queue has counted since the start.
#[derive(Debug, Default)]
pub struct QueueCounters {
    /// From the request to its turn; those that did not wait too.
    pub waits: Timings,
    /// Turns that have begun.
    pub turns: Count,
    /// Requests refused as too many waited.
    pub refused: Count,
    /// Callers that went while they waited.
    pub gone: Count,
    /// Reservations that were not taken up.
    pub lapsed: Count,
}

/// The queues of a node.
#[derive(Debug)]
pub struct Queues {
    lanes: [Arc<Lane>; 2],
}

impl Queues {
    /// Empty ones.
    #[must_use]
    pub fn new(options: QueuesOptions) -> Arc<Self> {
        let fixed = [options.dumps_at_once, options.restores_at_once];
        let mut at = fixed.into_iter();
        let lanes = Direction::ALL
            .map(|direction| Arc::new(Lane::new(direction, at.next().flatten(), &options)));
        Arc::new(Self { lanes })
    }

    fn lane(&self, direction: Direction) -> &Arc<Lane> {
        match direction {
            Direction::Write => &self.lanes[0],
            Direction::Read => &self.lanes[1],
        }
    }

    /// Waits for a turn. Blocks; `waits` is told how it stands about once a second, and asked whether it still wants to.
    /// With nobody before it this is a few microseconds.
    ///
    /// # Errors
    /// [`QueuesError`]: too many wait; there is no such reservation; the caller has gone; the daemon stops.
    pub fn enter(
        &self,
        direction: Direction,
        admission: &Admission,
        waits: &mut dyn Waits,
    ) -> Result<Turn, QueuesError> {
        match Lane::enter(self.lane(direction), admission, waits, None)? {
            Entered::Turn(turn) => Ok(turn),
            // Without a limit to its time nobody is set aside.
            Entered::Later(_) => Err(QueuesError::Gone),
        }
    }

    /// The same for one who cannot be told anything on the way: after `patience` its place is kept under a token, with
    /// which it has to come again.
    ///
    /// # Errors
    /// As [`Self::enter`].
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

    /// A turn for what cannot be made to wait: it counts among those that run, and in what is before the others.
    #[must_use]
    pub fn run(&self, direction: Direction, bytes: u64) -> Turn {
        Lane::run(self.lane(direction), bytes)
    }

    /// Keeps a place for one to come. The node is the caller's to fill in.
    ///
    /// # Errors
    /// [`QueuesError::Full`], [`QueuesError::BadDirection`].
    pub fn reserve(&self, reserve: &request::Reserve) -> Result<control::Reserved, QueuesError> {
        let direction: Direction = reserve.direction.parse()?;
        let admission = Admission::new(reserve.bytes, reserve.priority, reserve.deadline_ms, "")?;
        let lifetime = match reserve.lifetime_ms {
            0 => Duration::MAX,
            ms => Duration::from_millis(ms),
        };
        self.lane(direction).reserve(&admission, lifetime)
    }

    /// Gives a reserved place up.
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

    /// Returns whether a place is kept under this token.
    #[must_use]
    pub fn holds(&self, token: &str) -> bool {
        parse_token(token).is_ok_and(|token| self.lanes.iter().any(|lane| lane.holds(token)))
    }

    /// How the queues stand: writes, then reads. O(requests).
    #[must_use]
    pub fn report(&self) -> [QueueReport; 2] {
        [self.lanes[0].report(), self.lanes[1].report()]
    }

    /// The same for `permafrost status`.
    #[must_use]
    pub fn status(&self) -> Vec<control::QueueStatus> {
        let reports = Direction::ALL.into_iter().zip(self.report());
        reports
            .map(|(direction, report)| control::QueueStatus {
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

    /// What was counted: of writes, then of reads.
    #[must_use]
    pub fn counters(&self) -> [&QueueCounters; 2] {
        [self.lanes[0].counters(), self.lanes[1].counters()]
    }

    /// Refuses all that wait, and whoever comes from now on. Those that have their turns go on.
    pub fn stop(&self) {
        for lane in &self.lanes {
            lane.stop();
        }
    }
}

/// A token as it is written.
pub fn token_text(token: Token) -> String {
    format!("{:032x}", token.0)
}

fn parse_token(text: &str) -> Result<Token, QueuesError> {
    let plain = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = plain.then(|| u128::from_str_radix(text, 16).ok()).flatten();
    number.map(Token).ok_or_else(|| QueuesError::BadToken {
        token: text.to_owned(),
    })
}

/// 128 random bits: what can be guessed can be stolen.
fn new_token() -> Token {
    // Six bits of such an id are fixed; turned by a quarter, others of the second one cover them.
    let (one, other) = (uuid::Uuid::new_v4(), uuid::Uuid::new_v4());
    Token(one.as_u128() ^ other.as_u128().rotate_left(32))
}
