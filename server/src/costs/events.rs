//! What happened to checkpoints, for whoever listens.

use std::time::Duration;

/// Something that is over. Told after it is durable; who does not listen fast enough misses the oldest.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A dump became a checkpoint.
    Dumped {
        /// Job; empty for a parked one.
        job: String,
        /// Generation; 0 for a parked one.
        generation: u64,
        /// Checkpoint id, 32 hex digits.
        id: String,
        /// Bytes that went from the task to this node.
        bytes: u64,
        /// From the opening of the session to its seal; of a parked one from the first byte.
        elapsed: Duration,
    },
    /// A checkpoint was given to a restore.
    Restored {
        /// Job.
        job: String,
        /// Generation.
        generation: u64,
        /// Checkpoint id, 32 hex digits.
        id: String,
        /// Bytes of images given.
        bytes: u64,
        /// From the request to its end.
        elapsed: Duration,
    },
    /// A dump failed or was discarded.
    Failed {
        /// Job; empty if it had none.
        job: String,
        /// Session.
        session: String,
        /// Why.
        reason: String,
    },
    /// A checkpoint is gone from this node.
    Removed {
        /// Job; empty for a parked one.
        job: String,
        /// Generation; 0 for a parked one.
        generation: u64,
        /// Checkpoint id, 32 hex digits.
        id: String,
    },
}
