//! A `/run` in memory. CRIU keeps there what it has found out about the kernel, and only there: where `/run` is on a
//! disk, as in many containers, it examines the kernel each time that it starts, for longer than some of what is
//! measured takes.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use permafrost_criu::scratch::is_in_memory;

use crate::ui;

/// Set for the run that has a `/run` of its own, which another run below it keeps.
const VARIABLE: &str = "PERMAFROST_XTASK_RUN_DIR";

/// Mounts the directory, and starts the program that follows.
const MOUNT: &str = r#"mount -t tmpfs -o mode=755 tmpfs /run && exec "$@""#;

/// Starts this program again, in a mount namespace whose `/run` is an empty tmpfs, unless `/run` is in memory. Without
/// the right to do so it goes on with what there is, with a message.
///
/// # Errors
/// The program cannot be started again.
pub(crate) fn enter() -> Result<()> {
    if is_in_memory(Path::new("/run")) || std::env::var_os(VARIABLE).is_some() {
        return Ok(());
    }
    let mut trial = in_namespace();
    let trial = trial.arg("true").stdin(Stdio::null()).stderr(Stdio::null());
    if !trial.status().is_ok_and(|status| status.success()) {
        ui::say("/run is not in memory, and cannot be replaced: CRIU takes longer");
        return Ok(());
    }
    let program = std::env::current_exe().context("find this program")?;
    let error = in_namespace()
        .arg(program)
        .args(std::env::args_os().skip(1))
        .env(VARIABLE, "1")
        .exec();
    Err(error).context("start unshare")
}

fn in_namespace() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", MOUNT, "sh"]);
    command
}
