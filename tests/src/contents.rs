//! Page contents that can be made again from a seed, so that every page can be checked on its own.

use std::fmt;
use std::str::FromStr;

/// Bytes in a page.
pub const PAGE_BYTES: usize = 4096;

/// What fills the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Incompressible.
    Random,
    /// Three pages of four are all zero (written, and so present), the rest random.
    ZeroRich,
    /// English-like words: compresses about 4 : 1.
    Text,
}

impl FromStr for Contents {
    type Err = UnknownContents;

    fn from_str(name: &str) -> Result<Self, UnknownContents> {
        match name {
            "random" => Ok(Self::Random),
            "zero-rich" => Ok(Self::ZeroRich),
            "text" => Ok(Self::Text),
            _ => Err(UnknownContents {
                name: name.to_owned(),
            }),
        }
    }
}

impl fmt::Display for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Random => "random",
            Self::ZeroRich => "zero-rich",
            Self::Text => "text",
        })
    }
}

/// Not the name of any contents.
#[derive(Debug)]
pub struct UnknownContents {
    /// What was given.
    pub name: String,
}

impl fmt::Display for UnknownContents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "unknown contents {:?}: random, zero-rich or text",
            self.name
        )
    }
}

impl std::error::Error for UnknownContents {}

/// Writes what page `index` holds in `generation` of its own.
pub fn fill(
    contents: Contents,
    seed: u64,
    index: u64,
    generation: u32,
    page: &mut [u8; PAGE_BYTES],
) {
    let mut state = mix(seed ^ mix(index) ^ mix(u64::from(generation) << 32 | 0x5eed));
    match contents {
        Contents::ZeroRich if index % 4 != 3 && generation.is_multiple_of(2) => page.fill(0),
        Contents::Random | Contents::ZeroRich => {
            for word in page.chunks_exact_mut(8) {
                state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                word.copy_from_slice(&mix(state).to_le_bytes());
            }
        }
        Contents::Text => fill_text(state, page),
    }
}

/// Checksum of one page, bound to its place: the memory's checksum is the exclusive or of all of them,
/// so it can be kept up page by page.
#[must_use]
pub fn page_checksum(index: u64, page: &[u8]) -> u64 {
    mix(u64::from(crc32fast::hash(page)) << 32 ^ index)
}

/// SplitMix64's finaliser (Steele, Lea, Flood 2014).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn fill_text(mut state: u64, page: &mut [u8; PAGE_BYTES]) {
    const WORDS: [&[u8]; 16] = [
        b"the ",
        b"frozen ",
        b"process ",
        b"keeps ",
        b"a ",
        b"page ",
        b"of ",
        b"memory, ",
        b"and ",
        b"counts ",
        b"until ",
        b"it ",
        b"is ",
        b"thawed ",
        b"again.\n",
        b"there ",
    ];
    let mut at = 0;
    while at < PAGE_BYTES {
        state = mix(state.wrapping_add(1));
        // `% 16`: fits any usize.
        let word = WORDS[usize::try_from(state % 16).unwrap_or(0)];
        let n = word.len().min(PAGE_BYTES - at);
        page[at..at + n].copy_from_slice(&word[..n]);
        at += n;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_differ_by_index_generation_and_seed() {
        for contents in [Contents::Random, Contents::Text] {
            let page = |seed, index, generation| {
                let mut page = [0; PAGE_BYTES];
                fill(contents, seed, index, generation, &mut page);
                page
            };
            assert_eq!(page(1, 2, 3), page(1, 2, 3));
            assert_ne!(page(1, 2, 3), page(2, 2, 3));
            assert_ne!(page(1, 2, 3), page(1, 3, 3));
            assert_ne!(page(1, 2, 3), page(1, 2, 4));
        }
    }

    #[test]
    fn names_round_trip() {
        for contents in [Contents::Random, Contents::ZeroRich, Contents::Text] {
            assert_eq!(contents.to_string().parse::<Contents>().unwrap(), contents);
        }
        assert!("prose".parse::<Contents>().is_err());
    }
}
