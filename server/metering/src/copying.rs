//! Progress of copies and of repair, for those who look at it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Counters of one node since its daemon's start. The gauges are 0 on every node but the leader.
#[derive(Debug, Default)]
pub struct RepairProgress {
    /// Copies that were made on this node or on others.
    pub copies_made: AtomicU64,
    /// Memory of the checkpoints that were copied, bytes.
    pub bytes_copied: AtomicU64,
    /// Copies that failed; each is retried.
    pub copies_failed: AtomicU64,
    /// Surplus copies that were dropped.
    pub copies_dropped: AtomicU64,
    /// Rounds of planning over the whole listing.
    pub rounds: AtomicU64,
    /// Checkpoints that currently have fewer good copies on live nodes that stay than they should have.
    pub under_replicated: AtomicU64,
    /// Checkpoints that currently no live node has undamaged. Included in [`Self::under_replicated`].
    pub stranded: AtomicU64,
    /// Copies that are currently known to be damaged.
    pub damaged: AtomicU64,
    /// Copies that are currently being made, or wait.
    pub under_way: AtomicU64,
}

impl RepairProgress {
    /// Adds to a counter.
    pub fn add(counter: &AtomicU64, more: u64) {
        counter.fetch_add(more, Ordering::Relaxed);
    }

    /// Sets a gauge.
    pub fn set(counter: &AtomicU64, to: usize) {
        counter.store(u64::try_from(to).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Sets the gauges to 0, because this node does not lead.
    pub fn quiet(&self) {
        let now = [
            &self.under_replicated,
            &self.stranded,
            &self.damaged,
            &self.under_way,
        ];
        for now in now {
            now.store(0, Ordering::Relaxed);
        }
    }
}

/// A step that a node is taking, or is to take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepairStep {
    /// Node that takes the step.
    pub node: String,
    /// Name of the checkpoint's job.
    pub job: String,
    /// Generation of the checkpoint.
    pub generation: u64,
    /// Memory of the checkpoint, bytes.
    pub memory_bytes: u64,
    /// True if the node makes a copy, false if it drops one.
    pub is_copy: bool,
    /// True if the node is taking it, false if it waits behind others of its node.
    pub is_running: bool,
}

/// A checkpoint that is being pulled from another node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunningPull {
    /// Name of the job.
    pub job: String,
    /// Generation of the checkpoint.
    pub generation: u64,
    /// Node that it comes from.
    pub from: String,
    /// Memory that has been told of, bytes: pages that came, and those that were only named as zero or the parent's.
    pub told_bytes: u64,
    /// Bytes of pages that came over the network.
    pub moved_bytes: u64,
    /// Memory of the checkpoint, bytes.
    pub memory_bytes: u64,
    /// Time since it began.
    pub age: Duration,
    /// True if its rate is limited, as repair's is.
    pub background: bool,
}

/// Pulls that run, by number.
#[derive(Debug, Default)]
pub struct Pulls {
    running: Mutex<HashMap<u64, (Instant, RunningPull)>>,
    last: AtomicU64,
}

/// Progress of a pull, which is told of until this is dropped.
#[derive(Debug)]
pub struct PullProgress {
    pulls: Arc<Pulls>,
    number: u64,
}

impl Pulls {
    /// Tells of a pull that begins.
    #[must_use]
    pub fn begin(self: &Arc<Self>, pull: RunningPull) -> PullProgress {
        let number = self.last.fetch_add(1, Ordering::Relaxed);
        self.running.lock().insert(number, (Instant::now(), pull));
        PullProgress {
            pulls: Arc::clone(self),
            number,
        }
    }

    /// Returns the pulls that run, the oldest first.
    #[must_use]
    pub fn look(&self) -> Vec<RunningPull> {
        let mut running: Vec<_> = {
            let running = self.running.lock();
            let told = running.values().map(|(since, pull)| RunningPull {
                age: since.elapsed(),
                ..pull.clone()
            });
            told.collect()
        };
        running.sort_by_key(|pull| std::cmp::Reverse(pull.age));
        running
    }
}

impl PullProgress {
    /// Adds pages that were told of, and the bytes of those that came.
    pub fn told(&self, told_bytes: u64, moved_bytes: u64) {
        if let Some((_, pull)) = self.pulls.running.lock().get_mut(&self.number) {
            pull.told_bytes = pull.told_bytes.saturating_add(told_bytes);
            pull.moved_bytes = pull.moved_bytes.saturating_add(moved_bytes);
        }
    }
}

impl Drop for PullProgress {
    fn drop(&mut self) {
        self.pulls.running.lock().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pull_is_told_of_while_it_runs() {
        let pulls = Arc::<Pulls>::default();
        let pull = |generation| RunningPull {
            job: "j".to_owned(),
            generation,
            from: "n".to_owned(),
            memory_bytes: 100,
            ..RunningPull::default()
        };
        let first = pulls.begin(pull(1));
        std::thread::sleep(Duration::from_millis(2));
        let second = pulls.begin(pull(2));
        first.told(40, 10);
        first.told(20, 5);
        let seen = pulls.look();
        let told = |pull: &RunningPull| (pull.generation, pull.told_bytes, pull.moved_bytes);
        assert_eq!(
            seen.iter().map(told).collect::<Vec<_>>(),
            [(1, 60, 15), (2, 0, 0)]
        );
        assert!(seen[0].age > seen[1].age);
        drop(first);
        assert_eq!(pulls.look().len(), 1);
        drop(second);
        assert!(pulls.look().is_empty());
    }
}
