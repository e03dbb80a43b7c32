//! `permafrost region`: passed on to `permafrostd`, which knows regions.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use permafrost_terminal::failure::{Code, Failure};

use crate::cli::RegionArguments;

/// Becomes `permafrostd region`; its output and exit code are the answer.
pub(crate) fn region(arguments: &RegionArguments) -> Result<(), Failure> {
    let program = daemon();
    let error = Command::new(&program)
        .arg("region")
        .args(&arguments.arguments)
        .exec();
    let failure = Failure::new(
        Code::Internal,
        format!("run {}: {error}", program.display()),
    );
    Err(failure.hint("install permafrostd beside permafrost, or on PATH"))
}

/// The one beside this program, else on PATH.
fn daemon() -> PathBuf {
    let name = "permafrostd";
    let beside = std::env::current_exe().map(|own| own.with_file_name(name));
    beside
        .ok()
        .filter(|path| path.is_file())
        .unwrap_or_else(|| PathBuf::from(name))
}
