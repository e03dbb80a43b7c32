//! Task that may be preempted, as far as the caller knows it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::quantity::{Bytes, BytesPerSecond, Count, Seconds};
use super::text::Text;

/// Running task. Everything but its `id` may be left out: figures that the store has of its job fill the gaps as far
/// as possible, and the reply names those that are missing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Task<'a> {
    /// Id by which the reply refers to the task. Any text; should be unique in the request.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub id: Text<'a>,
    /// Node that would take its dump.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub node: Option<Text<'a>>,
    /// Job that its dumps belong to. From it the store knows whether there is a checkpoint, and how large the dumps
    /// were.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub job: Option<Text<'a>>,
    /// Kind of its job: jobs of a kind have dumps that are alike.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub program: Option<Text<'a>>,
    /// Resident memory, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident_bytes: Option<Bytes>,
    /// Pages of 4 KiB written since its last checkpoint, where the kernel counts them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_pages: Option<Count>,
    /// Memory that it dirties, bytes a second. Needed for a pre-copied dump only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_bytes_per_s: Option<BytesPerSecond>,
    /// Bytes that a full dump of it moves, if the caller knows better than the store's prediction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub full_bytes: Option<Bytes>,
    /// Bytes that an incremental dump of it moves, if the caller knows better than the store's prediction: its dirty
    /// pages where the kernel counts them, else nearly all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incremental_bytes: Option<Bytes>,
    /// Work it has done, seconds, which a kill loses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress_s: Option<Seconds>,
    /// True if the progress counts from the last start or restore, as a process or a pod counts it: the work that the
    /// job's last checkpoint holds is added, if the task was started or restored after it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub progress_of_this_run: bool,
    /// Process that runs, as `BOOT_ID/START_TICKS` (field 22 of `/proc/PID/stat`). It distinguishes a task that
    /// continues after a dump from one that was restored. Without it, a task whose progress is longer than the age of
    /// the checkpoint is treated as one that continues.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub process: Option<Text<'a>>,
    /// Work it has done since its last checkpoint, seconds. Default: the time since that checkpoint, limited to the
    /// progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_checkpoint_s: Option<Seconds>,
    /// Time to its end, seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remaining_s: Option<Seconds>,
    /// Start-up time before the task works, seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_s: Option<Seconds>,
    /// Time that the task is given to end before it is killed, seconds: mechanisms that take longer at the 95th
    /// percentile are not offered. Default: any time. An estimate ignores it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_s: Option<Seconds>,
    /// Resources that become free when it stops; none if left out.
    #[serde(default)]
    pub holds: Resources,
    /// Job of its scheduler that it is one task of, for policies that choose a job first. Default: its `job`.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub group: Option<Text<'a>>,
    /// Time until the deadline of that job, seconds; the same for all tasks of the job, or left out by all but one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_s: Option<Seconds>,
    /// Priority of the task, 0 to 255; larger goes first. 0 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u8>,
}

/// Processors and memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Resources {
    /// Processors, in thousandths of one.
    pub cpu_millis: Count,
    /// Memory in bytes.
    pub memory_bytes: Bytes,
}

/// Memory and swap of a machine on which tasks could be suspended without a dump.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Swap<'a> {
    /// Node that tasks of this machine name.
    #[serde(borrow)]
    #[schema(value_type = String)]
    pub node: Text<'a>,
    /// Memory that is free without anything being paged out, bytes.
    pub free_memory_bytes: Bytes,
    /// Free swap, minus the part that suspended tasks may still need, bytes.
    pub free_swap_bytes: Bytes,
    /// Bandwidth of paging out; missing if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_bytes_per_s: Option<BytesPerSecond>,
    /// Bandwidth of paging in; missing if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes_per_s: Option<BytesPerSecond>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_nothing_and_unknown_fields_refused() {
        let task: Task<'_> =
            serde_json::from_str(r#"{"id":"a","node":"n","resident_bytes":5e9}"#).unwrap();
        assert_eq!(task.id.as_str(), "a");
        assert_eq!(task.node.as_deref(), Some("n"));
        assert_eq!(task.resident_bytes.unwrap().count(), 5_000_000_000);
        assert_eq!(task.holds, Resources::default());
        let unknown = serde_json::from_str::<Task<'_>>(r#"{"id":"a","nod":"n"}"#).unwrap_err();
        assert!(unknown.to_string().contains("unknown field `nod`"));
    }
}
