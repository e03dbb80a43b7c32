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
//! takes; `header_crc32` is the CRC32 of the 28 bytes before it. QUIC protects the payload's own integrity, and the
//! stored pages are compared by [content digest](super::message::Closed) before a seal.
//!
//! A field that a kind does not use is 0, and a frame with another value is refused, so that the field can get a
//! meaning later.

mod error;

pub use error::FrameError;

use crate::PAGE_BYTES;
use crate::manifest::{MAX_FILE_NAME_BYTES, SpaceType};
use crate::pageserver::{MAX_ADDRESS, SpaceId};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 32;

/// Longest payload of a frame, bytes: the piece that a front end passes on at once, and the most that a receiver must
/// hold.
pub const MAX_PAYLOAD_BYTES: u32 = 256 << 10;

/// Maximum number of pages of one [`Kind::Pages`] frame: they fit a payload uncompressed.
pub const MAX_PAGES: u32 = 64;

/// Longest small image, bytes: more than a region holds. CRIU's are of some kilobytes, but the contents of a tmpfs
/// are one, and as long as the tmpfs. Images are streamed, and take no memory of their length anywhere.
pub const MAX_IMAGE_BYTES: u64 = 1 << 40;

/// Bytes of a preamble.
pub const PREAMBLE_BYTES: usize = 16;

const _: () = assert!(MAX_PAGES as u64 * PAGE_BYTES == MAX_PAYLOAD_BYTES as u64);

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// An address space begins: `index` its id, `pages` its `pages_id`, `flags` its type
    /// ([`crate::manifest::SpaceType`]). No payload.
    Space = 1,
    /// Pages from `index` (a virtual page number), `flags` CRIU's. The payload decodes to `pages` pages.
    Pages = 2,
    /// Pages that are all zero, `flags` and `index` as above. No payload.
    Zero = 3,
    /// Pages that the receiver has in the parent at the same place, `flags` and `index` as above. No payload.
    Parent = 4,
    /// All address spaces are in. No payload. Answered by [`super::message::Closed`] once everything is durable.
    Close = 5,
    /// A small image begins: `index` its length in bytes; the payload is its name.
    Image = 6,
    /// Next bytes of the image: `index` is their decoded length, at most [`MAX_PAYLOAD_BYTES`].
    ImageData = 7,
    /// All images are in. No payload. Answered by [`super::message::Prepared`].
    Prepare = 8,
}

/// Encoding of a payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Coding {
    /// The payload is not encoded.
    #[default]
    Raw = 0,
    /// One zstd frame. Only for [`Kind::Pages`] and [`Kind::ImageData`].
    Zstd = 1,
}

/// Header that stands before a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Kind of the frame.
    pub kind: Kind,
    /// Encoding of the payload.
    pub coding: Coding,
    /// Flags; [`Kind`] gives their meaning.
    pub flags: u16,
    /// Number of pages; [`Kind`] gives its meaning.
    pub pages: u32,
    /// Number of the frame in its dump.
    pub sequence: u64,
    /// Position or length; [`Kind`] gives its meaning.
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

impl Kind {
    /// Returns the kind of a byte; `None` for a kind that this build does not know.
    #[must_use]
    pub fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Space,
            2 => Self::Pages,
            3 => Self::Zero,
            4 => Self::Parent,
            5 => Self::Close,
            6 => Self::Image,
            7 => Self::ImageData,
            8 => Self::Prepare,
            _ => return None,
        })
    }

    /// Returns true if a payload follows.
    #[must_use]
    pub fn has_payload(self) -> bool {
        matches!(self, Self::Pages | Self::Image | Self::ImageData)
    }
}

impl Coding {
    /// Returns the coding of a byte; `None` for a coding that this build does not know.
    #[must_use]
    pub fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::Raw),
            1 => Some(Self::Zstd),
            _ => None,
        }
    }
}

impl Header {
    /// Encodes the header. A header that [`Header::check`] refuses is encoded nevertheless; the peer refuses it.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind as u8;
        bytes[1] = self.coding as u8;
        bytes[2..4].copy_from_slice(&self.flags.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.pages.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.index.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.payload_bytes.to_le_bytes());
        let crc32 = crc32fast::hash(&bytes[..28]);
        bytes[28..].copy_from_slice(&crc32.to_le_bytes());
        bytes
    }

    /// Reads a header and checks it.
    ///
    /// # Errors
    /// The header is damaged, of a kind or coding that this build does not know, or has an impossible value.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let stored = u32::from_le_bytes(field(bytes, 28));
        let computed = crc32fast::hash(&bytes[..28]);
        if stored != computed {
            return Err(FrameError::Checksum { stored, computed });
        }
        let kind = Kind::from_byte(bytes[0]).ok_or(FrameError::UnknownKind { kind: bytes[0] })?;
        let coding =
            Coding::from_byte(bytes[1]).ok_or(FrameError::UnknownCoding { coding: bytes[1] })?;
        let header = Self {
            kind,
            coding,
            flags: u16::from_le_bytes(field(bytes, 2)),
            pages: u32::from_le_bytes(field(bytes, 4)),
            sequence: u64::from_le_bytes(field(bytes, 8)),
            index: u64::from_le_bytes(field(bytes, 16)),
            payload_bytes: u32::from_le_bytes(field(bytes, 24)),
        };
        header.check()?;
        Ok(header)
    }

    /// Checks the rules that concern one header alone; [`super::receiver::Receiver`] checks the order of frames.
    ///
    /// # Errors
    /// A field has an impossible value.
    pub fn check(&self) -> Result<(), FrameError> {
        let Self {
            kind,
            coding,
            flags,
            pages,
            index,
            payload_bytes,
            ..
        } = *self;
        if payload_bytes > MAX_PAYLOAD_BYTES {
            return Err(FrameError::PayloadTooLong { payload_bytes });
        }
        if kind.has_payload() == (payload_bytes == 0) {
            return Err(FrameError::Payload {
                kind,
                payload_bytes,
            });
        }
        if coding != Coding::Raw && !matches!(kind, Kind::Pages | Kind::ImageData) {
            return Err(FrameError::Coding { kind, coding });
        }
        let zero = |field: &'static str, value: u64| match value {
            0 => Ok(()),
            _ => Err(FrameError::NotZero { kind, field, value }),
        };
        match kind {
            Kind::Space => self.space().map(|_| ()),
            Kind::Pages => {
                if !(1..=MAX_PAGES).contains(&pages) {
                    return Err(FrameError::Pages { kind, pages });
                }
                check_range(index, pages)?;
                self.check_length(u64::from(pages) * PAGE_BYTES)
            }
            Kind::Zero | Kind::Parent => {
                if pages == 0 {
                    return Err(FrameError::Pages { kind, pages });
                }
                check_range(index, pages)
            }
            Kind::Image => {
                zero("flags", flags.into())?;
                zero("pages", pages.into())?;
                if index > MAX_IMAGE_BYTES {
                    return Err(FrameError::ImageTooLong { len_bytes: index });
                }
                if usize::try_from(payload_bytes).is_ok_and(|bytes| bytes <= MAX_FILE_NAME_BYTES) {
                    return Ok(());
                }
                Err(FrameError::NameTooLong { payload_bytes })
            }
            Kind::ImageData => {
                zero("flags", flags.into())?;
                zero("pages", pages.into())?;
                if !(1..=MAX_PAYLOAD_BYTES.into()).contains(&index) {
                    return Err(FrameError::DataLength {
                        decoded_bytes: index,
                    });
                }
                self.check_length(index)
            }
            Kind::Close | Kind::Prepare => {
                zero("flags", flags.into())?;
                zero("pages", pages.into())?;
                zero("index", index)
            }
        }
    }

    /// Returns the space that a [`Kind::Space`] begins.
    ///
    /// # Errors
    /// There is no space of this type and id, or the header is of another kind.
    pub fn space(&self) -> Result<SpaceId, FrameError> {
        let unknown = FrameError::UnknownSpace {
            space_type: self.flags,
            id: self.index,
        };
        if self.kind != Kind::Space {
            return Err(unknown);
        }
        match SpaceType::try_from(i32::from(self.flags)) {
            Ok(SpaceType::Process) => u32::try_from(self.index).ok().map(SpaceId::process),
            Ok(SpaceType::SharedMemory) => SpaceId::shared_memory(self.index),
            Err(_) => None,
        }
        .ok_or(unknown)
    }

    /// Returns the number of bytes that the payload decodes to: of pages, image data and names; 0 for other kinds.
    #[must_use]
    pub fn decoded_bytes(&self) -> u64 {
        match self.kind {
            Kind::Pages => u64::from(self.pages) * PAGE_BYTES,
            Kind::ImageData => self.index,
            Kind::Image => self.payload_bytes.into(),
            Kind::Space | Kind::Zero | Kind::Parent | Kind::Close | Kind::Prepare => 0,
        }
    }

    /// Checks that a raw payload is as long as the bytes that it decodes to. The length of a compressed one proves
    /// nothing.
    fn check_length(&self, decoded_bytes: u64) -> Result<(), FrameError> {
        if self.coding == Coding::Raw && u64::from(self.payload_bytes) != decoded_bytes {
            return Err(FrameError::RawLength {
                kind: self.kind,
                payload_bytes: self.payload_bytes,
                decoded_bytes,
            });
        }
        Ok(())
    }
}

impl Preamble {
    /// Encodes the preamble.
    #[must_use]
    pub fn encode(&self) -> [u8; PREAMBLE_BYTES] {
        self.id
    }

    /// Decodes a preamble. Every id is valid; the endpoint knows whether a conversation waits for it.
    #[must_use]
    pub fn decode(bytes: &[u8; PREAMBLE_BYTES]) -> Self {
        Self { id: *bytes }
    }
}

/// Pages lie within the address space that the page-server protocol knows.
fn check_range(index: u64, pages: u32) -> Result<(), FrameError> {
    match index.checked_add(pages.into()) {
        Some(end) if end <= MAX_ADDRESS / PAGE_BYTES => Ok(()),
        _ => Err(FrameError::BeyondAddressSpace { index, pages }),
    }
}

/// Returns `N` bytes at `at`, which the callers choose within the header.
fn field<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|offset| bytes[at + offset])
}
