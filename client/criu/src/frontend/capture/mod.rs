//! The image-streamer front end of a dump: takes the images of a dumping CRIU (`criu dump --stream`) through pipes.
//!
//! ```text
//! CRIU ──names, pipes──▶ requests ─┬─ small image ──▶ a thread each ──▶ file in the images directory
//!                                  └─ pagemap, pages ──▶ one thread, space after space ──▶ page-server frames
//! ```
//!
//! Pages go on as frames of the page-server protocol, to a session's own socket: what takes them compares, copies and
//! refuses as in any other dump. CRIU writes the pages of an entry at once, but keeps up to 4096 bytes of a pagemap in
//! a buffer (`criu/bfd.c`): some 200 runs of pages arrive before their addresses, and wait here in memory.
//!
//! The protocol has no acknowledgement. So the caller asks [`Capture::outcome`] in the post-dump script, when CRIU has
//! closed all images and the tasks are still frozen.

mod error;
mod join;
mod receiver;
mod sender;

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use parking_lot::{Condvar, Mutex};
use permafrost_protocol::images::ImageName;
use permafrost_protocol::manifest::is_plain_file_name;
use permafrost_protocol::pageserver::SpaceId;
use permafrost_protocol::streamer::FileRequest;
use permafrost_transport::framing;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;

use self::error::failed;
pub use self::error::{CaptureError, CaptureLimits};
use self::join::Join;
pub use self::receiver::{MAX_SOCKET_PATH, StreamReceiver};
use self::sender::PageSender;

/// Bytes that are read from a pipe at once; a pipe is made this large, too.
const CHUNK_BYTES: usize = 1 << 20;

/// Shared state of a capture's threads.
#[derive(Default)]
struct State {
    /// Number of images whose pipe has not ended.
    open: usize,
    /// True once the inventory, CRIU's last image, is complete.
    has_inventory: bool,
    small_bytes: u64,
    /// Set once: the pages are durable, or why not.
    outcome: Option<Result<(), Arc<CaptureError>>>,
}

/// A dump that is being captured.
#[derive(Clone)]
pub struct Capture {
    state: Arc<(Mutex<State>, Condvar)>,
    limits: CaptureLimits,
    images: PathBuf,
}

/// Pages of a space that are to come.
struct SpaceImages {
    space: SpaceId,
    pages_id: u32,
    pagemap: OwnedFd,
    pages: OwnedFd,
}

impl Capture {
    /// Prepares a capture whose small images go to the directory `images`.
    #[must_use]
    pub fn new(images: &Path, limits: CaptureLimits) -> Self {
        Self {
            state: Arc::default(),
            limits,
            images: images.to_owned(),
        }
    }

    /// Takes images from `criu` until it hangs up, and sends the pages to the session behind `session`. Returns the
    /// outcome of the dump.
    ///
    /// # Errors
    /// The first failure. CRIU sees its socket and its pipes end.
    pub fn run(&self, criu: &UnixStream, session: &UnixStream) -> Result<(), Arc<CaptureError>> {
        thread::scope(|scope| {
            let (spaces, come) = mpsc::channel();
            scope.spawn(move || self.end_with(criu, self.take_spaces(session, &come)));
            self.end_with(criu, self.requests(criu, spaces, scope));
        });
        // Without an outcome by now: CRIU hung up before the post-dump script.
        self.give_up();
        self.outcome()
    }

    /// Fails the capture, unless it has an outcome: the dump is given up from outside.
    pub fn give_up(&self) {
        self.decide(Err(CaptureError::Ended));
    }

    /// Waits for the outcome: `Ok` once all images are here and the session has taken the pages.
    ///
    /// # Errors
    /// The first failure.
    pub fn outcome(&self) -> Result<(), Arc<CaptureError>> {
        let (state, changed) = &*self.state;
        let mut state = state.lock();
        loop {
            if let Some(outcome) = &state.outcome {
                return outcome.clone();
            }
            changed.wait(&mut state);
        }
    }

    fn decide(&self, outcome: Result<(), CaptureError>) {
        let (state, changed) = &*self.state;
        let mut state = state.lock();
        state.outcome.get_or_insert(outcome.map_err(Arc::new));
        changed.notify_all();
    }

    /// Records the end of a part; a failure hangs up on CRIU.
    fn end_with(&self, criu: &UnixStream, result: Result<(), CaptureError>) {
        if result.is_err() {
            // Not connected any more is the only failure.
            let _ = criu.shutdown(Shutdown::Both);
            self.decide(result);
        }
    }

    fn requests<'scope>(
        &'scope self,
        criu: &'scope UnixStream,
        spaces: Sender<SpaceImages>,
        scope: &'scope thread::Scope<'scope, '_>,
    ) -> Result<(), CaptureError> {
        let mut names = HashSet::new();
        let mut pagemap: Option<(SpaceId, OwnedFd)> = None;
        while let Some((request, _)) = framing::recv::<FileRequest>(criu)? {
            let name = request.filename;
            if !is_plain_file_name(&name) {
                return Err(CaptureError::Name { name });
            }
            if names.len() >= self.limits.images {
                let limit = self.limits.images;
                return Err(CaptureError::TooMany { limit });
            }
            if !names.insert(name.clone()) {
                return Err(CaptureError::Twice { name });
            }
            let pipe = take_pipe(criu, &name)?;
            self.state.0.lock().open += 1;
            match (ImageName::parse(&name), pagemap.take()) {
                (ImageName::Pagemap(space), None) => pagemap = Some((space, pipe)),
                (ImageName::Pages(pages_id), Some((space, pagemap))) => {
                    self.state.0.lock().open -= 1;
                    let images = SpaceImages {
                        space,
                        pages_id,
                        pagemap,
                        pages: pipe,
                    };
                    // The receiver has ended with an outcome.
                    let _ = spaces.send(images);
                }
                (ImageName::Pages(_) | ImageName::Pagemap(_), _) | (_, Some(_)) => {
                    return Err(CaptureError::Unpaired { name });
                }
                (kind, None) => {
                    let is_last = kind == ImageName::Inventory;
                    scope.spawn(move || {
                        let taken = self.take_small(&name, pipe);
                        if taken.is_ok() {
                            self.image_ended(is_last);
                        }
                        self.end_with(criu, taken);
                    });
                }
            }
        }
        Ok(())
    }

    fn image_ended(&self, is_last: bool) {
        let (state, changed) = &*self.state;
        let mut state = state.lock();
        state.open -= 1;
        state.has_inventory |= is_last;
        changed.notify_all();
    }

    fn take_small(&self, name: &str, pipe: OwnedFd) -> Result<(), CaptureError> {
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(self.images.join(name));
        let mut file = match file {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                let name = name.to_owned();
                return Err(CaptureError::Twice { name });
            }
            file => file.map_err(failed("create an image"))?,
        };
        let mut pipe = File::from(pipe);
        let mut buffer = vec![0; 64 << 10];
        loop {
            let read = read_some(&mut pipe, &mut buffer)?;
            if read == 0 {
                return Ok(());
            }
            {
                let mut state = self.state.0.lock();
                state.small_bytes += read as u64;
                if state.small_bytes > self.limits.small_bytes {
                    return Err(CaptureError::TooLarge {
                        name: name.to_owned(),
                        limit: self.limits.small_bytes,
                    });
                }
            }
            file.write_all(&buffer[..read])
                .map_err(failed("write an image"))?;
        }
    }

    /// Sends the spaces, in the order in which CRIU opens them, and CLOSE once all images are there.
    fn take_spaces(
        &self,
        session: &UnixStream,
        come: &Receiver<SpaceImages>,
    ) -> Result<(), CaptureError> {
        let mut sender = PageSender::new(session);
        loop {
            match come.try_recv() {
                Ok(images) => {
                    self.take_space(images, &mut sender)?;
                    self.image_ended(false);
                }
                Err(mpsc::TryRecvError::Disconnected) => return Ok(()),
                Err(mpsc::TryRecvError::Empty) => {
                    let (state, changed) = &*self.state;
                    let mut state = state.lock();
                    if state.outcome.is_some() {
                        return Ok(());
                    }
                    if state.has_inventory && state.open == 0 {
                        drop(state);
                        sender.close()?;
                        self.decide(Ok(()));
                        return Ok(());
                    }
                    // Woken by the end of an image; a space is noticed a moment later at most.
                    changed.wait_for(&mut state, std::time::Duration::from_millis(2));
                }
            }
        }
    }

    fn take_space(
        &self,
        images: SpaceImages,
        sender: &mut PageSender<'_>,
    ) -> Result<(), CaptureError> {
        let space = images.space;
        sender.open(space)?;
        let mut joined = Join::new(space, images.pages_id, self.limits.waiting_bytes);
        let (mut pagemap, mut pages) = (
            Some(File::from(images.pagemap)),
            Some(File::from(images.pages)),
        );
        let mut buffer = vec![0; CHUNK_BYTES];
        while pagemap.is_some() || pages.is_some() {
            if self.state.0.lock().outcome.is_some() {
                return Err(CaptureError::Ended);
            }
            let [entries_came, pages_came] = ready(pagemap.as_ref(), pages.as_ref())?;
            if let Some(file) = pagemap.as_mut().filter(|_| entries_came) {
                match read_some(file, &mut buffer)? {
                    0 => pagemap = None,
                    read => joined.entries(&buffer[..read])?,
                }
            }
            if let Some(file) = pages.as_mut().filter(|_| pages_came) {
                match read_some(file, &mut buffer)? {
                    0 => pages = None,
                    read => joined.pages(&buffer[..read])?,
                }
            }
            joined.send(|vaddr, flags, bytes| sender.pages(space, vaddr, flags, bytes))?;
        }
        joined.finish()
    }
}

/// Receives the pipe of an image, and makes it large.
fn take_pipe(criu: &UnixStream, name: &str) -> Result<OwnedFd, CaptureError> {
    let no_pipe = || CaptureError::NoPipe {
        name: name.to_owned(),
    };
    let pipe = framing::recv_fd(criu).map_err(|_| no_pipe())?;
    let stat = rustix::fs::fstat(&pipe).map_err(|_| no_pipe())?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Fifo {
        return Err(no_pipe());
    }
    let flags = rustix::fs::fcntl_getfl(&pipe).map_err(|_| no_pipe())?;
    if flags.contains(OFlags::WRONLY) {
        return Err(no_pipe());
    }
    // A smaller pipe does, where the user's pipes are limited.
    let _ = rustix::pipe::fcntl_setpipe_size(&pipe, CHUNK_BYTES);
    Ok(pipe)
}

fn read_some(file: &mut File, buffer: &mut [u8]) -> Result<usize, CaptureError> {
    loop {
        match file.read(buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            read => return read.map_err(failed("read an image from CRIU's pipe")),
        }
    }
}

/// Waits until one of two pipes can be read.
fn ready(first: Option<&File>, second: Option<&File>) -> Result<[bool; 2], CaptureError> {
    let files: Vec<&File> = first.into_iter().chain(second).collect();
    let mut fds: Vec<PollFd<'_>> = files
        .iter()
        .map(|file| PollFd::from_borrowed_fd(file.as_fd(), PollFlags::IN))
        .collect();
    // Woken now and then to see an outcome that another thread has decided.
    let tick = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: 100_000_000,
    };
    match poll(&mut fds, Some(&tick)) {
        Err(Errno::INTR) => return Ok([false; 2]),
        polled => polled.map_err(|error| failed("wait for CRIU's pipes")(error.into()))?,
    };
    let mut came = fds.iter().map(|fd| !fd.revents().is_empty());
    let first = first.is_some() && came.next().unwrap_or(false);
    Ok([first, second.is_some() && came.next().unwrap_or(false)])
}

#[cfg(test)]
mod tests;
