//! `GET /v1/events`: what changes, as it changes. A `text/event-stream`: the event's name, and one of these as data.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::reserve::Direction;

/// Something changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// A checkpoint was sealed, and is listed.
    Checkpoint {
        /// `JOB@GENERATION`.
        checkpoint: String,
        /// Job.
        job: String,
        /// Generation.
        generation: u64,
        /// Size of the memory image, bytes.
        memory_bytes: u64,
        /// Bytes that it added to the store.
        stored_bytes: u64,
    },
    /// A checkpoint was removed.
    Removed {
        /// `JOB@GENERATION`.
        checkpoint: String,
        /// Job.
        job: String,
        /// Generation.
        generation: u64,
    },
    /// A node came, went, or is as its operator said.
    Node {
        /// Its name.
        node: String,
        /// It is there.
        live: bool,
    },
    /// The length of a queue has changed.
    Queue {
        /// Node.
        node: String,
        /// Which queue.
        direction: Direction,
        /// Bytes that are still to be moved.
        bytes: u64,
        /// How many run.
        running: u32,
        /// How many wait.
        waiting: u32,
    },
    /// The reader was too slow for so many, and will not see them.
    Missed {
        /// How many.
        missed: u64,
    },
}

impl Event {
    /// The event's name in the stream.
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
            Event::Missed { missed: 3 },
            Event::Node {
                node: "n".into(),
                live: false,
            },
        ] {
            let json = serde_json::to_value(&event).unwrap();
            assert_eq!(json["event"], event.name());
        }
    }
}
