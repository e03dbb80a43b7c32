//! Errors of the queues.

use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_scheduling::queue::QueueError;
use permafrost_store::StoreError;

use super::Direction;

/// Reason why a dump or a restore is not admitted, or a reservation is refused.
#[derive(Debug, thiserror::Error)]
pub enum QueuesError {
    /// The maximum number of requests is waiting.
    #[error("{limit} {} wait already or have reserved places", direction.many())]
    Full {
        /// Queue that is full.
        direction: Direction,
        /// Maximum number of waiting requests.
        limit: usize,
    },
    /// The token is malformed.
    #[error("{token:?} is no reservation: one has 32 hexadecimal digits")]
    BadToken {
        /// Token as it was given.
        token: String,
    },
    /// There is no such reservation: it has lapsed, was taken up or cancelled, or belongs to the other queue.
    #[error("there is no reservation {token} for {} here", direction.many())]
    NoReservation {
        /// Queue in which it was looked up.
        direction: Direction,
        /// Token of the reservation.
        token: String,
    },
    /// The transfer is larger than the region.
    #[error("{bytes} bytes are more than the region holds, {capacity_bytes}")]
    TooLarge {
        /// Bytes that were requested.
        bytes: u64,
        /// Size of the region.
        capacity_bytes: u64,
    },
    /// The direction is neither `write` nor `read`.
    ///
    /// Cure: say `write` or `read`.
    #[error("{direction:?} is no queue: there are write, for dumps, and read, for restores")]
    BadDirection {
        /// Direction as it was given.
        direction: String,
    },
    /// The owner has the maximum number of reservations.
    #[error("{owner} keeps {limit} places already")]
    TooManyOfOwner {
        /// Name of the owner.
        owner: String,
        /// Maximum number of reservations of one owner.
        limit: usize,
    },
    /// The named node does not exist.
    #[error("node {node} not found")]
    NoNode {
        /// Name of the node.
        node: String,
    },
    /// The caller disconnected while it waited.
    ///
    /// Cure: none is needed: the command that waited has ended.
    #[error("the caller has gone while it waited for its turn")]
    Gone,
    /// The daemon is stopping: nothing starts any more.
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
}

impl ReportedError for QueuesError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Full { .. } | Self::TooManyOfOwner { .. } | Self::Stopping => {
                ErrorCode::Unavailable
            }
            Self::BadToken { .. } | Self::BadDirection { .. } => ErrorCode::Invalid,
            Self::NoReservation { .. } => ErrorCode::Conflict,
            Self::NoNode { .. } => ErrorCode::NotFound,
            Self::TooLarge { .. } => ErrorCode::NoSpace,
            Self::Gone => ErrorCode::SessionFailed,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Full { .. } => "try again later, or on another node",
            Self::NoReservation { .. } => {
                "it may have lapsed, or be of another node: reserve again, or go without --reservation"
            }
            Self::TooLarge { .. } => {
                "reserve on a node with a larger region (`permafrost nodes`), or what is stored of it: zero and equal pages are not"
            }
            Self::BadToken { .. } => "`permafrost reserve` prints it",
            Self::TooManyOfOwner { .. } => {
                "take them up, or give some up (`permafrost reserve --cancel`)"
            }
            Self::NoNode { .. } => "`permafrost node ls` lists the nodes",
            Self::Stopping => "try again when it runs",
            Self::BadDirection { .. } | Self::Gone => "",
        }
    }
}

impl From<QueuesError> for StoreError {
    fn from(error: QueuesError) -> Self {
        Self::port(error)
    }
}
