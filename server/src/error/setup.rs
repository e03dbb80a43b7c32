//! Errors of a node's address and certificates.

use std::net::SocketAddr;

use permafrost_identity::IdentityError;
use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_store::StoreError;

/// Reason why a node does not start to listen for others, or does not deny a certificate.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SetupError {
    #[error("{address} is no address that other nodes can reach")]
    Unreachable { address: SocketAddr },
    #[error("this node has no certificate, and so nobody to refuse")]
    NoCertificate,
    #[error("denied on this node, and the others were not told: {0}")]
    DeniedHereOnly(#[source] Box<StoreError>),
    #[error(transparent)]
    Denial(#[from] IdentityError),
}

impl ReportedError for SetupError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Denial(IdentityError::DeniedBeside { .. }) => ErrorCode::Conflict,
            Self::Denial(IdentityError::Io { .. }) => ErrorCode::Internal,
            Self::Unreachable { .. } | Self::NoCertificate | Self::Denial(_) => ErrorCode::Invalid,
            Self::DeniedHereOnly(_) => ErrorCode::Unavailable,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Unreachable { .. } => {
                "say --advertise ADDRESS:PORT, or give --listen-peers an address of this machine"
            }
            Self::NoCertificate => "permafrostd --identity DIR gives it one",
            Self::DeniedHereOnly(_) => "ask again when the registry answers, or ask every node",
            Self::Denial(IdentityError::DeniedBeside { .. } | IdentityError::Io { .. }) => "",
            Self::Denial(_) => {
                "`permafrost pki show` prints a certificate's name and serial number"
            }
        }
    }
}
