//! Paths of the binaries under test, and programs of packages that are unpacked and not installed.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};

/// Environment variable that names the directory of the binaries, when it is not the test's own.
pub const BIN_DIR: &str = "PERMAFROST_BIN_DIR";

static CHOSEN: OnceLock<PathBuf> = OnceLock::new();

/// Returns a command for a program of Debian packages that are unpacked at `root`, with their libraries.
#[must_use]
pub fn unpacked(root: &Path, program: &str) -> Command {
    let architecture = format!("{}-linux-gnu", std::env::consts::ARCH);
    // libpulse looks for its private library below the system's /usr only.
    let directories = ["usr/lib/ARCH", "lib/ARCH", "usr/lib/ARCH/pulseaudio"];
    let libraries = directories.map(|directory| {
        let directory = root.join(directory.replace("ARCH", &architecture));
        directory.display().to_string()
    });
    let mut command = Command::new(root.join(program));
    command.env("LD_LIBRARY_PATH", libraries.join(":"));
    command
}

/// Sets the directory for the rest of this process. Must be called before any binary is looked up.
///
/// # Errors
/// Fails when it is settled already.
pub fn choose(dir: PathBuf) -> Result<()> {
    CHOSEN
        .set(dir)
        .map_err(|_| anyhow::anyhow!("the directory of the binaries is settled already"))
}

/// Returns the directory that holds `permafrostd`, `permafrost`, `permafrost-action` and `permafrost-workload`: the
/// one [chosen](choose), [`BIN_DIR`], or the profile's directory that the running test or command was built into.
///
/// # Errors
/// Fails when the running executable's own path cannot be found.
pub fn dir() -> Result<PathBuf> {
    if let Some(dir) = CHOSEN.get() {
        return Ok(dir.clone());
    }
    if let Some(dir) = std::env::var_os(BIN_DIR) {
        return Ok(dir.into());
    }
    let own = std::env::current_exe().context("find the running executable")?;
    let dir = own
        .parent()
        .context("find the running executable's directory")?;
    // Tests lie in target/<profile>/deps, binaries one above.
    Ok(if dir.ends_with("deps") {
        dir.parent().unwrap_or(dir).to_path_buf()
    } else {
        dir.to_path_buf()
    })
}

/// Returns the file of a program that is named by its path, or found on PATH by its name.
#[must_use]
pub fn resolve(path: &Path) -> PathBuf {
    if path.components().count() > 1 {
        return std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    }
    let dirs = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&dirs)
        .map(|dir| dir.join(path))
        .find(|path| path.is_file())
        .unwrap_or_else(|| path.to_path_buf())
}

/// Returns the path of one binary.
///
/// # Errors
/// Fails when it has not been built: a test of one package does not build the binaries of others.
pub fn path(name: &str) -> Result<PathBuf> {
    let path = dir()?.join(name);
    if !path.exists() {
        bail!(
            "{} is not there: run `cargo build --workspace --bins` in the same profile first",
            path.display()
        );
    }
    Ok(path)
}

/// Makes a directory `plugins` under `dir` for `criu dump -L`: the plugin, and the link by which it finds
/// `permafrost-action`. Returns its path.
///
/// # Errors
/// Fails when one of the two has not been built.
pub fn install_plugin(dir: &Path) -> Result<PathBuf> {
    let action = path("permafrost-action")?;
    // It is built as a dependency of the program, so cargo leaves it there.
    let plugin = path("deps/libpermafrost_plugin.so")?;
    let plugins = dir.join("plugins");
    std::fs::create_dir(&plugins).context("make a directory for the plugin")?;
    std::fs::copy(plugin, plugins.join("permafrost.so")).context("copy the plugin")?;
    symlink(action, plugins.join("permafrost-hook")).context("link the action script")?;
    Ok(plugins)
}
