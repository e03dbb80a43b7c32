//! Refusals of what a peer's certificate does not allow.

use permafrost_identity::Role;
use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::manifest::JobNameError;

/// Reason why a peer may not do what it asks for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeniedError {
    #[error("{role} {peer} may not {action}")]
    Denied {
        role: Role,
        peer: String,
        /// Verb and object.
        action: String,
        /// Right that the certificate lacks.
        right: Right,
    },
    /// Cure: `permafrost verify` tells whether its manifest is damaged.
    #[error("the checkpoint is of no job: {source}")]
    NoJob {
        #[from]
        source: JobNameError,
    },
    #[error("{role} {peer} exchanges no copies with node {node}")]
    NoCopies {
        role: Role,
        peer: String,
        node: String,
    },
}

/// Right that a certificate gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Right {
    /// A namespace on the certificate's list.
    Namespace,
    /// The role agent, or node.
    Agent,
    /// The right to delete.
    Delete,
    /// The role operator, and the right to delete.
    Govern,
    /// The role operator.
    Operator,
}

impl ReportedError for DeniedError {
    fn code(&self) -> ErrorCode {
        ErrorCode::Denied
    }

    fn hint(&self) -> &str {
        match self {
            Self::Denied { right, .. } => match right {
                Right::Namespace => {
                    "its certificate lists its namespaces (`permafrost pki issue --namespace`)"
                }
                Right::Agent => "that takes a certificate of role agent (docs/security.md)",
                Right::Delete => {
                    "that takes the right to delete (`permafrost pki issue --delete`) and the namespace, or root on a storage node"
                }
                Right::Govern => {
                    "that takes a certificate of role operator with the right to delete in the namespace (`permafrost pki issue --role operator --delete --namespace`), or root on a storage node"
                }
                Right::Operator => {
                    "ask with a certificate of role operator (`permafrost agent --identity`), or as root on a storage node"
                }
            },
            Self::NoJob { .. } => "",
            Self::NoCopies { .. } => {
                "nodes of a cluster have certificates with --role node, and run with --catalog"
            }
        }
    }
}
