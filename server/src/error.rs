//! Errors of the daemon, one enum for each family of operations: what peers send, what they may not do, and how the
//! node is set up.

mod denied;
mod request;
mod setup;

use permafrost_store::StoreError;

pub(crate) use self::denied::{DeniedError, Right};
pub(crate) use self::request::RequestError;
pub(crate) use self::setup::SetupError;

impl From<RequestError> for StoreError {
    fn from(error: RequestError) -> Self {
        Self::port(error)
    }
}

impl From<SetupError> for StoreError {
    fn from(error: SetupError) -> Self {
        Self::port(error)
    }
}
