//! Why there is no turn.

use permafrost_protocol::control::{self, ErrorCode};
use permafrost_scheduling::queue::QueueError;

use super::Direction;

/// Why a dump or a restore does not get a turn, or a place is not kept.
#[derive(Debug, thiserror::Error)]
pub enum QueuesError {
    /// As many wait as may.
    #[error("{limit} {} wait already or have reserved places", direction.many())]
    Full {
        /// For what.
        direction: Direction,
        /// How many may.
        limit: usize,
    },
    /// The token is no token.
    #[error("{token:?} is no reservation: one has 32 hexadecimal digits")]
    BadToken {
        /// As it was given.
        token: String,
    },
    /// No such place: it has lapsed, was taken up or given up, or is another queue's.
    #[error("there is no reservation {token} for {} here", direction.many())]
    NoReservation {
        /// For what.
        direction: Direction,
        /// Its token.
        token: String,
    },
    /// It can never be moved.
    #[error("{bytes} bytes are more than the region holds, {capacity_bytes}")]
    TooLarge {
        /// Wanted.
        bytes: u64,
        /// Size of the region.
        capacity_bytes: u64,
    },
    /// The direction is none.
    #[error("{direction:?} is no queue: there are write, for dumps, and read, for restores")]
    BadDirection {
        /// As it was given.
        direction: String,
    },
    /// Whoever waited does not wait any more.
    #[error("the caller has gone while it waited for its turn")]
    Gone,
    /// Nothing starts any more.
    #[error("permafrostd is stopping")]
    Stopping,
}

impl QueuesError {
    pub(super) fn of(error: QueueError, direction: Direction, token: &str) -> Self {
        match error {
            QueueError::Full { limit } => Self::Full { direction, limit },
            QueueError::TokenInUse | QueueError::NoReservation | QueueError::NoRequest => {
                Self::NoReservation {
                    direction,
                    token: token.to_owned(),
                }
            }
        }
    }

    /// What kind of refusal it is.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Full { .. } | Self::Stopping => ErrorCode::Unavailable,
            Self::BadToken { .. } | Self::BadDirection { .. } => ErrorCode::Invalid,
            Self::NoReservation { .. } => ErrorCode::Conflict,
            Self::TooLarge { .. } => ErrorCode::NoSpace,
            Self::Gone => ErrorCode::SessionFailed,
        }
    }

    /// What to do about it.
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::Full { .. } => "try again later, or on another node",
            Self::NoReservation { .. } => {
                "it may have lapsed, or be of another node: reserve again, or go without --reservation"
            }
            Self::TooLarge { .. } => {
                "reserve on a node with a larger region (`permafrost nodes`), or what is stored of it: zero and equal pages are not"
            }
            Self::BadToken { .. } => "`permafrost reserve` prints it",
            Self::Stopping => "try again when it runs",
            Self::BadDirection { .. } | Self::Gone => "",
        }
    }

    /// As a reply.
    #[must_use]
    pub fn to_reply(&self) -> control::Error {
        control::Error {
            code: self.code().into(),
            message: self.to_string(),
            hint: self.hint().to_owned(),
        }
    }
}
