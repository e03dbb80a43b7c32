//! Errors of the options and files that connect a node to the registry.

use std::path::PathBuf;

use permafrost_identity::IdentityError;
use permafrost_protocol::control::{ErrorCode, ReportedError};

/// Reason why the registry's address or credentials cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SetupError {
    #[error("catalog {url:?}: {source}")]
    Url { url: String, source: UrlDefect },
    #[error("{} has no user:password in its first line", path.display())]
    NoUser { path: PathBuf },
    #[error("{} can be read by others (mode {mode:04o})", path.display())]
    ReadableByOthers { path: PathBuf, mode: u32 },
    #[error("{} belongs to user {owner}", path.display())]
    ForeignOwner { path: PathBuf, owner: u32 },
    #[error("{} cannot be used: {source}", path.display())]
    Unusable {
        path: PathBuf,
        source: Box<IdentityError>,
    },
}

/// Defect of the registry's URL.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UrlDefect {
    #[error("not an etcd:// URL")]
    Scheme,
    #[error(
        "a password does not belong here, where every user of the machine sees it; put it into a file"
    )]
    Password,
    #[error("a member is missing")]
    NoMember,
    #[error("{host:?} is no host:port")]
    Host { host: String },
    #[error("{host:?} is there twice")]
    Twice { host: String },
    #[error("the prefix has blanks or letters outside ASCII")]
    Prefix,
}

impl ReportedError for SetupError {
    fn code(&self) -> ErrorCode {
        ErrorCode::Invalid
    }

    fn hint(&self) -> &str {
        match self {
            Self::Url { .. } => {
                "write it as etcd://host:2379,host:2379,host:2379 or with /prefix behind it"
            }
            Self::NoUser { .. } => "write the user of etcd, a colon and the password into it",
            Self::ReadableByOthers { .. } | Self::ForeignOwner { .. } | Self::Unusable { .. } => {
                "chmod 600 it, give it to the user that runs permafrostd, and change what is in it if somebody else may have read it"
            }
        }
    }
}
