//! Sans-I/O codecs of Permafrost: bytes and events in, frames and events out.
//!
//! Nothing here opens a socket or a file, or knows of a clock.

/// Bytes in a page of a process's memory: x86-64's, and the usual one of ARM kernels. Images, map nodes, digests and
/// wire frames count in pages; the daemon refuses machines with others.
pub const PAGE_SIZE: usize = 4096;

/// [`PAGE_SIZE`] for addresses and lengths of files.
pub const PAGE_BYTES: u64 = PAGE_SIZE as u64;

pub mod access;
pub mod control;
pub mod images;
pub mod manifest;
pub mod pageserver;
pub mod streamer;
pub mod versions;
pub mod wire;
