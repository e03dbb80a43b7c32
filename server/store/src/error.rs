//! Errors of the store, with their codes in the control protocol.

use std::io;

use permafrost_agent::host::arguments::in_full;
use permafrost_criu::directory::DirectoryError;
use permafrost_criu::frontend::SinkError;
use permafrost_pmem::{
    CheckpointId, CloseError, HealError, JournalError, PageError, SealError, ShadowError,
};
use permafrost_protocol::control::{self, ErrorCode};

use crate::catalog::CatalogError;

/// Reason why the store refuses a request or fails.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Anonymous dumps have reached their limit of the region.
    #[error("dumps that nobody has adopted take as much as they may ({limit_bytes} bytes)")]
    ParkQuota {
        /// Limit for anonymous dumps, bytes.
        limit_bytes: u64,
    },
    /// A name, reference or images directory is invalid.
    #[error("{message}")]
    Invalid {
        /// Description of the defect.
        message: String,
        /// Advice for the caller.
        hint: &'static str,
    },
    /// The named object does not exist.
    #[error("{what} not found")]
    NotFound {
        /// Object that was looked up.
        what: String,
    },
    /// The named node does not exist.
    #[error("the cluster has no node {node}")]
    NoNode {
        /// Name of the node.
        node: String,
    },
    /// Another object or operation is in the way.
    #[error("{message}")]
    Conflict {
        /// Description of the conflict.
        message: String,
        /// Way to resolve the conflict.
        hint: &'static str,
    },
    /// There are too few nodes, or the registry does not answer. Nothing was done; a retry may succeed later.
    #[error("{message}")]
    Unavailable {
        /// Description of the missing resource.
        message: String,
        /// Way to make the resource available.
        hint: &'static str,
    },
    /// The session failed before this request.
    #[error("session {session} failed: {reason}")]
    SessionFailed {
        /// Id of the session.
        session: String,
        /// Error code of that failure.
        code: ErrorCode,
        /// Reason of that failure.
        reason: String,
    },
    /// The region is read-only: its medium failed, or its journal is damaged.
    #[error("this node takes no dumps: {reason}")]
    ReadOnly {
        /// Reason why the region is read-only.
        reason: String,
    },
    /// Stored data is damaged.
    #[error("{what}: {source}")]
    Corrupt {
        /// Name of the checkpoint, and the place in it.
        what: String,
        /// The failed check.
        source: PageError,
    },
    /// A damaged page was not rewritten.
    #[error("{what}: {source}")]
    NotHealed {
        /// Name and address of the page.
        what: String,
        /// Reason why it was not rewritten.
        source: HealError,
    },
    /// This node's copy is known to be damaged, and no other node has a copy.
    #[error("{name} is damaged: {damage}")]
    Damaged {
        /// Name of the checkpoint.
        name: String,
        /// Place and kind of the damage.
        damage: String,
    },
    /// The registry lists a checkpoint under another job or generation than its manifest names.
    #[error(
        "checkpoint {id} is listed as {name}, and its manifest says something else: nothing of it is read"
    )]
    Mislisted {
        /// Name under which it is listed.
        name: String,
        /// Id of the checkpoint.
        id: String,
    },
    /// A manifest does not decode. Its pages were intact, so it is of another version, or this program has a
    /// defect.
    #[error("manifest of checkpoint {id}: {source}")]
    Manifest {
        /// Id of the checkpoint.
        id: CheckpointId,
        /// Error of the decoder.
        source: permafrost_protocol::manifest::ManifestError,
    },
    /// No holder of a copy could deliver it.
    #[error("{}", .0.message)]
    Elsewhere(control::Error),
    /// Pages could not be written.
    #[error(transparent)]
    Shadow(#[from] ShadowError),
    /// A checkpoint could not be sealed.
    #[error(transparent)]
    Seal(#[from] SealError),
    /// A change could not be journaled.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The region could not be marked clean.
    #[error(transparent)]
    Close(#[from] CloseError),
    /// The catalog failed.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// A file of an images directory, or a socket, failed.
    #[error("{action}: {source}")]
    Io {
        /// Failed action, as verb and noun.
        action: String,
        /// Error of the operating system.
        source: io::Error,
    },
}

impl StoreError {
    /// Returns a function that wraps a system error with the failed action.
    pub fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }

    /// Returns the error's number in the control protocol, which is the exit code of `permafrost`.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Invalid { .. } => ErrorCode::Invalid,
            Self::NotFound { .. } | Self::NoNode { .. } => ErrorCode::NotFound,
            Self::Conflict { .. } | Self::Mislisted { .. } => ErrorCode::Conflict,
            Self::Unavailable { .. }
            | Self::ReadOnly { .. }
            | Self::Shadow(ShadowError::Failed(_))
            | Self::Seal(SealError::Shadow(ShadowError::Failed(_))) => ErrorCode::Unavailable,
            Self::SessionFailed { code, .. } => *code,
            Self::Elsewhere(error) => error.code(),
            Self::Corrupt { .. } | Self::Damaged { .. } | Self::Manifest { .. } => {
                ErrorCode::Corrupt
            }
            Self::ParkQuota { .. } => ErrorCode::NoSpace,
            Self::Shadow(error) if is_full(error) => ErrorCode::NoSpace,
            Self::Shadow(ShadowError::Corrupt(_)) => ErrorCode::Corrupt,
            Self::Seal(SealError::Shadow(error)) if is_full(error) => ErrorCode::NoSpace,
            Self::Seal(SealError::Journal(JournalError::Full { .. }))
            | Self::Journal(JournalError::Full { .. }) => ErrorCode::NoSpace,
            Self::Shadow(_)
            | Self::Seal(_)
            | Self::Journal(_)
            | Self::Close(_)
            | Self::Catalog(_)
            | Self::NotHealed { .. }
            | Self::Io { .. } => ErrorCode::Internal,
        }
    }

    /// Returns advice for the caller; empty if there is none.
    #[must_use]
    pub fn hint(&self) -> &str {
        match self {
            Self::Elsewhere(error) => &error.hint,
            Self::Invalid { hint, .. }
            | Self::Conflict { hint, .. }
            | Self::Unavailable { hint, .. } => hint,
            Self::NotFound { .. } => "`permafrost ls` lists what is there",
            Self::NoNode { .. } => "`permafrost node ls` lists the nodes",
            Self::Mislisted { .. } => {
                "somebody has changed the registry: docs/security.md, \"What etcd can do\"; `permafrost node rebuild` lists what the nodes hold"
            }
            Self::Damaged { .. } => {
                "restore an older generation (`permafrost ls`); `permafrost scrub` looks again"
            }
            Self::ParkQuota { .. } => {
                "adopt or abort parked dumps (`permafrost ls`), use `permafrost dump`, or raise --park-quota"
            }
            Self::Corrupt { .. } => "`permafrost verify` lists everything that is damaged",
            Self::ReadOnly { .. }
            | Self::Shadow(ShadowError::Failed(_))
            | Self::Journal(JournalError::Failed) => {
                "`permafrost status` says why; what is stored can still be read"
            }
            _ if self.code() == ErrorCode::NoSpace => {
                "remove checkpoints (`permafrost rm`) or start permafrostd with a larger region"
            }
            _ => "",
        }
    }

    /// Formats the error with its causes, so that a caller without access to the log sees the medium's error.
    #[must_use]
    pub fn message(&self) -> String {
        match self {
            Self::Shadow(_) | Self::Seal(_) | Self::Journal(_) | Self::Close(_) => in_full(self),
            // Their own messages do not include their causes.
            _ => self.to_string(),
        }
    }

    /// Converts the error to a reply of the control protocol.
    #[must_use]
    pub fn to_reply(&self) -> control::Error {
        control::Error {
            code: self.code().into(),
            message: self.message(),
            hint: self.hint().to_owned(),
        }
    }

    /// Converts the error to the refusal that ends a page-server conversation.
    #[must_use]
    pub fn to_refusal(&self) -> SinkError {
        const EIO: i32 = 5;
        const EINVAL: i32 = 22;
        const ENOSPC: i32 = 28;
        let status = match self.code() {
            ErrorCode::NoSpace => ENOSPC,
            ErrorCode::Invalid => EINVAL,
            _ => EIO,
        };
        SinkError {
            message: self.message(),
            status,
        }
    }
}

fn is_full(error: &ShadowError) -> bool {
    matches!(error, ShadowError::Full { .. })
}

impl From<DirectoryError> for StoreError {
    fn from(error: DirectoryError) -> Self {
        match error {
            DirectoryError::NotADirectory => Self::Invalid {
                message: error.to_string(),
                hint: DirectoryError::HINT,
            },
            DirectoryError::Invalid { message } => Self::Invalid {
                message,
                hint: DirectoryError::HINT_INVALID,
            },
            DirectoryError::Io { action, source } => Self::Io { action, source },
        }
    }
}
