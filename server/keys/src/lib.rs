//! Keys for encryption at rest.
//!
//! ```text
//!  key file or key command ──wraps──▶ store key ──┬─ seals ──▶ data keys, one or more for each namespace
//!                                                 └─ derives ─▶ keys of the catalog's names and records
//! ```
//!
//! The daemon asks for the store key once, when it starts; data keys are made and erased without a further call. What
//! is stored of them is in two files of the data directory, each complete ([`KeyStore`]).

#![forbid(unsafe_code)]

mod catalog;
mod error;
mod file;
mod sealed;
mod store;
mod wrapper;

pub use catalog::CatalogCipher;
pub use error::KeysError;
pub use store::KeyStore;
pub use wrapper::Wrapper;
