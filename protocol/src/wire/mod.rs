//! Wire protocol between nodes, and between an agent and a node, over QUIC.
//!
//! A connection speaks [`ALPN`]. Each bidirectional stream is one conversation: a [`message::Hello`] and a
//! [`message::Request`] one way, [`message::Reply`] the other, framed as control messages are
//! ([`crate::control::framing`]). Pages travel beside it, on a unidirectional *bulk* stream that begins with a
//! [`frame::Preamble`] and then consists of [`frame::Header`]s, each with its payload. [`sender`] and [`receiver`]
//! are the two ends of that stream, over all connections of a dump; [`conversation`] is the two ends of a dump as a
//! whole, which nodes and agents run, and which are tested over a simulated network.

pub mod code;
pub mod conversation;
pub mod frame;
pub mod message;
pub mod receiver;
pub mod sender;

/// ALPN protocol name; the number is that of the whole wire.
pub const ALPN: &[u8] = b"permafrost/1";

/// Version of the messages; a peer with another is refused with words.
pub const VERSION: u32 = 1;
