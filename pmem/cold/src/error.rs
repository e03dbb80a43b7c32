//! Errors of reading pages that are in the object store.

use std::io;

use crate::objects::ObjectError;

/// Reason why a page of a cold medium cannot be read or moved out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ColdError {
    /// The object store cannot be reached, or fails.
    #[error("in the cold tier, which is away: {store}")]
    Away {
        /// Store that was asked.
        store: String,
        /// Error that the store or the way to it gave.
        #[source]
        source: ObjectError,
    },
    /// The store that answers is not the one that the tier was added with.
    #[error(
        "in the cold tier, whose store {store} is not the one that was added ({reason}): mount it, or set the address that it had"
    )]
    Unmarked {
        /// Store that was asked.
        store: String,
        /// Difference between its marker and the one that was written.
        reason: &'static str,
    },
    /// The store is another medium's, so it cannot be added.
    #[error(
        "{store} is the cold tier of medium {medium} of region {region}: name another bucket, prefix or directory; if that \
         region is gone, delete the object {marker:?} there first"
    )]
    Taken {
        /// Store that was asked.
        store: String,
        /// Region in the marker, 32 hexadecimal digits.
        region: String,
        /// Medium in the marker, 32 hexadecimal digits.
        medium: String,
        /// Name of the marker.
        marker: &'static str,
    },
    /// The object is missing or is not what was written.
    #[error("in the cold tier, where object {name} of {store} is damaged: {reason}")]
    Damaged {
        /// Store that was asked.
        store: String,
        /// Name of the object.
        name: String,
        /// Difference between the object and what was written.
        reason: &'static str,
    },
}

impl ColdError {
    /// Returns the error of this kind that an I/O error carries.
    #[must_use]
    pub fn of(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }

    /// Returns true if the pages may be read again later: nothing is known to be wrong with them.
    #[must_use]
    pub const fn is_away(&self) -> bool {
        matches!(self, Self::Away { .. } | Self::Unmarked { .. })
    }
}

impl From<ColdError> for io::Error {
    fn from(error: ColdError) -> Self {
        // The region tells damage by its kind.
        let kind = match error {
            ColdError::Damaged { .. } => io::ErrorKind::InvalidData,
            _ => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}
