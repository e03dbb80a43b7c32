//! Reasons why a node cannot register.

use permafrost_protocol::control::{ErrorCode, ReportedError};

use crate::etcd::Failure;
use crate::values::ValueError;

/// Reason why a node cannot register, apart from an etcd that does not answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error(
        "node {name} is alive with another region ({region}, at {address}); this one has {own}"
    )]
    Namesake {
        name: String,
        region: String,
        address: String,
        own: String,
    },
    #[error("another daemon is node {name} with a copy of this region, at {address}")]
    Twin { name: String, address: String },
    #[error("node {name} was removed from the cluster")]
    Removed { name: String },
    #[error("what the registry holds of node {name} is {error}")]
    Value { name: String, error: ValueError },
    #[error(transparent)]
    Etcd(#[from] Failure),
}

impl ReportedError for Refusal {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Etcd(_) => ErrorCode::Unavailable,
            _ => ErrorCode::Conflict,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Etcd(failure) => failure.hint(),
            Self::Namesake { .. } => {
                "give this node another name, or stop the other one and wait until its lease ends"
            }
            Self::Twin { .. } => {
                "a region was copied: stop the daemon whose copy is not wanted; to have two nodes, give one another certificate and an empty region"
            }
            Self::Removed { .. } => {
                "`permafrost node undrain` on another node takes it back; or give this node another name"
            }
            Self::Value { .. } => "run daemons of the same version",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_tells_how_to_get_past_it() {
        let refusal = Refusal::Namesake {
            name: "n1".into(),
            region: "r2".into(),
            address: "10.0.0.2:7118".into(),
            own: "r1".into(),
        };
        assert_eq!(refusal.code(), ErrorCode::Conflict);
        let (message, hint) = (refusal.to_string(), refusal.hint());
        assert!(message.contains("10.0.0.2:7118"), "{message}");
        assert!(hint.contains("another name"), "{hint}");
    }
}
