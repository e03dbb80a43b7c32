//! Estimates a dump or a restore when it begins, and distinguishes it from what else is running.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use permafrost_scheduling::estimator::Direction;
use permafrost_scheduling::quantity::Bytes;
use permafrost_scheduling::size::DumpKind;
use permafrost_store::{Beginning, Expected};

use super::channels::Lane;
use super::running::Running;
use super::state::Costs;

/// A registered dump or restore: it is under way until this is dropped.
#[derive(Debug)]
pub struct MeteredTransfer {
    costs: Arc<Costs>,
    number: u64,
    /// Expected size and duration; `None` where no estimate is possible.
    pub expected: Option<Expected>,
    moved: Arc<AtomicU64>,
    /// Number of the tier that dumps went to when it began.
    pub(super) tier: u16,
    /// Bytes that all restores were given before this one.
    read_before: u64,
}

impl Costs {
    /// Registers a dump that begins. Costs a lock, and the reading of a few hundred figures.
    #[must_use]
    pub fn begin_dump(self: &Arc<Self>, beginning: &Beginning<'_>) -> MeteredTransfer {
        self.look_at_tiers();
        let predicted = self.predict(
            beginning.job,
            beginning.program,
            beginning.kind,
            &beginning.memory,
        );
        let lane = Lane::of_dump(beginning.kind == DumpKind::Incremental, beginning.copied);
        let expected = predicted.ok().map(|predicted| {
            let (stored, moved) = (predicted.size.p50, predicted.moved.p50);
            self.expected(Direction::Write, lane, stored, moved)
        });
        self.begin(Direction::Write, expected, Arc::clone(&beginning.moved))
    }

    /// Registers a restore of `bytes` that begins.
    #[must_use]
    pub fn begin_restore(self: &Arc<Self>, bytes: u64) -> MeteredTransfer {
        let size = Bytes::new(bytes);
        let expected = self.expected(Direction::Read, Lane::Whole, size, size);
        self.begin(Direction::Read, Some(expected), Arc::default())
    }

    fn begin(
        self: &Arc<Self>,
        direction: Direction,
        expected: Option<Expected>,
        moved: Arc<AtomicU64>,
    ) -> MeteredTransfer {
        let mut state = self.state();
        state.next_ticket += 1;
        let number = state.next_ticket;
        let bytes = expected.map(|expected| expected.moved);
        let running = Running::new(number, direction, bytes, Arc::clone(&moved));
        state.running.push(running);
        let tier = state.tiers.current();
        drop(state);
        self.under_way.fetch_add(1, Ordering::Relaxed);
        MeteredTransfer {
            costs: Arc::clone(self),
            number,
            expected,
            moved,
            tier,
            read_before: self.read_bytes.load(Ordering::Relaxed),
        }
    }
}

impl MeteredTransfer {
    /// Records the total bytes that the restore was given so far.
    pub fn read_so_far(&self, bytes: u64) {
        let before = self.moved.fetch_max(bytes, Ordering::Relaxed);
        let more = bytes.saturating_sub(before);
        self.costs.read_bytes.fetch_add(more, Ordering::Relaxed);
    }

    /// Returns the bytes that all restores were given since this one began.
    #[must_use]
    pub fn all_read(&self) -> u64 {
        let now = self.costs.read_bytes.load(Ordering::Relaxed);
        now.saturating_sub(self.read_before)
    }
}

impl Drop for MeteredTransfer {
    fn drop(&mut self) {
        self.costs.under_way.fetch_sub(1, Ordering::Relaxed);
        let number = self.number;
        self.costs
            .state()
            .running
            .retain(|running| running.number != number);
    }
}
