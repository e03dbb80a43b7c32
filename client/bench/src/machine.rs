//! Properties of the machine that the benchmarks need: memory, disks, processors, processes.

use std::fs;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions};
use serde::{Deserialize, Serialize};

/// Machine on which the measurements were made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Machine {
    /// Release of the kernel.
    kernel: String,
    processors: usize,
    memory_bytes: u64,
    /// Version of CRIU.
    criu: String,
    /// True if the kernel reports which pages were written, so that a second dump need not read the others.
    pub(super) soft_dirty: bool,
}

impl Machine {
    pub(super) fn here(criu: String, soft_dirty: bool) -> Self {
        Self {
            kernel: rustix::system::uname()
                .release()
                .to_string_lossy()
                .into_owned(),
            processors: std::thread::available_parallelism().map_or(1, Into::into),
            memory_bytes: meminfo_bytes("MemTotal"),
            criu,
            soft_dirty,
        }
    }
}

/// Returns the memory that programs can still allocate, bytes.
pub(super) fn available_memory_bytes() -> u64 {
    meminfo_bytes("MemAvailable")
}

fn meminfo_bytes(key: &str) -> u64 {
    kib_of(
        &fs::read_to_string("/proc/meminfo").unwrap_or_default(),
        key,
    ) << 10
}

/// Returns the shared memory that a process has mapped and touched, bytes: the populated part of a region on
/// tmpfs.
pub(super) fn shared_memory_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    kib_of(&status, "RssShmem") << 10
}

/// Returns the value of `KEY:   123 kB`; 0 if there is none.
fn kib_of(text: &str, key: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let value = line.and_then(|line| line.strip_prefix(':')?.trim().strip_suffix(" kB"));
    value.and_then(|value| value.parse().ok()).unwrap_or(0)
}

/// Returns the bytes that can still be written beneath a directory.
pub(super) fn free_bytes(directory: &Path) -> u64 {
    rustix::fs::statvfs(directory).map_or(0, |fs| fs.f_bavail.saturating_mul(fs.f_frsize))
}

/// Makes the kernel drop its cached pages of a file, as far as they are on the disk and no process maps them.
pub(super) fn forget_cached(file: &Path) -> std::io::Result<()> {
    let file = fs::File::open(file)?;
    file.sync_data()?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

fn pid_of(pid: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(pid).ok()?)
}

/// Sends a signal to a process that this one has started; returns false if there is no such process.
pub(super) fn signal(pid: u32, signal: Signal) -> bool {
    pid_of(pid).is_some_and(|pid| rustix::process::kill_process(pid, signal).is_ok())
}

/// Returns true if a process exists, even as a zombie, and is a child of this one: its pid may belong to
/// another process by now.
pub(super) fn is_own_child(pid: u32) -> bool {
    stat_fields(&format!("/proc/{pid}/stat"), 3, 1) == [u64::from(std::process::id())]
}

/// Reaps an orphan that was reparented to this process, if it has ended.
pub(super) fn reap(pid: u32) {
    if let Some(pid) = pid_of(pid) {
        // ECHILD: not a child of this process.
        let _ = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
    }
}

/// Returns the processor time of a process, without its children.
pub(super) fn cpu_time(pid: u32) -> Duration {
    // utime and stime, proc_pid_stat(5).
    stat_ticks(&format!("/proc/{pid}/stat"), 13)
}

/// Returns the processor time of all processes that this one has started and waited for.
pub(super) fn ended_children_cpu_time() -> Duration {
    // cutime and cstime.
    stat_ticks("/proc/self/stat", 15)
}

/// Returns the sum of two neighbouring fields of a stat file.
fn stat_ticks(path: &str, field: usize) -> Duration {
    let ticks: u64 = stat_fields(path, field, 2).iter().sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second().max(1))
}

/// Returns neighbouring fields of a stat file, numbered from 0 (proc_pid_stat(5)); none if it cannot be read.
fn stat_fields(path: &str, field: usize, count: usize) -> Vec<u64> {
    let stat = fs::read_to_string(path).unwrap_or_default();
    // The command, field 1, may hold anything; what follows it begins at field 2.
    let rest = stat.rsplit(')').next().unwrap_or_default();
    let fields = rest.split_whitespace().skip(field.saturating_sub(2));
    fields
        .take(count)
        .filter_map(|word| word.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_proc_are_read_by_their_key() {
        let text = "MemTotal:       24689012 kB\nMemFree:  12 kB\nHugePages_Total:       0\n";
        assert_eq!(kib_of(text, "MemFree"), 12);
        assert_eq!(kib_of(text, "Mem"), 0);
        assert_eq!(kib_of(text, "HugePages_Total"), 0);
        assert!(available_memory_bytes() > 1 << 20);
    }

    #[test]
    fn a_busy_process_has_used_the_processor() {
        let pid = std::process::id();
        let before = cpu_time(pid);
        let mut sum = 0_u64;
        while cpu_time(pid) < before + Duration::from_millis(20) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert_eq!(cpu_time(0), Duration::ZERO);
    }
}
