//! Limits of a capture, and the reasons why a dump is not taken.

use std::io;

use permafrost_protocol::images::ImageError;
use permafrost_protocol::pageserver::SpaceId;
use permafrost_transport::framing::FramingError;

/// Limits of a capture: a client that does not keep them is refused.
#[derive(Clone, Copy, Debug)]
pub struct CaptureLimits {
    /// Bytes of all small images together. Default 256 MiB.
    pub small_bytes: u64,
    /// Number of images. Default 262,144: a checkpoint has at most half as many.
    pub images: usize,
    /// Bytes of pages that wait for their addresses. Default 1 GiB: 256 runs of 4 MiB, CRIU's longest.
    pub waiting_bytes: usize,
}

impl Default for CaptureLimits {
    fn default() -> Self {
        Self {
            small_bytes: 256 << 20,
            images: 1 << 18,
            waiting_bytes: 1 << 30,
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
    #[error("the small images have more than {limit} bytes: {name} goes beyond")]
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
    /// The pagemap is damaged.
    #[error("pagemap of {space}: {source}")]
    Pagemap {
        /// Address space of the pages.
        space: SpaceId,
        /// Error of the decoder.
        source: ImageError,
    },
    /// The pagemap has another pages file.
    #[error(
        "the pagemap of {space} has its pages in pages-{named}.img, and pages-{opened}.img comes with it"
    )]
    OtherPages {
        /// Address space of the pages.
        space: SpaceId,
        /// Pages id that the pagemap names.
        named: u32,
        /// Pages id in the name of the image.
        opened: u32,
    },
    /// Pages that are not in the images: of a parent, or left to a lazy restore.
    #[error("pages of {space} at {vaddr:#x} are not in the images")]
    Withheld {
        /// Address space of the pages.
        space: SpaceId,
        /// Address of the first such page.
        vaddr: u64,
    },
    /// Too many pages have come before their addresses.
    #[error("more than {limit} bytes of pages of {space} have no address yet")]
    TooFarAhead {
        /// Address space of the pages.
        space: SpaceId,
        /// Limit that was reached, bytes.
        limit: usize,
    },
    /// The pages file has fewer or more pages than the pagemap says.
    #[error(
        "the pages of {space} do not fit its pagemap: {missing} bytes too few, {extra} too many"
    )]
    PageCount {
        /// Address space of the pages.
        space: SpaceId,
        /// Bytes that are missing.
        missing: u64,
        /// Bytes without an address.
        extra: u64,
    },
    /// The session's connection failed.
    #[error("{what}: {source}")]
    Session {
        /// Operation that failed.
        what: &'static str,
        /// Error of the system.
        source: io::Error,
    },
    /// The session does not take the pages.
    #[error("permafrostd refuses the pages (status {status})")]
    Refused {
        /// Status that CLOSE was answered with.
        status: i32,
    },
    /// CRIU ended, or was told to, before all images were there.
    #[error("CRIU gave the dump up before all images had come")]
    Ended,
}

impl CaptureError {
    /// Returns true if the session has ended or has refused the pages: permafrostd knows why.
    #[must_use]
    pub fn is_of_session(&self) -> bool {
        matches!(self, Self::Refused { .. } | Self::Session { .. })
    }
}

/// Converts an error of the system.
pub(super) fn failed(what: &'static str) -> impl FnOnce(io::Error) -> CaptureError {
    move |source| CaptureError::Io { what, source }
}

/// Converts an error of the session's connection.
pub(super) fn session_failed(what: &'static str) -> impl FnOnce(io::Error) -> CaptureError {
    move |source| CaptureError::Session { what, source }
}
