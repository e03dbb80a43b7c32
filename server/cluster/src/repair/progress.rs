//! Progress of repair, for metrics and `permafrost status`.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one node since its daemon's start. The gauges are 0 on every node but the leader.
#[derive(Debug, Default)]
pub struct RepairProgress {
    /// Copies that were made on this node or on others.
    pub copies_made: AtomicU64,
    /// Memory of the checkpoints that were copied, bytes.
    pub bytes_copied: AtomicU64,
    /// Copies that failed; each is retried.
    pub copies_failed: AtomicU64,
    /// Surplus copies that were dropped.
    pub copies_dropped: AtomicU64,
    /// Rounds of planning over the whole listing.
    pub rounds: AtomicU64,
    /// Checkpoints that currently have fewer good copies on live nodes that stay than they should have.
    pub under_replicated: AtomicU64,
    /// Checkpoints that currently no live node has undamaged. Included in [`Self::under_replicated`].
    pub stranded: AtomicU64,
    /// Copies that are currently known to be damaged.
    pub damaged: AtomicU64,
    /// Copies that are currently being made, or wait.
    pub under_way: AtomicU64,
}

impl RepairProgress {
    pub(super) fn add(counter: &AtomicU64, more: u64) {
        counter.fetch_add(more, Ordering::Relaxed);
    }

    pub(super) fn set(counter: &AtomicU64, to: usize) {
        counter.store(u64::try_from(to).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Sets the gauges to 0, because this node does not lead.
    pub(super) fn quiet(&self) {
        let now = [
            &self.under_replicated,
            &self.stranded,
            &self.damaged,
            &self.under_way,
        ];
        for now in now {
            now.store(0, Ordering::Relaxed);
        }
    }
}
