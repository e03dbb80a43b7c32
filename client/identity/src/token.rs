//! Bearer tokens of the HTTP API, and the hashes that a node stores of them.
//!
//! The node stores hashes alone, so a reader of its file gets no token. A token is 256 random bits, so a plain
//! SHA-256 cannot be inverted by guessing, and the time of a comparison of hashes reveals nothing about the
//! token.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};

use super::{IdentityError, tls};

/// Prefix of every token, which makes a token recognisable in a log or a repository.
const PREFIX: &str = "pft-";

/// Number of random bytes of a token.
const SECRET_BYTES: usize = 32;

/// A secret that identifies a caller. Shown by `Display`, not by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Makes a new token from the system's random numbers.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub fn fresh() -> Result<Self, IdentityError> {
        let mut secret = [0; SECRET_BYTES];
        let random = tls::provider().secure_random;
        random
            .fill(&mut secret)
            .map_err(|_| rustls::Error::FailedToGetRandomBytes)?;
        Ok(Self(format!("{PREFIX}{}", hex(&secret))))
    }

    /// Returns the hash that the node stores instead of the token.
    pub fn hash(&self) -> TokenHash {
        TokenHash::of(&self.0)
    }
}

impl fmt::Display for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl fmt::Debug for Token {
    /// Formats the token without the secret.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Token").finish_non_exhaustive()
    }
}

/// SHA-256 of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// Returns the hash of the text that a caller shows, even if it is not a token.
    pub fn of(token: &str) -> Self {
        Self(Sha256::digest(token.as_bytes()).into())
    }
}

impl fmt::Display for TokenHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&hex(&self.0))
    }
}

/// A text that is not 64 hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the SHA-256 of a token is 64 hex digits")]
pub struct NoHash;

impl FromStr for TokenHash {
    type Err = NoHash;

    fn from_str(text: &str) -> Result<Self, NoHash> {
        let mut hash = [0; 32];
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(NoHash);
        }
        for (byte, digits) in hash.iter_mut().zip(text.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| NoHash)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| NoHash)?;
        }
        Ok(Self(hash))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_differ_and_their_hashes_are_what_sha256sum_says() {
        let (one, other) = (Token::fresh().unwrap(), Token::fresh().unwrap());
        assert_ne!(one, other);
        assert!(one.to_string().starts_with("pft-") && one.to_string().len() == 68);
        assert!(!format!("{one:?}").contains(&one.to_string()[4..]));
        assert_eq!(one.hash(), TokenHash::of(&one.to_string()));
        // printf secret | sha256sum
        assert_eq!(
            TokenHash::of("secret").to_string(),
            "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
        );
    }

    #[test]
    fn a_hash_reads_as_it_was_written() {
        let hash = TokenHash::of("secret");
        assert_eq!(hash.to_string().parse(), Ok(hash));
        assert_eq!(hash.to_string().to_uppercase().parse(), Ok(hash));
        for bad in [
            "",
            "2bb8",
            &"g".repeat(64),
            &"+1".repeat(32),
            &"é".repeat(32),
        ] {
            assert_eq!(bad.parse::<TokenHash>(), Err(NoHash), "{bad}");
        }
    }
}
