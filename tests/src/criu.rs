//! Finds a CRIU that works, and reads its statistics.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result};
use permafrost_protocol::images::DumpStats;

use crate::binaries;

/// Environment variable that names the CRIU to use.
pub const CRIU: &str = "PERMAFROST_CRIU";
/// Environment variable that turns a skipped test into a failed one.
pub const REQUIRE_CRIU: &str = "PERMAFROST_REQUIRE_CRIU";

/// A CRIU whose `check` passes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Criu {
    /// The executable, or a script that starts it.
    pub path: PathBuf,
}

/// Reasons why no CRIU is available.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unavailable {
    /// Each candidate and its fault; one line each.
    pub reasons: Vec<String>,
}

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.reasons.join("; "))
    }
}

impl std::error::Error for Unavailable {}

/// Returns the CRIU to use: the first of [`CRIU`], the one on PATH, and the one that `cargo xtask setup` has fetched
/// whose `check` passes. The search runs once a process.
///
/// # Errors
/// Says of each candidate why not.
pub fn find() -> Result<Criu, Unavailable> {
    static FOUND: OnceLock<Criu> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Ok(found.clone());
    }
    // What is not there may be fetched meanwhile.
    let found = look_for()?;
    Ok(FOUND.get_or_init(|| found).clone())
}

fn look_for() -> Result<Criu, Unavailable> {
    let mut reasons = Vec::new();
    let named = std::env::var_os(CRIU);
    let is_named = named.is_some();
    let candidates: Vec<PathBuf> = if let Some(path) = named {
        vec![path.into()]
    } else {
        vec!["criu".into(), fetched()]
    };
    for candidate in candidates {
        match check(&candidate) {
            Ok(()) => {
                return Ok(Criu {
                    path: binaries::resolve(&candidate),
                });
            }
            Err(reason) => reasons.push(format!("{}: {reason}", candidate.display())),
        }
    }
    if !is_named {
        reasons.push("`cargo xtask setup` fetches one".to_owned());
    }
    Err(Unavailable { reasons })
}

/// Returns the path at which `cargo xtask setup` puts the script that starts the CRIU it fetched.
#[must_use]
pub fn fetched() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).join("target/criu/criu")
}

/// Runs `criu check`, which tests that this CRIU, this kernel and this user's rights suffice.
///
/// # Errors
/// Gives the reason in one line.
pub fn check(criu: &Path) -> Result<(), String> {
    let output = match Command::new(criu)
        .arg("check")
        .stdin(Stdio::null())
        .output()
    {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err("not there".to_owned());
        }
        Err(error) => return Err(format!("does not start: {error}")),
    };
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned()
        + &String::from_utf8_lossy(&output.stdout);
    let errors: Vec<&str> = said.lines().filter(|line| line.contains("Error")).collect();
    let reason = errors
        .last()
        .copied()
        .or_else(|| said.lines().last())
        .unwrap_or("says nothing")
        .trim();
    Err(format!(
        "`criu check` fails ({}): {reason}{}",
        output.status,
        surroundings()
    ))
}

/// Returns the known obstacles to CRIU that apply on this machine.
fn surroundings() -> String {
    let mut known = String::new();
    if !rustix::process::geteuid().is_root() {
        known += "; not root";
    }
    if !Path::new("/proc/sys/kernel/ns_last_pid").exists() {
        known += "; no /proc/sys/kernel/ns_last_pid, so the kernel lacks CONFIG_CHECKPOINT_RESTORE";
    }
    known
}

/// Returns the CRIU for a test, or `None` after saying loudly that the test was skipped.
///
/// # Panics
/// Where [`REQUIRE_CRIU`] is set to anything but 0: there a skipped test is a failed one.
#[must_use]
pub fn for_test(test: &str) -> Option<Criu> {
    match find() {
        Ok(criu) => Some(criu),
        Err(why) => {
            let required = std::env::var_os(REQUIRE_CRIU).is_some_and(|value| value != "0");
            assert!(!required, "{test} needs CRIU: {why}");
            // Past libtest's capture, which would hide it: a skip must be seen. `cargo xtask test` counts these.
            let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: no CRIU: {why}");
            None
        }
    }
}

/// Reads `stats-dump`, CRIU's own statistics of a dump, from a work directory.
///
/// # Errors
/// Fails when there is none or it is not one.
pub fn dump_stats(work_dir: &Path) -> Result<DumpStats> {
    let path = work_dir.join("stats-dump");
    let bytes = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    DumpStats::read(&bytes).with_context(|| format!("parse {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_criu_says_so() {
        assert_eq!(
            check(Path::new("/nonexistent/criu")).unwrap_err(),
            "not there"
        );
    }
}
