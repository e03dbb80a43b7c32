//! When the pages that nobody waits for are brought.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Keeps the background transfer of a lazy restore waiting until it is its turn. The processes run meanwhile, and their
/// faults are answered: of many processes that are started at once, each runs before the memory of all others has come.
/// Where only pages that are accessed are brought, it opens if the server stops.
#[derive(Debug, Default)]
pub struct FillGate {
    state: Mutex<GateState>,
    changed: Condvar,
    moved: Arc<AtomicU64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum GateState {
    #[default]
    Closed,
    Open,
    /// There is nothing to bring any more.
    Over,
}

impl FillGate {
    /// Makes a gate for a transfer that need not wait.
    #[must_use]
    pub fn opened() -> Self {
        let gate = Self::default();
        gate.open();
        gate
    }

    /// Lets the transfer begin.
    pub fn open(&self) {
        let mut state = self.state.lock();
        if *state == GateState::Closed {
            *state = GateState::Open;
        }
        self.changed.notify_all();
    }

    /// Records that the restore is over: nobody waits for its turn any more.
    pub fn end(&self) {
        *self.state.lock() = GateState::Over;
        self.changed.notify_all();
    }

    /// Returns true once the restore is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        *self.state.lock() == GateState::Over
    }

    /// Returns the counter of the bytes that the transfer has brought.
    #[must_use]
    pub fn counter(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.moved)
    }

    pub(super) fn add(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Waits until the restore is over.
    pub fn wait_until_over(&self) {
        let mut state = self.state.lock();
        while *state != GateState::Over {
            self.changed.wait(&mut state);
        }
    }

    /// Waits until the transfer may begin, `limit` at most. Returns true if it may.
    pub fn wait_until_open(&self, limit: Duration) -> bool {
        let mut state = self.state.lock();
        if *state == GateState::Closed {
            self.changed.wait_for(&mut state, limit);
        }
        *state != GateState::Closed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(1);

    #[test]
    fn a_transfer_waits_until_it_may_begin_or_there_is_nothing_to_bring() {
        assert!(FillGate::opened().wait_until_open(Duration::MAX));
        let gate = FillGate::default();
        assert!(!gate.wait_until_open(SOON));
        std::thread::scope(|scope| {
            let begins = scope.spawn(|| gate.wait_until_open(Duration::from_secs(60)));
            gate.open();
            assert!(begins.join().unwrap());
            let ends = scope.spawn(|| gate.wait_until_over());
            assert!(!gate.is_over());
            gate.end();
            ends.join().unwrap();
        });
        assert!(gate.is_over());
    }

    #[test]
    fn an_admission_that_comes_after_the_end_does_not_open_it_again() {
        let gate = FillGate::default();
        gate.end();
        gate.open();
        assert!(gate.is_over());
        assert!(
            gate.wait_until_open(SOON),
            "the transfer finds out that nothing is missing"
        );
    }
}
