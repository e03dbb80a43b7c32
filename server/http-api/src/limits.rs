//! What one request, and all of them together, may ask for.

use std::time::Duration;

/// Longest body, bytes. 10,000 tasks with long names and all fields are 5 MB.
pub const BODY_BYTES: usize = 8 << 20;

/// How long a body may take to come. A slow sender holds a connection and what it has sent.
pub const BODY_TIME: Duration = Duration::from_secs(30);

/// Answers of one request at most: tasks × nodes × mechanisms, or checkpoints × nodes. 200,000 with all their parts are
/// about 150 MB.
pub const ANSWERS: usize = 200_000;

/// Bodies above are read and answered on a thread of their own, bytes: 1,000 tasks stay on the runtime's, which saves
/// the way there and back, and take it a millisecond.
pub const SHORT_BODY_BYTES: usize = 384 << 10;

/// Answers above are made on a thread of their own.
pub const SHORT_ANSWERS: usize = 2_000;

/// Batches on threads of their own at once: there is other work for the processors.
pub const LONG_AT_ONCE: usize = 2;

/// How long a long batch waits for its turn.
pub const LONG_PATIENCE: Duration = Duration::from_secs(20);

/// Requests that are with the daemon at once: each has a thread, and may wait for another node.
pub const ASKING_AT_ONCE: usize = 16;

/// How long the daemon may take for one.
pub const ASKING_PATIENCE: Duration = Duration::from_secs(10);

/// Nodes, jobs or checkpoints in one page, if nobody says how many.
pub const PAGE: u32 = 1_000;

/// Nodes, jobs or checkpoints in one page at most.
pub const LONGEST_PAGE: u32 = 10_000;

/// Nodes answered for a checkpoint to be resumed, if nobody says how many.
pub const RESUME_NODES: u32 = 8;

/// Copies of one dump at most.
pub const COPIES: u32 = 100;

/// Readers of events at once: half of the connections that socket and port have each, as they keep theirs.
pub const EVENT_READERS: usize = 128;

/// Of these, as many as one caller may have.
pub const CALLER_EVENT_READERS: usize = 32;

/// Reservations that one caller may have made and that have not lapsed: a quarter of those of a queue.
pub const CALLER_RESERVATIONS: usize = 64;

/// Events that a slow reader may be behind.
pub const EVENTS_KEPT: usize = 1024;

/// A comment after so long without an event: what stands between keeps the connection, and who has gone is noticed.
pub const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Least time between two looks at the daemon: events may come by the thousand.
pub const LEAST_BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// How long whoever asks for a checkpoint that is not known waits for all to be listed anew.
pub const LISTING_PATIENCE: Duration = Duration::from_secs(5);
