//! Lazy restores: processes run at once, and get their pages while they run.
//!
//! `criu restore --lazy-pages` hands over a userfaultfd of each process, as it does to `criu lazy-pages`
//! (`criu/uffd.c`). Faults are answered, and the other pages follow in the background, with `UFFDIO_COPY` out of the
//! memory where the pages are lent: there is no socket and no copy in between.
//!
//! ```text
//!   CRIU ──pid, userfaultfd──▶ receive ──▶ tasks ◀── events, faults ── fault threads ─┐ UFFDIO_COPY
//!                                           ▲                                         ├──▶ processes
//!                                           └── missing pages ─────── fill thread ────┘
//! ```
//!
//! Events are applied, and pages placed, under one lock. So no page is placed where a mapping was removed meanwhile:
//! between a change of a mapping and the reading of its event, the kernel refuses pages ([`PlacementError::Changing`]).
//! Each event is read into a log that outlives this process, so that another one can take over.

#![forbid(unsafe_code)]

mod error;
mod gate;
mod keeper;
mod keeping;
mod missing;
mod placing;
mod registering;
mod takeover;
mod tasks;
mod touched;

use std::io::{self, ErrorKind, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_protocol::PAGE_BYTES;
use permafrost_transport::framing;
use permafrost_userfault::{FaultEvent, PlacementError, Userfault};
use rustix::event::{Timespec, epoll};

pub use error::LazyError;
pub use gate::FillGate;
pub use keeper::LazyKeeper;
pub use keeping::keep;
pub use permafrost_userfault::try_open;
pub use placing::{PlacingSockets, place};
pub use takeover::OrphanedRestore;
pub use touched::{TouchedPage, TouchedPages};

use self::tasks::{LackingMemory, Shared, Task, TaskId, WAKE};
use permafrost_criu::source::{LazySource, PageRun, ReadError};

/// Word that CRIU sends when all processes run (`LAZY_PAGES_RESTORE_FINISHED`). No pid is as high.
const RESTORE_FINISHED: i32 = 0x5253_5446;

/// Word with which a takeover begins. A daemon of an earlier release takes it for a process, and refuses that.
const TAKEOVER: i32 = 0x544B_4F56;

/// Threads that answer faults. Where pages come from another node, a fault waits for it, and others must not.
const FAULT_THREADS: usize = 4;

/// Pages placed for a fault: neighbours are likely to be accessed next.
const FAULT_PAGES: u64 = 8;

/// Pages read at once in the background.
const FILL_PAGES: u64 = 1024;

/// Bytes placed under the lock at once: a fault that comes meanwhile waits for them.
const PART_BYTES: u64 = 64 << 10;

/// Pause before pages that the kernel refused are placed again, after the event that explains the refusal was read.
const CHANGING_PAUSE: Duration = Duration::from_micros(50);

/// Interval at which a transfer that waits for its turn looks whether anything is missing still.
const GATE_PERIOD: Duration = Duration::from_millis(50);

/// Interval of progress messages.
const TICK: Duration = Duration::from_millis(250);

/// Interval at which processes that have ended are looked for.
const PROBE_PERIOD: Duration = Duration::from_secs(1);

/// Interval at which a source on other nodes is held.
const HOLD_PERIOD: Duration = Duration::from_secs(10);

/// Event of a lazy restore.
pub enum LazyEvent<'a> {
    /// Some pages were brought.
    Progress {
        /// Bytes brought so far.
        done_bytes: u64,
        /// Bytes that were missing in the beginning; 0 if only those that are accessed are brought.
        total_bytes: u64,
    },
    /// A process has forked. Whoever keeps a duplicate keeps the child's accesses waiting if this process ends too early.
    Forked(&'a Userfault),
    /// The events that are read from now on are in this log. Whoever keeps it can have another process take over.
    Logged(BorrowedFd<'a>),
}

/// Order in which pages are brought.
#[derive(Clone, Copy, Debug)]
pub struct LazyOrder<'a> {
    /// Bring only pages that are accessed, as long as the gate is closed.
    pub touched_only: bool,
    /// Pages that are brought first.
    pub first: &'a TouchedPages,
    /// Gate of the pages that nobody waits for.
    pub gate: &'a FillGate,
}

/// Amount of memory that was brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LazyBrought {
    /// Number of faults.
    pub faults: u64,
    /// Number of bytes, zero pages included.
    pub bytes: u64,
    /// Pages that were waited for, the first ones.
    pub touched: TouchedPages,
    /// Bytes that came since the background transfer began, and the time that it took, if all pages were brought.
    pub rest: Option<(u64, Duration)>,
}

/// A restore whose processes lack pages, for good.
#[derive(Debug)]
pub struct LazyFailure {
    /// Reason why pages are missing.
    pub error: LazyError,
    /// Userfaultfds of the processes. Once they are closed, missing pages read as zeros: end the processes before.
    pub held: Vec<Arc<Userfault>>,
}

impl LazyFailure {
    /// Keeps the userfaultfds until the processes have ended: accesses to missing pages wait until then.
    pub fn hold_until_gone(self) {
        let mut held = self.held;
        while !held.is_empty() {
            std::thread::sleep(PROBE_PERIOD);
            held.retain(|userfault| !userfault.is_gone());
        }
    }
}

/// Brings the pages of a checkpoint to the processes that CRIU restores and hands over on `criu`, or that a keeper hands
/// over there because the daemon has ended that had begun. Returns when none is missing or the processes have ended. `told`
/// learns what happens.
///
/// # Errors
/// CRIU gave up; a page cannot be read or placed; the processes cannot be taken over. The processes must be ended.
pub fn bring(
    criu: &UnixStream,
    takeover: Option<&OrphanedRestore<'_>>,
    source: &dyn LazySource,
    order: LazyOrder<'_>,
    told: &mut dyn FnMut(LazyEvent<'_>),
) -> Result<LazyBrought, LazyFailure> {
    let failed = |error| LazyFailure {
        error,
        held: Vec::new(),
    };
    let mut shared = Shared::new(source, order).map_err(failed)?;
    if let Some(takeover) = takeover {
        shared.take_over(criu, takeover).map_err(failed)?;
    }
    // Whoever keeps it has it before any event is read.
    if let Some(log) = shared.log.lock().descriptor() {
        told(LazyEvent::Logged(log));
    }
    let shared = &shared;
    std::thread::scope(|scope| {
        let start = |thread: usize| {
            let work = move || match thread {
                0 => shared.fill(),
                1 => shared.hold(),
                _ => shared.serve_faults(),
            };
            let thread = std::thread::Builder::new();
            thread.spawn_scoped(scope, work).map(drop)
        };
        let started = (0..2 + FAULT_THREADS).try_for_each(start);
        if let Err(error) = started {
            // Without this the threads that were started would wait for ever, and the processes with them.
            return shared.fail(LazyError::io("start a thread")(error));
        }
        let received = match takeover {
            Some(_) => Ok(()),
            None => shared.receive(criu),
        };
        match received {
            Ok(()) => shared.watch(told),
            Err(error) => shared.fail(error),
        }
    });
    shared.result()
}

impl Shared<'_> {
    /// Receives the processes, until CRIU says that they run.
    fn receive(&self, criu: &UnixStream) -> Result<(), LazyError> {
        let failed = LazyError::io("read from CRIU");
        criu.set_read_timeout(Some(TICK)).map_err(&failed)?;
        loop {
            match self.take_word(criu)? {
                Some(RESTORE_FINISHED) => {
                    self.set_restored();
                    return Ok(());
                }
                Some(_) => {}
                None => return Ok(()),
            }
        }
    }

    /// Reads CRIU's next word, and takes the process that it may hand over; `None` if everything is over before it comes.
    fn take_word(&self, criu: &UnixStream) -> Result<Option<i32>, LazyError> {
        let failed = LazyError::io("read from CRIU");
        let Some(word) = self.next_word(criu)? else {
            return Ok(None);
        };
        // A negative one is a zombie, which has no memory.
        if word > 0 && word != RESTORE_FINISHED {
            criu.set_read_timeout(None).map_err(&failed)?;
            let fd = framing::recv_fd(criu).map_err(&failed)?;
            criu.set_read_timeout(Some(TICK)).map_err(&failed)?;
            let userfault = Userfault::new(fd).map_err(LazyError::io("take a userfaultfd"))?;
            let memory = LackingMemory::of(self.source, word.unsigned_abs())?;
            self.add(Task::new(memory, userfault))?;
        }
        Ok(Some(word))
    }

    /// Reads CRIU's next word; `None` if everything is over before it comes.
    fn next_word(&self, mut criu: &UnixStream) -> Result<Option<i32>, LazyError> {
        let mut word = [0; 4];
        let mut filled = 0;
        while filled < word.len() {
            match criu.read(&mut word[filled..]) {
                Ok(0) => return Err(LazyError::GivenUp),
                Ok(read) => filled += read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if self.is_over() {
                        return Ok(None);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(LazyError::io("read from CRIU")(error)),
            }
        }
        Ok(Some(i32::from_ne_bytes(word)))
    }

    /// Reports what happens until everything is over, and looks for processes that have ended.
    fn watch(&self, told: &mut dyn FnMut(LazyEvent<'_>)) {
        let mut probed = Instant::now();
        loop {
            let is_over = self.wait_for_change(TICK);
            self.announce(told);
            if is_over {
                return;
            }
            let (done_bytes, total_bytes) = self.progress();
            told(LazyEvent::Progress {
                done_bytes,
                total_bytes,
            });
            if probed.elapsed() >= PROBE_PERIOD {
                probed = Instant::now();
                self.forget_ended();
            }
        }
    }

    /// Holds the source now and then, on a thread of its own: nodes that are away are waited for.
    fn hold(&self) {
        loop {
            self.source.hold();
            let held = Instant::now();
            while held.elapsed() < HOLD_PERIOD {
                if self.wait_for_change(HOLD_PERIOD - held.elapsed()) {
                    return;
                }
            }
        }
    }

    fn announce(&self, told: &mut dyn FnMut(LazyEvent<'_>)) {
        for userfault in self.take_announced() {
            told(LazyEvent::Forked(&userfault));
        }
    }

    /// Reads events and answers faults, until everything is over.
    fn serve_faults(&self) {
        let pause = Timespec {
            tv_sec: 0,
            tv_nsec: 50_000,
        };
        // Faults that have to be answered again, once other events have been read.
        let mut pending: Vec<(TaskId, u64)> = Vec::new();
        let mut buffer = [MaybeUninit::<epoll::Event>::uninit(); 16];
        while !self.is_over() {
            let timeout = (!pending.is_empty()).then_some(&pause);
            match epoll::wait(&self.epoll, &mut buffer, timeout) {
                Ok((ready, _)) => {
                    for event in ready.iter() {
                        let id = event.data.u64();
                        if id != WAKE {
                            self.read_events(id, &mut pending);
                        }
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return self.fail(LazyError::io("wait for faults")(errno.into())),
            }
            for (id, address) in std::mem::take(&mut pending) {
                match self.answer(id, address) {
                    Ok(true) => {}
                    Ok(false) => pending.push((id, address)),
                    Err(error) => return self.fail(error),
                }
            }
        }
    }

    fn read_events(&self, id: TaskId, pending: &mut Vec<(TaskId, u64)>) {
        let mut state = self.state.lock();
        loop {
            let Some(task) = state.tasks.get_mut(&id) else {
                return;
            };
            let event = self.log.lock().next_event(&task.userfault, id);
            match event {
                Ok(None) => return,
                Ok(Some(FaultEvent::Fault { address })) => {
                    pending.push((id, address & !(PAGE_BYTES - 1)));
                    state.faults += 1;
                    // One at a time: another thread takes the next.
                    return;
                }
                Ok(Some(event)) => {
                    if let Err(error) = self.apply(&mut state, id, event) {
                        drop(state);
                        return self.fail(error);
                    }
                }
                Err(error) => {
                    drop(state);
                    return self.fail(LazyError::io("read a fault")(error));
                }
            }
        }
    }

    /// Answers a fault. Returns false if the mappings are changing: other events have to be read first.
    fn answer(&self, id: TaskId, address: u64) -> Result<bool, LazyError> {
        let around = if self.order.touched_only && !self.source.is_remote() {
            1
        } else {
            FAULT_PAGES
        };
        let (place, pid, range) = {
            let mut state = self.state.lock();
            let Some(task) = state.tasks.get(&id) else {
                return Ok(true);
            };
            let Some(range) = task.memory.missing.at(address) else {
                let zeroed = task.userfault.zero(address, PAGE_BYTES);
                return match zeroed {
                    Ok(_) => Ok(true),
                    Err(PlacementError::Changing) => Ok(false),
                    // It was placed in between, or the mapping has gone: the thread finds out.
                    Err(PlacementError::Exists | PlacementError::Unmapped) => {
                        let woken = task.userfault.wake(address, address + PAGE_BYTES);
                        woken.map_err(LazyError::io("wake a thread")).map(|()| true)
                    }
                    Err(PlacementError::Gone) => {
                        self.forget(&mut state, id);
                        Ok(true)
                    }
                    Err(PlacementError::Failed(errno)) => {
                        Err(LazyError::io("place a zero page")(errno.into()))
                    }
                };
            };
            let found = (task.memory.place, task.memory.pid, range);
            if !state.in_flight.insert((id, address)) {
                return Ok(true);
            }
            state.touched.push(TouchedPage {
                pid: found.1,
                index: range.image / PAGE_BYTES,
            });
            found
        };
        let mut placed = true;
        let mut read = |pages| {
            let mut brought = 0;
            let read = self
                .source
                .range(place, range.image / PAGE_BYTES, pages, &mut |run| {
                    brought += run.span().1;
                    placed &= self.place(id, range.start, range.image, &run, false)?;
                    Ok(())
                });
            read.map(|()| brought)
        };
        let brought = match read(around.min(range.pages())) {
            // The damage may be behind the page that is needed.
            Err(ReadError::Source(_)) if around > 1 => read(1),
            brought => brought,
        };
        self.state.lock().in_flight.remove(&(id, address));
        check_brought(brought, pid, range.image)?;
        Ok(placed)
    }

    /// Brings all missing pages, once the processes run.
    fn fill(&self) {
        if !self.wait_until_restored() {
            return;
        }
        while !self.order.gate.wait_until_open(GATE_PERIOD) {
            if self.is_over() {
                return;
            }
            if !self.lacks_pages() {
                break;
            }
        }
        self.begin_filling();
        let mut first = self.order.first.pages().iter();
        loop {
            // Neighbours of a page that was waited for came with it, and were not.
            let next = first.by_ref().find_map(|page| self.missing_at(*page));
            let most = if next.is_some() {
                FAULT_PAGES
            } else {
                FILL_PAGES
            };
            let Some((id, place, pid, range)) = next.or_else(|| self.next_missing()) else {
                return;
            };
            let mut brought = 0;
            let pages = range.pages().min(most);
            let read = self
                .source
                .range(place, range.image / PAGE_BYTES, pages, &mut |run| {
                    brought += run.span().1;
                    self.place(id, range.start, range.image, &run, true)
                        .map(drop)
                });
            let checked = check_brought(read.map(|()| brought), pid, range.image);
            if let Err(error) = checked {
                return self.fail(error);
            }
        }
    }

    /// Places pages of a run in a process, those that are still missing. `start` is the address of the page that was
    /// dumped at `image`. Returns false if the mappings are changing, unless it `waits` until they have.
    fn place(
        &self,
        id: TaskId,
        start: u64,
        image: u64,
        run: &PageRun<'_>,
        waits: bool,
    ) -> io::Result<bool> {
        let (first_index, pages) = run.span();
        let (from, len) = (first_index * PAGE_BYTES, pages * PAGE_BYTES);
        let (mut done, mut most) = (0, PART_BYTES);
        while done < len {
            let mut state = self.state.lock();
            if state.is_over {
                return Ok(true);
            }
            let Some(task) = state.tasks.get_mut(&id) else {
                return Ok(true);
            };
            let at = start + (from + done - image);
            let part = match task.memory.missing.at(at) {
                Some(range) if range.image == from + done => {
                    (range.end - at).min(len - done).min(most)
                }
                // Placed or removed meanwhile, or other pages have come there. Who waits for it finds out by trying again.
                _ => {
                    if waits {
                        task.userfault.wake(at, at + PAGE_BYTES)?;
                    }
                    done += PAGE_BYTES;
                    continue;
                }
            };
            let put = |task: &Task| match run {
                PageRun::Pages { bytes, .. } => {
                    let at_byte = usize::try_from(done).unwrap_or(usize::MAX);
                    let part = usize::try_from(part).unwrap_or(usize::MAX);
                    let part = bytes.get(at_byte..at_byte.saturating_add(part));
                    let part = part.ok_or(ErrorKind::UnexpectedEof)?;
                    io::Result::Ok(task.userfault.copy(at, part))
                }
                PageRun::Zero { .. } => Ok(task.userfault.zero(at, part)),
            };
            let mut placed = put(task)?;
            if placed == Err(PlacementError::Unmapped) && part == PAGE_BYTES {
                // If the process has removed or moved the mapping, the event is unread, as it is read under this lock:
                // then the kernel refuses the second time because of the event.
                placed = put(task)?;
            }
            match placed {
                Ok(bytes) => {
                    task.memory.missing.remove(at, at + bytes);
                    state.bytes += bytes;
                    // Only the background transfer waits.
                    if waits {
                        self.order.gate.add(bytes);
                    }
                    done += bytes;
                }
                Err(PlacementError::Unmapped) if part > PAGE_BYTES => most = PAGE_BYTES,
                // A child may lack mappings of its parent, of which there is no event. What it has is registered.
                Err(PlacementError::Unmapped) if task.memory.is_forked => {
                    task.memory.missing.remove(at, at + PAGE_BYTES);
                    task.userfault.wake(at, at + PAGE_BYTES)?;
                    done += PAGE_BYTES;
                }
                Err(PlacementError::Unmapped) if task.is_unmapped_for_long(at) => {
                    return Err(unregistered(at));
                }
                // Another daemon has placed it.
                Err(PlacementError::Exists) if self.is_taken_over => {
                    task.memory.missing.remove(at, at + PAGE_BYTES);
                    task.userfault.wake(at, at + PAGE_BYTES)?;
                    done += PAGE_BYTES;
                }
                Err(PlacementError::Exists) if waits => return Err(foreign_page(at)),
                // A placer has placed it, or the background transfer will find it there.
                Err(PlacementError::Exists) => {
                    task.userfault.wake(at, at + PAGE_BYTES)?;
                    done += PAGE_BYTES;
                }
                Err(PlacementError::Changing | PlacementError::Unmapped) if waits => {
                    drop(state);
                    std::thread::sleep(CHANGING_PAUSE);
                    continue;
                }
                Err(PlacementError::Changing | PlacementError::Unmapped) => return Ok(false),
                Err(PlacementError::Gone) => {
                    self.forget(&mut state, id);
                    return Ok(true);
                }
                Err(PlacementError::Failed(errno)) => return Err(errno.into()),
            }
            // A fault goes first.
            parking_lot::MutexGuard::unlock_fair(state);
        }
        Ok(true)
    }
}

/// Returns the error of a missing page in memory that no userfaultfd watches: the process reads zeros there.
fn unregistered(address: u64) -> io::Error {
    io::Error::other(format!("no mapping takes the page at {address:#x}"))
}

/// Returns the error of a missing page in whose place another page is.
fn foreign_page(address: u64) -> io::Error {
    io::Error::other(format!(
        "another page is in the place of that at {address:#x}"
    ))
}

/// Checks that a source has passed on at least the first page that was asked for.
fn check_brought(
    brought: Result<u64, ReadError<permafrost_protocol::control::Error>>,
    pid: u32,
    address: u64,
) -> Result<(), LazyError> {
    match brought {
        Ok(0) => Err(LazyError::NoPage { pid, address }),
        Ok(_) => Ok(()),
        Err(ReadError::Source(error)) => Err(LazyError::Source(error)),
        Err(ReadError::Taker(error)) => Err(LazyError::io("place pages")(error)),
    }
}
