//! Transfers under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use permafrost_scheduling::estimator::Direction;
use permafrost_scheduling::quantity::Bytes;

/// Time without a first byte after which a dump or restore is ignored in the estimates of others.
const QUIET: Duration = Duration::from_secs(10);

/// A dump or a restore under way.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) number: u64,
    pub(super) direction: Direction,
    /// Expected bytes. `None`: unknown.
    pub(super) expected: Option<Bytes>,
    pub(super) moved: Arc<AtomicU64>,
    since: Instant,
}

impl Running {
    /// Makes a transfer that begins now.
    pub(super) fn new(
        number: u64,
        direction: Direction,
        expected: Option<Bytes>,
        moved: Arc<AtomicU64>,
    ) -> Self {
        Self {
            number,
            direction,
            expected,
            moved,
            since: Instant::now(),
        }
    }

    /// Returns the bytes that are still to come, as far as that is known; bytes that were only announced do not
    /// count.
    pub(super) fn left(&self) -> u64 {
        let moved = self.moved.load(Ordering::Relaxed);
        if moved == 0 && self.since.elapsed() > QUIET {
            return 0;
        }
        let expected = self.expected.map_or(moved, Bytes::count);
        expected.saturating_sub(moved)
    }
}
