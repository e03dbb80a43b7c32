//! Encryption of a region's pages: the cipher, and the keys that a region knows.
//!
//! ```text
//!  data key (32 random bytes, one for each namespace) ──▶ KDF with the region's uuid ──▶ PageCipher
//!                                                                                         │ tweak: page number
//!  page ───────────────────────────────────────────────────────────────────────────▶ stored page
//! ```
//!
//! A page is one data unit of XTS-AES-256 (IEEE 1619, NIST SP 800-38E); its tweak is its page number, which it keeps
//! wherever it is moved.

mod keys;
#[allow(
    unsafe_code,
    reason = "instructions that not every processor has, in one file"
)]
mod tweaks;
mod xts;

pub use keys::{DataKey, KeyId, Keyring, UnknownKey};
pub use xts::{BLOCK_BYTES, PageCipher};

/// Bytes of a page, one data unit of the cipher.
pub const PAGE_BYTES: usize = 4096;
