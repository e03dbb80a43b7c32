//! Messages about retention: which generations stay, and which go.

use prost::Message;
use serde::Serialize;

/// Rule of retention of a namespace, or of some of its jobs.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct RetentionRule {
    /// Namespace of the rule.
    #[prost(string, tag = "1")]
    pub namespace: String,
    /// Pattern of the names of the jobs, without the namespace (`*` for any characters, `?` for one); empty for the
    /// namespace's own rule.
    #[prost(string, tag = "2")]
    pub jobs: String,
    /// True to keep everything.
    #[prost(bool, tag = "3")]
    pub keep_all: bool,
    /// Number of a job's newest generations that are kept, of those that can be restored.
    #[prost(uint64, optional, tag = "4")]
    pub keep_last: Option<u64>,
    /// Age up to which generations are kept, seconds.
    #[prost(uint64, optional, tag = "5")]
    pub keep_within_s: Option<u64>,
    /// Most bytes of the namespace, or of each of the jobs.
    #[prost(uint64, optional, tag = "6")]
    pub max_bytes: Option<u64>,
    /// Most checkpoints of the namespace, or of each of the jobs.
    #[prost(uint64, optional, tag = "7")]
    pub max_checkpoints: Option<u64>,
    /// Fate of a dump beyond those limits: `refuse` (also if empty) or `remove-oldest`.
    #[prost(string, tag = "8")]
    pub over_quota: String,
}

/// Rules of retention.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct RetentionRules {
    /// Rules, by namespace; that of the namespace itself first.
    #[prost(message, repeated, tag = "1")]
    pub rules: Vec<RetentionRule>,
}

/// Result of applying the rules of retention.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Pruned {
    /// Generations, and what the rules say about each; at most 65,536: those that stay are left out first.
    #[prost(message, repeated, tag = "1")]
    pub generations: Vec<PrunedGeneration>,
    /// Number of generations that were removed; of a dry run: that would be.
    #[prost(uint64, tag = "2")]
    pub removed: u64,
    /// Bytes that these count in quotas. Pages that newer generations share with them stay.
    #[prost(uint64, tag = "3")]
    pub removed_bytes: u64,
}

/// Verdict of the rules of retention on one generation.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct PrunedGeneration {
    /// Job of the generation.
    #[prost(string, tag = "1")]
    pub job: String,
    /// Number of the generation.
    #[prost(uint64, tag = "2")]
    pub generation: u64,
    /// Time of the seal, milliseconds since the Unix epoch.
    #[prost(uint64, tag = "3")]
    pub created_unix_ms: u64,
    /// Bytes that it counts in quotas.
    #[prost(uint64, tag = "4")]
    pub bytes: u64,
    /// Rule that decides: `expired`, `job-quota` or `namespace-quota` for one that goes; `pinned`, `newest`,
    /// `newest-whole`, `none-whole`, `in-use`, `keep-all`, `keep-last`, `keep-within` or `no-rule` for one that stays.
    #[prost(string, tag = "5")]
    pub rule: String,
    /// True if it goes by the rules.
    #[prost(bool, tag = "6")]
    pub goes: bool,
    /// Reason why it was not removed although it goes by the rules; empty if there is none.
    #[prost(string, tag = "7")]
    pub error: String,
}
