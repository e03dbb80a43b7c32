//! Errors of quota checks.

use permafrost_protocol::control::{ErrorCode, ReportedError};

/// A quota that refuses a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    /// Anonymous dumps have reached their limit of the region.
    #[error("dumps that nobody has adopted take as much as they may ({limit_bytes} bytes)")]
    Parked {
        /// Limit for anonymous dumps, bytes.
        limit_bytes: u64,
    },
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

impl ReportedError for QuotaError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Parked { .. }
            | Self::Exceeded {
                what: "bytes" | "checkpoints",
                ..
            } => ErrorCode::NoSpace,
            Self::Exceeded { .. } => ErrorCode::Unavailable,
            Self::Priority { .. } => ErrorCode::Denied,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Parked { .. } => {
                "adopt or abort parked dumps (`permafrost ls`), use `permafrost dump`, or raise --park-quota"
            }
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
}
