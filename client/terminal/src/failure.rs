//! Failures of commands: an exit code, the error, and a hint.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use permafrost_criu::options::OptionsError;
use permafrost_criu::origin::OriginError;
use permafrost_criu::scratch::ScratchError;
use permafrost_criu::{CriuError, Digest};
use permafrost_protocol::control::ErrorCode;
use permafrost_transport::control::ControlError;
use serde::Serialize;

use crate::visible::visible;

/// Exit codes; they are [`ErrorCode`]'s numbers where that has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Code {
    /// Done. Also if the reader of the output has gone: no failure, but no reason to go on.
    Unread = 0,
    /// An error of Permafrost's own, or one that has no code of its own.
    ///
    /// Cure: read the message and the daemon's log; `permafrost doctor` looks for known faults, and `permafrost
    /// report` collects what a report of a defect needs.
    Internal = 1,
    /// The command line or the request makes no sense.
    ///
    /// Cure: correct what the message names; `permafrost COMMAND --help` has every option, with examples.
    Invalid = 2,
    /// No such job, checkpoint, session, process, node or file.
    ///
    /// Cure: `permafrost ls` lists jobs and checkpoints, `permafrost status` sessions, `permafrost node ls` nodes.
    NotFound = 3,
    /// Another object is in the way: an open dump of the job, a pin, a directory that is not empty; or a reservation
    /// is unknown.
    ///
    /// Cure: the message names what is in the way: wait for it, remove it, or take another name.
    Conflict = 4,
    /// CRIU failed, or is not installed.
    ///
    /// Cure: follow the hint, which goes by CRIU's own error; the log that is named has all of it. `permafrost
    /// doctor` runs `criu check`.
    CriuFailed = 5,
    /// The region is full, or no tmpfs has room for the images.
    ///
    /// Cure: remove checkpoints (`permafrost prune`, `rm`), add a file (`permafrost region add`), or give images a
    /// larger tmpfs or `--work-dir`.
    NoSpace = 6,
    /// A page or a record is damaged.
    ///
    /// Cure: in a cluster `permafrost scrub` heals it from other copies; otherwise restore an older generation
    /// (`permafrost ls`).
    Corrupt = 7,
    /// The dump's session failed.
    ///
    /// Cure: the task goes on: dump again; the message says why the session failed.
    SessionFailed = 8,
    /// The caller has no permission.
    ///
    /// Cure: run as root, or ask with a certificate or token that has the right: `permafrost pki show`,
    /// docs/security.md.
    Denied = 9,
    /// `permafrostd` cannot be reached, went away, or did not take a checkpoint within `--freeze-limit`.
    ///
    /// Cure: start `permafrostd`, or name its socket with `--socket`; its log says why it stopped. The task goes on.
    Unreachable = 10,
    /// Not enough nodes for the requested durability, no live node that holds the checkpoint, no figures yet for the
    /// requested answer, too many requests, too many waiting in the queue, or the registry does not answer: nothing
    /// was done, try again later.
    ///
    /// Cure: try again when nodes or etcd are back (`permafrost node ls`, `permafrost doctor`), or ask for less:
    /// `--durability local`.
    Unavailable = 11,
    /// `plan`: all candidates together free too little, or there are fewer nodes with room than copies. `preempt`,
    /// `shrink`: less became free than requested. The plan or the report is printed all the same.
    ///
    /// Cure: name more candidates, or want less.
    NotEnough = 12,
    /// SIGINT, SIGTERM or SIGHUP ended the command.
    ///
    /// Cure: run the command again; what it had begun was rolled back, or is reported.
    Interrupted = 130,
}

impl Code {
    /// Returns the code for the exit code of another `permafrost` that failed.
    pub fn from_exit_code(exit_code: u8) -> Self {
        const ALL: [Code; 12] = [
            Code::Invalid,
            Code::NotFound,
            Code::Conflict,
            Code::CriuFailed,
            Code::NoSpace,
            Code::Corrupt,
            Code::SessionFailed,
            Code::Denied,
            Code::Unreachable,
            Code::Unavailable,
            Code::NotEnough,
            Code::Interrupted,
        ];
        ALL.into_iter()
            .find(|code| *code as u8 == exit_code)
            .unwrap_or(Self::Internal)
    }
}

impl From<ErrorCode> for Code {
    fn from(code: ErrorCode) -> Self {
        match code {
            ErrorCode::Internal => Self::Internal,
            ErrorCode::Invalid => Self::Invalid,
            ErrorCode::NotFound => Self::NotFound,
            ErrorCode::Conflict => Self::Conflict,
            ErrorCode::NoSpace => Self::NoSpace,
            ErrorCode::Corrupt => Self::Corrupt,
            ErrorCode::SessionFailed => Self::SessionFailed,
            ErrorCode::Denied => Self::Denied,
            ErrorCode::Unavailable => Self::Unavailable,
        }
    }
}

/// Failure of a command.
#[derive(Debug, Serialize)]
pub struct Failure {
    /// Kind of failure.
    pub code: Code,
    /// Exit code of the process, the number of `code`.
    pub exit_code: u8,
    /// Description of the failure, in one line.
    pub message: String,
    /// Advice on the next step; empty for none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub hint: String,
    /// Error lines of CRIU besides its reason.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub criu: Vec<String>,
    /// Path of the log that says more: CRIU's, which was saved, or that of a lazy restore's keeper.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log: Option<PathBuf>,
    /// True if the images are all that is left of the process.
    #[serde(skip)]
    pub keep_images: bool,
}

impl Failure {
    /// Returns a failure without advice.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            exit_code: code as u8,
            message: message.into(),
            hint: String::new(),
            criu: Vec::new(),
            log: None,
            keep_images: false,
        }
    }

    /// Adds advice on the next step.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }

    /// Returns the failure for a run of CRIU that failed at `what`.
    pub fn criu(what: impl Display, digest: Digest) -> Self {
        let mut failure = Self::new(Code::CriuFailed, format!("{what}: {}", digest.reason));
        failure.hint = digest.hint;
        failure.criu = digest.lines;
        failure
    }

    /// Returns the failure for a file that could not be used.
    pub fn io(what: &str, path: &Path, error: &io::Error) -> Self {
        let code = match error.kind() {
            io::ErrorKind::NotFound => Code::NotFound,
            io::ErrorKind::PermissionDenied => Code::Denied,
            io::ErrorKind::StorageFull => Code::NoSpace,
            io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => Code::Invalid,
            _ => Code::Internal,
        };
        Self::new(code, format!("{what} {}: {error}", path.display()))
    }

    /// Returns the failure for an operation that a signal ended.
    pub fn interrupted(what: impl Into<String>) -> Self {
        Self::new(Code::Interrupted, what)
    }

    /// Puts the operation that failed in front of the message.
    pub fn during(mut self, what: impl Display) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }

    /// Prints the failure for the user, and returns the exit code.
    pub fn report(&self, json: bool) -> ExitCode {
        if self.code != Code::Unread {
            let mut text = String::new();
            if json {
                let error = serde_json::json!({ "error": self });
                text.push_str(&error.to_string());
                text.push('\n');
            } else {
                text.push_str(&format!("permafrost: {}\n", self.message));
                for line in &self.criu {
                    text.push_str(&format!("  criu: {line}\n"));
                }
                if !self.hint.is_empty() {
                    text.push_str(&format!("  hint: {}\n", self.hint));
                }
                if let Some(log) = &self.log {
                    text.push_str(&format!("  log: {}\n", log.display()));
                }
                // The text contains messages of CRIU and of peers.
                text = visible(&text).into_owned();
            }
            // With a closed standard error, nothing can be reported.
            let _ = io::stderr().write_all(text.as_bytes());
        }
        ExitCode::from(self.exit_code)
    }
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Self {
        let message = error.to_string();
        match error {
            ControlError::Refused { code, hint, .. } => Self::new(code.into(), message).hint(hint),
            ControlError::Unreachable { source, .. }
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                Self::new(Code::Denied, message)
                    .hint("run as the user that permafrostd runs as, or as root")
            }
            ControlError::Unreachable { .. } => Self::new(Code::Unreachable, message).hint(
                "start permafrostd, or name its control socket with --socket or PERMAFROST_SOCKET",
            ),
            ControlError::Send(_) | ControlError::Receive(_) | ControlError::Closed => {
                Self::new(Code::Unreachable, message).hint("permafrostd's log says why")
            }
            ControlError::Unexpected { .. } => Self::new(Code::Internal, message)
                .hint("are permafrost and permafrostd of the same version? see permafrost status"),
        }
    }
}

impl From<OriginError> for Failure {
    fn from(error: OriginError) -> Self {
        let message = error.to_string();
        match error {
            OriginError::NoProcess { .. } => Self::new(Code::NotFound, message)
                .hint("pids are those of this pid namespace; see ps -e"),
            OriginError::NotDumpable { .. } => Self::new(Code::Invalid, message),
            OriginError::Oneself { .. } => Self::new(Code::Invalid, message)
                .hint("run permafrost from outside of the tree that it freezes (setsid, or another terminal)"),
            OriginError::Proc { .. } => Self::new(Code::Internal, message),
        }
    }
}

impl From<OptionsError> for Failure {
    fn from(error: OptionsError) -> Self {
        Self::new(Code::Invalid, error.to_string())
    }
}

impl From<ScratchError> for Failure {
    fn from(error: ScratchError) -> Self {
        let failure = Self::new(Code::NoSpace, error.to_string());
        match error {
            ScratchError::NoPlace { .. } => failure.hint(
                "images are kept in memory because they hold secrets; free some, enlarge /dev/shm (mount -o remount,size=…), or name a private directory with --work-dir",
            ),
            ScratchError::Unusable { path, source } => Self::io("use", &path, &source),
        }
    }
}

impl From<CriuError> for Failure {
    fn from(error: CriuError) -> Self {
        let failure = Self::new(Code::CriuFailed, error.to_string());
        match error {
            CriuError::NotFound { .. } | CriuError::NotCriu { .. } => {
                failure.hint("install criu, or name it with --criu or PERMAFROST_CRIU")
            }
            CriuError::Io { .. } | CriuError::Unguarded { .. } => failure,
        }
    }
}
