//! Errors of the cluster, one enum for each family of operations. The ports of the store return them as
//! [`StoreError`].

mod copying;
mod nodes;
mod registry;
mod setup;

use permafrost_store::StoreError;

use crate::etcd::Failure;
use crate::membership::Refusal;

pub(crate) use self::copying::{CopyingError, TooFewNodes};
pub(crate) use self::nodes::{InventoryError, NodesError};
pub(crate) use self::registry::RegistryError;
pub(crate) use self::setup::{SetupError, UrlDefect};

macro_rules! ports {
    ($($error:ty),* $(,)?) => {$(
        impl From<$error> for StoreError {
            fn from(error: $error) -> Self {
                Self::port(error)
            }
        }
    )*};
}

ports!(
    CopyingError,
    NodesError,
    RegistryError,
    SetupError,
    TooFewNodes
);

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        RegistryError::Etcd(failure).into()
    }
}

impl From<Refusal> for StoreError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Etcd(failure) => failure.into(),
            refusal => Self::port(refusal),
        }
    }
}
