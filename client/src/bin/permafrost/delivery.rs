//! The two ways in which a restoring CRIU gets its images: from an images directory that the daemon has
//! filled, or streamed by the daemon while CRIU runs, which saves one copy of all pages and the memory for it.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use permafrost_client::control::{Connection, ControlError};
use permafrost_client::criu::{Criu, Finished, Run};
use permafrost_protocol::control::{ErrorCode, Exported, request};
use permafrost_protocol::streamer::SERVE_SOCKET;

use crate::context::Context;
use crate::failure::Failure;
use crate::interrupt::Interrupts;
use crate::progress::Progress;

/// How often interrupts are looked at while CRIU runs.
const TICK: Duration = Duration::from_millis(250);

/// Longest path of an AF_UNIX socket, bytes (`sun_path`, with its end).
const MAX_SOCKET_PATH: usize = 107;

/// How CRIU gets its images.
pub(crate) enum Delivery {
    /// From the directory.
    Directory,
    /// From the daemon, which answers on this socket in the directory.
    Stream(UnixListener),
}

/// A run of CRIU, and what came before it.
pub(crate) struct Delivered {
    pub(crate) finished: Finished,
    /// Filling the directory; zero where the images were streamed.
    pub(crate) fetch: Duration,
    /// What the daemon refused while it streamed: why CRIU failed, if it did.
    pub(crate) refusal: Option<ControlError>,
}

impl Delivery {
    /// Streaming into `images`, unless the path is too long for a socket.
    pub(crate) fn stream(images: &Path) -> Result<Self, Failure> {
        let path = images.join(SERVE_SOCKET);
        if path.as_os_str().len() > MAX_SOCKET_PATH {
            return Ok(Self::Directory);
        }
        let listener =
            UnixListener::bind(&path).map_err(|error| Failure::io("listen on", &path, &error))?;
        Ok(Self::Stream(listener))
    }

    pub(crate) fn is_stream(&self) -> bool {
        matches!(self, Self::Stream(_))
    }

    /// Runs CRIU, with the images of checkpoint `name` in its hands.
    pub(crate) fn run(
        self,
        context: &Context,
        interrupts: &Interrupts,
        mut connection: Connection,
        name: &str,
        images: &Path,
        (mut run, criu): (Run, &Criu),
    ) -> Result<Delivered, Failure> {
        match self {
            Self::Directory => {
                let started = Instant::now();
                fetch(context, &mut connection, name, images, interrupts)?;
                drop(connection);
                let fetch = started.elapsed();
                let finished = run.start(criu)?.wait(TICK, || {})?;
                Ok(Delivered {
                    finished,
                    fetch,
                    refusal: None,
                })
            }
            Self::Stream(listener) => {
                run.arg("--stream");
                let (finished, refusal) = stream(connection, name, &listener, run, criu)?;
                Ok(Delivered {
                    finished,
                    fetch: Duration::ZERO,
                    refusal,
                })
            }
        }
    }
}

fn fetch(
    context: &Context,
    connection: &mut Connection,
    name: &str,
    images: &Path,
    interrupts: &Interrupts,
) -> Result<Exported, Failure> {
    let directory = File::open(images).map_err(|error| Failure::io("open", images, &error))?;
    let mut progress = Progress::new(context, format!("fetch {name}"));
    let export = request::Export {
        checkpoint: name.to_owned(),
        small_images_only: false,
    };
    connection
        .call_with(export, Some(directory.as_fd()), &mut |so_far| {
            progress.update(so_far.done_bytes, so_far.total_bytes);
        })
        .map_err(|error| {
            interrupts
                .explain(error.into())
                .during(format!("fetch {name}"))
        })
}

fn stream(
    mut connection: Connection,
    name: &str,
    listener: &UnixListener,
    run: Run,
    criu: &Criu,
) -> Result<(Finished, Option<ControlError>), Failure> {
    let request = request::Stream {
        checkpoint: name.to_owned(),
    };
    connection.begin(request, Some(listener.as_fd()))?;
    let finished = run.start(criu)?.wait(TICK, || {})?;
    // A CRIU that failed before it came for its images must not be waited for. (What progress the daemon told
    // meanwhile fits the socket's buffer many times over.)
    connection.end_requests();
    let served = connection.finish::<request::Stream>(&mut |_| {});
    Ok((finished, served.err()))
}

/// Whether a refusal is the store's own and explains a failed restore better than CRIU's log, in which the
/// images just end.
pub(crate) fn explains(refusal: &ControlError) -> bool {
    match refusal {
        ControlError::Refused { code, .. } => *code != ErrorCode::Conflict,
        _ => true,
    }
}
