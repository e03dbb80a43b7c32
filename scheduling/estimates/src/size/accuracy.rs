//! Accuracy of predictions: each predicted value is compared with the value measured afterwards.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::figure::{Missing, What};

/// Comparisons kept: enough that ten lie beyond the 95th percentile.
const CAPACITY: usize = 200;
/// An error is at most this, so that a measured value near 0 cannot make it infinite.
const MOST: f64 = 1e6;

/// Predictions against measurements, the last 200.
#[derive(Clone, Debug, Default)]
pub struct Accuracy {
    /// Signed errors, relative to the measured values.
    errors: VecDeque<f64>,
}

/// Errors of predictions, relative to the measured values: 0.2 is 20 %.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Errors {
    /// Median of the absolute errors.
    pub p50: f64,
    /// 95th percentile of the absolute errors.
    pub p95: f64,
    /// Median of the signed errors: above 0, too much was predicted.
    pub bias: f64,
    /// Comparisons it rests on.
    pub samples: usize,
}

impl Accuracy {
    /// Records one prediction, and the value that was then measured in the same unit. Measurements that are not
    /// positive are left out, as an error relative to them is not defined.
    pub fn compare(&mut self, predicted: f64, measured: f64) {
        let usable = predicted.is_finite() && measured.is_finite() && measured > 0.0;
        if !usable {
            return;
        }
        if self.errors.len() == CAPACITY {
            self.errors.pop_front();
        }
        let error = (predicted - measured) / measured;
        self.errors.push_back(error.clamp(-MOST, MOST));
    }

    /// Returns the errors so far.
    ///
    /// # Errors
    ///
    /// [`Missing`] before the first comparison.
    pub fn errors(&self) -> Result<Errors, Missing> {
        let mut signed: Vec<f64> = self.errors.iter().copied().collect();
        let mut absolute: Vec<f64> = signed.iter().map(|error| error.abs()).collect();
        let missing = Missing::NotMeasured {
            what: What::Accuracy,
        };
        Ok(Errors {
            p50: percentile(&mut absolute, 50).ok_or(missing)?,
            p95: percentile(&mut absolute, 95).ok_or(missing)?,
            bias: percentile(&mut signed, 50).ok_or(missing)?,
            samples: absolute.len(),
        })
    }
}

/// Returns the least value that `percent` of all values do not exceed.
fn percentile(values: &mut [f64], percent: usize) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let rank = (values.len() * percent).div_ceil(100);
    values.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_to_what_was_measured() {
        let mut accuracy = Accuracy::default();
        assert!(accuracy.errors().is_err());
        for predicted in 101..=120 {
            accuracy.compare(f64::from(predicted), 100.0);
        }
        let errors = accuracy.errors().unwrap();
        assert!((errors.p50 - 0.10).abs() < 1e-9, "{errors:?}");
        assert!((errors.p95 - 0.19).abs() < 1e-9, "{errors:?}");
        assert!((errors.bias - 0.10).abs() < 1e-9, "{errors:?}");
        assert_eq!(errors.samples, 20);
    }

    #[test]
    fn too_little_is_a_negative_bias() {
        let mut accuracy = Accuracy::default();
        accuracy.compare(50.0, 100.0);
        let errors = accuracy.errors().unwrap();
        assert_eq!((errors.p50, errors.bias), (0.5, -0.5));
    }

    #[test]
    fn what_cannot_be_compared_is_left_out_and_the_window_is_bounded() {
        let mut accuracy = Accuracy::default();
        for measured in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            accuracy.compare(1.0, measured);
        }
        accuracy.compare(f64::NAN, 1.0);
        assert!(accuracy.errors().is_err());
        for _ in 0..CAPACITY + 50 {
            accuracy.compare(1e300, 1e-300);
        }
        let errors = accuracy.errors().unwrap();
        assert_eq!((errors.samples, errors.p95), (CAPACITY, MOST));
    }
}
