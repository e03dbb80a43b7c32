//! Limits of a single request, and of all of them together.

use std::time::Duration;

/// Longest body, bytes. 10,000 tasks with long names and all fields are 5 MB.
pub const BODY_BYTES: usize = 8 << 20;

/// Longest time for a body to come. A slow sender holds a connection and the bytes already sent.
pub const BODY_TIME: Duration = Duration::from_secs(30);

/// Longest id of a task, bytes: an answer may name one task for each of the others.
pub const ID_BYTES: usize = 1024;

/// Maximum number of answers to one request: tasks × nodes × mechanisms, or checkpoints × nodes. 200,000 with
/// all their parts are about 150 MB.
pub const ANSWERS: usize = 200_000;

/// Size above which a body is read and answered on a thread of its own, bytes: 1,000 tasks stay on the
/// runtime's thread, which saves the transfer to another one, and take it a millisecond.
pub const SHORT_BODY_BYTES: usize = 384 << 10;

/// Number of answers above which they are made on a thread of their own.
pub const SHORT_ANSWERS: usize = 2_000;

/// Maximum number of batches on threads of their own at once: the processors have other work.
pub const LONG_AT_ONCE: usize = 2;

/// Longest wait of a long batch for its slot.
pub const LONG_PATIENCE: Duration = Duration::from_secs(20);

/// Maximum number of requests that the daemon handles at once: each has a thread, and may wait for another
/// node.
pub const ASKING_AT_ONCE: usize = 16;

/// Longest time that the daemon may take for one request.
pub const ASKING_PATIENCE: Duration = Duration::from_secs(10);

/// Default number of nodes, jobs or checkpoints in a page.
pub const PAGE: u32 = 1_000;

/// Maximum number of nodes, jobs or checkpoints in a page.
pub const LONGEST_PAGE: u32 = 10_000;

/// Default number of nodes in the answer for a checkpoint to be resumed.
pub const RESUME_NODES: u32 = 8;

/// Maximum number of copies of one dump.
pub const COPIES: u32 = 100;

/// Maximum number of readers of events at once: half of the connections that socket and port have each, because
/// a reader keeps its connection.
pub const EVENT_READERS: usize = 128;

/// Maximum number of readers of events of one caller.
pub const CALLER_EVENT_READERS: usize = 32;

/// Maximum number of requests for contents of checkpoints at once: half of what the daemon handles, so that
/// reservations go on beside them. Each may wait for another node.
pub const CONTENTS_AT_ONCE: usize = 8;

/// Maximum number of those of one caller.
pub const CALLER_CONTENTS: usize = 2;

/// Maximum number of reservations that one caller may have made and that have not lapsed: a quarter of those of
/// a queue.
pub const CALLER_RESERVATIONS: usize = 64;

/// Maximum number of events that a slow reader may be behind.
pub const EVENTS_KEPT: usize = 1024;

/// Time without an event after which a comment is sent: it keeps proxies from closing the connection, and
/// detects readers that have gone.
pub const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Shortest interval between two snapshots of the daemon: events may come by the thousand.
pub const LEAST_BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// Longest time that a request for an unknown checkpoint waits for a new listing.
pub const LISTING_PATIENCE: Duration = Duration::from_secs(5);
