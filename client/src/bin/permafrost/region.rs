//! `permafrost region`: runs `permafrostd region`, as only the daemon can read regions.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use permafrost_terminal::failure::{Code, Failure};

#[derive(Debug, Args)]
pub(crate) struct RegionArguments {
    /// Arguments of `permafrostd region`: `check REGION`, `salvage REGION --to DIR`.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGUMENTS"
    )]
    pub(crate) arguments: Vec<std::ffi::OsString>,
}

/// Becomes `permafrostd region`, with its output and exit code.
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

/// Returns the daemon beside this program, or else the one on PATH.
fn daemon() -> PathBuf {
    let name = "permafrostd";
    let beside = std::env::current_exe().map(|own| own.with_file_name(name));
    beside
        .ok()
        .filter(|path| path.is_file())
        .unwrap_or_else(|| PathBuf::from(name))
}
