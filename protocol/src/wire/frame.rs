//! Frames of a bulk stream: a fixed header of 32 bytes, and a payload.
//!
//! ```text
//!  0        1        2                 4                          8
//!  ┌────────┬────────┬─────────────────┬──────────────────────────┐
//!  │ kind   │ coding │ flags           │ pages                    │
//!  ├────────┴────────┴─────────────────┴──────────────────────────┤
//!  │ sequence                                                     │
//!  ├──────────────────────────────────────────────────────────────┤
//!  │ index                                                        │
//!  ├───────────────────────────────────┬──────────────────────────┤
//!  │ payload_bytes                     │ header_crc32             │
//!  └───────────────────────────────────┴──────────────────────────┘
//! ```
//!
//! All integers are little-endian. `sequence` counts the frames of one dump from 0, over all connections that it
//! takes; `header_crc32` is the CRC32 of the 28 bytes before it. The payload's own integrity is QUIC's, and what is
//! stored of it is compared by [content digest](super::message::Closed) before a seal.

/// Bytes of a header.
pub const HEADER_BYTES: usize = 32;

/// Longest payload of a frame, bytes: what a front end hands on at once, and the most a receiver must hold.
pub const MAX_PAYLOAD_BYTES: u32 = 256 << 10;

/// What a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// An address space begins: `index` its id, `pages` its `pages_id`, `flags` its type
    /// ([`crate::manifest::SpaceType`]). No payload.
    Space = 1,
    /// Pages from `index` (a virtual page number), `flags` CRIU's. The payload decodes to `pages` pages.
    Pages = 2,
    /// Pages that are all zero. No payload.
    Zero = 3,
    /// Pages that the receiver has in the parent at the same place. No payload.
    Parent = 4,
    /// All address spaces are in. No payload. Answered by [`super::message::Closed`] once everything is durable.
    Close = 5,
    /// A small image begins: `index` its length in bytes; the payload is its name.
    Image = 6,
    /// The next bytes of the image.
    ImageData = 7,
    /// All images are in. No payload. Answered by [`super::message::Prepared`].
    Prepare = 8,
}

/// How a payload is encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Coding {
    /// As it is.
    #[default]
    Raw = 0,
    /// One zstd frame.
    Zstd = 1,
}

/// What stands before a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: Kind,
    /// How the payload is encoded.
    pub coding: Coding,
    /// See [`Kind`].
    pub flags: u16,
    /// See [`Kind`].
    pub pages: u32,
    /// Number of the frame in its dump.
    pub sequence: u64,
    /// See [`Kind`].
    pub index: u64,
    /// Bytes of payload that follow.
    pub payload_bytes: u32,
}

/// First bytes of a bulk stream: which conversation it belongs to. 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preamble {
    /// The session (a dump on its way in) or the fetch (pages on their way out).
    pub id: [u8; 16],
}
