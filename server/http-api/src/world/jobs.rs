//! The checkpoints of a snapshot, by job.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_protocol::control::Checkpoint;
use permafrost_protocol::manifest::CheckpointRef;
use permafrost_store::clock::unix_ms;

/// Kind of a checkpoint that can be resumed.
const RESUMABLE: &str = "full";

/// All jobs that have checkpoints.
#[derive(Debug)]
pub(crate) struct Jobs {
    taken: Instant,
    taken_unix_ms: u64,
    /// Jobs, sorted by name.
    jobs: Vec<(Arc<str>, Job)>,
    /// Index of each job in `jobs`: a batch looks up thousands.
    places: HashMap<Arc<str>, usize>,
}

/// A job's checkpoints.
#[derive(Debug, Default)]
pub(crate) struct Job {
    /// Checkpoints, sorted by generation.
    pub(crate) checkpoints: Vec<Checkpoint>,
    /// Index of the newest checkpoint that can be resumed.
    last: Option<usize>,
}

impl Job {
    /// Returns the newest checkpoint that can be resumed.
    pub(crate) fn last(&self) -> Option<&Checkpoint> {
        self.checkpoints.get(self.last?)
    }

    pub(crate) fn generation(&self, generation: u64) -> Option<&Checkpoint> {
        let at = self
            .checkpoints
            .binary_search_by_key(&generation, |checkpoint| checkpoint.generation);
        self.checkpoints.get(at.ok()?)
    }
}

/// Returns true if a task can be resumed from the checkpoint.
pub(crate) fn is_resumable(checkpoint: &Checkpoint) -> bool {
    checkpoint.kind == RESUMABLE
}

impl Jobs {
    pub(super) fn new(taken: Instant, checkpoints: Vec<Checkpoint>) -> Self {
        let mut by_name: BTreeMap<String, Job> = BTreeMap::new();
        // Parked checkpoints have no job yet.
        for checkpoint in checkpoints.into_iter().filter(|one| !one.job.is_empty()) {
            let checkpoints = match by_name.get_mut(&checkpoint.job) {
                Some(job) => &mut job.checkpoints,
                None => {
                    let job = by_name.entry(checkpoint.job.clone()).or_default();
                    &mut job.checkpoints
                }
            };
            checkpoints.push(checkpoint);
        }
        for job in by_name.values_mut() {
            job.checkpoints
                .sort_by_key(|checkpoint| checkpoint.generation);
            job.checkpoints
                .dedup_by_key(|checkpoint| checkpoint.generation);
            job.last = job.checkpoints.iter().rposition(is_resumable);
        }
        let jobs: Vec<(Arc<str>, Job)> = by_name
            .into_iter()
            .map(|(name, job)| (name.into(), job))
            .collect();
        let names = jobs.iter().map(|(name, _)| Arc::clone(name));
        let places = names.enumerate().map(|(place, name)| (name, place));
        Self {
            taken,
            taken_unix_ms: unix_ms(),
            places: places.collect(),
            jobs,
        }
    }

    /// Returns the time since the checkpoints were listed.
    pub(crate) fn age(&self) -> Duration {
        self.taken.elapsed()
    }

    /// Returns true if the checkpoints were listed at `time` or later.
    pub(crate) fn listed_since(&self, time: Instant) -> bool {
        self.taken >= time
    }

    /// Returns the time since a checkpoint was sealed: by the wall clocks until it was listed, by our monotonic
    /// clock since then.
    pub(crate) fn age_of(&self, checkpoint: &Checkpoint) -> Duration {
        let then = self
            .taken_unix_ms
            .saturating_sub(checkpoint.created_unix_ms);
        Duration::from_millis(then).saturating_add(self.age())
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Job> {
        let (_, job) = self.jobs.get(*self.places.get(name)?)?;
        Some(job)
    }

    /// Returns a checkpoint by its name; without a generation the newest that can be resumed.
    pub(crate) fn find(&self, name: &CheckpointRef) -> Option<&Checkpoint> {
        let job = self.get(name.job.as_str())?;
        match name.generation {
            Some(generation) => job.generation(generation),
            None => job.last(),
        }
    }

    /// Returns the jobs after a name, by name.
    pub(crate) fn after(&self, name: Option<&str>) -> impl Iterator<Item = (&str, &Job)> {
        let first = name.map_or(0, |name| self.behind(|other| other <= name));
        self.at_place(first)
    }

    /// Returns the jobs from a name on, by name.
    pub(crate) fn from(&self, name: &str) -> impl Iterator<Item = (&str, &Job)> {
        self.at_place(self.behind(|other| other < name))
    }

    fn behind(&self, is_before: impl Fn(&str) -> bool) -> usize {
        self.jobs.partition_point(|(name, _)| is_before(name))
    }

    fn at_place(&self, first: usize) -> impl Iterator<Item = (&str, &Job)> {
        let jobs = self.jobs.get(first..).unwrap_or_default();
        jobs.iter().map(|(name, job)| (name.as_ref(), job))
    }
}
