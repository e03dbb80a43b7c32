//! Errors of images directories that are compared with the pages received, and stored with them.

use std::collections::BTreeSet;

use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::images::ImageError;

/// Defect of a dump's images, or difference between them and the dump's pages.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message explains its variant and fields")]
pub enum ImagesError {
    #[error("the images directory has no inventory.img")]
    NoInventory,
    #[error("the images directory describes no process (it has no mm-PID.img)")]
    NoProcess,
    #[error(
        "the images directory describes the processes {described:?}, but pages came for {received:?}"
    )]
    OtherProcesses {
        described: BTreeSet<u64>,
        received: BTreeSet<u64>,
    },
    #[error("its stats-dump counts {counted} pages, but {received} came")]
    OtherPageCount { counted: u64, received: u64 },
    #[error("process {process} has not mapped {start:#x}-{end:#x}, for which pages came")]
    NotMapped {
        process: u64,
        /// Lowest address without a mapping.
        start: u64,
        end: u64,
    },
    #[error("the images were written {}.{:03} s {}", apart_ms / 1_000, apart_ms % 1_000, order(*is_before))]
    OtherTime {
        /// Time between the images and the pages.
        apart_ms: u64,
        /// True if the images are older than the pages.
        is_before: bool,
    },
    #[error("{image}: {source}")]
    Unreadable { image: String, source: ImageError },
    #[error("the dump has more than {limit} small images")]
    TooMany { limit: usize },
    /// Cure: dump again, and let nobody write into the images directory.
    #[error("image {image} is longer than the {announced_bytes} bytes announced")]
    TooLong { image: String, announced_bytes: u64 },
    /// Cure: dump again, and let nobody write into the images directory.
    #[error("image {image} has {received_bytes} bytes of {announced_bytes}")]
    TooShort {
        image: String,
        received_bytes: u64,
        announced_bytes: u64,
    },
}

fn order(is_before: bool) -> &'static str {
    if is_before {
        "before its pages came"
    } else {
        "after its last page"
    }
}

impl ReportedError for ImagesError {
    fn code(&self) -> ErrorCode {
        ErrorCode::Invalid
    }

    fn hint(&self) -> &str {
        match self {
            Self::NoInventory
            | Self::OtherProcesses { .. }
            | Self::OtherPageCount { .. }
            | Self::NotMapped { .. }
            | Self::Unreadable { .. } => {
                "name the directory that criu dump wrote for these very pages"
            }
            Self::NoProcess => {
                "name the directory that criu dump wrote; for a pre-dump name the session, too"
            }
            Self::OtherTime { .. } => {
                "name the directory that criu dump wrote for these very pages; with --ignore-times, if it is a copy of that"
            }
            Self::TooMany { .. } => {
                "dump subtrees as jobs of their own: CRIU writes an image for each thread"
            }
            Self::TooLong { .. } | Self::TooShort { .. } => "",
        }
    }
}
