//! Process trees, read from `/proc`.
//!
//! Processes come and go while `/proc` is read, so each function documents in which direction its result may be
//! wrong.

use std::time::{Duration, Instant};
use std::{fs, thread};

use permafrost_protocol::manifest::MAX_SMALL_IMAGES;
use permafrost_protocol::pageserver::MAX_SPACES;
use rustix::process::{Pid, Signal};
use rustix::time::{ClockId, clock_gettime};

use crate::origin::{OriginError, ProcessStat};

/// Longest chain of parents that is followed: no real chain is deeper.
const MAX_DEPTH: u32 = 1 << 16;

/// Relation of two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kinship {
    /// One process is the other, or an ancestor of it; or the relation is unknown, because a process of the
    /// chain ended meanwhile.
    Possible,
    /// Neither descends from the other.
    None,
}

/// Images that CRIU writes for a process besides those of its threads and its memory: `mm`, `fs`, `ids`, `fdinfo`,
/// `timens` and others, some of them only now and then.
const IMAGES_PER_PROCESS: usize = 12;

/// Images that CRIU writes for any tree, besides those of its processes.
const IMAGES_PER_TREE: usize = 256;

/// Returns [`Kinship::Possible`] if `one` may be an ancestor of `other`, the same process, or a descendant.
/// Never returns [`Kinship::None`] for two related processes.
pub fn kinship(one: u32, other: u32) -> Kinship {
    if reaches(one, other) == Kinship::None && reaches(other, one) == Kinship::None {
        Kinship::None
    } else {
        Kinship::Possible
    }
}

/// Follows the parents of `from` up to `to`.
fn reaches(from: u32, to: u32) -> Kinship {
    let (mut pid, mut born) = (from, u64::MAX);
    for _ in 0..MAX_DEPTH {
        if pid == to {
            return Kinship::Possible;
        }
        if pid == 0 {
            return Kinship::None;
        }
        match ProcessStat::read(pid) {
            // A parent is never younger than its child, even if it adopted the child: this is another process,
            // which got the pid of a parent that has just ended.
            Ok(stat) if stat.start_ticks > born => return Kinship::Possible,
            Ok(stat) => (pid, born) = (stat.parent, stat.start_ticks),
            Err(_) => return Kinship::Possible,
        }
    }
    Kinship::Possible
}

/// A process tree that is too large for a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the tree has {processes} processes and {threads} threads: some {images} images, and a checkpoint holds {MAX_SMALL_IMAGES}, of at most {MAX_SPACES} processes"
)]
pub struct TooManyTasks {
    /// Number of processes, including the root.
    pub processes: usize,
    /// Number of threads of all processes.
    pub threads: usize,
    /// Approximate number of small images that CRIU would write.
    pub images: usize,
}

/// Checks, while the tree still runs, that it is not too large for a checkpoint. Where the whole machine has
/// fewer tasks, as most do, this reads one small file.
///
/// # Errors
/// The tree is too large.
pub fn check_fits(root: u32) -> Result<(), TooManyTasks> {
    let everywhere = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    if tasks_of_the_machine(&everywhere).is_some_and(|tasks| fits(tasks, tasks).is_ok()) {
        return Ok(());
    }
    let tree = || std::iter::once(root).chain(descendants(root));
    let threads = |pid| fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    fits(tree().count(), tree().map(threads).sum())
}

/// Returns the total in the fourth field of `/proc/loadavg`, `RUNNING/TOTAL` (proc(5)).
fn tasks_of_the_machine(loadavg: &str) -> Option<usize> {
    let (_, total) = loadavg.split_whitespace().nth(3)?.split_once('/')?;
    total.parse().ok()
}

fn fits(processes: usize, threads: usize) -> Result<(), TooManyTasks> {
    let images = processes
        .saturating_mul(IMAGES_PER_PROCESS)
        .saturating_add(threads)
        .saturating_add(IMAGES_PER_TREE);
    if images <= MAX_SMALL_IMAGES && processes <= MAX_SPACES {
        return Ok(());
    }
    Err(TooManyTasks {
        processes,
        threads,
        images,
    })
}

/// Returns the living descendants of `ancestor`, without itself; processes that were started while `/proc` was
/// read may be missing.
pub fn descendants(ancestor: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let parents: Vec<(u32, u32)> = entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| Some((pid, ProcessStat::read(pid).ok()?)))
        .filter(|(_, stat)| stat.state != 'Z')
        .map(|(pid, stat)| (pid, stat.parent))
        .collect();
    let mut found = vec![ancestor];
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        next += 1;
        let children = parents.iter().filter(|(_, of)| *of == parent);
        let fresh: Vec<u32> = children
            .map(|(pid, _)| *pid)
            .filter(|pid| !found.contains(pid))
            .collect();
        found.extend(fresh);
    }
    found.remove(0);
    found
}

/// Resources that a process tree uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessUsage {
    /// Number of living processes.
    pub processes: u32,
    /// Memory that a dump takes, bytes: anonymous, shared and swapped out. Memory that processes of the tree
    /// share is counted for each of them. File pages are not dumped.
    pub resident_bytes: u64,
    /// Processor time, including that of children that have ended.
    pub cpu: Duration,
    /// Time since the root was started.
    pub age: Duration,
}

impl ProcessUsage {
    /// Returns the work that would be lost with the tree: its processor time, but no more than the time since
    /// its start. Threads that work at the same time repeat their work at the same time.
    pub fn progress(&self) -> Duration {
        self.cpu.min(self.age)
    }

    /// Returns the processors that the tree kept busy, thousandths; 0 for a tree that was just started.
    pub fn cpu_millis(&self) -> u64 {
        let millis = self.cpu.as_micros().saturating_mul(1_000);
        let millis = millis.checked_div(self.age.as_micros()).unwrap_or_default();
        u64::try_from(millis).unwrap_or(u64::MAX)
    }
}

/// Returns the resources that a tree uses now, given as [`tree`] returns it. Processes that have ended are left out.
///
/// # Errors
/// The root has ended, or `/proc` cannot be read.
pub fn usage(tree: &[u32]) -> Result<ProcessUsage, OriginError> {
    let (&root, descendants) = tree
        .split_first()
        .ok_or(OriginError::NoProcess { pid: 0 })?;
    let stat = ProcessStat::read(root)?;
    let ticks_per_s = rustix::param::clock_ticks_per_second().max(1);
    let time = |ticks: u64| {
        let rest_ns = ticks % ticks_per_s * 1_000_000_000 / ticks_per_s;
        Duration::from_secs(ticks / ticks_per_s) + Duration::from_nanos(rest_ns)
    };
    // proc(5): starttime is in this clock's time.
    let booted = clock_gettime(ClockId::Boottime);
    let booted = Duration::new(
        u64::try_from(booted.tv_sec).unwrap_or_default(),
        u32::try_from(booted.tv_nsec).unwrap_or_default(),
    );
    let mut usage = ProcessUsage {
        processes: 1,
        resident_bytes: dumped_bytes(root),
        cpu: time(stat.cpu_ticks),
        age: booted.saturating_sub(time(stat.start_ticks)),
    };
    for &pid in descendants {
        if let Ok(stat) = ProcessStat::read(pid) {
            usage.processes += 1;
            usage.resident_bytes = usage.resident_bytes.saturating_add(dumped_bytes(pid));
            usage.cpu += time(stat.cpu_ticks);
        }
    }
    Ok(usage)
}

/// Returns the anonymous, shared and swapped-out memory of one process, bytes; 0 for a process that has ended.
fn dumped_bytes(pid: u32) -> u64 {
    fs::read_to_string(format!("/proc/{pid}/status")).map_or(0, |status| resident_in(&status))
}

/// Returns the anonymous, shared and swapped-out memory in `/proc/PID/status`, bytes. The file has these sizes
/// in kB.
fn resident_in(status: &str) -> u64 {
    let kb = |line: &str| {
        let (name, value) = line.split_once(':')?;
        if !matches!(name, "RssAnon" | "RssShmem" | "VmSwap") {
            return None;
        }
        value.split_whitespace().next()?.parse::<u64>().ok()
    };
    let sum = status.lines().filter_map(kb).fold(0, u64::saturating_add);
    sum.saturating_mul(1024)
}

/// Waits, within `patience`, until killed processes have ended and their pids are free. A dead process whose
/// parent is this process or an ancestor of it is not waited for: that parent may wait for this process, and
/// reaps it when it likes. Returns the processes that are left.
pub fn wait_until_gone(pids: &[u32], patience: Patience) -> Vec<u32> {
    let started = Instant::now();
    let own = ancestors(std::process::id());
    let is_left = |pid: &u32| match ProcessStat::read(*pid) {
        Ok(stat) if stat.state == 'Z' => {
            !own.contains(&stat.parent) && started.elapsed() < patience.to_be_reaped
        }
        Ok(stat) => stat.state != 'X' && started.elapsed() < patience.to_end,
        Err(_) => false,
    };
    let mut left = pids.to_vec();
    let mut pause = Duration::from_micros(200);
    loop {
        left.retain(is_left);
        if left.is_empty() {
            return pids
                .iter()
                .copied()
                .filter(|pid| matches!(ProcessStat::read(*pid), Ok(stat) if !matches!(stat.state, 'Z' | 'X')))
                .collect();
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(5));
    }
}

/// Time limits of [`wait_until_gone`].
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Time for a process to end: freeing a large memory takes a while.
    pub to_end: Duration,
    /// Time for its parent to reap it.
    pub to_be_reaped: Duration,
}

/// Returns a process and its ancestors.
fn ancestors(pid: u32) -> Vec<u32> {
    let mut ancestors = vec![pid];
    while let Some(&last) = ancestors.last() {
        match ProcessStat::read(last) {
            Ok(stat) if stat.parent > 0 && !ancestors.contains(&stat.parent) => {
                ancestors.push(stat.parent);
            }
            _ => break,
        }
    }
    ancestors
}

/// Returns the pid of a process in its innermost pid namespace.
pub fn innermost_pid(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace().next_back()?.parse().ok()
}

/// Kills a process; a process that has already ended is not an error.
pub fn kill(pid: u32) {
    signal(pid, Signal::KILL);
}

/// Signals a process; a process that has already ended, or belongs to another user, is not an error.
pub fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// Returns a process and, behind it, its living descendants, as [`descendants`] finds them. Reads one file for each
/// process of the machine.
pub fn tree(root: u32) -> Vec<u32> {
    std::iter::once(root).chain(descendants(root)).collect()
}

/// Returns true if `pid` is `root` or a descendant of it. Reads one file for each generation between them.
pub fn is_in_tree(pid: u32, root: u32) -> bool {
    ancestors(pid).contains(&root)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn what_is_dumped_is_summed_and_files_are_not() {
        let status = "Name:\tx: y\nVmRSS:\t    900 kB\nRssAnon:\t     100 kB\nRssFile:\t     700 kB\n\
            RssShmem:\t      20 kB\nVmSwap:\t       3 kB\n";
        assert_eq!(resident_in(status), 123 * 1024);
        // A kernel thread has none of them.
        assert_eq!(resident_in("Name:\tkthreadd\n"), 0);
    }

    #[test]
    fn ancestors_and_descendants_are_kin_and_siblings_are_not() {
        let mut shell = Command::new("sh")
            .args(["-c", "sleep 600 & echo $!; wait"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(shell.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let grandchild: u32 = line.trim().parse().unwrap();
        let mut sibling = Command::new("sleep").arg("600").spawn().unwrap();
        let own = std::process::id();

        assert_eq!(kinship(own, grandchild), Kinship::Possible);
        assert_eq!(kinship(grandchild, own), Kinship::Possible);
        assert_eq!(kinship(shell.id(), shell.id()), Kinship::Possible);
        assert_eq!(kinship(sibling.id(), grandchild), Kinship::None);
        assert_eq!(kinship(sibling.id(), 5_000_000), Kinship::Possible);

        let found = descendants(own);
        assert!(
            [shell.id(), grandchild, sibling.id()]
                .iter()
                .all(|pid| found.contains(pid))
        );
        assert!(!found.contains(&own) && descendants(shell.id()) == [grandchild]);
        assert_eq!(innermost_pid(grandchild), Some(grandchild));

        kill(grandchild);
        kill(sibling.id());
        shell.wait().unwrap();
        sibling.wait().unwrap();
    }

    #[test]
    fn killed_processes_are_waited_for_and_their_zombies_only_where_somebody_else_has_to_reap_them()
    {
        let patience = Patience {
            to_end: Duration::from_secs(30),
            to_be_reaped: Duration::from_millis(300),
        };
        // A child of this process that dies in a while, and one of a shell that never waits.
        let mut own = Command::new("sleep").arg("0.2").spawn().unwrap();
        let mut shell = Command::new("sh")
            .args(["-c", "sleep 0.2 & echo $!; exec sleep 600"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(shell.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let others: u32 = line.trim().parse().unwrap();
        assert!(wait_until_gone(&[own.id()], patience).is_empty());
        assert_eq!(ProcessStat::read(own.id()).unwrap().state, 'Z');
        let waits = Instant::now();
        assert!(wait_until_gone(&[others], patience).is_empty());
        assert!(waits.elapsed() < patience.to_end);
        assert_eq!(ProcessStat::read(others).unwrap().state, 'Z');
        // A process that does not die is returned.
        let none = Patience {
            to_end: Duration::ZERO,
            ..patience
        };
        assert_eq!(
            wait_until_gone(&[shell.id(), 5_000_000], none),
            [shell.id()]
        );
        kill(shell.id());
        shell.wait().unwrap();
        own.wait().unwrap();
    }

    #[test]
    fn a_trees_use_is_that_of_all_its_processes() {
        // The child holds 64 MiB, and works.
        let mut shell = Command::new("sh")
            .args(["-c", "dd if=/dev/zero of=/dev/null bs=64M & wait"])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut seen = usage(&tree(shell.id())).unwrap();
        // Until the kernel's clock has ticked for it, and its buffer is full.
        while seen.cpu.is_zero() || seen.resident_bytes < 64 << 20 {
            seen = usage(&tree(shell.id())).unwrap();
        }
        assert_eq!(seen.processes, 2);
        assert!(seen.resident_bytes < 128 << 20, "{seen:?}");
        assert!(seen.progress() <= seen.age);
        assert!(seen.cpu_millis() > 0);
        for pid in descendants(shell.id()) {
            kill(pid);
        }
        shell.wait().unwrap();
        assert!(matches!(
            usage(&[5_000_000]),
            Err(OriginError::NoProcess { .. })
        ));
    }

    #[test]
    fn progress_is_no_more_than_the_time_it_took() {
        let usage = |cpu_s, age_s| ProcessUsage {
            processes: 1,
            resident_bytes: 0,
            cpu: Duration::from_secs(cpu_s),
            age: Duration::from_secs(age_s),
        };
        // Eight threads for ten seconds, and one that slept most of the time.
        assert_eq!(usage(80, 10).progress(), Duration::from_secs(10));
        assert_eq!(usage(80, 10).cpu_millis(), 8_000);
        assert_eq!(usage(3, 10).progress(), Duration::from_secs(3));
        assert_eq!(usage(0, 0).cpu_millis(), 0);
    }

    #[test]
    fn a_tree_that_is_too_large_is_told_before_it_is_frozen() {
        assert!(check_fits(std::process::id()).is_ok());
        assert!(fits(1, 100_000).is_ok());
        let error = fits(1, 200_000).unwrap_err();
        assert!(error.to_string().contains("200000 threads"), "{error}");
        assert!(fits(9_000, 9_000).is_ok());
        fits(20_000, 20_000).unwrap_err();
        fits(usize::MAX, 1).unwrap_err();
        let line = "0.00 0.01 0.05 2/1234 5678\n";
        assert_eq!(tasks_of_the_machine(line), Some(1234));
        assert_eq!(tasks_of_the_machine(""), None);
    }
}
