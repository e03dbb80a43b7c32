//! Headers: written ones are read back, damaged or meaningless ones are refused.

use permafrost_protocol::wire::frame::{
    Coding, FrameError, HEADER_BYTES, Header, Kind, MAX_IMAGE_BYTES, MAX_PAGES, MAX_PAYLOAD_BYTES,
    Preamble,
};
use proptest::prelude::*;

/// The last page of the address space, and one more.
const END: u64 = 1 << 45;

pub(crate) fn header(kind: Kind, pages: u32, index: u64, payload_bytes: u32) -> Header {
    Header {
        kind,
        coding: Coding::Raw,
        flags: 0,
        pages,
        sequence: 7,
        index,
        payload_bytes,
    }
}

fn good() -> impl Strategy<Value = Header> {
    let shape = prop_oneof![
        (any::<u32>(), any::<u32>()).prop_map(|(id, pages)| header(
            Kind::Space,
            pages,
            id.into(),
            0
        )),
        (1..=MAX_PAGES, 0..END - 64).prop_map(|(n, index)| header(Kind::Pages, n, index, n * 4096)),
        (1..=MAX_PAGES, 0..END - 64, 1..=MAX_PAYLOAD_BYTES).prop_map(|(pages, index, bytes)| {
            Header {
                coding: Coding::Zstd,
                ..header(Kind::Pages, pages, index, bytes)
            }
        }),
        (1_u32.., 0..END >> 1).prop_map(|(n, index)| header(Kind::Zero, n, index, 0)),
        (1_u32.., 0..END >> 1).prop_map(|(n, index)| header(Kind::Parent, n, index, 0)),
        Just(header(Kind::Close, 0, 0, 0)),
        (0..=MAX_IMAGE_BYTES, 1_u32..=255).prop_map(|(len, name)| header(
            Kind::Image,
            0,
            len,
            name
        )),
        (1..=MAX_PAYLOAD_BYTES).prop_map(|len| header(Kind::ImageData, 0, len.into(), len)),
        Just(header(Kind::Prepare, 0, 0, 0)),
    ];
    (shape, any::<u64>(), any::<u16>()).prop_map(|(header, sequence, flags)| Header {
        sequence,
        flags: match header.kind {
            Kind::Space => flags & 1,
            Kind::Pages | Kind::Zero | Kind::Parent => flags,
            _ => 0,
        },
        ..header
    })
}

proptest! {
    #[test]
    fn what_is_written_is_read(header in good()) {
        prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn a_flipped_bit_is_noticed(header in good(), bit in 0..HEADER_BYTES * 8) {
        let mut bytes = header.encode();
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(matches!(Header::decode(&bytes), Err(FrameError::Checksum { .. })), "bit {}", bit);
    }

    #[test]
    fn any_bytes_with_a_fitting_checksum_are_read_or_refused(bytes in any::<[u8; HEADER_BYTES]>()) {
        let mut bytes = bytes;
        bytes[0] &= 15;
        bytes[1] &= 3;
        let crc32 = crc32fast::hash(&bytes[..28]);
        bytes[28..].copy_from_slice(&crc32.to_le_bytes());
        if let Ok(header) = Header::decode(&bytes) {
            prop_assert_eq!(header.encode(), bytes);
        }
    }
}

#[test]
fn each_field_stands_where_the_document_says() {
    let bytes = Header {
        kind: Kind::Pages,
        coding: Coding::Zstd,
        flags: 0x0403,
        pages: 5,
        sequence: 0x0807_0605_0403_0201,
        index: 0x11,
        payload_bytes: 0x0102,
    }
    .encode();
    assert_eq!(bytes[..8], [2, 1, 3, 4, 5, 0, 0, 0]);
    assert_eq!(bytes[8..16], [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(bytes[16..24], [0x11, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[24..28], [2, 1, 0, 0]);
    assert_eq!(bytes[28..], crc32fast::hash(&bytes[..28]).to_le_bytes());
    let preamble = Preamble { id: [9; 16] };
    assert_eq!(Preamble::decode(&preamble.encode()), preamble);
}

#[test]
fn each_mistake_has_its_own_error() {
    use FrameError as E;
    let zstd = |header| Header {
        coding: Coding::Zstd,
        ..header
    };
    let flagged = |flags, header| Header { flags, ..header };
    let not_zero = |kind, field| E::NotZero {
        kind,
        field,
        value: 1,
    };
    let payload = |kind, payload_bytes| E::Payload {
        kind,
        payload_bytes,
    };
    let beyond = |index, pages| E::BeyondAddressSpace { index, pages };
    let over = MAX_PAYLOAD_BYTES + 1;
    #[rustfmt::skip]
    let mistakes = [
        (zstd(header(Kind::Pages, 1, 0, over)), E::PayloadTooLong { payload_bytes: over }),
        (header(Kind::Pages, 1, 0, 0), payload(Kind::Pages, 0)),
        (header(Kind::Image, 0, 9, 0), payload(Kind::Image, 0)),
        (header(Kind::ImageData, 0, 9, 0), payload(Kind::ImageData, 0)),
        (header(Kind::Space, 1, 9, 1), payload(Kind::Space, 1)),
        (header(Kind::Zero, 1, 9, 4096), payload(Kind::Zero, 4096)),
        (header(Kind::Parent, 1, 9, 4096), payload(Kind::Parent, 4096)),
        (header(Kind::Close, 0, 0, 1), payload(Kind::Close, 1)),
        (header(Kind::Prepare, 0, 0, 1), payload(Kind::Prepare, 1)),
        (zstd(header(Kind::Zero, 1, 9, 0)), E::Coding { kind: Kind::Zero, coding: Coding::Zstd }),
        (zstd(header(Kind::Image, 0, 9, 9)), E::Coding { kind: Kind::Image, coding: Coding::Zstd }),
        (zstd(header(Kind::Pages, 0, 0, 9)), E::Pages { kind: Kind::Pages, pages: 0 }),
        (zstd(header(Kind::Pages, 65, 0, 9)), E::Pages { kind: Kind::Pages, pages: 65 }),
        (header(Kind::Zero, 0, 0, 0), E::Pages { kind: Kind::Zero, pages: 0 }),
        (header(Kind::Parent, 0, 0, 0), E::Pages { kind: Kind::Parent, pages: 0 }),
        (header(Kind::Pages, 1, END, 4096), beyond(END, 1)),
        (header(Kind::Zero, 2, END - 1, 0), beyond(END - 1, 2)),
        (header(Kind::Parent, 1, u64::MAX, 0), beyond(u64::MAX, 1)),
        (header(Kind::Pages, 2, 0, 4096), E::RawLength { kind: Kind::Pages, payload_bytes: 4096, decoded_bytes: 8192 }),
        (header(Kind::ImageData, 0, 9, 8), E::RawLength { kind: Kind::ImageData, payload_bytes: 8, decoded_bytes: 9 }),
        (flagged(2, header(Kind::Space, 1, 9, 0)), E::UnknownSpace { space_type: 2, id: 9 }),
        (header(Kind::Space, 1, 1 << 32, 0), E::UnknownSpace { space_type: 0, id: 1 << 32 }),
        (flagged(1, header(Kind::Space, 1, 1 << 56, 0)), E::UnknownSpace { space_type: 1, id: 1 << 56 }),
        (header(Kind::Image, 0, MAX_IMAGE_BYTES + 1, 9), E::ImageTooLong { len_bytes: MAX_IMAGE_BYTES + 1 }),
        (header(Kind::Image, 0, 9, 256), E::NameTooLong { payload_bytes: 256 }),
        (zstd(header(Kind::ImageData, 0, 0, 9)), E::DataLength { decoded_bytes: 0 }),
        (zstd(header(Kind::ImageData, 0, over.into(), 9)), E::DataLength { decoded_bytes: over.into() }),
        (flagged(1, header(Kind::Close, 0, 0, 0)), not_zero(Kind::Close, "flags")),
        (header(Kind::Close, 1, 0, 0), not_zero(Kind::Close, "pages")),
        (header(Kind::Prepare, 0, 1, 0), not_zero(Kind::Prepare, "index")),
        (header(Kind::Image, 1, 9, 9), not_zero(Kind::Image, "pages")),
        (flagged(1, header(Kind::ImageData, 0, 9, 9)), not_zero(Kind::ImageData, "flags")),
    ];
    for (header, expected) in mistakes {
        assert_eq!(
            Header::decode(&header.encode()),
            Err(expected),
            "{header:?}"
        );
    }
    let edited = |at: usize, value: u8| {
        let mut bytes = header(Kind::Close, 0, 0, 0).encode();
        bytes[at] = value;
        let crc32 = crc32fast::hash(&bytes[..28]);
        bytes[28..].copy_from_slice(&crc32.to_le_bytes());
        Header::decode(&bytes)
    };
    for kind in [0, 9, 255] {
        assert_eq!(edited(0, kind), Err(E::UnknownKind { kind }));
    }
    for coding in [2, 255] {
        assert_eq!(edited(1, coding), Err(E::UnknownCoding { coding }));
    }
}
