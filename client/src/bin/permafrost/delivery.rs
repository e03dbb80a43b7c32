//! The ways in which a restoring CRIU gets its images: from an images directory that the daemon has filled, or streamed
//! by the daemon while CRIU runs, which saves one copy of all pages and the memory for it, or from a directory without
//! most pages, which the daemon places before the restored processes run, or brings while they do.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use permafrost_criu::frontend::MAX_SOCKET_PATH;
use permafrost_criu::restore_way::{ChosenRestoreWay, RestoreWay};
use permafrost_criu::{Criu, CriuRun, Finished, Running, handover, processes};
use permafrost_protocol::control::{ErrorCode, Exported, request};
use permafrost_protocol::streamer::SERVE_SOCKET;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::Failure;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::progress::{ProgressDisplay, QueueDisplay};
use permafrost_transport::control::{Call, Connection, ControlError};

use crate::arguments::TurnArguments;
use crate::lazy::{self, LazyOptions, LazyTransfer};

/// Interval at which interrupts are polled while CRIU runs.
const TICK: Duration = Duration::from_millis(250);

/// Time for CRIU to fail by itself after an interrupt, in ticks: 2 s.
const GRACE_TICKS: u32 = 8;

/// Time limit for killed processes to end.
const DEATH_PATIENCE: Duration = Duration::from_secs(2);

/// Interval at which the end of killed processes is polled.
const DEATH_TICK: Duration = Duration::from_millis(10);

/// Source of the images for CRIU.
pub(crate) enum Delivery {
    /// CRIU reads the images from the directory.
    Directory,
    /// The daemon streams the images to CRIU, over this socket in the directory.
    Stream(UnixListener),
    /// The daemon places the pages in the processes that CRIU hands over, before they run.
    Place(HeldRestore),
    /// CRIU reads the images from the directory, and hands over the processes, which get their pages while they run.
    Lazy(HeldRestore, LazyOptions),
}

/// A restore whose processes do not run before CRIU's action script succeeds.
pub(crate) struct HeldRestore {
    /// Socket to which CRIU and the script connect.
    pub(crate) listener: UnixListener,
    /// Action script, which CRIU runs.
    pub(crate) action: PathBuf,
}

impl HeldRestore {
    /// Prepares the sockets in `scratch` and in CRIU's work directory.
    pub(crate) fn prepare(scratch: &Path, work: &Path, action: PathBuf) -> Result<Self, Failure> {
        // CRIU connects by a relative path, so that of `work` may be long.
        let listener = listen(work, lazy::SOCKET)?;
        handover::link_placement(scratch, &work.join(lazy::SOCKET))
            .map_err(|error| Failure::io("link a socket in", scratch, &error))?;
        Ok(Self { listener, action })
    }

    /// Adds CRIU's options.
    pub(crate) fn prepare_run(run: &mut CriuRun, action: &Path) {
        // CRIU runs the script that is named last first: others find all memory there.
        run.arg("--lazy-pages").arg("--action-script").arg(action);
    }
}

/// Result of a run of CRIU, and of the preparations.
pub(crate) struct Delivered {
    pub(crate) finished: Finished,
    /// Time in the queue; zero where it is a part of filling the directory.
    pub(crate) turn: Duration,
    /// Time for filling the directory; zero if the images were streamed.
    pub(crate) fetch: Duration,
    /// Refusal of the daemon while it streamed. CRIU may not have noticed: it can take an image that ends early
    /// for a whole one.
    pub(crate) refusal: Option<ControlError>,
    /// Transfer of the pages that the restored processes still lack.
    pub(crate) transfer: Option<LazyTransfer>,
    /// Way that was taken instead of the chosen one.
    pub(crate) instead: Option<ChosenRestoreWay>,
}

/// Checkpoint to be restored, and the conditions.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
    /// Name of the checkpoint.
    pub(crate) name: &'a str,
    /// Directory in which CRIU looks for its images.
    pub(crate) images: &'a Path,
    /// Memory of the processes, bytes.
    pub(crate) memory_bytes: u64,
    /// Priority and deadline in the queue.
    pub(crate) turn: &'a TurnArguments,
}

impl Delivery {
    /// Prepares streaming into `images`, unless the path is too long for a socket.
    pub(crate) fn stream(images: &Path) -> Result<Self, Failure> {
        // CRIU connects by the whole path.
        let path = images.join(SERVE_SOCKET);
        if path.as_os_str().len() > MAX_SOCKET_PATH {
            return Ok(Self::Directory);
        }
        Ok(Self::Stream(listen(images, SERVE_SOCKET)?))
    }

    /// Returns the way by which CRIU will get the pages.
    pub(crate) fn way(&self) -> RestoreWay {
        match self {
            Self::Directory => RestoreWay::Directory,
            Self::Stream(_) => RestoreWay::Stream,
            Self::Place(_) => RestoreWay::Place,
            Self::Lazy(..) => RestoreWay::Lazy,
        }
    }

    /// Runs CRIU with the images of a checkpoint; `tasks` are the pids that it will restore.
    pub(crate) fn run(
        self,
        context: &Context,
        interrupts: &Interrupts,
        mut connection: Connection,
        wanted: Wanted<'_>,
        (mut run, criu, tasks): (CriuRun, &Criu, &Tasks),
    ) -> Result<Delivered, Failure> {
        match self {
            Self::Directory => {
                let started = Instant::now();
                fetch(context, &mut connection, wanted, interrupts, false)?;
                drop(connection);
                let fetch = started.elapsed();
                interrupts.check()?;
                let finished = tasks.watch(run.start(criu)?, interrupts, context)?;
                Ok(Delivered {
                    finished,
                    turn: Duration::ZERO,
                    fetch,
                    refusal: None,
                    transfer: None,
                    instead: None,
                })
            }
            Self::Place(held) => {
                let programs = (run, criu, tasks);
                held.place(context, interrupts, connection, wanted, programs)
            }
            Self::Lazy(HeldRestore { listener, action }, options) => {
                let started = Instant::now();
                fetch(context, &mut connection, wanted, interrupts, true)?;
                let fetch = started.elapsed();
                drop(connection);
                let transfer = LazyTransfer::begin(context, interrupts, wanted, listener, options)?;
                interrupts.check()?;
                HeldRestore::prepare_run(&mut run, &action);
                let tasks = Tasks {
                    spared: Some(transfer.keeper()),
                    ..tasks.clone()
                };
                let finished = tasks.watch(run.start(criu)?, interrupts, context)?;
                let turn = transfer.waited();
                let (transfer, refusal) = match finished.status.success() {
                    true => (Some(transfer), None),
                    false => (None, transfer.give_up()),
                };
                Ok(Delivered {
                    finished,
                    turn,
                    fetch,
                    refusal,
                    transfer,
                    instead: None,
                })
            }
            Self::Stream(listener) => {
                run.arg("--stream");
                let Wanted { name, turn, .. } = wanted;
                let request = request::Stream {
                    checkpoint: name.to_owned(),
                    priority: turn.priority,
                    deadline_ms: turn.deadline_ms(),
                    reservation: turn.reservation.token()?,
                };
                let turn = begin(
                    context,
                    interrupts,
                    &mut connection,
                    request,
                    &listener,
                    name,
                )?;
                // The daemon's descriptor is the only one now: when the daemon gives up, CRIU is refused, instead
                // of waiting in the backlog of a socket that no process serves.
                drop(listener);
                interrupts.check()?;
                let finished = tasks.watch(run.start(criu)?, interrupts, context)?;
                // A CRIU that failed before it connected must not be waited for. (The progress messages sent
                // meanwhile fit the socket's buffer many times over.)
                connection.end_requests();
                let served = connection.finish::<request::Stream>(&mut |_| {});
                Ok(Delivered {
                    finished,
                    turn,
                    fetch: Duration::ZERO,
                    refusal: served.err(),
                    transfer: None,
                    instead: None,
                })
            }
        }
    }
}

/// Listens on a socket in a directory, whose own path may be longer than that of a socket.
pub(crate) fn listen(directory: &Path, name: &str) -> Result<UnixListener, Failure> {
    let failed = |error| Failure::io("listen in", directory, &error);
    let opened = File::open(directory).map_err(failed)?;
    let short = format!("/proc/self/fd/{}/{name}", opened.as_raw_fd());
    UnixListener::bind(short).map_err(failed)
}

/// Has the daemon accept the CRIU that will connect to `listener`, and waits for its turn. Returns the time in the
/// queue.
pub(crate) fn begin<C: Call>(
    context: &Context,
    interrupts: &Interrupts,
    connection: &mut Connection,
    request: C,
    listener: &UnixListener,
    name: &str,
) -> Result<Duration, Failure> {
    let mut queue = QueueDisplay::new(context, format!("restore {name}"), "restores", "");
    connection
        .begin(request, Some(listener.as_fd()))
        .and_then(|()| connection.await_turn(&mut |progress| queue.update(progress)))
        .map_err(|error| {
            let failure = interrupts.explain(error.into());
            failure.during(format!("restore {name}"))
        })?;
    Ok(queue.waited())
}

/// Pids that CRIU restores, which an interrupt ends.
#[derive(Clone, Default)]
pub(crate) struct Tasks {
    pub(crate) pids: Vec<u32>,
    /// A child of this process that is not to be ended.
    pub(crate) spared: Option<u32>,
}

impl Tasks {
    /// Waits for CRIU. On an interrupt, ends the tasks that CRIU has restored so far: CRIU sees its child die,
    /// undoes the rest in its ordinary way (network locks, cgroups, files) and fails.
    pub(crate) fn watch(
        &self,
        running: Running,
        interrupts: &Interrupts,
        context: &Context,
    ) -> Result<Finished, Failure> {
        let criu = running.pid();
        // A CRIU that is killed leaves its children to us, and not to init.
        if let Err(error) = rustix::process::set_child_subreaper(Some(rustix::process::getpid())) {
            tracing::debug!(%error, "not a subreaper");
        }
        let mut ticks = 0;
        let finished = running.wait(TICK, || {
            if !interrupts.came() {
                return;
            }
            if ticks == 0 {
                context.remark("interrupted: ending what was restored so far");
            }
            ticks += 1;
            self.end(criu);
            if ticks > GRACE_TICKS {
                // CRIU has no child whose death it could notice, or waits for something else.
                let left = processes::descendants(std::process::id());
                let left = left.into_iter().filter(|pid| Some(*pid) != self.spared);
                left.for_each(processes::kill);
            }
        })?;
        if !finished.status.success() {
            // CRIU has killed them, unless it was killed itself; a large process takes a moment to end.
            let started = Instant::now();
            while self.end(criu) && started.elapsed() < DEATH_PATIENCE {
                thread::sleep(DEATH_TICK);
            }
        }
        Ok(finished)
    }

    /// Kills those descendants of this process that are restored tasks. They cannot be other processes: a pid
    /// that is taken cannot be restored. Returns true if there were any.
    fn end(&self, criu: u32) -> bool {
        let mut any = false;
        for pid in processes::descendants(std::process::id()) {
            if pid == criu || Some(pid) == self.spared {
                continue;
            }
            if processes::innermost_pid(pid).is_some_and(|pid| self.pids.contains(&pid)) {
                processes::kill(pid);
                any = true;
            }
        }
        any
    }
}

/// Has the daemon write a checkpoint into the images directory.
pub(crate) fn fetch(
    context: &Context,
    connection: &mut Connection,
    wanted: Wanted<'_>,
    interrupts: &Interrupts,
    without_lazy_pages: bool,
) -> Result<Exported, Failure> {
    let Wanted {
        name, images, turn, ..
    } = wanted;
    let directory = File::open(images).map_err(|error| Failure::io("open", images, &error))?;
    let mut queue = QueueDisplay::new(context, format!("restore {name}"), "restores", "");
    let mut progress = ProgressDisplay::new(context, format!("fetch {name}"));
    let export = request::Export {
        checkpoint: name.to_owned(),
        small_images_only: false,
        without_lazy_pages,
        priority: turn.priority,
        deadline_ms: turn.deadline_ms(),
        reservation: turn.reservation.token()?,
    };
    connection
        .call_with(export, Some(directory.as_fd()), &mut |so_far| {
            queue.update(so_far);
            progress.begun(so_far);
        })
        .map_err(|error| {
            interrupts
                .explain(error.into())
                .during(format!("fetch {name}"))
        })
}

/// Returns true if a refusal comes from the store itself. Such a refusal explains a failed restore better than
/// CRIU's log, in which the images just end, and a process that CRIU restored in spite of it cannot be relied
/// on. Otherwise CRIU did not connect.
pub(crate) fn counts(refusal: &ControlError) -> bool {
    match refusal {
        ControlError::Refused { code, .. } => *code != ErrorCode::Conflict,
        _ => true,
    }
}
