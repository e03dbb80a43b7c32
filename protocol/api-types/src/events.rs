//! `GET /v1/events`: changes of the store, the nodes and the queues, as they happen. A `text/event-stream`: the
//! event's name, and one of these as data.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::reserve::Direction;

/// Change in the store, in a node or in a queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "lowercase")]
#[schema(as = Event)]
pub enum ApiEvent {
    /// A checkpoint was sealed, and is listed.
    Checkpoint {
        /// Name of the checkpoint, `JOB@GENERATION`.
        checkpoint: String,
        /// Name of the job.
        job: String,
        /// Generation of the checkpoint in its job.
        generation: u64,
        /// Size of the memory image, bytes.
        memory_bytes: u64,
        /// Bytes that it added to the store.
        stored_bytes: u64,
    },
    /// A checkpoint was removed.
    Removed {
        /// Name of the checkpoint, `JOB@GENERATION`.
        checkpoint: String,
        /// Name of the job.
        job: String,
        /// Generation of the checkpoint in its job.
        generation: u64,
    },
    /// A node joined, left, or changed its administrative state.
    Node {
        /// Name of the node.
        node: String,
        /// True if the node's lease is alive.
        live: bool,
    },
    /// The length of a queue has changed.
    Queue {
        /// Name of the node whose queue it is.
        node: String,
        /// Direction of the queue: dumps or restores.
        direction: Direction,
        /// Bytes that are still to be moved.
        bytes: u64,
        /// Number of transfers that run.
        running: u32,
        /// Number of transfers that wait.
        waiting: u32,
    },
    /// The reader was too slow: it has missed events, and will not get them.
    Missed {
        /// Number of events that were missed.
        missed: u64,
    },
}

impl ApiEvent {
    /// Returns the event's name in the stream.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Checkpoint { .. } => "checkpoint",
            Self::Removed { .. } => "removed",
            Self::Node { .. } => "node",
            Self::Queue { .. } => "queue",
            Self::Missed { .. } => "missed",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_the_tag() {
        for event in [
            ApiEvent::Missed { missed: 3 },
            ApiEvent::Node {
                node: "n".into(),
                live: false,
            },
        ] {
            let json = serde_json::to_value(&event).unwrap();
            assert_eq!(json["event"], event.name());
        }
    }
}
