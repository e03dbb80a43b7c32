//! A wall clock for single processes, by Debian's libfaketime: simulates a machine whose clock is wrong.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

/// Environment variable that names the library to use.
pub const FAKETIME: &str = "PERMAFROST_FAKETIME";
/// Environment variable that turns a skipped test into a failed one.
pub const REQUIRE_FAKETIME: &str = "PERMAFROST_REQUIRE_FAKETIME";

const HOUR_S: u64 = 3600;

/// Returns the library to use: the first of [`FAKETIME`], the one of this machine, and the one that `cargo xtask
/// setup` has fetched that works. The search runs once a process.
///
/// # Errors
/// Says of each candidate why not.
pub fn find() -> Result<PathBuf, String> {
    static FOUND: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            let candidates = match std::env::var_os(FAKETIME) {
                Some(path) => vec![path.into()],
                None => vec![Path::new("/").join(place()), fetched()],
            };
            let mut reasons = Vec::new();
            for candidate in candidates {
                match check(&candidate) {
                    Ok(()) => return Ok(candidate),
                    Err(why) => reasons.push(format!("{}: {why}", candidate.display())),
                }
            }
            Err(reasons.join("; "))
        })
        .clone()
}

/// Returns the path of the library inside Debian's package.
fn place() -> String {
    let arch = std::env::consts::ARCH;
    format!("usr/lib/{arch}-linux-gnu/faketime/libfaketimeMT.so.1")
}

/// Returns the directory into which `cargo xtask` unpacks the package.
#[must_use]
pub fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).join("target/faketime/root")
}

/// Returns the path of the library that `cargo xtask` has fetched.
#[must_use]
pub fn fetched() -> PathBuf {
    root().join(place())
}

/// Checks that the library can change the clock of programs on this machine.
///
/// # Errors
/// Gives the reason in one line.
pub fn check(library: &Path) -> Result<(), String> {
    if !library.exists() {
        return Err("not there".to_owned());
    }
    let [first, rest @ ..] = with(library, 2);
    let output = Command::new(first)
        .args(rest)
        .args(["date", "+%s"])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("env does not start: {error}"))?;
    let said = String::from_utf8_lossy(&output.stdout).trim().parse();
    let said: u64 = said.map_err(|_| "date says no time with it".to_owned())?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_err(|error| error.to_string())?.as_secs();
    if said.abs_diff(now + 2 * HOUR_S) > HOUR_S / 2 {
        return Err("date says the right time with it".to_owned());
    }
    Ok(())
}

/// Returns a command prefix that moves the wall clock of a command, and no other clock, by so many hours. Negative
/// hours set it back.
///
/// # Panics
/// There is none: see [`for_test`].
#[must_use]
pub fn prefix(hours: i32) -> [String; 4] {
    with(&find().expect("libfaketime"), hours)
}

fn with(library: &Path, hours: i32) -> [String; 4] {
    [
        "env".to_owned(),
        format!("LD_PRELOAD={}", library.display()),
        format!("FAKETIME={hours:+}h"),
        "FAKETIME_DONT_FAKE_MONOTONIC=1".to_owned(),
    ]
}

/// Returns true if clocks can be changed here; otherwise prints loudly that `test` was skipped.
///
/// # Panics
/// Where [`REQUIRE_FAKETIME`] is set to anything but 0: there a skipped test is a failed one.
#[must_use]
pub fn for_test(test: &str) -> bool {
    let Err(why) = find() else { return true };
    let required = std::env::var_os(REQUIRE_FAKETIME).is_some_and(|value| value != "0");
    assert!(!required, "{test} needs libfaketime: {why}");
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: no libfaketime: {why}");
    false
}
