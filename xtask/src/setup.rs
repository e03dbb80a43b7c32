//! `cargo xtask setup`: a CRIU that works here.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use permafrost_tests::criu;

use crate::{apt, paths, tools, ui};

/// Whether there is a CRIU to work with.
pub(crate) enum Criu {
    /// This one.
    Works(PathBuf),
    /// None can work here, for this reason.
    CannotRun(String),
}

/// The CRIU to use, fetched privately if need be.
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

/// `cargo xtask setup` itself: the path, or an error that says why not.
pub(crate) fn print() -> Result<()> {
    // First, as CRIU's path is to be the last line, and may be missing for good reasons.
    tools::protoc()?;
    tools::etcd()?;
    match criu()? {
        Criu::Works(path) => println!("{}", path.display()),
        Criu::CannotRun(why) => bail!("CRIU cannot run here: {why}"),
    }
    Ok(())
}

/// What rules CRIU out, known before any is fetched.
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
    let dir = paths::target().join("criu");
    fs::create_dir_all(&dir).context("create target/criu")?;
    // Two at a time would take each other's root away.
    let lock = fs::File::create(dir.join("lock")).context("create the lock")?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).context("take the lock")?;
    let wrapper = criu::fetched();
    if wrapper.exists() && criu::check(&wrapper).is_ok() {
        return Ok(wrapper);
    }
    let root = dir.join("root");
    apt::unpack("unstable", &["criu"], &root)?;
    let root = apt::Root { dir: root };
    let loader = root.loader()?;
    let loader = loader.strip_prefix(&root.dir).unwrap_or(&loader);
    let triplet = format!("{}-linux-gnu", std::env::consts::ARCH);
    // Relative to the script, so that the whole folder can be moved.
    let script = format!(
        "#!/bin/sh\n\
         # Starts the CRIU beside it through its own loader and libraries.\n\
         root=$(dirname \"$(readlink -f \"$0\")\")/root\n\
         exec \"$root/{}\" --library-path \"$root/usr/lib/{triplet}:$root/lib/{triplet}\" \"$root/usr/sbin/criu\" \"$@\"\n",
        loader.display()
    );
    let new = dir.join("criu.new");
    fs::write(&new, script).context("write the script that starts CRIU")?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755))
        .context("make the script executable")?;
    // Last: the script is there only with everything it starts.
    fs::rename(&new, &wrapper).context("put the script in place")?;
    fs::canonicalize(&wrapper).context("find the script")
}
