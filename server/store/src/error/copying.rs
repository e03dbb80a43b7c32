//! Errors of copies that other nodes send.

use permafrost_protocol::control::{ErrorCode, ReportedError};

/// Reason why a part of a copy is refused. The sender is a node, so there is no advice.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message explains its variant and fields")]
pub enum CopyError {
    /// Cure: use the same version of Permafrost everywhere; if it is, it is a defect: `permafrost report` collects
    /// what a report needs.
    #[error("a copy was {step} at the wrong moment")]
    OutOfOrder { step: &'static str },
    /// Cure: `permafrost verify` on the nodes tells which copy is damaged.
    #[error("checkpoint {id} is here with content {own}, not {sent}")]
    OtherContent {
        id: String,
        /// Content digest here, hexadecimal.
        own: String,
        sent: String,
    },
    /// Cure: use the same version of Permafrost everywhere; if it is, it is a defect: `permafrost report` collects
    /// what a report needs.
    #[error("a commit of session {sent} came for session {own}")]
    OtherSession { own: String, sent: String },
    /// Cure: the sender is newer: use the same version of Permafrost everywhere.
    #[error("unknown kind of checkpoint {kind}")]
    UnknownKind { kind: i32 },
    /// Cure: use the same version of Permafrost everywhere; if it is, it is a defect: `permafrost report` collects
    /// what a report needs.
    #[error("{id:?} is no checkpoint id")]
    BadId { id: String },
    /// Cure: use the same version of Permafrost everywhere; if it is, it is a defect: `permafrost report` collects
    /// what a report needs.
    #[error("image {name:?} is not taken")]
    ImageRefused { name: String },
    /// Cure: use the same version of Permafrost everywhere; if it is, it is a defect: `permafrost report` collects
    /// what a report needs.
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
