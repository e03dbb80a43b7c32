//! The image-streamer front end of a dump: takes the images of a dumping CRIU (`criu dump --stream`) through pipes.
//!
//! ```text
//! CRIU ──names, pipes──▶ requests ─┬─ small image ──▶ a thread each ──▶ file in the images directory
//!                                  └─ pagemap, pages ──▶ one thread, space after space ──▶ permafrostd
//! ```
//!
//! The pipes of the pages are handed to permafrostd, which takes them into its region: no page comes through this process.
//!
//! The protocol has no acknowledgement. So the caller asks [`Capture::outcome`] in the post-dump script, when CRIU has
//! closed all images and the tasks are still frozen.

mod error;
mod receiver;

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use parking_lot::{Condvar, Mutex};
use permafrost_protocol::control::request;
use permafrost_protocol::images::ImageName;
use permafrost_protocol::manifest::is_plain_file_name;
use permafrost_protocol::pageserver::SpaceId;
use permafrost_protocol::streamer::FileRequest;
use permafrost_transport::control::{Canceller, Connection, ControlError};
use permafrost_transport::framing;
use rustix::fs::{FileType, OFlags};

use self::error::failed;
pub use self::error::{CaptureError, CaptureLimits};
pub use self::receiver::{MAX_SOCKET_PATH, StreamReceiver};

/// Size of an image's pipe: the largest for a user without privileges (fs.pipe-max-size).
const PIPE_BYTES: usize = 1 << 20;

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
    /// Ends the connection of the pages.
    session: Arc<Canceller>,
}

/// Pages of a space that are to come.
struct SpaceImages {
    space: SpaceId,
    pages_id: u32,
    pagemap: OwnedFd,
    pages: OwnedFd,
}

impl SpaceImages {
    /// Reads the pipes to their ends, and keeps nothing: CRIU has written all, or has ended.
    fn drain(self) {
        let drain = |pipe: OwnedFd| io::copy(&mut File::from(pipe), &mut io::sink());
        thread::scope(|scope| {
            // An error is an end, too.
            scope.spawn(|| drain(self.pagemap));
            let _ = drain(self.pages);
        });
    }
}

impl Capture {
    /// Prepares a capture whose small images go to the directory `images`; `session` ends the connection of its pages.
    #[must_use]
    pub fn new(images: &Path, limits: CaptureLimits, session: Canceller) -> Self {
        Self {
            state: Arc::default(),
            limits,
            images: images.to_owned(),
            session: Arc::new(session),
        }
    }

    /// Takes images from `criu` until it hangs up, and hands the pipes of the pages over for a session, with requests over
    /// a connection of their own. Returns the outcome of the dump.
    ///
    /// # Errors
    /// The first failure. CRIU sees its socket and its pipes end.
    pub fn run(
        &self,
        criu: &UnixStream,
        session: &str,
        connection: &mut Connection,
    ) -> Result<(), Arc<CaptureError>> {
        thread::scope(|scope| {
            let (spaces, come) = mpsc::channel();
            scope.spawn(move || {
                self.end_with(
                    criu,
                    self.hand_over_spaces(criu, session, connection, &come),
                );
            });
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
        let decided = state.outcome.get_or_insert(outcome.map_err(Arc::new));
        if decided.is_err() {
            // The session is not to take the pages, and nobody waits for it to do so.
            self.session.cancel();
        }
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
                    self.state.1.notify_all();
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

    /// Hands the spaces over in the order in which CRIU opens them, and ends the pages once all images are there.
    fn hand_over_spaces(
        &self,
        criu: &UnixStream,
        session: &str,
        connection: &mut Connection,
        come: &Receiver<SpaceImages>,
    ) -> Result<(), CaptureError> {
        loop {
            match come.try_recv() {
                Ok(images) => {
                    let take = request::TakeSpace {
                        session: session.to_owned(),
                        space_type: images.space.space_type.into(),
                        space: images.space.id,
                        pages_id: images.pages_id,
                    };
                    let pipes = [images.pagemap.as_fd(), images.pages.as_fd()];
                    if let Err(error) = connection.call_with_all(take, &pipes) {
                        let was_answered = matches!(error, ControlError::Refused { .. });
                        self.end_with(criu, Err(error.into()));
                        if !was_answered {
                            // A daemon that hangs has the pipes, and does not read them: CRIU would wait for it, and
                            // the frozen task for CRIU. Nobody waits for the end of this.
                            thread::spawn(move || images.drain());
                        }
                        return Ok(());
                    }
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
                        let session = session.to_owned();
                        connection.call(request::EndPages { session })?;
                        self.decide(Ok(()));
                        return Ok(());
                    }
                    // Woken by a space and by the end of an image; one that came before the wait is noticed a moment later.
                    changed.wait_for(&mut state, std::time::Duration::from_millis(2));
                }
            }
        }
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
    let _ = rustix::pipe::fcntl_setpipe_size(&pipe, PIPE_BYTES);
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

#[cfg(test)]
mod tests;
