//! Headers that media beside a region's first begin with.

use std::io;
use std::path::Path;

use permafrost_medium::convert::to_usize;
use permafrost_medium::{LostPage, Medium, PAGE_SIZE, is_zero};
use zerocopy::{FromBytes, IntoBytes};

use crate::ids::RegionUuid;
use crate::{FORMAT_VERSION, HEADER_REMOVED, MEMBER_MAGIC, MemberHeader, SUPERBLOCK_MAGIC};

const PAGE_BYTES: u64 = PAGE_SIZE as u64;

/// Bytes of both copies of a member's header, at the beginning of its medium.
pub const HEADERS_BYTES: u64 = 2 * PAGE_BYTES;

/// Largest size of a segment, and so the highest offset of a member's first slot.
pub const MAX_SEGMENT_BYTES: u32 = 2 << 20;

/// Pages that are examined of a file: one that has anything in them is not taken for an empty one.
const BLANK_PAGES: u64 = 16;

/// Beginning of a medium that is offered as a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MediumBeginning {
    /// Zeros, or what a crash has left of the first header.
    Blank,
    /// The header of a member: of this region, and with this uuid. `intact` is false if one copy is damaged.
    Member {
        /// Region that it is of.
        region: RegionUuid,
        /// Name of the medium.
        uuid: RegionUuid,
        /// Size that the region uses.
        capacity_bytes: u64,
        /// True if it was removed from the region.
        removed: bool,
        /// False if one copy of the header is damaged.
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
///
/// # Errors
/// It cannot be read.
pub fn examine(medium: &dyn Medium) -> io::Result<MediumBeginning> {
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
            return Ok(MediumBeginning::Newer);
        }
        return Ok(MediumBeginning::Member {
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
        return Ok(MediumBeginning::Region);
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
    Ok(if blank {
        MediumBeginning::Blank
    } else {
        MediumBeginning::Other
    })
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

/// Returns the CRC32 of all bytes of a header but the last four.
#[must_use]
pub fn checksum(header: &MemberHeader) -> u32 {
    let bytes = header.as_bytes();
    crc32fast::hash(&bytes[..bytes.len() - size_of::<u32>()])
}
