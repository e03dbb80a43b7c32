//! Outside of the namespace: what slurmstepd knows. It starts the inside, hands on the signals that come, and ends as
//! that ends.

use std::fs;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ChildStdin, Command, Stdio};
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use super::job::Job;
use super::{RunArguments, inside, task};
use crate::failure::{Code, Failure};

/// Signals that are not ours alone to die of.
const HANDED_ON: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

/// `O_CLOEXEC` as fdinfo shows it, octal.
const CLOSE_ON_EXEC: u32 = 0o2_000_000;

/// Closes what the batch script's surroundings have left open, and becomes the program given: CRIU refuses descriptors
/// whose file is outside the mount namespace or whose other end is outside the tree.
const CLOSE_INHERITED: &str = r#"
for fd in /proc/$$/fd/*; do
    fd=${fd##*/}
    [ "$fd" -le 2 ] || eval "exec $fd>&-"
done
exec "$@"
"#;

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
    let mut command = if leaked_descriptors() {
        let mut command = Command::new("bash");
        command.args(["-c", CLOSE_INHERITED, "bash", "unshare"]);
        command
    } else {
        Command::new("unshare")
    };
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

/// Whether a child would inherit more than the standard streams.
fn leaked_descriptors() -> bool {
    let Ok(entries) = fs::read_dir("/proc/self/fdinfo") else {
        return true;
    };
    entries.flatten().any(|entry| {
        let number: Option<u32> = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        let Ok(info) = fs::read_to_string(entry.path()) else {
            // The listing's own, gone by now.
            return false;
        };
        let flags = info
            .lines()
            .find_map(|line| line.strip_prefix("flags:"))
            .and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
        number.is_none_or(|number| number > 2)
            && flags.is_none_or(|flags| flags & CLOSE_ON_EXEC == 0)
    })
}
