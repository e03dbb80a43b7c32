//! Panics in the log.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::Write as _;
use std::panic::PanicHookInfo;

use super::arguments::LogFormat;

/// Has panics logged as errors, so that in the JSON form, too, every line is an object. If the filter of the log hides
/// them, they are written without it: a panic is a defect, and its place must be known.
pub(super) fn log_panics(format: LogFormat) {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or_default();
        if tracing::enabled!(tracing::Level::ERROR) {
            // It is empty unless RUST_BACKTRACE asks for it.
            let backtrace = Backtrace::capture();
            let is_captured = backtrace.status() == BacktraceStatus::Captured;
            let backtrace = is_captured.then(|| backtrace.to_string());
            tracing::error!(event = "thread-panicked", thread, backtrace, "{panic}");
            return;
        }
        match format {
            LogFormat::Text => default(panic),
            LogFormat::Json => {
                // Nothing is left to do about a standard error that takes no lines.
                let _ = writeln!(std::io::stderr(), "{}", line(thread, panic));
            }
        }
    }));
}

/// Formats a panic as the log's JSON form would, without the time.
fn line(thread: &str, panic: &PanicHookInfo<'_>) -> serde_json::Value {
    serde_json::json!({
        "level": "ERROR",
        "message": panic.to_string(),
        "event": "thread-panicked",
        "thread": thread,
        "target": module_path!(),
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::arguments::init_log;
    use super::*;

    /// Names the filter of the log in the process that panics.
    const FILTER: &str = "PERMAFROST_TEST_PANIC_FILTER";

    #[test]
    fn a_panic_is_one_line_of_json_whatever_the_filter() {
        // The log is the process's own, and can be started once.
        if let Ok(filter) = std::env::var(FILTER) {
            init_log(LogFormat::Json, Some(&filter));
            let thread = std::thread::Builder::new().name("worker \"7\"".to_owned());
            let panics = thread.spawn(|| panic!("first line\nsecond line")).unwrap();
            assert!(panics.join().is_err());
            return;
        }
        let test = "host::panics::tests::a_panic_is_one_line_of_json_whatever_the_filter";
        for filter in ["info", "off", "permafrost_store=debug"] {
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", test, "--nocapture"])
                .env(FILTER, filter)
                .output()
                .unwrap();
            let log = String::from_utf8(output.stderr).unwrap();
            assert!(output.status.success(), "{filter}: {log}");
            let lines: Vec<serde_json::Value> = (log.lines())
                .map(|line| serde_json::from_str(line).expect(line))
                .collect();
            assert_eq!(lines.len(), 1, "{filter}: {log}");
            assert_eq!(lines[0]["level"], "ERROR");
            assert_eq!(lines[0]["event"], "thread-panicked");
            assert_eq!(lines[0]["thread"], "worker \"7\"");
            let message = lines[0]["message"].as_str().unwrap();
            assert!(message.contains("first line\nsecond line"), "{message}");
            assert!(message.contains("panics.rs:"), "{message}");
        }
    }
}
