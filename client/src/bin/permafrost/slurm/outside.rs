//! Outside of the namespace: what slurmstepd knows. It starts the inside, hands on the signals that come, and ends as
//! that ends.

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ChildStdin, Command, Stdio};
use std::thread;

use permafrost_terminal::descriptors::without_inherited;
use permafrost_terminal::failure::{Code, Failure};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use super::job::Job;
use super::{RunArguments, inside, task};

/// Signals that are not ours alone to die of.
const HANDED_ON: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

/// Starts the inside, and gives its exit code.
pub(super) fn run(arguments: &RunArguments) -> Result<u8, Failure> {
    let internal = |what: &str, error: std::io::Error| {
        Failure::new(Code::Internal, format!("{what}: {error}"))
    };
    let job = Job::of_environment(|name| std::env::var(name).ok(), arguments.job.as_deref())?;
    job.check_process(std::process::id())?;
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

/// This very command line, as process 1 of a PID namespace with a /proc of its own. Mounts that come on the node later
/// are still seen (home directories by automount), those of the inside are not seen outside.
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

/// One byte a signal, down the inside's standard input; its end tells that we are gone.
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
