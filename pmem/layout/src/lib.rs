//! Every structure that is stored in a region, the names and numbers in them, and a map by the former: no I/O here.
//!
//! Integers are little-endian; structures have no padding (asserted at the end, and `docs/format.md`
//! is compared with this file by a test). Checksums are CRC32 (the IEEE polynomial, as in zlib).

#![forbid(unsafe_code)]

pub mod by_id;
pub mod digest;
mod faults;
pub mod headers;
pub mod ids;
pub mod members;
pub mod node;
mod packed;
pub mod slots;
mod stored;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use permafrost_medium::PAGE_SIZE;

pub use faults::{MapFault, SuperblockFault};
pub use packed::{PackedSize, packed_header_bytes};
pub use stored::StoredPages;

/// The format version this build writes, and the only one it reads.
pub const FORMAT_VERSION: u32 = 2;

/// First bytes of a superblock.
pub const SUPERBLOCK_MAGIC: [u8; 8] = *b"PFREGION";
/// First bytes of a segment's header page.
pub const SEGMENT_MAGIC: [u8; 8] = *b"PFSEGMNT";
/// First bytes of a checkpoint's root page.
pub const ROOT_MAGIC: [u8; 8] = *b"PFCKROOT";

/// Superblock state: the region is closed, everything acknowledged is in it.
pub const STATE_CLEAN: u32 = 1;
/// Superblock state: open; if an open finds this state, the last shutdown was unsafe.
pub const STATE_OPEN: u32 = 2;

/// Identity, geometry and state of a region: at pages 0 and 1, the one with the higher generation counts.
///
/// `magic`, `version` and `crc32` keep their places in every later version, so that an older build
/// can tell a newer region from a damaged one.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Superblock {
    /// Magic number: [`SUPERBLOCK_MAGIC`].
    pub magic: [u8; 8],
    /// Version of the format: [`FORMAT_VERSION`].
    pub version: U32,
    /// [`STATE_CLEAN`] or [`STATE_OPEN`].
    pub state: U32,
    /// Names the region.
    pub uuid: [u8; 16],
    /// Bytes from the region's first byte to the end of its last slot.
    pub capacity_bytes: U64,
    /// Byte offset of the first copy of journal half 0; half 1 follows, and behind it the second copies of both.
    pub journal_at: U64,
    /// Byte offset of slot 0, a multiple of `segment_bytes`.
    pub segments_at: U64,
    /// Number of slots, each with room for one segment.
    pub slots: U32,
    /// Bytes of a segment: a power of two from 64 KiB to 2 MiB.
    pub segment_bytes: U32,
    /// Records in each journal half, its header included.
    pub journal_records: U32,
    /// Number of segments that the segment table has entries for, at least as many as there are slots.
    pub segments: U32,
    /// Generation: one more than the other superblock's when this one was written.
    pub generation: U64,
    /// Times the region was opened without having been closed.
    pub unsafe_shutdowns: U64,
    /// Byte offset of the segment table's first copy; the second follows at once.
    pub table_at: U64,
    /// Name of the tier of the region's first medium, filled up with zeros.
    pub tier: [u8; TIER_BYTES],
    /// CRC32 of the list of members behind this structure.
    pub members_crc32: U32,
    /// Reserved field, always zero.
    pub reserved: [u8; 8],
    /// CRC32 of the bytes before.
    pub crc32: U32,
}

/// Bytes of the name of a tier, at least one of them zero.
pub const TIER_BYTES: usize = 16;
/// Entries of the list of members, which fills the rest of a superblock's page.
pub const LISTED_MEMBERS: usize = 15;
/// Most bytes of a member's path.
pub const MEMBER_PATH: usize = 216;

/// State of a listed member: dumps are written to it.
pub const MEMBER_ACTIVE: u8 = 1;
/// State of a listed member: segments are moved away from it.
pub const MEMBER_DRAINING: u8 = 2;

/// Kind of a listed member: all its pages are in its file.
pub const MEMBER_MAPPED: u8 = 0;
/// Kind of a listed member: most of its pages are in an object store.
pub const MEMBER_COLD: u8 = 1;

/// Entry of the list of members: a medium beside the region's first. All zero if there is none with its number, which
/// is one more than its place in the list.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct MemberEntry {
    /// Names the medium.
    pub uuid: [u8; 16],
    /// Bytes of the medium that the region uses.
    pub capacity_bytes: U64,
    /// Name of its tier, filled up with zeros.
    pub tier: [u8; TIER_BYTES],
    /// [`MEMBER_ACTIVE`] or [`MEMBER_DRAINING`].
    pub state: u8,
    /// [`MEMBER_MAPPED`] or [`MEMBER_COLD`].
    pub kind: u8,
    /// Generation of a cold member's index; 0 for others.
    pub index_generation: U32,
    /// Bytes of the path.
    pub path_bytes: U16,
    /// Path at which the medium was last found, for information only.
    pub path: [u8; MEMBER_PATH],
}

/// First bytes of a member's header.
pub const MEMBER_MAGIC: [u8; 8] = *b"PFMEMBER";
/// State in a member's header: it belongs to the region.
pub const HEADER_MEMBER: u32 = 1;
/// State in a member's header: it was removed from the region, and nothing of the region is in it.
pub const HEADER_REMOVED: u32 = 2;

/// Header of a member, at its pages 0 and 1. The list in the superblocks is what counts; the header says that this is
/// the medium that the list means.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct MemberHeader {
    /// Magic number: [`MEMBER_MAGIC`].
    pub magic: [u8; 8],
    /// Version of the format: [`FORMAT_VERSION`].
    pub version: U32,
    /// [`HEADER_MEMBER`] or [`HEADER_REMOVED`].
    pub state: U32,
    /// Names the medium.
    pub uuid: [u8; 16],
    /// The region that it belongs to.
    pub region: [u8; 16],
    /// Bytes that the region uses, at most these.
    pub capacity_bytes: U64,
    /// Bytes of a segment, as in the superblock. The first slot is at this offset.
    pub segment_bytes: U32,
    /// Number of the medium in the region.
    pub number: U32,
    /// Reserved field, always zero.
    pub reserved: [u8; 60],
    /// CRC32 of the bytes before.
    pub crc32: U32,
}

/// Journal record kind: first record of a half; `attrs` counts the compacted records after it.
pub const RECORD_HEADER: u16 = 1;
/// Journal record kind: a checkpoint exists.
pub const RECORD_SEAL: u16 = 2;
/// Journal record kind: a checkpoint exists no longer.
pub const RECORD_DELETE: u16 = 3;
/// Journal record kind: a checkpoint's attributes are these.
pub const RECORD_ATTRS: u16 = 4;

/// Journal record flag: `replaces` names a checkpoint that this record deletes.
pub const RECORD_REPLACES: u16 = 1;

/// Copy of a record; two equal ones, at a distance, make a journal record.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct RecordCopy {
    /// CRC32 of the region's uuid and the bytes after this field.
    pub crc32: U32,
    /// `RECORD_HEADER` … `RECORD_ATTRS`.
    pub kind: U16,
    /// [`RECORD_REPLACES`] or 0.
    pub flags: U16,
    /// Number of the compaction that this half came from; never used twice.
    pub epoch: U32,
    /// The record's own place in its half.
    pub sequence: U32,
    /// Id of the checkpoint.
    pub id: [u8; 16],
    /// Id of the checkpoint that this one replaces.
    pub replaces: [u8; 16],
    /// Page number of the checkpoint's first root page.
    pub root: U64,
    /// CRC32 of that page.
    pub root_crc32: U32,
    /// Attribute bits; in a header, the number of compacted records.
    pub attrs: U32,
}

/// Bytes of a copy of a journal record: a cache line.
pub const RECORD_BYTES: usize = 64;

/// Bytes of an entry of the segment table.
pub const TABLE_ENTRY_BYTES: usize = 8;

/// CRC32 table entries of a segment header: one for every page of the largest segment.
pub const SEGMENT_CRCS: usize = 512;

/// Words of the bitmap in a packed segment's header: a bit for every page of the largest segment.
pub const STORED_WORDS: usize = SEGMENT_CRCS / 64;

/// First page of a whole segment.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SegmentHeader {
    /// [`SEGMENT_MAGIC`]. Informative, as are the next three: pages are found and verified through maps.
    pub magic: [u8; 8],
    /// Number of this segment.
    pub segment: U32,
    /// Number of pages written after this one.
    pub pages: U32,
    /// The region's uuid.
    pub uuid: [u8; 16],
    /// Id of the key that the pages are encrypted with, 0 if they are not.
    pub key: U64,
    /// Reserved field, always zero.
    pub reserved: [u8; 2000],
    /// Second copy of `key`, in another sector: it counts where the first is unknown.
    pub key_again: U64,
    /// CRC32 of each page, by its place in the segment; entry 0 is zero. Verified by the
    /// CRC32s of the maps.
    pub crcs: [U32; SEGMENT_CRCS],
}

/// Header of a packed segment, at a multiple of 64 bytes; the CRC32s of the stored pages follow, 4 bytes each.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct PackedHeader {
    /// CRC32 of the region's uuid and the bytes after this field.
    pub crc32: U32,
    /// Number of this segment.
    pub segment: U32,
    /// Number of pages on the medium before the first stored one; the others follow it, in ascending order.
    pub first: U64,
    /// Bitmap of the stored pages, by place in the segment.
    pub stored: [U64; STORED_WORDS],
    /// Id of the key that the pages are encrypted with, 0 if they are not.
    pub key: U64,
    /// Reserved field, always zero.
    pub reserved: [u8; 8],
}

/// Alignment of a packed segment's header.
pub const PACKED_ALIGNMENT: usize = 64;

/// Range of consecutive segments.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExtentEntry {
    /// Number of the first segment.
    pub first: U32,
    /// Number of segments, at least 1.
    pub segments: U32,
}

/// Extents in a root page.
pub const ROOT_EXTENTS: usize = 496;
/// Bytes of a root page before its body.
pub const ROOT_HEAD_BYTES: usize = 128;
/// Bytes for map nodes, extents and a manifest in a root page.
pub const ROOT_BODY_BYTES: usize = ROOT_EXTENTS * size_of::<ExtentEntry>();

/// A page of a checkpoint's root; an equal copy follows in the next page.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RootPage {
    /// Magic number: [`ROOT_MAGIC`].
    pub magic: [u8; 8],
    /// Id of the checkpoint.
    pub id: [u8; 16],
    /// Map of the manifest's pages; zero if the manifest stands behind the extents, and in all but the first root page.
    pub manifest: MapRootBytes,
    /// Length of the manifest.
    pub manifest_bytes: U64,
    /// Page number of the next root page, 0 after the last.
    pub next: U64,
    /// CRC32 of the next root page.
    pub next_crc32: U32,
    /// Extents in this page.
    pub extents_here: U32,
    /// Number of extents in this page and those after it.
    pub extents_left: U32,
    /// Number of root pages before this one.
    pub place: U32,
    /// Bytes of the map nodes at the beginning of the body; 0 in all but the first root page.
    pub nodes_bytes: U32,
    /// Pages that the checkpoint has behind both copies of its first root page, in the same segment; 0 in all but the
    /// first root page.
    pub pages_behind: U32,
    /// 1 if nodes and manifest are encrypted, as the segment is: references have the CRC32 of the other bytes. 0 if
    /// not.
    pub encrypted: U32,
    /// CRC32 of nodes and manifest, before they were encrypted; 0 if they are not.
    pub encrypted_crc32: U32,
    /// Reserved field, always zero.
    pub reserved: [u8; 24],
    /// Map nodes, if they are few. Then the segments with pages of this checkpoint, ascending, its own and inherited
    /// ones: [`ExtentEntry`] each. Behind them in the first root page the manifest, if it is short.
    pub body: [u8; ROOT_BODY_BYTES],
}

/// Refers to a page map from a root page or a manifest.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct MapRootBytes {
    /// Page number of the page with the topmost node, 0 if the map is empty.
    pub node: U64,
    /// CRC32 of that node.
    pub crc32: U32,
    /// Byte offset of that node in its page.
    pub offset: U16,
    /// Level of that node, 0 for a leaf.
    pub level: U16,
    /// Pages in the map.
    pub pages: U64,
    /// Reserved field, always zero.
    pub reserved: U64,
}

/// Start of a map node; an entry for each of its occupied slots follows, ascending.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct NodeHeader {
    /// First index of the node's block: a multiple of its length.
    pub first_index: U64,
    /// Number of pages below.
    pub pages: U64,
    /// Content digest of the block.
    pub digest: [u8; 32],
    /// Flags that all pages below have; 0 if they differ.
    pub flags: U16,
    /// Level: 0 for a leaf. [`NODE_MIXED`] is added if the pages below differ in their flags.
    pub level: u8,
    /// Bitmap of the occupied slots, at least one.
    pub slots: u8,
}

/// Slots of a node.
pub const NODE_SLOTS: usize = 8;
/// Bit of a node's level: the pages below have different flags.
pub const NODE_MIXED: u8 = 0x80;

/// Entry of a node: a page in leaves, a child above; or zeros, which fill the slot.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct SlotEntry {
    /// Page number of the page, or of the page with the child; 0 for zeros.
    pub location: U64,
    /// Byte offset of the child in its page; the flags of a page or of zeros.
    pub detail: U16,
    /// CRC32 of the page or of the child; 0 for zeros.
    pub crc32: U32,
}

const _: () = {
    assert!(size_of::<Superblock>() == 128);
    assert!(size_of::<MemberHeader>() == 128);
    assert!(
        size_of::<Superblock>() + LISTED_MEMBERS * size_of::<MemberEntry>() <= PAGE_SIZE,
        "a superblock and the list of members are one page"
    );
    assert!(size_of::<RecordCopy>() == 64);
    assert!(RECORD_BYTES == size_of::<RecordCopy>());
    assert!(PAGE_SIZE.is_multiple_of(RECORD_BYTES));
    assert!(size_of::<SegmentHeader>() == PAGE_SIZE);
    assert!(size_of::<RootPage>() == PAGE_SIZE);
    assert!(std::mem::offset_of!(RootPage, body) == ROOT_HEAD_BYTES);
    assert!(size_of::<MapRootBytes>() == 32);
    assert!(size_of::<NodeHeader>() == 52);
    assert!(size_of::<SlotEntry>() == 14);
    // The checksums' places, on which builds of any version rely.
    assert!(std::mem::offset_of!(Superblock, version) == 8);
    assert!(std::mem::offset_of!(Superblock, crc32) == 124);
    assert!(std::mem::offset_of!(RecordCopy, crc32) == 0);
    assert!(std::mem::offset_of!(SegmentHeader, crcs) == 2048);
    assert!(STORED_WORDS * 64 == SEGMENT_CRCS);
    assert!(size_of::<PackedHeader>() == 96);
    assert!(std::mem::offset_of!(PackedHeader, crc32) == 0);
};
