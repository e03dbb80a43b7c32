//! Sans-I/O codecs of Permafrost: bytes and events in, frames and events out.
//!
//! Nothing here opens a socket or a file, or knows of a clock.

pub mod access;
pub mod control;
pub mod images;
pub mod manifest;
pub mod pageserver;
pub mod session;
pub mod streamer;
pub mod wire;
