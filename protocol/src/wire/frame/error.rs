//! What can be wrong with one header.

use super::{Coding, Kind, MAX_IMAGE_BYTES, MAX_PAGES, MAX_PAYLOAD_BYTES};

/// A header that no sender sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// It was damaged on the way, or what was read is no header.
    #[error("the frame's header has CRC32 {computed:#010x}, and says {stored:#010x}")]
    Checksum {
        /// What it says.
        stored: u32,
        /// What its bytes have.
        computed: u32,
    },
    /// A kind of a later version.
    #[error("unknown kind of frame {kind}")]
    UnknownKind {
        /// The byte.
        kind: u8,
    },
    /// A coding of a later version.
    #[error("unknown coding of a payload {coding}")]
    UnknownCoding {
        /// The byte.
        coding: u8,
    },
    /// More than a receiver must hold.
    #[error("a payload of {payload_bytes} bytes is longer than {MAX_PAYLOAD_BYTES}")]
    PayloadTooLong {
        /// Its length.
        payload_bytes: u32,
    },
    /// A payload where there is none, or none where there is one.
    #[error("a payload of {payload_bytes} bytes makes no sense with a frame of kind {kind:?}")]
    Payload {
        /// The kind.
        kind: Kind,
        /// Its length.
        payload_bytes: u32,
    },
    /// A coding of something that is sent as it is.
    #[error("coding {coding:?} makes no sense with a frame of kind {kind:?}")]
    Coding {
        /// The kind.
        kind: Kind,
        /// The coding.
        coding: Coding,
    },
    /// No pages, or more than [`MAX_PAGES`] with a payload.
    #[error(
        "a frame of kind {kind:?} cannot have {pages} pages (at most {MAX_PAGES} with a payload)"
    )]
    Pages {
        /// The kind.
        kind: Kind,
        /// How many.
        pages: u32,
    },
    /// Pages outside every address space.
    #[error("{pages} pages from page {index} end beyond the address space")]
    BeyondAddressSpace {
        /// Virtual page number of the first.
        index: u64,
        /// How many.
        pages: u32,
    },
    /// A raw payload of another length than what it decodes to.
    #[error(
        "a raw payload of {payload_bytes} bytes in a frame of kind {kind:?} that holds {decoded_bytes}"
    )]
    RawLength {
        /// The kind.
        kind: Kind,
        /// Its length.
        payload_bytes: u32,
        /// What the frame says it decodes to.
        decoded_bytes: u64,
    },
    /// A type that nobody has, or an id that the type has no room for.
    #[error("there is no address space of type {space_type} with id {id}")]
    UnknownSpace {
        /// Its type.
        space_type: u16,
        /// Its id.
        id: u64,
    },
    /// Longer than any small image.
    #[error("an image of {len_bytes} bytes is longer than {MAX_IMAGE_BYTES}")]
    ImageTooLong {
        /// Its length.
        len_bytes: u64,
    },
    /// Longer than any file name.
    #[error("an image's name of {payload_bytes} bytes")]
    NameTooLong {
        /// Its length.
        payload_bytes: u32,
    },
    /// Image data that decodes to nothing, or to more than a payload.
    #[error("image data of {decoded_bytes} bytes in one frame")]
    DataLength {
        /// What the frame says it decodes to.
        decoded_bytes: u64,
    },
    /// A field without a meaning has a value: the sender means something that this build does not know.
    #[error("a frame of kind {kind:?} with {field} {value}")]
    NotZero {
        /// The kind.
        kind: Kind,
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}
