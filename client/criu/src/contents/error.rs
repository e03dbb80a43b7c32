//! Reasons why the contents of a checkpoint cannot be told.

use std::io;

use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::images::ImageError;

/// The contents of a checkpoint cannot be told.
#[derive(Debug)]
pub enum ContentsError<S> {
    /// A part of the checkpoint cannot be read.
    Source(S),
    /// A part was read, and is not what can be shown.
    Limit(ContentsLimit),
}

impl<S> From<ContentsLimit> for ContentsError<S> {
    fn from(limit: ContentsLimit) -> Self {
        Self::Limit(limit)
    }
}

/// Something that was read, and cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum ContentsLimit {
    /// An image is not what its name says. Its bytes are those that were stored.
    #[error("{image} does not decode: {source}")]
    Undecodable {
        /// Name of the image.
        image: String,
        /// Error of the decoder.
        source: ImageError,
    },
    /// An image decodes, and what it says cannot be.
    #[error("{image} {what}")]
    Implausible {
        /// Name of the image.
        image: String,
        /// Sentence about it, without its beginning.
        what: &'static str,
    },
    /// An image is longer than any that makes sense.
    #[error("{image} has {len_bytes} bytes, which is more than is decoded")]
    LongImage {
        /// Name of the image.
        image: String,
        /// Length of the image, bytes.
        len_bytes: u64,
    },
    /// An image broke off.
    ///
    /// Cure: `permafrost verify` tells whether the image is damaged.
    #[error("read {image}: {source}")]
    NotRead {
        /// Name of the image.
        image: String,
        /// Error of the source.
        source: io::Error,
    },
    /// No process has the pid.
    #[error("the checkpoint has no process {pid}")]
    NoProcess {
        /// Pid that was asked for.
        pid: u32,
    },
    /// The contents are longer than a reply.
    #[error("the contents take {len_bytes} bytes, which is more than a reply holds")]
    TooLong {
        /// Length of the contents, bytes.
        len_bytes: usize,
    },
}

impl ReportedError for ContentsLimit {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Undecodable { .. } | Self::Implausible { .. } | Self::LongImage { .. } => {
                ErrorCode::Corrupt
            }
            Self::NotRead { .. } => ErrorCode::Internal,
            Self::NoProcess { .. } => ErrorCode::NotFound,
            Self::TooLong { .. } => ErrorCode::Invalid,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Undecodable { .. } | Self::Implausible { .. } | Self::LongImage { .. } => {
                "what was stored is what was dumped or put: compare it with CRIU's own, `permafrost get` and `crit show`"
            }
            Self::NotRead { .. } => "",
            Self::NoProcess { .. } => "without --pid all processes are shown",
            Self::TooLong { .. } => "look at one process at a time: --pid",
        }
    }
}
