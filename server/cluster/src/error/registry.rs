//! Errors of requests to the registry.

use permafrost_identity::IdentityError;
use permafrost_protocol::control::{ErrorCode, ReportedError};

use crate::etcd::Failure;
use crate::values::ValueError;

/// Reason why the registry does not carry out a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegistryError {
    #[error("the registry: {0}")]
    Etcd(#[source] Failure),
    #[error("the registry did not answer within {limit_ms} ms; whether it was done is unknown")]
    NoAnswer { limit_ms: u128 },
    #[error("whether checkpoint {id} is listed is unknown: {source}")]
    OutcomeUnknown { id: String, source: Failure },
    #[error("node {node} lost its registration while it worked; nothing was changed")]
    Fenced { node: String },
    #[error(
        "this node may not act in the cluster: the registry has not answered, and the lease counts as lost since {lost_ms} ms"
    )]
    LeaseLost { lost_ms: u128 },
    #[error("this node may not act in the cluster: {reason}")]
    NotRegistered { reason: String },
    #[error("generation {generation} of job {job} is listed already, as checkpoint {id}")]
    AlreadyListed {
        job: String,
        generation: u64,
        id: String,
    },
    #[error("the lock of job {job} is not this dump's any longer; checkpoint {id} was not listed")]
    LockLost { job: String, id: String },
    #[error("job {job} is being dumped on node {node}")]
    JobBusy { job: String, node: String },
    #[error("the lock of job {job} is {source}")]
    LockUnreadable { job: String, source: ValueError },
    #[error("the registry's {key} is {source}")]
    Damaged { key: String, source: ValueError },
    #[error("the cluster denies {limit} certificates already")]
    TooManyDenials { limit: usize },
    #[error("the registry's data is no longer that of cluster {cluster} at revision {revision}")]
    DataReplaced { cluster: String, revision: u64 },
    #[error("the registry's data has no id yet")]
    NoClusterId,
    #[error("checkpoint {id} is {checkpoint}")]
    Listed { id: String, checkpoint: String },
    #[error("sign the removal of checkpoint {id}: {source}")]
    Unsigned { id: String, source: IdentityError },
}

impl ReportedError for RegistryError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Etcd(_)
            | Self::NoAnswer { .. }
            | Self::OutcomeUnknown { .. }
            | Self::Fenced { .. }
            | Self::LeaseLost { .. }
            | Self::NotRegistered { .. }
            | Self::DataReplaced { .. }
            | Self::NoClusterId => ErrorCode::Unavailable,
            Self::AlreadyListed { .. }
            | Self::LockLost { .. }
            | Self::JobBusy { .. }
            | Self::LockUnreadable { .. }
            | Self::Damaged { .. }
            | Self::Listed { .. }
            | Self::Unsigned { .. } => ErrorCode::Conflict,
            Self::TooManyDenials { .. } => ErrorCode::Invalid,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Etcd(failure) => failure.hint(),
            Self::NoAnswer { .. } => "see that most members of etcd run and can be reached",
            Self::OutcomeUnknown { .. } => "`permafrost ls` tells when the registry answers again",
            Self::Fenced { .. } => "it registers again by itself; then try again",
            Self::LeaseLost { .. } | Self::NotRegistered { .. } => {
                "it registers again by itself when the registry answers; see that etcd runs and is reachable"
            }
            Self::AlreadyListed { .. } => "try again",
            Self::LockLost { .. } => "dump again",
            Self::JobBusy { .. } => {
                "wait until that dump is done; a node that died keeps the lock until its lease ends"
            }
            Self::LockUnreadable { .. } => "run daemons of the same version",
            Self::Damaged { .. } => {
                "run daemons of the same version; `etcdctl del` removes a damaged key, and a rebuild puts it back"
            }
            Self::TooManyDenials { .. } => {
                "change the CA (permafrost pki rotate --ca), and take denials back"
            }
            Self::DataReplaced { .. } => {
                "it was replaced just now; see docs/cluster.md, \"Cluster id\""
            }
            Self::NoClusterId => "the next node that registers gives it one",
            Self::Listed { .. } => "`permafrost rm` removes what is listed",
            Self::Unsigned { .. } => "`permafrost pki rotate` makes keys that can sign",
        }
    }
}
