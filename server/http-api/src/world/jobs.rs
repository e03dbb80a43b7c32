//! The checkpoints of a snapshot, by job.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::ops::Range;
use std::time::{Duration, Instant};

use hashbrown::HashTable;
use permafrost_protocol::control::Checkpoint;
use permafrost_protocol::manifest::CheckpointRef;
use permafrost_scheduling::quantity::Bytes;
use permafrost_store::clock::unix_ms;

/// Kind of a checkpoint that can be resumed.
const RESUMABLE: &str = "full";

/// All jobs that have checkpoints.
///
/// A batch looks up thousands of them, and what that costs are accesses to memory that is in no cache. So the names
/// are one text, the places are short, and what a batch asks for is beside the name.
#[derive(Debug)]
pub(crate) struct Jobs {
    taken: Instant,
    taken_unix_ms: u64,
    /// Names of all jobs, one after the other.
    names: String,
    /// Jobs, sorted by name.
    jobs: Vec<Job>,
    /// Index of each job in `jobs`, by the hash of its name.
    places: HashTable<u32>,
    hasher: RandomState,
}

/// A job's checkpoints.
#[derive(Debug)]
pub(crate) struct Job {
    /// Place of its name in those of all jobs.
    name: Range<usize>,
    last: Option<Newest>,
    /// Checkpoints, sorted by generation.
    pub(crate) checkpoints: Vec<Checkpoint>,
}

/// The newest checkpoint of a job that can be resumed.
#[derive(Clone, Copy, Debug)]
struct Newest {
    index: usize,
    created_unix_ms: u64,
    memory: Bytes,
}

/// The newest checkpoint of a job that can be resumed, as batches ask for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastCheckpoint<'a> {
    job: &'a Job,
    /// Time since it was sealed.
    pub(crate) age: Duration,
    /// Memory of the task in it.
    pub(crate) memory: Bytes,
}

impl<'a> LastCheckpoint<'a> {
    /// Returns all that is known of the checkpoint.
    pub(crate) fn whole(&self) -> Option<&'a Checkpoint> {
        self.job.last()
    }
}

impl Job {
    fn new(name: Range<usize>, mut checkpoints: Vec<Checkpoint>) -> Self {
        checkpoints.sort_by_key(|checkpoint| checkpoint.generation);
        checkpoints.dedup_by_key(|checkpoint| checkpoint.generation);
        let mut newest = checkpoints.iter().enumerate().rev();
        let last = newest.find(|(_, checkpoint)| is_resumable(checkpoint));
        let last = last.map(|(index, checkpoint)| Newest {
            index,
            created_unix_ms: checkpoint.created_unix_ms,
            memory: Bytes::new(checkpoint.memory_bytes),
        });
        Self {
            name,
            last,
            checkpoints,
        }
    }

    /// Returns the newest checkpoint that can be resumed.
    pub(crate) fn last(&self) -> Option<&Checkpoint> {
        self.checkpoints.get(self.last?.index)
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
        let mut by_name: BTreeMap<String, Vec<Checkpoint>> = BTreeMap::new();
        // Parked checkpoints have no job yet.
        for checkpoint in checkpoints.into_iter().filter(|one| !one.job.is_empty()) {
            match by_name.get_mut(&checkpoint.job) {
                Some(of_job) => of_job.push(checkpoint),
                None => {
                    by_name.insert(checkpoint.job.clone(), vec![checkpoint]);
                }
            }
        }
        let mut listed = Self {
            taken,
            taken_unix_ms: unix_ms(),
            names: String::with_capacity(by_name.keys().map(String::len).sum()),
            jobs: Vec::with_capacity(by_name.len()),
            places: HashTable::with_capacity(by_name.len()),
            hasher: RandomState::new(),
        };
        for (place, (name, checkpoints)) in (0..u32::MAX).zip(by_name) {
            let begin = listed.names.len();
            listed.names.push_str(&name);
            let job = Job::new(begin..listed.names.len(), checkpoints);
            listed.jobs.push(job);
            let hash = listed.hasher.hash_one(name.as_str());
            // There is room for all of them: none is hashed again.
            listed.places.insert_unique(hash, place, |_| 0);
        }
        listed
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
        self.age_at(checkpoint.created_unix_ms, self.age())
    }

    fn age_at(&self, created_unix_ms: u64, age: Duration) -> Duration {
        let then = self.taken_unix_ms.saturating_sub(created_unix_ms);
        Duration::from_millis(then).saturating_add(age)
    }

    fn name(&self, job: &Job) -> &str {
        self.names.get(job.name.clone()).unwrap_or_default()
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Job> {
        let is_it = |place: &u32| {
            let job = self.jobs.get(*place as usize);
            job.is_some_and(|job| self.name(job) == name)
        };
        let place = self.places.find(self.hasher.hash_one(name), is_it)?;
        self.jobs.get(*place as usize)
    }

    /// Returns a job's newest checkpoint that can be resumed; `age` is that of the list.
    pub(crate) fn last_of(&self, job: &str, age: Duration) -> Option<LastCheckpoint<'_>> {
        let job = self.get(job)?;
        let last = job.last?;
        Some(LastCheckpoint {
            job,
            age: self.age_at(last.created_unix_ms, age),
            memory: last.memory,
        })
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
        self.jobs.partition_point(|job| is_before(self.name(job)))
    }

    fn at_place(&self, first: usize) -> impl Iterator<Item = (&str, &Job)> {
        let jobs = self.jobs.get(first..).unwrap_or_default();
        jobs.iter().map(|job| (self.name(job), job))
    }
}
