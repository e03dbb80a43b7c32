//! State of a queue of dumps or of restores, as the queues give it, and as a node reports it to the others.

use serde::{Deserialize, Serialize};

/// Length and drain rate of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueReport {
    /// Bytes still to be moved by running, waiting and reserved transfers. A newcomer waits for fewer bytes where
    /// several transfers run at once.
    pub bytes: u64,
    /// Number of running transfers.
    pub running: u32,
    /// Number of waiting transfers.
    pub waiting: u32,
    /// Number of reservations that are not taken up.
    pub reserved: u32,
    /// Maximum number of transfers that run at once; 0 for no limit.
    pub slots: u32,
    /// True if that number was measured; false if an operator has set it. Not reported to other nodes.
    #[serde(skip)]
    pub automatic: bool,
    /// Drain rate of the queue, bytes per second: that of all running transfers together; `None` before it was
    /// measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_s: Option<f64>,
}
