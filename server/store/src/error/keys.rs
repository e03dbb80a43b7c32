//! Errors of requests about keys.

use permafrost_protocol::control::{ErrorCode, ReportedError};

/// Reason why the keys for encryption at rest are not listed or changed.
#[derive(Debug, thiserror::Error)]
pub enum KeyRequestError {
    /// The daemon was started without a key.
    #[error("nothing is encrypted here")]
    NotEncrypted,
    /// An action of another version.
    #[error("{action:?} is nothing that can be done to keys")]
    Action {
        /// Action that was requested.
        action: String,
    },
    /// The namespace has checkpoints, which the cluster lists.
    #[error("namespace {namespace:?} has {checkpoints} checkpoints here")]
    InUse {
        /// Name of the namespace.
        namespace: String,
        /// Number of its checkpoints.
        checkpoints: usize,
    },
    /// The namespace's keys are erased. Adopted dumps of it were encrypted with a key of dumps that had no name, which
    /// others still need.
    #[error(
        "the keys of namespace {namespace:?} are erased, but adopted dumps of it were encrypted with a key that {segments} segments of other dumps still have"
    )]
    Shared {
        /// Name of the namespace.
        namespace: String,
        /// Number of segments with such a key.
        segments: u64,
    },
    /// The key of dumps that had no name: adopted ones, of any job, have their pages under it.
    #[error("dumps that had no name, of all namespaces, are encrypted with this key")]
    Adopted,
}

impl ReportedError for KeyRequestError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::NotEncrypted | Self::InUse { .. } | Self::Shared { .. } | Self::Adopted => {
                ErrorCode::Conflict
            }
            Self::Action { .. } => ErrorCode::Invalid,
        }
    }

    fn hint(&self) -> &'static str {
        match self {
            Self::NotEncrypted => "start permafrostd with --key-file or --key-command",
            Self::Action { .. } => "use the `permafrost` of this node's version",
            Self::InUse { .. } => "remove them on all nodes first: permafrost rm",
            Self::Shared { .. } => {
                "when the dumps that are under way are over: permafrost keys rotate \"\"; `permafrost keys ls` shows what is left under old keys"
            }
            Self::Adopted => "`permafrost keys rotate \"\"` gives them another key",
        }
    }
}
