//! Command-line arguments that storage nodes and agents have in common.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::time::Duration;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

/// Format of the log on standard error.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object a line.
    Json,
}

/// Filter of a log that was started; it can be changed while the program runs.
pub struct LogFilter(Box<dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync>);

impl LogFilter {
    /// Replaces the filter, which has the syntax of RUST_LOG.
    ///
    /// # Errors
    /// The text is no filter; the error is a message.
    pub fn set(&self, text: &str) -> Result<(), String> {
        (self.0)(env_filter(text)?)
    }
}

/// Starts logging to standard error with a filter in the syntax of RUST_LOG. Without one, RUST_LOG sets it; the default
/// is `info`. From then on panics are logged, too.
pub fn init_log(format: LogFormat, filter: Option<&str>) -> LogFilter {
    super::panics::log_panics(format);
    let filter = match filter {
        Some(text) => env_filter(text).ok(),
        None => EnvFilter::try_from_default_env().ok(),
    };
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|| EnvFilter::new("info")))
        .with_writer(std::io::stderr);
    let failed = |error: tracing_subscriber::reload::Error| error.to_string();
    match format {
        LogFormat::Text => {
            let log = log
                .with_ansi(std::io::stderr().is_terminal())
                .with_filter_reloading();
            let handle = log.reload_handle();
            log.init();
            LogFilter(Box::new(move |filter| {
                handle.reload(filter).map_err(failed)
            }))
        }
        LogFormat::Json => {
            let log = log.json().flatten_event(true).with_filter_reloading();
            let handle = log.reload_handle();
            log.init();
            LogFilter(Box::new(move |filter| {
                handle.reload(filter).map_err(failed)
            }))
        }
    }
}

fn env_filter(text: &str) -> Result<EnvFilter, String> {
    let wrong = |error| format!("{text:?} is no level such as info, nor a filter: {error}");
    EnvFilter::builder().parse(text).map_err(wrong)
}

/// Parses a filter of the log, such as `info` or `info,permafrost_cluster=debug`.
///
/// # Errors
/// The text is no filter; the error is a message.
pub fn parse_log_filter(text: &str) -> Result<String, String> {
    // An empty variable is none.
    let text = if text.is_empty() { "info" } else { text };
    // A word that is no level would be the name of a module with nothing to log.
    let is_word = !text.contains(['=', ',', '[']);
    if is_word
        && text
            .parse::<tracing_subscriber::filter::LevelFilter>()
            .is_err()
    {
        return Err(format!(
            "{text:?} is none of off, error, warn, info, debug and trace"
        ));
    }
    env_filter(text).map(|_| text.to_owned())
}

/// Formats an error and its causes. A cause that the error's own message already contains is not repeated.
#[must_use]
pub fn in_full(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// Address to listen on, or none. A wrapper type, because clap gives an `Option` a meaning of its own.
#[derive(Clone, Copy, Debug)]
pub struct Listen(pub Option<SocketAddr>);

/// Parses `ADDRESS:PORT` or `none`.
///
/// # Errors
/// The text is neither; the error is a message.
pub fn parse_listen(text: &str) -> Result<Listen, String> {
    match text {
        "none" => Ok(Listen(None)),
        address => address
            .parse()
            .map(|address| Listen(Some(address)))
            .map_err(|_| format!("{text:?} is neither ADDRESS:PORT nor none")),
    }
}

/// Parses a size like `4G`, in binary units as sizes of memory are; bytes without a unit.
///
/// # Errors
/// The text is not a size; the error is a message.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim().trim_end_matches("iB").trim_end_matches('B');
    let (number, shift) = match text.char_indices().last() {
        Some((at, unit)) if unit.is_ascii_alphabetic() => {
            let shift = match unit.to_ascii_uppercase() {
                'K' => 10,
                'M' => 20,
                'G' => 30,
                'T' => 40,
                _ => return Err(format!("{unit:?} is no unit: use K, M, G or T")),
            };
            (&text[..at], shift)
        }
        _ => (text, 0),
    };
    let number: u64 = number
        .parse()
        .map_err(|_| format!("{text:?} is no size such as 512M or 16G"))?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| format!("{text:?} is too large"))
}

/// Parses a time like `500ms`, `30s`, `90m`, `2h` or `7d`; seconds without a unit.
///
/// # Errors
/// The text is not a time; the error is a message.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let unknown = || format!("{text:?} is no time such as 500ms, 30s, 90m, 2h or 7d");
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| unknown())?;
    let unit_ms = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(unknown()),
    };
    let ms = number.checked_mul(unit_ms);
    ms.map(Duration::from_millis)
        .ok_or_else(|| format!("{text:?} is too long"))
}

/// Parses a time as [`parse_time`] does, of a second or more.
///
/// # Errors
/// Those of [`parse_time`]; a shorter time.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let time = parse_time(text)?;
    match time.as_secs() {
        0 => Err("less than a second: what is kept for it would be gone at once".to_owned()),
        _ => Ok(time),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("512M"), Ok(512 << 20));
        assert_eq!(parse_size("16GiB"), Ok(16 << 30));
        for bad in ["", "G", "-1", "1.5G", "12Q", "99999999999T"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
    #[test]
    fn a_cause_is_said_once() {
        #[derive(Debug, thiserror::Error)]
        enum Outer {
            #[error("load it")]
            Plain(#[source] Inner),
        }
        #[derive(Debug, thiserror::Error)]
        #[error("read key.pem: {source}")]
        struct Inner {
            source: std::io::Error,
        }
        let source = std::io::Error::other("no such file");
        assert_eq!(
            in_full(&Outer::Plain(Inner { source })),
            "load it: read key.pem: no such file"
        );
    }

    #[test]
    fn a_filter_is_a_level_or_levels_of_modules() {
        assert_eq!(parse_log_filter("").as_deref(), Ok("info"));
        for good in [
            "info",
            "OFF",
            "warn,permafrost_cluster=debug",
            "permafrost_store=trace",
        ] {
            assert_eq!(parse_log_filter(good).as_deref(), Ok(good));
        }
        for bad in ["loud", "info,x=loud", "x=="] {
            assert!(parse_log_filter(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_have_units() {
        assert_eq!(parse_time("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_time("2"), Ok(Duration::from_secs(2)));
        assert_eq!(parse_time("0s"), Ok(Duration::ZERO));
        assert_eq!(parse_duration("90"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("24h"), Ok(Duration::from_secs(86400)));
        assert_eq!(parse_duration("7d"), Ok(Duration::from_secs(7 * 86400)));
        for bad in [
            "",
            "h",
            "-1s",
            "1y",
            "99999999999999999999h",
            "18446744073709551615h",
        ] {
            assert!(parse_time(bad).is_err(), "{bad}");
        }
        for short in ["0", "0h", "999ms"] {
            assert!(parse_duration(short).is_err(), "{short}");
        }
    }
}
