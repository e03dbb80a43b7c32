//! Counters of the store's work since it was opened.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Upper bounds of [`Timings`], seconds.
pub const BOUNDS_S: [f64; 17] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0,
];

/// A monotonic counter.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n` to the counter.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Returns the current value.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Histogram of durations.
#[derive(Debug, Default)]
pub struct Timings {
    sum_us: Counter,
    /// One bucket for each bound, and one for durations beyond the last bound.
    buckets: [Counter; BOUNDS_S.len() + 1],
}

impl Timings {
    /// Records one duration.
    pub fn record(&self, took: Duration) {
        self.sum_us
            .add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
        let seconds = took.as_secs_f64();
        let bound = BOUNDS_S.iter().position(|bound| seconds <= *bound);
        self.buckets[bound.unwrap_or(BOUNDS_S.len())].add(1);
    }

    /// Returns the sum of all recorded durations.
    #[must_use]
    pub fn sum(&self) -> Duration {
        Duration::from_micros(self.sum_us.value())
    }

    /// Returns the number of durations in each bucket: up to each of [`BOUNDS_S`] but above the one before, and
    /// last those beyond.
    #[must_use]
    pub fn counts(&self) -> [u64; BOUNDS_S.len() + 1] {
        std::array::from_fn(|at| self.buckets[at].value())
    }
}

/// Counters of a store, from its opening on. Each session begun is counted as sealed, parked or failed, or is
/// still open.
#[derive(Debug, Default)]
pub struct Counters {
    /// Sessions that were opened.
    pub dumps_begun: Counter,
    /// Sessions that became checkpoints.
    pub dumps_sealed: Counter,
    /// Sessions that ended with CLOSE and were parked.
    pub dumps_parked: Counter,
    /// Sessions that failed or were discarded.
    pub dumps_failed: Counter,
    /// Sessions whose task was frozen for as long as its freeze limit, and was let go.
    pub freeze_limits_reached: Counter,
    /// Requests that a quota of a namespace refused.
    pub quota_refusals: Counter,
    /// Times from a session's opening to its checkpoint.
    pub dumps: Timings,
    /// Bytes of pages that sessions received.
    pub received_bytes: Counter,
    /// Times from the request to seal to the checkpoint: the task is frozen meanwhile.
    pub seals: Timings,
    /// Copies of dumps received elsewhere that were begun here.
    pub copies_begun: Counter,
    /// Copies that were sealed here.
    pub copies_sealed: Counter,
    /// Bytes of pages that were received for copies.
    pub copies_received_bytes: Counter,
    /// Restores that were served, and images directories that were written.
    pub restores: Counter,
    /// Restores and exports that failed.
    pub restores_failed: Counter,
    /// Times of successful restores and exports, from the request to the last byte.
    pub restore_times: Timings,
    /// Bytes of images given to restores and exports.
    pub restored_bytes: Counter,
    /// Bytes of space that cleaning freed.
    pub cleaned_bytes: Counter,
    /// Bytes that cleaning wrote: pages that it moved, and their headers.
    pub moved_bytes: Counter,
    /// Bytes that cooling and warming moved between tiers.
    pub tiered_bytes: Counter,
}

impl Counters {
    /// Counts a successful or a failed restore of so many `bytes`, requested at `since`; returns the result unchanged.
    pub fn restored<T, E>(
        &self,
        since: Instant,
        result: Result<T, E>,
        bytes: impl FnOnce(&T) -> u64,
    ) -> Result<T, E> {
        match &result {
            Ok(restored) => {
                self.restores.add(1);
                self.restored_bytes.add(bytes(restored));
                self.restore_times.record(since.elapsed());
            }
            Err(_) => self.restores_failed.add(1),
        }
        result
    }

    /// Counts a seal that began at `since`, of a session of this age.
    pub(super) fn sealed(&self, since: Instant, session: Duration) {
        self.dumps_sealed.add(1);
        self.dumps.record(session);
        self.seals.record(since.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timings_are_sorted_into_their_buckets() {
        let timings = Timings::default();
        for ms in [1, 2, 301_000] {
            timings.record(Duration::from_millis(ms));
        }
        let counts = timings.counts();
        assert_eq!((counts[0], counts[1], counts[17]), (1, 1, 1));
        assert_eq!(counts.iter().sum::<u64>(), 3);
        assert_eq!(timings.sum(), Duration::from_millis(301_003));
    }
}
