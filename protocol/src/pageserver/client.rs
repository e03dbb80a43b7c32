//! Frames that CRIU sends, for tests, fake peers and replays.

use super::frame::{Frame, FrameBytes, command};
use super::{Dialect, PE_PARENT, SpaceId};

/// Encoder of frames in one dialect. Keeps no state: a fake peer may send any frames, in any order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoder {
    dialect: Dialect,
}

impl Encoder {
    /// Makes an encoder for a dialect.
    #[must_use]
    pub fn new(dialect: Dialect) -> Self {
        Self { dialect }
    }

    /// Returns the dialect of the frames.
    #[must_use]
    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Encodes OPEN2: begins a space; the reply is one byte.
    #[must_use]
    pub fn open(&self, space: SpaceId) -> FrameBytes {
        self.encode(Frame::about(command::OPEN2, space))
    }

    /// Encodes OPEN, as CRIU 0.6 to 1.3 sent it; there is no reply.
    #[must_use]
    pub fn open_legacy(&self, space: SpaceId) -> FrameBytes {
        self.encode(Frame::about(command::OPEN, space))
    }

    /// Encodes PARENT: asks whether the parent has this space. The reply is an int32.
    #[must_use]
    pub fn query_parent(&self, space: SpaceId) -> FrameBytes {
        self.encode(Frame::about(command::PARENT, space))
    }

    /// Encodes ADD_F with any flags. With [`super::PE_PRESENT`] the bytes of `nr_pages` pages must follow.
    #[must_use]
    pub fn pages(&self, space: SpaceId, vaddr: u64, nr_pages: u32, flags: u16) -> FrameBytes {
        let about = Frame::about(command::ADD_F, space);
        self.encode(Frame {
            flags,
            nr_pages: nr_pages.into(),
            vaddr,
            ..about
        })
    }

    /// Encodes ADD_F with [`PE_PARENT`]: these pages are the parent's.
    #[must_use]
    pub fn hole(&self, space: SpaceId, vaddr: u64, nr_pages: u32) -> FrameBytes {
        self.pages(space, vaddr, nr_pages, PE_PARENT)
    }

    /// Encodes ADD, as CRIU up to 3.4 sent it; the bytes of `nr_pages` pages must follow.
    #[must_use]
    pub fn pages_legacy(&self, space: SpaceId, vaddr: u64, nr_pages: u32) -> FrameBytes {
        let about = Frame::about(command::ADD, space);
        self.encode(Frame {
            nr_pages: nr_pages.into(),
            vaddr,
            ..about
        })
    }

    /// Encodes HOLE, as CRIU up to 3.4 sent it.
    #[must_use]
    pub fn hole_legacy(&self, space: SpaceId, vaddr: u64, nr_pages: u32) -> FrameBytes {
        let about = Frame::about(command::HOLE, space);
        self.encode(Frame {
            nr_pages: nr_pages.into(),
            vaddr,
            ..about
        })
    }

    /// Encodes GET: requests pages.
    #[must_use]
    pub fn get(&self, pid: u32, vaddr: u64, nr_pages: u32) -> FrameBytes {
        self.encode(Frame {
            command: command::GET,
            flags: 0,
            nr_pages: nr_pages.into(),
            vaddr,
            dst_id: pid.into(),
        })
    }

    /// Encodes CLOSE: the dump is complete; the reply is an int32.
    #[must_use]
    pub fn close(&self) -> FrameBytes {
        self.encode(Frame {
            command: command::CLOSE,
            flags: 0,
            nr_pages: 0,
            vaddr: 0,
            dst_id: 0,
        })
    }

    /// Encodes FORCE_CLOSE, which CRIU sends instead of CLOSE over `--ps-socket`.
    #[must_use]
    pub fn force_close(&self) -> FrameBytes {
        self.encode(Frame {
            command: command::FORCE_CLOSE,
            flags: 0,
            nr_pages: 0,
            vaddr: 0,
            dst_id: 0,
        })
    }

    fn encode(&self, frame: Frame) -> FrameBytes {
        frame
            .encode(self.dialect)
            .expect("nr_pages came from a u32, which either dialect has room for")
    }
}
