//! Why the store refuses something, as the control protocol says it.

use std::io;

use permafrost_agent::host::arguments::in_full;
use permafrost_criu::directory::DirectoryError;
use permafrost_criu::frontend::SinkError;
use permafrost_pmem::{
    CheckpointId, CloseError, HealError, JournalError, PageError, SealError, ShadowError,
};
use permafrost_protocol::control::{self, ErrorCode};

use crate::catalog::CatalogError;

/// The store refuses or fails.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Dumps that nobody has named take as much of the region as they may.
    #[error("dumps that nobody has adopted take as much as they may ({limit_bytes} bytes)")]
    ParkQuota {
        /// That much.
        limit_bytes: u64,
    },
    /// A name, reference or images directory that makes no sense.
    #[error("{message}")]
    Invalid {
        /// What is wrong with it.
        message: String,
        /// What to do instead.
        hint: &'static str,
    },
    /// No such thing.
    #[error("{what} not found")]
    NotFound {
        /// What was looked for.
        what: String,
    },
    /// No such node.
    #[error("the cluster has no node {node}")]
    NoNode {
        /// Its name.
        node: String,
    },
    /// Something is in the way.
    #[error("{message}")]
    Conflict {
        /// What is in the way.
        message: String,
        /// How to get past it.
        hint: &'static str,
    },
    /// Not enough nodes, or the registry does not answer: nothing was done, and the same may succeed later.
    #[error("{message}")]
    Unavailable {
        /// What is missing.
        message: String,
        /// How to get past it.
        hint: &'static str,
    },
    /// The session failed before.
    #[error("session {session} failed: {reason}")]
    SessionFailed {
        /// Session id.
        session: String,
        /// The kind of failure.
        code: ErrorCode,
        /// Why.
        reason: String,
    },
    /// The region is for reading only: its medium failed, or its journal is damaged.
    #[error("this node takes no dumps: {reason}")]
    ReadOnly {
        /// Why.
        reason: String,
    },
    /// Stored data is damaged.
    #[error("{what}: {source}")]
    Corrupt {
        /// Which checkpoint and where in it.
        what: String,
        /// The failed check.
        source: PageError,
    },
    /// A damaged page was not written anew.
    #[error("{what}: {source}")]
    NotHealed {
        /// Which page.
        what: String,
        /// Why not.
        source: HealError,
    },
    /// It is known to be damaged, and no other node has it.
    #[error("{name} is damaged: {damage}")]
    Damaged {
        /// The checkpoint.
        name: String,
        /// Where, and how.
        damage: String,
    },
    /// The registry lists a checkpoint as something else than its manifest says that it is.
    #[error(
        "checkpoint {id} is listed as {name}, and its manifest says something else: nothing of it is read"
    )]
    Mislisted {
        /// As it is listed.
        name: String,
        /// Its id.
        id: String,
    },
    /// A manifest does not decode; its pages were intact, so it is of another version or a defect of ours.
    #[error("manifest of checkpoint {id}: {source}")]
    Manifest {
        /// Which.
        id: CheckpointId,
        /// What the decoder says.
        source: permafrost_protocol::manifest::ManifestError,
    },
    /// Nobody who holds a copy passes it on.
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
        /// Verb and noun.
        action: String,
        /// What the system says.
        source: io::Error,
    },
}

impl StoreError {
    /// Wraps a system error with what was being done.
    pub fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }

    /// The error's number in the control protocol, which is the exit code of `permafrost`.
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

    /// What to do about it; empty where there is nothing to be said.
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

    /// The error with its causes, so that who cannot look into the log is told what the medium says.
    #[must_use]
    pub fn message(&self) -> String {
        match self {
            Self::Shadow(_) | Self::Seal(_) | Self::Journal(_) | Self::Close(_) => in_full(self),
            // Their own words have them.
            _ => self.to_string(),
        }
    }

    /// As a reply.
    #[must_use]
    pub fn to_reply(&self) -> control::Error {
        control::Error {
            code: self.code().into(),
            message: self.message(),
            hint: self.hint().to_owned(),
        }
    }

    /// As what a page-server conversation ends with.
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
