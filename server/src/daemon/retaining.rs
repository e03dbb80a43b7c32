//! Applies the rules of retention: after a dump to its job, and now and then to everything.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use permafrost_clustered::ClusteredStore;

/// Longest time until the rules are applied to a job that has had a dump.
const TICK: Duration = Duration::from_secs(1);

/// Function that returns true while this node decides for its cluster.
pub(super) type Decides = Box<dyn Fn() -> bool + Send>;

/// Thread that applies the rules. Dropped, it ends after the removal that it is in.
pub(super) struct Retaining {
    stopped: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Retaining {
    /// Starts the thread; without an interval, none. `decides` is absent on a single node.
    pub(super) fn begin(
        store: &Arc<ClusteredStore>,
        interval: Option<Duration>,
        decides: Option<Decides>,
    ) -> Self {
        let stopped = Arc::new(AtomicBool::new(false));
        let thread = interval.and_then(|interval| {
            let (store, stopped) = (Arc::downgrade(store), Arc::clone(&stopped));
            let decides = decides.unwrap_or_else(|| Box::new(|| true));
            let spawned = std::thread::Builder::new()
                .name("retention".to_owned())
                .spawn(move || run(&store, interval, &decides, &stopped));
            spawned
                .inspect_err(|error| tracing::error!(%error, "no thread for retention"))
                .ok()
        });
        Self { stopped, thread }
    }

    /// Ends the thread, and waits for it.
    pub(super) fn end(mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("retention failed");
            }
        }
    }
}

fn run(store: &Weak<ClusteredStore>, interval: Duration, decides: &Decides, stopped: &AtomicBool) {
    let is_stopped = || stopped.load(Ordering::Relaxed);
    let mut last = Instant::now();
    while !is_stopped() {
        std::thread::park_timeout(TICK.min(interval));
        let Some(store) = store.upgrade() else { return };
        if is_stopped() {
            return;
        }
        store.apply_to_sealed(&is_stopped);
        if last.elapsed() < interval {
            continue;
        }
        if let Err(error) = store.apply_retention(decides(), &is_stopped) {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(error, "retention not applied");
        }
        last = Instant::now();
    }
}
