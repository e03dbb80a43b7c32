//! Comparison of `docs/format.md` with the code.

#![allow(missing_docs)]

use std::collections::BTreeMap;
use std::mem::offset_of;

use permafrost_pmem::layout::*;

const DOCUMENT: &str = include_str!("../../docs/format.md");

/// Name, offset and size of each field.
type Fields = Vec<(&'static str, usize, usize)>;

macro_rules! fields {
    ($type:ident { $($field:ident: $of:ty),* $(,)? }) => {
        (stringify!($type), (size_of::<$type>(), vec![$((stringify!($field), offset_of!($type, $field), {
            // The sizes given here are the struct's, or this does not compile.
            fn _of(s: &$type) -> &$of { &s.$field }
            size_of::<$of>()
        })),*]))
    };
}

fn code() -> BTreeMap<&'static str, (usize, Fields)> {
    use zerocopy::little_endian::{U16, U32, U64};
    BTreeMap::from([
        fields!(Superblock {
            magic: [u8; 8],
            version: U32,
            state: U32,
            uuid: [u8; 16],
            capacity_bytes: U64,
            journal_at: U64,
            segments_at: U64,
            slots: U32,
            segment_bytes: U32,
            journal_records: U32,
            segments: U32,
            generation: U64,
            unsafe_shutdowns: U64,
            table_at: U64,
            tier: [u8; TIER_BYTES],
            members_crc32: U32,
            reserved: [u8; 8],
            crc32: U32,
        }),
        fields!(MemberEntry {
            uuid: [u8; 16],
            capacity_bytes: U64,
            tier: [u8; TIER_BYTES],
            state: u8,
            kind: u8,
            index_generation: U32,
            path_bytes: U16,
            path: [u8; MEMBER_PATH],
        }),
        fields!(MemberHeader {
            magic: [u8; 8],
            version: U32,
            state: U32,
            uuid: [u8; 16],
            region: [u8; 16],
            capacity_bytes: U64,
            segment_bytes: U32,
            number: U32,
            reserved: [u8; 60],
            crc32: U32,
        }),
        fields!(RecordCopy {
            crc32: U32,
            kind: U16,
            flags: U16,
            epoch: U32,
            sequence: U32,
            id: [u8; 16],
            replaces: [u8; 16],
            root: U64,
            root_crc32: U32,
            attrs: U32,
        }),
        fields!(SegmentHeader {
            magic: [u8; 8],
            segment: U32,
            pages: U32,
            uuid: [u8; 16],
            key: U64,
            reserved: [u8; 2000],
            key_again: U64,
            crcs: [U32; SEGMENT_CRCS],
        }),
        fields!(PackedHeader {
            crc32: U32,
            segment: U32,
            first: U64,
            stored: [U64; STORED_WORDS],
            key: U64,
            reserved: [u8; 8],
        }),
        fields!(MapRootBytes {
            node: U64,
            crc32: U32,
            offset: U16,
            level: U16,
            pages: U64,
            reserved: U64
        }),
        fields!(NodeHeader {
            first_index: U64,
            pages: U64,
            digest: [u8; 32],
            flags: U16,
            level: u8,
            slots: u8,
        }),
        fields!(SlotEntry {
            location: U64,
            detail: U16,
            crc32: U32,
        }),
        fields!(RootPage {
            magic: [u8; 8],
            id: [u8; 16],
            manifest: MapRootBytes,
            manifest_bytes: U64,
            next: U64,
            next_crc32: U32,
            extents_here: U32,
            extents_left: U32,
            place: U32,
            nodes_bytes: U32,
            pages_behind: U32,
            encrypted: U32,
            encrypted_crc32: U32,
            reserved: [u8; 24],
            body: [u8; ROOT_BODY_BYTES],
        }),
        fields!(ExtentEntry {
            first: U32,
            segments: U32
        }),
    ])
}

/// Returns the tables that follow a `layout:` comment.
fn document() -> BTreeMap<&'static str, (usize, Fields)> {
    DOCUMENT
        .split("<!-- layout: ")
        .skip(1)
        .map(|part| {
            let (head, body) = part.split_once(" -->").expect("comment ends");
            let (name, size) = head.split_once(' ').expect("name and size");
            let rows = body
                .lines()
                .skip(3)
                .take_while(|line| line.starts_with('|'));
            let fields = rows.map(|row| {
                let cells: Vec<_> = row.split('|').map(str::trim).collect();
                (
                    cells[3],
                    cells[1].parse().expect(row),
                    cells[2].parse().expect(row),
                )
            });
            (name, (size.parse().expect(head), fields.collect()))
        })
        .collect()
}

#[test]
fn every_field_is_where_the_document_says() {
    let (code, document) = (code(), document());
    assert_eq!(
        code.keys().collect::<Vec<_>>(),
        document.keys().collect::<Vec<_>>()
    );
    for (name, layout) in code {
        assert_eq!(document[name], layout, "{name}");
        // The tables leave no gap: a field without a row would be one.
        let end = layout.1.iter().fold(0, |end, (field, offset, size)| {
            assert_eq!(*offset, end, "{name}.{field}");
            end + size
        });
        assert_eq!(end, layout.0, "{name}");
    }
}

#[test]
fn constants_are_what_the_document_says() {
    for says in [
        format!("# The region format, version {FORMAT_VERSION}"),
        format!(
            "| 0 | 8 | magic | `{}` |",
            String::from_utf8_lossy(&SUPERBLOCK_MAGIC)
        ),
        format!(
            "| 0 | 8 | magic | `{}`;",
            String::from_utf8_lossy(&SEGMENT_MAGIC)
        ),
        format!(
            "| 0 | 8 | magic | `{}` |",
            String::from_utf8_lossy(&ROOT_MAGIC)
        ),
        format!(
            "| 0 | 8 | magic | `{}` |",
            String::from_utf8_lossy(&MEMBER_MAGIC)
        ),
        format!("{HEADER_MEMBER} a member, {HEADER_REMOVED} removed"),
        format!("{MEMBER_ACTIVE} active, {MEMBER_DRAINING} draining"),
        format!("{LISTED_MEMBERS} entries"),
        format!("| {STATE_CLEAN} closed, {STATE_OPEN} open;"),
        format!(
            "{RECORD_HEADER} header, {RECORD_SEAL} seal, {RECORD_DELETE} delete, {RECORD_ATTRS} attributes"
        ),
        format!(
            "bit {}: `replaces` counts",
            RECORD_REPLACES.trailing_zeros()
        ),
        format!("records of {RECORD_BYTES} bytes"),
        format!("entries of 14 bytes, one for each occupied slot, up to {NODE_SLOTS}"),
        format!("plus {NODE_MIXED} if the pages below differ in their flags"),
        format!("{SEGMENT_CRCS} CRC32s of 4 bytes"),
        format!("up to {ROOT_EXTENTS} extents of 8 bytes"),
    ] {
        assert!(
            DOCUMENT.contains(&says),
            "docs/format.md does not say: {says}"
        );
    }
}
