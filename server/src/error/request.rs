//! Errors of requests and dumps that peers send.

use permafrost_identity::Role;
use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_transport::peer::PeerError;

/// Reason why a request or a dump of a peer is refused, or ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("a request that asks for nothing this node knows")]
    Unknown,
    #[error("a request that needs a descriptor, by QUIC")]
    NeedsDescriptor,
    #[error("an agent's dumps are measured as the node sees them")]
    MeasuredHere,
    #[error("the files of a region are changed on its node only")]
    OnTheNode,
    /// Cure: use the same version of Permafrost everywhere; if it is, it is a defect: `permafrost report` collects
    /// what a report needs.
    #[error("a session has 16 bytes")]
    SessionLength,
    /// Cure: use the same version of Permafrost everywhere; if it is, it is a defect: `permafrost report` collects
    /// what a report needs.
    #[error("pages for a session that is parked")]
    PagesForParked,
    /// Cure: use the same version of Permafrost everywhere; if it is, it is a defect: `permafrost report` collects
    /// what a report needs.
    #[error("a commit of another session")]
    OtherSession,
    /// Cure: use the same version of Permafrost everywhere; if it is, it is a defect: `permafrost report` collects
    /// what a report needs.
    #[error("a frame that is none of an image")]
    NoImageFrame,
    #[error(
        "the small images are more than the {limit_bytes} bytes that an agent may adopt a parked session with"
    )]
    ImagesTooLarge { limit_bytes: u64 },
    #[error("the small images of other dumps take all the room there is")]
    SpoolFull,
    #[error("{role} {peer} has several namespaces, and the reservation names none")]
    NoNamespace { role: Role, peer: String },
    /// Cure: ask a storage node.
    #[error("this node keeps no queues")]
    NoQueues,
    #[error("node {node} is starting")]
    Starting { node: String },
    #[error("{reason}")]
    SessionEnded {
        /// Reason that the session gives.
        reason: String,
    },
    #[error("{reason}")]
    Sink {
        code: ErrorCode,
        /// Reason that the session's sink gives.
        reason: String,
    },
    /// Only the log shows it: the peer has disconnected.
    #[error(transparent)]
    SenderGone(PeerError),
    /// Only the log shows it: the peer has disconnected.
    #[error(transparent)]
    ReceiverGone(PeerError),
}

impl ReportedError for RequestError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Unknown
            | Self::NeedsDescriptor
            | Self::MeasuredHere
            | Self::OnTheNode
            | Self::SessionLength
            | Self::PagesForParked
            | Self::OtherSession
            | Self::NoImageFrame
            | Self::ImagesTooLarge { .. }
            | Self::NoNamespace { .. } => ErrorCode::Invalid,
            Self::SpoolFull | Self::NoQueues | Self::Starting { .. } | Self::ReceiverGone(_) => {
                ErrorCode::Unavailable
            }
            Self::SessionEnded { .. } | Self::SenderGone(_) => ErrorCode::SessionFailed,
            Self::Sink { code, .. } => *code,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Unknown | Self::NeedsDescriptor | Self::MeasuredHere => {
                "use the same version of Permafrost everywhere"
            }
            Self::OnTheNode => "run `permafrost region` on the storage node",
            Self::ImagesTooLarge { .. } => {
                "copy the images directory to the storage node and run `permafrost adopt` there"
            }
            Self::SpoolFull => "dump again when fewer dumps are under way",
            Self::NoNamespace { .. } => "say which: `permafrost reserve --namespace NS`",
            Self::Starting { .. } => "ask again in a moment",
            _ => "",
        }
    }
}
