//! Frames that CRIU sends, for tests, fake peers and replays.

use super::frame::{Frame, FrameBytes, command};
use super::{Dialect, PE_PARENT, SpaceId};

/// Builds frames in one dialect. Keeps no state: a fake peer may send what it likes, in any order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoder {
    dialect: Dialect,
}

impl Encoder {
    /// An encoder for a dialect.
    #[must_use]
    pub fn new(dialect: Dialect) -> Self {
        Self { dialect }
    }

    /// Returns the dialect of the frames.
    #[must_use]
    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// OPEN2: begin a space; one byte is answered.
    #[must_use]
    pub fn open(&self, space: SpaceId) -> FrameBytes {
        self.encode(Frame::about(command::OPEN2, space))
    }

    /// OPEN, as CRIU 0.6 to 1.3 sent it; nothing is answered.
    #[must_use]
    pub fn open_legacy(&self, space: SpaceId) -> FrameBytes {
        self.encode(Frame::about(command::OPEN, space))
    }

    /// PARENT: does the parent have this space? An int32 is answered.
    #[must_use]
    pub fn query_parent(&self, space: SpaceId) -> FrameBytes {
        self.encode(Frame::about(command::PARENT, space))
    }

    /// ADD_F with any flags. With [`super::PE_PRESENT`] the bytes of `nr_pages` pages must follow.
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

    /// ADD_F with [`PE_PARENT`]: these pages are the parent's.
    #[must_use]
    pub fn hole(&self, space: SpaceId, vaddr: u64, nr_pages: u32) -> FrameBytes {
        self.pages(space, vaddr, nr_pages, PE_PARENT)
    }

    /// ADD, as CRIU up to 3.4 sent it; the bytes of `nr_pages` pages must follow.
    #[must_use]
    pub fn pages_legacy(&self, space: SpaceId, vaddr: u64, nr_pages: u32) -> FrameBytes {
        let about = Frame::about(command::ADD, space);
        self.encode(Frame {
            nr_pages: nr_pages.into(),
            vaddr,
            ..about
        })
    }

    /// HOLE, as CRIU up to 3.4 sent it.
    #[must_use]
    pub fn hole_legacy(&self, space: SpaceId, vaddr: u64, nr_pages: u32) -> FrameBytes {
        let about = Frame::about(command::HOLE, space);
        self.encode(Frame {
            nr_pages: nr_pages.into(),
            vaddr,
            ..about
        })
    }

    /// GET: ask for pages.
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

    /// CLOSE: the dump is complete; an int32 is answered.
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

    /// FORCE_CLOSE: what CRIU sends instead over `--ps-socket`.
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
