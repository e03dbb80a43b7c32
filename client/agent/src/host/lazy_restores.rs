//! Lazy restores under way. A host that stops has them finish first: their processes would end with it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use permafrost_lazy::FillGate;

/// Most time for lazy restores to finish when a host stops. Service managers wait for 90 s by default.
pub(super) const FINISHING: Duration = Duration::from_secs(60);

/// Interval at which a stop looks whether all have finished.
const TICK: Duration = Duration::from_millis(20);

/// Lazy restores under way on a host.
#[derive(Default)]
pub(super) struct LazyRestores(Arc<Mutex<UnderWay>>);

#[derive(Default)]
struct UnderWay {
    /// Gates of their background transfers, as far as they are known, by their numbers.
    gates: HashMap<u64, Option<Arc<FillGate>>>,
    last: u64,
    is_stopping: bool,
}

/// A lazy restore, which is under way until this is dropped.
pub(super) struct LazyRestore {
    all: Arc<Mutex<UnderWay>>,
    number: u64,
}

impl LazyRestores {
    /// Records that a restore begins.
    pub(super) fn begin(&self) -> LazyRestore {
        let mut under_way = self.0.lock();
        under_way.last += 1;
        let number = under_way.last;
        under_way.gates.insert(number, None);
        LazyRestore {
            all: Arc::clone(&self.0),
            number,
        }
    }

    /// Has all of their memory brought now, also what nobody has accessed, and waits until none is under way, `limit`
    /// at most. Returns the number of those that are left.
    pub(super) async fn finish(&self, limit: Duration) -> usize {
        let begun = Instant::now();
        let found = {
            let mut under_way = self.0.lock();
            under_way.is_stopping = true;
            let gates = under_way.gates.values().flatten();
            gates.for_each(|gate| gate.open());
            under_way.gates.len()
        };
        if found > 0 {
            tracing::info!(
                event = "lazy-restores-finishing",
                restores = found,
                seconds = limit.as_secs(),
                "the memory of lazy restores is brought before the stop"
            );
        }
        loop {
            let left = self.0.lock().gates.len();
            if left == 0 || begun.elapsed() >= limit {
                return left;
            }
            tokio::time::sleep(TICK).await;
        }
    }
}

impl LazyRestore {
    /// Records the gate at which the background transfer waits.
    pub(super) fn waits_at(&self, gate: &Arc<FillGate>) {
        let mut under_way = self.all.lock();
        if under_way.is_stopping {
            gate.open();
        }
        under_way.gates.insert(self.number, Some(Arc::clone(gate)));
    }
}

impl Drop for LazyRestore {
    fn drop(&mut self) {
        self.all.lock().gates.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stop_opens_all_gates_and_waits_for_the_restores() {
        let all = LazyRestores::default();
        assert_eq!(all.finish(Duration::ZERO).await, 0);
        let all = LazyRestores::default();
        let gates: [Arc<FillGate>; 2] = std::array::from_fn(|_| Arc::default());
        let [first, second] = [all.begin(), all.begin()];
        first.waits_at(&gates[0]);
        assert_eq!(all.finish(Duration::ZERO).await, 2);
        assert!(gates[0].wait_until_open(Duration::ZERO));
        drop(first);
        second.waits_at(&gates[1]);
        assert!(gates[1].wait_until_open(Duration::ZERO));
        assert_eq!(all.finish(Duration::ZERO).await, 1);
        drop(second);
        assert_eq!(all.finish(Duration::MAX).await, 0);
    }
}
