//! Errors of requests about the nodes of a cluster.

use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_transport::peer::PeerError;

/// Reason why nodes are not listed, changed, removed or asked for their inventory.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NodesError {
    #[error("this node is in no cluster")]
    NoCluster,
    #[error("the registry does not answer, so nobody knows which nodes are alive")]
    ViewStale,
    #[error("the cluster has no node {node}")]
    NoNode { node: String },
    #[error("{word:?} is no state of a node")]
    UnknownState { word: String },
    #[error("node {node} is alive and not drained")]
    NotDrained { node: String },
    #[error("no other node that is alive holds an undamaged copy of {checkpoints}")]
    OnlyCopies {
        /// Some of the checkpoints, and the number of the others.
        checkpoints: String,
    },
    #[error(
        "the other copies of {checkpoints} have not been read within {within_h} h: they are being read now, as {node} may have the last good ones"
    )]
    Unverified {
        node: String,
        checkpoints: String,
        within_h: u64,
    },
    #[error("version {level} of the registry is not spoken by {nodes}")]
    LevelUnspoken {
        level: u32,
        /// Some of the nodes, with the versions that they speak, and the number of the others.
        nodes: String,
    },
    #[error("inventory of {node}: {source}")]
    Inventory {
        node: String,
        source: InventoryError,
    },
    #[error("{reason}")]
    RegionCopied {
        /// Text of the refusal that ended this node's membership.
        reason: String,
    },
}

/// Defect of the answer with a node's inventory.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InventoryError {
    #[error(transparent)]
    Peer(#[from] PeerError),
    #[error("it answers something else")]
    OtherAnswer,
    #[error("it does not say how its copies stand")]
    NoHealth,
    #[error("a digest that is not 32 bytes")]
    DigestLength,
    #[error("its checkpoints are in no order")]
    Unordered,
    #[error("an empty part that is not the last")]
    EmptyPart,
}

impl InventoryError {
    /// Adds the name of the node.
    pub(crate) fn of(self, node: &str) -> NodesError {
        NodesError::Inventory {
            node: node.to_owned(),
            source: self,
        }
    }
}

impl ReportedError for NodesError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::NoCluster | Self::UnknownState { .. } => ErrorCode::Invalid,
            Self::NoNode { .. } => ErrorCode::NotFound,
            Self::NotDrained { .. }
            | Self::OnlyCopies { .. }
            | Self::LevelUnspoken { .. }
            | Self::RegionCopied { .. } => ErrorCode::Conflict,
            Self::ViewStale | Self::Unverified { .. } | Self::Inventory { .. } => {
                ErrorCode::Unavailable
            }
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::NoCluster => {
                "permafrostd --catalog etcd://… joins one; without it there is one machine, and `permafrost status` shows it"
            }
            Self::ViewStale => "see that most members of etcd run and can be reached",
            Self::NoNode { .. } => "`permafrost node ls` lists the nodes",
            Self::UnknownState { .. } => "say active, drained or removed",
            Self::NotDrained { .. } => {
                "`permafrost node drain --wait` first has its checkpoints copied elsewhere; --force does without"
            }
            Self::OnlyCopies { .. } => {
                "wait until they are copied or healed, or bring another holder back; with --force they stay listed, and cannot be read until the node is taken back (`permafrost node undrain`)"
            }
            Self::Unverified { .. } => {
                "try again when they are (`permafrost node drain --wait` waits for it); --force does without"
            }
            Self::LevelUnspoken { .. } => {
                "upgrade these nodes, or remove those that do not come back (docs/upgrading.md)"
            }
            Self::Inventory { .. } => "see that the node runs and has the same version",
            Self::RegionCopied { .. } => {
                "a region was copied: stop the daemon whose copy is not wanted; to have two nodes, give one another certificate and an empty region"
            }
        }
    }
}
