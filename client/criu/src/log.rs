//! Finds CRIU's own reason for a failure in its log.
//!
//! CRIU logs an error where it happens and again at every caller on the way out, so the first error is
//! the cause and the last ones say nothing (`Dumping FAILED.`). The messages below are those of CRIU 4.2;
//! an unknown one is shown as it is.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Most error lines shown besides the reason.
const MAX_LINES: usize = 6;

/// Cause of a failed CRIU run, extracted from its log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Digest {
    /// The cause, in CRIU's words if it gave any.
    pub reason: String,
    /// Advice on how to correct it; may be empty.
    pub hint: String,
    /// CRIU's error lines, without the meaningless ones.
    pub lines: Vec<String>,
    /// True if the conversation with the page server failed first, or the log gives no cause: CRIU logs nothing
    /// when CLOSE is refused. The daemon's error is the cause then.
    pub blames_page_server: bool,
}

/// A known cause, recognised by words of its message.
struct Known {
    /// Words that all occur in the message.
    words: &'static [&'static str],
    hint: &'static str,
}

/// Known causes; the first that fits any line is used, so the more certain ones come first.
const KNOWN: &[Known] = &[
    Known {
        words: &["Can't fork for", "File exists"],
        hint: "a restored process keeps its pid, and that pid is taken: end the process that has it, or restore inside a fresh pid namespace (unshare --pid --fork --mount-proc)",
    },
    Known {
        words: &["Pid ", "do not match expected"],
        hint: "a restored process keeps its pid, and something else took it meanwhile: try again, or restore inside a fresh pid namespace (unshare --pid --fork --mount-proc)",
    },
    Known {
        words: &["has bad size"],
        hint: "the file has changed since the dump: put its old contents back",
    },
    Known {
        words: &["has bad build-ID"],
        hint: "the program or library was replaced since the dump (an update?): put the old one back, or restore where it is still installed",
    },
    Known {
        words: &["has bad mode"],
        hint: "the file's permissions have changed since the dump: set them back, or pass -- --skip-file-rwx-check",
    },
    Known {
        words: &["Can't open file", "No such file or directory"],
        hint: "the process had this file open and it is gone (paths are relative to its root): put it back",
    },
    Known {
        words: &["Can't open file", "Permission denied"],
        hint: "the process had this file open and it may not be opened now: check its permissions",
    },
    Known {
        words: &["Can't bind inet socket", "Address already in use"],
        hint: "another process listens on the port that the restored one needs: stop it, or restore inside a network namespace",
    },
    Known {
        words: &["Connected TCP socket"],
        hint: "the process has open TCP connections: pass --tcp-established to keep them, or -- --tcp-close to restore them closed",
    },
    Known {
        words: &["tcp", "Failed to lock TCP connection"],
        hint: "CRIU runs iptables-restore or nft to hold packets back: install one (-- --network-lock nftables chooses), or pass -- --network-lock skip",
    },
    Known {
        words: &["Iptables configuration failed"],
        hint: "CRIU runs iptables-restore to hold packets back: install iptables, or pass -- --network-lock nftables or -- --network-lock skip",
    },
    Known {
        words: &["is not a session leader"],
        hint: "the process was started from a shell or a script and shares its session: pass --shell-job",
    },
    Known {
        words: &["A session leader of", "is outside"],
        hint: "the process was started from a shell or a script and shares its session: pass --shell-job",
    },
    Known {
        words: &["slave peer index", "without correspond master peer"],
        hint: "the process's terminal belongs to another process: pass --shell-job",
    },
    Known {
        words: &["Found dangling tty"],
        hint: "the process's terminal belongs to another process: pass --shell-job",
    },
    Known {
        words: &["inherits", "session", "shell-job"],
        hint: "the process shares its shell's session: pass --shell-job",
    },
    Known {
        words: &["shell job", "stdin"],
        hint: "a shell job is restored onto a terminal: run this command from one",
    },
    Known {
        words: &["dump ghost file"],
        hint: "the process has a deleted file open that is larger than CRIU saves: pass -- --ghost-limit SIZE (for example 64M)",
    },
    Known {
        words: &["External socket is used"],
        hint: "the process is connected to a unix socket of a process outside: pass -- --ext-unix-sk and have that process listen again before the restore, or dump both",
    },
    Known {
        words: &["file locks are hold"],
        hint: "the process holds file locks: pass -- --file-locks",
    },
    Known {
        words: &["Can't create link remap"],
        hint: "the process has a deleted file open that has other names: pass -- --link-remap",
    },
    Known {
        words: &["Tracking memory is not available"],
        hint: "this kernel has no soft-dirty bits (CONFIG_MEM_SOFT_DIRTY): leave --pre-dump and --track-mem out; equal pages are found by comparison all the same",
    },
    Known {
        words: &["BUG at criu/mem.c"],
        hint: "this kernel has no soft-dirty bits (CONFIG_MEM_SOFT_DIRTY): leave --pre-dump and --track-mem out; equal pages are found by comparison all the same",
    },
    Known {
        words: &["criu itself is within dumped tree"],
        hint: "CRIU cannot dump a process that it was started by: run permafrost from another session",
    },
    Known {
        words: &["CAP_SYS_ADMIN or the CAP_CHECKPOINT_RESTORE"],
        hint: "run as root, or give CRIU the capability and pass -- --unprivileged",
    },
    Known {
        words: &["Unable to detach from", "No such process"],
        hint: "the process ended before it could be frozen",
    },
    Known {
        words: &["Can't write pages to socket"],
        hint: "permafrostd ended the session in the middle of the dump; its log says why",
    },
    Known {
        words: &["Can't send PSI"],
        hint: "permafrostd ended the session in the middle of the dump; its log says why",
    },
    Known {
        words: &["The page server doesn't answer"],
        hint: "permafrostd went away in the middle of the dump; its log says why",
    },
    Known {
        words: &["Script ", "exited with"],
        hint: "an action script refused; what it wrote is in the log",
    },
    Known {
        words: &["Unexpected EOF on (empty-image)"],
        hint: "the images directory is incomplete: was the dump finished?",
    },
    Known {
        words: &["mount", "doesn't have a proper root mount"],
        hint: "a mount of the process comes from outside its mount namespace: name it with -- --external mnt[PATH]:NAME, or pass -- --external 'mnt[]' for all",
    },
    Known {
        words: &["unreachable sharing"],
        hint: "a mount is shared with the outside: pass -- --enable-external-sharing",
    },
    Known {
        words: &["unreachable master"],
        hint: "a mount follows one outside: pass -- --enable-external-masters",
    },
    Known {
        words: &["Can't dump external mount"],
        hint: "name the mount with -- --external mnt[PATH]:NAME",
    },
    Known {
        words: &["vdso", "ELF"],
        hint: "this CRIU is too old for the running kernel: install a newer one, or name it with --criu",
    },
    Known {
        words: &["Can't get rlimit"],
        hint: "CRIU lacks CAP_SYS_RESOURCE: run as root with it (docker run --cap-add SYS_RESOURCE), as the limits of another user's process are read with it only",
    },
    Known {
        words: &["SysVIPC shmem map"],
        hint: "the process has System V shared memory, as every PostgreSQL has: start it in an IPC namespace of its own (unshare --ipc PROGRAM), which is dumped with it",
    },
    Known {
        words: &["No space left on device"],
        hint: "the directory of the images is full: name a larger one with --work-dir",
    },
    Known {
        words: &["Operation not permitted"],
        hint: "CRIU lacks a capability: run as root with CAP_SYS_ADMIN, or CAP_CHECKPOINT_RESTORE and -- --unprivileged",
    },
];

/// Messages that occur in the log of every run, or only report that something failed before.
const MEANINGLESS: &[&str] = &[
    "rlimit: Can't setup RLIMIT_NOFILE for self",
    "Dumping FAILED",
    "Restoring FAILED",
    "Pre-dumping FAILED",
    "One of more action scripts failed",
    // Options of TCP, on the AF_UNIX socket that pages are sent over: CRIU up to 3.17 takes that for an error.
    "Unable to restore TCP_",
];

/// Finds the cause in CRIU's log, in its console output before there was a log, or in its exit status.
pub fn digest(log: &str, console: &str, status: Option<ExitStatus>) -> Digest {
    let mut errors: Vec<String> = log.lines().filter_map(error_message).collect();
    if errors.is_empty() {
        errors = console_messages(console);
    }
    errors.dedup();

    let known = KNOWN.iter().find_map(|known| {
        let line = errors
            .iter()
            .find(|line| known.words.iter().all(|word| line.contains(word)))?;
        Some((line.clone(), known.hint))
    });
    let killed = status
        .and_then(|status| status.signal())
        .map(|signal| format!("CRIU was killed by signal {signal}"));
    // Every message of criu/page-xfer.c has that prefix.
    let blames_page_server = match errors.first() {
        Some(first) => first.starts_with("page-xfer: "),
        None => killed.is_none(),
    };
    let (reason, hint) = match (known, errors.first(), killed) {
        (Some((line, hint)), _, _) => (line, hint),
        (None, _, Some(killed)) => (killed, ""),
        (None, Some(first), None) => (first.clone(), ""),
        (None, None, None) => (
            match status.and_then(|status| status.code()) {
                Some(code) => format!("CRIU exited with {code} and gave no reason"),
                None => "CRIU gave no reason".to_owned(),
            },
            "",
        ),
    };
    errors.retain(|line| *line != reason);
    errors.truncate(MAX_LINES);
    Digest {
        reason,
        hint: hint.to_owned(),
        lines: errors,
        blames_page_server,
    }
}

/// Returns the message of an error line: `(00.033216)   7573: Error (criu/files-reg.c:2353): MESSAGE`.
fn error_message(line: &str) -> Option<String> {
    let (_, rest) = line.split_once("Error (")?;
    let (_, message) = rest.split_once("): ")?;
    let message = message.trim();
    (!MEANINGLESS.iter().any(|noise| message.starts_with(noise))).then(|| message.to_owned())
}

/// Returns the messages that CRIU prints before it has a log: wrong options, missing capabilities.
fn console_messages(console: &str) -> Vec<String> {
    console
        .lines()
        .map(str::trim)
        // After an unknown option the whole usage follows.
        .take_while(|line| !line.starts_with("Usage:"))
        .map(|line| error_message(line).unwrap_or_else(|| line.to_owned()))
        .filter(|line| !line.is_empty() && !line.starts_with("(00."))
        .take(MAX_LINES)
        .collect()
}

#[cfg(test)]
#[path = "log_tests.rs"]
mod tests;
