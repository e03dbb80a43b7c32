//! Media beside a region's first, as the superblocks list them.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use permafrost_medium::MAX_MEDIA;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromZeros, IntoBytes};

use crate::ids::RegionUuid;
use crate::slots::MAX_SLOTS;
use crate::{
    LISTED_MEMBERS, MEMBER_ACTIVE, MEMBER_COLD, MEMBER_DRAINING, MEMBER_MAPPED, MEMBER_PATH,
    MemberEntry, TIER_BYTES,
};

/// Name of a tier: media of about the same speed.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TierName(String);

impl TierName {
    /// Known names, the fastest first. Others are slower, in the order of the alphabet.
    pub const KNOWN: [&str; 3] = ["nvm", "ssd", "hdd"];

    /// Returns the tier with one of the known names, the fastest for any other place than 0 to 2.
    #[must_use]
    pub fn known(place: usize) -> Self {
        Self(Self::KNOWN.get(place).unwrap_or(&"nvm").to_string())
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0
    }

    /// Returns a key that orders tiers, the fastest first.
    #[must_use]
    pub fn speed(&self) -> (usize, &str) {
        let known = Self::KNOWN.iter().position(|name| *name == self.0);
        (known.unwrap_or(Self::KNOWN.len()), &self.0)
    }

    /// Returns the name as stored.
    #[must_use]
    pub fn stored(&self) -> [u8; TIER_BYTES] {
        let mut bytes = [0; TIER_BYTES];
        bytes[..self.0.len()].copy_from_slice(self.0.as_bytes());
        bytes
    }

    /// Converts a name as stored; `None` if no writer makes it.
    #[must_use]
    pub fn from_stored(bytes: &[u8; TIER_BYTES]) -> Option<Self> {
        let end = bytes.iter().position(|&byte| byte == 0)?;
        std::str::from_utf8(&bytes[..end]).ok()?.parse().ok()
    }
}

impl fmt::Display for TierName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for TierName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Error for a text that names no tier.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} names no tier: say nvm, ssd, hdd or a name of your own, 1 to 15 of a-z, 0-9, - and _"
)]
pub struct NoTierName {
    /// Text that was given.
    pub text: String,
}

impl FromStr for TierName {
    type Err = NoTierName;

    fn from_str(text: &str) -> Result<Self, NoTierName> {
        let allowed =
            |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_';
        if (1..TIER_BYTES).contains(&text.len()) && text.bytes().all(allowed) {
            return Ok(Self(text.to_owned()));
        }
        Err(NoTierName {
            text: text.to_owned(),
        })
    }
}

/// State of a medium of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediumState {
    /// Dumps are written to it.
    Active,
    /// Segments are moved away from it; none is written to it.
    Draining,
}

/// A medium beside the first, as the region lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionMember {
    /// Number of the medium in the region, from 1 on.
    pub number: usize,
    /// Names the medium; in its header, too.
    pub uuid: RegionUuid,
    /// Bytes of the medium that the region uses.
    pub capacity_bytes: u64,
    /// Tier of the medium.
    pub tier: TierName,
    /// State of the medium.
    pub state: MediumState,
    /// Generation of the index of a cold medium, most of whose pages are in an object store. `None`: all are in the
    /// file.
    pub cold: Option<u32>,
    /// Path where the medium was last found.
    pub path: PathBuf,
}

impl RegionMember {
    /// Number of its slots: all but the room of its header.
    #[must_use]
    pub fn slots(&self, segment_bytes: u32) -> u32 {
        slots_in(self.capacity_bytes, segment_bytes)
    }

    fn stored(&self) -> MemberEntry {
        let mut entry = MemberEntry::new_zeroed();
        let path = self.path.as_os_str().as_encoded_bytes();
        let len = path.len().min(MEMBER_PATH);
        entry.uuid = *self.uuid.as_bytes();
        entry.capacity_bytes = U64::new(self.capacity_bytes);
        entry.tier = self.tier.stored();
        entry.state = match self.state {
            MediumState::Active => MEMBER_ACTIVE,
            MediumState::Draining => MEMBER_DRAINING,
        };
        entry.kind = match self.cold {
            None => MEMBER_MAPPED,
            Some(_) => MEMBER_COLD,
        };
        entry.index_generation = U32::new(self.cold.unwrap_or(0));
        entry.path_bytes = U16::new(u16::try_from(len).unwrap_or(0));
        entry.path[..len].copy_from_slice(&path[..len]);
        entry
    }

    fn from_stored(number: usize, entry: &MemberEntry) -> Option<Self> {
        use std::os::unix::ffi::OsStrExt as _;
        let state = match entry.state {
            MEMBER_ACTIVE => MediumState::Active,
            MEMBER_DRAINING => MediumState::Draining,
            _ => return None,
        };
        let cold = match (entry.kind, entry.index_generation.get()) {
            (MEMBER_MAPPED, 0) => None,
            (MEMBER_COLD, generation) => Some(generation),
            _ => return None,
        };
        let path = entry.path.get(..usize::from(entry.path_bytes.get()))?;
        Some(Self {
            number,
            uuid: RegionUuid::new(entry.uuid),
            capacity_bytes: entry.capacity_bytes.get(),
            tier: TierName::from_stored(&entry.tier)?,
            state,
            cold,
            path: Path::new(std::ffi::OsStr::from_bytes(path)).to_owned(),
        })
    }
}

/// Returns true if a path can be stored in the list.
#[must_use]
pub fn is_storable(path: &Path) -> bool {
    path.as_os_str().len() <= MEMBER_PATH
}

/// Number of slots of a member with so many bytes.
#[must_use]
pub fn slots_in(capacity_bytes: u64, segment_bytes: u32) -> u32 {
    let parts = capacity_bytes / u64::from(segment_bytes);
    u32::try_from(parts.saturating_sub(1)).map_or(MAX_SLOTS, |slots| slots.min(MAX_SLOTS))
}

/// Members of a region, by number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Members(Vec<RegionMember>);

impl Members {
    /// Returns the members, ascending.
    pub fn iter(&self) -> std::slice::Iter<'_, RegionMember> {
        self.0.iter()
    }

    /// Returns the member with a number.
    #[must_use]
    pub fn get(&self, number: usize) -> Option<&RegionMember> {
        self.0.iter().find(|member| member.number == number)
    }

    /// Returns the members with one added, or in the place of the one with its number.
    #[must_use]
    pub fn with(&self, member: RegionMember) -> Self {
        let mut all = self.without(member.number);
        all.0.push(member);
        all.0.sort_unstable_by_key(|member| member.number);
        all
    }

    /// Returns the members without the one with a number.
    #[must_use]
    pub fn without(&self, number: usize) -> Self {
        let others = self.0.iter().filter(|member| member.number != number);
        Self(others.cloned().collect())
    }

    /// Returns the list as stored.
    #[must_use]
    pub fn stored(&self) -> [MemberEntry; LISTED_MEMBERS] {
        let mut entries = [MemberEntry::new_zeroed(); LISTED_MEMBERS];
        for member in &self.0 {
            if let Some(entry) = entries.get_mut(member.number.wrapping_sub(1)) {
                *entry = member.stored();
            }
        }
        entries
    }

    /// Converts a list as stored; `None` if no writer makes it.
    pub fn from_stored(entries: &[MemberEntry; LISTED_MEMBERS]) -> Option<Self> {
        let used = (1..).zip(entries);
        let used = used.filter(|(_, entry)| entry.as_bytes().iter().any(|&byte| byte != 0));
        let members = used.map(|(number, entry)| RegionMember::from_stored(number, entry));
        members.collect::<Option<_>>().map(Self)
    }
}

const _: () = assert!(LISTED_MEMBERS == MAX_MEDIA - 1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tiers() {
        for name in ["nvm", "a", "my_tier-2", "fifteen-letters"] {
            let tier: TierName = name.parse().unwrap();
            assert_eq!(TierName::from_stored(&tier.stored()), Some(tier));
        }
        for name in ["", "SSD", "sixteen-letters-", "a b", "ä"] {
            assert!(name.parse::<TierName>().is_err(), "{name}");
        }
        let mut tiers: Vec<TierName> = ["zz", "hdd", "aa", "nvm", "ssd"]
            .map(|name| name.parse().unwrap())
            .to_vec();
        tiers.sort_unstable_by(|a, b| a.speed().cmp(&b.speed()));
        assert_eq!(format!("{tiers:?}"), r#"["nvm", "ssd", "hdd", "aa", "zz"]"#);
    }

    #[test]
    fn a_list_is_read_as_written() {
        let member = |number, state| RegionMember {
            number,
            uuid: RegionUuid::new([7; 16]),
            capacity_bytes: 1 << 30,
            tier: TierName::known(1),
            state,
            cold: (number == 15).then_some(7),
            path: PathBuf::from("/srv/region"),
        };
        let list = Members::default()
            .with(member(15, MediumState::Active))
            .with(member(2, MediumState::Active))
            .with(member(2, MediumState::Draining));
        assert_eq!(Members::from_stored(&list.stored()), Some(list.clone()));
        assert_eq!(list.iter().count(), 2);
        let mut wrong = list.stored();
        wrong[1].state = 9;
        assert_eq!(Members::from_stored(&wrong), None);
        wrong = list.stored();
        wrong[1].kind = 9;
        assert_eq!(Members::from_stored(&wrong), None);
        wrong = list.stored();
        wrong[1].path_bytes = U16::new(u16::MAX);
        assert_eq!(Members::from_stored(&wrong), None);
    }
}
