//! Intervals of repair.

use std::time::Duration;

/// Intervals and delays of the leader.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Time for which a node may be gone before its copies are made again. Default 30 s.
    pub grace: Duration,
    /// Time for a node to heal a damaged copy before another node gets one. Default 30 s.
    pub healing: Duration,
    /// Time for which a checkpoint that was just listed may lack copies before one is made: its dump may still be
    /// making them. Default 10 s.
    pub patience: Duration,
    /// Interval between two rounds while there are steps to do. Default 3 s.
    pub busy: Duration,
    /// Interval between two rounds while there are none, and no node comes, goes or is drained. Default 30 s.
    pub idle: Duration,
    /// Maximum age of the view of the nodes. Default 5 s.
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
