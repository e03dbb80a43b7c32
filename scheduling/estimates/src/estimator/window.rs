//! A bounded window of samples of one positive quantity, and its quantiles.
//!
//! Samples count in logarithms, as a rate is off by a factor and not by an amount. Each weighs half as much per
//! half-life. What lies further from the weighted median than [`OUTLIER`] deviations is pulled in to there: a single
//! stall neither decides the spread nor is forgotten. The deviation is the median absolute one (Hampel 1974), which up
//! to half of the weight may be wrong without moving.

use std::collections::VecDeque;

use crate::quantity::{Moment, Seconds};

/// Samples kept; the 95th percentile of 64 still has three beyond it.
pub(super) const CAPACITY: usize = 64;
/// Deviations beyond which a sample is an outlier: the customary three would cut one of 400 of a normal tail, six none.
const OUTLIER: f64 = 6.0;
/// The median absolute deviation of a normal distribution is its standard deviation divided by this.
const MAD_TO_SIGMA: f64 = 1.4826;
/// Least deviation, as a logarithm: below 5 % two measurements count as equal.
const LEAST_SIGMA: f64 = 0.05;
/// Deviation that a single measurement is assumed to have, as a logarithm; shrinks with the root of the number of
/// measurements. With few samples the upper bound has not been seen yet.
pub(super) const UNSEEN_SIGMA: f64 = 0.2;
/// The normal distribution's 95th percentile, in deviations.
pub(super) const Z95: f64 = 1.645;

/// Direction in which the quantity is worse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Worse {
    Low,
    High,
}

/// Quantiles of the samples in a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Quantiles {
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    pub(crate) newest: Moment,
    pub(crate) samples: u32,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Window {
    /// Times of the samples, and the logarithms of their values.
    samples: VecDeque<(Moment, f64)>,
}

impl Window {
    /// Adds a positive, finite value; anything else is left out.
    pub(crate) fn push(&mut self, at: Moment, value: f64) {
        let log = value.ln();
        if !log.is_finite() {
            return;
        }
        if self.samples.len() == CAPACITY {
            self.samples.pop_front();
        }
        self.samples.push_back((at, log));
    }

    /// Returns the samples in the order in which they came.
    pub(crate) fn values(&self) -> impl Iterator<Item = (Moment, f64)> + '_ {
        self.samples.iter().map(|&(at, log)| (at, log.exp()))
    }

    pub(crate) fn newest(&self) -> Option<Moment> {
        self.samples.iter().map(|&(at, _)| at).max()
    }

    /// Returns the quantiles of the samples that are no older than `limit`; `None` without such a sample.
    pub(crate) fn quantiles(
        &self,
        now: Moment,
        half_life: Seconds,
        limit: Seconds,
        worse: Worse,
    ) -> Option<Quantiles> {
        let newest = self.newest()?;
        let mut weighted: Vec<(f64, f64)> = self
            .samples
            .iter()
            .filter(|&&(at, _)| now.since(at) <= limit)
            // Weighed against the newest, so that no weight vanishes however long nothing came.
            .map(|&(at, log)| (log, weight(newest.since(at), half_life)))
            .collect();
        if weighted.is_empty() {
            return None;
        }
        let median = quantile(&mut weighted, 0.5);
        let mut deviations: Vec<_> = weighted
            .iter()
            .map(|&(log, weight)| ((log - median).abs(), weight))
            .collect();
        let sigma = (quantile(&mut deviations, 0.5) * MAD_TO_SIGMA).max(LEAST_SIGMA);
        let reach = OUTLIER * sigma;
        for (log, _) in &mut weighted {
            *log = log.clamp(median - reach, median + reach);
        }
        let count = u32::try_from(weighted.len()).unwrap_or(u32::MAX);
        let unseen = Z95 * UNSEEN_SIGMA / f64::from(count).sqrt();
        let bad = match worse {
            Worse::Low => quantile(&mut weighted, 0.05).min(median - unseen),
            Worse::High => quantile(&mut weighted, 0.95).max(median + unseen),
        };
        Some(Quantiles {
            p50: median.exp(),
            p95: bad.exp(),
            newest,
            samples: count,
        })
    }
}

pub(super) fn weight(age: Seconds, half_life: Seconds) -> f64 {
    // A half-life of 0 would be a division by zero. Weights stay above zero so that there always is a median.
    let halves = age.value() / half_life.value().max(1e-6);
    (-halves.min(60.0)).exp2()
}

/// Returns the least value with at least `q` of the weight at or below it. Sorts; needs at least one value.
pub(super) fn quantile(weighted: &mut [(f64, f64)], q: f64) -> f64 {
    weighted.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let total: f64 = weighted.iter().map(|&(_, weight)| weight).sum();
    let mut sum = 0.0;
    for &(value, weight) in weighted.iter() {
        sum += weight;
        if sum >= q * total {
            return value;
        }
    }
    weighted.last().map_or(0.0, |&(value, _)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Seconds = Seconds::MAX;

    fn second(n: u64) -> Moment {
        Moment::from_micros(n * 1_000_000)
    }

    fn minute() -> Seconds {
        Seconds::from_millis(60_000)
    }

    #[test]
    fn a_third_of_wild_samples_does_not_move_the_median() {
        let mut window = Window::default();
        for n in 0..60 {
            window.push(second(n), if n % 3 == 0 { 1e12 } else { 100.0 });
        }
        let answer = window
            .quantiles(second(60), Seconds::MAX, LIMIT, Worse::Low)
            .unwrap();
        assert!((answer.p50 - 100.0).abs() < 1e-6, "{answer:?}");
        assert!(answer.p95 > 90.0 && answer.p95 <= 100.0, "{answer:?}");
    }

    #[test]
    fn a_rate_that_changed_is_followed_within_a_few_half_lives() {
        let mut window = Window::default();
        for n in 0..40 {
            window.push(second(n * 10), 100.0);
        }
        for n in 40..50 {
            window.push(second(n * 10), 10.0);
        }
        let answer = window
            .quantiles(second(500), minute(), LIMIT, Worse::Low)
            .unwrap();
        assert!((answer.p50 - 10.0).abs() < 1e-6, "{answer:?}");
    }

    #[test]
    fn few_samples_have_a_wide_spread() {
        let mut window = Window::default();
        let spread = |window: &Window| {
            let answer = window
                .quantiles(second(99), minute(), LIMIT, Worse::High)
                .unwrap();
            answer.p95 / answer.p50
        };
        window.push(second(1), 5.0);
        let one = spread(&window);
        for n in 2..34 {
            window.push(second(n), 5.0);
        }
        assert!(
            one > 1.3 && spread(&window) < 1.1,
            "{one} {}",
            spread(&window)
        );
    }

    #[test]
    fn what_is_older_than_the_limit_is_not_there() {
        let mut window = Window::default();
        window.push(second(0), 5.0);
        let at = |n, limit| window.quantiles(second(n), minute(), limit, Worse::Low);
        assert!(at(59, minute()).is_some());
        assert!(at(61, minute()).is_none());
    }

    #[test]
    fn what_is_no_positive_number_is_left_out() {
        let mut window = Window::default();
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            window.push(second(1), bad);
        }
        assert_eq!(window, Window::default());
    }
}
