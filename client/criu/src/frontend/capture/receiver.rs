//! The receiver of a stream, in threads of the command that dumps.
//!
//! ```text
//! CRIU ── streamer-capture.sock ──▶ receiver ── the pipes of pages ──▶ permafrostd
//!   └─ post-dump script ── PERMAFROST_STREAM: are all there? ──▶ │
//!                       └── Seal ──▶ permafrostd
//! ```

use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use permafrost_protocol::streamer::CAPTURE_SOCKET;
use permafrost_transport::control::Connection;

use super::super::streamer::accept;
use super::{Capture, CaptureError, CaptureLimits};
use crate::verdict::STREAM_ENDED;

/// Name of the socket at which the post-dump script asks for the outcome, beside the images directory.
const OUTCOME_SOCKET: &str = "stream.sock";

/// Longest path of an AF_UNIX socket, bytes (`sun_path` without its end).
pub const MAX_SOCKET_PATH: usize = 107;

/// Longest wait for CRIU to connect: it does so before it freezes anything.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Receiver of a stream, in threads of its own.
pub struct StreamReceiver {
    /// Socket at which it reports the outcome.
    pub outcome: PathBuf,
    taken: JoinHandle<Result<(), Arc<CaptureError>>>,
}

impl StreamReceiver {
    /// Returns true if the path of the socket in `images` to which CRIU connects is short enough.
    #[must_use]
    pub fn fits(images: &Path) -> bool {
        images.join(CAPTURE_SOCKET).as_os_str().len() <= MAX_SOCKET_PATH
    }

    /// Starts the receiver of a dump into `images`, which hands the pages over for `session`, with requests over a
    /// connection of their own; its other socket is in `scratch`. Returns it, and the socket that CRIU and its guard hold.
    ///
    /// # Errors
    /// A socket cannot be made.
    pub fn start(
        images: &Path,
        scratch: &Path,
        session: &str,
        connection: Connection,
    ) -> io::Result<(Self, OwnedFd)> {
        let listener = UnixListener::bind(images.join(CAPTURE_SOCKET))?;
        let outcome = scratch.join(OUTCOME_SOCKET);
        let asked = UnixListener::bind(&outcome)?;
        let (ours, theirs) = UnixStream::pair()?;
        let capture = Capture::new(images, CaptureLimits::default(), connection.canceller()?);
        let reported = capture.clone();
        thread::spawn(move || report(&asked, &reported));
        let session = session.to_owned();
        let taken = thread::spawn(move || take(&capture, &listener, ours, &session, connection));
        Ok((Self { outcome, taken }, theirs.into()))
    }

    /// Returns the outcome, after CRIU and its guard have ended.
    ///
    /// # Errors
    /// The reason why the dump was not taken.
    pub fn finish(self) -> Result<(), String> {
        match self.taken.join() {
            Ok(outcome) => outcome.map_err(|error| error.to_string()),
            Err(_) => Err("the receiver of the images has failed".to_owned()),
        }
    }
}

/// Reports the outcome to the post-dump script.
fn report(asked: &UnixListener, capture: &Capture) {
    for stream in asked.incoming().map_while(Result::ok) {
        let outcome = match capture.outcome() {
            Ok(()) => STREAM_ENDED.to_owned(),
            Err(error) if error.is_of_session() => STREAM_ENDED.to_owned(),
            Err(error) => error.to_string(),
        };
        let mut stream = stream;
        // The script may have given up.
        let _ = stream.write_all(outcome.as_bytes());
    }
}

fn take(
    capture: &Capture,
    listener: &UnixListener,
    ours: UnixStream,
    session: &str,
    mut connection: Connection,
) -> Result<(), Arc<CaptureError>> {
    let criu = match accept::<CaptureError>(listener, &ours, PATIENCE) {
        Ok(criu) => criu,
        Err(_) => {
            capture.give_up();
            return capture.outcome();
        }
    };
    let watched = capture.clone();
    let ended = criu.try_clone();
    thread::spawn(move || {
        // Nobody writes to it: it ends with CRIU and its guard, or when the guard shuts it down.
        let _ = std::io::copy(&mut &ours, &mut std::io::sink());
        watched.give_up();
        if let Ok(criu) = ended {
            let _ = criu.shutdown(std::net::Shutdown::Both);
        }
    });
    capture.run(&criu, session, &mut connection)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_fits_if_a_socket_can_be_bound_in_it() {
        let parent = tempfile::tempdir().unwrap();
        let spare = MAX_SOCKET_PATH - parent.path().as_os_str().len() - CAPTURE_SOCKET.len() - 2;
        for (length, fits) in [(spare, true), (spare + 1, false)] {
            let images = parent.path().join("i".repeat(length));
            std::fs::create_dir(&images).unwrap();
            assert_eq!(StreamReceiver::fits(&images), fits);
            let bound = UnixListener::bind(images.join(CAPTURE_SOCKET));
            assert_eq!(bound.is_ok(), fits, "{bound:?}");
        }
    }
}
