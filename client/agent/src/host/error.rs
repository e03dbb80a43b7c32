//! Errors of what CRIU and `permafrost` ask a host for.

use std::io;

use permafrost_identity::TlsError;
use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::manifest::JobNameError;

/// Reason why a request or a connection of CRIU is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    /// Cure: use the same version of Permafrost everywhere; if it is, it is a defect: `permafrost report` collects
    /// what a report needs.
    #[error("the request came without the descriptor it needs")]
    NoDescriptor,
    /// Cure: dump again: the session's time was over, or the daemon was restarted. The task goes on.
    #[error("there is no session {session}")]
    NoSession { session: String },
    /// Cure: use the same version of Permafrost everywhere; if it is, it is a defect: `permafrost report` collects
    /// what a report needs.
    #[error("this connection brings the pages of session {begun}, not of {session}")]
    OtherSession { begun: String, session: String },
    /// Cure: use the same version of Permafrost everywhere; if it is, it is a defect: `permafrost report` collects
    /// what a report needs.
    #[error("{space_type} {space} is no address space")]
    NoSpace { space_type: i32, space: u64 },
    /// Cure: dump again: the task goes on.
    #[error("whoever asked for the seal is gone")]
    CallerGone,
    #[error("the job name is empty")]
    EmptyJob,
    /// Cure: look at CRIU's log: it did not connect to the session's socket or port.
    #[error("CRIU did not come for the pages")]
    NobodyCame,
    #[error("too many anonymous dumps at once")]
    Crowded,
    #[error("{action}: {source}")]
    Io {
        /// Failed action, as verb and noun.
        action: &'static str,
        source: io::Error,
    },
    #[error("{reason}")]
    Conversation {
        /// Reason why the pages of a connection were not taken.
        reason: String,
    },
}

impl ReportedError for RequestError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::NoDescriptor
            | Self::OtherSession { .. }
            | Self::NoSpace { .. }
            | Self::CallerGone
            | Self::EmptyJob => ErrorCode::Invalid,
            Self::NoSession { .. } => ErrorCode::NotFound,
            // The failure of CRIU says more.
            Self::NobodyCame => ErrorCode::Conflict,
            Self::Crowded => ErrorCode::Unavailable,
            Self::Io { .. } => ErrorCode::Internal,
            Self::Conversation { .. } => ErrorCode::SessionFailed,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::EmptyJob => {
                "use letters, digits and . _ : / + - (at most 200 bytes, no leading . - /)"
            }
            Self::Crowded => "dump with `permafrost dump`, which waits for its place",
            _ => "",
        }
    }
}

/// Reason why a connection of CRIU may not bring pages. There is no advice: it may be an attacker's.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeniedError {
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Cure: dump with `criu --tls` and a certificate, or admit the user: `--listen-uid UID`.
    #[error("a connection without TLS, from another host or of a user who is not admitted")]
    Plaintext,
    /// Cure: use a certificate of role agent (`permafrost pki issue --role agent`).
    #[error("{name} may not store pages")]
    Park { name: String },
    /// Cure: use a certificate with the namespace (`permafrost pki issue --namespace`).
    #[error("{name} may not dump into namespace {namespace}")]
    Namespace { name: String, namespace: String },
    /// Cure: use a certificate with the namespace (`permafrost pki issue --namespace`).
    #[error("{name} may not read namespace {namespace}")]
    Read { name: String, namespace: String },
    #[error(transparent)]
    Job(#[from] JobNameError),
}

impl ReportedError for DeniedError {
    fn code(&self) -> ErrorCode {
        ErrorCode::Denied
    }
}
