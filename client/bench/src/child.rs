//! Runs `permafrost` itself, as a user would.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;
use std::{io, thread};

use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::interrupt::Interrupts;
use rustix::process::Signal;
use serde_json::Value;

use super::machine;

/// Interval at which interrupts are polled.
const TICK: Duration = Duration::from_millis(100);

/// Returns the path of this program.
pub(super) fn own_program() -> Result<PathBuf, Failure> {
    std::env::current_exe()
        .map_err(|error| Failure::new(Code::Internal, format!("find this program: {error}")))
}

/// Returns a command in a process group of its own: a terminal's Ctrl-C reaches only the benchmark, which ends
/// its processes in order.
pub(super) fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.process_group(0).stdin(Stdio::null());
    command
}

/// Returns a command like [`command`] for an etcd or a permafrostd that ends with this process, however this ends. It
/// gets no variables that are meant for those of this machine.
pub(super) fn guarded(program: &Path) -> Result<Command, Failure> {
    let mut command = command(&own_program()?);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["ETCD_", "PERMAFROSTD_", "NOTIFY_SOCKET"]
            .iter()
            .any(|prefix| text.starts_with(prefix))
        {
            command.env_remove(&name);
        }
    }
    command
        .args(["bench", "guard", "--parent"])
        .arg(std::process::id().to_string())
        .arg("--")
        .arg(program);
    Ok(command)
}

/// Runs `permafrost --json` with these arguments and returns its JSON object. On an interrupt the command is
/// told to end and waited for: a dump then rolls back.
pub(super) fn permafrost<A: AsRef<OsStr>>(
    interrupts: &Interrupts,
    socket: &Path,
    arguments: impl IntoIterator<Item = A>,
) -> Result<Value, Failure> {
    interrupts.check()?;
    let mut command = command(&own_program()?);
    command
        .arg("--socket")
        .arg(socket)
        .arg("--json")
        .args(arguments);
    let output = wait(command, interrupts)?;
    interrupts.check()?;
    if !output.status.success() {
        return Err(failure_of(&output));
    }
    if output.stdout.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(&output.stdout).map_err(|error| {
        Failure::new(
            Code::Internal,
            format!("read what permafrost printed: {error}"),
        )
    })
}

fn wait(mut command: Command, interrupts: &Interrupts) -> Result<Output, Failure> {
    let failed =
        |error: io::Error| Failure::new(Code::Internal, format!("run permafrost: {error}"));
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let pid = child.id();
    let (send, receive) = channel();
    thread::spawn(move || send.send(child.wait_with_output()));
    let mut told = false;
    loop {
        match receive.recv_timeout(TICK) {
            Ok(output) => return output.map_err(failed),
            Err(RecvTimeoutError::Timeout) => {
                if interrupts.came() && !told {
                    told = machine::signal(pid, Signal::INT);
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::new(Code::Internal, "lost sight of permafrost"));
            }
        }
    }
}

/// Returns the failure that a `permafrost --json` has reported.
fn failure_of(output: &Output) -> Failure {
    let said = String::from_utf8_lossy(&output.stderr);
    let error = said
        .lines()
        .rev()
        .find_map(|line| serde_json::from_str::<Value>(line).ok())
        .unwrap_or_default();
    let text = |field: &str| {
        error["error"][field]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    let exit_code = output
        .status
        .code()
        .and_then(|code| u8::try_from(code).ok());
    let message = match text("message") {
        none if none.is_empty() => format!("permafrost ended with {}: {said}", output.status),
        message => message,
    };
    let mut failure = Failure::new(
        exit_code.map_or(Code::Internal, Code::from_exit_code),
        message,
    )
    .hint(text("hint"));
    if let Some(lines) = error["error"]["criu"].as_array() {
        failure.criu = lines
            .iter()
            .filter_map(|line| Some(line.as_str()?.to_owned()))
            .collect();
    }
    failure.log = error["error"]["log"].as_str().map(PathBuf::from);
    failure
}

/// Returns the last lines of a log, for a message.
pub(super) fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines
        .get(lines.len().saturating_sub(5)..)
        .unwrap_or_default()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    #[test]
    fn a_failure_is_handed_on_as_it_was() {
        let output = |stderr: &str| Output {
            status: ExitStatus::from_raw(6 << 8),
            stdout: Vec::new(),
            stderr: stderr.as_bytes().to_vec(),
        };
        let failure = failure_of(&output(
            r#"{"error": {"code": "no-space", "exit_code": 6, "message": "full", "hint": "rm", "criu": ["a"]}}"#,
        ));
        assert_eq!(failure.code, Code::NoSpace);
        assert_eq!(failure.message, "full");
        assert_eq!(failure.hint, "rm");
        assert_eq!(failure.criu, ["a"]);
        let failure = failure_of(&output("thread panicked"));
        assert!(failure.message.contains("thread panicked"));
    }
}
