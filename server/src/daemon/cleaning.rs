//! Cleaning in the background.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use permafrost_store::Store;

/// Thread that cleans the region. Dropped, it ends within a step.
pub(super) struct Cleaning {
    stopped: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Cleaning {
    /// Starts the thread; without an interval, none.
    pub(super) fn begin(store: &Arc<Store>, interval: Option<Duration>) -> Self {
        let stopped = Arc::new(AtomicBool::new(false));
        let thread = interval.and_then(|interval| {
            let (store, stopped) = (Arc::downgrade(store), Arc::clone(&stopped));
            let spawned = std::thread::Builder::new()
                .name("cleaning".to_owned())
                .spawn(move || clean(&store, interval, &stopped));
            spawned
                .inspect_err(|error| tracing::error!(event = "cleaning-thread-failed", %error, "no thread for cleaning"))
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
                tracing::error!(event = "cleaning-panicked", "cleaning failed");
            }
        }
    }
}

/// Time between two looks at how much a region has grown.
const LOOK: Duration = Duration::from_secs(1);

fn clean(store: &Weak<Store>, interval: Duration, stopped: &AtomicBool) {
    let is_stopped = || stopped.load(Ordering::Relaxed);
    let mut since = Instant::now();
    while !is_stopped() {
        std::thread::park_timeout(interval.min(LOOK));
        let Some(store) = store.upgrade() else { return };
        // Where much is written, an interval would leave too much uncleaned.
        let cleaned = if since.elapsed() < interval {
            store.clean_if_grown(&is_stopped)
        } else {
            since = Instant::now();
            store.clean_in_background(&is_stopped)
        };
        if let Err(error) = cleaned {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(event = "cleaning-failed", error, "region not cleaned");
        }
    }
}
