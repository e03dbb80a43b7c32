//! Keeper of the userfaultfds of lazily restored processes, in a process of its own.
//!
//! CRIU hands the processes over to the keeper, which hands duplicates to the daemon. So while the keeper lives, nothing
//! that happens to the daemon lets a missing page read as zeros: the process waits for it, until the keeper has handed it
//! over to another daemon, or ends it.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use permafrost_protocol::control::request;
use permafrost_transport::framing;
use permafrost_userfault::Userfault;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;

use super::registering::{self, LazyMemory};
use super::{LazyError, PROBE_PERIOD, RESTORE_FINISHED, TAKEOVER};
use permafrost_criu::handles::{ProcessHandle, TreeHandles};
use permafrost_criu::processes;

/// Time for killed processes to end: freeing a large memory takes a while.
const PATIENCE: Duration = Duration::from_secs(30);

/// Interval at which the end of CRIU is polled.
const GRACE_TICK: Duration = Duration::from_millis(20);

/// Restore that a keeper passes on.
#[derive(Clone, Copy, Debug)]
pub struct RelayedRestore<'a> {
    /// Connection of CRIU.
    pub criu: &'a UnixStream,
    /// Socket to which CRIU's action script connects.
    pub listener: &'a UnixListener,
    /// Connection to the daemon.
    pub daemon: &'a UnixStream,
    /// Directory from which CRIU restores.
    pub images: &'a Path,
    /// Pid of the process from which CRIU descends, or whose child's sibling it is.
    pub command: u32,
}

/// Keeper of the processes of one lazy restore.
#[derive(Default)]
pub struct LazyKeeper {
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    userfaults: Vec<KeptUserfault>,
    /// Pids of the processes that CRIU has handed over, as they were dumped.
    dumped: Vec<u32>,
    /// Number of forked processes whose userfaultfds have come.
    forks: u64,
    /// Log of the events that the daemon has read.
    log: Option<OwnedFd>,
    /// True once all processes run.
    is_restored: bool,
    /// True if the userfaultfd of a fork could not be kept.
    has_lost_fork: bool,
    processes: TreeHandles,
    /// Pids in this namespace, by pids in the processes' own one.
    pids: HashMap<u32, u32>,
    /// CRIU, once it has come.
    criu: Option<ConnectedCriu>,
    has_forked: bool,
    is_ending: bool,
}

/// Userfaultfd of a process.
struct KeptUserfault {
    /// Number of the process in the restore: see [`request::Takeover`].
    number: u64,
    /// Pid in the process's own namespace; `None` of a process that was forked meanwhile.
    pid: Option<u32>,
    userfault: Userfault,
}

/// CRIU, which hands processes over.
struct ConnectedCriu {
    process: ProcessHandle,
    /// CRIU and, once the restore is given up, its descendants.
    tree: TreeHandles,
    socket: UnixStream,
}

impl ConnectedCriu {
    fn open(pid: u32, socket: &UnixStream) -> io::Result<Self> {
        let process = ProcessHandle::open(pid)?;
        let mut tree = TreeHandles::default();
        tree.push(process.try_clone()?);
        let socket = socket.try_clone()?;
        Ok(Self {
            process,
            tree,
            socket,
        })
    }
}

fn failed(error: io::Error) -> LazyError {
    LazyError::io("pass on CRIU's processes")(error)
}

impl LazyKeeper {
    /// Passes on to the daemon what CRIU says and hands over, and keeps duplicates, until all processes run or CRIU gives
    /// up. Registers their memory while CRIU waits for its action script.
    ///
    /// # Errors
    /// CRIU breaks the protocol, or does not wait; memory cannot be registered; no descriptor is left.
    pub fn relay(&self, restore: RelayedRestore<'_>) -> Result<(), LazyError> {
        let peer = socket_peercred(restore.criu).map_err(|errno| failed(errno.into()))?;
        let criu_pid = u32::try_from(peer.pid.as_raw_nonzero().get()).unwrap_or_default();
        self.relay_from(criu_pid, restore)
    }

    fn relay_from(&self, criu_pid: u32, restore: RelayedRestore<'_>) -> Result<(), LazyError> {
        let RelayedRestore {
            criu,
            listener,
            images,
            ..
        } = restore;
        self.kept.lock().criu = Some(ConnectedCriu::open(criu_pid, criu).map_err(failed)?);
        listener.set_nonblocking(true).map_err(failed)?;
        let mut scripts = Vec::new();
        let mut is_registered = false;
        loop {
            let mut fds = [
                PollFd::new(criu, PollFlags::IN),
                PollFd::new(listener, PollFlags::IN),
            ];
            let at_once = Timespec::default();
            match poll(&mut fds, (!scripts.is_empty()).then_some(&at_once)) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(failed(errno.into())),
                Ok(_) => {}
            }
            let [from_criu, script] = fds.map(|fd| !fd.revents().is_empty());
            if from_criu {
                if !self.relay_word(criu_pid, is_registered, restore)? {
                    return Ok(());
                }
            } else if !scripts.is_empty() {
                // CRIU had handed over all processes when it started the first script.
                if !is_registered {
                    self.register(images)?;
                    is_registered = true;
                }
                scripts.drain(..).for_each(registering::answer);
            }
            if script {
                scripts.extend(registering::accept(listener)?);
            }
        }
    }

    /// Passes on CRIU's next word, and the userfaultfd that may follow. Returns false after the last one.
    fn relay_word(
        &self,
        criu_pid: u32,
        is_registered: bool,
        restore: RelayedRestore<'_>,
    ) -> Result<bool, LazyError> {
        let RelayedRestore {
            mut criu,
            mut daemon,
            command,
            ..
        } = restore;
        let mut word = [0; 4];
        match criu.read_exact(&mut word) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(false),
            read => read.map_err(failed)?,
        }
        let number = i32::from_ne_bytes(word);
        if number == RESTORE_FINISHED && !is_registered {
            return Err(LazyError::NotHeld);
        }
        if number == RESTORE_FINISHED {
            self.kept.lock().is_restored = true;
        }
        // A daemon that has gone away takes nothing. The processes are ended then, which CRIU finds out.
        if let Err(error) = daemon.write_all(&word) {
            tracing::debug!(%error, "the daemon does not read");
        }
        match number {
            RESTORE_FINISHED => return Ok(false),
            // A zombie, which has no memory.
            ..0 => {}
            pid => {
                let fd = framing::recv_fd(criu).map_err(failed)?;
                let userfault = Userfault::new(fd).map_err(failed)?;
                let sent = framing::send_fd(daemon, userfault.as_fd());
                if let Err(error) = sent {
                    tracing::debug!(%error, "the daemon does not read");
                }
                self.add(pid.unsigned_abs(), userfault, [criu_pid, command]);
            }
        }
        Ok(true)
    }

    /// Registers the memory of all processes, whose images are in a directory. None of them has run.
    fn register(&self, images: &Path) -> Result<(), LazyError> {
        let kept = self.kept.lock();
        kept.userfaults.iter().try_for_each(|kept| {
            let Some(pid) = kept.pid else {
                return Ok(());
            };
            let memory = LazyMemory::read(images, pid)?;
            registering::register(&kept.userfault, &memory.mappings)
        })
    }

    /// Returns true if CRIU has come.
    pub fn has_criu(&self) -> bool {
        self.kept.lock().criu.is_some()
    }

    /// Keeps the userfaultfd of a process that one of the processes has forked.
    ///
    /// # Errors
    /// It is no userfaultfd.
    pub fn add_fork(&self, userfault: OwnedFd) -> io::Result<()> {
        let userfault = Userfault::new(userfault);
        let mut kept = self.kept.lock();
        kept.has_forked = true;
        kept.has_lost_fork |= userfault.is_err();
        let number = kept.dumped.len() as u64 + kept.forks;
        kept.forks += 1;
        kept.userfaults.push(KeptUserfault {
            number,
            pid: None,
            userfault: userfault?,
        });
        tracing::info!(
            event = "lazy-process-forked",
            "a process has forked before all of its memory was there"
        );
        Ok(())
    }

    /// Keeps the log of the events that a daemon reads from now on.
    pub fn set_log(&self, log: OwnedFd) {
        self.kept.lock().log = Some(log);
    }

    /// Returns true if another daemon can take the processes over: all of them run, and the keeper has all there are, and
    /// the log.
    pub fn can_be_taken_over(&self) -> bool {
        let kept = self.kept.lock();
        kept.is_restored && !kept.has_lost_fork && kept.log.is_some()
    }

    /// Returns what another daemon needs to take the processes over, and the log of the one that has ended; `None` if it
    /// cannot.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn takeover(&self) -> io::Result<Option<(request::Takeover, OwnedFd)>> {
        if !self.can_be_taken_over() {
            return Ok(None);
        }
        let kept = self.kept.lock();
        let takeover = request::Takeover {
            pids: kept.dumped.clone(),
            forks: kept.forks,
        };
        let log = kept.log.as_ref().map(OwnedFd::try_clone).transpose()?;
        Ok(log.map(|log| (takeover, log)))
    }

    /// Hands the processes over to another daemon.
    ///
    /// # Errors
    /// The daemon does not read.
    pub fn hand_over(&self, mut daemon: &UnixStream) -> io::Result<()> {
        let kept = self.kept.lock();
        daemon.write_all(&TAKEOVER.to_ne_bytes())?;
        for kept in &kept.userfaults {
            let number = i32::try_from(kept.number).map_err(io::Error::other)?;
            daemon.write_all(&number.to_ne_bytes())?;
            framing::send_fd(daemon, kept.userfault.as_fd())?;
        }
        daemon.write_all(&RESTORE_FINISHED.to_ne_bytes())
    }

    /// Looks for children of the processes, and lets go of those that have ended. Called several times a second.
    pub fn refresh(&self) {
        let mut kept = self.kept.lock();
        if std::mem::take(&mut kept.has_forked) {
            kept.processes.add_descendants();
        }
        kept.userfaults.retain(|kept| !kept.userfault.is_gone());
        kept.processes.remove_ended();
    }

    /// Begins to end the processes, because pages of them cannot be brought. CRIU may hand over others still: they are
    /// killed as they come.
    pub fn begin_end(&self) {
        let mut kept = self.kept.lock();
        kept.is_ending = true;
        kept.processes.add_descendants();
        tracing::error!(event = "lazy-processes-ended-by-force", pids = ?kept.processes.pids(), "ending the processes, as memory of them is missing");
        kept.processes.end(Duration::ZERO);
    }

    /// Ends CRIU, unless nobody comes before `is_relayed` returns true, as it does once [`relay`](Self::relay) has
    /// returned. CRIU undoes its work when the processes end that it has handed over. It may not notice their end, and
    /// wait for them for ever: it is killed `grace` after it has come.
    pub fn end_criu(&self, is_relayed: &dyn Fn() -> bool, grace: Duration) {
        let mut since = None;
        loop {
            let is_relayed = is_relayed();
            match self.follow_criu() {
                None if is_relayed => return,
                None => {}
                Some(has_ended) => {
                    let since = *since.get_or_insert_with(Instant::now);
                    if (is_relayed && has_ended) || since.elapsed() >= grace {
                        break;
                    }
                }
            }
            thread::sleep(GRACE_TICK);
        }
        let Some(mut criu) = self.kept.lock().criu.take() else {
            return;
        };
        // Processes that were not handed over yet have CRIU's end of the socket.
        criu.tree.end(PATIENCE);
        // What was handed over until now is still received.
        let _ = criu.socket.shutdown(Shutdown::Both);
    }

    /// Takes handles of CRIU's descendants. Returns true if CRIU has ended; `None` if it has not come.
    fn follow_criu(&self) -> Option<bool> {
        let mut kept = self.kept.lock();
        let criu = kept.criu.as_mut()?;
        criu.tree.add_descendants();
        Some(criu.process.has_ended())
    }

    /// Kills all processes, and waits up to 30 s for their end.
    pub fn end(&self) {
        let mut kept = self.kept.lock();
        match kept.processes.end(PATIENCE) {
            0 => tracing::info!(event = "lazy-processes-ended", "the processes have ended"),
            _ => {
                tracing::error!(event = "lazy-processes-not-ended", pids = ?kept.processes.pids(), "processes were killed, and have not ended")
            }
        }
    }

    /// Waits until no process is left that could access a missing page. One that was not found, because its parents had
    /// ended before it was looked for, waits for its page as long.
    pub fn hold_until_gone(&self) {
        let mut told = false;
        loop {
            self.refresh();
            let waiting = self.kept.lock().userfaults.len();
            if waiting == 0 {
                return;
            }
            if !std::mem::replace(&mut told, true) {
                tracing::warn!(
                    event = "lazy-processes-waiting",
                    waiting,
                    "processes wait for their memory: those that were not found are not ended"
                );
            }
            thread::sleep(PROBE_PERIOD);
        }
    }

    fn add(&self, pid: u32, userfault: Userfault, ancestors: [u32; 2]) {
        let mut kept = self.kept.lock();
        let number = kept.dumped.len() as u64;
        kept.dumped.push(pid);
        kept.userfaults.push(KeptUserfault {
            number,
            pid: Some(pid),
            userfault,
        });
        let Some(process) = kept.find(pid, ancestors) else {
            tracing::warn!(
                event = "lazy-process-not-found",
                pid,
                "restored process not found: it cannot be ended if its memory does not come"
            );
            return;
        };
        tracing::info!(
            event = "lazy-process-restored",
            pid = process.pid(),
            dumped_as = pid,
            "process restored, its memory follows"
        );
        if kept.is_ending {
            process.kill();
        }
        kept.processes.push(process);
    }
}

impl Kept {
    /// Opens the process that has `pid` in its own namespace, below one of `ancestors`.
    fn find(&mut self, pid: u32, ancestors: [u32; 2]) -> Option<ProcessHandle> {
        if !self.pids.contains_key(&pid) {
            // All processes are there before CRIU hands the first one over.
            let own = std::process::id();
            let below = ancestors.into_iter().flat_map(processes::descendants);
            self.pids = below
                .filter(|found| *found != own && !ancestors.contains(found))
                .filter_map(|found| Some((processes::innermost_pid(found)?, found)))
                .collect();
        }
        let found = *self.pids.get(&pid)?;
        let process = ProcessHandle::open(found).ok()?;
        // The pid may have passed to another process before it was opened.
        (processes::innermost_pid(found) == Some(pid)).then_some(process)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::process::{Command, Stdio};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_criu_that_comes_late_is_ended_with_those_that_hold_its_socket() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (daemon, _) = UnixStream::pair().unwrap();
        let work = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(work.path().join("socket")).unwrap();
        // That of a process that is not found.
        let held = theirs.try_clone().unwrap();
        // It restores a process, hands nothing over, and waits for ever.
        let mut criu = Command::new("sh")
            .args(["-c", "exec 3<&0; sleep 600 <&3 & echo $!; wait"])
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut told = BufReader::new(criu.stdout.take().unwrap());
        let mut line = String::new();
        told.read_line(&mut line).unwrap();
        let restored = ProcessHandle::open(line.trim().parse().unwrap()).unwrap();

        let keeper = LazyKeeper::default();
        let (connects, connected) = mpsc::channel();
        let (returns, returned) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let (keeper, pid) = (&keeper, criu.id());
            let relaying = scope.spawn(move || {
                connected.recv().unwrap();
                let restore = RelayedRestore {
                    criu: &ours,
                    listener: &listener,
                    daemon: &daemon,
                    images: Path::new("/"),
                    command: std::process::id(),
                };
                keeper.relay_from(pid, restore)
            });
            scope.spawn(move || {
                let has_returned = returned.recv_timeout(PATIENCE).is_ok();
                let has_ended = restored.has_ended();
                // Otherwise a failure of this test would have no end.
                drop(held);
                restored.kill();
                assert!(has_returned && has_ended);
            });
            keeper.begin_end();
            assert!(!keeper.has_criu());
            // CRIU comes after this was found out.
            let is_relayed = || {
                let _ = connects.send(());
                relaying.is_finished()
            };
            keeper.end_criu(&is_relayed, Duration::ZERO);
            relaying.join().unwrap().unwrap();
            returns.send(()).unwrap();
        });
        criu.wait().unwrap();
    }
}
