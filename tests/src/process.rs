//! Waiting for processes that are not necessarily children.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, WaitOptions};

/// How often a condition is looked at.
pub const POLL: Duration = Duration::from_millis(5);

/// Waits until `ready` gives something.
///
/// # Errors
/// Fails when `ready` does, or when nothing came within `limit`.
pub fn wait_for<T>(
    what: &str,
    limit: Duration,
    mut ready: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = ready()? {
            return Ok(value);
        }
        if start.elapsed() > limit {
            bail!("{what} did not happen within {} s", limit.as_secs());
        }
        std::thread::sleep(POLL);
    }
}

/// Makes this process the one that orphans below it are given to, so that [`reap`] can clear them away:
/// a restore needs the very pids that a dump has killed, and a zombie still holds its own.
///
/// # Errors
/// Fails where the kernel refuses.
pub fn adopt_orphans() -> Result<()> {
    // Any non-empty pid turns the attribute on.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .context("become a subreaper")
}

/// Collects `pid` if it is a child that has ended. Anybody else's child is left alone.
pub fn reap(pid: u32) {
    if let Some(pid) = as_pid(pid) {
        // ECHILD: not ours, its parent reaps it.
        let _ = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
    }
}

/// Whether `pid` is there and not a zombie.
#[must_use]
pub fn is_alive(pid: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        // The state follows the command's closing parenthesis.
        Ok(stat) => !matches!(
            stat.rsplit(')')
                .next()
                .and_then(|rest| rest.trim_start().chars().next()),
            Some('Z' | 'X')
        ),
        Err(_) => false,
    }
}

/// Whether nothing holds `pid` any more, not even a zombie. Reaps it on the way.
#[must_use]
pub fn is_gone(pid: u32) -> bool {
    reap(pid);
    !Path::new("/proc").join(pid.to_string()).exists()
}

/// Sends a signal.
///
/// # Errors
/// Fails when there is no such process.
pub fn signal(pid: u32, signal: Signal) -> Result<()> {
    let target = as_pid(pid).with_context(|| format!("{pid} is not a process id"))?;
    rustix::process::kill_process(target, signal).with_context(|| format!("signal process {pid}"))
}

/// Ends processes for good and collects them.
pub fn kill(pids: &[u32]) {
    for &pid in pids {
        let _ = signal(pid, Signal::KILL);
    }
    for &pid in pids {
        let _ = wait_for(
            "the end of a killed process",
            Duration::from_secs(10),
            || Ok(is_gone(pid).then_some(())),
        );
    }
}

fn as_pid(pid: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(pid).ok()?)
}
