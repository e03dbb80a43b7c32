//! Newtypes for counts and names in a region.

use std::fmt;
use std::str::FromStr;

/// Names a checkpoint: 128 random bits, written as 32 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CheckpointId(u128);

impl CheckpointId {
    /// Makes an id from its number.
    #[must_use]
    pub const fn new(value: u128) -> Self {
        Self(value)
    }

    /// Makes a new id from the kernel's random numbers.
    ///
    /// # Panics
    /// If the kernel has no `getrandom`, which every kernel since 3.17 has.
    #[must_use]
    pub fn random() -> Self {
        Self(u128::from_le_bytes(random_bytes()))
    }

    /// Returns the id as a number.
    #[must_use]
    pub const fn value(self) -> u128 {
        self.0
    }

    /// Returns the id as it is stored.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }

    /// Reads an id as it is stored.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_le_bytes(bytes))
    }
}

impl fmt::Display for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CheckpointId({self})")
    }
}

/// Error for a text that is not 32 hex digits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an id is 32 hex digits, not {text:?}")]
pub struct ParseIdError {
    /// Text that was given.
    pub text: String,
}

impl FromStr for CheckpointId {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let refuse = || ParseIdError {
            text: text.to_owned(),
        };
        if text.len() != 32 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(refuse());
        }
        u128::from_str_radix(text, 16)
            .map(Self)
            .map_err(|_| refuse())
    }
}

/// Names a region; part of every journal checksum, so that records of an earlier format never count.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegionUuid([u8; 16]);

impl RegionUuid {
    /// Makes a UUID from 16 bytes.
    #[must_use]
    pub const fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Makes a random version-4 UUID.
    ///
    /// # Panics
    /// As [`CheckpointId::random`].
    #[must_use]
    pub fn random() -> Self {
        let mut bytes = random_bytes();
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Self(bytes)
    }

    /// Returns the 16 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for RegionUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for RegionUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegionUuid({self})")
    }
}

/// Number of a segment in its region, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SegmentNo(pub u32);

impl SegmentNo {
    /// Returns the number of the segment.
    #[must_use]
    pub const fn value(self) -> u32 {
        self.0
    }
}

impl fmt::Display for SegmentNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "segment {}", self.0)
    }
}

/// Number of a slot, from 0: room on the medium for one whole segment, or for several packed ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotNo(pub u32);

/// Number of a page in the region: of its segment times the pages of a segment, and its place there. The segment table
/// says which slot of the medium a segment is in; until it is moved that is the slot of its own number, and the page is
/// at this number of pages from the region's first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageNo(pub u64);

impl PageNo {
    /// Returns the number of the page.
    #[must_use]
    pub const fn value(self) -> u64 {
        self.0
    }

    /// Returns the page `pages` further on.
    #[must_use]
    pub const fn plus(self, pages: u64) -> Self {
        Self(self.0.saturating_add(pages))
    }
}

impl fmt::Display for PageNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {:#x} of the region", self.0)
    }
}

fn random_bytes() -> [u8; 16] {
    let mut bytes = [0; 16];
    match getrandom::fill(&mut bytes) {
        Ok(()) => bytes,
        Err(error) => panic!("getrandom: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_print_and_parse() {
        let id = CheckpointId::new(0xab);
        assert_eq!(id.to_string(), "000000000000000000000000000000ab");
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in [
            "",
            "ab",
            "+00000000000000000000000000000ab",
            "g0000000000000000000000000000000",
        ] {
            assert!(bad.parse::<CheckpointId>().is_err(), "{bad}");
        }
        assert_ne!(CheckpointId::random(), CheckpointId::random());
    }

    #[test]
    fn uuids_print_with_dashes() {
        let uuid = RegionUuid::new([0x11; 16]);
        assert_eq!(uuid.to_string(), "11111111-1111-1111-1111-111111111111");
        assert_eq!(RegionUuid::random().as_bytes()[6] >> 4, 4);
    }
}
