//! CRIU's page-server protocol, which `criu dump --page-server` speaks.
//!
//! Sans-I/O. [`PageServer`] is the receiving side: call [`PageServer::want`] for the next input, read that input from
//! the socket, pass it in, act on the event. [`client`] builds the frames that CRIU sends, for tests, fake peers and
//! replays; [`recording`] keeps whole conversations. docs/protocol.md has the byte diagrams.
//!
//! Facts are from CRIU's `criu/page-xfer.c`, releases 4.1 (24-byte frames) and 4.2 (32-byte frames).

pub mod client;
mod detect;
mod error;
mod event;
mod frame;
pub mod recording;
mod server;
mod space;

pub use error::ProtocolError;
pub use event::{Answer, Event, PageAddr, ReplyBytes, Want};
pub use frame::{Dialect, Frame, FrameBytes, MAX_FRAME_BYTES, MIN_FRAME_BYTES, command};
pub use server::PageServer;
pub use space::{SpaceId, UnknownSpaceType};

/// Upper limit of addresses: no page lies at or above it. The end of user space with five-level page tables.
pub const MAX_ADDRESS: u64 = 1 << 57;

/// Maximum number of address spaces that one conversation may open. Linux has at most 2^22 pids, but a peer that
/// opens more than this is hardly dumping a process tree, and each one costs memory.
pub const MAX_SPACES: usize = 1 << 16;

/// Most pages that one GET may request. CRIU's requests 1,024 at most (`MAX_XFER_LEN` in `criu/uffd.c`).
pub const MAX_GET_PAGES: u64 = 65_535;

/// The pages are the parent's (`PE_PARENT`).
pub const PE_PARENT: u16 = 1;
/// The pages may be restored lazily (`PE_LAZY`).
pub const PE_LAZY: u16 = 2;
/// The pages' bytes follow (`PE_PRESENT`).
pub const PE_PRESENT: u16 = 4;
