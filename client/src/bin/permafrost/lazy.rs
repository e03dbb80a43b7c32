//! The transfer of pages to processes that were restored lazily.
//!
//! The daemon answers the processes' page faults. A keeper, a process of its own, has duplicates of their userfaultfds
//! until everything was brought: if the daemon ends before, the processes wait for their pages, and the keeper hands them
//! over to the daemon that comes in its place. If none comes, it ends them, so that they do not read zeros. This command
//! can go.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread;
use std::time::Duration;

use permafrost_protocol::control::{LazyServed, Progress, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::progress::ProgressDisplay;
use permafrost_transport::control::{Connection, ControlError};
use serde::Serialize;

use crate::delivery::{Wanted, begin};
use crate::lazy_keeper;

/// Name of the socket to which `criu restore --lazy-pages` connects, in its work directory (`criu/uffd.c`).
pub(crate) const SOCKET: &str = "lazy-pages.socket";

/// Options of a lazy restore.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LazyOptions {
    /// Bring only pages that are accessed.
    pub(crate) touched_only: bool,
    /// Bring first the pages that an earlier restore accessed.
    pub(crate) hybrid: bool,
    /// Time for a daemon that has ended to come back.
    pub(crate) daemon_timeout: Duration,
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

/// A transfer of pages that is under way.
pub(crate) struct LazyTransfer {
    /// Connection to the keeper.
    connection: Connection,
    keeper: Child,
    /// Log of the keeper.
    log: PathBuf,
    waited: Duration,
}

impl LazyTransfer {
    /// Has a keeper accept the CRIU that will connect to `listener`. Returns when CRIU may be started.
    pub(crate) fn begin(
        context: &Context,
        interrupts: &Interrupts,
        wanted: Wanted<'_>,
        listener: UnixListener,
        options: LazyOptions,
    ) -> Result<Self, Failure> {
        let Wanted {
            name, images, turn, ..
        } = wanted;
        let request = request::Thaw {
            checkpoint: name.to_owned(),
            touched_only: options.touched_only,
            hybrid: options.hybrid,
            takeover: None,
            priority: turn.priority,
            deadline_ms: turn.deadline_ms(),
            reservation: turn.reservation.token()?,
        };
        let (mut connection, keeper) = lazy_keeper::start(context, images, options.daemon_timeout)?;
        interrupts.end(&connection)?;
        let waited = begin(
            context,
            interrupts,
            &mut connection,
            request,
            &listener,
            name,
        )?;
        Ok(Self {
            connection,
            keeper,
            log: lazy_keeper::log_path(context),
            waited,
        })
    }

    /// Returns the pid of the keeper.
    pub(crate) fn keeper(&self) -> u32 {
        self.keeper.id()
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

    /// Waits until all pages were brought to the processes of `pid`'s tree. If they cannot be, the keeper has ended them.
    pub(crate) fn finish(
        mut self,
        context: &Context,
        interrupts: &Interrupts,
        name: &str,
        pid: u32,
    ) -> Result<LazyServed, Failure> {
        context.remark(&format!("{name} runs as process {pid}; its memory follows"));
        let mut display = ProgressDisplay::new(context, format!("memory of {name}"));
        let served = self.receive(&mut |so_far| {
            if so_far.daemon_ended {
                context.remark(&format!(
                    "permafrostd brings no more memory of {name}: process {pid} waits for it to come back"
                ));
            } else {
                display.update(so_far.done_bytes, so_far.total_bytes);
            }
        });
        let log = self.log;
        served.map_err(|error| {
            // A daemon that has given up does not bring the rest.
            if interrupts.came() && matches!(error, ControlError::Closed) {
                return Failure::interrupted(format!(
                    "interrupted: {name} goes on as process {pid}; the daemon brings the rest of its memory"
                ));
            }
            explain(name, pid, &log, error)
        })
    }

    /// Does what [`finish`](Self::finish) does, on a thread of its own: this command waits for the process.
    pub(crate) fn finish_beside(mut self, name: &str, pid: u32) {
        let name = name.to_owned();
        thread::spawn(move || {
            if let Err(error) = self.receive(&mut |_| {}) {
                eprintln!("{}", explain(&name, pid, &self.log, error).message);
            }
        });
    }

    /// Waits for the last reply.
    fn receive(&mut self, progress: &mut dyn FnMut(&Progress)) -> Result<LazyServed, ControlError> {
        let served = self.connection.finish::<request::Thaw>(progress)?;
        // It has nothing left to do.
        let _ = self.keeper.wait();
        Ok(served)
    }
}

/// Returns the failure of a transfer to processes that run, with the keeper's log.
fn explain(name: &str, pid: u32, log: &Path, error: ControlError) -> Failure {
    let mut failure = failure_of(name, pid, error);
    failure.log = log.exists().then(|| log.to_owned());
    failure
}

fn failure_of(name: &str, pid: u32, error: ControlError) -> Failure {
    let cause = match error {
        ControlError::Closed | ControlError::Receive(_) => {
            let message = format!(
                "restore {name}: the keeper of process {pid} was ended; the daemon brings the rest of its memory"
            );
            return Failure::new(Code::Internal, message).hint(format!(
                "end process {pid} if permafrostd ends before all of its memory is there: it would read zeros"
            ));
        }
        // The keeper's word for a daemon that went away.
        ControlError::Unexpected { .. } => ControlError::Closed,
        other => other,
    };
    Failure::from(cause).during(format!(
        "restore {name}: process {pid} was ended, as pages of it are missing"
    ))
}
