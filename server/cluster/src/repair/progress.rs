//! How repair is getting on, for metrics and `permafrost status`.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one node, which count from its daemon's start. What is *now* is 0 on every node but the leader.
#[derive(Debug, Default)]
pub struct Progress {
    /// Copies that were made on other nodes, or on this one.
    pub copies_made: AtomicU64,
    /// Memory of the checkpoints that were copied, bytes.
    pub bytes_copied: AtomicU64,
    /// Copies that were not made; each is tried again.
    pub copies_failed: AtomicU64,
    /// Copies that were taken away, as there were enough.
    pub copies_dropped: AtomicU64,
    /// Looks at all that is listed.
    pub rounds: AtomicU64,
    /// Checkpoints with fewer good copies on live nodes that stay than they should have, now.
    pub under_replicated: AtomicU64,
    /// Checkpoints that no live node has undamaged, now. Counted among those above.
    pub stranded: AtomicU64,
    /// Copies that are known to be damaged, now.
    pub damaged: AtomicU64,
    /// Copies that are being made or wait for their turn, now.
    pub under_way: AtomicU64,
}

impl Progress {
    pub(super) fn add(counter: &AtomicU64, more: u64) {
        counter.fetch_add(more, Ordering::Relaxed);
    }

    pub(super) fn set(counter: &AtomicU64, to: usize) {
        counter.store(u64::try_from(to).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// This node does not lead: what is now is another's to say.
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
