//! The processes of a lazy restore, and the state that its threads share.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::images::{Pagemap, mm_name, read_mappings};
use permafrost_protocol::manifest::SpaceType;
use permafrost_userfault::{EventLog, FaultEvent, SUBJECT_BYTES, SpaceChange, Userfault};
use rustix::event::{EventfdFlags, epoll, eventfd};

use super::missing::{MissingRange, MissingRanges};
use super::placing::Chunk;
use super::registering::{self, LazyMemory};
use super::{LazyBrought, LazyError, LazyFailure, LazyOrder, TouchedPage, TouchedPages};
use permafrost_criu::source::{LazySource, ReadError, small_image};

/// Number of a task, unique in a restore.
pub(super) type TaskId = u64;

/// Number that stands for the descriptor which wakes all threads.
pub(super) const WAKE: TaskId = u64::MAX;

/// Time for a process to end that was killed while it changed its mappings: the kernel drops the event.
const UNMAPPED_LIMIT: Duration = Duration::from_secs(2);

/// A process that lacks pages.
pub(super) struct Task {
    pub(super) memory: LackingMemory,
    pub(super) userfault: Arc<Userfault>,
    /// A missing page that no mapping takes, and the time at which that was found.
    unmapped: Option<(u64, Instant)>,
    /// Address from which the next pages are brought.
    next: u64,
}

/// Memory of a process that lacks pages.
pub(super) struct LackingMemory {
    /// Pid of the process in its namespace when it was dumped.
    pub(super) pid: u32,
    /// Index of its address space in the manifest.
    pub(super) place: usize,
    pub(super) missing: MissingRanges,
    /// Mappings that had missing pages when CRIU handed the process over, ascending.
    mappings: Vec<Range<u64>>,
    /// True of a process that did not come from CRIU, but was forked by one that runs.
    pub(super) is_forked: bool,
}

impl LackingMemory {
    /// Returns the memory of the process that CRIU calls `pid`, with all of its lazy pages missing.
    pub(super) fn of(source: &dyn LazySource, pid: u32) -> Result<Self, LazyError> {
        let manifest = source.manifest();
        let place = manifest.spaces.iter().position(|space| {
            space.space_type() == SpaceType::Process && space.id == u64::from(pid)
        });
        let place = place.ok_or(LazyError::UnknownProcess { pid })?;
        let mut pagemap = Pagemap::read(&source.pagemap(place).map_err(LazyError::Source)?)?;
        let image = small_image(source, &mm_name(pid)).map_err(|error| match error {
            ReadError::Source(error) => LazyError::Source(error),
            ReadError::Taker(error) => LazyError::io("read the mappings")(error),
        })?;
        // Old releases of CRIU keep the mappings elsewhere.
        let mappings = image.as_deref().map(read_mappings).transpose()?;
        let mappings = mappings.unwrap_or_default();
        pagemap.mark_lazy(&mappings);
        let memory = LazyMemory::new(&mappings, &pagemap);
        Ok(Self {
            pid,
            place,
            missing: memory.missing,
            mappings: memory.mappings,
            is_forked: false,
        })
    }

    /// Returns the memory of a child that the process forks now.
    pub(super) fn fork(&self) -> Self {
        Self {
            pid: self.pid,
            place: self.place,
            missing: self.missing.clone(),
            mappings: Vec::new(),
            is_forked: true,
        }
    }
}

impl Task {
    pub(super) fn new(memory: LackingMemory, userfault: Userfault) -> Self {
        Self {
            memory,
            userfault: Arc::new(userfault),
            unmapped: None,
            next: 0,
        }
    }

    /// Records that no mapping takes the missing page at `address`, and that no unread event explains it. Returns true
    /// once that has been so for [`UNMAPPED_LIMIT`].
    pub(super) fn is_unmapped_for_long(&mut self, address: u64) -> bool {
        // Of several pages the first counts until it is not missing any more.
        let known = self
            .unmapped
            .filter(|(at, _)| self.memory.missing.at(*at).is_some());
        let (at, since) = known.unwrap_or_else(|| (address, Instant::now()));
        self.unmapped = Some((at, since));
        at == address && since.elapsed() >= UNMAPPED_LIMIT
    }
}

/// Action that fails where there is no memory for a log.
pub(super) const MAKE_LOG: &str = "make a log of events";

/// Returns the name of a checkpoint in the logs of its restores: its id.
pub(super) fn subject(source: &dyn LazySource) -> [u8; SUBJECT_BYTES] {
    let mut subject = [0; SUBJECT_BYTES];
    let id = source.record().id.as_bytes();
    let known = id.len().min(SUBJECT_BYTES);
    subject[..known].copy_from_slice(&id[..known]);
    subject
}

/// State of a lazy restore, under one lock.
#[derive(Default)]
pub(super) struct State {
    pub(super) tasks: BTreeMap<TaskId, Task>,
    /// Faults whose pages are being read.
    pub(super) in_flight: BTreeSet<(TaskId, u64)>,
    pub(super) faults: u64,
    pub(super) bytes: u64,
    /// Pages that were waited for.
    pub(super) touched: TouchedPages,
    /// True once nothing is left to be done, or it has failed.
    pub(super) is_over: bool,
    total_bytes: u64,
    next_id: TaskId,
    last_filled: TaskId,
    is_restored: bool,
    /// Time at which the background transfer began, and the bytes that the processes had then.
    filling: Option<(Instant, u64)>,
    /// Bytes brought since, and the time that it took; `None` before all pages were brought.
    rest: Option<(u64, Duration)>,
    failure: Option<LazyError>,
    /// Forked processes that were not reported yet.
    announced: Vec<Arc<Userfault>>,
}

/// State that the threads of a lazy restore share.
pub(super) struct Shared<'a> {
    pub(super) source: &'a dyn LazySource,
    pub(super) order: LazyOrder<'a>,
    pub(super) state: Mutex<State>,
    pub(super) epoll: OwnedFd,
    /// Log of the events that were read. It is locked after the state, and under its lock.
    pub(super) log: Mutex<EventLog>,
    /// True if another daemon has begun: it has placed pages that are missing here.
    pub(super) is_taken_over: bool,
    changed: Condvar,
    wake: OwnedFd,
}

impl<'a> Shared<'a> {
    pub(super) fn new(source: &'a dyn LazySource, order: LazyOrder<'a>) -> Result<Self, LazyError> {
        let failed = |errno: rustix::io::Errno| LazyError::io("watch for faults")(errno.into());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?;
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&epoll, &wake, data, epoll::EventFlags::IN).map_err(failed)?;
        let log = EventLog::create(subject(source), &[]).map_err(LazyError::io(MAKE_LOG))?;
        Ok(Self {
            source,
            order,
            state: Mutex::default(),
            epoll,
            log: Mutex::new(log),
            is_taken_over: false,
            changed: Condvar::new(),
            wake,
        })
    }

    /// Begins to serve a process.
    pub(super) fn add(&self, task: Task) -> Result<(), LazyError> {
        self.add_to(&mut self.state.lock(), task)
    }

    /// Begins to serve a process that another daemon has numbered.
    pub(super) fn add_numbered(&self, id: TaskId, task: Task) -> Result<(), LazyError> {
        let mut state = self.state.lock();
        state.next_id = id;
        self.add_to(&mut state, task)
    }

    /// Sets the number of the next process.
    pub(super) fn set_next(&self, id: TaskId) {
        self.state.lock().next_id = id;
    }

    fn add_to(&self, state: &mut State, task: Task) -> Result<(), LazyError> {
        let id = state.next_id;
        state.next_id += 1;
        let data = epoll::EventData::new_u64(id);
        epoll::add(&self.epoll, &*task.userfault, data, epoll::EventFlags::IN)
            .map_err(|errno| LazyError::io("watch a process")(errno.into()))?;
        state.total_bytes += task.memory.missing.pages() * PAGE_BYTES;
        state.tasks.insert(id, task);
        self.changed.notify_all();
        Ok(())
    }

    /// Applies a change of the mappings.
    pub(super) fn apply(
        &self,
        state: &mut State,
        id: TaskId,
        event: FaultEvent,
    ) -> Result<(), LazyError> {
        let Some(task) = state.tasks.get_mut(&id) else {
            return Ok(());
        };
        match event {
            FaultEvent::Fault { .. } => {}
            FaultEvent::Fork(child) => {
                let mut child = Task::new(task.memory.fork(), child);
                child.next = task.next;
                state.announced.push(Arc::clone(&child.userfault));
                self.add_to(state, child)?;
            }
            FaultEvent::Change(change) => {
                if let SpaceChange::Remove { start, end } = change {
                    // Accesses there get the kernel's zeros from now on.
                    let done = task.userfault.unregister(start, end);
                    done.map_err(LazyError::io("unregister given-up pages"))?;
                }
                task.memory.missing.change(change);
            }
        }
        Ok(())
    }

    /// Forgets a process that has ended.
    pub(super) fn forget(&self, state: &mut State, id: TaskId) {
        if let Some(task) = state.tasks.remove(&id)
            && let Err(errno) = epoll::delete(&self.epoll, &*task.userfault)
        {
            tracing::debug!(%errno, "userfaultfd not removed");
        }
        if state.tasks.is_empty() && state.is_restored {
            self.end(state);
        }
    }

    /// Forgets the processes that have ended.
    pub(super) fn forget_ended(&self) {
        let mut state = self.state.lock();
        let tasks = state.tasks.iter();
        let ended: Vec<_> = tasks
            .filter(|(_, task)| task.userfault.is_gone())
            .map(|(id, _)| *id)
            .collect();
        for id in ended {
            self.forget(&mut state, id);
        }
    }

    pub(super) fn set_restored(&self) {
        let mut state = self.state.lock();
        state.is_restored = true;
        if state.tasks.is_empty() {
            self.end(&mut state);
        }
        self.changed.notify_all();
    }

    /// Registers the memory of all processes, none of which has run.
    pub(super) fn register(&self) -> Result<(), LazyError> {
        let state = self.state.lock();
        state
            .tasks
            .values()
            .try_for_each(|task| registering::register(&task.userfault, &task.memory.mappings))
    }

    /// Records that the background transfer begins.
    pub(super) fn begin_filling(&self) {
        let mut state = self.state.lock();
        state.filling = Some((Instant::now(), state.bytes));
    }

    /// Waits until CRIU is done. Returns false if everything is over before.
    pub(super) fn wait_until_restored(&self) -> bool {
        let mut state = self.state.lock();
        while !state.is_restored && !state.is_over {
            self.changed.wait(&mut state);
        }
        !state.is_over
    }

    /// Waits for a change, `limit` at most. Returns true if everything is over.
    pub(super) fn wait_for_change(&self, limit: Duration) -> bool {
        let mut state = self.state.lock();
        if !state.is_over {
            self.changed.wait_for(&mut state, limit);
        }
        state.is_over
    }

    /// Returns the missing pages that are brought next, with their process, one process after another; `None` if none
    /// is missing, which ends everything.
    pub(super) fn next_missing(&self) -> Option<(TaskId, usize, u32, MissingRange)> {
        let mut state = self.state.lock();
        if state.is_over {
            return None;
        }
        let last = state.last_filled;
        let lacking = |task: &Task| !task.memory.missing.is_empty();
        let mut behind = state.tasks.range(last + 1..).map(|(id, task)| (*id, task));
        let next = behind.find(|(_, task)| lacking(task)).or_else(|| {
            let mut all = state.tasks.iter().map(|(id, task)| (*id, task));
            all.find(|(_, task)| lacking(task))
        });
        let Some((id, _)) = next else {
            let bytes = state.bytes;
            state.rest = state
                .filling
                .map(|(began, had)| (bytes - had, began.elapsed()));
            self.end(&mut state);
            return None;
        };
        state.last_filled = id;
        let task = state.tasks.get_mut(&id)?;
        let range = task.memory.missing.next_from(task.next)?;
        task.next = range.end.min(range.start + super::FILL_PAGES * PAGE_BYTES);
        Some((id, task.memory.place, task.memory.pid, range))
    }

    /// Returns the missing pages from one on that was dumped there, with their process, if it is missing still.
    pub(super) fn missing_at(
        &self,
        page: TouchedPage,
    ) -> Option<(TaskId, usize, u32, MissingRange)> {
        let address = page.index.checked_mul(PAGE_BYTES)?;
        let state = self.state.lock();
        let mut tasks = state
            .tasks
            .iter()
            .filter(|(_, task)| task.memory.pid == page.pid);
        tasks.find_map(|(id, task)| {
            let range = task.memory.missing.at(address)?;
            (range.image == address).then_some((*id, task.memory.place, task.memory.pid, range))
        })
    }

    /// Returns at most `most` pages that no thread has taken yet, with their process; `None` if there are none.
    pub(super) fn next_chunk(&self, most: u64) -> Option<Chunk> {
        let mut state = self.state.lock();
        if state.is_over {
            return None;
        }
        let (id, task, range) = state.tasks.iter_mut().find_map(|(id, task)| {
            let range = task.memory.missing.from(task.next)?;
            Some((*id, task, range))
        })?;
        let end = range.end.min(range.start + most * PAGE_BYTES);
        task.next = end;
        Some(Chunk {
            id,
            place: task.memory.place,
            pid: task.memory.pid,
            range: MissingRange { end, ..range },
            userfault: Arc::clone(&task.userfault),
        })
    }

    /// Records that a process has some pages.
    pub(super) fn record_placed(&self, id: TaskId, start: u64, end: u64) {
        let mut state = self.state.lock();
        if let Some(task) = state.tasks.get_mut(&id) {
            task.memory.missing.remove(start, end);
        }
        state.bytes += end - start;
        self.order.gate.add(end - start);
    }

    /// Returns true if a process lacks a page.
    pub(super) fn lacks(&self, id: TaskId, address: u64) -> bool {
        let state = self.state.lock();
        let task = state.tasks.get(&id);
        task.is_some_and(|task| task.memory.missing.at(address).is_some())
    }

    /// Returns the descriptor that becomes readable when everything is over.
    pub(super) fn wake(&self) -> &OwnedFd {
        &self.wake
    }

    /// Ends everything, as no page is missing.
    pub(super) fn set_complete(&self) {
        let mut state = self.state.lock();
        self.end(&mut state);
    }

    pub(super) fn progress(&self) -> (u64, u64) {
        let state = self.state.lock();
        let total_bytes = if self.order.touched_only {
            0
        } else {
            state.total_bytes
        };
        (state.bytes, total_bytes)
    }

    pub(super) fn take_announced(&self) -> Vec<Arc<Userfault>> {
        std::mem::take(&mut self.state.lock().announced)
    }

    /// Returns true if a process lacks pages.
    pub(super) fn lacks_pages(&self) -> bool {
        let state = self.state.lock();
        state
            .tasks
            .values()
            .any(|task| !task.memory.missing.is_empty())
    }

    pub(super) fn is_over(&self) -> bool {
        self.state.lock().is_over
    }

    /// Ends everything for a reason; the first one counts.
    pub(super) fn fail(&self, error: LazyError) {
        let mut state = self.state.lock();
        if !state.is_over {
            state.failure = Some(error);
        }
        self.end(&mut state);
    }

    fn end(&self, state: &mut State) {
        state.is_over = true;
        self.changed.notify_all();
        // Never read: all threads are woken.
        if let Err(errno) = rustix::io::write(&self.wake, &1_u64.to_ne_bytes()) {
            tracing::debug!(%errno, "threads not woken");
        }
    }

    pub(super) fn result(&self) -> Result<LazyBrought, LazyFailure> {
        let mut state = self.state.lock();
        match state.failure.take() {
            None => Ok(LazyBrought {
                faults: state.faults,
                bytes: state.bytes,
                touched: std::mem::take(&mut state.touched),
                rest: state.rest,
            }),
            Some(error) => Err(LazyFailure {
                error,
                held: state
                    .tasks
                    .values()
                    .map(|task| Arc::clone(&task.userfault))
                    .collect(),
            }),
        }
    }
}
