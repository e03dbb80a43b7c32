//! Conversations between nodes, over QUIC: the shell around [`permafrost_protocol::wire`].
//!
//! ```text
//!   threads of the store                tasks of the runtime               threads of the peer's store
//!
//!   DumpSender ─push─▶ window ─▶ driver ═══ bulk stream ═══▶ intake ─▶ queue ─▶ FrameSource ─▶ Handler::dump
//!        ▲ waits while it is full  │◀── acknowledged ── conversation ──┘ full: stops reading
//!        └── Closed, Prepared ◀────┘◀── Replies ────────────────────────────────────┘
//! ```
//!
//! Pages are copied once into a window of limited size, and stay there until the peer has acknowledged them.
//! The pushing thread waits while the window is full: so a slow peer slows CRIU down, instead of filling
//! memory. A lost connection is restored, and the dump continues behind the last frame that the peer has.
//!
//! The bulk stream is a TLS connection over TCP where the node takes one, and else a stream of the QUIC connection.
//!
//! The blocking calls must not be made on threads of the runtime.

mod bulk;
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
pub use dump::{DumpProgress, DumpSender};
pub use error::PeerError;
pub use fetch::FetchReader;
pub use intake::{FrameSource, Replies};
pub use network::{Addresses, Network, quic_endpoint, reached_by};
pub use options::{Compression, PeerOptions};
pub use outflow::FrameSink;
pub use serve::{ApiServer, ApiStream, Endpoint, Handler};

use bytes::Bytes;
pub use permafrost_protocol::wire::code;
use permafrost_protocol::wire::frame::Header;

/// A frame as a receiver sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceivedFrame {
    /// Header of the frame; `coding` and `payload_bytes` are those of the encoded frame that was received.
    pub header: Header,
    /// Decoded payload: as many bytes as [`Header::decoded_bytes`] says.
    pub payload: Bytes,
}
