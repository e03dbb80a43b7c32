//! Errors of finding, reading and verifying checkpoints.

use permafrost_cold::ColdError;
use permafrost_pmem::{CheckpointId, HealError, PageError};
use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::manifest::{CheckpointRefError, ManifestError};

/// Reason why a checkpoint is not read, verified or healed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message explains its variant and fields")]
pub enum ReadingError {
    #[error("{reference:?} names no checkpoint: {source}")]
    Reference {
        reference: String,
        source: CheckpointRefError,
    },
    /// Stored data is damaged.
    #[error("{part}: {source}")]
    Corrupt {
        /// Name of the checkpoint, and the place in it.
        part: String,
        source: PageError,
    },
    /// A damaged page was not rewritten.
    #[error("{page}: {source}")]
    NotHealed { page: String, source: HealError },
    /// This node's copy is known to be damaged, and no other node has a copy.
    #[error("{name} is damaged: {damage}")]
    Damaged {
        name: String,
        /// Place and kind of the damage.
        damage: String,
    },
    /// The registry lists a checkpoint under another job or generation than its manifest names.
    #[error(
        "checkpoint {id} is listed as {name}, and its manifest says something else: nothing of it is read"
    )]
    Mislisted { id: String, name: String },
    /// A manifest does not decode. Its pages were intact, so it is of another version, or this program has a
    /// defect.
    ///
    /// Cure: in a cluster `permafrost scrub` heals it from another copy; otherwise restore an older generation.
    #[error("manifest of checkpoint {id}: {source}")]
    Manifest {
        id: CheckpointId,
        source: ManifestError,
    },
    /// Cure: look at CRIU's log, which the command names: CRIU ended before it read the images.
    #[error("CRIU did not come for the images")]
    NobodyCame,
    #[error("this node is starting or stopping and {action} nothing")]
    NoScrub {
        /// `scrubs` or `verifies`.
        action: &'static str,
    },
    #[error("{requested} checkpoints are to be verified, and {limit} may be at once")]
    TooMany { requested: usize, limit: usize },
}

impl ReadingError {
    /// Returns a function that wraps the error of a reference that names no checkpoint.
    pub fn reference(reference: &str) -> impl FnOnce(CheckpointRefError) -> Self {
        let reference = reference.to_owned();
        move |source| Self::Reference { reference, source }
    }
}

/// Returns true if a page is in a cold tier that is away: nothing is known to be wrong with it.
pub(crate) fn is_away(error: &PageError) -> bool {
    error
        .io()
        .and_then(ColdError::of)
        .is_some_and(ColdError::is_away)
}

impl ReportedError for ReadingError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Reference { .. } | Self::TooMany { .. } => ErrorCode::Invalid,
            Self::Corrupt { source, .. } if is_away(source) => ErrorCode::Unavailable,
            Self::Corrupt { .. } | Self::Damaged { .. } | Self::Manifest { .. } => {
                ErrorCode::Corrupt
            }
            Self::NotHealed { .. } => ErrorCode::Internal,
            Self::Mislisted { .. } | Self::NobodyCame => ErrorCode::Conflict,
            Self::NoScrub { .. } => ErrorCode::Unavailable,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Reference { .. } => "name one as JOB or JOB@GENERATION",
            Self::Corrupt { source, .. } if is_away(source) => {
                "try again when the store is back: `permafrost region ls` names it"
            }
            Self::Corrupt { .. } => "`permafrost verify` lists everything that is damaged",
            Self::Damaged { .. } => {
                "restore an older generation (`permafrost ls`); `permafrost scrub` looks again"
            }
            Self::Mislisted { .. } => {
                "somebody has changed the registry: docs/security.md, \"What etcd can do\"; `permafrost node rebuild` lists what the nodes hold"
            }
            Self::NoScrub { .. } => "try again",
            Self::TooMany { .. } => "ask for some at a time",
            Self::NotHealed { .. } | Self::Manifest { .. } | Self::NobodyCame => "",
        }
    }
}
