//! Errors of making, pulling, healing and scrubbing copies.

use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::wire::frame::FrameError;

/// Reason why a copy is not made, pulled, healed or scrubbed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyingError {
    #[error(
        "{have} of {needed} other nodes that must keep a copy have one{}",
        failed_nodes(failures)
    )]
    TooFewCopies {
        have: usize,
        needed: usize,
        /// Reason of each node that failed.
        failures: Vec<String>,
    },
    #[error("{source}")]
    Space { source: FrameError },
    /// Cure: use the same version of Permafrost everywhere; if it is, it is a defect: `permafrost report` collects
    /// what a report needs.
    #[error("an image's name is not UTF-8")]
    ImageName,
    /// Cure: `permafrost verify` on the nodes tells which copy is damaged; see docs/cluster.md, "After etcd's data is
    /// lost".
    #[error("checkpoint {id} is here with other content")]
    OtherContent { id: String },
    /// Cure: none is needed: the copy under way is the same.
    #[error("checkpoint {id} is being pulled already")]
    PullUnderWay { id: String },
    /// Cure: bring a node with an undamaged copy back (`permafrost show` names the holders); repair tries again by
    /// itself.
    #[error("checkpoint {id} cannot be had from other nodes: {}", of_each(reasons))]
    NotPulled {
        id: String,
        /// Reason of each node.
        reasons: Vec<String>,
    },
    /// Cure: bring a node with an undamaged copy back; the scrub tries again every hour.
    #[error("damaged pages are not healed: {}", of_each(reasons))]
    NoPages {
        /// Reason of each holder.
        reasons: Vec<String>,
    },
    /// Cure: ask again when the node runs, or another node.
    #[error("this node is stopping")]
    Stopping,
    #[error("this node is stopping: the scrub was broken off")]
    ScrubStopped,
}

/// Refusal of a dump that cannot become durable on the required number of nodes. Nothing is frozen yet.
#[derive(Debug, thiserror::Error)]
#[error(
    "{needed} more nodes must keep a copy, and {counting} can ({alive} nodes are alive{}{})",
    media(volatile),
    failed_nodes(failures)
)]
pub(crate) struct TooFewNodes {
    /// Number of copies on other nodes that the dump needs.
    pub(crate) needed: usize,
    /// Number of nodes that agreed to keep one that counts.
    pub(crate) counting: usize,
    pub(crate) alive: usize,
    /// Names of the nodes whose media do not outlast a power failure.
    pub(crate) volatile: Vec<String>,
    /// Reason of each node that failed.
    pub(crate) failures: Vec<String>,
}

fn failed_nodes(failures: &[String]) -> String {
    if failures.is_empty() {
        return String::new();
    }
    format!("; failed: {}", failures.join(", "))
}

fn of_each(reasons: &[String]) -> String {
    if reasons.is_empty() {
        return "no other node was named".to_owned();
    }
    reasons.join("; ")
}

fn media(volatile: &[String]) -> String {
    if volatile.is_empty() {
        return String::new();
    }
    format!(
        "; copies on {} do not count, as their media do not outlast a power failure",
        volatile.join(", ")
    )
}

impl ReportedError for CopyingError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Space { .. } | Self::ImageName => ErrorCode::Invalid,
            Self::OtherContent { .. } | Self::PullUnderWay { .. } => ErrorCode::Conflict,
            Self::TooFewCopies { .. }
            | Self::NotPulled { .. }
            | Self::NoPages { .. }
            | Self::Stopping
            | Self::ScrubStopped => ErrorCode::Unavailable,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::TooFewCopies { .. } => {
                "see `permafrost node ls`; or dump with --durability local"
            }
            Self::ScrubStopped => "scrub again when it is back",
            // The caller is another node.
            _ => "",
        }
    }
}

impl ReportedError for TooFewNodes {
    fn code(&self) -> ErrorCode {
        ErrorCode::Unavailable
    }

    fn hint(&self) -> &str {
        if self.volatile.is_empty() {
            "see `permafrost node ls`; or dump with --durability local"
        } else {
            "put their regions on a medium that lasts, or start them with --count-volatile-copies; or dump with --durability local"
        }
    }
}
