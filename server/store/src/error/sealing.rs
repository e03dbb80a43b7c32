//! Errors of sealing, adopting and removing checkpoints.

use std::collections::BTreeSet;

use permafrost_protocol::control::{ErrorCode, ReportedError};

/// Reason why a checkpoint is not sealed, adopted, rolled back or removed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message explains its variant and fields")]
pub enum SealingError {
    #[error("sealing took longer than the {limit_s} s that it may")]
    Late { limit_s: u64 },
    #[error("{checkpoint} is sealed here, and the cluster does not list it")]
    Unlisted { checkpoint: String },
    /// Cure: none is needed: the checkpoint is there already.
    #[error("checkpoint {id} is {checkpoint} on this node already")]
    NameTaken { id: String, checkpoint: String },
    #[error("whoever asked for the seal is gone: its dump was rolled back")]
    CallerGone,
    #[error("session {session} is {checkpoint} already, with other images or of another job")]
    Adopted { session: String, checkpoint: String },
    #[error(
        "these images of the processes {processes:?} may belong to several parked sessions: {}",
        sessions.join("; ")
    )]
    Ambiguous {
        processes: BTreeSet<u64>,
        /// Sessions with the facts that distinguish them.
        sessions: Vec<String>,
    },
    #[error("session {session} is parked in a cluster, where parked dumps are not adopted")]
    ParkedInCluster { session: String },
    #[error("{checkpoint} is pinned")]
    Pinned { checkpoint: String },
    #[error("{checkpoint} is not removed: no other generation of its job can be restored")]
    LastOne { checkpoint: String },
    #[error("{checkpoint} is being read")]
    InUse { checkpoint: String },
    #[error("{checkpoint} is not removed: no other generation of its job was found whole")]
    NoOther { checkpoint: String },
    /// Cure: leave it to that node, or bring the node back.
    #[error("checkpoint {id} is listed as held by {node}")]
    Listed { id: String, node: String },
    #[error("checkpoint {id} is published and is not rolled back")]
    Published { id: String },
}

impl ReportedError for SealingError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Late { .. } | Self::Unlisted { .. } => ErrorCode::Unavailable,
            Self::NameTaken { .. }
            | Self::CallerGone
            | Self::Adopted { .. }
            | Self::Ambiguous { .. }
            | Self::ParkedInCluster { .. }
            | Self::Pinned { .. }
            | Self::LastOne { .. }
            | Self::NoOther { .. }
            | Self::InUse { .. }
            | Self::Listed { .. }
            | Self::Published { .. } => ErrorCode::Conflict,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Late { .. } | Self::CallerGone => "dump again",
            Self::Unlisted { .. } => {
                "`permafrost ls` tells in a minute whether it counts; if not, dump again"
            }
            Self::Adopted { .. } => "`permafrost ls --parked` lists what can be adopted",
            Self::Ambiguous { .. } => {
                "name the session to adopt (`permafrost ls --parked` shows when each was taken)"
            }
            Self::ParkedInCluster { .. } => {
                "dump with `permafrost dump`, which seals on all copies"
            }
            Self::Pinned { .. } => "unpin it first, or use --force",
            Self::LastOne { .. } => {
                "pass --last to remove it all the same, or --all to remove the job"
            }
            Self::InUse { .. } => "wait until it was read",
            Self::NoOther { .. } => "`permafrost verify` reads what there is",
            Self::Published { .. } => "remove it with `permafrost rm`",
            Self::NameTaken { .. } | Self::Listed { .. } => "",
        }
    }
}
