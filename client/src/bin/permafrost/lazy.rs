//! The transfer of pages to processes that were restored lazily.
//!
//! The daemon answers the processes' page faults. This command keeps duplicates of their userfaultfds until it has
//! brought everything: if the daemon ends before, the processes wait for their pages, and are ended here, instead of
//! reading zeros.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;
use std::time::Duration;

use permafrost_criu::processes::{self, Patience};
use permafrost_protocol::control::{LazyServed, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::Failure;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::progress::ProgressDisplay;
use permafrost_transport::control::{Connection, ControlError};
use serde::Serialize;

use crate::delivery::{Wanted, begin};

/// Name of the socket to which `criu restore --lazy-pages` connects, in its work directory (`criu/uffd.c`).
const SOCKET: &str = "lazy-pages.socket";

/// Rounds in which the processes of a tree are killed.
const KILLS: usize = 10;

/// Time for killed processes to end.
const KILL_PATIENCE: Patience = Patience {
    to_end: Duration::from_secs(30),
    to_be_reaped: Duration::ZERO,
};

/// Options of a lazy restore.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LazyOptions {
    /// Bring only pages that are accessed.
    pub(crate) touched_only: bool,
    /// Bring first the pages that an earlier restore accessed.
    pub(crate) hybrid: bool,
}

/// Report on the pages that were brought while the process ran.
#[derive(Debug, Serialize)]
pub(crate) struct LazyReport {
    /// Duration from the start of the command until the process ran.
    pub(crate) running_us: u64,
    /// Number of page faults that were answered.
    pub(crate) faults: u64,
    /// Number of bytes brought, zero pages included.
    pub(crate) bytes: u64,
}

/// Listens for the CRIU that runs in `work`.
pub(crate) fn listen(work: &Path) -> Result<UnixListener, Failure> {
    let failed = |error| Failure::io("listen in", work, &error);
    let directory = File::open(work).map_err(failed)?;
    // The path of a socket may have 107 bytes; CRIU itself uses a relative one.
    let short = format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd());
    UnixListener::bind(short).map_err(failed)
}

/// A transfer of pages that is under way.
pub(crate) struct LazyTransfer {
    connection: Connection,
    waited: Duration,
}

impl LazyTransfer {
    /// Has the daemon accept the CRIU that will connect to `listener`. Returns when CRIU may be started.
    pub(crate) fn begin(
        context: &Context,
        interrupts: &Interrupts,
        mut connection: Connection,
        wanted: Wanted<'_>,
        listener: UnixListener,
        options: LazyOptions,
    ) -> Result<Self, Failure> {
        let Wanted { name, turn, .. } = wanted;
        let request = request::Thaw {
            checkpoint: name.to_owned(),
            touched_only: options.touched_only,
            hybrid: options.hybrid,
            priority: turn.priority,
            deadline_ms: turn.deadline_ms(),
            reservation: turn.reservation.token()?,
        };
        let waited = begin(
            context,
            interrupts,
            &mut connection,
            request,
            &listener,
            name,
        )?;
        Ok(Self { connection, waited })
    }

    /// Returns the time in the queue.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    /// Ends a transfer whose CRIU has failed. Returns the daemon's reason, if it has one of its own.
    pub(crate) fn give_up(mut self) -> Option<ControlError> {
        self.connection.end_requests();
        self.connection.finish::<request::Thaw>(&mut |_| {}).err()
    }

    /// Waits until all pages were brought to the processes of `pid`'s tree. If they cannot be, ends the processes.
    pub(crate) fn finish(
        self,
        context: &Context,
        interrupts: &Interrupts,
        name: &str,
        pid: u32,
    ) -> Result<LazyServed, Failure> {
        context.remark(&format!("{name} runs as process {pid}; its memory follows"));
        let mut display = ProgressDisplay::new(context, format!("memory of {name}"));
        let failure = match self.receive(&mut |done, total| display.update(done, total)) {
            Ok(served) => return Ok(served),
            Err((error, kept)) => {
                // A daemon that has given up does not bring the rest.
                if interrupts.came() && !matches!(error, ControlError::Refused { .. }) {
                    return Err(Failure::interrupted(format!(
                        "interrupted: {name} goes on as process {pid}; the daemon brings the rest of its memory"
                    )));
                }
                end(pid, kept);
                Failure::from(error)
            }
        };
        Err(failure.during(format!(
            "restore {name}: process {pid} was ended, as pages of it are missing"
        )))
    }

    /// Does what [`finish`](Self::finish) does, on a thread of its own: this command waits for the process.
    pub(crate) fn finish_beside(self, name: &str, pid: u32) {
        let name = name.to_owned();
        thread::spawn(move || {
            if let Err((error, kept)) = self.receive(&mut |_, _| {}) {
                end(pid, kept);
                let cause = Failure::from(error).message;
                eprintln!("{name}: process {pid} was ended, as pages of it are missing: {cause}");
            }
        });
    }

    /// Waits for the daemon's last reply. A failure comes with the userfaultfds, which must be open until the
    /// processes have ended.
    fn receive(
        mut self,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<LazyServed, (ControlError, Vec<OwnedFd>)> {
        let mut kept = Vec::new();
        let received = self
            .connection
            .finish_with::<request::Thaw>(&mut |so_far, fds| match fds.is_empty() {
                true => progress(so_far.done_bytes, so_far.total_bytes),
                false => kept.extend(fds),
            });
        received.map_err(|error| (error, kept))
    }
}

/// Ends a process tree, and only then lets its missing pages go.
fn end(pid: u32, kept: Vec<OwnedFd>) {
    // One may fork while the others are killed.
    for _ in 0..KILLS {
        let tree = processes::tree(pid);
        tree.iter().copied().for_each(processes::kill);
        let left = processes::wait_until_gone(&tree, KILL_PATIENCE);
        if left.is_empty() && processes::descendants(pid).is_empty() {
            break;
        }
    }
    drop(kept);
}
