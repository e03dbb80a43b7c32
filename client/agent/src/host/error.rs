//! Errors of what CRIU and `permafrost` ask a host for.

use std::io;

use permafrost_identity::TlsError;
use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::manifest::JobNameError;

/// Reason why a request or a connection of CRIU is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("control protocol version {version} is not spoken here")]
    Version { version: u32 },
    #[error("a request that asks for nothing this daemon knows")]
    Unknown,
    #[error("the request came without the descriptor it needs")]
    NoDescriptor,
    #[error("whoever asked for the seal is gone")]
    CallerGone,
    #[error("the job name is empty")]
    EmptyJob,
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
            Self::Version { .. }
            | Self::Unknown
            | Self::NoDescriptor
            | Self::CallerGone
            | Self::EmptyJob => ErrorCode::Invalid,
            // The failure of CRIU says more.
            Self::NobodyCame => ErrorCode::Conflict,
            Self::Crowded => ErrorCode::Unavailable,
            Self::Io { .. } => ErrorCode::Internal,
            Self::Conversation { .. } => ErrorCode::SessionFailed,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Version { .. } => concat!(
                "use the permafrost that belongs to permafrostd ",
                env!("CARGO_PKG_VERSION")
            ),
            Self::Unknown => "use the permafrost that belongs to this permafrostd",
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
    #[error("a connection without TLS, from another host or of a user who is not admitted")]
    Plaintext,
    #[error("{name} may not store pages")]
    Park { name: String },
    #[error("{name} may not dump into namespace {namespace}")]
    Namespace { name: String, namespace: String },
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
