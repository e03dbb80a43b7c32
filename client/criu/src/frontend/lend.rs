//! The lazy-pages front end: answers the GETs of `criu lazy-pages --page-server` from a stored checkpoint.
//!
//! Pages are verified, and then written to the socket straight from where they are lent. Each client is answered in the
//! order of its requests.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};

use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::images::{ImageError, Pagemap};
use permafrost_protocol::manifest::SpaceType;
use permafrost_protocol::pageserver::{Answer, Event, PageServer, ProtocolError, Want};
use permafrost_protocol::{PAGE_BYTES, control};

use super::pageserver::{Bounded, await_end, read_full};
use crate::source::{LazySource, PageRun, ReadError};

/// A pagemap that is damaged.
///
/// Cure: restore an older generation, see permafrost verify.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct PagemapError(ImageError);

impl ReportedError for PagemapError {
    fn code(&self) -> ErrorCode {
        ErrorCode::Corrupt
    }

    fn hint(&self) -> &'static str {
        "restore an older generation, see permafrost verify"
    }
}

/// Most pages of one answer: 4 MiB. A client asks again for the rest.
const MAX_PAGES: u16 = 1024;

/// Zeros that stand for pages that are not stored.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// A checkpoint that is lent to lazy restores, and what they got of it.
pub struct LentCheckpoint<'a> {
    source: &'a dyn LazySource,
    /// Processes by their pids.
    spaces: BTreeMap<u64, LentSpace>,
    requests: AtomicU64,
    bytes: AtomicU64,
}

/// The pages of a process.
struct LentSpace {
    /// Index of the address space in the manifest.
    place: usize,
    /// First index of each range of pages, and the index behind its last.
    ranges: BTreeMap<u64, u64>,
}

/// A client that gets no more pages.
#[derive(Debug, thiserror::Error)]
pub enum LendError {
    /// The client broke the protocol.
    #[error("protocol: {0}")]
    Protocol(#[from] ProtocolError),
    /// The client sends a dump.
    #[error(
        "this endpoint gives pages of a checkpoint, and takes none: point `criu lazy-pages` at it"
    )]
    Dump,
    /// The checkpoint has no such process.
    #[error("GET for process {pid}, which the checkpoint does not have")]
    UnknownProcess {
        /// Pid in the request.
        pid: u32,
    },
    /// The process has no page there.
    #[error("GET for process {pid}: it has no page at {vaddr:#x}")]
    NoPage {
        /// Pid in the request.
        pid: u32,
        /// Address in the request.
        vaddr: u64,
    },
    /// The pages cannot be read.
    #[error("{}", .0.message)]
    Source(control::Error),
    /// The socket failed, or the client read or wrote nothing for too long.
    #[error("connection: {0}")]
    Io(#[from] io::Error),
}

impl<'a> LentCheckpoint<'a> {
    /// Reads where the pages of the checkpoint's processes are.
    ///
    /// # Errors
    /// A pagemap cannot be read.
    pub fn new(source: &'a dyn LazySource) -> Result<Self, control::Error> {
        let mut spaces = BTreeMap::new();
        for (place, space) in source.manifest().spaces.iter().enumerate() {
            if space.space_type() == SpaceType::Process {
                let ranges = ranges(&source.pagemap(place)?).map_err(PagemapError)?;
                spaces.insert(space.id, LentSpace { place, ranges });
            }
        }
        Ok(Self {
            source,
            spaces,
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        })
    }

    /// Returns the number of requests that were answered, and of bytes given.
    #[must_use]
    pub fn served(&self) -> (u64, u64) {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (count(&self.requests), count(&self.bytes))
    }

    /// Returns the place of a process's address space, and how many pages it has from an address on.
    fn find(&self, pid: u32, vaddr: u64) -> Result<(usize, u64), LendError> {
        let space = self.spaces.get(&u64::from(pid));
        let space = space.ok_or(LendError::UnknownProcess { pid })?;
        let index = vaddr / PAGE_BYTES;
        let range = space.ranges.range(..=index).next_back();
        match range.filter(|(_, end)| **end > index) {
            Some((_, end)) => Ok((space.place, end - index)),
            None => Err(LendError::NoPage { pid, vaddr }),
        }
    }
}

/// Returns the ranges of pages in a pagemap, neighbours in one.
fn ranges(pagemap: &[u8]) -> Result<BTreeMap<u64, u64>, ImageError> {
    let mut ranges: BTreeMap<u64, u64> = BTreeMap::new();
    for entry in Pagemap::read(pagemap)?.entries {
        let first = entry.vaddr / PAGE_BYTES;
        let end = first + entry.nr_pages;
        match ranges.last_entry() {
            Some(mut last) if *last.get() == first => {
                last.insert(end);
            }
            _ => {
                ranges.insert(first, end);
            }
        }
    }
    Ok(ranges)
}

/// Answers the requests of one client, until its CLOSE or its end.
///
/// # Errors
/// See [`LendError`]: the caller closes the socket, and the client's restore fails.
pub fn lend<S: Read + Write + Bounded>(
    stream: &mut S,
    lent: &LentCheckpoint<'_>,
) -> Result<(), LendError> {
    let mut core = PageServer::new();
    let mut buffer = [0; 64];
    loop {
        let Want::Frame { bytes } = core.want() else {
            return Err(LendError::Dump);
        };
        let filled = read_full(stream, &mut buffer[..bytes])?;
        if filled == 0 && bytes > 0 {
            // A client that is killed says nothing more.
            return Ok(());
        }
        if filled < bytes {
            let missing_bytes = (bytes - filled) as u64;
            return Err(ProtocolError::Truncated { missing_bytes }.into());
        }
        match core.frame(&buffer[..bytes])? {
            None => {}
            Some(Event::Get {
                pid,
                vaddr,
                nr_pages,
            }) => answer(stream, &core, lent, pid, vaddr, nr_pages)?,
            Some(Event::Close { force }) => {
                stream.write_all(core.reply(Answer::Status(0)).as_ref())?;
                if !force {
                    await_end(stream, &mut buffer)?;
                }
                return Ok(());
            }
            Some(_) => return Err(LendError::Dump),
        }
    }
}

fn answer<S: Write>(
    stream: &mut S,
    core: &PageServer,
    lent: &LentCheckpoint<'_>,
    pid: u32,
    vaddr: u64,
    nr_pages: u64,
) -> Result<(), LendError> {
    let (place, there) = lent.find(pid, vaddr)?;
    let pages = u16::try_from(nr_pages.min(there))
        .unwrap_or(MAX_PAGES)
        .min(MAX_PAGES);
    let frame = core.pages_frame(pid, vaddr, pages);
    let frame = frame.ok_or(LendError::Dump)?;
    // The frame goes out with the first pages: not before those were verified.
    let mut head = frame.as_ref();
    let mut left = u64::from(pages) * PAGE_BYTES;
    let first_index = vaddr / PAGE_BYTES;
    let read = lent
        .source
        .range(place, first_index, pages.into(), &mut |run| {
            let bytes = run.span().1 * PAGE_BYTES;
            match run {
                PageRun::Pages { bytes, .. } => write_both(stream, head, &bytes)?,
                PageRun::Zero { .. } => {
                    write_both(stream, head, &[])?;
                    write_zeros(stream, bytes)?;
                }
            }
            head = &[];
            left = left.saturating_sub(bytes);
            Ok(())
        });
    match read {
        Ok(()) if left == 0 => {}
        Ok(()) => return Err(LendError::NoPage { pid, vaddr }),
        Err(ReadError::Source(error)) => return Err(LendError::Source(error)),
        Err(ReadError::Taker(error)) => return Err(error.into()),
    }
    lent.requests.fetch_add(1, Ordering::Relaxed);
    lent.bytes
        .fetch_add(u64::from(pages) * PAGE_BYTES, Ordering::Relaxed);
    Ok(())
}

/// Writes two buffers, with one system call where the socket has room.
fn write_both(stream: &mut impl Write, head: &[u8], bytes: &[u8]) -> io::Result<()> {
    let mut slices = [IoSlice::new(head), IoSlice::new(bytes)];
    let mut slices = &mut slices[..];
    // Drops empty buffers in front.
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        match stream.write_vectored(slices) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut slices, written),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn write_zeros(stream: &mut impl Write, bytes: u64) -> io::Result<()> {
    let mut left = bytes;
    while left > 0 {
        let part = usize::try_from(left)
            .unwrap_or(ZEROS.len())
            .min(ZEROS.len());
        stream.write_all(&ZEROS[..part])?;
        left -= part as u64;
    }
    Ok(())
}

#[cfg(test)]
#[path = "lend_tests.rs"]
mod tests;
