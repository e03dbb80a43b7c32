//! Errors of policies.

use permafrost_protocol::control::{ErrorCode, ReportedError};

/// Reason why a policy is refused or cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// A name is no namespace.
    #[error("{namespace:?} is no namespace")]
    Namespace {
        /// The first characters of the name.
        namespace: String,
    },
    /// A pattern of job names is not valid.
    #[error("{pattern:?} is no pattern of job names")]
    Glob {
        /// The first characters of the pattern.
        pattern: String,
    },
    /// A setting has a value that makes no sense.
    #[error("{setting} may not be {value}")]
    Value {
        /// The setting, as an option of the command.
        setting: &'static str,
        /// Value that was given.
        value: String,
    },
    /// The rule sets nothing.
    #[error("the rule says neither what to keep nor how much there may be")]
    Empty,
    /// The rule keeps all and some.
    #[error("keep-all goes with neither keep-last nor keep-within")]
    KeepAllAndSome,
    /// There are too many rules.
    #[error("there may be {limit} rules of retention, and there are as many")]
    TooMany {
        /// Most rules in all namespaces together.
        limit: usize,
    },
    /// There is no such rule.
    #[error("there is no rule of retention for {scope}")]
    Missing {
        /// The namespace or the jobs.
        scope: String,
    },
    /// The stored policies cannot be read.
    #[error("the policies of retention are damaged: {source}; nothing is removed by them")]
    Damaged {
        /// Error of the decoder.
        #[source]
        source: serde_json::Error,
    },
    /// A newer Permafrost has written the stored policies.
    #[error(
        "the policies of retention are of version {found}, and this daemon knows {known}; nothing is removed by them"
    )]
    Version {
        /// Version of the stored policies.
        found: u64,
        /// Version of this program.
        known: u64,
    },
    /// The stored policies are not vouched for.
    #[error("the policies of retention are not believed ({reason}); nothing is removed by them")]
    Unsigned {
        /// Reason why not.
        reason: String,
    },
    /// Others have changed the policies at the same time, again and again.
    #[error("others change the policies of retention at this moment")]
    Busy,
}

impl ReportedError for PolicyError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Namespace { .. }
            | Self::Glob { .. }
            | Self::Value { .. }
            | Self::Empty
            | Self::KeepAllAndSome => ErrorCode::Invalid,
            Self::TooMany { .. } => ErrorCode::Conflict,
            Self::Missing { .. } => ErrorCode::NotFound,
            Self::Damaged { .. } => ErrorCode::Corrupt,
            Self::Version { .. } | Self::Unsigned { .. } => ErrorCode::Conflict,
            Self::Busy => ErrorCode::Unavailable,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Namespace { .. } => "name the part of the job's name before the slash",
            Self::Glob { .. } => {
                "use the characters of job names, * for any of them and ? for one; leave the namespace out"
            }
            Self::Value { .. } => "give a number of at least 1, and at most 100 years",
            Self::Empty => {
                "give --keep-last, --keep-within, --keep-all, --max-bytes or --max-checkpoints"
            }
            Self::KeepAllAndSome => "give the one or the others",
            Self::TooMany { .. } => {
                "remove rules (`permafrost retention rm`), or let a pattern stand for several jobs"
            }
            Self::Missing { .. } => "`permafrost retention show` lists the rules",
            Self::Damaged { .. } | Self::Unsigned { .. } => {
                "move retention.json in the data directory away (in a cluster: delete the key `retention` in etcd), and set the rules anew"
            }
            Self::Version { .. } => "use the same version of Permafrost everywhere",
            Self::Busy => "try again",
        }
    }
}
