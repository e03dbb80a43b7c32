//! Figures of a task that may be preempted.

use serde::{Deserialize, Serialize};

use crate::TaskId;
use crate::figure::{Figure, What};
use crate::quantity::{Bytes, BytesPerSecond, Seconds};

/// Processors and memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskResources {
    /// Processors, in thousandths of one.
    pub cpu_millis: u64,
    /// Amount of memory.
    pub memory: Bytes,
}

impl TaskResources {
    /// No processors and no memory.
    pub const ZERO: Self = Self {
        cpu_millis: 0,
        memory: Bytes::ZERO,
    };

    /// Returns the sum, at most the largest numbers.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            cpu_millis: self.cpu_millis.saturating_add(other.cpu_millis),
            memory: self.memory.plus(other.memory),
        }
    }

    /// Returns the difference, at least 0 of each.
    #[must_use]
    pub const fn less(self, other: Self) -> Self {
        Self {
            cpu_millis: self.cpu_millis.saturating_sub(other.cpu_millis),
            memory: self.memory.less(other.memory),
        }
    }

    /// Returns the smaller amount of each resource.
    #[must_use]
    pub fn least(self, other: Self) -> Self {
        Self {
            cpu_millis: self.cpu_millis.min(other.cpu_millis),
            memory: self.memory.min(other.memory),
        }
    }

    /// Returns true if there is nothing of either resource.
    #[must_use]
    pub fn is_none(self) -> bool {
        self == Self::ZERO
    }

    /// Returns true if there is at least as much of each resource as in `other`.
    #[must_use]
    pub fn covers(self, other: Self) -> bool {
        other.less(self).is_none()
    }
}

/// Figures of a running task, as far as they are known.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskFigures {
    /// Id of the task.
    pub id: TaskId,
    /// Resources that become free when it stops.
    pub holds: TaskResources,
    /// Bytes that a full dump of it moves, and a restore reads: its memory.
    pub full: Figure<Bytes>,
    /// True if it has a checkpoint to build on.
    pub has_checkpoint: bool,
    /// Bytes that an incremental dump of it moves: dirty pages where the kernel counts them, else nearly all. Not the
    /// bytes that it stores: those are for finding room ([`Prediction::size`](crate::size::Prediction)).
    pub incremental: Figure<Bytes>,
    /// Resident memory of the task.
    pub resident: Figure<Bytes>,
    /// Memory that it dirties.
    pub dirty_rate: Figure<BytesPerSecond>,
    /// Work it has done since its start, which a kill loses. Paper 000 calls this progress.
    pub progress: Figure<Seconds>,
    /// Work it has done since its last checkpoint.
    pub since_checkpoint: Figure<Seconds>,
    /// Time to its end.
    pub remaining: Figure<Seconds>,
    /// Start-up time before the task works.
    pub start: Figure<Seconds>,
    /// Time that the task is given to end before it is killed. Mechanisms whose p95 duration exceeds it are not
    /// offered. `None`: any duration is allowed.
    pub grace: Option<Seconds>,
}

impl TaskFigures {
    /// Makes the figures of a task of which only its resources are known.
    #[must_use]
    pub const fn unknown(id: TaskId, holds: TaskResources) -> Self {
        Self {
            id,
            holds,
            full: Figure::not_given(What::FullSize),
            has_checkpoint: false,
            incremental: Figure::not_given(What::IncrementalSize),
            resident: Figure::not_given(What::Memory),
            dirty_rate: Figure::not_given(What::DirtyRate),
            progress: Figure::not_given(What::Progress),
            since_checkpoint: Figure::not_given(What::WorkSinceCheckpoint),
            remaining: Figure::not_given(What::RemainingTime),
            start: Figure::not_given(What::StartTime),
            grace: None,
        }
    }
}
