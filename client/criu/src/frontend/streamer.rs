//! The image-streamer front end: gives a restoring CRIU its images through pipes, so that nothing has to be
//! copied into an images directory first.
//!
//! CRIU reads the pages of each process from a pipe of its own, in order, and several processes at once: each
//! file is written by a thread of its own, which lives until CRIU has read it or has closed its end.

use std::io::{self, ErrorKind, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use permafrost_protocol::images::ImageName;
use permafrost_protocol::manifest::{AddressSpace, Manifest};
use permafrost_protocol::streamer::{FileReply, FileRequest};
use permafrost_transport::framing::{self, FramingError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::pipe::Pipe;
use crate::source::{CheckpointSource, PagesOut, ReadError};

/// An image that CRIU requests, as a place in a checkpoint's manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestedImage {
    /// A small image.
    Small(usize),
    /// The pagemap of an address space.
    Pagemap(usize),
    /// The pages of an address space.
    Pages(usize),
}

impl RequestedImage {
    /// Returns the image of that name, if the checkpoint has one.
    fn find(manifest: &Manifest, name: &str) -> Option<Self> {
        // The images are sorted wherever the store wrote them; CRIU requests each of up to a hundred thousand
        // by its name.
        let images = &manifest.images;
        let small = match images.binary_search_by(|image| image.name.as_str().cmp(name)) {
            Ok(at) => Some(at),
            Err(_) => images.iter().position(|image| image.name == name),
        };
        if let Some(at) = small {
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

/// Amount of data that was served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streamed {
    /// Number of files.
    pub files: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// A restore whose serving ended early.
#[derive(Debug, thiserror::Error)]
pub enum StreamError<E> {
    /// CRIU did not connect: its caller hung up, or the time limit passed.
    #[error("CRIU did not come for the images")]
    NobodyCame,
    /// The listening socket or a pipe failed.
    #[error("serve images to CRIU: {0}")]
    Io(#[from] io::Error),
    /// CRIU's requests cannot be decoded.
    #[error("CRIU's request for an image: {0}")]
    Request(#[from] FramingError),
    /// An image is damaged; CRIU saw its pipe end early.
    #[error("an image is damaged")]
    Source(E),
}

/// Waits for CRIU to connect, for `patience` at most or until `caller` hangs up.
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

/// Serves one restore until CRIU hangs up. `served` counts the bytes as they are given, and `progress` receives
/// their number now and then.
///
/// # Errors
/// The first failure; see [`StreamError`].
pub fn stream<S: CheckpointSource<Error: Send> + Sync>(
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
            let image = RequestedImage::find(source.manifest(), &request.filename);
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
                if let Err(error) = give(source, image, pipe, served) {
                    failure.lock().get_or_insert(error);
                }
            });
        }
        Ok(())
    });
    if let Some(error) = failure.into_inner() {
        return Err(error);
    }
    requests.map(|()| Streamed {
        files,
        bytes: served.load(Ordering::Relaxed) - before,
    })
}

fn give<S: CheckpointSource>(
    source: &S,
    image: RequestedImage,
    pipe: OwnedFd,
    served: Arc<AtomicU64>,
) -> Result<(), StreamError<S::Error>> {
    let mut pipe = Pipe::new(pipe, served)?;
    let written = match image {
        RequestedImage::Small(place) => source.small(place, &mut |bytes| pipe.write_all(bytes)),
        RequestedImage::Pagemap(place) => match source.pagemap(place) {
            Ok(pagemap) => pipe.write_all(&pagemap).map_err(ReadError::Taker),
            Err(error) => Err(ReadError::Source(error)),
        },
        RequestedImage::Pages(place) => source.pages(place, &mut PagesOut::Pipe(&mut pipe)),
    };
    match written.and_then(|()| Ok(pipe.flush()?)) {
        Ok(()) => Ok(()),
        Err(ReadError::Source(error)) => Err(StreamError::Source(error)),
        // CRIU reads no further than it needs: the head of an inventory, nothing of a file whose existence it
        // only checks.
        Err(ReadError::Taker(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        Err(ReadError::Taker(error)) => Err(error.into()),
    }
}
