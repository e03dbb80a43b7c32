//! Errors that a peer can make.

use super::frame::MIN_FRAME_BYTES;
use super::{MAX_ADDRESS, MAX_GET_PAGES, MAX_SPACES, SpaceId, UnknownSpaceType};

/// A peer did not keep to the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// The first frame fits neither dialect.
    #[error("the first frame is neither a 24-byte nor a 32-byte CRIU frame: {first:02x?}")]
    UnknownDialect {
        /// First 24 bytes of the frame.
        first: [u8; MIN_FRAME_BYTES],
    },
    /// A command that no CRIU release has.
    #[error("unknown command {:#x} (first word {word:#010x}); is this a CRIU page-server client?", word & 0xffff)]
    UnknownCommand {
        /// The first word: flags and command.
        word: u32,
    },
    /// Command 8: compressed pages.
    #[error("command 8 (compressed pages) is not supported; run criu without page compression")]
    Compressed,
    /// Flags on a command that has none, or a combination that means nothing.
    #[error("flags {flags:#x} make no sense with command {command}")]
    BadFlags {
        /// Number of the command.
        command: u16,
        /// Flags of the frame.
        flags: u16,
    },
    /// A pagemap type that no CRIU release sent.
    #[error(transparent)]
    UnknownSpace(#[from] UnknownSpaceType),
    /// ADD_F before any space was opened.
    #[error("pages before any address space was opened")]
    PagesBeforeOpen,
    /// ADD_F for another space than the open one.
    #[error("pages for {found} while {open} is open")]
    NotTheOpenSpace {
        /// The open one.
        open: SpaceId,
        /// The one in the frame.
        found: SpaceId,
    },
    /// A space opened a second time.
    #[error("{space} was opened twice")]
    OpenedTwice {
        /// Id of the space.
        space: SpaceId,
    },
    /// More spaces than any process tree has.
    #[error("more than {MAX_SPACES} address spaces in one dump")]
    TooManySpaces,
    /// An address inside a page.
    #[error("address {vaddr:#x} is not a multiple of the page size, 4096")]
    Misaligned {
        /// Address in the frame.
        vaddr: u64,
    },
    /// A frame about no pages.
    #[error("a frame of no pages at {vaddr:#x}")]
    NoPages {
        /// Address in the frame.
        vaddr: u64,
    },
    /// The range ends beyond any address space.
    #[error("{nr_pages} pages at {vaddr:#x} end beyond the highest address, {MAX_ADDRESS:#x}")]
    BeyondAddressSpace {
        /// Address of the first page.
        vaddr: u64,
        /// The number of pages.
        nr_pages: u64,
    },
    /// The range begins before the end of the one before it. Recoverable.
    #[error(
        "{space}: pages at {vaddr:#x} overlap or precede what came before, which ended at {expected:#x}"
    )]
    NotAscending {
        /// Id of the space.
        space: SpaceId,
        /// Address at which the range begins.
        vaddr: u64,
        /// The least address it could have begun at.
        expected: u64,
    },
    /// Lazy pages that stay at the client (`criu dump --lazy-pages`). Recoverable.
    #[error(
        "{space}: {nr_pages} pages at {vaddr:#x} were announced but not sent (criu dump --lazy-pages): the dump would not be whole"
    )]
    PagesWithheld {
        /// Id of the space.
        space: SpaceId,
        /// Address of the first page.
        vaddr: u64,
        /// The number of pages.
        nr_pages: u64,
    },
    /// GET with more pages than any client requests.
    #[error("GET of {nr_pages} pages at {vaddr:#x}: at most {MAX_GET_PAGES} at once")]
    TooManyPages {
        /// Address of the first page.
        vaddr: u64,
        /// The number of pages.
        nr_pages: u64,
    },
    /// GET with something that is no pid.
    #[error("GET names {dst_id:#x}, which is not a pid")]
    BadPid {
        /// Value of the frame's `dst_id`.
        dst_id: u64,
    },
    /// The connection ended within a frame, its pages, or an event left over.
    #[error("the connection ended {missing_bytes} bytes before the end of a frame or its pages")]
    Truncated {
        /// Number of bytes that are missing.
        missing_bytes: u64,
    },
    /// The connection ended between frames, but no CLOSE came: CRIU gave the dump up.
    #[error("the connection ended without CLOSE: the dump was aborted")]
    EndedWithoutClose,
    /// The caller handed over another number of bytes than was wanted.
    #[error("{found} bytes where {expected} were wanted")]
    WrongLength {
        /// Length that [`super::PageServer::want`] returned, bytes; 0 where it wanted no frame.
        expected: usize,
        /// Length that the caller handed over, bytes.
        found: usize,
    },
}

impl ProtocolError {
    /// Returns true if the frame was understood despite the error, so that the conversation can go on.
    ///
    /// The dump is lost, but the frame boundaries are known: the caller reads and drops the rest and answers CLOSE
    /// with a non-zero status, so that CRIU reports a refusal and lets the task live. After any other error the
    /// connection can only be closed (CRIU then lets the task live too, but reports a less precise error).
    #[must_use]
    pub fn is_recoverable(&self) -> bool {
        matches!(self, Self::NotAscending { .. } | Self::PagesWithheld { .. })
    }
}
