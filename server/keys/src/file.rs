//! The stored keys: two files, each complete.
//!
//! | bytes | field |
//! | --- | --- |
//! | 8 | `PFKEYS`, 0, version 1 |
//! | 8 | generation; the intact copy with the higher one counts |
//! | 4 | length of the wrapped store key |
//! | 4 | length of the sealed data keys |
//! | | both, one after the other |
//! | 32 | SHA-256 of all before |
//! | | zeros, as far as the file was ever longer |
//!
//! A change overwrites one copy in its place, durably, and then the other: a crash leaves at least one of them intact,
//! and what was erased is overwritten in both. A copy that is not there yet is written beside its place and renamed, so
//! that it is there whole or not at all.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use permafrost_store::private;
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};

const MAGIC: [u8; 8] = *b"PFKEYS\0\x01";
/// Names of the copies.
pub(crate) const COPIES: [&str; 2] = ["keys.1", "keys.2"];
/// Most bytes of a file: some hundred thousand keys.
const MOST_BYTES: u64 = 64 << 20;
const HEAD_BYTES: usize = 24;

/// Contents of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) generation: u64,
    pub(crate) wrapped: Vec<u8>,
    pub(crate) sealed: Vec<u8>,
}

impl Stored {
    fn to_bytes(&self) -> Vec<u8> {
        let len = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes();
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&self.generation.to_le_bytes());
        bytes.extend_from_slice(&len(&self.wrapped));
        bytes.extend_from_slice(&len(&self.sealed));
        bytes.extend_from_slice(&self.wrapped);
        bytes.extend_from_slice(&self.sealed);
        let sum = digest(&SHA256, &bytes);
        bytes.extend_from_slice(sum.as_ref());
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk::<HEAD_BYTES>()?;
        let number =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (wrapped, sealed) = (number(16) as usize, number(20) as usize);
        let end = wrapped.checked_add(sealed)?;
        let (content, rest) = rest.split_at_checked(end)?;
        let sum = digest(&SHA256, &bytes[..HEAD_BYTES + end]);
        if head[..8] != MAGIC || rest.get(..SHA256_OUTPUT_LEN)? != sum.as_ref() {
            return None;
        }
        Some(Self {
            generation: u64::from(number(12)) << 32 | u64::from(number(8)),
            wrapped: content[..wrapped].to_vec(),
            sealed: content[wrapped..].to_vec(),
        })
    }

    /// Reads a copy; `None` if it is not there, or damaged.
    pub(crate) fn read(path: &Path) -> io::Result<Option<Self>> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(MOST_BYTES).read_to_end(&mut bytes)?;
        Ok(Self::parse(&bytes))
    }

    /// Makes a copy, or overwrites it in its place to its old end, durably.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let mut bytes = self.to_bytes();
        let mut file = match File::options().write(true).open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                private::replace(path, &bytes)?;
                return sync_parent(path);
            }
            file => file?,
        };
        let before = usize::try_from(file.metadata()?.len()).unwrap_or(0);
        bytes.resize(bytes.len().max(before), 0);
        file.write_all(&bytes)?;
        file.sync_all()
    }
}

/// Makes the entries of the directory that `path` is in durable.
pub(crate) fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().unwrap_or(path);
    let is_here = parent.as_os_str().is_empty();
    let directory = if is_here { Path::new(".") } else { parent };
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_whole_or_refused_and_what_it_had_before_is_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.1");
        assert!(Stored::read(&path).unwrap().is_none());
        let long = Stored {
            generation: 1 << 40 | 7,
            wrapped: vec![1; 60],
            sealed: b"a secret that is erased".repeat(9),
        };
        long.write(&path).unwrap();
        assert_eq!(Stored::read(&path).unwrap(), Some(long.clone()));
        let short = Stored {
            generation: 8,
            sealed: vec![3; 10],
            ..long
        };
        short.write(&path).unwrap();
        assert_eq!(Stored::read(&path).unwrap(), Some(short));
        let bytes = std::fs::read(&path).unwrap();
        assert!(!bytes.windows(6).any(|part| part == b"secret"));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 4;
            let behind = at >= HEAD_BYTES + 70 + SHA256_OUTPUT_LEN;
            assert_eq!(Stored::parse(&damaged).is_some(), behind, "{at}");
            let cut = Stored::parse(&bytes[..at]).is_some();
            assert_eq!(cut, behind, "{at}");
        }
    }
}
