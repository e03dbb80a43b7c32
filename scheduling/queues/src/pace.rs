//! Estimated waiting times, from the durations of recent transfers by their sizes.
//!
//! **Share of a transfer.** A transfer that ran for `elapsed` while on average `beside` ran, itself included, had
//! 1/`beside` of the medium: `elapsed / beside` is its part of the time. The parts of many transfers add up to the
//! time of all of them, however many run at once, on a medium that one transfer saturates as well as on one that
//! serves several side by side.
//!
//! A part is a start that does not depend on the size, and the bytes: `part = start + bytes × slope`, fitted to the
//! last transfers by least squares. Where all are of about one size, or noise hides the slope, the mean takes its
//! place.

use std::collections::VecDeque;

use super::FinishedTurn;
use permafrost_api_types::quantity::{Bytes, BytesPerSecond, Ratio, Seconds};

/// Number of transfers that are remembered.
const REMEMBERED: usize = 32;

/// Ratio to the largest size seen beyond which sizes are not extrapolated.
const BEYOND: f64 = 8.0;

/// Number of transfers at the present limit that are enough to use them alone.
const ENOUGH: usize = 4;

/// Transfers that go before another one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ahead {
    /// Number of them that run.
    pub running: usize,
    /// Number of them that have not begun.
    pub waiting: usize,
    /// Number of bytes that all of them still have to move.
    pub bytes: Bytes,
}

impl Ahead {
    /// Returns the number of transfers that are still to be done: on average, those that run are half done.
    fn turns(&self) -> f64 {
        self.running as f64 / 2.0 + self.waiting as f64
    }

    /// Returns the share of all transfers that is done when the one behind them begins, while `at_once` may run: all
    /// with one at a time, nothing where a slot is free. In between, `at_once - 1` run beside the one that begins,
    /// half done by then.
    #[must_use]
    pub fn share_before(&self, at_once: usize) -> Ratio {
        let at_once = at_once.max(1);
        if self.running + self.waiting < at_once {
            return Ratio::ZERO;
        }
        let beside = (at_once - 1) as f64 / 2.0;
        Ratio::clamped(1.0 - beside / self.turns())
    }
}

/// Durations of recent transfers.
#[derive(Clone, Debug, Default)]
pub struct TransferTimes {
    /// The latest last.
    turns: VecDeque<Turn>,
}

#[derive(Clone, Copy, Debug)]
struct Turn {
    bytes: f64,
    /// Part of the time that the transfer used, seconds.
    part: f64,
    /// Average number of transfers that ran at once.
    beside: f64,
}

/// Fit to the durations of transfers: seconds each, and seconds a byte; neither is negative.
#[derive(Clone, Copy, Debug)]
struct Fit {
    start: f64,
    slope: f64,
    /// Mean size of the transfers that the fit rests on, and their largest size, bytes.
    mean: f64,
    largest: f64,
}

impl TransferTimes {
    /// Learns from a finished transfer. If the number that ran beside it is not known, it counts as if it had been
    /// alone.
    pub fn finished(&mut self, turn: &FinishedTurn) {
        if self.turns.len() >= REMEMBERED {
            self.turns.pop_front();
        }
        // `max` takes the other one where one is not a number.
        let beside = turn.beside.max(1.0);
        self.turns.push_back(Turn {
            bytes: turn.bytes.count() as f64,
            part: turn.elapsed.value() / beside,
            beside,
        });
    }

    /// Returns the time until a transfer could begin behind `ahead`, while `at_once` run at once. `None` before
    /// anything was measured, and for sizes far beyond those measured. O(1).
    #[must_use]
    pub fn time(&self, ahead: &Ahead, at_once: usize) -> Option<Seconds> {
        let share = ahead.share_before(at_once);
        if share == Ratio::ZERO {
            return Some(Seconds::ZERO);
        }
        let fit = self.fit(at_once)?;
        let (turns, bytes) = (ahead.turns(), ahead.bytes.count() as f64);
        if bytes > turns * fit.largest * BEYOND {
            return None;
        }
        let time = share.value() * (turns * fit.start + bytes * fit.slope);
        Some(Seconds::clamped(time))
    }

    /// Returns the sum of the rates of `at_once` concurrent transfers, their starts included: transfers of `size`, or
    /// of the mean size of the recent ones. `None` before anything was measured, and for sizes far beyond those
    /// measured. O(1).
    #[must_use]
    pub fn drain(&self, size: Option<Bytes>, at_once: usize) -> Option<BytesPerSecond> {
        let fit = self.fit(at_once)?;
        let size = size.map_or(fit.mean, |size| size.count() as f64);
        if size > fit.largest * BEYOND {
            return None;
        }
        BytesPerSecond::new(size / (fit.start + size * fit.slope)).ok()
    }

    fn fit(&self, at_once: usize) -> Option<Fit> {
        // Another number at once may move more, or less.
        let alike = |turn: &&Turn| (turn.beside - at_once as f64).abs() <= 0.5;
        if self.turns.iter().filter(alike).count() >= ENOUGH {
            return fit(self.turns.iter().filter(alike));
        }
        fit(self.turns.iter())
    }
}

fn fit<'a>(turns: impl Iterator<Item = &'a Turn> + Clone) -> Option<Fit> {
    let count = turns.clone().count() as f64;
    if count == 0.0 {
        return None;
    }
    let mean = |of: fn(&Turn) -> f64| turns.clone().map(of).sum::<f64>() / count;
    let (bytes, part) = (mean(|turn| turn.bytes), mean(|turn| turn.part));
    let (mut varied, mut together, mut largest) = (0.0, 0.0, 0.0_f64);
    for turn in turns {
        varied += (turn.bytes - bytes).powi(2);
        together += (turn.bytes - bytes) * (turn.part - part);
        largest = largest.max(turn.bytes);
    }
    // Sizes within a tenth of each other differ only by noise.
    let spread = (varied / count).sqrt() > bytes / 10.0;
    let slope = together / varied;
    let start = part - slope * bytes;
    let (start, slope) = if spread && slope > 0.0 && start >= 0.0 {
        (start, slope)
    } else if spread && slope > 0.0 {
        (0.0, part / bytes.max(1.0))
    } else {
        (part, 0.0)
    };
    Some(Fit {
        start,
        slope,
        mean: bytes,
        largest,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn turn(bytes: u64, elapsed: f64, beside: f64) -> FinishedTurn {
        FinishedTurn {
            bytes: Bytes::new(bytes),
            elapsed: Seconds::clamped(elapsed),
            beside,
        }
    }

    fn ahead(running: usize, waiting: usize, bytes: u64) -> Ahead {
        Ahead {
            running,
            waiting,
            bytes: Bytes::new(bytes),
        }
    }

    fn time(pace: &TransferTimes, ahead: &Ahead, at_once: usize) -> f64 {
        let time = pace.time(ahead, at_once).unwrap();
        (time.value() * 1e6).round() / 1e6
    }

    #[test]
    fn of_what_goes_before_as_much_is_done_as_must_be() {
        let share = |running, waiting, at_once| {
            let share = ahead(running, waiting, 0).share_before(at_once).value();
            (share * 1e6).round() / 1e6
        };
        // One at a time: all.
        assert_eq!([share(1, 0, 1), share(1, 3, 1), share(0, 1, 1)], [1.0; 3]);
        // Of two running transfers, one is before it; of two and a half transfers, all but half of one.
        assert_eq!([share(2, 0, 2), share(1, 2, 2)], [0.5, 0.8]);
        // A place is free.
        assert_eq!([share(1, 0, 2), share(0, 0, 1), share(3, 0, 16)], [0.0; 3]);
        // More run than may.
        assert_eq!(share(4, 0, 2), 0.75);
    }

    #[test]
    fn a_start_and_a_rate_are_told_apart() {
        let mut pace = TransferTimes::default();
        let waiting = |count, bytes| ahead(0, count, bytes);
        assert_eq!(pace.time(&waiting(1, 1), 1), None);
        assert_eq!(pace.drain(None, 1), None);
        assert_eq!(pace.time(&waiting(0, 0), 1), Some(Seconds::ZERO));
        for megabytes in [1_u64, 10, 100, 1000] {
            // Half a second, and 1 GB/s.
            let elapsed = 0.5 + megabytes as f64 / 1e3;
            pace.finished(&turn(megabytes * 1_000_000, elapsed, 1.0));
        }
        assert_eq!(time(&pace, &waiting(1, 500_000_000), 1), 1.0);
        assert_eq!(time(&pace, &waiting(4, 2_000_000_000), 1), 4.0);
        assert_eq!(pace.time(&waiting(1, 1 << 40), 1), None);
        let drain = pace.drain(Some(Bytes::new(500_000_000)), 1).unwrap();
        assert_eq!(drain.value().round(), 500e6);
        assert_eq!(pace.drain(Some(Bytes::new(1 << 40)), 1), None);
    }

    #[test]
    fn of_one_size_the_mean_is_taken() {
        let mut pace = TransferTimes::default();
        for elapsed in [0.9, 1.1] {
            pace.finished(&turn(1000, elapsed, 1.0));
        }
        assert_eq!(time(&pace, &ahead(0, 3, 3000), 1), 3.0);
        assert_eq!(pace.drain(None, 1).unwrap().value().round(), 1000.0);
    }

    /// Queues 16 transfers of 1 GB, on a medium of 1 GB/s in total and on one of 1 GB/s for each transfer.
    #[test]
    fn a_queue_takes_as_long_as_all_of_it_does_whoever_runs_at_once() {
        let queue = ahead(4, 14, 16_000_000_000);
        let (mut used_up, mut wide) = (TransferTimes::default(), TransferTimes::default());
        for _ in 0..8 {
            used_up.finished(&turn(1_000_000_000, 4.0, 4.0));
            wide.finished(&turn(1_000_000_000, 1.0, 4.0));
        }
        // All but the one and a half transfers that run on.
        assert_eq!(time(&used_up, &queue, 4), 14.5);
        assert_eq!(time(&wide, &queue, 4), 14.5 / 4.0);
        assert_eq!(used_up.drain(None, 4).unwrap().value().round(), 1e9);
        assert_eq!(wide.drain(None, 4).unwrap().value().round(), 4e9);
        // These samples alone predict the same time for the saturated medium; for the other one, the rate of four
        // together counts.
        for _ in 0..8 {
            used_up.finished(&turn(1_000_000_000, 1.0, 1.0));
            wide.finished(&turn(1_000_000_000, 1.0, 1.0));
        }
        assert_eq!(time(&used_up, &queue, 4), 14.5);
        assert_eq!(time(&wide, &queue, 4), 14.5 / 4.0);
    }

    proptest! {
        #[test]
        fn any_turns_give_a_time_or_none(
            turns in prop::collection::vec((any::<u64>(), 0.0_f64..1e12, any::<f64>()), 0..100),
            (running, waiting) in any::<(u32, u32)>(),
            bytes in any::<u64>(),
            at_once in any::<usize>(),
        ) {
            let mut pace = TransferTimes::default();
            for (moved, elapsed, beside) in turns {
                pace.finished(&turn(moved, elapsed, beside));
            }
            let ahead = ahead(running as usize, waiting as usize, bytes);
            if let Some(time) = pace.time(&ahead, at_once) {
                prop_assert!(time.value().is_finite());
            }
            for size in [None, Some(Bytes::new(bytes))] {
                if let Some(drain) = pace.drain(size, at_once) {
                    prop_assert!(drain.value().is_finite() && drain.value() > 0.0);
                }
            }
        }

        #[test]
        fn one_more_before_it_never_makes_one_begin_sooner(
            (running, waiting) in (0_usize..40, 0_usize..40),
            bytes in 0_u64..1 << 40,
            more in 0_u64..1 << 40,
            at_once in 1_usize..20,
        ) {
            let done = |ahead: Ahead| ahead.share_before(at_once).value() * ahead.bytes.count() as f64;
            let (now, then) = (
                done(ahead(running, waiting, bytes)),
                done(ahead(running, waiting + 1, bytes + more)),
            );
            prop_assert!(then >= now);
        }
    }
}
