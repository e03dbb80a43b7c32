//! Failures to get, make or erase keys.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use permafrost_protocol::control::{ErrorCode, ReportedError};

/// Reason why keys cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// A file of keys cannot be read or written.
    #[error("{action} {path}")]
    Io {
        /// Verb and noun that name the failed action.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Others can read or replace the key file, or it has not 32 bytes.
    #[error("key file {path} {what}")]
    KeyFile {
        /// Path of the file.
        path: PathBuf,
        /// Description of the defect.
        what: String,
    },
    /// The key command failed.
    #[error("key command `{command} {verb}` {what}")]
    Command {
        /// The command, as the operator gave it.
        command: String,
        /// `wrap` or `unwrap`.
        verb: &'static str,
        /// Description of the failure.
        what: String,
    },
    /// The key command took too long.
    #[error("key command `{command} {verb}` did not end within {} s", timeout.as_secs())]
    Timeout {
        /// The command, as the operator gave it.
        command: String,
        /// `wrap` or `unwrap`.
        verb: &'static str,
        /// Time that it had.
        timeout: Duration,
    },
    /// The key that was given is not the one that the stored keys are wrapped with.
    #[error("the keys in {path} are wrapped with another key")]
    OtherKey {
        /// Directory of the stored keys.
        path: PathBuf,
    },
    /// Both copies of the stored keys are damaged.
    #[error("both copies of the keys in {path} are damaged")]
    Damaged {
        /// Directory of the stored keys.
        path: PathBuf,
    },
    /// An earlier change of a namespace's keys failed half-way, and cannot be completed: a restart might find another
    /// key than the one that is in memory.
    #[error("the keys of namespace {namespace:?} are not stored safely")]
    Unsettled {
        /// Name of the namespace.
        namespace: String,
        /// Error of this attempt.
        source: Box<KeysError>,
    },
    /// A namespace has no key.
    #[error("namespace {namespace:?} has no key")]
    NoKey {
        /// Name of the namespace.
        namespace: String,
    },
}

impl ReportedError for KeysError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::NoKey { .. } => ErrorCode::NotFound,
            _ => ErrorCode::Internal,
        }
    }

    fn hint(&self) -> &'static str {
        match self {
            Self::Io { .. } | Self::Unsettled { .. } => {
                "check the data directory, its room and its permissions"
            }
            Self::KeyFile { .. } => {
                "make one with: (umask 077; head -c 32 /dev/urandom > FILE), and keep a copy of it elsewhere"
            }
            Self::Command { .. } | Self::Timeout { .. } => {
                "the command gets `wrap` or `unwrap` as its last argument and the bytes on its standard input, and has to print the result; try it by hand"
            }
            Self::OtherKey { .. } => {
                "give the --key-file or --key-command that these keys were wrapped with; to change it, give the one before with --old-key-file or --old-key-command, once"
            }
            Self::Damaged { .. } => {
                "put back a copy of the directory; without it the encrypted checkpoints are lost, and another --data-dir begins anew"
            }
            Self::NoKey { .. } => "see: permafrost keys ls",
        }
    }
}
