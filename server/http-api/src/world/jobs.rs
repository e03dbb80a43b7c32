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
    /// By name.
    jobs: Vec<(Arc<str>, Job)>,
    /// Where each is among them: a batch looks for thousands.
    places: HashMap<Arc<str>, usize>,
}

/// A job.
#[derive(Debug, Default)]
pub(crate) struct Job {
    /// By generation.
    pub(crate) checkpoints: Vec<Checkpoint>,
    /// The place of the newest that can be resumed.
    last: Option<usize>,
}

impl Job {
    /// The newest that can be resumed.
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

/// Whether a task can be resumed from it.
pub(crate) fn is_resumable(checkpoint: &Checkpoint) -> bool {
    checkpoint.kind == RESUMABLE
}

impl Jobs {
    pub(super) fn new(taken: Instant, checkpoints: Vec<Checkpoint>) -> Self {
        let mut by_name: BTreeMap<String, Job> = BTreeMap::new();
        // Parked ones have no job yet.
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

    /// Since they were listed.
    pub(crate) fn age(&self) -> Duration {
        self.taken.elapsed()
    }

    /// Whether all that was listed is as it was then or later.
    pub(crate) fn listed_since(&self, time: Instant) -> bool {
        self.taken >= time
    }

    /// Since a checkpoint was sealed: by the clocks on the walls until it was listed, by our own since then.
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

    /// A checkpoint by its name; without a generation the newest that can be resumed.
    pub(crate) fn find(&self, name: &CheckpointRef) -> Option<&Checkpoint> {
        let job = self.get(name.job.as_str())?;
        match name.generation {
            Some(generation) => job.generation(generation),
            None => job.last(),
        }
    }

    /// By name, those after one.
    pub(crate) fn after(&self, name: Option<&str>) -> impl Iterator<Item = (&str, &Job)> {
        let first = name.map_or(0, |name| self.behind(|other| other <= name));
        self.at_place(first)
    }

    /// By name, from one on.
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
