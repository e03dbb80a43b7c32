//! A real S3 server for tests.

use std::path::{Path, PathBuf};

/// Version of the server, a crate: [`PACKAGE`].
pub const VERSION: &str = "0.14.1";
/// Name of the crate and of its program.
pub const PACKAGE: &str = "s3s-fs";

/// Returns the directory that `cargo xtask setup` installs the server in.
#[must_use]
pub fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).join("target/s3s")
}

/// Returns the server that `cargo xtask setup` has installed; `None` if it is missing or has another version.
#[must_use]
pub fn find() -> Option<PathBuf> {
    let program = root().join("bin").join(PACKAGE);
    let output = std::process::Command::new(&program)
        .arg("--version")
        .output();
    let says = String::from_utf8(output.ok()?.stdout).ok()?;
    says.trim().ends_with(VERSION).then_some(program)
}
