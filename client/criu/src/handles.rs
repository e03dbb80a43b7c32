//! Handles of processes (pidfd). A pid may pass to another process when its process has ended; a handle never does.

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::processes;

/// Interval at which the end of killed processes is polled.
const TICK: Duration = Duration::from_millis(5);

/// A handle of one process.
#[derive(Debug)]
pub struct ProcessHandle {
    pid: u32,
    fd: OwnedFd,
}

impl ProcessHandle {
    /// Returns the pid that the process had when it was opened.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Opens the process that has `pid` now.
    ///
    /// # Errors
    /// There is no such process; no descriptor is left.
    pub fn open(pid: u32) -> io::Result<Self> {
        let known = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let known = known.ok_or(io::ErrorKind::InvalidInput)?;
        let fd = pidfd_open(known, PidfdFlags::empty())?;
        Ok(Self { pid, fd })
    }

    /// Returns another handle of the process.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn try_clone(&self) -> io::Result<Self> {
        let fd = self.fd.try_clone()?;
        Ok(Self { pid: self.pid, fd })
    }

    /// Kills the process; one that has ended already is not an error.
    pub fn kill(&self) {
        // Another failure shows when the process does not end.
        let _ = pidfd_send_signal(&self.fd, Signal::KILL);
    }

    /// Signals the process; one that has ended already is not an error.
    ///
    /// # Errors
    /// The process belongs to another user.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.fd, signal) {
            Err(Errno::SRCH) => Ok(()),
            sent => Ok(sent?),
        }
    }

    /// Returns true if the process has ended, reaped or not.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec::default())), Ok(ready) if ready > 0)
    }
}

/// Handles of the processes of some trees.
#[derive(Debug, Default)]
pub struct TreeHandles(Vec<ProcessHandle>);

impl TreeHandles {
    /// Returns the pids of the processes that have not ended.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        self.living().map(|process| process.pid).collect()
    }

    /// Adds a process.
    pub fn push(&mut self, process: ProcessHandle) {
        self.0.push(process);
    }

    /// Adds the descendants that the processes have now. Children of a process that has ended belong to another one.
    pub fn add_descendants(&mut self) {
        let mut known: HashSet<u32> = self.living().map(|process| process.pid).collect();
        let mut below = HashSet::new();
        let mut new = Vec::new();
        for root in self.living() {
            // A tree is read from its root only.
            if below.contains(&root.pid) {
                continue;
            }
            for pid in processes::descendants(root.pid) {
                below.insert(pid);
                if known.contains(&pid) {
                    continue;
                }
                let Ok(process) = ProcessHandle::open(pid) else {
                    continue;
                };
                // The pid may have passed to another process since it was read.
                if processes::is_in_tree(pid, root.pid) && !process.has_ended() && !root.has_ended()
                {
                    known.insert(pid);
                    new.push(process);
                }
            }
        }
        self.0.append(&mut new);
    }

    /// Signals the processes that have not ended; failures are left to [`TreeHandles::end`].
    pub fn signal(&self, signal: Signal) {
        for process in &self.0 {
            let _ = process.signal(signal);
        }
    }

    /// Returns the number of processes that have not ended.
    pub fn living_count(&self) -> usize {
        self.living().count()
    }

    /// Drops the handles of processes that have ended.
    pub fn remove_ended(&mut self) {
        self.0.retain(|process| !process.has_ended());
    }

    /// Kills the processes and their descendants, and waits until they have ended. Returns the number of those that have
    /// not within `patience`.
    pub fn end(&mut self, patience: Duration) -> usize {
        let started = Instant::now();
        loop {
            self.add_descendants();
            self.0.iter().for_each(ProcessHandle::kill);
            self.remove_ended();
            if self.0.is_empty() || started.elapsed() >= patience {
                return self.0.len();
            }
            thread::sleep(TICK);
        }
    }

    fn living(&self) -> impl Iterator<Item = &ProcessHandle> {
        self.0.iter().filter(|process| !process.has_ended())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::io::{BufRead as _, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_tree_is_ended_with_those_whose_parents_are_gone_and_nothing_else() {
        let mut other = Command::new("sleep").arg("600").spawn().unwrap();
        let mut shell = Command::new("sh")
            .args([
                "-c",
                "sh -c 'sleep 600 & echo orphan $!; wait' & echo parent $!; wait",
            ])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let told = BufReader::new(shell.stdout.take().unwrap()).lines();
        let pids: HashMap<String, u32> = told
            .take(2)
            .map(|line| {
                let line = line.unwrap();
                let (who, pid) = line.split_once(' ').unwrap();
                (who.to_owned(), pid.parse().unwrap())
            })
            .collect();
        let (parent, orphan) = (pids["parent"], pids["orphan"]);
        let mut tree = TreeHandles::default();
        tree.push(ProcessHandle::open(shell.id()).unwrap());
        tree.add_descendants();
        tree.add_descendants();
        assert_eq!(tree.0.len(), 3);

        ProcessHandle::open(parent).unwrap().kill();
        let orphaned = ProcessHandle::open(orphan).unwrap();
        while processes::is_in_tree(orphan, parent) {
            thread::sleep(TICK);
        }
        assert!(!orphaned.has_ended());
        assert_eq!(tree.end(Duration::from_secs(30)), 0);
        assert!(orphaned.has_ended());
        assert!(!ProcessHandle::open(other.id()).unwrap().has_ended());
        shell.wait().unwrap();

        // The handle of a process that was reaped kills no other.
        let gone = ProcessHandle::open(other.id()).unwrap();
        gone.kill();
        other.wait().unwrap();
        assert!(gone.has_ended());
        gone.kill();
        assert!(ProcessHandle::open(5_000_000).is_err());
    }
}
