//! A node's side of what peers ask for: other nodes, agents, readers and operators.

mod handler;
mod replica;

use permafrost_protocol::control::{self, ErrorCode};
use permafrost_transport::peer::PeerError;

pub use handler::{Copying, NodeHandler};

/// The peer is gone, so nobody hears this; the log does.
pub(crate) fn gone(error: &PeerError) -> control::Error {
    control::Error {
        code: ErrorCode::SessionFailed.into(),
        message: error.to_string(),
        hint: String::new(),
    }
}

/// The peer says what makes no sense.
pub(crate) fn invalid(message: &str) -> control::Error {
    control::Error {
        code: ErrorCode::Invalid.into(),
        message: message.to_owned(),
        hint: String::new(),
    }
}
