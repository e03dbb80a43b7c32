//! Programs that are part of a sample: they are ended at their time limit, on Ctrl-C, and when the code that started
//! them fails.

use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::rig::Interrupt;

/// Period at which Ctrl-C is checked.
const LOOK: Duration = Duration::from_millis(100);
/// Time that a program may take to end after it was asked to.
const PATIENCE: Duration = Duration::from_secs(10);

/// A running program; killed when dropped.
pub(super) struct Running(Child);

impl Running {
    pub(super) fn start(command: &mut Command) -> Result<Self> {
        command.stdin(Stdio::null());
        let child = command
            .spawn()
            .with_context(|| format!("start {command:?}"))?;
        Ok(Self(child))
    }

    pub(super) fn child(&mut self) -> &mut Child {
        &mut self.0
    }

    /// Waits for the program's end. The end is noticed at once, because it is timed.
    ///
    /// # Errors
    /// Fails when it had to be ended, after `limit` or on Ctrl-C.
    pub(super) fn wait(&mut self, limit: Duration, interrupt: &Interrupt) -> Result<ExitStatus> {
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
        let pid = pid.context("a process without an id")?;
        // It cannot become another process's, however late it is used.
        let handle = rustix::process::pidfd_open(pid, PidfdFlags::empty())
            .context("open a process descriptor")?;
        let (ended, watched) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let watch = scope.spawn(move || {
                let start = Instant::now();
                let mut asked: Option<Instant> = None;
                while watched.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                    let signal = match asked {
                        // `permafrost dump` rolls CRIU back.
                        None if interrupt.check().is_err() || start.elapsed() > limit => {
                            asked = Some(Instant::now());
                            Signal::INT
                        }
                        Some(since) if since.elapsed() > PATIENCE => Signal::KILL,
                        _ => continue,
                    };
                    let _ = rustix::process::pidfd_send_signal(&handle, signal);
                }
                asked.is_some()
            });
            let status = self.0.wait().context("wait for a program");
            drop(ended);
            let stopped = watch.join().unwrap_or(false);
            interrupt.check()?;
            if stopped {
                bail!("not done within {} s", limit.as_secs());
            }
            status
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Runs a program with little output, and returns its output.
///
/// # Errors
/// As [`Running::wait`], and with what it said when it fails.
pub(super) fn output(
    command: &mut Command,
    limit: Duration,
    interrupt: &Interrupt,
) -> Result<Output> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = Running::start(command)?;
    let stdout = running.0.stdout.take().context("take its stdout")?;
    let stderr = running.0.stderr.take().context("take its stderr")?;
    let status = running.wait(limit, interrupt)?;
    // Not before its end: what it has said by then is in the pipes, which hold 64 KiB.
    let (stdout, stderr) = (read(stdout)?, read(stderr)?);
    if !status.success() {
        bail!(
            "{command:?} fails ({status}):\n{}{}",
            String::from_utf8_lossy(&stdout),
            String::from_utf8_lossy(&stderr)
        );
    }
    Ok(Output {
        status,
        stdout,
        stderr,
    })
}

fn read(mut pipe: impl std::io::Read) -> Result<Vec<u8>> {
    let mut said = Vec::new();
    pipe.read_to_end(&mut said)
        .context("read what a program said")?;
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_too_long_is_ended() {
        let interrupt = Interrupt::catch().unwrap();
        let start = Instant::now();
        let limit = Duration::from_millis(300);
        let error = output(Command::new("sleep").arg("60"), limit, &interrupt).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(30));
        assert!(format!("{error:#}").contains("not done"), "{error:#}");
    }

    #[test]
    fn what_fails_is_quoted() {
        let interrupt = Interrupt::catch().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such luck >&2; exit 3"]);
        let error = output(&mut command, Duration::from_secs(60), &interrupt).unwrap_err();
        assert!(format!("{error:#}").contains("no such luck"), "{error:#}");
    }
}
