//! Media beside a region's first: what the superblocks say of them, and the headers that they begin with.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use permafrost_medium::{Flushed, LostPage, MAX_MEDIA, Medium, MediumSet, is_zero};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::PAGE_BYTES;
use crate::geometry::MAX_SEGMENT_BYTES;
use crate::ids::RegionUuid;
use crate::layout::{
    FORMAT_VERSION, HEADER_MEMBER, HEADER_REMOVED, LISTED_MEMBERS, MEMBER_ACTIVE, MEMBER_DRAINING,
    MEMBER_MAGIC, MEMBER_PATH, MemberEntry, MemberHeader, SUPERBLOCK_MAGIC, TIER_BYTES,
};
use crate::media::check_length;
use crate::slots::MAX_SLOTS;
use permafrost_medium::convert::{to_u64, to_usize};

/// Bytes of both copies of a member's header, at the beginning of its medium.
pub(crate) const HEADERS_BYTES: u64 = 2 * PAGE_BYTES;

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

    pub(crate) fn stored(&self) -> [u8; TIER_BYTES] {
        let mut bytes = [0; TIER_BYTES];
        bytes[..self.0.len()].copy_from_slice(self.0.as_bytes());
        bytes
    }

    /// Converts a name as stored; `None` if no writer makes it.
    pub(crate) fn from_stored(bytes: &[u8; TIER_BYTES]) -> Option<Self> {
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
#[non_exhaustive]
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
    /// Path where the medium was last found.
    pub path: PathBuf,
}

impl RegionMember {
    /// Number of its slots: all but the room of its header.
    pub(crate) fn slots(&self, segment_bytes: u32) -> u32 {
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
        let path = entry.path.get(..usize::from(entry.path_bytes.get()))?;
        Some(Self {
            number,
            uuid: RegionUuid::new(entry.uuid),
            capacity_bytes: entry.capacity_bytes.get(),
            tier: TierName::from_stored(&entry.tier)?,
            state,
            path: Path::new(std::ffi::OsStr::from_bytes(path)).to_owned(),
        })
    }
}

/// Returns true if a path can be stored in the list.
pub(crate) fn is_storable(path: &Path) -> bool {
    path.as_os_str().len() <= MEMBER_PATH
}

/// Number of slots of a member with so many bytes.
pub(crate) fn slots_in(capacity_bytes: u64, segment_bytes: u32) -> u32 {
    let parts = capacity_bytes / u64::from(segment_bytes);
    u32::try_from(parts.saturating_sub(1)).map_or(MAX_SLOTS, |slots| slots.min(MAX_SLOTS))
}

/// Members of a region, by number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Members(Vec<RegionMember>);

impl Members {
    pub(crate) fn iter(&self) -> std::slice::Iter<'_, RegionMember> {
        self.0.iter()
    }

    pub(crate) fn get(&self, number: usize) -> Option<&RegionMember> {
        self.0.iter().find(|member| member.number == number)
    }

    /// Returns the members with one added, or in the place of the one with its number.
    pub(crate) fn with(&self, member: RegionMember) -> Self {
        let mut all = self.without(member.number);
        all.0.push(member);
        all.0.sort_unstable_by_key(|member| member.number);
        all
    }

    pub(crate) fn without(&self, number: usize) -> Self {
        let others = self.0.iter().filter(|member| member.number != number);
        Self(others.cloned().collect())
    }

    pub(crate) fn stored(&self) -> [MemberEntry; LISTED_MEMBERS] {
        let mut entries = [MemberEntry::new_zeroed(); LISTED_MEMBERS];
        for member in &self.0 {
            if let Some(entry) = entries.get_mut(member.number.wrapping_sub(1)) {
                *entry = member.stored();
            }
        }
        entries
    }

    /// Converts a list as stored; `None` if no writer makes it.
    pub(crate) fn from_stored(entries: &[MemberEntry; LISTED_MEMBERS]) -> Option<Self> {
        let used = (1..).zip(entries);
        let used = used.filter(|(_, entry)| entry.as_bytes().iter().any(|&byte| byte != 0));
        let members = used.map(|(number, entry)| RegionMember::from_stored(number, entry));
        members.collect::<Option<_>>().map(Self)
    }
}

const _: () = assert!(LISTED_MEMBERS == MAX_MEDIA - 1);

/// Pages that are examined of a file: one that has anything in them is not taken for an empty one.
const BLANK_PAGES: u64 = 16;

/// Beginning of a medium that is offered as a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Zeros, or what a crash has left of the first header.
    Blank,
    /// The header of a member: of this region, and with this uuid. `intact` is false if one copy is damaged.
    Member {
        region: RegionUuid,
        uuid: RegionUuid,
        capacity_bytes: u64,
        removed: bool,
        intact: bool,
    },
    /// A region of its own.
    Region,
    /// A member of a newer format.
    Newer,
    /// Something else, or damage.
    Other,
}

/// Reads the beginning of a medium.
pub(crate) fn examine(medium: &dyn Medium) -> io::Result<Found> {
    let mut copies = Vec::new();
    for page in 0..BLANK_PAGES.min(medium.capacity_bytes() / PAGE_BYTES) {
        copies.push(read_page(medium, page)?);
    }
    let headers: Vec<_> = copies[..2]
        .iter()
        .filter_map(|page| intact_header(page))
        .collect();
    if let Some(header) = headers.first() {
        if header.version.get() != FORMAT_VERSION {
            return Ok(Found::Newer);
        }
        return Ok(Found::Member {
            region: RegionUuid::new(header.region),
            uuid: RegionUuid::new(header.uuid),
            capacity_bytes: header.capacity_bytes.get(),
            // Removal writes the first copy first.
            removed: header.state.get() == HEADER_REMOVED,
            intact: headers.len() == 2 && headers[0].as_bytes() == headers[1].as_bytes(),
        });
    }
    if copies[..2]
        .iter()
        .any(|page| page.starts_with(&SUPERBLOCK_MAGIC))
    {
        return Ok(Found::Region);
    }
    // The first copy may be what a crash has left of it: the second is begun when the first is durable.
    let (header, rest) = copies[0].split_at(size_of::<MemberHeader>());
    let ours = header.starts_with(&MEMBER_MAGIC) || is_zero(&header[..MEMBER_MAGIC.len()]);
    let mut blank = ours && is_zero(rest) && copies[1..].iter().all(|page| is_zero(page));
    // Nor is there anything where the first slot can be.
    let mut slot = BLANK_PAGES;
    while blank
        && slot * PAGE_BYTES <= u64::from(MAX_SEGMENT_BYTES)
        && slot * PAGE_BYTES < medium.capacity_bytes()
    {
        blank = is_zero(&read_page(medium, slot)?);
        slot *= 2;
    }
    Ok(if blank { Found::Blank } else { Found::Other })
}

/// Returns the name of the medium in a file, if it is a member of a region. The file is only read, and may be in use.
///
/// # Errors
/// It cannot be read.
pub fn member_uuid(path: &Path) -> io::Result<Option<RegionUuid>> {
    use std::io::Read as _;
    // Opening another kind of file may wait for ever.
    if !std::fs::metadata(path)?.is_file() {
        return Ok(None);
    }
    let file = std::fs::File::open(path)?;
    let mut bytes = Vec::new();
    file.take(HEADERS_BYTES).read_to_end(&mut bytes)?;
    let headers = bytes.chunks(to_usize(PAGE_BYTES)).find_map(intact_header);
    Ok(headers.map(|header| RegionUuid::new(header.uuid)))
}

/// A member's medium as it was found when the region is opened.
pub struct FoundMember {
    /// Medium that was opened.
    pub medium: Arc<dyn Medium>,
    /// Path of its file.
    pub path: PathBuf,
}

/// Function that finds and opens the medium of a member, or says why it cannot.
pub type FindMember<'a> = dyn FnMut(&RegionMember) -> Result<FoundMember, String> + 'a;

/// Members that were found when a region was opened.
#[derive(Default)]
pub(crate) struct Joined {
    /// Paths where they were found.
    pub(crate) paths: Vec<(usize, PathBuf)>,
    /// Those with a damaged copy of the header.
    pub(crate) damaged_headers: Vec<usize>,
    /// Reasons why the others are not there.
    pub(crate) problems: BTreeMap<usize, String>,
}

/// Finds the members of a region and adds them to its media.
pub(crate) fn join(
    media: &MediumSet,
    members: &Members,
    region: RegionUuid,
    find: &mut FindMember<'_>,
) -> Joined {
    let mut joined = Joined::default();
    for member in members.iter() {
        let found = find(member).and_then(|found| {
            let intact = check(&*found.medium, member, region)?;
            Ok((found, intact))
        });
        match found {
            Ok((found, intact)) => {
                media.insert(member.number, found.medium);
                joined.paths.push((member.number, found.path));
                if !intact {
                    joined.damaged_headers.push(member.number);
                }
            }
            Err(problem) => {
                joined.problems.insert(member.number, problem);
            }
        }
    }
    joined
}

/// Checks that a medium is the one that a list means. Returns true if both copies of its header are intact.
fn check(medium: &dyn Medium, member: &RegionMember, region: RegionUuid) -> Result<bool, String> {
    check_length(medium, member).map_err(|error| error.to_string())?;
    match examine(medium).map_err(|error| format!("its header cannot be read: {error}"))? {
        Found::Member {
            region: theirs,
            uuid,
            intact,
            capacity_bytes,
            ..
        } if theirs == region && uuid == member.uuid => {
            Ok(intact && capacity_bytes >= member.capacity_bytes)
        }
        Found::Member { region, uuid, .. } => Err(format!(
            "the file is medium {uuid} of region {region}, not {}",
            member.uuid
        )),
        Found::Newer => Err("the file was written by a newer build".to_owned()),
        Found::Blank => Err("the file is blank".to_owned()),
        Found::Region => Err("the file is a region of its own".to_owned()),
        Found::Other => {
            Err("both copies of its header are damaged, or it is another file".to_owned())
        }
    }
}

/// Writes and fences a member's header, both copies.
pub(crate) fn write_header(
    medium: &dyn Medium,
    region: RegionUuid,
    member: &RegionMember,
    segment_bytes: u32,
    removed: bool,
) -> io::Result<()> {
    let mut header = MemberHeader {
        magic: MEMBER_MAGIC,
        version: U32::new(FORMAT_VERSION),
        state: U32::new(if removed {
            HEADER_REMOVED
        } else {
            HEADER_MEMBER
        }),
        uuid: *member.uuid.as_bytes(),
        region: *region.as_bytes(),
        capacity_bytes: U64::new(member.capacity_bytes),
        segment_bytes: U32::new(segment_bytes),
        number: U32::new(u32::try_from(member.number).unwrap_or(0)),
        reserved: [0; 60],
        crc32: U32::ZERO,
    };
    header.crc32 = U32::new(checksum(&header));
    let mut page = vec![0; to_usize(PAGE_BYTES)];
    page[..size_of::<MemberHeader>()].copy_from_slice(header.as_bytes());
    // One after the other: a crash leaves one of them whole.
    for copy in 0..2 {
        let at = copy * PAGE_BYTES;
        let mut flushed = Flushed::new();
        // SAFETY: headers are read when a medium joins the region and written under the superblock's lock only, and no
        // slice of one is ever lent.
        unsafe { medium.write(at, &page)? };
        medium.flush(at, to_u64(page.len()), &mut flushed)?;
        medium.fence(&mut flushed)?;
    }
    Ok(())
}

fn read_page(medium: &dyn Medium, page: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; to_usize(PAGE_BYTES)];
    match medium.read(page * PAGE_BYTES, &mut bytes) {
        // Not blank: nothing is known of it.
        Err(error) if LostPage::of(&error).is_some() => bytes.fill(0xff),
        read => read?,
    }
    Ok(bytes)
}

fn intact_header(page: &[u8]) -> Option<MemberHeader> {
    let (header, _) = MemberHeader::read_from_prefix(page).ok()?;
    let intact = header.magic == MEMBER_MAGIC && header.crc32.get() == checksum(&header);
    intact.then_some(header)
}

/// Returns the CRC32 of all bytes but the last four.
fn checksum(header: &MemberHeader) -> u32 {
    let bytes = header.as_bytes();
    crc32fast::hash(&bytes[..bytes.len() - size_of::<u32>()])
}

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
        wrong[1].path_bytes = U16::new(u16::MAX);
        assert_eq!(Members::from_stored(&wrong), None);
    }
}
