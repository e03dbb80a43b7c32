//! Checkpoints that are being read: retention leaves them alone.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Time for which a checkpoint counts as being read after the last read of it: a restore through an agent reads one
/// file after another.
const LINGER: Duration = Duration::from_secs(30);

/// Number of entries from which those that are over are looked for.
const LOOK_FROM: usize = 64;

/// Reads of checkpoints, by id.
#[derive(Default)]
pub(super) struct Reads(Mutex<HashMap<String, Reading>>);

struct Reading {
    readers: usize,
    /// End of the last read.
    ended: Instant,
}

impl Reading {
    fn counts(&self) -> bool {
        self.readers > 0 || self.ended.elapsed() < LINGER
    }
}

/// A read of a checkpoint, until it is dropped.
pub(super) struct ReadGuard {
    reads: Arc<Reads>,
    id: String,
}

impl Reads {
    /// Begins a read.
    pub(super) fn begin(self: &Arc<Self>, id: &str) -> ReadGuard {
        let mut reads = self.0.lock();
        if reads.len() >= LOOK_FROM {
            reads.retain(|_, reading| reading.counts());
        }
        let reading = reads.entry(id.to_owned()).or_insert_with(|| Reading {
            readers: 0,
            ended: Instant::now(),
        });
        reading.readers += 1;
        ReadGuard {
            reads: Arc::clone(self),
            id: id.to_owned(),
        }
    }

    /// Returns true if a checkpoint is being read, or was a moment ago.
    pub(super) fn has(&self, id: &str) -> bool {
        self.0.lock().get(id).is_some_and(Reading::counts)
    }

    /// Returns the checkpoints that are being read, or were a moment ago.
    pub(super) fn all(&self) -> Vec<String> {
        let reads = self.0.lock();
        let those = reads.iter().filter(|(_, reading)| reading.counts());
        those.map(|(id, _)| id.clone()).collect()
    }
}

impl Drop for ReadGuard {
    fn drop(&mut self) {
        if let Some(reading) = self.reads.0.lock().get_mut(&self.id) {
            reading.readers = reading.readers.saturating_sub(1);
            reading.ended = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_in_use_while_it_is_read_and_a_moment_longer() {
        let reads = Arc::<Reads>::default();
        let (first, second) = (reads.begin("a"), reads.begin("a"));
        drop(first);
        assert!(reads.has("a") && !reads.has("b"));
        drop(second);
        assert_eq!(reads.all(), ["a"], "the next file may be asked for at once");
        if let Some(reading) = reads.0.lock().get_mut("a") {
            reading.ended = Instant::now().checked_sub(LINGER).unwrap();
        }
        assert!(!reads.has("a") && reads.all().is_empty());
        let _many: Vec<_> = (0..=LOOK_FROM)
            .map(|n| reads.begin(&n.to_string()))
            .collect();
        assert!(!reads.0.lock().contains_key("a"), "forgotten");
    }
}
