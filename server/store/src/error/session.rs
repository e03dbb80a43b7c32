//! Errors of sessions: opening them, receiving their pages, ending them.

use permafrost_agent::phases::PhaseError;
use permafrost_pmem::PageError;
use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::manifest::{JobNameError, RestoreOptionError};
use permafrost_protocol::pageserver::SpaceId;

/// Reason why a session is not opened, takes no pages or cannot be ended.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message explains its variant and fields")]
pub enum SessionError {
    #[error("{job:?} is no job name: {source}")]
    JobName { job: String, source: JobNameError },
    #[error(transparent)]
    RestoreOptions(#[from] RestoreOptionError),
    #[error("a round of a pre-copy has to be a pre-dump: its checkpoint does not last")]
    NoPreDump,
    #[error("{word:?} is no durability")]
    Durability { word: String },
    #[error("this node knows no other to keep a copy on")]
    NoOtherNode,
    #[error("job {job} has {holder} under way")]
    JobBusy { job: String, holder: String },
    #[error(transparent)]
    Phase(#[from] PhaseError),
    #[error("session {session} is being listed by the cluster")]
    BeingListed { session: String },
    /// Cure: dump again: the session was sealed, aborted, or its time was over. The task goes on.
    #[error("the session is over")]
    Over,
    /// Cure: use CRIU 3.17 to 4.2; another client has to open an address space before it sends pages.
    #[error("pages before any address space was opened")]
    NoSpaceOpen,
    #[error("hole of {pages} pages at {vaddr:#x} of {space}, which the parent does not have")]
    NotInParent {
        space: SpaceId,
        vaddr: u64,
        pages: u64,
    },
    /// Cure: dump without `--prev-images-dir`, or with `--full`.
    #[error("pages of {space} are left to a parent that is not here")]
    NoParent { space: SpaceId },
    /// Cure: `permafrost verify` on the sending node tells whether its copy is damaged.
    #[error("manifest holds a map root that is none: {source}")]
    MapRoot { source: PageError },
}

impl ReportedError for SessionError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::JobName { .. }
            | Self::RestoreOptions(_)
            | Self::Durability { .. }
            | Self::NoPreDump
            | Self::NoSpaceOpen
            | Self::NotInParent { .. }
            | Self::NoParent { .. }
            | Self::MapRoot { .. } => ErrorCode::Invalid,
            Self::NoOtherNode => ErrorCode::Unavailable,
            Self::JobBusy { .. } | Self::BeingListed { .. } | Self::Over => ErrorCode::Conflict,
            Self::Phase(error) => error.code(),
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::JobName { .. } => {
                "use letters, digits and . _ : / + - (at most 200 bytes, no leading . - /)"
            }
            Self::RestoreOptions(_) => RestoreOptionError::HINT,
            Self::Durability { .. } => "say local, quorum or all",
            Self::NoPreDump => "open it with pre_dump, too, or without pre_copy",
            Self::NoOtherNode => "leave --durability out, or say local",
            Self::JobBusy { .. } => {
                "wait for it to end, or discard it (`permafrost status` shows it, `permafrost abort SESSION`)"
            }
            Self::Phase(error) => error.hint(),
            Self::BeingListed { .. } => "abort it in a minute, on any node that lists it",
            Self::NotInParent { .. } => {
                "dump without --prev-images-dir, or into a session of the job that has the parent"
            }
            Self::Over | Self::NoSpaceOpen | Self::NoParent { .. } | Self::MapRoot { .. } => "",
        }
    }
}
