//! Error codes of ended streams and connections.

/// Everything was sent and answered.
pub const DONE: u32 = 0;
/// The dump is given up and will not be resumed.
pub const ABORTED: u32 = 1;
/// The stream, or the peer, was not requested.
pub const UNWANTED: u32 = 2;
/// The limit on connections or conversations is reached.
pub const BUSY: u32 = 3;
/// The peer violated the protocol, or is too slow.
pub const MISBEHAVED: u32 = 4;
/// The peer's certificate has expired or is denied, or its CA is no longer trusted.
pub const REFUSED: u32 = 5;
/// A bulk stream over TLS was lost: the dump may go on in another conversation.
pub const BULK_LOST: u32 = 6;
