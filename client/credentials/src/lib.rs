//! `permafrost pki` and `permafrost token`: certificates of the private CA, the deny list, tokens for the HTTP API.

#![forbid(unsafe_code)]

mod deny;
mod pki;
mod token;

pub use pki::{PkiArguments, pki};
pub use token::{TOKEN_EXAMPLES, TokenArguments, token};
