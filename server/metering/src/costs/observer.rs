//! Implements the store's observer with the costs.

use std::sync::Arc;
use std::time::Duration;

use permafrost_protocol::control;
use permafrost_store::{Beginning, DumpDone, Expected, Observer, Ongoing, RestoreDone, StoreEvent};

use super::begin::MeteredTransfer;
use super::measure::ScrubDone;
use super::state::Costs;

/// Observer that records a store's operations in the costs.
#[derive(Debug)]
pub struct Learning(pub Arc<Costs>);

impl Observer for Learning {
    fn dump_begins(&self, beginning: &Beginning<'_>) -> Box<dyn Ongoing> {
        Box::new(self.0.begin_dump(beginning))
    }

    fn dumped(&self, done: &DumpDone<'_>) {
        self.0.dumped(done);
    }

    fn learn_history(&self, checkpoints: &[control::Checkpoint]) {
        self.0.learn_history(checkpoints);
    }

    fn restore_begins(&self, bytes: u64) -> Box<dyn Ongoing> {
        Box::new(self.0.begin_restore(bytes))
    }

    fn restored(&self, done: &RestoreDone<'_>) {
        self.0.restored(done);
    }

    fn scrubbed(&self, bytes: u64, elapsed: Duration) {
        self.0.scrubbed(&ScrubDone { bytes, elapsed });
    }

    fn recalled(&self, bytes: u64, elapsed: Duration) {
        self.0.recalled(bytes, elapsed);
    }

    fn tell(&self, event: &dyn Fn() -> StoreEvent) {
        self.0.tell(event);
    }
}

impl Ongoing for MeteredTransfer {
    fn expected(&self) -> Option<Expected> {
        self.expected
    }

    fn read_so_far(&self, bytes: u64) {
        MeteredTransfer::read_so_far(self, bytes);
    }

    fn all_read(&self) -> u64 {
        MeteredTransfer::all_read(self)
    }

    fn tier(&self) -> u16 {
        self.tier
    }
}
