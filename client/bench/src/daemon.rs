//! A `permafrostd` that a command of this crate starts, and what its start takes.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::interrupt::Interrupts;
use rustix::fs::FlockOperation;
use rustix::process::Signal;
use serde_json::Value;

use super::{child, machine};

/// Time limit for a node to start, to see the others, to stop, and to free a region.
const PATIENCE: Duration = Duration::from_secs(120);
/// Interval at which the state of a node is polled.
pub(super) const POLL: Duration = Duration::from_millis(50);

/// Starts a permafrostd and waits until it reports that it is ready. Returns it, and the line that says so.
pub(super) fn spawn_ready(
    mut command: Command,
    log: &Path,
    interrupts: &Interrupts,
) -> Result<(Child, String), Failure> {
    let failed =
        |error: std::io::Error| Failure::new(Code::Internal, format!("start permafrostd: {error}"));
    let mut child = command.spawn().map_err(failed)?;
    let (send, receive) = channel();
    if let Some(stdout) = child.stdout.take() {
        thread::spawn(move || {
            // Reads on to the end, so that it never writes into a closed pipe.
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
    }
    let start = Instant::now();
    loop {
        if let Ok(line) = receive.recv_timeout(POLL)
            && line.starts_with("permafrostd ready:")
        {
            return Ok((child, line));
        }
        let ended = child.try_wait().map_err(failed)?;
        if ended.is_some() || interrupts.came() || start.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            interrupts.check()?;
            let code = ended.and_then(|status| status.code());
            return Err(Failure::new(
                // Exit code 2 of permafrostd means an invalid command line, such as an unknown device.
                if code == Some(2) {
                    Code::Invalid
                } else {
                    Code::Internal
                },
                format!("permafrostd did not get ready: {}", child::tail(log)),
            ));
        }
    }
}

/// Waits until `ready` returns true; `what` names that in the failure.
pub(super) fn wait_for(
    what: &str,
    interrupts: &Interrupts,
    mut ready: impl FnMut() -> Result<bool, Failure>,
) -> Result<(), Failure> {
    let start = Instant::now();
    while !ready()? {
        interrupts.check()?;
        if start.elapsed() > PATIENCE {
            let seconds = PATIENCE.as_secs();
            return Err(Failure::new(
                Code::Internal,
                format!("waited {seconds} s for {what}"),
            ));
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// Ends a permafrostd as its operator would, and waits for it.
pub(super) fn stop(child: &mut Child) -> Result<(), Failure> {
    stop_all(&mut [child], &|| false)
}

/// Ends several at once. They are killed once `is_impatient` returns true, or after [`PATIENCE`].
pub(super) fn stop_all(
    children: &mut [&mut Child],
    is_impatient: &dyn Fn() -> bool,
) -> Result<(), Failure> {
    let failed =
        |error: std::io::Error| Failure::new(Code::Internal, format!("stop permafrostd: {error}"));
    for child in &mut *children {
        if child.try_wait().map_err(failed)?.is_none() {
            machine::signal(child.id(), Signal::TERM);
        }
    }
    let start = Instant::now();
    for child in children {
        while child.try_wait().map_err(failed)?.is_none() {
            if start.elapsed() > PATIENCE || is_impatient() {
                child.kill().map_err(failed)?;
            }
            thread::sleep(POLL);
        }
    }
    Ok(())
}

/// Makes the private directory of a `user` such as `benchmark`, and locks it against others. An earlier one's is taken.
///
/// # Errors
/// The directory has something else; another one uses it.
pub(super) fn lock_directory(path: &Path, user: &str) -> Result<File, Failure> {
    let failed = |error: std::io::Error| Failure::io("use", path, &error);
    let lock_path = path.join(format!("{user}.lock"));
    let existed = path.exists();
    permafrost_criu::scratch::create_private(path).map_err(failed)?;
    if existed && !lock_path.exists() && fs::read_dir(path).map_err(failed)?.next().is_some() {
        return Err(Failure::new(
            Code::Conflict,
            format!("{} is there and not a {user}'s", path.display()),
        )
        .hint("name another directory, which is made if it is not there"));
    }
    let lock = File::create(&lock_path).map_err(failed)?;
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
        Failure::new(
            Code::Conflict,
            format!("another {user} uses {}", path.display()),
        )
    })?;
    Ok(lock)
}

/// Runs a command of `permafrost` that asks no node, and returns its JSON object.
pub(super) fn offline<A: AsRef<OsStr>>(
    interrupts: &Interrupts,
    arguments: &[A],
) -> Result<Value, Failure> {
    child::permafrost(interrupts, Path::new("/nonexistent"), arguments)
}
