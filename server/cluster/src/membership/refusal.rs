//! Reasons why a node cannot register.

use permafrost_store::StoreError;

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

impl From<Refusal> for StoreError {
    fn from(refusal: Refusal) -> Self {
        let hint = match refusal {
            Refusal::Etcd(failure) => return failure.into(),
            Refusal::Namesake { .. } => {
                "give this node another name, or stop the other one and wait until its lease ends"
            }
            Refusal::Twin { .. } => {
                "a region was copied: stop the daemon whose copy is not wanted; to have two nodes, give one another certificate and an empty region"
            }
            Refusal::Removed { .. } => {
                "`permafrost node undrain` on another node takes it back; or give this node another name"
            }
            Refusal::Value { .. } => "run daemons of the same version",
        };
        Self::Conflict {
            message: refusal.to_string(),
            hint,
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
        let StoreError::Conflict { message, hint } = refusal.into() else {
            panic!("not a conflict");
        };
        assert!(message.contains("10.0.0.2:7118"), "{message}");
        assert!(hint.contains("another name"), "{hint}");
    }
}
