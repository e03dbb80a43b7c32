//! Reasons why an address space is not taken.

use std::io;

use permafrost_protocol::images::ImageError;
use permafrost_protocol::pageserver::SpaceId;

use super::super::sink::SinkError;

/// An address space that is not taken.
#[derive(Debug, thiserror::Error)]
pub enum SpaceError {
    /// A pipe failed.
    #[error("{what}: {source}")]
    Io {
        /// Operation that failed.
        what: &'static str,
        /// Error of the system.
        source: io::Error,
    },
    /// A descriptor is not the read end of a pipe.
    #[error("{what} of {space}: the descriptor is no pipe that can be read")]
    NoPipe {
        /// Address space.
        space: SpaceId,
        /// Image that the descriptor is to bring.
        what: &'static str,
    },
    /// Nothing has come for too long.
    #[error("nothing of {space} has come for {seconds} s")]
    Silent {
        /// Address space.
        space: SpaceId,
        /// Time that was waited, seconds.
        seconds: u64,
    },
    /// Whoever handed the pipes over has gone, or the session is over.
    #[error("the caller that sends the pages has gone")]
    CallerGone,
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
        limit: u64,
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
    /// The sink does not take the pages.
    #[error(transparent)]
    Refused(SinkError),
}

/// Converts an error of the system.
pub(super) fn failed(what: &'static str) -> impl FnOnce(io::Error) -> SpaceError {
    move |source| SpaceError::Io { what, source }
}
