//! How long those before one take: what turns have taken of late, by their sizes.
//!
//! A turn takes a start that does not depend on its size, and its bytes: `elapsed = start + bytes × slope`, fitted to the
//! last turns by least squares. Where all are about the same size, or noise hides the slope, the mean takes its place.

use std::collections::VecDeque;

use crate::quantity::{Bytes, Seconds};

/// As many turns are remembered.
const REMEMBERED: usize = 32;

/// Nothing is said of sizes so many times the largest that was seen.
const BEYOND: f64 = 8.0;

/// What turns take.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    /// Bytes and seconds, the latest last.
    turns: VecDeque<(f64, f64)>,
}

impl Pace {
    /// Learns from a turn.
    pub fn finished(&mut self, bytes: Bytes, elapsed: Seconds) {
        if self.turns.len() >= REMEMBERED {
            self.turns.pop_front();
        }
        self.turns
            .push_back((bytes.count() as f64, elapsed.value()));
    }

    /// When one could start that has `count` before it with `bytes` to move, while `at_once` run at once. `None` before
    /// anything was measured, and for sizes far beyond what was. O(1).
    #[must_use]
    pub fn time(&self, count: usize, bytes: Bytes, at_once: usize) -> Option<Seconds> {
        if count == 0 {
            return Some(Seconds::ZERO);
        }
        let (count, bytes) = (count as f64, bytes.count() as f64);
        let largest = self.turns.iter().map(|turn| turn.0).fold(0.0, f64::max);
        if self.turns.is_empty() || bytes > count * largest * BEYOND {
            return None;
        }
        let (start, slope) = self.fit();
        let time = (count * start + bytes * slope) / at_once.max(1) as f64;
        Some(Seconds::clamped(time))
    }

    /// Seconds a turn, and seconds a byte: neither is negative.
    fn fit(&self) -> (f64, f64) {
        let count = self.turns.len() as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| self.turns.iter().map(of).sum::<f64>() / count;
        let (bytes, elapsed) = (mean(|turn| turn.0), mean(|turn| turn.1));
        let (mut varied, mut together) = (0.0, 0.0);
        for turn in &self.turns {
            varied += (turn.0 - bytes).powi(2);
            together += (turn.0 - bytes) * (turn.1 - elapsed);
        }
        // Sizes within a tenth of each other tell of noise.
        let spread = (varied / count).sqrt() > bytes / 10.0;
        let slope = together / varied;
        let start = elapsed - slope * bytes;
        if spread && slope > 0.0 && start >= 0.0 {
            return (start, slope);
        }
        if spread && slope > 0.0 {
            return (0.0, elapsed / bytes.max(1.0));
        }
        (elapsed, 0.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn seconds(value: f64) -> Seconds {
        Seconds::new(value).unwrap()
    }

    #[test]
    fn a_start_and_a_rate_are_told_apart() {
        let mut pace = Pace::default();
        assert_eq!(pace.time(1, Bytes::new(1), 1), None);
        assert_eq!(pace.time(0, Bytes::ZERO, 1), Some(Seconds::ZERO));
        for megabytes in [1_u64, 10, 100, 1000] {
            // Half a second, and 1 GB/s.
            let elapsed = seconds(0.5 + megabytes as f64 / 1e3);
            pace.finished(Bytes::new(megabytes * 1_000_000), elapsed);
        }
        let time = |count, bytes, at_once| {
            let time = pace.time(count, Bytes::new(bytes), at_once).unwrap();
            (time.value() * 1e6).round() / 1e6
        };
        assert_eq!(time(1, 500_000_000, 1), 1.0);
        assert_eq!(time(4, 2_000_000_000, 2), 2.0);
        assert_eq!(pace.time(1, Bytes::new(1 << 40), 1), None);
    }

    #[test]
    fn of_one_size_the_mean_is_taken() {
        let mut pace = Pace::default();
        for elapsed in [0.9, 1.1] {
            pace.finished(Bytes::new(1000), seconds(elapsed));
        }
        assert_eq!(pace.time(3, Bytes::new(3000), 1), Some(seconds(3.0)));
    }

    proptest! {
        #[test]
        fn any_turns_give_a_time_or_none(
            turns in prop::collection::vec((any::<u64>(), 0.0_f64..1e12), 0..100),
            count in any::<usize>(),
            bytes in any::<u64>(),
            at_once in any::<usize>(),
        ) {
            let mut pace = Pace::default();
            for (moved, elapsed) in turns {
                pace.finished(Bytes::new(moved), seconds(elapsed));
            }
            if let Some(time) = pace.time(count, Bytes::new(bytes), at_once) {
                prop_assert!(time.value().is_finite());
            }
        }
    }
}
