//! Shared by the demo and the benches: building the programs, a directory in memory, stopping on a signal.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use permafrost_criu::scratch::is_in_memory;
use permafrost_tests::{binaries, process};
use tempfile::TempDir;

use crate::{ci, ui};

/// Programs that the demo runs; benches run others, too.
const PROGRAMS: [&str; 4] = [
    "permafrostd",
    "permafrost",
    "permafrost-action",
    "permafrost-workload",
];

/// Builds the programs of a demo in the profile of xtask itself, so that no dependency is compiled twice. That profile
/// optimises the crates that pages flow through; the rest of a demo waits for CRIU.
///
/// # Errors
/// The build fails; cargo has printed why.
pub(crate) fn build_programs() -> Result<()> {
    let arguments = PROGRAMS.iter().flat_map(|program| ["--bin", program]);
    build(ci::cargo_command().arg("build").args(arguments))
}

/// Builds all binaries, including those of the benches, in release mode, and selects those for later use.
///
/// # Errors
/// The build fails; cargo has printed why.
pub(crate) fn build_release() -> Result<()> {
    if let Some(dir) = std::env::var_os(binaries::BIN_DIR) {
        ui::say(&format!(
            "the binaries of {} are measured",
            Path::new(&dir).display()
        ));
        return Ok(());
    }
    build(ci::cargo_command().args(["build", "--release", "--workspace", "--bins"]))?;
    let ours = binaries::dir()?;
    let profiles = ours.parent().context("find the target directory")?;
    binaries::choose(profiles.join("release"))
}

/// Runs a build and shows cargo's own progress.
fn build(command: &mut Command) -> Result<()> {
    let start = Instant::now();
    ui::say("building; the first time takes minutes");
    let status = command.stdin(Stdio::null()).status().context("run cargo")?;
    if !status.success() {
        bail!("the build fails ({status})");
    }
    ui::say(&format!("built in {:.0} s", start.elapsed().as_secs_f64()));
    Ok(())
}

/// Makes a private directory on tmpfs with room for `need_mib`; without such a tmpfs it is made elsewhere, with a
/// message.
///
/// # Errors
/// Fails when nothing has the room.
pub(crate) fn memory_dir(need_mib: u64) -> Result<TempDir> {
    let mut candidates = vec![PathBuf::from("/dev/shm"), PathBuf::from("/run")];
    candidates.push(std::env::temp_dir());
    let mut roomy = None;
    for candidate in candidates {
        let Ok(status) = rustix::fs::statfs(&candidate) else {
            continue;
        };
        let free_mib = u64::try_from(status.f_bsize)
            .unwrap_or(0)
            .saturating_mul(status.f_bavail)
            >> 20;
        if free_mib < need_mib {
            continue;
        }
        if is_in_memory(&candidate) {
            return temporary(&candidate);
        }
        roomy.get_or_insert(candidate);
    }
    let Some(elsewhere) = roomy else {
        bail!("no file system has {need_mib} MiB free")
    };
    ui::say(&format!(
        "no tmpfs has {need_mib} MiB free: using {}, which is slower",
        elsewhere.display()
    ));
    temporary(&elsewhere)
}

fn temporary(parent: &Path) -> Result<TempDir> {
    // 0700, as images hold a process's secrets.
    tempfile::Builder::new()
        .prefix("permafrost-")
        .tempdir_in(parent)
        .context("create a temporary directory")
}

/// Catches Ctrl-C and SIGTERM, so that everything that was started is ended before the program exits.
#[derive(Clone)]
pub(crate) struct Interrupt {
    raised: Arc<AtomicBool>,
}

impl Interrupt {
    /// # Errors
    /// Fails when the handlers cannot be set.
    pub(crate) fn catch() -> Result<Self> {
        let raised = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&raised)).context("catch signals")?;
        }
        process::adopt_orphans()?;
        Ok(Self { raised })
    }

    /// Checks between two steps whether there was a signal.
    ///
    /// # Errors
    /// Fails once there was a signal.
    pub(crate) fn check(&self) -> Result<()> {
        if self.raised.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        Ok(())
    }
}

/// Returns the first field of that name anywhere in a reply.
pub(crate) fn field<'a>(value: &'a serde_json::Value, name: &str) -> Option<&'a serde_json::Value> {
    match value {
        serde_json::Value::Object(fields) => fields
            .get(name)
            .or_else(|| fields.values().find_map(|inner| field(inner, name))),
        serde_json::Value::Array(items) => items.iter().find_map(|inner| field(inner, name)),
        _ => None,
    }
}

/// Returns the first number of that name anywhere in a reply, 0 if there is none.
pub(crate) fn number(value: &serde_json::Value, name: &str) -> u64 {
    field(value, name)
        .and_then(serde_json::Value::as_u64)
        .unwrap_or(0)
}

/// Formats a size for people.
pub(crate) fn mib(bytes: u64) -> String {
    let tenths = bytes * 10 / (1 << 20);
    format!("{}.{} MiB", tenths / 10, tenths % 10)
}
