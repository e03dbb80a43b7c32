//! Inputs and outputs of [`super::PageServer`].

use super::SpaceId;

/// Next input that the core needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Exactly that many bytes, for [`super::PageServer::frame`]. **May be 0**: an event is left over from the
    /// previous frame (a legacy ADD both opens its space and carries pages); call `frame(&[])` without reading.
    Frame {
        /// Number of bytes, at most [`super::MAX_FRAME_BYTES`].
        bytes: usize,
    },
    /// Pages of this frame, as many bytes as are left: take any whole number of pages and report it to
    /// [`super::PageServer::payload`].
    Payload {
        /// Number of bytes, a multiple of the page size.
        bytes: u64,
    },
    /// The last event has not been answered: [`super::PageServer::reply`].
    Reply,
    /// No input but the peer's end of file: read and drop all bytes until then. (A client of the 32-byte dialect
    /// whose first frame is CLOSE has 8 bytes more on the way.)
    Eof,
}

/// Meaning of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A space begins, and the one before it ends. With `wants_reply` answer [`Answer::HasParent`].
    Open {
        /// Id of the space.
        space: SpaceId,
        /// True if the client waits for an answer.
        wants_reply: bool,
    },
    /// Does the parent have this space? Answer [`Answer::HasParent`].
    QueryParent {
        /// Id of the space.
        space: SpaceId,
    },
    /// Pages of the open space, whose bytes follow ([`Want::Payload`]). Flags have `PE_PRESENT`.
    Pages {
        /// Id of the space.
        space: SpaceId,
        /// Address of the first page, a multiple of the page size.
        vaddr: u64,
        /// Number of pages, at least 1; the range ends below [`super::MAX_ADDRESS`].
        nr_pages: u64,
        /// `PE_PRESENT`, perhaps with `PE_LAZY`.
        flags: u16,
    },
    /// Pages of the open space that are the parent's.
    Hole {
        /// Id of the space.
        space: SpaceId,
        /// Address of the first page, a multiple of the page size.
        vaddr: u64,
        /// Number of pages, at least 1; the range ends below [`super::MAX_ADDRESS`].
        nr_pages: u64,
        /// `PE_PARENT`, perhaps with `PE_LAZY`.
        flags: u16,
    },
    /// The client requests pages. The answer is a frame (ADD_F, `PE_PRESENT`, the same vaddr and dst_id) and the
    /// pages' bytes; further frames may come before it.
    Get {
        /// Pid of the process.
        pid: u32,
        /// Address of the first page, a multiple of the page size.
        vaddr: u64,
        /// Number of pages, at least 1.
        nr_pages: u64,
    },
    /// The dump is complete. Answer [`Answer::Status`]: CRIU kills the task only on 0.
    Close {
        /// True for FORCE_CLOSE: the client's socket may stay open, so do not wait for its end of file for ever.
        force: bool,
    },
}

/// An answer to an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Answer to [`Event::Open`] and [`Event::QueryParent`].
    HasParent(bool),
    /// Answer to [`Event::Close`]: 0, or the errno with which the dump is refused.
    Status(i32),
}

/// A reply's bytes, to be sent at once and in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyBytes {
    pub(super) bytes: [u8; 4],
    pub(super) len: usize,
}

impl AsRef<[u8]> for ReplyBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Address at which pages of a payload belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageAddr {
    /// Address of the first of them.
    pub vaddr: u64,
}
