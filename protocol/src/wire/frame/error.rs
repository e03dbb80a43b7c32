//! Errors in one header.

use super::{Coding, Kind, MAX_IMAGE_BYTES, MAX_PAGES, MAX_PAYLOAD_BYTES};

/// A header that no sender sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The header was damaged on the way, or the bytes are not a header.
    #[error("the frame's header has CRC32 {computed:#010x}, and says {stored:#010x}")]
    Checksum {
        /// CRC32 that the header carries.
        stored: u32,
        /// CRC32 of the header's bytes.
        computed: u32,
    },
    /// A kind of a later version.
    #[error("unknown kind of frame {kind}")]
    UnknownKind {
        /// Byte of the kind.
        kind: u8,
    },
    /// A coding of a later version.
    #[error("unknown coding of a payload {coding}")]
    UnknownCoding {
        /// Byte of the coding.
        coding: u8,
    },
    /// More than a receiver must hold.
    #[error("a payload of {payload_bytes} bytes is longer than {MAX_PAYLOAD_BYTES}")]
    PayloadTooLong {
        /// Length of the payload, bytes.
        payload_bytes: u32,
    },
    /// The frame has a payload although its kind has none, or none although its kind has one.
    #[error("a payload of {payload_bytes} bytes makes no sense with a frame of kind {kind:?}")]
    Payload {
        /// Kind of the frame.
        kind: Kind,
        /// Length of the payload, bytes.
        payload_bytes: u32,
    },
    /// The frame has a coding although its kind is never encoded.
    #[error("coding {coding:?} makes no sense with a frame of kind {kind:?}")]
    Coding {
        /// Kind of the frame.
        kind: Kind,
        /// Coding of the payload.
        coding: Coding,
    },
    /// The frame has no pages, or more than [`MAX_PAGES`] with a payload.
    #[error(
        "a frame of kind {kind:?} cannot have {pages} pages (at most {MAX_PAGES} with a payload)"
    )]
    Pages {
        /// Kind of the frame.
        kind: Kind,
        /// Number of pages.
        pages: u32,
    },
    /// Pages outside every address space.
    #[error("{pages} pages from page {index} end beyond the address space")]
    BeyondAddressSpace {
        /// Virtual page number of the first.
        index: u64,
        /// Number of pages.
        pages: u32,
    },
    /// The length of a raw payload differs from the length that it decodes to.
    #[error(
        "a raw payload of {payload_bytes} bytes in a frame of kind {kind:?} that holds {decoded_bytes}"
    )]
    RawLength {
        /// Kind of the frame.
        kind: Kind,
        /// Length of the payload, bytes.
        payload_bytes: u32,
        /// Length to which the payload decodes, as the frame's fields give it, bytes.
        decoded_bytes: u64,
    },
    /// There is no space of this type, or its id exceeds the type's range.
    #[error("there is no address space of type {space_type} with id {id}")]
    UnknownSpace {
        /// Number of the space's type.
        space_type: u16,
        /// Id of the space.
        id: u64,
    },
    /// Longer than any small image.
    #[error("an image of {len_bytes} bytes is longer than {MAX_IMAGE_BYTES}")]
    ImageTooLong {
        /// Length of the image, bytes.
        len_bytes: u64,
    },
    /// Longer than any file name.
    #[error("an image's name of {payload_bytes} bytes")]
    NameTooLong {
        /// Length of the name, bytes.
        payload_bytes: u32,
    },
    /// Image data that decodes to nothing, or to more than a payload.
    #[error("image data of {decoded_bytes} bytes in one frame")]
    DataLength {
        /// Length to which the data decodes, as the frame's `index` gives it, bytes.
        decoded_bytes: u64,
    },
    /// A field without a meaning has a value: the sender means something that this build does not know.
    #[error("a frame of kind {kind:?} with {field} {value}")]
    NotZero {
        /// Kind of the frame.
        kind: Kind,
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        value: u64,
    },
}
