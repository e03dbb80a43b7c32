//! Bytes, rates, times and ratios that cannot be negative, NaN or infinite: those of requests, and those that the
//! formulas of `scheduling` compute with.
//!
//! They are checked when they are made and when they are read from JSON, and every operation stays inside the type:
//! sums stop at the largest value, a rate is never zero, so that a division by it cannot fail.

mod json;

use std::cmp::Ordering;
use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A number that is out of its range.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[error("{value} is no {what}")]
pub struct OutOfRange {
    /// The number that was given.
    pub value: f64,
    /// Name and range of the numbers that are accepted.
    pub what: &'static str,
}

/// Returns the nearest value in range; the least for a NaN, which `clamp` would pass on.
#[inline]
fn within(value: f64, least: f64, most: f64) -> f64 {
    if value >= most {
        most
    } else if value > least {
        value
    } else {
        least
    }
}

/// Returns the least integer that is not below `value`; a value out of range becomes the nearest in range.
fn to_u64(value: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a cast of a float saturates, and NaN becomes 0"
    )]
    let whole = value.ceil() as u64;
    whole
}

/// A number of bytes. JSON has at most [`MAX`](Self::MAX); sums may be larger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Bytes(u64);

impl Bytes {
    /// Size of zero bytes.
    pub const ZERO: Self = Self(0);
    /// Largest number that is read, a million terabytes.
    pub const MAX: Self = Self(1 << 60);

    /// Makes a number of `count` bytes.
    #[inline]
    #[must_use]
    pub const fn new(count: u64) -> Self {
        Self(count)
    }

    /// Makes a number of `count` MiB; stops at the largest number.
    #[inline]
    #[must_use]
    pub const fn mib(count: u64) -> Self {
        Self(count.saturating_mul(1 << 20))
    }

    /// Returns the number of bytes.
    #[inline]
    #[must_use]
    pub const fn count(self) -> u64 {
        self.0
    }

    /// Returns the sum, at most the largest number.
    #[inline]
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// Returns the difference, at least 0.
    #[inline]
    #[must_use]
    pub const fn less(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Returns this number times `ratio`, rounded up.
    #[inline]
    #[must_use]
    pub fn times(self, ratio: Ratio) -> Self {
        Self(to_u64(self.0 as f64 * ratio.0))
    }

    /// Returns the time that these bytes take at `rate`, at most [`Seconds::MAX`].
    #[inline]
    #[must_use]
    pub fn at(self, rate: BytesPerSecond) -> Seconds {
        Seconds::clamped(self.0 as f64 / rate.0)
    }
}

/// Things that are counted, such as pages or thousandths of a processor: 0 to 2^50.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Count(u64);

impl Count {
    /// Largest count: far more than there is of anything, and exact in JSON.
    pub const MAX: Self = Self(1 << 50);
    /// One thing.
    pub const ONE: Self = Self(1);

    /// Returns the number.
    #[inline]
    #[must_use]
    pub const fn value(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Bytes {
    /// Writes the number in decimal units: `5.0 GB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        decimal(f, self.0 as f64)
    }
}

fn decimal(f: &mut fmt::Formatter<'_>, value: f64) -> fmt::Result {
    for (unit, size) in [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)] {
        if value >= size {
            return tenths(f, value / size, unit);
        }
    }
    write!(f, "{value:.0} B")
}

/// Writes the text of `{value:.1} {unit}` several times as fast: a batch's replies have thousands of such numbers.
fn tenths(f: &mut fmt::Formatter<'_>, value: f64, unit: &str) -> fmt::Result {
    /// Number of bits of a fraction that are evaluated.
    const BITS: u32 = 58;
    const FACTOR: f64 = (1_u64 << BITS) as f64;
    // Above there are no tenths.
    if !(0.0..1e15).contains(&value) {
        return write!(f, "{value:.1} {unit}");
    }
    let whole = value.trunc();
    // Nothing is rounded: a float's fraction has no more bits than the float, and a power of two does but move them.
    // Bits are cut off only below 1/32, which is 0.0 with them and without.
    let fraction = cut((value - whole) * FACTOR) * 10;
    let (tenth, rest) = (fraction >> BITS, fraction & ((1 << BITS) - 1));
    // To the nearest; of two that are as near to the even one.
    let up = match rest.cmp(&(1 << (BITS - 1))) {
        Ordering::Less => 0,
        Ordering::Equal => tenth & 1,
        Ordering::Greater => 1,
    };
    let mut left = cut(whole) * 10 + tenth + up;
    // From the end: the tenth, the point, and at most 16 digits before it.
    let mut text = [b'0'; 20];
    let mut begin = text.len();
    for place in (0..text.len()).rev() {
        begin = place;
        if place == text.len() - 2 {
            text[place] = b'.';
            continue;
        }
        text[place] = b'0' + u8::try_from(left % 10).unwrap_or_default();
        left /= 10;
        if left == 0 && place < text.len() - 2 {
            break;
        }
    }
    f.write_str(std::str::from_utf8(&text[begin..]).unwrap_or_default())?;
    f.write_str(" ")?;
    f.write_str(unit)
}

/// Returns the integer part of a float; a value out of range becomes the nearest in range.
fn cut(value: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a cast of a float saturates, and NaN becomes 0"
    )]
    let whole = value as u64;
    whole
}

/// A rate, bytes a second: at least 1, at most 10^15, so that anything can be divided by it.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct BytesPerSecond(f64);

impl BytesPerSecond {
    /// The slowest rate there is.
    pub const MIN: Self = Self(1.0);
    /// Fastest rate: a thousand times the bandwidth of a machine's memory.
    pub const MAX: Self = Self(1e15);

    /// Makes a rate of `value` bytes a second.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] unless it is finite and between [`MIN`](Self::MIN) and [`MAX`](Self::MAX).
    pub fn new(value: f64) -> Result<Self, OutOfRange> {
        Self::try_from(value)
    }

    /// Returns the rate at which `bytes` were moved in `elapsed`.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] if that is no rate: nothing was moved, or it took no time.
    pub fn measured(bytes: Bytes, elapsed: Seconds) -> Result<Self, OutOfRange> {
        Self::new(bytes.0 as f64 / elapsed.0)
    }

    /// Bytes a second.
    #[inline]
    #[must_use]
    pub const fn value(self) -> f64 {
        self.0
    }

    /// Returns the slower of two rates.
    #[inline]
    #[must_use]
    pub fn slower(self, other: Self) -> Self {
        Self(self.0.min(other.0))
    }

    /// Returns the faster of two rates.
    #[inline]
    #[must_use]
    pub fn faster(self, other: Self) -> Self {
        Self(self.0.max(other.0))
    }

    /// Makes the nearest number in range; the least for NaN.
    #[inline]
    #[must_use]
    pub fn clamped(value: f64) -> Self {
        Self(within(value, Self::MIN.0, Self::MAX.0))
    }
}

impl fmt::Display for BytesPerSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        decimal(f, self.0)?;
        f.write_str("/s")
    }
}

/// A length of time, seconds: from 0 to 10^12, which is 30,000 years.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Seconds(f64);

impl Seconds {
    /// A duration of 0 seconds.
    pub const ZERO: Self = Self(0.0);
    /// The longest time; sums and quotients that would be longer are this.
    pub const MAX: Self = Self(1e12);
    /// A duration of 30 seconds.
    pub const HALF_A_MINUTE: Self = Self(30.0);
    /// A duration of 60 seconds.
    pub const MINUTE: Self = Self(60.0);
    /// A duration of 24 hours.
    pub const ONE_DAY: Self = Self(86_400.0);
    /// A duration of 30 days.
    pub const THIRTY_DAYS: Self = Self(30.0 * 86_400.0);

    /// Makes a duration of `value` seconds.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] unless it is finite and between 0 and [`MAX`](Self::MAX).
    pub fn new(value: f64) -> Result<Self, OutOfRange> {
        Self::try_from(value)
    }

    /// Makes a duration of `millis` milliseconds.
    #[inline]
    #[must_use]
    pub fn from_millis(millis: u64) -> Self {
        Self::clamped(millis as f64 / 1e3)
    }

    /// Returns the duration in seconds.
    #[inline]
    #[must_use]
    pub const fn value(self) -> f64 {
        self.0
    }

    /// Returns the sum, at most [`MAX`](Self::MAX).
    #[inline]
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self::clamped(self.0 + other.0)
    }

    /// Returns the difference, at least 0.
    #[inline]
    #[must_use]
    pub fn less(self, other: Self) -> Self {
        Self::clamped(self.0 - other.0)
    }

    /// Returns this duration times `ratio`.
    #[inline]
    #[must_use]
    pub fn times(self, ratio: Ratio) -> Self {
        Self::clamped(self.0 * ratio.0)
    }

    /// Makes the nearest number in range; the least for NaN.
    #[inline]
    #[must_use]
    pub fn clamped(value: f64) -> Self {
        Self(within(value, 0.0, Self::MAX.0))
    }
}

impl Eq for Seconds {}

impl Ord for Seconds {
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Seconds {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl std::iter::Sum for Seconds {
    fn sum<I: Iterator<Item = Self>>(times: I) -> Self {
        times.fold(Self::ZERO, Self::plus)
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0.0 => f.write_str("0 s"),
            t if t < 1.0 => tenths(f, t * 1e3, "ms"),
            t => tenths(f, t, "s"),
        }
    }
}

/// A factor: from 0 to 10^6.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct Ratio(f64);

impl Ratio {
    /// Factor of 0.
    pub const ZERO: Self = Self(0.0);
    /// Factor of 1.
    pub const ONE: Self = Self(1.0);
    /// The largest factor.
    pub const MAX: Self = Self(1e6);

    /// Makes the factor `value`.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] unless it is finite and between 0 and [`MAX`](Self::MAX).
    pub fn new(value: f64) -> Result<Self, OutOfRange> {
        Self::try_from(value)
    }

    /// Returns the ratio of `part` to `whole`.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] if the whole is nothing, or the part more than 10^6 times the whole.
    pub fn of(part: Bytes, whole: Bytes) -> Result<Self, OutOfRange> {
        Self::new(part.0 as f64 / whole.0 as f64)
    }

    /// Returns the factor.
    #[inline]
    #[must_use]
    pub const fn value(self) -> f64 {
        self.0
    }

    /// Makes the nearest number in range; the least for NaN.
    #[inline]
    #[must_use]
    pub fn clamped(value: f64) -> Self {
        Self(within(value, 0.0, Self::MAX.0))
    }
}

/// Timestamp on the caller's monotonic clock, microseconds since an origin that the caller chooses.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Moment(u64);

impl Moment {
    /// Makes the timestamp `micros` microseconds after the origin.
    #[inline]
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Microseconds since the beginning.
    #[inline]
    #[must_use]
    pub const fn micros(self) -> u64 {
        self.0
    }

    /// Returns the timestamp `time` later; the last timestamp there is if the result lies behind it.
    #[inline]
    #[must_use]
    pub fn after(self, time: Seconds) -> Self {
        Self(self.0.saturating_add(to_u64(time.0 * 1e6)))
    }

    /// Returns the timestamp `time` earlier; the origin if the result lies before it.
    #[inline]
    #[must_use]
    pub fn before(self, time: Seconds) -> Self {
        Self(self.0.saturating_sub(to_u64(time.0 * 1e6)))
    }

    /// Returns the time since `earlier`; 0 if that is later.
    #[inline]
    #[must_use]
    pub fn since(self, earlier: Self) -> Seconds {
        Seconds::clamped(self.0.saturating_sub(earlier.0) as f64 / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_no_quantity_is_refused() {
        for bad in [f64::NAN, f64::INFINITY, -1.0, 1e300] {
            assert!(Seconds::new(bad).is_err(), "{bad}");
            assert!(BytesPerSecond::new(bad).is_err(), "{bad}");
            assert!(Ratio::new(bad).is_err(), "{bad}");
        }
        assert!(BytesPerSecond::new(0.0).is_err());
        assert!(BytesPerSecond::measured(Bytes::ZERO, Seconds::ZERO).is_err());
        assert!(BytesPerSecond::measured(Bytes::new(1), Seconds::ZERO).is_err());
        assert!(Ratio::of(Bytes::new(1), Bytes::ZERO).is_err());
        assert!(Ratio::of(Bytes::ZERO, Bytes::ZERO).is_err());
    }

    #[test]
    fn sums_and_quotients_stop_at_the_largest() {
        let most = Bytes::new(u64::MAX);
        assert_eq!(most.plus(most), most);
        assert_eq!(most.at(BytesPerSecond::MIN), Seconds::MAX);
        assert_eq!(Seconds::MAX.plus(Seconds::MAX), Seconds::MAX);
        assert_eq!(most.times(Ratio::MAX), most);
        assert_eq!(
            Moment::from_micros(u64::MAX).after(Seconds::MAX),
            Moment::from_micros(u64::MAX)
        );
        assert_eq!(
            Moment::from_micros(1).since(Moment::from_micros(9)),
            Seconds::ZERO
        );
    }

    #[test]
    fn minus_zero_is_zero() {
        assert_eq!(
            Seconds::new(-0.0).unwrap().cmp(&Seconds::ZERO),
            Ordering::Equal
        );
    }

    #[test]
    fn five_gigabytes_at_half_a_gigabyte_a_second_take_ten_seconds() {
        let rate = BytesPerSecond::new(5e8).unwrap();
        assert_eq!(Bytes::new(5_000_000_000).at(rate).value(), 10.0);
        assert_eq!(Bytes::new(5_000_000_000).to_string(), "5.0 GB");
        assert_eq!(rate.to_string(), "500.0 MB/s");
    }

    proptest! {
        /// Compares the text for all floats that a quantity may have, and for those between two tenths or next to
        /// that.
        #[test]
        fn tenths_are_those_of_the_standard_library(
            bits in 0..1e15_f64.to_bits(),
            near in 0_u64..100_000,
            off in -2_i64..=2,
        ) {
            struct Tenths(f64);
            impl fmt::Display for Tenths {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    tenths(f, self.0, "x")
                }
            }
            let between = (near as f64 / 20.0).to_bits().saturating_add_signed(off);
            for value in [f64::from_bits(bits), f64::from_bits(between), near as f64 / 32.0] {
                prop_assert_eq!(Tenths(value).to_string(), format!("{value:.1} x"));
            }
        }
    }
}
