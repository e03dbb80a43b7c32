//! Errors of a lazy restore.

use std::io;

use permafrost_protocol::control::{self, ErrorCode, ReportedError};
use permafrost_protocol::images::ImageError;

/// Reason why processes do not get their missing pages.
#[derive(Debug, thiserror::Error)]
pub enum LazyError {
    /// CRIU closed the connection before it had restored everything.
    #[error("CRIU gave the restore up")]
    GivenUp,
    /// CRIU let the processes run before all of their pages were there.
    #[error(
        "CRIU did not wait for permafrost-action: the processes ran without all of their memory"
    )]
    NotHeld,
    /// CRIU sent something else than processes and their userfaultfds.
    #[error("CRIU sent {what} on the lazy-pages socket")]
    Protocol {
        /// Description of what came.
        what: String,
    },
    /// CRIU restores a process that the checkpoint does not have.
    #[error("CRIU restores process {pid}, which the checkpoint does not have")]
    UnknownProcess {
        /// Pid of the process in its namespace.
        pid: u32,
    },
    /// The checkpoint lacks a page that its pagemap lists.
    #[error("process {pid}: the checkpoint lacks the page at {address:#x}")]
    NoPage {
        /// Pid of the process in its namespace.
        pid: u32,
        /// Address of the page when it was dumped.
        address: u64,
    },
    /// A log of events is of another checkpoint or of other processes.
    #[error("the log of the daemon that has ended is not of this restore")]
    OtherRestore,
    /// A log of events has no more room, or its events would take too much memory or time.
    #[error("the mappings changed too often to go on from the log of the daemon that has ended")]
    ManyChanges,
    /// A daemon has ended after a process had forked, and before it could pass on the child.
    #[error("the daemon ended while a process forked: the child's memory was lost")]
    LostFork,
    /// An image that says where the pages are is damaged.
    #[error("{0}")]
    Image(#[from] ImageError),
    /// Pages cannot be read.
    #[error("{}", .0.message)]
    Source(control::Error),
    /// The kernel refuses.
    #[error("{action}: {source}")]
    Io {
        /// Failed action, as verb and noun.
        action: &'static str,
        /// Error of the system.
        source: io::Error,
    },
}

impl LazyError {
    pub(super) fn io(action: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }
}

impl ReportedError for LazyError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::GivenUp | Self::ManyChanges | Self::LostFork => ErrorCode::Conflict,
            Self::Protocol { .. } | Self::UnknownProcess { .. } | Self::OtherRestore => {
                ErrorCode::Invalid
            }
            Self::Image(_) | Self::NoPage { .. } => ErrorCode::Corrupt,
            Self::Source(error) => error.code(),
            Self::NotHeld | Self::Io { .. } => ErrorCode::Internal,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Protocol { .. } => "use a CRIU release from 3.5 on",
            Self::UnknownProcess { .. } => "restore from the images directory of this checkpoint",
            Self::Source(error) => &error.hint,
            Self::Image(_) | Self::NoPage { .. } => {
                "restore an older generation, see permafrost verify"
            }
            Self::NotHeld => "CRIU runs no action scripts here: restore with --stream",
            Self::GivenUp => "the log of CRIU says why",
            Self::OtherRestore | Self::ManyChanges | Self::LostFork => {
                "restore the checkpoint again"
            }
            Self::Io { source, .. } if is_full(source) => {
                "each process takes a descriptor: raise LimitNOFILE of permafrostd, or restore with --stream"
            }
            Self::Io { .. } => "restore with --stream; the log of permafrostd says more",
        }
    }
}

/// Returns true if an error says that no descriptor is left.
fn is_full(error: &io::Error) -> bool {
    let errno = rustix::io::Errno::from_io_error(error);
    matches!(
        errno,
        Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE)
    )
}
