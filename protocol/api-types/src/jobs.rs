//! `GET /v1/jobs`, `GET /v1/checkpoints`: the stored jobs and checkpoints.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::figure::Figure;

/// Filter and page of a list of jobs or checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListQuery {
    /// Only this job's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// Lists entries after this one: `next` of the previous reply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// Maximum number of entries: 1 to 10,000; 1,000 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(minimum = 1, maximum = 10000)]
    pub limit: Option<u32>,
}

/// Page of the list of jobs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobsAnswer {
    /// The node that answers.
    pub answered_by: String,
    /// Age of the snapshot that the answer is made from, seconds.
    #[schema(minimum = 0)]
    pub age_s: f64,
    /// Jobs in the order of their names.
    pub jobs: Vec<Job>,
    /// Value of `after` for the next page; missing when there is no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Job and its stored checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// Name of the job.
    pub job: String,
    /// Number of its checkpoints, those of pre-dumps counted.
    pub checkpoints: u64,
    /// The newest that can be resumed; missing if it has pre-dumps only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<ListedCheckpoint>,
    /// Size of its next full dump, bytes, if its memory were as at the last dump.
    pub next_full_bytes: Figure<u64>,
    /// Size of its next incremental dump, bytes, if its memory were as at the last dump.
    pub next_incremental_bytes: Figure<u64>,
}

/// Page of the list of checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CheckpointsAnswer {
    /// The node that answers.
    pub answered_by: String,
    /// Age of the snapshot that the answer is made from, seconds.
    #[schema(minimum = 0)]
    pub age_s: f64,
    /// Checkpoints by job and generation.
    pub checkpoints: Vec<ListedCheckpoint>,
    /// Value of `after` for the next page; missing when there is no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Sealed checkpoint of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Checkpoint)]
pub struct ListedCheckpoint {
    /// Name of the checkpoint, `JOB@GENERATION`.
    pub checkpoint: String,
    /// Name of the job that it belongs to.
    pub job: String,
    /// Generation, from 1.
    pub generation: u64,
    /// Id of the checkpoint, 32 hex digits.
    pub id: String,
    /// `full` can be resumed, `pre-dump` is for others to build on, `pre-copy` is a round of a dump that is under way.
    pub kind: String,
    /// Time of the seal, milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
    /// Time since the seal, seconds; 0 if a clock was set back.
    #[schema(minimum = 0)]
    pub age_s: f64,
    /// Size of the memory image, bytes.
    pub memory_bytes: u64,
    /// Zero pages among them, bytes: not stored, and not read.
    pub zero_bytes: u64,
    /// Bytes that it added to the store.
    pub stored_bytes: u64,
    /// Generation that it was compared with; missing for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_generation: Option<u64>,
    /// True if it is kept whatever its age.
    pub pinned: bool,
    /// Number of processes.
    pub processes: u32,
    /// Nodes that hold a copy.
    pub holders: Vec<String>,
    /// Number of copies that there should be.
    pub copies_wanted: u32,
    /// Work that the task had done, seconds, over all restores; missing: nothing known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    pub worked_s: Option<f64>,
    /// Description of the damage in the copy of the node that answers; missing: no damage is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub damaged: Option<String>,
    /// Those of `holders` whose copy is known to be damaged; missing for none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub damaged_holders: Vec<String>,
    /// Those of `holders` that are not alive; missing for none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub away_holders: Vec<String>,
    /// Those of `holders` whose copy is in part in an object store; missing for none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cold_holders: Vec<String>,
}
