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
}

impl From<ColdError> for io::Error {
    fn from(error: ColdError) -> Self {
        Self::other(error)
    }
}
