//! Finding a CRIU that works, and reading its figures.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};

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

/// Why there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unavailable {
    /// Each candidate and what is wrong with it; one line each.
    pub reasons: Vec<String>,
}

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.reasons.join("; "))
    }
}

impl std::error::Error for Unavailable {}

/// The CRIU to use: [`CRIU`], the one on PATH, or the one that `cargo xtask setup` has fetched; the first
/// whose `check` passes. Looked for once a process.
///
/// # Errors
/// Says of each candidate why not.
pub fn find() -> Result<Criu, Unavailable> {
    static FOUND: OnceLock<Result<Criu, Unavailable>> = OnceLock::new();
    FOUND.get_or_init(look_for).clone()
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
                    path: resolve(&candidate),
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

/// Where `cargo xtask setup` puts the script that starts the CRIU it fetched.
#[must_use]
pub fn fetched() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).join("target/criu/criu")
}

/// Runs `criu check`: whether this CRIU and this kernel get on, and this user may.
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

/// What is known to keep CRIU from working, as far as it applies here.
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

fn resolve(path: &Path) -> PathBuf {
    if path.components().count() > 1 {
        return std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    }
    let dirs = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&dirs)
        .map(|dir| dir.join(path))
        .find(|path| path.is_file())
        .unwrap_or_else(|| path.to_path_buf())
}

/// The CRIU for a test, or `None` after saying loudly that the test was skipped.
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

/// CRIU's own figures of a dump, microseconds and pages (`stats-dump` in its work directory).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DumpStats {
    /// Stopping the tasks.
    pub freezing_us: u64,
    /// The tasks stood still.
    pub frozen_us: u64,
    /// Collecting the memory's page maps, part of the frozen time.
    pub memdump_us: u64,
    /// Writing the pages, part of the frozen time.
    pub memwrite_us: u64,
    /// Pages looked at.
    pub pages_scanned: u64,
    /// Pages left to the parent.
    pub pages_skipped_parent: u64,
    /// Pages written.
    pub pages_written: u64,
}

/// CRIU's own figures of a restore, microseconds and pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestoreStats {
    /// Forking the tree.
    pub forking_us: u64,
    /// Everything.
    pub restore_us: u64,
    /// Pages restored.
    pub pages_restored: u64,
}

/// Reads `stats-dump` from a work directory. Fields: images/stats.proto in CRIU's source.
///
/// # Errors
/// Fails when there is none or it is not one.
pub fn dump_stats(work_dir: &Path) -> Result<DumpStats> {
    let fields = stats(&work_dir.join("stats-dump"), 1)?;
    Ok(DumpStats {
        freezing_us: fields[1],
        frozen_us: fields[2],
        memdump_us: fields[3],
        memwrite_us: fields[4],
        pages_scanned: fields[5],
        pages_skipped_parent: fields[6],
        pages_written: fields[7],
    })
}

/// Reads `stats-restore` from a work directory.
///
/// # Errors
/// Fails when there is none or it is not one.
pub fn restore_stats(work_dir: &Path) -> Result<RestoreStats> {
    let fields = stats(&work_dir.join("stats-restore"), 2)?;
    Ok(RestoreStats {
        forking_us: fields[3],
        restore_us: fields[4],
        pages_restored: fields[5],
    })
}

/// The integer fields 0..16 of the message at field `which` of the one record of a statistics file.
fn stats(path: &Path, which: u64) -> Result<[u64; 16]> {
    /// IMG_SERVICE_MAGIC and STATS_MAGIC (CRIU's magic.h).
    const HEAD: [u8; 8] = [0x40, 0x59, 0x10, 0x55, 0x06, 0x33, 0x09, 0x57];
    let bytes = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
    let record = bytes
        .get(12..)
        .with_context(|| format!("{} is too short", path.display()))?;
    if !bytes.starts_with(&HEAD) {
        bail!("{} is not a statistics file", path.display());
    }
    let mut found = [0; 16];
    for_each_field(record, |field, value| {
        if let (true, Value::Bytes(inner)) = (field == which, value) {
            for_each_field(inner, |field, value| {
                let slot = usize::try_from(field).ok().and_then(|at| found.get_mut(at));
                if let (Some(slot), Value::Integer(value)) = (slot, value) {
                    *slot = value;
                }
                Ok(())
            })?;
        }
        Ok(())
    })
    .with_context(|| format!("parse {}", path.display()))?;
    Ok(found)
}

enum Value<'a> {
    Integer(u64),
    Bytes(&'a [u8]),
}

/// Walks a protobuf message; only the wire types that occur in statistics.
fn for_each_field<'a>(
    mut message: &'a [u8],
    mut visit: impl FnMut(u64, Value<'a>) -> Result<()>,
) -> Result<()> {
    while !message.is_empty() {
        let key = varint(&mut message)?;
        let value = match key & 7 {
            0 => Value::Integer(varint(&mut message)?),
            2 => {
                let len = usize::try_from(varint(&mut message)?)?;
                let (inner, rest) = message
                    .split_at_checked(len)
                    .context("a field runs past the end")?;
                message = rest;
                Value::Bytes(inner)
            }
            other => bail!("unexpected wire type {other}"),
        };
        visit(key >> 3, value)?;
    }
    Ok(())
}

fn varint(message: &mut &[u8]) -> Result<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = message
            .split_first()
            .context("a number runs past the end")?;
        *message = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    bail!("a number has no end")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_are_read() {
        let dir = tempfile::tempdir().unwrap();
        // The head, then {1: {1: 100, 2: 300, 7: 5}}.
        let mut file = vec![0x40, 0x59, 0x10, 0x55, 0x06, 0x33, 0x09, 0x57, 10, 0, 0, 0];
        file.extend([0x0a, 7, 0x08, 100, 0x10, 0xac, 0x02, 0x38, 5]);
        std::fs::write(dir.path().join("stats-dump"), &file).unwrap();
        let stats = dump_stats(dir.path()).unwrap();
        assert_eq!(
            (stats.freezing_us, stats.frozen_us, stats.pages_written),
            (100, 300, 5)
        );
        file.pop();
        std::fs::write(dir.path().join("stats-dump"), &file).unwrap();
        assert!(dump_stats(dir.path()).is_err(), "cut short");
    }

    #[test]
    fn a_missing_criu_says_so() {
        assert_eq!(
            check(Path::new("/nonexistent/criu")).unwrap_err(),
            "not there"
        );
    }
}
