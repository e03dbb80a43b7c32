//! Statistics of samples, shared by all benches.

/// Returns the median of sorted values; of an even number, the mean of the middle two.
pub(super) fn median(sorted: &[f64]) -> Option<f64> {
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// Returns the value that `percent` per cent of the sorted values do not exceed: the nearest rank.
pub(super) fn percentile(sorted: &[f64], percent: usize) -> Option<f64> {
    let rank = (sorted.len() * percent).div_ceil(100).checked_sub(1)?;
    sorted.get(rank).copied()
}

/// A predicted duration, and the measured one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Compared {
    pub(super) predicted_s: f64,
    pub(super) measured_s: f64,
}

impl Compared {
    pub(super) fn ratio(&self) -> f64 {
        self.predicted_s / self.measured_s
    }

    /// Returns the relative error of the prediction.
    pub(super) fn error(&self) -> f64 {
        (self.ratio() - 1.0).abs()
    }

    /// Returns a value of each, sorted.
    pub(super) fn sorted(all: &[Self], value: impl FnMut(&Self) -> f64) -> Vec<f64> {
        let mut values: Vec<f64> = all.iter().map(value).collect();
        values.sort_unstable_by(f64::total_cmp);
        values
    }
}

/// Formats median, minimum and maximum of sorted values.
pub(super) fn spread(sorted: &[f64]) -> String {
    let (Some(median), Some(least), Some(most)) = (median(sorted), sorted.first(), sorted.last())
    else {
        return "–".to_owned();
    };
    let digits = digits(*most);
    format!("{median:.digits$} ({least:.digits$}–{most:.digits$})")
}

/// Formats a value: two decimals below 10, none from 10 on.
pub(super) fn three_digits(value: f64) -> String {
    let digits = digits(value);
    format!("{value:.digits$}")
}

/// Returns the number of decimals: more digits would exceed the precision of such measurements.
fn digits(most: f64) -> usize {
    if most < 10.0 { 2 } else { 0 }
}

/// Sizes and counts here are far below 2^53.
#[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
pub(super) fn as_f64(n: u64) -> f64 {
    n as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_spreads() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[1.0, 2.0, 9.0]), Some(2.0));
        assert_eq!(median(&[1.0, 2.0]), Some(1.5));
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        let at = |percent| percentile(&hundred, percent);
        assert_eq!(
            [at(5), at(95), at(100)],
            [Some(5.0), Some(95.0), Some(100.0)]
        );
        assert_eq!(
            [percentile(&[], 95), percentile(&[3.0], 5)],
            [None, Some(3.0)]
        );
        assert_eq!(spread(&[]), "–");
        assert_eq!(spread(&[1.0, 2.0, 9.0]), "2.00 (1.00–9.00)");
        assert_eq!(spread(&[10.0, 20.4]), "15 (10–20)");
        assert_eq!(three_digits(1.234), "1.23");
        assert_eq!(three_digits(123.4), "123");
    }
}
