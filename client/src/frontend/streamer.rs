//! The image-streamer front end: gives a restoring CRIU its images through pipes, so that nothing has to be
//! copied into an images directory first.
//!
//! CRIU reads the pages of each process from a pipe of its own, in order, and several processes at once: each
//! file is written by a thread of its own, which lives until CRIU has read it or has closed its end.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use permafrost_protocol::images::ImageName;
use permafrost_protocol::manifest::{AddressSpace, Manifest};
use permafrost_protocol::streamer::{FileReply, FileRequest};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::framing::{self, FramingError};

/// Asked for each pipe; the default of 64 KiB makes the two sides take turns. What a user without
/// privileges may have (fs.pipe-max-size).
const PIPE_BYTES: usize = 1 << 20;

/// What zero pages are written from.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// What CRIU asks for, as places in a checkpoint's manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// A small image.
    Small(usize),
    /// The pagemap of an address space.
    Pagemap(usize),
    /// The pages of an address space.
    Pages(usize),
}

impl Wanted {
    /// The image of that name, if the checkpoint has one.
    #[must_use]
    pub fn find(manifest: &Manifest, name: &str) -> Option<Self> {
        let mut images = manifest.images.iter();
        if let Some(at) = images.position(|image| image.name == name) {
            return Some(Self::Small(at));
        }
        let place = |is: &dyn Fn(&AddressSpace) -> bool| manifest.spaces.iter().position(is);
        match ImageName::parse(name) {
            ImageName::Pagemap(id) => {
                place(&|space| space.space_type() == id.space_type && space.id == id.id)
                    .map(Self::Pagemap)
            }
            ImageName::Pages(id) => place(&|space| space.pages_id == id).map(Self::Pages),
            _ => None,
        }
    }
}

/// What a restoring CRIU is served from.
pub trait ImageSource: Sync {
    /// One image.
    type Image: Send;
    /// Why an image cannot be given.
    type Error: Send;

    /// The image of that name, if there is one.
    fn find(&self, name: &str) -> Option<Self::Image>;

    /// Writes an image, verified, to `pipe`; bytes written.
    ///
    /// # Errors
    /// See [`ImageError`].
    fn write(&self, image: &Self::Image, pipe: &mut Pipe) -> Result<u64, ImageError<Self::Error>>;
}

/// What CRIU reads an image from.
pub struct Pipe {
    end: File,
    capacity_bytes: u64,
    /// Counts what is written.
    served: Arc<AtomicU64>,
}

impl Pipe {
    fn new(end: OwnedFd, served: Arc<AtomicU64>) -> io::Result<Self> {
        // A user's pipes may be at their limit already; the size it has is then good enough.
        if let Err(error) = rustix::pipe::fcntl_setpipe_size(&end, PIPE_BYTES) {
            tracing::debug!(%error, "pipe left at its default size");
        }
        let capacity = rustix::pipe::fcntl_getpipe_size(&end)?;
        Ok(Self {
            end: File::from(end),
            capacity_bytes: capacity as u64,
            served,
        })
    }

    /// How much can be in the pipe, unread.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Lets the pipe refer to `len_bytes` bytes at `at` of `file`, without copying them: they must not change
    /// until CRIU has read them. That is so, at the latest, when [`Pipe::capacity_bytes`] more bytes have been
    /// written.
    ///
    /// # Errors
    /// CRIU has closed its end, or `file` ends early.
    pub fn splice(&mut self, file: BorrowedFd<'_>, at: u64, len_bytes: u64) -> io::Result<()> {
        let (mut at, end) = (at, at + len_bytes);
        while at < end {
            let len = usize::try_from(end - at).unwrap_or(usize::MAX);
            let flags = rustix::pipe::SpliceFlags::empty();
            match rustix::pipe::splice(file, Some(&mut at), &self.end, None, len, flags) {
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

    /// Writes so many zeros.
    ///
    /// # Errors
    /// CRIU has closed its end.
    pub fn write_zeros(&mut self, mut bytes: u64) -> io::Result<()> {
        while bytes > 0 {
            let chunk = usize::try_from(bytes).map_or(ZEROS.len(), |left| left.min(ZEROS.len()));
            self.write_all(&ZEROS[..chunk])?;
            bytes -= chunk as u64;
        }
        Ok(())
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.end.write(bytes)?;
        self.served.fetch_add(written as u64, Ordering::Relaxed);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Why an image could not be given.
#[derive(Debug)]
pub enum ImageError<E> {
    /// It could not be read.
    Source(E),
    /// It could not be written.
    Out(io::Error),
}

impl<E> From<io::Error> for ImageError<E> {
    fn from(error: io::Error) -> Self {
        Self::Out(error)
    }
}

/// What was served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streamed {
    /// Files.
    pub files: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Why serving ended early.
#[derive(Debug, thiserror::Error)]
pub enum StreamError<E> {
    /// CRIU did not connect: its caller hung up, or time was up.
    #[error("CRIU did not come for the images")]
    NobodyCame,
    /// The listening socket or a pipe failed.
    #[error("serve images to CRIU: {0}")]
    Io(#[from] io::Error),
    /// CRIU's requests do not decode.
    #[error("CRIU's request for an image: {0}")]
    Request(#[from] FramingError),
    /// An image is damaged; CRIU saw its pipe end early.
    #[error("an image is damaged")]
    Source(E),
}

/// Waits for CRIU to connect, for `patience` at most or until `caller` has nothing more to say.
///
/// # Errors
/// [`StreamError::NobodyCame`], or the socket fails.
pub fn accept<E>(
    listener: &UnixListener,
    caller: &UnixStream,
    patience: Duration,
) -> Result<UnixStream, StreamError<E>> {
    listener.set_nonblocking(true)?;
    let seconds = i64::try_from(patience.as_secs()).unwrap_or(i64::MAX);
    let timeout = Timespec {
        tv_sec: seconds,
        tv_nsec: 0,
    };
    loop {
        let mut fds = [
            PollFd::new(listener, PollFlags::IN),
            PollFd::new(caller, PollFlags::RDHUP | PollFlags::HUP),
        ];
        match poll(&mut fds, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => continue,
            ready => ready.map_err(io::Error::from)?,
        };
        if fds[0].revents().contains(PollFlags::IN) {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    return Ok(stream);
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
                {
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
        }
        return Err(StreamError::NobodyCame);
    }
}

/// Serves one restore until CRIU hangs up. `served` counts the bytes as they are given; `progress` is told them now and
/// then.
///
/// # Errors
/// See [`StreamError`]; the first failure counts.
pub fn stream<S: ImageSource>(
    criu: &UnixStream,
    source: &S,
    served: &Arc<AtomicU64>,
    progress: &mut dyn FnMut(u64),
) -> Result<Streamed, StreamError<S::Error>> {
    let before = served.load(Ordering::Relaxed);
    let failure = Mutex::new(None);
    let mut files = 0;
    let requests = std::thread::scope(|scope| {
        while let Some((request, _)) = framing::recv::<FileRequest>(criu)? {
            let image = source.find(&request.filename);
            framing::send(
                criu,
                &FileReply {
                    exists: image.is_some(),
                },
                &[],
            )?;
            let Some(image) = image else { continue };
            let pipe = framing::recv_fd(criu)?;
            files += 1;
            progress(served.load(Ordering::Relaxed) - before);
            let (served, failure) = (Arc::clone(served), &failure);
            scope.spawn(move || {
                if let Err(error) = give(source, &image, pipe, served) {
                    failure
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .get_or_insert(error);
                }
            });
        }
        Ok(())
    });
    if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    requests.map(|()| Streamed {
        files,
        bytes: served.load(Ordering::Relaxed) - before,
    })
}

fn give<S: ImageSource>(
    source: &S,
    image: &S::Image,
    pipe: OwnedFd,
    served: Arc<AtomicU64>,
) -> Result<(), StreamError<S::Error>> {
    match source.write(image, &mut Pipe::new(pipe, served)?) {
        Ok(_) => Ok(()),
        Err(ImageError::Source(error)) => Err(StreamError::Source(error)),
        // CRIU reads no further than it needs: the head of an inventory, nothing of a file it only asked for.
        Err(ImageError::Out(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        Err(ImageError::Out(error)) => Err(error.into()),
    }
}
