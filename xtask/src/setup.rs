//! `cargo xtask setup`: finds or fetches a CRIU that works on this machine.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use permafrost_tests::criu;

use crate::{tools, ui};

/// Result of the search for a CRIU.
pub(crate) enum Criu {
    /// Path of a CRIU that works here.
    Works(PathBuf),
    /// Reason why no CRIU can work on this machine.
    CannotRun(String),
}

/// Returns the CRIU to use, and fetches it privately if necessary.
///
/// The one on PATH if its `check` passes; else a newer one, from Debian unstable through this machine's own
/// mirror, unpacked under `target/criu` (the system's packages stay as they are). Quick when it is there.
///
/// # Errors
/// Fails when one might work here but cannot be had.
pub(crate) fn criu() -> Result<Criu> {
    let why = match criu::find() {
        Ok(found) => return Ok(Criu::Works(found.path)),
        Err(why) => why,
    };
    if std::env::var_os(criu::CRIU).is_some() {
        bail!("{} names a CRIU that does not work: {why}", criu::CRIU);
    }
    if let Some(reason) = cannot_run() {
        return Ok(Criu::CannotRun(reason.to_owned()));
    }
    let task = ui::Task::begin("fetch CRIU, as none here works");
    let wrapper = fetch().with_context(|| format!("fetch CRIU ({why})"))?;
    task.done(&format!("{}", wrapper.display()));
    Ok(match criu::check(&wrapper) {
        Ok(()) => Criu::Works(wrapper),
        Err(reason) => Criu::CannotRun(format!("{why}; fetched: {reason}")),
    })
}

/// Runs `cargo xtask setup`: prints the path, or fails with the reason.
pub(crate) fn print() -> Result<()> {
    // First, as CRIU's path is to be the last line, and may be missing for good reasons.
    tools::protoc()?;
    let for_tests = [
        ("etcd", tools::etcd().map(drop)),
        ("etcdctl", tools::etcdctl()),
        ("libfaketime", tools::faketime().map(drop)),
        ("Slurm", tools::slurm().map(drop)),
        ("runc", tools::runc()),
        ("podman", tools::podman()),
        ("Chromium", tools::browser()),
        ("an S3 server", tools::s3()),
        ("promtool", tools::promtool()),
    ];
    let missing = missing(&for_tests);
    if !missing.is_empty() {
        ui::say_loudly(&format!(
            "TESTS THAT NEED THESE PROGRAMS ARE SKIPPED OR FAIL: {missing}"
        ));
    }
    match criu()? {
        Criu::Works(path) => println!("{}", path.display()),
        Criu::CannotRun(why) => bail!("CRIU cannot run here: {why}"),
    }
    Ok(())
}

/// Returns the programs that only tests need and that are not there, each with the reason.
fn missing(programs: &[(&str, Result<()>)]) -> String {
    let failed = programs.iter().filter_map(|(name, result)| {
        let why = result.as_ref().err()?;
        Some(format!("{name} ({why:#})"))
    });
    failed.collect::<Vec<_>>().join("; ")
}

/// Prints the variables that a shell needs to build and run Permafrost.
pub(crate) fn print_environment() -> Result<()> {
    let mut lines = Vec::new();
    if let Some(protoc) = tools::protoc()? {
        lines.push(export(tools::PROTOC, &protoc)?);
    }
    match criu()? {
        Criu::Works(path) => lines.push(export(criu::CRIU, &path)?),
        Criu::CannotRun(why) => bail!("CRIU cannot run here: {why}"),
    }
    println!("{}", lines.join("\n"));
    Ok(())
}

/// Returns an assignment for a POSIX shell, with the path quoted.
fn export(variable: &str, path: &Path) -> Result<String> {
    let path = path.to_str().context("a path is not UTF-8")?;
    Ok(format!(
        "export {variable}='{}'",
        path.replace('\'', "'\\''")
    ))
}

/// Returns the reason why a fetched CRIU could not work on this machine, if there is one. Called before any is
/// fetched.
fn cannot_run() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("it needs root");
    }
    if !Path::new("/proc/sys/kernel/ns_last_pid").exists() {
        return Some(
            "the kernel lacks CONFIG_CHECKPOINT_RESTORE (no /proc/sys/kernel/ns_last_pid)",
        );
    }
    if !cfg!(target_arch = "x86_64") {
        return Some("it is fetched for x86-64 only; install one that suits this machine");
    }
    None
}

fn fetch() -> Result<PathBuf> {
    let criu = tools::Program {
        suite: "unstable",
        packages: &["criu"],
        path: "usr/sbin/criu",
        arguments: "",
    };
    let wrapper = criu::fetched();
    tools::fetch(&criu, &wrapper, |there| {
        there.exists() && criu::check(there).is_ok()
    })?;
    fs::canonicalize(&wrapper).context("find the script")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_only_tests_need_is_reported_and_ends_nothing() {
        let programs = [
            ("runc", Ok(())),
            (
                "podman",
                Err(anyhow::anyhow!("no network").context("fetch it")),
            ),
            ("Slurm", Err(anyhow::anyhow!("too old"))),
        ];
        assert_eq!(
            missing(&programs),
            "podman (fetch it: no network); Slurm (too old)"
        );
        assert_eq!(missing(&programs[..1]), "");
    }

    #[test]
    fn a_shell_reads_the_path_that_was_written() {
        let path = "/a b/it's $HOME/criu";
        let line = export("PERMAFROST_CRIU", Path::new(path)).unwrap();
        let shell = std::process::Command::new("sh")
            .args(["-c", &format!("{line}; printf %s \"$PERMAFROST_CRIU\"")])
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&shell.stdout), path);
    }
}
