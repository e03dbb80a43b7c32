//! When repair does what.

use std::time::Duration;

/// When the leader does what.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long a node may be gone before its copies are made anew. Default 30 s.
    pub grace: Duration,
    /// How long a node has to heal a damaged copy before another node gets one. Default 30 s.
    pub healing: Duration,
    /// How long a checkpoint that was just listed may lack copies before one is made: its dump may still be making
    /// them. Default 10 s.
    pub patience: Duration,
    /// Between two looks at all that is listed, while there is something to do. Default 3 s.
    pub busy: Duration,
    /// The same while there is not, and no node comes, goes or is drained. Default 30 s.
    pub idle: Duration,
    /// The view of the nodes must be younger. Default 5 s.
    pub freshness: Duration,
    /// First pause after a failed copy; it doubles, up to 64 times as long. Default 10 s.
    pub pause: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            grace: Duration::from_secs(30),
            healing: Duration::from_secs(30),
            patience: Duration::from_secs(10),
            busy: Duration::from_secs(3),
            idle: Duration::from_secs(30),
            freshness: Duration::from_secs(5),
            pause: Duration::from_secs(10),
        }
    }
}
