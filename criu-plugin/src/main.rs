//! `permafrost-action`: the action script that CRIU calls.
//!
//! CRIU runs the script at every stage of a dump or a restore, without arguments. The script acts on two of them. On
//! `post-restore`, where all mappings are there and no restored process has run, it waits until `permafrostd` has placed
//! all memory or the keeper of a lazy restore has registered it, if the restore is one of `permafrost restore`; if that
//! fails it exits non-zero, and CRIU aborts the restore.
//!
//! On `post-dump` the tasks are still frozen and every image is written. The script seals the session that PERMAFROST_SESSION
//! names, or the file beside the images if the environment is missing; with PERMAFROST_JOB it stores the images for
//! that job: a directory that has its pages is imported, for one whose pages went to the page server the anonymous
//! session that fits is adopted. If that fails it exits non-zero, so that CRIU rolls the dump back and the tasks
//! continue. With PERMAFROST_STREAM, images come through pipes: their receiver has to have all of them first. A daemon
//! that does not answer by PERMAFROST_SEAL_BY, or within the freeze limit of `permafrost dump`, has failed: the freeze
//! ends then.
//!
//! Called as `permafrost-hook`, which `permafrost install-criu-hooks` makes a link to it, it stores the dumps that
//! neither variable names, too, under the names of [`name`]. With `PERMAFROST_JOB=none` it leaves a dump alone.
//!
//! Several configuration files and options may each name a script, under either name, and CRIU runs them all. The
//! first leaves its verdict in the images directory; the others find it and repeat it, a refusal included.
//!
//! Everything here happens while tasks wait: no argument parser, no logger.

#![forbid(unsafe_code)]

mod name;

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use std::{env, thread};

use permafrost_criu::directory::ImagesDir;
use permafrost_criu::origin::ProcessStat;
use permafrost_criu::processes;
use permafrost_criu::verdict::{self, SealBy, Verdict};
use permafrost_criu::{FreezeLimit, handover};
use permafrost_protocol::control::{ErrorCode, request};
use permafrost_protocol::images::ImageName;
use permafrost_protocol::manifest::SpaceType;
use permafrost_transport::control::{Connection, ControlError, DEFAULT_SOCKET, SOCKET_VARIABLE};

/// CRIU's variable for the stage.
const ACTION_VARIABLE: &str = "CRTOOLS_SCRIPT_ACTION";

/// CRIU's variable for the images directory, a `/proc/PID/fd/N` path.
const IMAGES_VARIABLE: &str = "CRTOOLS_IMAGE_DIR";

/// Longest description of a failed stream that is read, bytes.
const MAX_OUTCOME_BYTES: u64 = 8 << 10;

/// Time for reading an answer that has already arrived.
const GRACE: Duration = Duration::from_millis(100);

/// Name under which the program stores every dump.
const HOOK_NAME: &str = "permafrost-hook";

/// File in the images directory in which the script leaves its verdict: the checkpoint's name, or the reason of a
/// refusal. No image.
const HOOK_VERDICT: &str = "permafrost.verdict";

/// CRIU's variable for the pid of the root process.
const PID_VARIABLE: &str = "CRTOOLS_INIT_PID";

/// Advice where no session fits the images.
const ELSEWHERE: &str = "if the pages went to another page server on purpose, as in a live migration, set PERMAFROST_JOB=none for CRIU";

/// Longest verdict read, bytes.
const MAX_VERDICT_BYTES: u64 = 64 << 10;

fn main() -> ExitCode {
    match env::var_os(ACTION_VARIABLE) {
        Some(action) if action == "post-restore" => await_memory(),
        Some(action) if action == "post-dump" => conclude_dump(),
        _ => ExitCode::SUCCESS,
    }
}

/// Waits until all memory of a restore is there, if it comes while the processes wait.
fn await_memory() -> ExitCode {
    let Ok(images) = open_images() else {
        // A restore from a place that is no directory.
        return ExitCode::SUCCESS;
    };
    let reason = match handover::await_placement(&images) {
        Ok(true) => return ExitCode::SUCCESS,
        Ok(false) => "permafrostd has given up".to_owned(),
        Err(error) => error.to_string(),
    };
    eprintln!("permafrost-action: the memory of the processes is not there: {reason}");
    ExitCode::FAILURE
}

fn conclude_dump() -> ExitCode {
    let is_hook = env::args_os()
        .next()
        .is_some_and(|program| Path::new(&program).file_name() == Some(HOOK_NAME.as_ref()));
    let mut session = env::var(verdict::SESSION_VARIABLE).unwrap_or_default();
    let mut job = env::var(verdict::JOB_VARIABLE).unwrap_or_default();
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
    let is_unnamed = session.is_empty() && job.is_empty();
    if is_unnamed && !is_hook {
        // The action script is installed for every dump of the machine, and this dump was not started by
        // `permafrost`.
        return ExitCode::SUCCESS;
    }
    if session.is_empty() && job == verdict::NO_JOB {
        eprintln!("permafrost-action: PERMAFROST_JOB=none: the dump is left alone, and not stored");
        return ExitCode::SUCCESS;
    }
    let directory = images.as_ref().ok();
    if let Some(earlier) = earlier(verdict_file.as_ref(), directory) {
        // Another script of this dump was first.
        return exit_code(&earlier);
    }
    if is_unnamed {
        job = name::of_dump();
    }
    let seal_by = seal_by.unwrap_or_else(|| SealBy::after(limit(directory)));
    let target = directory.and_then(|images| images.try_clone().ok());
    let verdict = match images {
        Ok(images) => decide(seal_by, move || seal(&images, &socket, session, job)),
        Err(error) => Verdict::refused(&error),
    };
    // CRIU sends this to its log.
    eprint!("permafrost-action: {verdict}");
    if let Err(error) = tell(&verdict, verdict_file) {
        eprintln!("permafrost-action: write the verdict: {error}");
    }
    if let Some(target) = target
        && let Err(error) = leave(&verdict, &target)
    {
        eprintln!("permafrost-action: write {HOOK_VERDICT}: {error}");
    }
    exit_code(&verdict)
}

fn exit_code(verdict: &Verdict) -> ExitCode {
    match verdict {
        Verdict::Sealed { .. } => ExitCode::SUCCESS,
        Verdict::Refused { .. } => ExitCode::FAILURE,
    }
}

/// Returns the verdict of a script that has run for this dump already: in the file of the handover or of the
/// environment, or in the images directory.
fn earlier(handover: Option<&File>, images: Option<&File>) -> Option<Verdict> {
    let told = match (handover, env::var_os(verdict::VARIABLE)) {
        // It is open for writing only.
        (Some(file), _) => File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .ok()
            .and_then(|mut file| read(&mut file)),
        (None, Some(path)) => File::open(path).ok().and_then(|mut file| read(&mut file)),
        (None, None) => None,
    };
    told.or_else(|| {
        let directory = ImagesDir::new(images?.try_clone().ok()?.into()).ok()?;
        read(&mut directory.open(HOOK_VERDICT).ok()?)
    })
}

/// Reads a verdict, unless it is on another dump: who names a file for verdicts may name it again for the next dump.
fn read(file: &mut File) -> Option<Verdict> {
    let mut text = String::new();
    file.take(MAX_VERDICT_BYTES)
        .read_to_string(&mut text)
        .ok()?;
    let is_own = text.lines().next_back() == Some(&*dump_line()?);
    if is_own { text.parse().ok() } else { None }
}

/// Returns the last line of a verdict: CRIU's pid and start time, which no other dump has had since the machine's start.
fn dump_line() -> Option<String> {
    let directory = env::var(IMAGES_VARIABLE).ok()?;
    let pid = directory
        .strip_prefix("/proc/")?
        .split('/')
        .next()?
        .parse()
        .ok()?;
    let stat = ProcessStat::read(pid).ok()?;
    Some(format!("dump {pid} {}", stat.start_ticks))
}

fn encode(verdict: &Verdict) -> String {
    let mut text = verdict.encode();
    if let Some(line) = dump_line() {
        text.push_str(&line);
        text.push('\n');
    }
    text
}

/// Leaves the verdict in the images directory, for further scripts of this dump. A refusal, too: a second script that
/// asked again might seal what CRIU rolls back because of the first.
fn leave(verdict: &Verdict, images: &File) -> io::Result<()> {
    let directory = ImagesDir::new(images.try_clone()?.into()).map_err(io::Error::other)?;
    match directory.remove(HOOK_VERDICT) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = directory.create(HOOK_VERDICT).map_err(io::Error::other)?;
    file.write_all(encode(verdict).as_bytes())
}

/// Returns the time for which a script waits for the daemon: the freeze limit that `permafrost dump` would have for the
/// pages in the directory, or for the frozen processes where a page server has them.
fn limit(images: Option<&File>) -> Duration {
    let set = env::var(verdict::SEAL_WITHIN_VARIABLE).ok();
    if let Some(ms) = set.and_then(|ms| ms.parse().ok()) {
        return Duration::from_millis(ms);
    }
    let bytes = match images.and_then(pages_bytes).unwrap_or(0) {
        0 => resident_bytes().unwrap_or(0),
        bytes => bytes,
    };
    FreezeLimit::for_memory(bytes).time()
}

fn pages_bytes(images: &File) -> Option<u64> {
    let directory = ImagesDir::new(images.try_clone().ok()?.into()).ok()?;
    let names = directory.files().ok()?;
    let pages = names
        .iter()
        .filter(|name| matches!(ImageName::parse(name), ImageName::Pages(_)));
    Some(pages.fold(0_u64, |sum, name| {
        let metadata = directory
            .open(name)
            .ok()
            .and_then(|file| file.metadata().ok());
        sum.saturating_add(metadata.map_or(0, |metadata| metadata.len()))
    }))
}

/// Returns the resident memory of the processes that CRIU has frozen.
fn resident_bytes() -> Option<u64> {
    let root = env::var(PID_VARIABLE).ok()?.parse().ok()?;
    let usage = processes::usage(&processes::tree(root)).ok()?;
    Some(usage.resident_bytes)
}

/// Returns the verdict of `seal`, or that it came too late. A separate thread waits for the daemon: a connection to a
/// daemon that hangs may block for ever, too. Its answer counts only if it arrives in time, so no dump is both sealed
/// and too late.
fn decide(
    seal_by: SealBy,
    seal: impl FnOnce() -> Result<Verdict, ControlError> + Send + 'static,
) -> Verdict {
    let verdict = |sealed: Result<Verdict, ControlError>| {
        sealed.unwrap_or_else(|error| Verdict::refused(&error))
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
    file.write_all(encode(verdict).as_bytes())
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

/// Waits until the receiver of streamed images has all of them, and permafrostd the pages.
fn await_images(receiver: &Path) -> Result<(), ControlError> {
    let refused = |message: String| ControlError::Refused {
        code: ErrorCode::SessionFailed,
        message,
        hint: String::new(),
    };
    let mut outcome = String::new();
    UnixStream::connect(receiver)
        .and_then(|stream| stream.take(MAX_OUTCOME_BYTES).read_to_string(&mut outcome))
        .map_err(|error| refused(format!("receive the outcome of the stream: {error}")))?;
    match outcome.as_str() {
        verdict::STREAM_ENDED => Ok(()),
        "" => Err(refused("the receiver of the images has ended".to_owned())),
        _ => Err(refused(outcome)),
    }
}

/// Seals the session, or imports the directory for the job, or adopts the anonymous session that fits.
fn seal(
    images: &File,
    socket: &Path,
    session: String,
    job: String,
) -> Result<Verdict, ControlError> {
    let start = Instant::now();
    if let Some(receiver) = env::var_os(verdict::STREAM_VARIABLE) {
        await_images(Path::new(&receiver))?;
    }
    let mut connection = Connection::connect(socket)?;
    let directory = Some(images.as_fd());
    let checkpoint = if !session.is_empty() {
        let seal = request::Seal { session };
        connection.call_with(seal, directory, &mut |_| {})?
    } else if has_pages(images) {
        let import = request::Import {
            job,
            ..request::Import::default()
        };
        connection.call_with(import, directory, &mut |_| {})?
    } else {
        let adopt = request::Adopt {
            session,
            job,
            ..request::Adopt::default()
        };
        let adopted = connection.call_with(adopt, directory, &mut |_| {});
        adopted.map_err(advise_elsewhere)?
    };
    Ok(Verdict::sealed(&checkpoint, start.elapsed()))
}

/// Adds the advice for a dump whose pages went to another machine. Nothing shows whether they did, or came here and were
/// lost: CRIU's options may come from files or a request. So only its caller can say that the dump is to be left alone.
fn advise_elsewhere(error: ControlError) -> ControlError {
    match error {
        ControlError::Refused {
            code: code @ ErrorCode::NotFound,
            message,
            hint,
        } => ControlError::Refused {
            code,
            message,
            hint: if hint.is_empty() {
                ELSEWHERE.to_owned()
            } else {
                format!("{hint}; {ELSEWHERE}")
            },
        },
        error => error,
    }
}

/// Returns true if the pages of a process are in the directory, and not with a page server.
fn has_pages(images: &File) -> bool {
    let directory = images
        .try_clone()
        .ok()
        .and_then(|images| ImagesDir::new(images.into()).ok());
    let names = directory
        .and_then(|directory| directory.files().ok())
        .unwrap_or_default();
    names.iter().any(|name| match ImageName::parse(name) {
        ImageName::Pagemap(space) => space.space_type == SpaceType::Process,
        _ => false,
    })
}
