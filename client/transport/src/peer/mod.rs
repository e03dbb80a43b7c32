//! QUIC between nodes: the shell around [`permafrost_protocol::wire`].
//!
//! ```text
//!   threads of the store                tasks of the runtime               threads of the peer's store
//!
//!   DumpSender ─push─▶ window ─▶ driver ═══ bulk stream ═══▶ intake ─▶ queue ─▶ FrameSource ─▶ Handler::dump
//!        ▲ waits while it is full  │◀── acknowledged ── conversation ──┘ full: stops reading
//!        └── Closed, Prepared ◀────┘◀── Replies ────────────────────────────────────┘
//! ```
//!
//! Pages are copied once into a window that is bounded, and stay there until the peer has taken them in. Whoever
//! pushes waits while the window is full: that is how a slow peer slows CRIU down, instead of filling memory. A
//! lost connection is made again, and the dump goes on behind the last frame that the peer has.
//!
//! The blocking calls must not be made on threads of the runtime.

mod coding;
mod dump;
mod error;
mod fetch;
mod intake;
mod network;
mod options;
mod outflow;
mod pool;
mod reset;
mod router;
mod serve;
mod socket;
mod stream;

pub use coding::decode;
pub use dump::{DumpSender, Progress};
pub use error::PeerError;
pub use fetch::FetchReader;
pub use intake::{FrameSource, Replies};
pub use network::{Addresses, Network, quic_endpoint};
pub use options::{Compression, Options};
pub use outflow::FrameSink;
pub use serve::{ApiServer, ApiStream, Endpoint, Handler};

use bytes::Bytes;
use permafrost_protocol::wire::frame::Header;

/// Codes that streams and connections end with.
pub mod code {
    /// Everything is said.
    pub const DONE: u32 = 0;
    /// The dump is given up: no resume comes.
    pub const ABORTED: u32 = 1;
    /// Nobody asked for this stream, or for this peer.
    pub const UNWANTED: u32 = 2;
    /// More connections or conversations than are served.
    pub const BUSY: u32 = 3;
    /// The peer does not keep to the protocol, or is too slow.
    pub const MISBEHAVED: u32 = 4;
    /// The peer's certificate is over or denied, or its CA is no longer trusted.
    pub const REFUSED: u32 = 5;
}

/// A frame as a receiver sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Header of the frame; `coding` and `payload_bytes` are those of the encoded frame that was received.
    pub header: Header,
    /// Decoded payload: as many bytes as [`Header::decoded_bytes`] says.
    pub payload: Bytes,
}
