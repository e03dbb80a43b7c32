//! Takes an address space out of the two pipes of CRIU's that its pagemap and its pages come through.
//!
//! ```text
//! pagemap ──▶ runs ────────────────────────┐
//!                                          ▼
//! pages ── splice ──▶ waiting pages ──▶ chunks ──▶ sink, on a thread of its own
//! ```
//!
//! CRIU writes the pages of an entry at once, but keeps up to 4096 bytes of a pagemap in a buffer (`criu/bfd.c`): some 200
//! runs of pages, all of a small process, arrive before their addresses. They wait in pipes that refer to the frozen
//! process's own memory, so that they are copied when their addresses are known, and not before.

mod error;
mod room;
mod waiting;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use permafrost_protocol::images::{PagemapEntry, PagemapStream};
use permafrost_protocol::pageserver::{PE_PRESENT, SpaceId};
use permafrost_protocol::{PAGE_BYTES, PAGE_SIZE};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;

pub use self::error::SpaceError;
use self::error::failed;
pub use self::room::{PipeRoom, pipe_bytes};
use self::waiting::{Waiting, Went};
use super::intake::Intake;
use super::sink::PageSink;

/// Bytes passed to the sink before the pipes are looked at again: CRIU must not wait for long.
const TURN_BYTES: u64 = 2 << 20;

/// Runs without their pages from which on the pagemap is left in its pipe. CRIU writes a run before its pages, and no more
/// than 4096 bytes of runs at once.
const MAX_RUNS: usize = 4096;

/// Bytes of a pagemap read at once.
const ENTRIES_BYTES: usize = 64 << 10;

/// Limits on one address space that comes through pipes.
#[derive(Clone, Copy, Debug)]
pub struct SpaceLimits {
    /// Bytes of pages that wait for their addresses. Default 1 GiB: 256 runs of 4 MiB, CRIU's longest.
    pub waiting_bytes: u64,
    /// Time in which something must come.
    pub idle: Duration,
    /// Sizes of the pipes in which pages wait, the first that the kernel grants; files in memory where it grants none.
    pub pipe_bytes: &'static [usize],
}

impl Default for SpaceLimits {
    fn default() -> Self {
        Self {
            waiting_bytes: 1 << 30,
            idle: Duration::from_secs(60),
            pipe_bytes: waiting::PIPE_BYTES,
        }
    }
}

/// An address space, and the read ends of the pipes that bring it.
pub struct SpacePipes {
    /// The address space.
    pub space: SpaceId,
    /// N of the `pages-N.img` that the pagemap is to name.
    pub pages_id: u32,
    /// Pipe of the pagemap.
    pub pagemap: OwnedFd,
    /// Pipe of the pages.
    pub pages: OwnedFd,
    /// Room for pages that wait in pipes.
    pub room: Arc<PipeRoom>,
}

impl SpacePipes {
    /// Passes the pages to `sink`, until both pipes have ended. Nothing is trusted: neither the descriptors, which others
    /// may have too, nor what comes through them. Gives up when `caller`, a socket, is hung up.
    ///
    /// # Errors
    /// The first failure, see [`SpaceError`]; `sink.abort` has been called.
    pub fn take(
        self,
        sink: &mut impl PageSink,
        limits: &SpaceLimits,
        caller: BorrowedFd<'_>,
    ) -> Result<(), SpaceError> {
        let (taken, refusal) = thread::scope(|scope| {
            let mut intake = Intake::new(scope, &mut *sink).aside();
            let taken = self.pass_to(&mut intake, limits, caller);
            (taken, intake.into_refusal())
        });
        if let Some(refusal) = refusal {
            // The sink was told to abort.
            return Err(SpaceError::Refused(refusal));
        }
        if let Err(error) = &taken {
            sink.abort(&error.to_string());
        }
        taken
    }

    fn pass_to<K: PageSink>(
        self,
        intake: &mut Intake<'_, '_, K>,
        limits: &SpaceLimits,
        caller: BorrowedFd<'_>,
    ) -> Result<(), SpaceError> {
        let space = self.space;
        intake.begin_space();
        if intake.ask(|sink| sink.open(space)).is_none() {
            return Ok(());
        }
        let mut pagemap = Some(pipe(self.pagemap, space, "pagemap")?);
        let mut pages = Some(pipe(self.pages, space, "pages")?);
        let mut entries = Waiting::new(ENTRIES_BYTES as u64, limits.pipe_bytes, &self.room);
        let mut addresses = Addresses::new(space, self.pages_id);
        let mut waiting = Waiting::new(limits.waiting_bytes, limits.pipe_bytes, &self.room);
        let mut buffer = vec![0; ENTRIES_BYTES];
        loop {
            let more = addresses.pass(&mut waiting, intake)?;
            if intake.refusal().is_some() {
                return Ok(());
            }
            let is_full = waiting.is_full();
            let open_entries = pagemap.as_ref();
            let open_entries = open_entries.filter(|_| addresses.runs.len() < MAX_RUNS);
            let open_pages = pages.as_ref().filter(|_| !is_full);
            if !more && open_entries.is_none() && open_pages.is_none() && pages.is_none() {
                break;
            }
            // Addresses that make room again are in their pipe by now, or never come: CRIU waits for the room.
            let is_blocked = is_full && pages.is_some();
            let patience = match more || is_blocked {
                true => Duration::ZERO,
                false => limits.idle,
            };
            let ready = wait(open_entries, open_pages, caller, patience)?;
            if !more && ready == [false; 2] {
                return Err(match is_blocked {
                    true => addresses.too_far_ahead(limits),
                    false => SpaceError::Silent {
                        space,
                        seconds: limits.idle.as_secs(),
                    },
                });
            }
            let [entries_came, pages_came] = ready;
            if let Some(from) = pagemap.as_ref().filter(|_| entries_came) {
                if entries.come_from(from)? == Went::Ended {
                    pagemap = None;
                }
                while entries.bytes() > 0 {
                    let read = entries.read(&mut buffer)?;
                    addresses.push(&buffer[..read])?;
                }
            }
            if let Some(from) = pages.as_ref().filter(|_| pages_came)
                && waiting.come_from(from)? == Went::Ended
            {
                pages = None;
            }
        }
        addresses.finish(&waiting)
    }
}

/// Runs of pages whose pages have not all come.
struct Addresses {
    space: SpaceId,
    pages_id: u32,
    pagemap: PagemapStream,
    runs: VecDeque<PagemapEntry>,
}

impl Addresses {
    fn new(space: SpaceId, pages_id: u32) -> Self {
        Self {
            space,
            pages_id,
            pagemap: PagemapStream::default(),
            runs: VecDeque::new(),
        }
    }

    fn push(&mut self, bytes: &[u8]) -> Result<(), SpaceError> {
        let space = self.space;
        let damaged = |source| SpaceError::Pagemap { space, source };
        for entry in self.pagemap.push(bytes).map_err(damaged)? {
            if entry.flags & PE_PRESENT == 0 {
                let vaddr = entry.vaddr;
                return Err(SpaceError::Withheld { space, vaddr });
            }
            self.runs.push_back(entry);
        }
        match self.pagemap.pages_id() {
            Some(named) if named != self.pages_id => Err(SpaceError::OtherPages {
                space,
                named,
                opened: self.pages_id,
            }),
            _ => Ok(()),
        }
    }

    /// Passes whole pages that have an address to the sink. Returns true if there are more of them.
    fn pass<K: PageSink>(
        &mut self,
        waiting: &mut Waiting,
        intake: &mut Intake<'_, '_, K>,
    ) -> Result<bool, SpaceError> {
        let mut passed = 0;
        while let Some(run) = self.runs.front_mut() {
            let whole = waiting.bytes() / PAGE_BYTES * PAGE_BYTES;
            let bytes = whole.min(run.nr_pages.saturating_mul(PAGE_BYTES));
            if bytes == 0 && run.nr_pages > 0 {
                return Ok(false);
            }
            if passed >= TURN_BYTES {
                return Ok(true);
            }
            if bytes > 0 {
                let room = intake.room(bytes);
                let len = room.len() / PAGE_SIZE * PAGE_SIZE;
                if len == 0 {
                    // The sink takes nothing more.
                    return Ok(false);
                }
                waiting.read_exact(&mut room[..len])?;
                intake.pages(run.vaddr, run.flags, len);
                run.vaddr = run.vaddr.saturating_add(len as u64);
                run.nr_pages -= len as u64 / PAGE_BYTES;
                passed += len as u64;
            }
            if run.nr_pages == 0 {
                self.runs.pop_front();
            }
        }
        Ok(false)
    }

    fn too_far_ahead(&self, limits: &SpaceLimits) -> SpaceError {
        SpaceError::TooFarAhead {
            space: self.space,
            limit: limits.waiting_bytes,
        }
    }

    fn finish(self, waiting: &Waiting) -> Result<(), SpaceError> {
        let space = self.space;
        self.pagemap
            .finish()
            .map_err(|source| SpaceError::Pagemap { space, source })?;
        let missing = self.runs.iter().fold(0_u64, |bytes, run| {
            bytes.saturating_add(run.nr_pages.saturating_mul(PAGE_BYTES))
        });
        match (missing.saturating_sub(waiting.bytes()), waiting.bytes()) {
            (0, 0) => Ok(()),
            (missing, extra) => Err(SpaceError::PageCount {
                space,
                missing,
                extra: if missing > 0 { 0 } else { extra },
            }),
        }
    }
}

/// Checks that a descriptor is the read end of a pipe.
fn pipe(fd: OwnedFd, space: SpaceId, what: &'static str) -> Result<OwnedFd, SpaceError> {
    let is_pipe = rustix::fs::fstat(&fd)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo);
    let is_readable = rustix::fs::fcntl_getfl(&fd)
        .is_ok_and(|flags| !flags.intersects(OFlags::WRONLY | OFlags::PATH));
    if is_pipe && is_readable {
        return Ok(fd);
    }
    Err(SpaceError::NoPipe { space, what })
}

/// Waits until one of two pipes has something or has ended, for `patience` at most. Returns which of them.
fn wait(
    first: Option<&OwnedFd>,
    second: Option<&OwnedFd>,
    caller: BorrowedFd<'_>,
    patience: Duration,
) -> Result<[bool; 2], SpaceError> {
    let mut fds = vec![PollFd::from_borrowed_fd(
        caller,
        PollFlags::RDHUP | PollFlags::HUP,
    )];
    let pipes = first.into_iter().chain(second);
    fds.extend(pipes.map(|fd| PollFd::new(fd, PollFlags::IN)));
    let timeout = Timespec {
        tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: patience.subsec_nanos().into(),
    };
    loop {
        match poll(&mut fds, Some(&timeout)) {
            Err(Errno::INTR) => {}
            polled => {
                polled.map_err(|error| failed("wait for CRIU's pipes")(io::Error::from(error)))?;
                break;
            }
        }
    }
    let mut came = fds.iter().map(|fd| !fd.revents().is_empty());
    if came.next().unwrap_or(false) {
        return Err(SpaceError::CallerGone);
    }
    let first = first.is_some() && came.next().unwrap_or(false);
    Ok([first, second.is_some() && came.next().unwrap_or(false)])
}

#[cfg(test)]
mod tests;
