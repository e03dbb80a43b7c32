//! `permafrost dump --stream`: CRIU's images come through pipes.
//!
//! ```text
//! CRIU ── streamer-capture.sock ──▶ this command ── page-server frames ──▶ session at permafrostd
//!   └─ post-dump script ── PERMAFROST_STREAM: are all there? ──▶ │
//!                       └── Seal ──▶ permafrostd
//! ```

use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use permafrost_criu::frontend::{Capture, CaptureError, CaptureLimits, accept};
use permafrost_criu::verdict::STREAM_ENDED;
use permafrost_protocol::streamer::CAPTURE_SOCKET;
use permafrost_terminal::failure::{Code, Failure};
use serde::Serialize;

use super::Places;

/// Name of the socket at which the post-dump script asks for the outcome, beside the images directory.
const OUTCOME_SOCKET: &str = "stream.sock";

/// Longest wait for CRIU to connect: it does so before it freezes anything.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Way by which CRIU sends the pages of a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Way {
    /// In its page-server protocol, straight to `permafrostd`.
    PageServer,
    /// With all other images through pipes (`--stream`).
    Stream,
}

/// Receiver of a stream, in threads of its own.
pub(super) struct Stream {
    /// Socket at which it reports the outcome.
    pub(super) outcome: PathBuf,
    taken: JoinHandle<Result<(), Arc<CaptureError>>>,
}

impl Stream {
    /// Starts the receiver, which sends pages to `session`. Returns it, and the socket that CRIU and its guard hold.
    pub(super) fn start(places: &Places, session: UnixStream) -> Result<(Self, OwnedFd), Failure> {
        let bind = |path: &Path| {
            UnixListener::bind(path).map_err(|error| Failure::io("listen at", path, &error))
        };
        let listener = bind(&places.images.join(CAPTURE_SOCKET))?;
        let outcome = places.scratch.path().join(OUTCOME_SOCKET);
        let asked = bind(&outcome)?;
        let (ours, theirs) = UnixStream::pair().map_err(|error| {
            Failure::new(Code::Internal, format!("make a socket for CRIU: {error}"))
        })?;
        let capture = Capture::new(&places.images, CaptureLimits::default());
        let reported = capture.clone();
        thread::spawn(move || report(&asked, &reported));
        let taken = thread::spawn(move || take(&capture, &listener, ours, &session));
        Ok((Self { outcome, taken }, theirs.into()))
    }

    /// Returns the outcome, after CRIU and its guard have ended.
    pub(super) fn finish(self) -> Result<(), String> {
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
    session: &UnixStream,
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
    capture.run(&criu, session)
}
