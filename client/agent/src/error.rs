//! Errors of an agent: its dumps, and the nodes that it asks.

use std::io;

use permafrost_protocol::control::{self, ErrorCode, ReportedError};
use permafrost_protocol::manifest::ManifestError;
use permafrost_transport::peer::PeerError;

use crate::remote::PeerFailure;

/// Reason why a dump through an agent is not taken, sealed or discarded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DumpError {
    #[error("session {session} not found")]
    NotFound { session: String },
    #[error("whoever asked for the seal is gone: its dump was rolled back")]
    CallerGone,
    #[error("the dump has {images} small images, and a checkpoint holds {limit}")]
    TooManyImages { images: usize, limit: usize },
    #[error("image {image} changed while it was read")]
    ImageChanged { image: String },
    /// Cure: see that the images directory can be read, and dump again; the task goes on.
    #[error("read image {image}: {source}")]
    Image { image: String, source: io::Error },
}

impl ReportedError for DumpError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::CallerGone => ErrorCode::Conflict,
            Self::NotFound { .. } => ErrorCode::NotFound,
            Self::TooManyImages { .. } | Self::ImageChanged { .. } => ErrorCode::Invalid,
            Self::Image { .. } => ErrorCode::Internal,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::NotFound { .. } => "`permafrost ls` lists what is there",
            Self::CallerGone => "dump again",
            Self::TooManyImages { .. } => {
                "dump subtrees as jobs of their own: CRIU writes an image for each thread"
            }
            Self::ImageChanged { .. } => {
                "dump again, and let nobody write into the images directory"
            }
            Self::Image { .. } => "",
        }
    }
}

/// Reason why no node does what an agent asks for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NodesError {
    /// Cure: name storage nodes: `permafrost agent --node NAME=ADDRESS:PORT`.
    #[error("no storage node is known")]
    NoNode,
    /// Cure: none is needed: the command that waited has ended.
    #[error("the caller has gone while it waited for its turn")]
    CallerGone,
    /// Cure: restore from another node, or an older generation; `permafrost scrub` on the node heals it.
    #[error("manifest of {checkpoint} from {node}: {source}")]
    Manifest {
        checkpoint: String,
        node: String,
        source: ManifestError,
    },
    #[error("{0}")]
    SealUnanswered(#[source] PeerError),
    #[error("{node}: {}", error.message)]
    DenialKept { node: String, error: control::Error },
    /// Cure: look at CRIU's log, which the command names: CRIU ended before it read the images.
    #[error("CRIU did not come for the images")]
    NobodyCame,
    /// Cure: try again; the message ends with what failed.
    #[error("stream {checkpoint}: {reason}")]
    Stream { checkpoint: String, reason: String },
}

impl ReportedError for NodesError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::NoNode | Self::CallerGone => ErrorCode::Unavailable,
            Self::Manifest { .. } => ErrorCode::Corrupt,
            Self::SealUnanswered(error) => PeerFailure { error, hint: "" }.code(),
            Self::DenialKept { error, .. } => error.code(),
            Self::NobodyCame => ErrorCode::Conflict,
            Self::Stream { .. } => ErrorCode::Internal,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::SealUnanswered(_) => "`permafrost ls` tells whether it was sealed all the same",
            Self::DenialKept { .. } => "ask again: every node takes a denial back by itself",
            _ => "",
        }
    }
}
