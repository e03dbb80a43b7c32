//! Errors of the store, with their codes in the control protocol. Each family of operations has an enum of its own,
//! and [`StoreError`] is one of them, or a failure of the region, the catalog or an image.

mod copying;
mod images;
mod keys;
mod media;
mod missing;
mod port;
mod reading;
mod sealing;
mod session;

use std::io;

use permafrost_agent::host::arguments::in_full;
use permafrost_criu::directory::DirectoryError;
use permafrost_criu::frontend::SinkError;
use permafrost_pmem::{CleanError, CloseError, JournalError, SealError, ShadowError};
use permafrost_protocol::control::{self, ErrorCode, ReportedError};

pub use self::copying::CopyError;
pub use self::images::ImagesError;
pub use self::keys::KeyRequestError;
pub use self::media::RegionMediaError;
pub use self::missing::MissingObject;
pub use self::port::PortError;
pub use self::reading::ReadingError;
pub(crate) use self::reading::is_away;
pub use self::sealing::SealingError;
pub use self::session::SessionError;
use permafrost_catalog::CatalogError;
use permafrost_quotas::QuotaError;

/// Reason why the store refuses a request or fails.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The named object does not exist.
    #[error("{0} not found")]
    NotFound(MissingObject),
    /// A session was not opened, took no pages or was not ended.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// A dump's images do not belong to its pages, or cannot be stored.
    #[error(transparent)]
    Images(#[from] ImagesError),
    /// An images directory with pages does not describe them.
    #[error(transparent)]
    Import(ImagesError),
    /// A checkpoint was not sealed, adopted, rolled back or removed.
    #[error(transparent)]
    Sealing(#[from] SealingError),
    /// A part of another node's copy was refused.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// A checkpoint was not read, verified or healed.
    #[error(transparent)]
    Reading(#[from] ReadingError),
    /// A quota refuses the request.
    #[error(transparent)]
    Quota(#[from] QuotaError),
    /// Keys were not listed or changed.
    #[error(transparent)]
    Keys(#[from] KeyRequestError),
    /// The implementation of a port failed: the registry, the copies on other nodes, a queue.
    #[error(transparent)]
    Port(#[from] PortError),
    /// No holder of a copy could deliver it.
    #[error("{}", .0.message)]
    Elsewhere(control::Error),
    /// The region is read-only: its medium failed, or its journal is damaged.
    #[error("this node takes no dumps: {reason}")]
    ReadOnly {
        /// Reason why the region is read-only.
        reason: String,
    },
    /// Pages could not be written.
    #[error(transparent)]
    Shadow(#[from] ShadowError),
    /// A checkpoint could not be sealed.
    #[error(transparent)]
    Seal(#[from] SealError),
    /// A change could not be journaled.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The region could not be cleaned.
    #[error(transparent)]
    Clean(#[from] CleanError),
    /// The region could not be marked clean.
    #[error(transparent)]
    Close(#[from] CloseError),
    /// The media of the region were not changed.
    #[error(transparent)]
    Media(#[from] RegionMediaError),
    /// The catalog failed.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The catalog failed during an earlier change, and does not agree with the region until the next start.
    #[error("the catalog failed earlier and lacks a checkpoint")]
    CatalogIncomplete,
    /// An images directory cannot be used.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
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

    /// Wraps the error of a port's implementation.
    pub fn port(error: impl ReportedError + Send + Sync + 'static) -> Self {
        Self::Port(PortError::new(error))
    }

    /// Returns the error of the family that this one belongs to; `None` for failures of the region, the catalog or a
    /// file.
    fn family(&self) -> Option<&dyn ReportedError> {
        Some(match self {
            Self::Session(error) => error,
            Self::Images(error) => error,
            Self::Sealing(error) => error,
            Self::Copy(error) => error,
            Self::Reading(error) => error,
            Self::Quota(error) => error,
            Self::Port(error) => error,
            Self::Media(error) => error,
            Self::Keys(error) => error,
            Self::Directory(error) => error,
            _ => return None,
        })
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

impl ReportedError for StoreError {
    fn code(&self) -> ErrorCode {
        if let Some(family) = self.family() {
            return family.code();
        }
        match self {
            Self::Import(_) => ErrorCode::Invalid,
            Self::NotFound(_) => ErrorCode::NotFound,
            Self::CatalogIncomplete => ErrorCode::Conflict,
            Self::ReadOnly { .. }
            | Self::Shadow(ShadowError::Failed(_))
            | Self::Seal(SealError::Shadow(ShadowError::Failed(_))) => ErrorCode::Unavailable,
            Self::Elsewhere(error) => error.code(),
            Self::Shadow(ShadowError::Corrupt(_)) => ErrorCode::Corrupt,
            Self::Shadow(ShadowError::Full { .. })
            | Self::Seal(SealError::Shadow(ShadowError::Full { .. }))
            | Self::Seal(SealError::Journal(JournalError::Full { .. }))
            | Self::Journal(JournalError::Full { .. })
            | Self::Clean(CleanError::Full) => ErrorCode::NoSpace,
            _ => ErrorCode::Internal,
        }
    }

    fn hint(&self) -> &str {
        if let Some(family) = self.family() {
            return family.hint();
        }
        match self {
            Self::Elsewhere(error) => &error.hint,
            Self::NotFound(_) => "`permafrost ls` lists what is there",
            Self::Import(_) => {
                "name a directory that criu dump wrote with its pages, not by --page-server"
            }
            Self::CatalogIncomplete => {
                "restart permafrostd: it makes the catalog agree with the region"
            }
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
    fn message(&self) -> String {
        match self {
            Self::Shadow(_)
            | Self::Seal(_)
            | Self::Journal(_)
            | Self::Clean(_)
            | Self::Close(_) => in_full(self),
            // Their own messages do not include their causes, or include them already.
            _ => self
                .family()
                .map_or_else(|| self.to_string(), |family| family.message()),
        }
    }
}
