//! Functions that wait for processes, which need not be children.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, WaitOptions};

/// Period at which a condition is checked.
pub const POLL: Duration = Duration::from_millis(5);

/// Waits until `ready` returns a value.
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

/// Makes this process the one that adopts orphans below it, so that [`reap`] can collect them: a restore needs the
/// very pids that a dump has freed, and a zombie still occupies its pid.
///
/// # Errors
/// Fails where the kernel refuses.
pub fn adopt_orphans() -> Result<()> {
    // Any non-empty pid turns the attribute on.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .context("become a subreaper")
}

/// Collects `pid` if it is a child that has ended. Children of other processes are left alone.
pub fn reap(pid: u32) {
    if let Some(pid) = as_pid(pid) {
        // ECHILD: not ours, its parent reaps it.
        let _ = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
    }
}

/// Returns true if `pid` exists and is not a zombie.
#[must_use]
pub fn is_alive(pid: u32) -> bool {
    state(&Path::new("/proc").join(pid.to_string()))
        .is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Returns the state of the process or thread with this directory in /proc; `None` if there is none.
fn state(directory: &Path) -> Option<char> {
    let stat = std::fs::read_to_string(directory.join("stat")).ok()?;
    // The state follows the command's closing parenthesis.
    stat.rsplit(')').next()?.trim_start().chars().next()
}

/// Stops a process and waits until each of its threads stands: on a busy machine they run on for a while after the
/// signal.
///
/// # Errors
/// There is no such process, or a thread runs on for a minute.
pub fn stop(pid: u32) -> Result<()> {
    signal(pid, Signal::STOP)?;
    let threads = Path::new("/proc").join(pid.to_string()).join("task");
    wait_for("the stop of all threads", Duration::from_secs(60), || {
        for thread in std::fs::read_dir(&threads).context("list threads")? {
            // A thread that has ended since it was listed does not run.
            let state = state(&thread.context("list threads")?.path());
            if state.is_some_and(|state| !matches!(state, 'T' | 't' | 'Z' | 'X')) {
                return Ok(None);
            }
        }
        Ok(Some(()))
    })
}

/// Returns true if `pid` is free: no process has it, not even a zombie. Reaps a zombie child first.
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

/// Returns the processor time that `pid` has used so far, including its ended threads, without its children.
/// Resolution: the kernel's tick, 10 ms.
///
/// # Errors
/// Fails when there is no such process.
pub fn cpu_time(pid: u32) -> Result<Duration> {
    // utime and stime, proc_pid_stat(5).
    stat_ticks(&format!("/proc/{pid}/stat"), [13, 14])
}

/// Returns the processor time of all children that this process has waited for, and of theirs.
///
/// # Errors
/// Fails when /proc cannot be read.
pub fn ended_children_cpu_time() -> Result<Duration> {
    // cutime and cstime.
    stat_ticks("/proc/self/stat", [15, 16])
}

/// Returns the session of this process, 0 if its leader is outside the PID namespace: rustix's `getsid` does not
/// support that case.
///
/// # Errors
/// Fails when /proc cannot be read.
pub fn session_of_this_process() -> Result<i32> {
    // session, proc_pid_stat(5).
    let [session] = stat_fields("/proc/self/stat", [5])?;
    i32::try_from(session).context("a session that is no process id")
}

/// Returns the sum of two fields of a stat file, given by their number from 0.
fn stat_ticks(path: &str, fields: [usize; 2]) -> Result<Duration> {
    let ticks: u64 = stat_fields(path, fields)?.iter().sum();
    Ok(Duration::from_millis(
        ticks * 1000 / rustix::param::clock_ticks_per_second().max(1),
    ))
}

/// Returns fields of a stat file, given by their number from 0.
fn stat_fields<const N: usize>(path: &str, fields: [usize; N]) -> Result<[u64; N]> {
    let stat = std::fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    // The command, field 1, may hold anything; what follows it begins at field 2.
    let rest = stat.rsplit(')').next().unwrap_or_default();
    let mut values = [0; N];
    for (value, field) in values.iter_mut().zip(fields) {
        let word = rest
            .split_whitespace()
            .nth(field - 2)
            .with_context(|| format!("{path} is too short"))?;
        *value = word.parse().with_context(|| format!("parse {path}"))?;
    }
    Ok(values)
}

/// Returns the resident memory that `pid` does not share, bytes: anonymous memory and mapped files, without shared
/// memory. A region on tmpfs counts as shared memory, so this is a daemon's memory beside its region. 0 if the
/// process does not exist.
#[must_use]
pub fn own_memory_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let kib = |key: &str| -> u64 {
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        line.and_then(|line| {
            line.trim_start_matches(':')
                .trim()
                .strip_suffix(" kB")?
                .parse()
                .ok()
        })
        .unwrap_or(0)
    };
    (kib("RssAnon") + kib("RssFile")) << 10
}

/// Kills processes and collects them.
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
