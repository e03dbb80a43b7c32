//! Bytes that wait between CRIU's pipe and the sink, as references to the pages of the process that is dumped.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind, Read as _};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags};

use super::SpaceError;
use super::error::failed;
use super::room::{PipeRoom, UsedRoom};

/// Sizes of a part's pipe, the first that this process may have: CAP_SYS_RESOURCE, or fs.pipe-max-size.
pub(super) const PIPE_BYTES: &[usize] = &[PART_BYTES, SMALL_PIPE_BYTES];

/// Size that every process may give a pipe.
pub(super) const SMALL_PIPE_BYTES: usize = 1 << 20;

/// Bytes that are taken at once, and of a part that is a file.
const PART_BYTES: usize = 16 << 20;

/// Most parts beyond those that the limit of bytes needs: a pipe is full with fewer bytes where pieces are small.
const SPARE_PARTS: u64 = 64;

/// State of a pipe after a transfer out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Went {
    /// Some bytes came, or none for now.
    On,
    /// The pipe has ended.
    Ended,
}

/// Bytes in their order, which are copied when they are read. Reads and writes never wait: the descriptors that bytes
/// come from are shared with others.
pub(super) struct Waiting {
    parts: VecDeque<Part>,
    bytes: u64,
    limit: u64,
    /// Sizes of pipes to try; files alone if there are none.
    pipes: &'static [usize],
    room: Arc<PipeRoom>,
}

/// A pipe of this process's own; or a file in memory, which the bytes are copied into, where a user's pipes may not be
/// large enough.
struct Part {
    read: File,
    /// Write end of a pipe that may have room.
    write: Option<OwnedFd>,
    is_pipe: bool,
    _room: Option<UsedRoom>,
    filled: u64,
    taken: u64,
}

impl Waiting {
    pub(super) fn new(limit: u64, pipes: &'static [usize], room: &Arc<PipeRoom>) -> Self {
        Self {
            parts: VecDeque::new(),
            bytes: 0,
            limit,
            pipes,
            room: Arc::clone(room),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn is_full(&self) -> bool {
        let parts = self.parts.len() as u64;
        self.bytes >= self.limit || parts > self.limit / SMALL_PIPE_BYTES as u64 + SPARE_PARTS
    }

    /// Takes what a pipe has, as much as one part has room for.
    pub(super) fn come_from(&mut self, pipe: &OwnedFd) -> Result<Went, SpaceError> {
        let failed = |error: Errno| failed("take pages out of CRIU's pipe")(error.into());
        let room = usize::try_from(self.limit.saturating_sub(self.bytes)).unwrap_or(usize::MAX);
        for _ in 0..2 {
            let part = match self.parts.back_mut() {
                Some(part) if part.has_room() => part,
                _ => {
                    self.begin_part()?;
                    continue;
                }
            };
            match part.splice(pipe, room.clamp(1, PART_BYTES)) {
                Ok(0) => return Ok(Went::Ended),
                Ok(bytes) => {
                    self.bytes += bytes;
                    return Ok(Went::On);
                }
                Err(Errno::INTR) => return Ok(Went::On),
                // Either the pipe is empty, because somebody else has read it, or the part is full.
                Err(Errno::AGAIN) if part.is_empty() => return Ok(Went::On),
                Err(Errno::AGAIN) => self.begin_part()?,
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(Went::On)
    }

    fn begin_part(&mut self) -> Result<(), SpaceError> {
        if let Some(full) = self.parts.back_mut() {
            full.write = None;
        }
        self.parts.push_back(Part::new(self.pipes, &self.room)?);
        Ok(())
    }

    /// Reads some bytes; none only if there are none.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> Result<usize, SpaceError> {
        while let Some(part) = self.parts.front_mut() {
            if part.is_empty() {
                if self.parts.len() == 1 {
                    break;
                }
                self.parts.pop_front();
                continue;
            }
            let read = part.read(buffer).map_err(failed("read pages"))?;
            self.bytes -= read as u64;
            return Ok(read);
        }
        Ok(0)
    }

    /// Fills a buffer that is not longer than what there is.
    pub(super) fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), SpaceError> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.read(&mut buffer[filled..])? {
                0 => return Err(failed("read pages")(ErrorKind::UnexpectedEof.into())),
                read => filled += read,
            }
        }
        Ok(())
    }
}

impl Part {
    fn new(pipes: &[usize], room: &Arc<PipeRoom>) -> Result<Self, SpaceError> {
        let failed = |error: Errno| failed("make a file for pages in memory")(error.into());
        let flags = PipeFlags::CLOEXEC | PipeFlags::NONBLOCK;
        // Refused where the user has as many pipes, or the process as many descriptors, as it may.
        let pipe = rustix::pipe::pipe_with(flags).ok().filter(|(read, _)| {
            let enlarge = |bytes: &usize| rustix::pipe::fcntl_setpipe_size(read, *bytes).is_ok();
            pipes.iter().any(enlarge)
        });
        let is_pipe = pipe.is_some();
        let room = pipe.as_ref().and_then(|(read, _)| {
            let size = rustix::pipe::fcntl_getpipe_size(read).ok()?;
            Some(UsedRoom::new(room, size as u64))
        });
        let (read, write) = match pipe {
            Some((read, write)) => (read, Some(write)),
            None => {
                let name = "permafrost-pages";
                let memory = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC);
                (memory.map_err(failed)?, None)
            }
        };
        Ok(Self {
            read: File::from(read),
            write,
            is_pipe,
            _room: room,
            filled: 0,
            taken: 0,
        })
    }

    fn is_empty(&self) -> bool {
        self.taken == self.filled
    }

    /// Returns false if it is known to be full.
    fn has_room(&self) -> bool {
        match self.is_pipe {
            true => self.write.is_some(),
            false => self.is_empty() || self.filled < PART_BYTES as u64,
        }
    }

    fn splice(&mut self, from: &OwnedFd, len: usize) -> Result<u64, Errno> {
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let bytes = match &self.write {
            Some(write) => rustix::pipe::splice(from, None, write, None, len, flags)?,
            None if self.is_pipe => return Err(Errno::AGAIN),
            None => {
                if self.is_empty() && self.filled > 0 {
                    rustix::fs::ftruncate(&self.read, 0)?;
                    rustix::fs::seek(&self.read, rustix::fs::SeekFrom::Start(0))?;
                    (self.filled, self.taken) = (0, 0);
                }
                let room = (PART_BYTES as u64).saturating_sub(self.filled);
                let len = len.min(usize::try_from(room).unwrap_or(usize::MAX));
                let mut at = self.filled;
                rustix::pipe::splice(from, None, &self.read, Some(&mut at), len, flags)?
            }
        };
        self.filled += bytes as u64;
        Ok(bytes as u64)
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.read.read(buffer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // It holds what was counted, so it has not ended.
                Ok(0) if !buffer.is_empty() => return Err(ErrorKind::UnexpectedEof.into()),
                read => {
                    let read = read?;
                    self.taken += read as u64;
                    return Ok(read);
                }
            }
        }
    }
}
