//! Threads that count, so that a restore has threads to bring back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Period at which a thread counts.
const TICK: Duration = Duration::from_millis(1);

pub(crate) struct Ticker {
    counters: Vec<Arc<AtomicU64>>,
}

impl Ticker {
    pub(crate) fn start(threads: u32) -> Self {
        let counters = (0..threads)
            .map(|_| {
                let counter = Arc::new(AtomicU64::new(0));
                let ours = Arc::clone(&counter);
                std::thread::spawn(move || {
                    loop {
                        ours.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(TICK);
                    }
                });
                counter
            })
            .collect();
        Self { counters }
    }

    pub(crate) fn ticks(&self) -> u64 {
        self.counters
            .iter()
            .map(|counter| counter.load(Ordering::Relaxed))
            .sum()
    }

    /// Checks that every thread still counts. Returns a message if one has stopped.
    pub(crate) fn verify(&self) -> Option<String> {
        let before: Vec<u64> = self
            .counters
            .iter()
            .map(|counter| counter.load(Ordering::Relaxed))
            .collect();
        // Patient: the threads may share two processors with everything else.
        for _ in 0..2000 {
            std::thread::sleep(TICK);
            if self
                .counters
                .iter()
                .zip(&before)
                .all(|(counter, &before)| counter.load(Ordering::Relaxed) > before)
            {
                return None;
            }
        }
        Some("a thread has stopped counting".to_owned())
    }
}
