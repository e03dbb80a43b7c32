//! Media beside a region's first: what the superblocks say of them, and the headers that they begin with.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use permafrost_medium::{ColdIdentity, Flushed, LostPage, Medium, MediumSet, is_zero};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use crate::PAGE_BYTES;
use crate::geometry::MAX_SEGMENT_BYTES;
use crate::ids::RegionUuid;
use crate::layout::{
    FORMAT_VERSION, HEADER_MEMBER, HEADER_REMOVED, MEMBER_MAGIC, MemberHeader, SUPERBLOCK_MAGIC,
};
use crate::media::check_length;
pub use permafrost_layout::members::{MediumState, NoTierName, RegionMember, TierName};
pub(crate) use permafrost_layout::members::{Members, is_storable, slots_in};
use permafrost_medium::convert::{to_u64, to_usize};

/// Bytes of both copies of a member's header, at the beginning of its medium.
pub(crate) const HEADERS_BYTES: u64 = 2 * PAGE_BYTES;

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
    check_cold(medium, member, region)?;
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

/// Checks that a medium is a cold one if its list says so, with the index that belongs to it.
pub(crate) fn check_cold(
    medium: &dyn Medium,
    member: &RegionMember,
    region: RegionUuid,
) -> Result<(), String> {
    match (member.cold, medium.cold()) {
        (None, None) => Ok(()),
        (Some(generation), Some(cold)) => {
            let attached = cold.attach(identity(region, member.uuid), generation);
            attached.map_err(|error| error.to_string())
        }
        (Some(_), None) => Err(format!(
            "it is a cold tier, and {0}.store beside it, which names its object store, is missing: put {0}.store and \
             {0}.index back",
            member.path.display()
        )),
        (None, Some(_)) => Err(format!(
            "it is no cold tier, and {}.store is beside it: remove that file",
            member.path.display()
        )),
    }
}

/// Returns the identity of a cold medium of a region.
pub(crate) fn identity(region: RegionUuid, medium: RegionUuid) -> ColdIdentity {
    ColdIdentity {
        region: *region.as_bytes(),
        medium: *medium.as_bytes(),
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
