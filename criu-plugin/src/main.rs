//! `permafrost-action`: the action script that CRIU calls.
//!
//! CRIU runs the script at every stage of a dump or a restore, without arguments. The script acts on `post-dump`
//! only, where the tasks are still frozen and every image is written. It seals the session that PERMAFROST_SESSION
//! names, or the file beside the images if the environment is missing; with PERMAFROST_JOB it adopts for that job the
//! anonymous session that fits the images directory. If that fails it exits non-zero, so that CRIU rolls the dump
//! back and the tasks continue. A daemon that does not answer by PERMAFROST_SEAL_BY has failed: the freeze ends then.
//! Everything here happens while the tasks are frozen: no argument parser, no logger.

#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use std::{env, thread};

use permafrost_criu::handover;
use permafrost_criu::verdict::{self, SealBy, Verdict};
use permafrost_protocol::control::{ErrorCode, request};
use permafrost_transport::control::{Connection, ControlError, DEFAULT_SOCKET, SOCKET_VARIABLE};

/// CRIU's variable for the stage.
const ACTION_VARIABLE: &str = "CRTOOLS_SCRIPT_ACTION";

/// CRIU's variable for the images directory, a `/proc/PID/fd/N` path.
const IMAGES_VARIABLE: &str = "CRTOOLS_IMAGE_DIR";

/// Time for reading an answer that has already arrived.
const GRACE: Duration = Duration::from_millis(100);

fn main() -> ExitCode {
    if env::var_os(ACTION_VARIABLE).is_none_or(|action| action != "post-dump") {
        return ExitCode::SUCCESS;
    }
    let mut session = env::var(verdict::SESSION_VARIABLE).unwrap_or_default();
    let job = env::var(verdict::JOB_VARIABLE).unwrap_or_default();
    let mut socket =
        env::var_os(SOCKET_VARIABLE).map_or_else(|| PathBuf::from(DEFAULT_SOCKET), PathBuf::from);
    let mut seal_by = env::var(verdict::SEAL_BY_VARIABLE)
        .ok()
        .and_then(|time| time.parse::<SealBy>().ok());
    let mut verdict_file = None;
    let images = open_images();
    if session.is_empty()
        && let Some(handover) = images.as_ref().ok().and_then(handover::beside)
    {
        (session, socket, seal_by) = (handover.session, handover.socket, handover.seal_by);
        verdict_file = Some(handover.verdict);
    }
    if session.is_empty() && job.is_empty() {
        // The action script is installed for every dump of the machine, and this dump was not started by
        // `permafrost`.
        return ExitCode::SUCCESS;
    }
    let verdict = match images {
        Ok(images) => decide(seal_by, move || seal(&images, &socket, session, job)),
        Err(error) => Verdict::refused(&error),
    };
    // CRIU sends this to its log.
    eprint!("permafrost-action: {verdict}");
    if let Err(error) = tell(&verdict, verdict_file) {
        eprintln!("permafrost-action: write the verdict: {error}");
    }
    match verdict {
        Verdict::Sealed { .. } => ExitCode::SUCCESS,
        Verdict::Refused { .. } => ExitCode::FAILURE,
    }
}

/// Returns the verdict of `seal`, or that it came too late. A separate thread waits for the daemon: a connection to a
/// daemon that hangs may block for ever, too. Its answer counts only if it arrives in time, so no dump is both sealed
/// and too late.
fn decide(
    seal_by: Option<SealBy>,
    seal: impl FnOnce() -> Result<Verdict, ControlError> + Send + 'static,
) -> Verdict {
    let verdict = |sealed: Result<Verdict, ControlError>| {
        sealed.unwrap_or_else(|error| Verdict::refused(&error))
    };
    let Some(seal_by) = seal_by else {
        return verdict(seal());
    };
    if seal_by.remaining().is_zero() {
        return Verdict::too_late();
    }
    let (answer, answered) = mpsc::channel();
    // The receiver is gone when it was too late.
    thread::spawn(move || answer.send(seal()));
    let answer = answered.recv_timeout(seal_by.remaining());
    // This process may have been stopped: an answer that has come is preferred to the clock.
    match answer.or_else(|_| answered.recv_timeout(GRACE)) {
        Ok(sealed) => verdict(sealed),
        Err(_) => Verdict::too_late(),
    }
}

/// Writes the verdict into the file beside the images, or into the one that the environment names, if any.
fn tell(verdict: &Verdict, beside: Option<File>) -> io::Result<()> {
    let mut file = match (beside, env::var_os(verdict::VARIABLE)) {
        (Some(file), _) => file,
        (None, Some(path)) => OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(path)?,
        (None, None) => return Ok(()),
    };
    file.write_all(verdict.encode().as_bytes())
}

fn open_images() -> Result<File, ControlError> {
    let directory = env::var_os(IMAGES_VARIABLE).unwrap_or_else(|| ".".into());
    File::open(&directory).map_err(|error| ControlError::Refused {
        code: ErrorCode::Invalid,
        message: format!(
            "open images directory {}: {error}",
            PathBuf::from(&directory).display()
        ),
        hint: String::new(),
    })
}

/// Seals the session, or adopts the anonymous one that fits.
fn seal(
    images: &File,
    socket: &Path,
    session: String,
    job: String,
) -> Result<Verdict, ControlError> {
    let start = Instant::now();
    let mut connection = Connection::connect(socket)?;
    let checkpoint = if session.is_empty() {
        let adopt = request::Adopt {
            session,
            job,
            ..request::Adopt::default()
        };
        connection.call_with(adopt, Some(images.as_fd()), &mut |_| {})?
    } else {
        let seal = request::Seal { session };
        connection.call_with(seal, Some(images.as_fd()), &mut |_| {})?
    };
    Ok(Verdict::sealed(&checkpoint, start.elapsed()))
}
