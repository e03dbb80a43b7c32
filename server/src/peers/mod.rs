//! Service for peers: other nodes, agents, readers and operators.

mod handler;
mod replica;

use permafrost_protocol::control::{self, ErrorCode};
use permafrost_transport::peer::PeerError;

pub use handler::{Copying, NodeHandler};

/// Returns the error for a conversation whose peer has disconnected. Only the log shows it.
pub(crate) fn gone(error: &PeerError) -> control::Error {
    control::Error {
        code: ErrorCode::SessionFailed.into(),
        message: error.to_string(),
        hint: String::new(),
    }
}

/// Returns the error for an invalid message of a peer.
pub(crate) fn invalid(message: &str) -> control::Error {
    control::Error {
        code: ErrorCode::Invalid.into(),
        message: message.to_owned(),
        hint: String::new(),
    }
}
