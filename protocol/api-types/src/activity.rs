//! `GET /v1/activity`: transfers, copies and repair in progress, and predicted against measured times.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::reserve::Direction;

/// Activity of the node that answers, and the errors of its predictions. Other nodes tell theirs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Activity)]
pub struct ActivityAnswer {
    /// The node that answers.
    pub answered_by: String,
    /// Dumps and restores that run on it, the oldest first; at most 100 of each.
    pub transfers: Vec<RunningTransfer>,
    /// Checkpoints that it copies from other nodes now, the oldest first; at most 100.
    pub copies: Vec<RunningCopy>,
    /// Repair of the cluster; missing unless this node leads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repair: Option<RepairActivity>,
    /// The last dumps and restores that ended here since the daemon started, the newest first; at most 50.
    pub ended: Vec<EndedTransfer>,
    /// Errors of the last 200 predictions of the duration of dumps; missing before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dump_time_error: Option<PredictionError>,
    /// Errors of the last 200 predictions of the duration of restores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_time_error: Option<PredictionError>,
}

/// Dump or restore that runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunningTransfer {
    /// `write`: a dump; `read`: a restore.
    pub direction: Direction,
    /// Time since it was admitted, seconds.
    #[schema(minimum = 0)]
    pub age_s: f64,
    /// Bytes that it has moved.
    pub moved_bytes: u64,
    /// Bytes that it is expected to move in all.
    pub expected_bytes: u64,
    /// True if it has moved nothing for so long that its slot was given to another one.
    pub idle: bool,
}

/// Checkpoint that comes from another node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunningCopy {
    /// Name of the checkpoint; missing outside of the caller's namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// Node that it comes from.
    pub from: String,
    /// Memory that is here, bytes: zero pages and those that were here before included.
    pub done_bytes: u64,
    /// Bytes of pages that came over the network.
    pub moved_bytes: u64,
    /// Memory of the checkpoint, bytes.
    pub memory_bytes: u64,
    /// Time since it began, seconds.
    #[schema(minimum = 0)]
    pub age_s: f64,
    /// True if its rate is limited, as repair's is.
    pub background: bool,
}

/// Repair of the cluster, as its leader sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RepairActivity {
    /// Checkpoints with fewer good copies on live nodes that stay than wanted.
    pub under_replicated: u64,
    /// Of those, checkpoints that no live node holds undamaged.
    pub stranded: u64,
    /// Copies that are known to be damaged.
    pub damaged: u64,
    /// Copies made since the daemon started.
    pub copies_made: u64,
    /// Copies that failed since then; each is tried again.
    pub copies_failed: u64,
    /// Memory of the checkpoints that were copied since then, bytes.
    pub copied_bytes: u64,
    /// Number of steps that wait.
    pub waiting: u64,
    /// Steps that run, then those that wait; at most 100.
    pub steps: Vec<ListedStep>,
}

/// Step of repair.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ListedStep {
    /// Name of the checkpoint; missing outside of the caller's namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// Node that takes the step.
    pub node: String,
    /// True if the node makes a copy, false if it drops one.
    pub is_copy: bool,
    /// True if it runs, false if it waits.
    pub is_running: bool,
    /// Memory of the checkpoint, bytes.
    pub memory_bytes: u64,
}

/// Dump or restore that has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EndedTransfer {
    /// `write`: a dump; `read`: a restore.
    pub direction: Direction,
    /// Name of the checkpoint; missing outside of the caller's namespaces, and for a parked dump.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// Bytes that it moved.
    pub bytes: u64,
    /// Duration that was predicted when it began, seconds; missing if nothing was known to predict it from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    pub predicted_s: Option<f64>,
    /// Duration that was measured, seconds.
    #[schema(minimum = 0)]
    pub measured_s: f64,
    /// Time since it ended, seconds.
    #[schema(minimum = 0)]
    pub age_s: f64,
}

/// Errors of predictions, relative to what was measured: 0.2 is 20 %.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PredictionError {
    /// Median of the absolute errors.
    pub p50: f64,
    /// 95th percentile of the absolute errors.
    pub p95: f64,
    /// Median of the signed errors: above 0, too much was predicted.
    pub bias: f64,
    /// Number of predictions.
    pub samples: u64,
}
