//! Limits of a capture, and the reasons why a dump is not taken.

use std::io;

use permafrost_transport::control::ControlError;
use permafrost_transport::framing::FramingError;

/// Limits of a capture: a client that does not keep them is refused.
#[derive(Clone, Copy, Debug)]
pub struct CaptureLimits {
    /// Bytes of all small images together. Default 256 MiB.
    pub small_bytes: u64,
    /// Number of images. Default 262,144: a checkpoint has at most half as many.
    pub images: usize,
}

impl Default for CaptureLimits {
    fn default() -> Self {
        Self {
            small_bytes: 256 << 20,
            images: 1 << 18,
        }
    }
}

/// A dump by streaming that is not taken.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// A socket, a pipe or a file failed.
    #[error("{what}: {source}")]
    Io {
        /// Operation that failed.
        what: &'static str,
        /// Error of the system.
        source: io::Error,
    },
    /// CRIU's request cannot be decoded.
    #[error("CRIU's request for an image: {0}")]
    Request(#[from] FramingError),
    /// The name is not that of a file in the images directory.
    #[error("CRIU names the image {name:?}, which is no plain file name")]
    Name {
        /// Name of the image, as CRIU sent it.
        name: String,
    },
    /// The image was there already.
    #[error("CRIU opens the image {name} a second time")]
    Twice {
        /// Name of the image, as CRIU sent it.
        name: String,
    },
    /// The descriptor that comes with a name is no pipe.
    #[error("the image {name} comes without a pipe")]
    NoPipe {
        /// Name of the image, as CRIU sent it.
        name: String,
    },
    /// More small images than a dump may have.
    #[error(
        "the small images have more than {limit} bytes: {name} goes beyond (dump with --page-server, which has no such limit)"
    )]
    TooLarge {
        /// Name of the image, as CRIU sent it.
        name: String,
        /// Limit that was reached, bytes.
        limit: u64,
    },
    /// More images than a dump may have.
    #[error("more than {limit} images")]
    TooMany {
        /// Limit that was reached.
        limit: usize,
    },
    /// A pages file without its pagemap, or the other way round.
    #[error("the image {name} does not follow its pagemap")]
    Unpaired {
        /// Name of the image, as CRIU sent it.
        name: String,
    },
    /// The session does not take the pages, or its connection failed.
    #[error(transparent)]
    Session(#[from] ControlError),
    /// CRIU ended, or was told to, before all images were there.
    #[error("CRIU gave the dump up before all images had come")]
    Ended,
}

impl CaptureError {
    /// Returns true if the session has ended or has refused the pages: permafrostd knows why.
    #[must_use]
    pub fn is_of_session(&self) -> bool {
        matches!(self, Self::Session(_))
    }
}

/// Converts an error of the system.
pub(super) fn failed(what: &'static str) -> impl FnOnce(io::Error) -> CaptureError {
    move |source| CaptureError::Io { what, source }
}
