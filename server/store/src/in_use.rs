//! Checkpoints that are being read: retention leaves them alone.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use permafrost_pmem::StoredCheckpoint;

/// Time for which a checkpoint counts as being read after a read of one of its files: a restore through an agent reads
/// one file after another.
const LINGER: Duration = Duration::from_secs(30);

/// Most checkpoints that are held for readers that come back. More restores than that are not served at once either.
const MAX_HELD: usize = 512;

/// Number of entries from which those that are over are looked for.
const LOOK_FROM: usize = 64;

/// Reads of checkpoints, by id.
#[derive(Default)]
pub(super) struct Reads {
    reading: Mutex<HashMap<String, Reading>>,
    held: Mutex<HashMap<String, Held>>,
}

/// A checkpoint whose pages stay for a reader that comes back.
struct Held {
    checkpoint: Arc<StoredCheckpoint>,
    since: Instant,
}

struct Reading {
    readers: usize,
    /// End of the last read of a file.
    file_ended: Option<Instant>,
}

impl Reading {
    fn counts(&self) -> bool {
        let lingers = |ended: Instant| ended.elapsed() < LINGER;
        self.readers > 0 || self.file_ended.is_some_and(lingers)
    }
}

/// A read of a checkpoint, until it is dropped.
pub(super) struct ReadGuard {
    reads: Arc<Reads>,
    id: String,
    /// True if the read is of one file, and others may follow.
    of_file: bool,
}

impl Reads {
    /// Begins a read; `of_file` for a read of one file, after which others may follow.
    pub(super) fn begin(self: &Arc<Self>, id: &str, of_file: bool) -> ReadGuard {
        let mut reads = self.reading.lock();
        if reads.len() >= LOOK_FROM {
            reads.retain(|_, reading| reading.counts());
        }
        let reading = reads.entry(id.to_owned()).or_insert_with(|| Reading {
            readers: 0,
            file_ended: None,
        });
        reading.readers += 1;
        ReadGuard {
            reads: Arc::clone(self),
            id: id.to_owned(),
            of_file,
        }
    }

    /// Keeps the pages of a checkpoint for a while, for a reader that comes back: even if it is removed.
    pub(super) fn hold(&self, checkpoint: &Arc<StoredCheckpoint>) {
        self.release_expired();
        let mut held = self.held.lock();
        let id = checkpoint.id().to_string();
        if held.len() < MAX_HELD || held.contains_key(&id) {
            let held_now = Held {
                checkpoint: Arc::clone(checkpoint),
                since: Instant::now(),
            };
            held.insert(id, held_now);
        } else {
            tracing::warn!(
                event = "lazy-checkpoint-not-held",
                checkpoint = id,
                "not held for its reader: {MAX_HELD} checkpoints are; if it is removed, its lazy restores end"
            );
        }
    }

    /// Returns a checkpoint that is held.
    pub(super) fn held(&self, id: &str) -> Option<Arc<StoredCheckpoint>> {
        self.release_expired();
        let held = self.held.lock();
        held.get(id).map(|held| Arc::clone(&held.checkpoint))
    }

    /// Lets go of the checkpoints whose readers have not come back.
    pub(super) fn release_expired(&self) {
        self.held
            .lock()
            .retain(|_, held| held.since.elapsed() < LINGER);
    }

    /// Returns true if a checkpoint is being read, or was a moment ago.
    pub(super) fn has(&self, id: &str) -> bool {
        self.reading.lock().get(id).is_some_and(Reading::counts)
    }

    /// Returns the checkpoints that are being read, or were a moment ago.
    pub(super) fn all(&self) -> Vec<String> {
        let reads = self.reading.lock();
        let those = reads.iter().filter(|(_, reading)| reading.counts());
        those.map(|(id, _)| id.clone()).collect()
    }
}

impl ReadGuard {
    /// Keeps the pages of the checkpoint for a while after this read.
    pub(super) fn hold(&self, checkpoint: &Arc<StoredCheckpoint>) {
        self.reads.hold(checkpoint);
    }
}

impl Drop for ReadGuard {
    fn drop(&mut self) {
        if let Some(reading) = self.reads.reading.lock().get_mut(&self.id) {
            reading.readers = reading.readers.saturating_sub(1);
            if self.of_file {
                reading.file_ended = Some(Instant::now());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_in_use_while_it_is_read_and_a_moment_longer() {
        let reads = Arc::<Reads>::default();
        let (whole, file) = (reads.begin("a", false), reads.begin("a", true));
        drop(whole);
        assert!(reads.has("a") && !reads.has("b"));
        drop(file);
        assert_eq!(reads.all(), ["a"], "the next file may be asked for at once");
        if let Some(reading) = reads.reading.lock().get_mut("a") {
            reading.file_ended = Instant::now().checked_sub(LINGER);
        }
        assert!(!reads.has("a") && reads.all().is_empty());
        drop(reads.begin("b", false));
        assert!(!reads.has("b"), "all of it was read");
        let _many: Vec<_> = (0..=LOOK_FROM)
            .map(|n| reads.begin(&n.to_string(), false))
            .collect();
        assert!(!reads.reading.lock().contains_key("a"), "forgotten");
    }
}
