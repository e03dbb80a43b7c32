//! `GET /v1/jobs`, `GET /v1/checkpoints`: what is stored.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::figure::Figure;

/// Which jobs or checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListQuery {
    /// Only this job's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// Those after this one: `next` of the answer before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// At most so many: 1 to 10,000; 1,000 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(minimum = 1, maximum = 10000)]
    pub limit: Option<u32>,
}

/// Jobs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobsAnswer {
    /// The node that answers.
    pub answered_by: String,
    /// Age of the snapshot that the answer is made from, seconds.
    #[schema(minimum = 0)]
    pub age_s: f64,
    /// In the order of their names.
    pub jobs: Vec<Job>,
    /// What to ask for `after`; missing when there is no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// Its name.
    pub job: String,
    /// Checkpoints that it has, those of pre-dumps counted.
    pub checkpoints: u64,
    /// The newest that can be resumed; missing if it has pre-dumps only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<Checkpoint>,
    /// Size of its next full dump, bytes, were its memory what it was at the last.
    pub next_full_bytes: Figure<u64>,
    /// Size of its next incremental dump, bytes, were its memory what it was at the last.
    pub next_incremental_bytes: Figure<u64>,
}

/// Checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CheckpointsAnswer {
    /// The node that answers.
    pub answered_by: String,
    /// Age of the snapshot that the answer is made from, seconds.
    #[schema(minimum = 0)]
    pub age_s: f64,
    /// By job and generation.
    pub checkpoints: Vec<Checkpoint>,
    /// What to ask for `after`; missing when there is no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Checkpoint {
    /// `JOB@GENERATION`.
    pub checkpoint: String,
    /// Job.
    pub job: String,
    /// Generation, from 1.
    pub generation: u64,
    /// Its id, 32 hex digits.
    pub id: String,
    /// `full` can be resumed, `pre-dump` is for others to build on.
    pub kind: String,
    /// When it was sealed, milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
    /// How long ago that was, seconds; 0 if a clock was set back.
    #[schema(minimum = 0)]
    pub age_s: f64,
    /// Size of the memory image, bytes.
    pub memory_bytes: u64,
    /// Of these, zero pages: not stored, and not read.
    pub zero_bytes: u64,
    /// Bytes that it added to the store.
    pub stored_bytes: u64,
    /// Generation that it was compared with; missing for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_generation: Option<u64>,
    /// Is kept whatever its age.
    pub pinned: bool,
    /// Number of processes.
    pub processes: u32,
    /// Nodes that hold a copy.
    pub holders: Vec<String>,
    /// How many copies there should be.
    pub copies_wanted: u32,
    /// Work that the task had done, seconds, over all restores; missing: nothing known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    pub worked_s: Option<f64>,
    /// What is damaged in the copy of the node that answers; missing: nothing known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub damaged: Option<String>,
}
