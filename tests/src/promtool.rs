//! Prometheus' promtool, which checks and tests rules.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Environment variable that turns a skipped test into a failed one.
pub const REQUIRE_PROMTOOL: &str = "PERMAFROST_REQUIRE_PROMTOOL";

/// Package of Debian that contains it.
pub const PACKAGE: &str = "prometheus";

/// Returns the directory into which `cargo xtask` unpacks the package.
#[must_use]
pub fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = tests.parent().unwrap_or(tests).join("target");
    target.join("prometheus/root")
}

/// Returns a command that runs promtool: the one on PATH, or the one that `cargo xtask setup` has fetched.
///
/// # Errors
/// Says of each candidate why not.
pub fn find() -> Result<Command, String> {
    // It needs nothing but libc, so it starts without its package's libraries.
    let mut reasons = Vec::new();
    for candidate in [PathBuf::from("promtool"), root().join("usr/bin/promtool")] {
        match check(&candidate) {
            Ok(()) => return Ok(Command::new(candidate)),
            Err(why) => reasons.push(format!("{}: {why}", candidate.display())),
        }
    }
    Err(reasons.join("; "))
}

fn check(program: &Path) -> Result<(), String> {
    let status = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .map_err(|error| format!("does not start: {error}"))?;
    if !status.success() {
        return Err(format!("`promtool --version` fails ({status})"));
    }
    Ok(())
}

/// Returns promtool for a test, or `None` after saying loudly that the test was skipped.
///
/// # Panics
/// Where [`REQUIRE_PROMTOOL`] is set to anything but 0: there a skipped test is a failed one.
#[must_use]
pub fn for_test(test: &str) -> Option<Command> {
    match find() {
        Ok(promtool) => Some(promtool),
        Err(why) => {
            let required = std::env::var_os(REQUIRE_PROMTOOL).is_some_and(|value| value != "0");
            assert!(!required, "{test} needs promtool: {why}");
            // Past libtest's capture, which would hide it. `cargo xtask test` counts these.
            let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: no promtool: {why}");
            None
        }
    }
}
