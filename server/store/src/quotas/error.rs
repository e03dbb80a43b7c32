//! Refusals for a quota's sake.

use permafrost_protocol::control::{self, ErrorCode};

/// A quota that does not allow what is asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    /// It would use more than it may.
    #[error("namespace {namespace} may have {limit} {what} on this node, and has {used}")]
    Exceeded {
        /// The namespace.
        namespace: String,
        /// `bytes`, `checkpoints`, `sessions` or `reservations`.
        what: &'static str,
        /// How many it may have.
        limit: u64,
        /// How many it has.
        used: u64,
    },
    /// The priority is too high.
    #[error("namespace {namespace} may have priorities up to {limit}, not {priority}")]
    Priority {
        /// The namespace.
        namespace: String,
        /// The highest that it may have.
        limit: u64,
        /// The one that was asked for.
        priority: u32,
    },
}

impl QuotaError {
    /// Returns what kind of refusal it is.
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

    /// Returns what to do about it.
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

    /// Returns it as a reply.
    #[must_use]
    pub fn to_reply(&self) -> control::Error {
        control::Error {
            code: self.code().into(),
            message: self.to_string(),
            hint: self.hint().to_owned(),
        }
    }
}
