//! Replies that refuse a request.

use prost::Message;
use serde::Serialize;

/// Reason why a request was refused; the exit codes of `permafrost` are these numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration, Serialize)]
#[serde(rename_all = "kebab-case")]
#[repr(i32)]
pub enum ErrorCode {
    /// Anything that has no number of its own.
    Internal = 1,
    /// The request makes no sense (a bad job name, an images directory without an inventory, …).
    Invalid = 2,
    /// The job, generation or session does not exist.
    NotFound = 3,
    /// Another state prevents it: the job's dump is open already, the checkpoint is pinned, the match is ambiguous.
    Conflict = 4,
    /// The region is full.
    NoSpace = 6,
    /// A page or a record failed its checksum.
    Corrupt = 7,
    /// The session failed; the message gives the time and the reason.
    SessionFailed = 8,
    /// The peer may not do this.
    Denied = 9,
    /// There are not enough nodes, or the registry does not answer: nothing was done, and a retry may succeed later.
    Unavailable = 11,
}

/// Reply that refuses a request.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct Error {
    /// Reason, as a number of [`ErrorCode`].
    #[prost(enumeration = "ErrorCode", tag = "1")]
    pub code: i32,
    /// Explanation of the error.
    #[prost(string, tag = "2")]
    pub message: String,
    /// Action that would resolve the error; may be empty.
    #[prost(string, tag = "3")]
    pub hint: String,
}

/// An error that a request is answered with. Each family of operations has an enum of its own; this trait is what they
/// have in common, and converts all of them to [`Error`].
pub trait ReportedError: std::error::Error {
    /// Returns the error's number, which is the exit code of `permafrost`.
    fn code(&self) -> ErrorCode;

    /// Returns advice for the caller; empty if there is none.
    fn hint(&self) -> &str {
        ""
    }

    /// Formats the error as the caller reads it.
    fn message(&self) -> String {
        self.to_string()
    }

    /// Converts the error to a reply.
    fn to_reply(&self) -> Error {
        Error {
            code: self.code().into(),
            message: self.message(),
            hint: self.hint().to_owned(),
        }
    }
}

impl<E: ReportedError> From<E> for Error {
    fn from(error: E) -> Self {
        error.to_reply()
    }
}
