//! What the benchmarks have to know of the machine: memory, disks, processors, processes.

use std::fs;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions};
use serde::{Deserialize, Serialize};

/// `f_type` of tmpfs, from `linux/magic.h`.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// What it was measured on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Machine {
    /// Release of the kernel.
    kernel: String,
    processors: usize,
    memory_bytes: u64,
    /// CRIU's version.
    criu: String,
    /// Whether the kernel tells which pages were written, so that a second dump need not look at all.
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

/// Memory that programs can still take, bytes.
pub(super) fn available_memory_bytes() -> u64 {
    meminfo_bytes("MemAvailable")
}

fn meminfo_bytes(key: &str) -> u64 {
    kib_of(
        &fs::read_to_string("/proc/meminfo").unwrap_or_default(),
        key,
    ) << 10
}

/// Shared memory that a process has mapped and touched, bytes: of a region on tmpfs what is populated.
pub(super) fn shared_memory_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    kib_of(&status, "RssShmem") << 10
}

/// The value of `KEY:   123 kB`; 0 if there is none.
fn kib_of(text: &str, key: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let value = line.and_then(|line| line.strip_prefix(':')?.trim().strip_suffix(" kB"));
    value.and_then(|value| value.parse().ok()).unwrap_or(0)
}

/// Bytes that can still be written beneath a directory.
pub(super) fn free_bytes(directory: &Path) -> u64 {
    rustix::fs::statvfs(directory).map_or(0, |fs| fs.f_bavail.saturating_mul(fs.f_frsize))
}

/// Whether what is written there takes memory.
pub(super) fn is_tmpfs(directory: &Path) -> bool {
    rustix::fs::statfs(directory).is_ok_and(|fs| u64::try_from(fs.f_type) == Ok(TMPFS_MAGIC))
}

/// Has the kernel forget what it has of a file in memory, as far as it is on the disk and nobody maps it.
pub(super) fn forget_cached(file: &Path) -> std::io::Result<()> {
    let file = fs::File::open(file)?;
    file.sync_data()?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

fn pid_of(pid: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(pid).ok()?)
}

/// Sends a signal to a process that this one has started; false if there is none.
pub(super) fn signal(pid: u32, signal: Signal) -> bool {
    pid_of(pid).is_some_and(|pid| rustix::process::kill_process(pid, signal).is_ok())
}

/// Whether a process is there, even as a zombie, and a child of this one: its pid may be somebody else's by now.
pub(super) fn is_own_child(pid: u32) -> bool {
    stat_fields(&format!("/proc/{pid}/stat"), 3, 1) == [u64::from(std::process::id())]
}

/// Collects an orphan that was given to this process, if it has ended.
pub(super) fn reap(pid: u32) {
    if let Some(pid) = pid_of(pid) {
        // ECHILD: not ours.
        let _ = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
    }
}

/// Processor time of a process, its children not counted.
pub(super) fn cpu_time(pid: u32) -> Duration {
    // utime and stime, proc_pid_stat(5).
    stat_ticks(&format!("/proc/{pid}/stat"), 13)
}

/// Processor time of all that this process has started and waited for.
pub(super) fn ended_children_cpu_time() -> Duration {
    // cutime and cstime.
    stat_ticks("/proc/self/stat", 15)
}

/// The sum of two neighbouring fields of a stat file.
fn stat_ticks(path: &str, field: usize) -> Duration {
    let ticks: u64 = stat_fields(path, field, 2).iter().sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second().max(1))
}

/// Neighbouring fields of a stat file, numbered from 0 (proc_pid_stat(5)); none if it cannot be read.
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
