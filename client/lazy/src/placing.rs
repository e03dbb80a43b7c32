//! Restores that place all pages before the processes run.
//!
//! CRIU hands the processes over as for a lazy restore. It runs `permafrost-action` when all mappings are at their
//! addresses and no process has executed an instruction (`post-restore`), and aborts the restore if the script fails. The
//! script connects, and is answered when all pages are there.
//!
//! ```text
//!   CRIU ─── pid, userfaultfd ──▶ tasks ── chunks ──▶ placers ─ UFFDIO_COPY ─▶ processes
//!   CRIU ─── fork, exec ──▶ permafrost-action ── connects ──▶ starts the placers
//!                           permafrost-action ◀── "placed" ── the last page is there
//!   CRIU ─── all run ───▶ the end
//! ```
//!
//! The processes wait in CRIU's restorer meanwhile, so no mapping changes: pages are placed without the lock that a lazy
//! restore needs.

use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::{self, Scope};

use parking_lot::Mutex;
use permafrost_criu::source::{LazySource, PageRun, ReadError};
use permafrost_protocol::PAGE_BYTES;
use permafrost_userfault::{PlacementError, Userfault};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::missing::MissingRange;
use super::registering::{accept, answer};
use super::tasks::{Shared, TaskId};
use super::{
    CHANGING_PAUSE, FillGate, LazyBrought, LazyError, LazyFailure, LazyOrder, RESTORE_FINISHED,
    TouchedPages, check_brought, foreign_page, unregistered,
};

/// Threads that answer faults: those of CRIU's restorer, and of scripts that look at memory.
const FAULT_THREADS: usize = 1;

/// Most threads that place pages. More than one is worth it where processors are idle: CRIU waits.
const MAX_PLACERS: usize = 4;

/// Pages read at once.
const CHUNK_PAGES: u64 = 512;

/// Interval at which the bytes placed so far are reported.
const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 250_000_000,
};

/// Sockets of a restore that places all pages.
#[derive(Clone, Copy, Debug)]
pub struct PlacingSockets<'a> {
    /// Connection of CRIU, which hands the processes over.
    pub criu: &'a UnixStream,
    /// Socket to which CRIU and its action script connect.
    pub listener: &'a UnixListener,
    /// Connection of the command that has started CRIU.
    pub caller: &'a UnixStream,
}

/// Places the pages of a checkpoint in the processes that CRIU restores, before they run. Returns when CRIU lets them run.
/// `placed` learns the number of bytes now and then; `gate` counts them.
///
/// # Errors
/// CRIU or the caller gave up; a page cannot be read or placed; CRIU did not wait. Unless the caller has ended them before,
/// the processes must be ended.
pub fn place(
    sockets: PlacingSockets<'_>,
    source: &dyn LazySource,
    gate: &FillGate,
    placed: &mut dyn FnMut(u64),
) -> Result<LazyBrought, LazyFailure> {
    let failed = |error| LazyFailure {
        error,
        held: Vec::new(),
    };
    let order = LazyOrder {
        touched_only: false,
        first: &TouchedPages::default(),
        gate,
    };
    let shared = &Shared::new(source, order).map_err(failed)?;
    let placing = &Placing::new(shared).map_err(failed)?;
    thread::scope(|scope| {
        let held = spawn(scope, || shared.hold());
        let faults = (0..FAULT_THREADS).try_for_each(|_| spawn(scope, || shared.serve_faults()));
        let ended = held
            .and(faults)
            .and_then(|()| placing.converse(scope, sockets, placed));
        match ended {
            Ok(()) => shared.set_complete(),
            Err(error) => shared.fail(error),
        }
    });
    shared.result()
}

/// Starts a thread.
fn spawn<'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() + Send + 'scope,
) -> Result<(), LazyError> {
    let spawned = thread::Builder::new().spawn_scoped(scope, work);
    spawned.map(drop).map_err(LazyError::io("start a thread"))
}

/// Pages of a process that one thread places.
pub(super) struct Chunk {
    pub(super) id: TaskId,
    /// Index of the process's address space in the manifest.
    pub(super) place: usize,
    pub(super) pid: u32,
    pub(super) range: MissingRange,
    pub(super) userfault: Arc<Userfault>,
}

/// State of the placers.
struct Placing<'a> {
    shared: &'a Shared<'a>,
    /// Number of placers that are not done.
    running: Mutex<usize>,
    /// Becomes readable when all pages are placed.
    is_placed: OwnedFd,
}

impl<'a> Placing<'a> {
    fn new(shared: &'a Shared<'a>) -> Result<Self, LazyError> {
        let is_placed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let is_placed =
            is_placed.map_err(|errno| LazyError::io("watch the placers")(errno.into()))?;
        Ok(Self {
            shared,
            running: Mutex::new(0),
            is_placed,
        })
    }

    /// Takes the processes from CRIU, has their pages placed once the script has come, and answers the script. Returns when
    /// CRIU lets the processes run, or something else has failed.
    fn converse<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        sockets: PlacingSockets<'_>,
        placed: &mut dyn FnMut(u64),
    ) -> Result<(), LazyError> {
        let PlacingSockets {
            criu,
            listener,
            caller,
        } = sockets;
        let accepting = listener.set_nonblocking(true);
        accepting.map_err(LazyError::io("listen for permafrost-action"))?;
        let mut scripts: Vec<UnixStream> = Vec::new();
        let (mut has_begun, mut is_placed) = (false, false);
        loop {
            let idle = PollFlags::empty();
            let mut fds = [
                PollFd::new(criu, PollFlags::IN),
                PollFd::new(listener, PollFlags::IN),
                PollFd::new(
                    &self.is_placed,
                    if is_placed { idle } else { PollFlags::IN },
                ),
                PollFd::new(self.shared.wake(), PollFlags::IN),
                PollFd::new(caller, PollFlags::RDHUP | PollFlags::HUP),
            ];
            let begins = !has_begun && !scripts.is_empty();
            let timeout = if begins { Timespec::default() } else { TICK };
            match poll(&mut fds, Some(&timeout)) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(LazyError::io("wait for CRIU")(errno.into())),
                Ok(_) => placed(self.shared.progress().0),
            }
            let [from_criu, script, done, over, hang_up] = fds.map(|fd| !fd.revents().is_empty());
            if over {
                return Ok(());
            }
            if done {
                is_placed = true;
            }
            // CRIU had handed over all processes when it started the first script.
            if !from_criu && !scripts.is_empty() && !std::mem::replace(&mut has_begun, true) {
                self.begin(scope)?;
            }
            if script {
                scripts.extend(accept(listener)?);
            }
            // A caller that has gone may have been killed: CRIU must not go on without it.
            if is_placed && !hang_up {
                scripts.drain(..).for_each(answer);
            }
            // CRIU may have finished and ended since the sockets were looked at.
            if from_criu || (hang_up && is_readable(criu)) {
                match self.shared.take_word(criu)? {
                    Some(RESTORE_FINISHED) if is_placed => return Ok(()),
                    Some(RESTORE_FINISHED) => return Err(LazyError::NotHeld),
                    Some(_) => {}
                    None => return Ok(()),
                }
            } else if hang_up {
                return Err(LazyError::GivenUp);
            }
        }
    }

    /// Registers the memory and starts the placers. All processes have been handed over.
    fn begin<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> Result<(), LazyError> {
        self.shared.register()?;
        self.shared.begin_filling();
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let placers = processors.min(MAX_PLACERS);
        *self.running.lock() = placers;
        (0..placers).try_for_each(|_| spawn(scope, || self.place_chunks()))
    }

    /// Places pages until none is left for this thread.
    fn place_chunks(&self) {
        while let Some(chunk) = self.shared.next_chunk(CHUNK_PAGES) {
            if let Err(error) = self.place_chunk(&chunk) {
                return self.shared.fail(error);
            }
        }
        let mut running = self.running.lock();
        *running -= 1;
        if *running == 0
            && !self.shared.is_over()
            && let Err(errno) = rustix::io::write(&self.is_placed, &1_u64.to_ne_bytes())
        {
            self.shared
                .fail(LazyError::io("end the placement")(errno.into()));
        }
    }

    fn place_chunk(&self, chunk: &Chunk) -> Result<(), LazyError> {
        let source = self.shared.source;
        let mut left = chunk.range;
        while left.start < left.end {
            let mut brought = 0;
            let first_index = left.image / PAGE_BYTES;
            let read = source.range(chunk.place, first_index, left.pages(), &mut |run| {
                let (index, pages) = run.span();
                if index != first_index + brought {
                    return Err(ErrorKind::UnexpectedEof.into());
                }
                self.copy(chunk, left.start + brought * PAGE_BYTES, &run)?;
                brought += pages;
                Ok(())
            });
            let read = match read {
                // A process that has ended: CRIU undoes the rest.
                Err(ReadError::Taker(error)) if error.kind() == ErrorKind::BrokenPipe => {
                    return Err(LazyError::GivenUp);
                }
                read => read.map(|()| brought),
            };
            check_brought(read, chunk.pid, left.image)?;
            let until = left.start + brought * PAGE_BYTES;
            self.shared.record_placed(chunk.id, left.start, until);
            left = left.from(until.min(left.end));
        }
        Ok(())
    }

    /// Places pages from `start` on. Those that a fault has brought before stay.
    fn copy(&self, chunk: &Chunk, start: u64, run: &PageRun<'_>) -> io::Result<()> {
        let userfault = &chunk.userfault;
        let len = run.span().1 * PAGE_BYTES;
        let (mut done, mut most) = (0, u64::MAX);
        while done < len {
            let (at, part) = (start + done, (len - done).min(most));
            let placed = match run {
                PageRun::Pages { bytes, .. } => {
                    let range = usize::try_from(done).ok().zip(usize::try_from(part).ok());
                    let part = range.and_then(|(at, len)| bytes.get(at..at + len));
                    userfault.copy(at, part.ok_or(ErrorKind::UnexpectedEof)?)
                }
                PageRun::Zero { .. } => userfault.zero(at, part),
            };
            match placed {
                Ok(bytes) => done += bytes,
                Err(PlacementError::Exists) if self.shared.lacks(chunk.id, at) => {
                    return Err(foreign_page(at));
                }
                Err(PlacementError::Exists) => done += PAGE_BYTES,
                // It may be the end of a mapping, where images do not tell where mappings end.
                Err(PlacementError::Unmapped) if part > PAGE_BYTES => most = PAGE_BYTES,
                Err(PlacementError::Unmapped) => return Err(unregistered(at)),
                Err(PlacementError::Changing) => thread::sleep(CHANGING_PAUSE),
                Err(PlacementError::Gone) => return Err(ErrorKind::BrokenPipe.into()),
                Err(PlacementError::Failed(errno)) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

fn is_readable(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    matches!(poll(&mut fds, Some(&Timespec::default())), Ok(ready) if ready > 0)
}
