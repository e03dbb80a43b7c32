//! Errors of quota checks.

use permafrost_protocol::control::{self, ErrorCode};

/// A quota that refuses a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    /// The namespace would exceed a limit.
    #[error("namespace {namespace} may have {limit} {what} on this node, and has {used}")]
    Exceeded {
        /// Name of the namespace.
        namespace: String,
        /// `bytes`, `checkpoints`, `sessions` or `reservations`.
        what: &'static str,
        /// Limit of the namespace.
        limit: u64,
        /// Current use of the namespace.
        used: u64,
    },
    /// The requested priority is too high.
    #[error("namespace {namespace} may have priorities up to {limit}, not {priority}")]
    Priority {
        /// Name of the namespace.
        namespace: String,
        /// Highest priority that the namespace may have.
        limit: u64,
        /// Requested priority.
        priority: u32,
    },
}

impl QuotaError {
    /// Returns the error code of the refusal.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Exceeded {
                what: "bytes" | "checkpoints",
                ..
            } => ErrorCode::NoSpace,
            Self::Exceeded { .. } => ErrorCode::Unavailable,
            Self::Priority { .. } => ErrorCode::Denied,
        }
    }

    /// Returns advice for the caller.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Exceeded {
                what: "bytes" | "checkpoints",
                ..
            } => {
                "remove checkpoints of the namespace (`permafrost rm`), or have its quota raised (permafrostd --quotas)"
            }
            Self::Exceeded { .. } => {
                "wait until some of them have ended, or have the quota raised (permafrostd --quotas)"
            }
            Self::Priority { .. } => {
                "ask for less, or have the quota raised (permafrostd --quotas)"
            }
        }
    }

    /// Converts the error to a reply of the control protocol.
    #[must_use]
    pub fn to_reply(&self) -> control::Error {
        control::Error {
            code: self.code().into(),
            message: self.to_string(),
            hint: self.hint().to_owned(),
        }
    }
}
