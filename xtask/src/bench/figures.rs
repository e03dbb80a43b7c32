//! What all benches say of their samples.

/// The middle of sorted values; of two, their mean.
pub(super) fn median(sorted: &[f64]) -> Option<f64> {
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// Median, least and most of sorted values.
pub(super) fn spread(sorted: &[f64]) -> String {
    let (Some(median), Some(least), Some(most)) = (median(sorted), sorted.first(), sorted.last())
    else {
        return "–".to_owned();
    };
    let digits = digits(*most);
    format!("{median:.digits$} ({least:.digits$}–{most:.digits$})")
}

/// One value.
pub(super) fn three_digits(value: f64) -> String {
    let digits = digits(value);
    format!("{value:.digits$}")
}

/// Behind the point: three digits say all that such measurements do.
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
        assert_eq!(spread(&[]), "–");
        assert_eq!(spread(&[1.0, 2.0, 9.0]), "2.00 (1.00–9.00)");
        assert_eq!(spread(&[10.0, 20.4]), "15 (10–20)");
        assert_eq!(three_digits(1.234), "1.23");
        assert_eq!(three_digits(123.4), "123");
    }
}
