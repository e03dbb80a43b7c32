//! Costs of preempting and resuming, and the mechanisms for preempting.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A way to take the resources of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mechanism {
    /// Wait for its end.
    Wait,
    /// Kill it; it restarts from the beginning later.
    Kill,
    /// Kill it; it continues later from its last checkpoint.
    Rollback,
    /// Stop it; its memory stays, and is paged out as far as needed.
    SuspendInMemory,
    /// Dump the pages that changed since its last checkpoint.
    IncrementalDump,
    /// Dump all of its memory.
    FullDump,
    /// Dump all of its memory while it runs, then the pages that changed meanwhile.
    PreCopiedDump,
}

impl Mechanism {
    /// All mechanisms, in the order in which they are preferred where they cost the same.
    pub const ALL: [Self; 7] = [
        Self::Wait,
        Self::Kill,
        Self::Rollback,
        Self::SuspendInMemory,
        Self::IncrementalDump,
        Self::FullDump,
        Self::PreCopiedDump,
    ];
}

/// Place where a dump has to be stored before the task may be stopped.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Copies {
    /// Stored on the task's node.
    #[default]
    Local,
    /// Stored on the task's node and on another node.
    Replicated,
}

/// Quantile of a spread that decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum By {
    /// The median: best on the average.
    #[default]
    P50,
    /// The 95th percentile: no bad surprises.
    P95,
}

/// Amount of detail in a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = Detail)]
pub enum ReplyDetail {
    /// Costs with their parts and reasons.
    #[default]
    Full,
    /// Sums only: a third of the bytes, and quicker.
    Totals,
}

/// Duration with its median and its 95th percentile, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Spread {
    /// Median duration, seconds.
    #[schema(minimum = 0)]
    pub p50: f64,
    /// 95 of 100 take no longer; never below the median.
    #[schema(minimum = 0)]
    pub p95: f64,
}

/// Cost of preempting or resuming a task. It has three sums of its parts, one for each party that loses time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Cost {
    /// Time that the victim loses: time without progress, and work done again. For a resumption, its whole cost.
    pub overhead_s: Spread,
    /// Time that the preempting party waits until the resources are free.
    pub delay_s: Spread,
    /// Time that a resumed task waits until it runs.
    pub until_running_s: Spread,
    /// Parts of the cost, in the order in which they happen; missing with `totals`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<Vec<PartOfCost>>,
    /// Age of the oldest figure in it, seconds.
    #[schema(minimum = 0)]
    pub age_s: f64,
    /// Fixed part that the cost does not include because it was never measured, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub omits: Option<String>,
    /// Explanation of the cost in words; missing with `totals`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A part of a cost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PartOfCost {
    /// Name of the part.
    pub part: Part,
    /// Median of the part, seconds.
    #[schema(minimum = 0)]
    pub p50_s: f64,
    /// 95th percentile, seconds.
    #[schema(minimum = 0)]
    pub p95_s: f64,
}

/// Name of a part of a cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Wait for earlier dumps of the node.
    WriteQueue,
    /// A dump's fixed time.
    DumpStart,
    /// Pages written while the task still runs.
    PreCopy,
    /// Pages are written to the medium.
    Write,
    /// Time that replication to another node takes beyond the local write.
    Replicate,
    /// Memory that the kernel writes to swap.
    PageOut,
    /// The rest of the task's time.
    Wait,
    /// Work that is done again.
    LostWork,
    /// The task's own start-up.
    Start,
    /// Wait for earlier restores of the node.
    ReadQueue,
    /// A restore's fixed time.
    RestoreStart,
    /// Pages of the copy come back from an object store.
    Recall,
    /// Pages that the node lacks.
    Transfer,
    /// Pages are read from the medium.
    Read,
    /// Memory that comes back from swap.
    PageIn,
    /// Pages that the task waits for while it runs.
    Faults,
}

impl Part {
    /// All parts, in the order in which they happen.
    pub const ALL: [Self; 16] = [
        Self::WriteQueue,
        Self::DumpStart,
        Self::PreCopy,
        Self::Write,
        Self::Replicate,
        Self::PageOut,
        Self::Wait,
        Self::LostWork,
        Self::Start,
        Self::ReadQueue,
        Self::RestoreStart,
        Self::Recall,
        Self::Transfer,
        Self::Read,
        Self::PageIn,
        Self::Faults,
    ];
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WriteQueue => "queue of dumps",
            Self::DumpStart => "start of the dump",
            Self::PreCopy => "copy while running",
            Self::Write => "write",
            Self::Replicate => "wait for the other copy",
            Self::PageOut => "page out",
            Self::Wait => "wait for the end",
            Self::LostWork => "lost work",
            Self::Start => "start-up",
            Self::ReadQueue => "queue of restores",
            Self::RestoreStart => "start of the restore",
            Self::Recall => "recall from the object store",
            Self::Transfer => "transfer",
            Self::Read => "read",
            Self::PageIn => "page in",
            Self::Faults => "page faults",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_stand_at_their_own_places() {
        for (index, part) in Part::ALL.into_iter().enumerate() {
            assert_eq!(part as usize, index);
        }
    }
}
