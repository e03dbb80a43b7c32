//! Least-squares fit of a straight line to points.

use serde::Serialize;

/// Time against memory: `fixed_s + s_per_gb · size`, after Figure 2 of Li et al., where it is linear.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Fit {
    /// Time for a size of 0, seconds. Below 0 where small sizes are faster than the line.
    pub(crate) fixed_s: f64,
    /// Time for each 10^9 bytes, seconds.
    pub(crate) s_per_gb: f64,
    /// Part of the variance that the line explains; 1 when all points are on it.
    pub(crate) r_squared: f64,
}

impl Fit {
    /// Fits a line to points (bytes, seconds); `None` for fewer than two different sizes.
    pub(crate) fn through(points: &[(u64, f64)]) -> Option<Self> {
        let count = points.len() as f64;
        let xs: Vec<f64> = points
            .iter()
            .map(|(bytes, _)| *bytes as f64 / 1e9)
            .collect();
        let ys: Vec<f64> = points.iter().map(|(_, seconds)| *seconds).collect();
        let mean = |values: &[f64]| values.iter().sum::<f64>() / count;
        let (mean_x, mean_y) = (mean(&xs), mean(&ys));
        let sum = |f: &dyn Fn(f64, f64) -> f64| -> f64 {
            xs.iter()
                .zip(&ys)
                .map(|(x, y)| f(x - mean_x, y - mean_y))
                .sum()
        };
        let (xx, xy, yy) = (sum(&|x, _| x * x), sum(&|x, y| x * y), sum(&|_, y| y * y));
        if xx.is_nan() || xx <= 0.0 {
            return None;
        }
        let s_per_gb = xy / xx;
        Some(Self {
            fixed_s: mean_y - s_per_gb * mean_x,
            s_per_gb,
            // Level points are all on the line.
            r_squared: if yy > 0.0 { xy * xy / (xx * yy) } else { 1.0 },
        })
    }

    /// Returns the line's time at a size, seconds.
    pub(crate) fn at(&self, bytes: u64) -> f64 {
        self.fixed_s + self.s_per_gb * bytes as f64 / 1e9
    }
}

/// Returns the middle value; the mean of the two middle ones for an even number of values, and 0 for none.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let at = |index: usize| values.get(index).copied().unwrap_or_default();
    if values.len() % 2 == 1 {
        at(middle)
    } else if values.is_empty() {
        0.0
    } else {
        (at(middle - 1) + at(middle)) / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-9, "{a} is not {b}");
    }

    #[test]
    fn points_on_a_line_give_the_line() {
        let fit = Fit::through(&[(GB, 2.5), (2 * GB, 4.5), (5 * GB, 10.5)]).unwrap();
        close(fit.fixed_s, 0.5);
        close(fit.s_per_gb, 2.0);
        close(fit.r_squared, 1.0);
        close(fit.at(10 * GB), 20.5);
    }

    #[test]
    fn points_beside_it_are_fitted_by_hand() {
        // Means 2 and 3; deviations -1, 0, 1 and -1, -1, 2: xx 2, xy 3, yy 6. Slope 1.5, and 9 ÷ 12 of the variance.
        let fit = Fit::through(&[(GB, 2.0), (2 * GB, 2.0), (3 * GB, 5.0)]).unwrap();
        close(fit.s_per_gb, 1.5);
        close(fit.fixed_s, 0.0);
        close(fit.r_squared, 9.0 / 12.0);
    }

    #[test]
    fn one_size_has_no_line() {
        assert_eq!(Fit::through(&[]), None);
        assert_eq!(Fit::through(&[(GB, 1.0), (GB, 2.0)]), None);
        close(
            Fit::through(&[(GB, 1.0), (2 * GB, 1.0)]).unwrap().r_squared,
            1.0,
        );
    }

    #[test]
    fn the_median_is_in_the_middle() {
        close(median([3.0, 1.0, 2.0]), 2.0);
        close(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        close(median([]), 0.0);
    }
}
