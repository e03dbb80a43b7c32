//! Durations of whole transfers, from the first preparation to the last clean-up: a start that each pays, and a
//! bandwidth.
//!
//! Measured by the clock of one party alone, a dump's time misses the work of the others: CRIU kills the processes
//! after the seal, and the larger they are the longer that takes. So start and bandwidth are found together, as the
//! line through all samples, by the median of the slopes between them (Theil 1950, Sen 1968; weighed by the distance
//! of their sizes as Jaeckel 1972 does), which a quarter of wild samples does not move.

use std::collections::VecDeque;

use super::window::{CAPACITY, UNSEEN_SIGMA, Z95, quantile, weight};
use super::{CLASSES, ENOUGH, EstimatorConfig, SizedRates, Transfer, class_of};
use crate::figure::{Estimate, Figure};
use crate::quantity::{BytesPerSecond, Moment, Seconds};

/// Least ratio of two sizes from which a slope is taken.
const APART: f64 = 1.5;

/// Pairs of such sizes that a slope needs.
const PAIRS: usize = 6;

/// Share of a transfer's time that its start takes at most: something was moved in the rest.
const START_SHARE: f64 = 0.9;

/// Line that fits the durations of transfers: a fixed time, and rates for the bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    /// Fixed time of each transfer, independent of its size.
    pub start: Estimate<Seconds>,
    /// Bandwidth for the bytes, the fixed time not counted.
    pub rates: SizedRates,
}

/// The last whole transfers of a channel.
#[derive(Clone, Debug, Default)]
pub(super) struct Wholes(VecDeque<Transfer>);

impl Wholes {
    pub(super) fn push(&mut self, transfer: Transfer) {
        if self.0.len() == CAPACITY {
            self.0.pop_front();
        }
        self.0.push_back(transfer);
    }

    /// Replaces the duration of the newest transfer with this end and size. Returns true if there is one.
    pub(super) fn correct(&mut self, corrected: Transfer) -> bool {
        let is_it = |one: &&mut Transfer| one.at == corrected.at && one.bytes == corrected.bytes;
        let found = self.0.iter_mut().rev().find(is_it);
        found.map(|one| *one = corrected).is_some()
    }

    pub(super) fn values(&self) -> impl Iterator<Item = Transfer> + '_ {
        self.0.iter().copied()
    }

    /// Fits the line through the transfers that are not too old. A known `start` is used as it is; where there is
    /// none, and the sizes do not determine it, `unless_told` is used. `None` with fewer than three samples.
    pub(super) fn line(
        &self,
        config: &EstimatorConfig,
        now: Moment,
        start: Option<Seconds>,
        unless_told: Seconds,
    ) -> Option<Line> {
        let hold = |one: &&Transfer| now.since(one.at) <= config.stale_after;
        let newest = self.0.iter().filter(hold).map(|one| one.at).max()?;
        let samples = self.0.iter().filter(hold).map(|one| Sample {
            bytes: one.bytes.count() as f64,
            elapsed: one.elapsed.value(),
            weight: weight(newest.since(one.at), config.half_life),
            class: class_of(one.bytes),
        });
        let samples: Vec<Sample> = samples.collect();
        let count = u32::try_from(samples.len()).unwrap_or(u32::MAX);
        if count < ENOUGH {
            return None;
        }
        let fit = Fit::of(&samples, start, unless_told, config);
        let unseen = (Z95 * UNSEEN_SIGMA / f64::from(count).sqrt()).exp();
        let wide = fit.wide(&samples).max(unseen);
        let age = now.since(newest);
        let rates = fit.slopes.map(|slope| {
            // A size that was never moved may lie far from the line.
            let wide = if slope.is_some() { wide } else { 2.0 * wide };
            let rate = 1.0 / slope.unwrap_or(fit.slope);
            Figure::Known(Estimate {
                p50: BytesPerSecond::clamped(rate),
                p95: BytesPerSecond::clamped(rate / wide),
                age,
                samples: count,
            })
        });
        Some(Line {
            start: Estimate {
                p50: Seconds::clamped(fit.start),
                p95: Seconds::clamped(fit.start * wide),
                age,
                samples: count,
            },
            rates: SizedRates(rates),
        })
    }
}

/// A transfer as it counts.
struct Sample {
    bytes: f64,
    elapsed: f64,
    weight: f64,
    class: usize,
}

/// Seconds, and seconds a byte.
struct Fit {
    start: f64,
    slope: f64,
    /// Slopes of the size classes with samples of their own: caches bend the line.
    slopes: [Option<f64>; CLASSES],
}

impl Fit {
    fn of(
        samples: &[Sample],
        start: Option<Seconds>,
        unless_told: Seconds,
        config: &EstimatorConfig,
    ) -> Self {
        let told = match start {
            Some(_) => None,
            None => slope(samples),
        };
        let start = match told {
            Some(slope) => median(samples, |one| Some(one.elapsed - slope * one.bytes)),
            // It was not found with these samples, which may refute it: the quickest of them began, too.
            None => Some(
                start
                    .unwrap_or(unless_told)
                    .value()
                    .min(START_SHARE * quickest(samples)),
            ),
        };
        // For any samples, a start takes at least no time, and bytes take some.
        let start = start.unwrap_or_default().max(0.0);
        let least = 1.0 / config.fastest.value();
        let beyond = |one: &Sample| (one.elapsed - start) / one.bytes;
        let slope = told.or_else(|| median(samples, |one| Some(beyond(one))));
        let of_class = |class: usize| {
            let own = |one: &Sample| (one.class == class).then(|| beyond(one));
            let count = samples.iter().filter(|one| one.class == class).count();
            let found = median(samples, own).filter(|slope| *slope > least);
            found.filter(|_| count >= ENOUGH as usize)
        };
        Self {
            start,
            slope: slope.unwrap_or_default().max(least),
            slopes: std::array::from_fn(of_class),
        }
    }

    /// Returns the factor by which the slowest 5 of 100 transfers take longer than the line predicts, at least.
    fn wide(&self, samples: &[Sample]) -> f64 {
        let mut ratios: Vec<_> = (samples.iter())
            .map(|one| {
                let slope = self.slopes.get(one.class).copied().flatten();
                let said = self.start + slope.unwrap_or(self.slope) * one.bytes;
                (one.elapsed / said.max(f64::MIN_POSITIVE), one.weight)
            })
            .collect();
        quantile(&mut ratios, 0.95)
    }
}

/// Returns the median of the slopes between all pairs of samples whose sizes lie apart; `None` where there are too
/// few pairs, or where larger transfers are not slower.
fn slope(samples: &[Sample]) -> Option<f64> {
    let mut slopes = Vec::new();
    for (place, one) in samples.iter().enumerate() {
        for other in samples.iter().skip(place + 1) {
            let (less, more) = if one.bytes < other.bytes {
                (one, other)
            } else {
                (other, one)
            };
            if more.bytes >= APART * less.bytes {
                let apart = more.bytes - less.bytes;
                let slope = (more.elapsed - less.elapsed) / apart;
                slopes.push((slope, less.weight * more.weight * apart));
            }
        }
    }
    if slopes.len() < PAIRS {
        return None;
    }
    Some(quantile(&mut slopes, 0.5)).filter(|slope| *slope > 0.0)
}

fn quickest(samples: &[Sample]) -> f64 {
    samples
        .iter()
        .map(|one| one.elapsed)
        .fold(f64::MAX, f64::min)
}

fn median(samples: &[Sample], value: impl Fn(&Sample) -> Option<f64>) -> Option<f64> {
    let mut weighted: Vec<_> = samples
        .iter()
        .filter_map(|one| Some((value(one)?, one.weight)))
        .collect();
    (!weighted.is_empty()).then(|| quantile(&mut weighted, 0.5))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantity::Bytes;

    const MIB: u64 = 1 << 20;

    fn transfer(second: u64, bytes: u64, elapsed: f64) -> Transfer {
        Transfer {
            at: Moment::from_micros(second * 1_000_000),
            bytes: Bytes::new(bytes),
            elapsed: Seconds::new(elapsed).unwrap(),
        }
    }

    /// Returns the duration by a line of 60 ms, and 0.4 ms a MiB.
    fn by_the_line(mib: u64) -> f64 {
        0.06 + 0.0004 * mib as f64
    }

    fn line(wholes: &Wholes, start: Option<f64>) -> Option<Line> {
        let now = Moment::from_micros(100_000_000);
        let seconds = |value| Seconds::new(value).unwrap();
        wholes.line(
            &EstimatorConfig::default(),
            now,
            start.map(seconds),
            seconds(0.02),
        )
    }

    fn time(line: &Line, mib: u64) -> f64 {
        let size = Bytes::mib(mib);
        line.start.p50.value() + size.at(line.rates.of(size).known().unwrap().p50).value()
    }

    fn of(samples: impl IntoIterator<Item = (u64, f64)>) -> Wholes {
        let mut wholes = Wholes::default();
        for (second, (mib, elapsed)) in samples.into_iter().enumerate() {
            wholes.push(transfer(second as u64, mib * MIB, elapsed));
        }
        wholes
    }

    #[test]
    fn start_and_bandwidth_are_told_apart_by_the_sizes() {
        let sizes = [16, 500, 90, 300, 40, 450, 128, 220];
        let line = line(&of(sizes.map(|mib| (mib, by_the_line(mib)))), None).unwrap();
        assert!((line.start.p50.value() - 0.06).abs() < 1e-9, "{line:?}");
        for mib in [16, 64, 512, 2000] {
            assert!((time(&line, mib) - by_the_line(mib)).abs() < 1e-6, "{mib}");
        }
    }

    #[test]
    fn a_quarter_of_wild_samples_changes_little() {
        let samples = (0..40_u64).map(|n| {
            let mib = 16 + (n * 53) % 480;
            let wild = if n % 4 == 0 { 5.0 } else { 1.0 };
            (mib, by_the_line(mib) * wild)
        });
        let line = line(&of(samples), None).unwrap();
        for mib in [20, 100, 500] {
            let error = (time(&line, mib) / by_the_line(mib) - 1.0).abs();
            assert!(error < 0.15, "{mib}: {error}");
        }
        // The sample is not forgotten.
        let rate = line.rates.of(Bytes::mib(100)).known().unwrap();
        assert!(rate.p50.value() > 3.0 * rate.p95.value());
    }

    #[test]
    fn of_one_size_the_start_is_what_else_is_known_of_it() {
        let wholes = of((0..8).map(|_| (100, by_the_line(100))));
        let guessed = line(&wholes, None).unwrap();
        assert!((guessed.start.p50.value() - 0.02).abs() < 1e-9);
        assert!((time(&guessed, 100) - by_the_line(100)).abs() < 1e-6);
        let given = line(&wholes, Some(0.05)).unwrap();
        assert!((given.start.p50.value() - 0.05).abs() < 1e-9);
        assert!((time(&given, 100) - by_the_line(100)).abs() < 1e-6);
    }

    #[test]
    fn a_start_longer_than_the_transfers_makes_no_bandwidth_without_end() {
        // The start of other dumps, or the start that the daemon measured for these, is 20 ms; these took 10 ms in
        // all.
        let quick = of((0..8).map(|n| (100 + n, 0.01)));
        for start in [None, Some(0.3)] {
            let line = line(&quick, start).unwrap();
            assert!(line.start.p50.value() <= 0.009 + 1e-9, "{line:?}");
            for mib in [16, 100, 2000] {
                let rate = line.rates.of(Bytes::mib(mib)).known().unwrap();
                let most = 110.0 * MIB as f64 / 0.001;
                assert!(rate.p50.value() <= most, "{mib}: {rate:?}");
            }
            assert!((time(&line, 104) - 0.01).abs() < 1e-3);
        }
    }

    #[test]
    fn a_bend_at_a_cache_is_followed() {
        // Beyond 1 GiB a tenth of the bandwidth.
        let elapsed = |mib: u64| {
            if mib < 1024 {
                by_the_line(mib)
            } else {
                0.06 + 0.004 * mib as f64
            }
        };
        let sizes = [100, 2000, 200, 3000, 300, 2500, 400, 150, 4000, 50, 60, 250];
        let line = line(&of(sizes.map(|mib| (mib, elapsed(mib)))), Some(0.06)).unwrap();
        assert!((time(&line, 200) / elapsed(200) - 1.0).abs() < 0.1);
        assert!((time(&line, 3000) / elapsed(3000) - 1.0).abs() < 0.1);
    }

    #[test]
    fn too_few_or_too_old_ones_have_no_line() {
        let samples = [(16, 0.1), (500, 0.3)];
        assert_eq!(line(&of(samples), None), None);
        let wholes = of((0..8).map(|n| (16 << n, 0.1)));
        let late = Moment::from_micros(7_200_000_000);
        let config = EstimatorConfig::default();
        assert_eq!(wholes.line(&config, late, None, Seconds::ZERO), None);
    }

    #[test]
    fn who_is_quicker_with_more_is_no_line_but_has_a_bandwidth() {
        let wholes = of((1..9).map(|n| (n * 50, 1.0 / n as f64)));
        let line = line(&wholes, None).unwrap();
        assert!((line.start.p50.value() - 0.02).abs() < 1e-9);
        assert!(line.rates.of(Bytes::mib(100)).known().unwrap().p50.value() > 0.0);
    }

    #[test]
    fn the_newest_of_a_moment_and_a_size_is_corrected() {
        let mut wholes = of([(100, 1.0), (100, 2.0)]);
        assert!(wholes.correct(transfer(1, 100 * MIB, 3.0)));
        assert!(!wholes.correct(transfer(1, 99 * MIB, 3.0)));
        let elapsed: Vec<_> = wholes.values().map(|one| one.elapsed.value()).collect();
        assert_eq!(elapsed, [1.0, 3.0]);
    }
}
