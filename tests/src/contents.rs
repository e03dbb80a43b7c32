//! Page contents that can be regenerated from a seed, so that every page can be checked on its own.

use std::fmt;
use std::str::FromStr;

use permafrost_protocol::PAGE_SIZE;

/// Contents of the memory of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Random bytes, which do not compress.
    Random,
    /// Three pages of four are all zero (written, and so present), the rest random.
    ZeroRich,
    /// English-like words: compresses about 4 : 1.
    Text,
    /// Simulated heap of an interpreter or a virtual machine: objects with pointers between them, strings, numbers,
    /// some pages of zeros and some that do not compress. Compresses about 3 : 1 in all.
    Heap,
}

impl Contents {
    /// All kinds of contents.
    pub const ALL: [Self; 4] = [Self::Random, Self::ZeroRich, Self::Text, Self::Heap];
}

impl FromStr for Contents {
    type Err = UnknownContents;

    fn from_str(name: &str) -> Result<Self, UnknownContents> {
        match name {
            "random" => Ok(Self::Random),
            "zero-rich" => Ok(Self::ZeroRich),
            "text" => Ok(Self::Text),
            "heap" => Ok(Self::Heap),
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
            Self::Heap => "heap",
        })
    }
}

/// Error for an unknown name of contents.
#[derive(Debug)]
pub struct UnknownContents {
    /// Name that was given.
    pub name: String,
}

impl fmt::Display for UnknownContents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "unknown contents {:?}: random, zero-rich, text or heap",
            self.name
        )
    }
}

impl std::error::Error for UnknownContents {}

/// Writes the contents of page `index` in its generation `generation`.
pub fn fill(
    contents: Contents,
    seed: u64,
    index: u64,
    generation: u32,
    page: &mut [u8; PAGE_SIZE],
) {
    let mut state = mix(seed ^ mix(index) ^ mix(u64::from(generation) << 32 | 0x5eed));
    match contents {
        Contents::ZeroRich if index % 4 != 3 && generation.is_multiple_of(2) => page.fill(0),
        Contents::Random | Contents::ZeroRich => fill_words(page, || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mix(state)
        }),
        Contents::Text => fill_text(state, page),
        Contents::Heap => fill_heap(state, page),
    }
}

/// Returns the checksum of one page, bound to its position. The memory's checksum is the exclusive or of all of
/// them, so it can be updated page by page.
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

fn fill_words(page: &mut [u8; PAGE_SIZE], mut word: impl FnMut() -> u64) {
    for place in page.as_chunks_mut::<8>().0 {
        *place = word().to_le_bytes();
    }
}

/// Fills a page with one of the kinds of data that a heap contains.
fn fill_heap(mut state: u64, page: &mut [u8; PAGE_SIZE]) {
    /// Base address of the objects. `TYPES` is the base address of the types that they point to.
    const OBJECTS: u64 = 0x7f3a_5000_0000;
    const TYPES: u64 = 0x55d0_c3a1_0000;
    let mut draw = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(state)
    };
    match draw() % 16 {
        0 | 1 => page.fill(0),
        // Objects of four words: references to it, its type, and two of: a pointer, a small number, nothing.
        2..=8 => {
            let mut field = 0;
            fill_words(page, || {
                let (word, place) = (draw(), field % 4);
                field += 1;
                match (place, word >> 60) {
                    (0, _) => 1 + (word & word >> 8 & 7),
                    (1, _) => TYPES + (word & word >> 8 & 31) * 0x1a0,
                    (_, 0..=6) => OBJECTS + (word & 0x1f_ffff) * 32,
                    (_, 7..=11) => word & 0xff,
                    _ => 0,
                }
            });
        }
        9..=11 => fill_text(draw(), page),
        // Arrays of numbers that are near each other, two a word.
        12..=14 => {
            let mut last = 1000;
            fill_words(page, || {
                let word = draw();
                last += word & 15;
                last | (last + (word >> 8 & 63)) << 32
            });
        }
        _ => fill_words(page, draw),
    }
}

fn fill_text(mut state: u64, page: &mut [u8; PAGE_SIZE]) {
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
    while at < PAGE_SIZE {
        state = mix(state.wrapping_add(1));
        // `% 16`: fits any usize.
        let word = WORDS[usize::try_from(state % 16).unwrap_or(0)];
        let n = word.len().min(PAGE_SIZE - at);
        page[at..at + n].copy_from_slice(&word[..n]);
        at += n;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_differ_by_index_generation_and_seed() {
        for contents in [Contents::Random, Contents::Text, Contents::Heap] {
            // Some together: single ones may all be zeros.
            let page = |seed, index: u64, generation| {
                [0, 1, 2, 3, 4, 5, 6, 7].map(|n| {
                    let mut page = [0; PAGE_SIZE];
                    fill(contents, seed, index * 8 + n, generation, &mut page);
                    page
                })
            };
            assert_eq!(page(1, 2, 3), page(1, 2, 3));
            assert_ne!(page(1, 2, 3), page(2, 2, 3));
            assert_ne!(page(1, 2, 3), page(1, 3, 3));
            assert_ne!(page(1, 2, 3), page(1, 2, 4));
        }
    }

    #[test]
    fn they_compress_as_they_say() {
        let ratio = |contents| {
            let mut bytes = Vec::new();
            for index in 0..1024 {
                let mut page = [0; PAGE_SIZE];
                fill(contents, 7, index, 0, &mut page);
                bytes.extend(page);
            }
            // As they go over the wire: runs of 256 KiB, quickly.
            let packed: usize = bytes
                .chunks(256 << 10)
                .map(|run| zstd::bulk::compress(run, 1).unwrap().len())
                .sum();
            bytes.len() * 10 / packed
        };
        assert_eq!(ratio(Contents::Random), 9);
        assert_eq!(ratio(Contents::ZeroRich), 39);
        assert!((35..60).contains(&ratio(Contents::Text)));
        assert!((27..33).contains(&ratio(Contents::Heap)));
    }

    #[test]
    fn names_round_trip() {
        for contents in Contents::ALL {
            assert_eq!(contents.to_string().parse::<Contents>().unwrap(), contents);
        }
        assert!("prose".parse::<Contents>().is_err());
    }
}
