//! Errors of copies that other nodes send.

use permafrost_protocol::control::{ErrorCode, ReportedError};

/// Reason why a part of a copy is refused. The sender is a node, so there is no advice.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message explains its variant and fields")]
pub enum CopyError {
    #[error("a copy was {step} at the wrong moment")]
    OutOfOrder { step: &'static str },
    #[error("checkpoint {id} is here with content {own}, not {sent}")]
    OtherContent {
        id: String,
        /// Content digest here, hexadecimal.
        own: String,
        sent: String,
    },
    #[error("a commit of session {sent} came for session {own}")]
    OtherSession { own: String, sent: String },
    #[error("unknown kind of checkpoint {kind}")]
    UnknownKind { kind: i32 },
    #[error("{id:?} is no checkpoint id")]
    BadId { id: String },
    #[error("image {name:?} is not taken")]
    ImageRefused { name: String },
    #[error("image {name:?} came twice")]
    ImageTwice { name: String },
}

impl ReportedError for CopyError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::OutOfOrder { .. } | Self::OtherContent { .. } => ErrorCode::Conflict,
            Self::OtherSession { .. }
            | Self::UnknownKind { .. }
            | Self::BadId { .. }
            | Self::ImageRefused { .. }
            | Self::ImageTwice { .. } => ErrorCode::Invalid,
        }
    }
}
