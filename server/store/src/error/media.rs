//! Errors of changing the media of the region.

use std::path::PathBuf;

use permafrost_agent::host::arguments::in_full;
use permafrost_cold::{ColdError, ColdSiteError};
use permafrost_pmem::{CleanError, MediaError, MediumError, NoTierName};
use permafrost_protocol::control::{ErrorCode, ReportedError};

/// Reason why the media of the region are as they were.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message explains its variant and fields")]
pub enum RegionMediaError {
    /// The region refuses the change.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// The file cannot be opened as a medium.
    #[error(transparent)]
    Medium(#[from] MediumError),
    /// The cold medium cannot be made or opened.
    #[error(transparent)]
    Cold(#[from] ColdSiteError),
    #[error("no room for {needed} bytes of {checkpoint} that are in the cold tier")]
    NoRoomToRecall { checkpoint: String, needed: u64 },
    #[error(transparent)]
    TierName(#[from] NoTierName),
    #[error("no medium {name:?} in this region")]
    NotFound { name: String },
    #[error("{path} is not an absolute path in a directory that is there")]
    Path { path: PathBuf },
    #[error("{path} is not there, and no size is given to make it with")]
    NoSize { path: PathBuf },
    #[error("{path} has {found} bytes already")]
    OtherSize { path: PathBuf, found: u64 },
    #[error("unknown change of media {action:?}")]
    Action { action: String },
}

impl RegionMediaError {
    /// Returns the error of the cold tier that kept segments from being moved.
    fn cold(&self) -> Option<&ColdError> {
        match self {
            Self::Media(MediaError::Clean(CleanError::Io(error)) | MediaError::Store(error)) => {
                ColdError::of(error)
            }
            _ => None,
        }
    }
}

impl ReportedError for RegionMediaError {
    fn code(&self) -> ErrorCode {
        use MediaError as M;
        match self.cold() {
            Some(error) if error.is_away() => return ErrorCode::Unavailable,
            Some(ColdError::Taken { .. }) => return ErrorCode::Conflict,
            Some(_) => return ErrorCode::Corrupt,
            None => {}
        }
        match self {
            Self::NoRoomToRecall { .. } => ErrorCode::NoSpace,
            Self::NotFound { .. } | Self::Media(M::Unknown { .. }) => ErrorCode::NotFound,
            Self::Media(M::NoRoom(_) | M::TooFewNumbers { .. } | M::Clean(CleanError::Full)) => {
                ErrorCode::NoSpace
            }
            Self::Media(
                M::Missing { .. }
                | M::Present { .. }
                | M::InUse { .. }
                | M::Listed { .. }
                | M::NoOther,
            )
            | Self::Medium(MediumError::InUse { .. }) => ErrorCode::Conflict,
            Self::Media(M::Journal(_)) => ErrorCode::Unavailable,
            Self::Media(M::Superblock(_) | M::Clean(_) | M::Io(_))
            | Self::Medium(MediumError::Io { .. }) => ErrorCode::Internal,
            _ => ErrorCode::Invalid,
        }
    }

    fn hint(&self) -> &str {
        use MediaError as M;
        match self.cold() {
            Some(error) if error.is_away() => {
                return "try again when the store is back: `permafrost region ls` names it";
            }
            // Its message says what to do.
            Some(ColdError::Taken { .. }) => return "",
            Some(_) => return "another node's copy, if there is one, is not affected",
            None => {}
        }
        match self {
            Self::NoRoomToRecall { .. } => {
                "remove checkpoints, or let a file of the region grow (`permafrost region grow`)"
            }
            Self::NotFound { .. } | Self::Media(M::Unknown { .. }) => {
                "`permafrost region ls` lists them: by number, UUID or path"
            }
            Self::Path { .. } => "name the file by its whole path",
            Self::NoSize { .. } => "add --size",
            Self::OtherSize { .. } => "leave out --size, or name a file that is not there",
            Self::Media(M::InUse { .. }) => "`permafrost region drain` empties it",
            Self::Media(M::Clean(CleanError::Full)) => {
                "add another file, let one grow, or remove checkpoints; draining goes on then"
            }
            Self::Media(M::Journal(_)) => "`permafrost status` says why",
            Self::Action { .. } => "use the same version of Permafrost everywhere",
            _ => "",
        }
    }

    fn message(&self) -> String {
        in_full(self)
    }
}
