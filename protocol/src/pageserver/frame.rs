//! One frame: `struct page_server_iov` of `criu/page-xfer.c`, in the byte order of the host.

use super::SpaceId;

/// Numbers of the commands: the low 16 bits of a frame's first word.
pub mod command {
    /// Pages follow; opens its space by itself. CRIU 0.5 to 3.4.
    pub const ADD: u16 = 1;
    /// Pages that are the parent's; opens its space by itself. CRIU 0.5 to 3.4.
    pub const HOLE: u16 = 2;
    /// Begin a space. No reply. CRIU 0.6 to 1.3.
    pub const OPEN: u16 = 3;
    /// Begin a space. Reply: one byte, has_parent.
    pub const OPEN2: u16 = 4;
    /// Ask whether the parent has a space. Reply: int32.
    pub const PARENT: u16 = 5;
    /// Pages or a hole, depending on the flags in the upper 16 bits.
    pub const ADD_F: u16 = 6;
    /// Ask for pages (lazy restore); `dst_id` is a bare pid.
    pub const GET: u16 = 7;
    /// Compressed pages, merged for a release after 4.2.
    pub const ADD_F_COMPRESSED: u16 = 8;
    /// The dump is complete. Reply: int32 status.
    pub const CLOSE: u16 = 0x1023;
    /// CLOSE of a client whose socket stays open elsewhere (`--ps-socket`). Reply: int32 status.
    pub const FORCE_CLOSE: u16 = 0x1024;
}

/// Size of a frame in the older dialect, and of the prefix that distinguishes the dialects, bytes.
pub const MIN_FRAME_BYTES: usize = 24;

/// Size of the largest frame, bytes.
pub const MAX_FRAME_BYTES: usize = 32;

/// Frame layout of a peer's release; nothing on the wire names the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// Up to CRIU 4.1: `u32 cmd, u32 nr_pages, u64 vaddr, u64 dst_id`.
    V24,
    /// Layout from CRIU 4.2 on: `u32 cmd, 4 bytes of padding, u64 nr_pages, u64 vaddr, u64 dst_id`.
    V32,
}

impl Dialect {
    /// Returns the size of a frame, bytes.
    #[must_use]
    pub fn frame_bytes(self) -> usize {
        match self {
            Self::V24 => MIN_FRAME_BYTES,
            Self::V32 => MAX_FRAME_BYTES,
        }
    }
}

/// A frame's fields, as they are on the wire: nothing is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Command, see [`command`].
    pub command: u16,
    /// `PE_*` flags; only ADD_F has any.
    pub flags: u16,
    /// Number of pages.
    pub nr_pages: u64,
    /// Address of the first page.
    pub vaddr: u64,
    /// See [`SpaceId::from_dst_id`]; a bare pid in GET.
    pub dst_id: u64,
}

impl Frame {
    /// Makes a frame about a whole space.
    #[must_use]
    pub fn about(command: u16, space: SpaceId) -> Self {
        Self {
            command,
            flags: 0,
            nr_pages: 0,
            vaddr: 0,
            dst_id: space.to_dst_id(),
        }
    }

    /// Decodes; `None` if `bytes` is not exactly a frame of this dialect.
    #[must_use]
    pub fn decode(dialect: Dialect, bytes: &[u8]) -> Option<Self> {
        if bytes.len() != dialect.frame_bytes() {
            return None;
        }
        let word = u32_at(bytes, 0)?;
        let (nr_pages, rest) = match dialect {
            Dialect::V24 => (u64::from(u32_at(bytes, 4)?), 8),
            // Bytes 4..8 are padding: uninitialised stack in CRIU 4.2.1's GET.
            Dialect::V32 => (u64_at(bytes, 8)?, 16),
        };
        Some(Self {
            command: low_half(word),
            flags: low_half(word >> 16),
            nr_pages,
            vaddr: u64_at(bytes, rest)?,
            dst_id: u64_at(bytes, rest + 8)?,
        })
    }

    /// Encodes the frame; `None` if `nr_pages` does not fit the 24-byte dialect.
    #[must_use]
    pub fn encode(&self, dialect: Dialect) -> Option<FrameBytes> {
        let mut frame = FrameBytes {
            bytes: [0; MAX_FRAME_BYTES],
            len: dialect.frame_bytes(),
        };
        let word = u32::from(self.flags) << 16 | u32::from(self.command);
        frame.bytes[..4].copy_from_slice(&word.to_ne_bytes());
        let rest = match dialect {
            Dialect::V24 => {
                frame.bytes[4..8]
                    .copy_from_slice(&u32::try_from(self.nr_pages).ok()?.to_ne_bytes());
                8
            }
            Dialect::V32 => {
                frame.bytes[8..16].copy_from_slice(&self.nr_pages.to_ne_bytes());
                16
            }
        };
        frame.bytes[rest..rest + 8].copy_from_slice(&self.vaddr.to_ne_bytes());
        frame.bytes[rest + 8..rest + 16].copy_from_slice(&self.dst_id.to_ne_bytes());
        Some(frame)
    }
}

/// An encoded frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameBytes {
    bytes: [u8; MAX_FRAME_BYTES],
    len: usize,
}

impl FrameBytes {
    /// Copies a received frame; `None` if it is not as long as a frame of this dialect.
    #[must_use]
    pub fn from_wire(dialect: Dialect, wire: &[u8]) -> Option<Self> {
        let len = dialect.frame_bytes();
        let mut bytes = [0; MAX_FRAME_BYTES];
        bytes
            .get_mut(..len)
            .filter(|frame| frame.len() == wire.len())?
            .copy_from_slice(wire);
        Some(Self { bytes, len })
    }
}

impl AsRef<[u8]> for FrameBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

fn low_half(word: u32) -> u16 {
    u16::try_from(word & 0xffff).unwrap_or(u16::MAX)
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn frames_round_trip(command: u16, flags: u16, nr_pages: u64, vaddr: u64, dst_id: u64) {
            let frame = Frame { command, flags, nr_pages, vaddr, dst_id };
            let encoded = frame.encode(Dialect::V32).unwrap();
            prop_assert_eq!(Frame::decode(Dialect::V32, encoded.as_ref()), Some(frame));

            let short = Frame { nr_pages: nr_pages & 0xffff_ffff, ..frame };
            let encoded = short.encode(Dialect::V24).unwrap();
            prop_assert_eq!(encoded.as_ref().len(), 24);
            prop_assert_eq!(Frame::decode(Dialect::V24, encoded.as_ref()), Some(short));
        }

        #[test]
        fn a_flipped_bit_changes_the_frame(bit in 0_usize..256, nr_pages: u32, vaddr: u64, dst_id: u64) {
            let frame = Frame { command: command::ADD_F, flags: 4, nr_pages: nr_pages.into(), vaddr, dst_id };
            for dialect in [Dialect::V24, Dialect::V32] {
                let mut bytes = frame.encode(dialect).unwrap().as_ref().to_vec();
                let Some(byte) = bytes.get_mut(bit / 8) else { continue };
                *byte ^= 1 << (bit % 8);
                let padding = dialect == Dialect::V32 && (4..8).contains(&(bit / 8));
                prop_assert_eq!(Frame::decode(dialect, &bytes) == Some(frame), padding);
            }
        }
    }

    #[test]
    fn only_whole_frames_decode() {
        for len in 0..=40 {
            let bytes = vec![0; len];
            assert_eq!(Frame::decode(Dialect::V24, &bytes).is_some(), len == 24);
            assert_eq!(Frame::decode(Dialect::V32, &bytes).is_some(), len == 32);
        }
    }

    #[test]
    fn the_older_dialect_cannot_say_two_to_the_32_pages() {
        let frame = Frame {
            command: command::HOLE,
            flags: 0,
            nr_pages: 1 << 32,
            vaddr: 0,
            dst_id: 0,
        };
        assert_eq!(frame.encode(Dialect::V24), None);
        assert!(frame.encode(Dialect::V32).is_some());
    }
}
