//! Accounts of a simulation: where the processor time went, and what the media did.
//!
//! Processor time is counted in thousandths of a processor times microseconds, as integers: the accounts add up
//! exactly, and in any order.

use permafrost_scheduling::cost::{Dump, PreemptionMechanism};
use permafrost_scheduling::quantity::{Bytes, Moment, Seconds};
use serde::Serialize;

/// Processor time, thousandths of a processor times microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessorTime(u128);

impl ProcessorTime {
    /// Returns the processor time of `cpu_millis` from `since` until `now`.
    #[must_use]
    pub const fn of(cpu_millis: u64, since: Moment, now: Moment) -> Self {
        let micros = now.micros().saturating_sub(since.micros());
        Self(cpu_millis as u128 * micros as u128)
    }

    /// Returns it in seconds of a processor.
    #[must_use]
    pub const fn core_seconds(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// Returns the sum.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// Returns the difference, at least 0.
    #[must_use]
    pub const fn less(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Adds another one.
    pub const fn add(&mut self, other: Self) {
        *self = self.plus(other);
    }
}

/// Numbers of preemptions by mechanism, and of what came back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Tasks killed without a checkpoint left.
    pub kills: u64,
    /// Tasks killed that go back to their last checkpoint.
    pub rollbacks: u64,
    /// Tasks suspended in memory.
    pub suspends: u64,
    /// Number of full dumps.
    pub full_dumps: u64,
    /// Number of incremental dumps.
    pub incremental_dumps: u64,
    /// Number of pre-copied dumps.
    pub pre_copied_dumps: u64,
    /// Changes of a task's resources.
    pub resizes: u64,
    /// Restores from a copy of the same node.
    pub local_restores: u64,
    /// Restores from a copy of another node.
    pub remote_restores: u64,
    /// Suspended tasks that went on.
    pub continues: u64,
    /// Tasks that lost their node.
    pub evictions: u64,
}

impl Counts {
    /// Counts a preemption.
    pub(super) const fn preempted(&mut self, mechanism: PreemptionMechanism) {
        let count = match mechanism {
            PreemptionMechanism::Wait => return,
            PreemptionMechanism::Kill => &mut self.kills,
            PreemptionMechanism::Rollback => &mut self.rollbacks,
            PreemptionMechanism::SuspendInMemory => &mut self.suspends,
            PreemptionMechanism::Checkpoint { dump, .. } => match dump {
                Dump::Full => &mut self.full_dumps,
                Dump::Incremental => &mut self.incremental_dumps,
                Dump::PreCopied => &mut self.pre_copied_dumps,
            },
        };
        *count += 1;
    }

    /// Returns the number of preemptions, by any mechanism.
    #[must_use]
    pub const fn preemptions(&self) -> u64 {
        self.kills
            + self.rollbacks
            + self.suspends
            + self.full_dumps
            + self.incremental_dumps
            + self.pre_copied_dumps
    }
}

/// All accounts of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Accounts {
    /// Processor time that tasks held on nodes.
    pub(super) held: ProcessorTime,
    /// Processor time of work that counts: of tasks that ended, and that no kill undid.
    pub(super) done: ProcessorTime,
    /// Processor time of work that was undone.
    pub(super) lost: ProcessorTime,
    /// Processor time of work that dumps kept: what killing the same tasks at the same times would have undone.
    pub(super) kept: ProcessorTime,
    /// Processor time held by tasks that were being started: that waited for their restore, or were restored.
    pub(super) starting: ProcessorTime,
    /// Processor time held by tasks that were about to leave: that waited for their dump, or were dumped.
    pub(super) leaving: ProcessorTime,
    /// Part of the two above in which the task's own transfer ran.
    pub(super) transferring: ProcessorTime,
    /// Seconds of a whole node that computes.
    pub(super) computing_s: f64,
    /// Seconds of a whole node that transfers, by the processors of the tasks that are transferred.
    pub(super) transferring_s: f64,
    /// Time for which media were busy.
    pub(super) medium_busy_s: f64,
    /// Bytes of checkpoints, now and over time.
    pub(super) stored: Stored,
    pub(super) counts: Counts,
    pub(super) decisions: u64,
    pub(super) refused: u64,
}

/// Bytes of checkpoints over time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stored {
    now: Bytes,
    peak: Bytes,
    since: Moment,
    byte_seconds: f64,
}

impl Stored {
    /// Records that there are `more` bytes and `less` bytes.
    pub(super) fn change(&mut self, now: Moment, more: Bytes, less: Bytes) {
        self.byte_seconds += self.now.count() as f64 * now.since(self.since).value();
        self.since = now;
        self.now = self.now.plus(more).less(less);
        self.peak = self.peak.max(self.now);
    }

    /// Returns the average over `time`, bytes.
    pub(super) fn average(&self, time: Seconds) -> f64 {
        self.byte_seconds / time.value().max(1e-9)
    }

    /// Returns the largest number of bytes.
    pub(super) const fn peak(&self) -> Bytes {
        self.peak
    }
}
