//! Reasons why a node cannot register.

use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::versions::{RELEASE, VersionRange, VersionsError};

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
    #[error(
        "the cluster uses version {level} of the registry, and this node (release {RELEASE}) speaks {range}"
    )]
    Level { range: VersionRange, level: u32 },
    #[error(transparent)]
    Neighbour(#[from] VersionsError),
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
            Self::Value { .. } => "a newer release wrote it: upgrade this node (docs/upgrading.md)",
            Self::Level { range, level, .. } if range.newest < *level => {
                "upgrade this node, or have the cluster use an older version: `permafrost node level VERSION` on another node (docs/upgrading.md)"
            }
            Self::Level { .. } => {
                "have the cluster use a newer version first: `permafrost node level VERSION` on another node (docs/upgrading.md)"
            }
            Self::Neighbour(_) => {
                "or remove that node, if it does not come back: `permafrost node remove` on another node"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_version_tells_who_must_be_upgraded() {
        let refusal = |oldest, newest| Refusal::Level {
            range: VersionRange { oldest, newest },
            level: 3,
        };
        let older = refusal(1, 2);
        assert_eq!(
            older.to_string(),
            format!(
                "the cluster uses version 3 of the registry, and this node (release {RELEASE}) speaks 1 to 2"
            )
        );
        assert!(older.hint().starts_with("upgrade this node, or"));
        assert!(
            refusal(4, 5)
                .hint()
                .starts_with("have the cluster use a newer")
        );
    }

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
