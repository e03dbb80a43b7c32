//! The pipe that a restoring CRIU reads an image from.
//!
//! A write copies into the pipe under its lock; CRIU's read copies out of it under the same lock, and meanwhile
//! faults in the memory that it restores. The two then wait for each other more than they copy, and with short
//! pieces each wakes the other up for every one of them. So a pipe is made to *refer* to pages (`splice`),
//! which holds the lock only briefly: to the pages of a file, and for data without a file to a copy in a memory
//! of the pipe's own.

use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use permafrost_protocol::PAGE_BYTES;
use rustix::fs::MemfdFlags;
use rustix::pipe::SpliceFlags;

/// Size requested for each pipe; the default of 64 KiB makes the two sides wait for each other. The largest
/// size for a user without privileges (fs.pipe-max-size).
const PIPE_BYTES: usize = 1 << 20;

/// Number of bytes up to which short pieces are gathered.
const GATHERED_BYTES: usize = 64 << 10;

/// Most bytes that are copied at once before the pipe refers to them.
const COPIED_BYTES: usize = 256 << 10;

/// Size below which data is written into the pipe directly: most images are that small, and need no memory for
/// it.
const STAGED_BYTES: usize = 32 << 10;

/// Zeros for the writing of a few zero pages.
static ZEROS: [u8; GATHERED_BYTES] = [0; GATHERED_BYTES];

/// Pipe from which CRIU reads an image. Written data may be missing in the pipe until [`Write::flush`].
pub struct Pipe {
    end: BufWriter<End>,
}

impl Pipe {
    pub(super) fn new(pipe: OwnedFd, served: Arc<AtomicU64>) -> io::Result<Self> {
        // A user's pipes may be at their limit already; the size it has is then good enough.
        if let Err(error) = rustix::pipe::fcntl_setpipe_size(&pipe, PIPE_BYTES) {
            tracing::debug!(%error, "pipe left at its default size");
        }
        let capacity = rustix::pipe::fcntl_getpipe_size(&pipe)?;
        let end = End {
            out: Out {
                pipe: File::from(pipe),
                served,
            },
            capacity_bytes: capacity as u64,
            staging: None,
            failed: false,
        };
        Ok(Self {
            end: BufWriter::with_capacity(GATHERED_BYTES, end),
        })
    }

    /// Returns the most bytes that can be in the pipe unread.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.end.get_ref().capacity_bytes
    }

    /// Lets the pipe refer to the bytes of `file` from `at` to `end`, without copying them: they must not
    /// change until CRIU has read them. That is so, at the latest, when [`Pipe::capacity_bytes`] more bytes
    /// have been written and flushed. `at` advances with the bytes that the pipe refers to.
    ///
    /// # Errors
    /// CRIU has closed its end, or `file` ends early or cannot be read: nothing from `at` on is in the pipe.
    pub fn splice(&mut self, file: BorrowedFd<'_>, at: &mut u64, end: u64) -> io::Result<()> {
        self.end.flush()?;
        self.end.get_ref().out.refer(file, at, end)
    }

    /// Calls `refer` with the pipe, so that the pipe refers to memory, and returns the bytes that it then does. As for
    /// [`Pipe::splice`], the memory must not change until CRIU has read it.
    ///
    /// # Errors
    /// Those of `refer`.
    pub fn refer(
        &mut self,
        refer: impl FnOnce(BorrowedFd<'_>) -> io::Result<usize>,
    ) -> io::Result<usize> {
        self.end.flush()?;
        let out = &self.end.get_ref().out;
        let bytes = refer(out.pipe.as_fd())?;
        out.served.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(bytes)
    }

    /// Writes zeros, as many as `bytes`. Long runs are not copied.
    ///
    /// # Errors
    /// CRIU has closed its end.
    pub fn write_zeros(&mut self, bytes: u64) -> io::Result<()> {
        if let Some(zeros) = usize::try_from(bytes).ok().and_then(|len| ZEROS.get(..len)) {
            return self.end.write_all(zeros);
        }
        self.end.flush()?;
        self.end.get_mut().refer_to_zeros(bytes)
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.end.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.end.flush()
    }
}

/// Writing end of the pipe, and the memory that is written from.
struct End {
    out: Out,
    capacity_bytes: u64,
    staging: Option<Staging>,
    /// True if a write failed and its data may be in the pipe in part. The data must not be written again,
    /// which a `BufWriter` tries when it is dropped: the image then ends early, and the restore fails.
    failed: bool,
}

struct Out {
    pipe: File,
    /// Counts the bytes that are, or were, in the pipe.
    served: Arc<AtomicU64>,
}

impl Out {
    fn refer(&self, file: impl AsFd, at: &mut u64, end: u64) -> io::Result<()> {
        while *at < end {
            let left = usize::try_from(end - *at).unwrap_or(usize::MAX);
            let flags = SpliceFlags::empty();
            match rustix::pipe::splice(&file, Some(at), &self.pipe, None, left, flags) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => {
                    self.served.fetch_add(bytes as u64, Ordering::Relaxed);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.pipe.write(bytes)?;
        self.served.fetch_add(written as u64, Ordering::Relaxed);
        Ok(written)
    }
}

impl End {
    fn refer_to_zeros(&mut self, mut bytes: u64) -> io::Result<()> {
        let (out, staging) = self.staged()?;
        while bytes > 0 {
            let some = bytes.min(Staging::ZERO_BYTES);
            out.refer(&staging.memory, &mut 0, some)?;
            bytes -= some;
        }
        Ok(())
    }

    fn write_staged(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (out, staging) = self.staged()?;
        let (mut at, len) = staging.copy(bytes)?;
        let end = at + len as u64;
        out.refer(&staging.memory, &mut at, end)?;
        Ok(len)
    }

    fn staged(&mut self) -> io::Result<(&Out, &mut Staging)> {
        let staging = match &mut self.staging {
            Some(staging) => staging,
            none => none.insert(Staging::new(self.capacity_bytes)?),
        };
        Ok((&self.out, staging))
    }
}

impl Write for End {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.failed {
            return Err(ErrorKind::BrokenPipe.into());
        }
        if bytes.len() < STAGED_BYTES {
            return self.out.write(bytes);
        }
        let written = self.write_staged(bytes);
        self.failed = written.is_err();
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Memory that the pipe refers to: zeros, and behind them a ring of the data copied last. When the ring reuses
/// a position, CRIU has read its old data, because more than a pipe full has gone into the pipe since then.
/// While an image is given, uses as much memory as was copied, at most half a MiB more than the pipe's size.
struct Staging {
    memory: File,
    next: u64,
    end: u64,
}

impl Staging {
    /// Size of the zeros at the beginning. They are a hole: no memory at all on kernels from 6.5 on.
    const ZERO_BYTES: u64 = COPIED_BYTES as u64;

    fn new(pipe_bytes: u64) -> io::Result<Self> {
        let memory = rustix::fs::memfd_create("permafrost-restore", MemfdFlags::CLOEXEC)?;
        let memory = File::from(memory);
        // Up to one copy's length is left out at the end of each round, and one is being made.
        let end = Self::ZERO_BYTES + pipe_bytes + 2 * COPIED_BYTES as u64;
        memory.set_len(end)?;
        Ok(Self {
            memory,
            next: Self::ZERO_BYTES,
            end,
        })
    }

    /// Copies some of `bytes`. Returns their position and their number.
    fn copy(&mut self, bytes: &[u8]) -> io::Result<(u64, usize)> {
        let some = bytes.get(..COPIED_BYTES).unwrap_or(bytes);
        if self.next + some.len() as u64 > self.end {
            self.next = Self::ZERO_BYTES;
        }
        let at = self.next;
        self.memory.write_all_at(some, at)?;
        // Whole pages: a place of the pipe refers to no more than one.
        self.next = (at + some.len() as u64).next_multiple_of(PAGE_BYTES);
        Ok((at, some.len()))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};

    use super::*;

    /// Bytes that differ from place to place.
    fn bytes(place: usize, len: usize) -> Vec<u8> {
        (place..place + len)
            .map(|at| (at ^ (at >> 8) ^ (at >> 16)).to_le_bytes()[0])
            .collect()
    }

    /// Returns the data of `write` as received by a reader that takes `at_once` bytes at a time, and the number
    /// of bytes counted.
    fn read(
        at_once: usize,
        pipe_bytes: usize,
        write: impl FnOnce(&mut Pipe) -> io::Result<()> + Send,
    ) -> (Vec<u8>, u64) {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let served = Arc::new(AtomicU64::new(0));
        let mut pipe = Pipe::new(writer, Arc::clone(&served)).unwrap();
        rustix::pipe::fcntl_setpipe_size(&reader, pipe_bytes).unwrap();
        let got = std::thread::scope(|scope| {
            scope.spawn(move || {
                write(&mut pipe).unwrap();
                pipe.flush().unwrap();
            });
            let mut reader = File::from(reader);
            let (mut got, mut buffer) = (Vec::new(), vec![0; at_once]);
            loop {
                match reader.read(&mut buffer).unwrap() {
                    0 => return got,
                    some => got.extend_from_slice(&buffer[..some]),
                }
            }
        });
        (got, served.load(Ordering::Relaxed))
    }

    #[test]
    fn pieces_of_all_lengths_arrive_in_order() {
        const FILE: usize = 3 << 20;
        let mut file = a_file();
        file.write_all(&bytes(7, FILE)).unwrap();
        // Far more than the ring, so that it comes round several times.
        let lengths = [
            1,
            4096,
            12_288,
            GATHERED_BYTES - 1,
            GATHERED_BYTES,
            GATHERED_BYTES + 1,
            COPIED_BYTES + 5,
            3 * COPIED_BYTES,
            40_000,
        ];
        let mut wanted = Vec::new();
        let mut steps = Vec::new();
        for round in 0..40 {
            let len = lengths[round % lengths.len()];
            let zeros = lengths[(round * 5 + 2) % lengths.len()];
            let (at, spliced) = (round * 4096, lengths[(round * 7 + 3) % lengths.len()]);
            wanted.extend(bytes(round * 31, len));
            wanted.resize(wanted.len() + zeros, 0);
            wanted.extend(bytes(7 + at, spliced));
            steps.push((round, len, zeros, at as u64, spliced as u64));
        }
        for (at_once, pipe_bytes) in [(1 << 20, PIPE_BYTES), (4096, PIPE_BYTES), (100_000, 65_536)]
        {
            let (got, served) = read(at_once, pipe_bytes, |pipe| {
                for &(round, len, zeros, at, spliced) in &steps {
                    pipe.write_all(&bytes(round * 31, len))?;
                    pipe.write_zeros(zeros as u64)?;
                    pipe.splice(file.as_fd(), &mut { at }, at + spliced)?;
                }
                Ok(())
            });
            assert_eq!(served, wanted.len() as u64);
            assert!(got == wanted, "read {at_once} at once");
        }
    }

    /// Makes the reader wait until the writer waits for it: the contents of the pipe then must be the data
    /// written.
    #[test]
    fn nothing_that_is_still_in_the_pipe_changes() {
        let wanted: Vec<u8> = bytes(3, 16 << 20);
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let pipe = Pipe::new(writer, Arc::default()).unwrap();
        let capacity = pipe.capacity_bytes();
        let got = std::thread::scope(|scope| {
            let written = Arc::clone(&pipe.end.get_ref().out.served);
            scope.spawn(|| {
                let mut pipe = pipe;
                // No multiple of anything.
                for piece in wanted.chunks(50_021) {
                    pipe.write_all(piece).unwrap();
                }
                pipe.flush().unwrap();
            });
            let mut reader = File::from(reader);
            let (mut got, mut page) = (Vec::new(), [0; 4096]);
            loop {
                // The most that can be ahead of the reader: a pipe whose places are all full, or all that is left. Not
                // reached where pages are not filled up, so only waited for a little.
                let full = (got.len() as u64 + capacity).min(wanted.len() as u64);
                for _ in 0..20 {
                    if written.load(Ordering::Relaxed) >= full {
                        break;
                    }
                    std::thread::yield_now();
                }
                match reader.read(&mut page).unwrap() {
                    0 => return got,
                    some => got.extend_from_slice(&page[..some]),
                }
            }
        });
        assert!(got == wanted);
    }

    /// Uses a full, non-blocking pipe, which cuts a write off in its middle.
    #[test]
    fn nothing_follows_what_went_in_in_part() {
        let wanted = bytes(5, 4 << 20);
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::NONBLOCK).unwrap();
        let mut pipe = Pipe::new(writer, Arc::default()).unwrap();
        // Pieces of ten places each, which do not fill the pipe exactly.
        let failed = wanted
            .chunks(40_000)
            .find_map(|piece| pipe.write_all(piece).err());
        assert_eq!(failed.unwrap().kind(), ErrorKind::WouldBlock);
        let mut reader = File::from(reader);
        let mut got = vec![0; 512 << 10];
        reader.read_exact(&mut got).unwrap();
        drop(pipe);
        reader.read_to_end(&mut got).unwrap();
        assert!(wanted.starts_with(&got), "{} bytes", got.len());
    }

    #[test]
    fn a_file_that_ends_early_is_told() {
        let mut file = a_file();
        file.write_all(&[1; 5000]).unwrap();
        file.rewind().unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let mut pipe = Pipe::new(writer, Arc::default()).unwrap();
        let error = pipe.splice(file.as_fd(), &mut 0, 8192).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
        drop(reader);
        let error = pipe.write_zeros(1 << 20).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    }

    fn a_file() -> File {
        File::from(rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap())
    }
}
