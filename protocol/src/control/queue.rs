//! Messages about the queues of dumps and restores.

use prost::Message;
use serde::Serialize;

/// State of a request that waits for admission.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Waiting {
    /// Number of dumps, or restores, that go before it: those that run and those that are due earlier.
    #[prost(uint32, tag = "1")]
    pub before: u32,
    /// Bytes that they still have to move.
    #[prost(uint64, tag = "2")]
    pub bytes_before: u64,
    /// About when it starts, milliseconds from now; none before anything was measured.
    #[prost(uint64, optional, tag = "3")]
    pub starts_in_ms: Option<u64>,
    /// Sent to an agent only: token that keeps the request's place; the agent must present it in its next request.
    #[prost(string, tag = "4")]
    pub token: String,
}

/// A place in a queue.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Reserved {
    /// Token that takes the reservation up: 32 hex digits. Any caller that presents the token gets the reservation.
    #[prost(string, tag = "1")]
    pub token: String,
    /// Name of the node whose queue it is in; empty on a single machine.
    #[prost(string, tag = "2")]
    pub node: String,
    /// `write` or `read`.
    #[prost(string, tag = "3")]
    pub direction: String,
    /// Bytes that are moved before it.
    #[prost(uint64, tag = "4")]
    pub bytes_before: u64,
    /// About when it could start, milliseconds from now; none before anything was measured.
    #[prost(uint64, optional, tag = "5")]
    pub starts_in_ms: Option<u64>,
    /// Time until the reservation lapses unless it is taken up, milliseconds from now.
    #[prost(uint64, tag = "6")]
    pub lapses_in_ms: u64,
}

/// State of a queue.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct QueueStatus {
    /// `write` (dumps) or `read` (restores).
    #[prost(string, tag = "1")]
    pub direction: String,
    /// Number of transfers that run.
    #[prost(uint32, tag = "2")]
    pub running: u32,
    /// Number of transfers that wait.
    #[prost(uint32, tag = "3")]
    pub waiting: u32,
    /// Places that are reserved and not taken up.
    #[prost(uint32, tag = "4")]
    pub reserved: u32,
    /// Bytes that all requests in the queue still have to move.
    #[prost(uint64, tag = "5")]
    pub bytes: u64,
    /// Number of transfers that may run at once.
    #[prost(uint32, tag = "6")]
    pub slots: u32,
    /// True if `slots` was measured as the best number; false if an operator has set it.
    #[prost(bool, tag = "7")]
    pub automatic: bool,
    /// Drain rate of the queue, bytes a second: the sum of the rates of all active transfers, as recent transfers of
    /// their size measured them, starts included; none before anything was measured.
    #[prost(double, optional, tag = "8")]
    pub bytes_per_s: Option<f64>,
    /// Transfers that run, the oldest first.
    #[prost(message, repeated, tag = "50")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub transfers: Vec<TransferStatus>,
}

/// A dump or a restore that runs.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct TransferStatus {
    /// Time since it was admitted, milliseconds.
    #[prost(uint64, tag = "1")]
    pub age_ms: u64,
    /// Bytes that it has moved.
    #[prost(uint64, tag = "2")]
    pub moved_bytes: u64,
    /// Bytes that it is expected to move in all: as it said, or the average of transfers before.
    #[prost(uint64, tag = "3")]
    pub expected_bytes: u64,
    /// True if it has moved nothing for so long that its slot was given to another one.
    #[prost(bool, tag = "4")]
    pub idle: bool,
}
