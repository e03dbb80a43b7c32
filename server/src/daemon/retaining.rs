//! Applies the rules of retention: after a dump to its job, and now and then to everything.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use permafrost_clustered::ClusteredStore;

/// Longest time until the rules are applied to a job that has had a dump.
const TICK: Duration = Duration::from_secs(1);

/// Period at which the policies are read again: another node may have set some.
const REFRESH: Duration = Duration::from_secs(10);

/// Function that returns true while this node decides for its cluster.
pub(super) type Decides = Box<dyn Fn() -> bool + Send>;

/// Thread that applies the rules. Dropped, it is waited for: it ends after the removal that it is in.
pub(super) struct Retaining {
    stopped: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Retaining {
    /// Starts the thread. Without an interval it only reads the policies, as quotas of theirs hold all the same.
    /// `decides` is absent on a single node.
    pub(super) fn begin(
        store: &Arc<ClusteredStore>,
        interval: Option<Duration>,
        decides: Option<Decides>,
    ) -> Self {
        let stopped = Arc::new(AtomicBool::new(false));
        let (weak, ends) = (Arc::downgrade(store), Arc::clone(&stopped));
        let decides = decides.unwrap_or_else(|| Box::new(|| true));
        let thread = std::thread::Builder::new()
            .name("retention".to_owned())
            .spawn(move || run(&weak, interval, &decides, &ends))
            .inspect_err(|error| tracing::error!(event = "retention-thread-failed", %error, "no thread for retention"))
            .ok();
        Self { stopped, thread }
    }

    /// Has the thread end soon: it may be waiting for the registry.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Retaining {
    fn drop(&mut self) {
        self.stop();
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            tracing::error!(event = "retention-panicked", "retention failed");
        }
    }
}

fn run(
    store: &Weak<ClusteredStore>,
    interval: Option<Duration>,
    decides: &Decides,
    stopped: &AtomicBool,
) {
    let is_stopped = || stopped.load(Ordering::Relaxed);
    let (mut last, mut refreshed) = (Instant::now(), Instant::now());
    let mut is_failing = false;
    while !is_stopped() {
        std::thread::park_timeout(interval.unwrap_or(TICK).min(TICK));
        let Some(store) = store.upgrade() else { return };
        if is_stopped() {
            return;
        }
        let is_due = interval.is_some_and(|interval| last.elapsed() >= interval);
        if interval.is_some() {
            store.apply_to_sealed(&is_stopped);
        }
        let done = if is_due {
            last = Instant::now();
            store.apply_retention(decides(), &is_stopped)
        } else if refreshed.elapsed() >= REFRESH {
            refreshed = Instant::now();
            store.refresh_policies().map(drop)
        } else {
            continue;
        };
        // Once for each failure: it is tried again all the time.
        if let Err(error) = done
            .as_ref()
            .map_err(|error| error as &dyn std::error::Error)
            && !is_failing
        {
            tracing::warn!(
                event = "retention-not-applied",
                error,
                "retention not applied"
            );
        }
        is_failing = done.is_err();
    }
}
