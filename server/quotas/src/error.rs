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
    /// A limit of a policy of retention leaves no room.
    #[error("{scope} may have {limit} {what}, and has {used}{after}", after = if *removes_oldest { " that must not be removed" } else { "" })]
    Retention {
        /// The namespace or the job.
        scope: String,
        /// `bytes` or `checkpoints`.
        what: &'static str,
        /// Limit of the policy.
        limit: u64,
        /// Current use of it.
        used: u64,
        /// True if the policy removes the oldest: the rest must not go.
        removes_oldest: bool,
    },
    /// The requested priority is too high.
    #[error("namespace {namespace} may have priorities up to {limit}, not {priority}")]
    Priority {
        /// Name of the namespace.
        namespace: String,
        /// Highest priority that the namespace may have.
        limit: u64,
        /// Priority that was requested.
        priority: u32,
    },
}

impl ReportedError for QuotaError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Parked { .. }
            | Self::Retention { .. }
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
                "remove checkpoints of the namespace (`permafrost rm`), or have its quota raised (permafrostd --quotas, `permafrost retention set`)"
            }
            Self::Retention { .. } => {
                "remove or unpin checkpoints (`permafrost rm`, `permafrost unpin`), or have the limit raised (`permafrost retention set`); `permafrost prune --dry-run` says why each one stays"
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
