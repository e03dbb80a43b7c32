//! Media beside a region's first: what the superblocks say of them, and the headers that they begin with.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use permafrost_medium::{ColdIdentity, Flushed, Medium, MediumSet};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use crate::PAGE_BYTES;
use crate::ids::RegionUuid;
use crate::layout::headers::checksum;
use crate::layout::{FORMAT_VERSION, HEADER_MEMBER, HEADER_REMOVED, MEMBER_MAGIC, MemberHeader};
use crate::media::check_length;
pub use permafrost_layout::headers::member_uuid;
pub(crate) use permafrost_layout::headers::{HEADERS_BYTES, MediumBeginning, examine};
pub use permafrost_layout::members::{MediumState, NoTierName, RegionMember, TierName};
pub(crate) use permafrost_layout::members::{Members, is_storable, slots_in};
use permafrost_medium::convert::{to_u64, to_usize};

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
        MediumBeginning::Member {
            region: theirs,
            uuid,
            intact,
            capacity_bytes,
            ..
        } if theirs == region && uuid == member.uuid => {
            Ok(intact && capacity_bytes >= member.capacity_bytes)
        }
        MediumBeginning::Member { region, uuid, .. } => Err(format!(
            "the file is medium {uuid} of region {region}, not {}",
            member.uuid
        )),
        MediumBeginning::Newer => Err("the file was written by a newer build".to_owned()),
        MediumBeginning::Blank => Err("the file is blank".to_owned()),
        MediumBeginning::Region => Err("the file is a region of its own".to_owned()),
        MediumBeginning::Other => {
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
