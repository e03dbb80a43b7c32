//! Formats numbers as text.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Formats a size: `4.0 KiB`, `512 B`.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    // In tenths of the unit, rounded half up, in the first unit that keeps them below 1024.0.
    let mut unit = 0;
    let mut scale = 1024_u128;
    let tenths = |scale: u128| (u128::from(bytes) * 10 + scale / 2) / scale;
    while tenths(scale) >= 10_240 && unit + 1 < UNITS.len() {
        unit += 1;
        scale *= 1024;
    }
    let tenths = tenths(scale);
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
}

/// Formats a duration: `35.2 ms`, `1.25 s`, `3 m 20 s`.
pub fn duration(duration: Duration) -> String {
    let micros = duration.as_micros();
    match micros {
        0..1_000 => format!("{micros} µs"),
        1_000..1_000_000 => format!("{}.{} ms", micros / 1_000, micros / 100 % 10),
        1_000_000..60_000_000 => {
            format!("{}.{:02} s", micros / 1_000_000, micros / 10_000 % 100)
        }
        _ => span(duration.as_secs()),
    }
}

/// Formats seconds with a fraction like [`duration`], as the API has them; negative values count as 0, and NaN is
/// `unknown`.
pub fn seconds(seconds: f64) -> String {
    if seconds.is_nan() {
        return "unknown".to_owned();
    }
    if seconds <= 0.0 {
        return "0 s".to_owned();
    }
    duration(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// Formats seconds with a fraction like [`age`].
pub fn age_s(seconds: f64) -> String {
    age(whole(seconds))
}

/// Returns the number without its fraction; 0 for a negative value or NaN.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a cast of floats to integers saturates, which is what is wanted for display"
)]
pub fn whole(number: f64) -> u64 {
    number as u64
}

/// Returns whole microseconds, the unit of durations in JSON; saturates.
pub fn whole_micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Formats a duration in milliseconds.
pub fn millis(ms: u64) -> String {
    micros(ms.saturating_mul(1000))
}

/// Formats microseconds like [`duration`].
pub fn micros(micros: u64) -> String {
    duration(Duration::from_micros(micros))
}

/// Formats a span: `12 s`, `3 m 20 s`, `5 h 1 m`, `2 d 3 h`, `7 d`.
pub fn span(seconds: u64) -> String {
    let (large, small) = match seconds {
        0..60 => return format!("{seconds} s"),
        60..3_600 => ((seconds / 60, "m"), (seconds % 60, "s")),
        3_600..86_400 => ((seconds / 3_600, "h"), (seconds / 60 % 60, "m")),
        _ => ((seconds / 86_400, "d"), (seconds / 3_600 % 24, "h")),
    };
    match small {
        (0, _) => format!("{} {}", large.0, large.1),
        (number, unit) => format!("{} {} {number} {unit}", large.0, large.1),
    }
}

/// Formats an age in one unit: `12s`, `3m`, `5h`, `2d`.
pub fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m", seconds / 60),
        3_600..86_400 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Returns the current time, milliseconds since the Unix epoch.
pub fn now_unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|since| u64::try_from(since.as_millis()).ok())
        .unwrap_or_default()
}

/// Returns the seconds since a time; 0 for a time in the future (another machine's clock).
pub fn seconds_since(unix_ms: u64) -> u64 {
    now_unix_ms().saturating_sub(unix_ms) / 1_000
}

/// Formats a date: `2026-11-21 01:04:29 UTC`.
pub fn date(unix_ms: u64) -> String {
    let seconds = unix_ms / 1_000;
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days to civil date: H. Hinnant, "chrono-Compatible Low-Level Date Algorithms"; years start in
    // March, eras of 400 years in the year 0. Unix time begins 719,468 days later.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC",
        second / 3_600,
        second / 60 % 60,
        second % 60
    )
}

/// Formats a number with its noun: `1 file`, `3 files`.
pub fn count(number: u64, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// Formats a percentage: `37 %`; nothing of nothing is `0 %`.
pub fn percent(part: u64, whole: u64) -> String {
    let share = (u128::from(part) * 100)
        .checked_div(u128::from(whole))
        .unwrap_or(0);
    format!("{share} %")
}

/// Formats a time in the future, and the time until then.
pub fn expiry(unix_ms: u64) -> String {
    let left = unix_ms.saturating_sub(now_unix_ms()) / 1000;
    let distance = if left == 0 {
        format!("{} ago", span(seconds_since(unix_ms)))
    } else {
        format!("in {}", span(left))
    };
    format!("{} ({distance})", date(unix_ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_one_decimal_and_iec_units() {
        for (number, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (1024 * 1024 - 1, "1.0 MiB"),
            (5 << 20, "5.0 MiB"),
            ((1 << 30) + (1 << 29), "1.5 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(bytes(number), text, "{number}");
        }
    }

    #[test]
    fn times_have_the_unit_that_fits() {
        for (micro, text) in [
            (812, "812 µs"),
            (35_249, "35.2 ms"),
            (1_250_000, "1.25 s"),
            (200_000_000, "3 m 20 s"),
        ] {
            assert_eq!(micros(micro), text);
        }
        assert_eq!(
            [0, 59, 60, 7_200, 200_000].map(age),
            ["0s", "59s", "1m", "2h", "2d"]
        );
        assert_eq!(
            [59, 60, 3_600, 200_000, 604_800].map(span),
            ["59 s", "1 m", "1 h", "2 d 7 h", "7 d"]
        );
    }

    #[test]
    fn fractions_of_seconds_are_times_too() {
        for (number, text) in [
            (0.0, "0 s"),
            (-1.0, "0 s"),
            (0.25, "250.0 ms"),
            (1.25, "1.25 s"),
            (600.0, "10 m"),
        ] {
            assert_eq!(seconds(number), text, "{number}");
        }
        assert_eq!(seconds(f64::INFINITY), span(u64::MAX));
        assert_eq!(seconds(f64::NAN), "unknown");
        assert_eq!([whole(-3.0), whole(f64::NAN), whole(3.9)], [0, 0, 3]);
        assert_eq!(age_s(61.5), "1m");
    }

    #[test]
    fn dates_are_civil() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_709_251_199, "2024-02-29 23:59:59 UTC"),
            (1_795_223_069, "2026-11-21 01:04:29 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(date(seconds * 1_000), text);
        }
    }
}
