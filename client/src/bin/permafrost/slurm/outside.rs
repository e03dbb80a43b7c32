//! Outside of the namespace: the process that slurmstepd knows. It starts the inside, passes signals on, and
//! ends when the inside ends.

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ChildStdin, Command, Stdio};
use std::thread;

use permafrost_terminal::descriptors::without_inherited;
use permafrost_terminal::failure::{Code, Failure};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use super::job::Job;
use super::{RunArguments, inside, policy, task};

/// Signals that are passed on to the inside instead of ending this process.
const HANDED_ON: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

/// Starts the inside, and returns its exit code.
pub(super) fn run(arguments: &RunArguments) -> Result<u8, Failure> {
    let internal = |what: &str, error: std::io::Error| {
        Failure::new(Code::Internal, format!("{what}: {error}"))
    };
    let job = Job::of_environment(|name| std::env::var(name).ok(), arguments.job.as_deref())?;
    job.check_process(std::process::id())?;
    policy::check(arguments, &job)?;
    // Before the inside is there, so that no signal is lost.
    let signals = Signals::new(HANDED_ON).map_err(|error| internal("catch signals", error))?;
    let mut child = command()?.stdin(Stdio::piped()).spawn().map_err(|error| {
        Failure::new(Code::Internal, format!("start unshare: {error}"))
            .hint("it is in the package util-linux")
    })?;
    if let Some(inside) = child.stdin.take() {
        hand_on(signals, inside);
    }
    let status = child
        .wait()
        .map_err(|error| internal("wait for unshare", error))?;
    Ok(match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(super::OWN_FAILURE),
        (None, signal) => task::code_of_signal(signal.unwrap_or_default()),
    })
}

/// Returns a command that runs this very command line as process 1 of a PID namespace with a /proc of its own.
/// Later mounts of the node are still visible (home directories by automount); mounts of the inside are not
/// visible outside.
fn command() -> Result<Command, Failure> {
    let own = std::env::current_exe()
        .map_err(|error| Failure::new(Code::Internal, format!("find this program: {error}")))?;
    let mut command = without_inherited("unshare");
    command.args(["--pid", "--fork", "--kill-child=SIGKILL"]);
    command.args(["--mount", "--propagation", "slave", "--mount-proc", "--"]);
    command.arg(own).args(std::env::args_os().skip(1));
    command.env(inside::VARIABLE, "1");
    Ok(command)
}

/// Sends signals, one byte each, to the inside's standard input; its end shows that this process is gone.
fn hand_on(mut signals: Signals, mut inside: ChildStdin) {
    thread::spawn(move || {
        for signal in signals.forever() {
            let Ok(byte) = u8::try_from(signal) else {
                continue;
            };
            if inside.write_all(&[byte]).is_err() {
                return;
            }
        }
    });
}
