//! Predicted size of a task's next dump.
//!
//! A dump has two sizes. The bytes that it *moves* go from the task to the node, and determine its duration. The
//! bytes that it *stores* are the difference from stored pages, and take room. An incremental dump without dirty
//! pages moves the whole memory and stores little of it. Either size is in proportion to a figure that can be read
//! while the task runs: a full dump's to the resident memory, an incremental one's to the dirty pages, or to the
//! resident memory where the kernel does not count those. The factors are learnt from the dumps of the job, and of
//! its kind while the job has too few of its own. Paper 000, §4.1, uses the memory size itself, for both.

mod accuracy;

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use accuracy::{Accuracy, Errors};

use crate::estimator::{Window, Worse};
use crate::figure::{Estimate, Missing, What};
use crate::quantity::{Bytes, Moment, Ratio, Seconds};

/// Dumps of its own after which a job is not compared with its kind any more.
const ENOUGH: u32 = 3;
/// Half-life of a job's dumps, one day: programs change with the data that they work on, not with the hour.
const HALF_LIFE: Seconds = Seconds::ONE_DAY;

/// A job, numbered by the caller.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct JobId(pub u64);

/// A kind of job (its program, its queue), numbered by the caller.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct KindId(pub u32);

/// Memory figures that can be read of a running task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Resident memory (RSS, or the cgroup's anonymous memory).
    pub resident: Option<Bytes>,
    /// Bytes of the pages written since the last dump (soft-dirty or PAGEMAP_SCAN).
    pub dirty: Option<Bytes>,
}

/// Kind of a dump: stores everything, or only changed pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DumpKind {
    /// All pages except zero pages.
    Full,
    /// Pages that differ from the job's last checkpoint.
    Incremental,
}

/// A dump that has been made.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dumped {
    /// Time at which it ended.
    pub at: Moment,
    /// Full or incremental.
    pub kind: DumpKind,
    /// The task's memory just before.
    pub memory: Memory,
    /// Number of bytes that went from the task to the node.
    pub moved: Bytes,
    /// Number of bytes that were stored.
    pub stored: Bytes,
}

/// Measurements that a prediction rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// Dirty pages counted now, times the share that the job stored of them in the past.
    DirtyPages,
    /// Resident memory now, times the share that the job stored of it in the past.
    Job,
    /// Resident memory now, times the share that other jobs of its kind stored in the past.
    Kind,
    /// Dirty pages counted now; the share of them that is stored is not known: an upper bound.
    DirtyPagesBound,
    /// Resident memory now; the share of it that is stored is not known: an upper bound.
    ResidentBound,
}

/// A predicted size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// Bytes that will be stored: the room it takes.
    pub size: Estimate<Bytes>,
    /// Bytes that will be moved, which determine its duration.
    pub moved: Estimate<Bytes>,
    /// Measurements that both sizes rest on.
    pub basis: Basis,
}

/// A dump nothing can be learnt from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotLearnt {
    /// The dump comes without the task's memory, or that was 0.
    #[error("the dump was reported without the task's memory")]
    NoMemory,
    /// More was moved or stored than there can have been.
    #[error("{dumped} were dumped of a task of {resident}")]
    MoreThanThere {
        /// Reported as moved or stored.
        dumped: Bytes,
        /// Reported as resident.
        resident: Bytes,
    },
    /// The predictor has no room for another job.
    #[error("there are {limit} jobs already")]
    TooManyJobs {
        /// Maximum number of jobs.
        limit: usize,
    },
}

/// A dump holds things that are not resident (pages swapped out, small images); beyond this the report is wrong.
const MOST_DUMPED: u64 = 16;

/// Shares of one measure that dumps stored and moved.
#[derive(Clone, Debug, Default)]
struct Parts {
    stored: Window,
    moved: Window,
}

impl Parts {
    fn learn(&mut self, dumped: &Dumped, whole: Bytes) {
        // A dump of nothing is a factor of a byte, as factors are compared by their logarithms.
        let part = |bytes: Bytes| bytes.count().max(1) as f64 / whole.count().max(1) as f64;
        self.stored.push(dumped.at, part(dumped.stored));
        self.moved.push(dumped.at, part(dumped.moved));
    }
}

#[derive(Clone, Debug, Default)]
struct Factors {
    full: Parts,
    incremental: Parts,
    dirty: Parts,
}

impl Factors {
    fn parts(&self, kind: DumpKind) -> &Parts {
        match kind {
            DumpKind::Full => &self.full,
            DumpKind::Incremental => &self.incremental,
        }
    }

    fn learn(&mut self, dumped: &Dumped, resident: Bytes) {
        match dumped.kind {
            DumpKind::Full => self.full.learn(dumped, resident),
            DumpKind::Incremental => {
                self.incremental.learn(dumped, resident);
                if let Some(dirty) = dumped.memory.dirty.filter(|&dirty| dirty > Bytes::ZERO) {
                    self.dirty.learn(dumped, dirty);
                }
            }
        }
    }
}

/// Learns factors from dumps, and predicts by them.
#[derive(Clone, Debug)]
pub struct SizePredictor {
    jobs: HashMap<JobId, Factors>,
    kinds: HashMap<KindId, Factors>,
    limit: usize,
}

impl SizePredictor {
    /// Makes a predictor without dumps, for at most `limit` jobs and as many kinds; each takes at most about 6 KiB.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self {
            jobs: HashMap::new(),
            kinds: HashMap::new(),
            limit,
        }
    }

    /// Learns from a dump.
    ///
    /// # Errors
    ///
    /// [`NotLearnt`] if nothing follows from it; nothing is changed then.
    pub fn dumped(&mut self, job: JobId, kind: KindId, dumped: &Dumped) -> Result<(), NotLearnt> {
        let resident = dumped
            .memory
            .resident
            .filter(|&resident| resident > Bytes::ZERO)
            .ok_or(NotLearnt::NoMemory)?;
        let most = dumped.stored.max(dumped.moved);
        if most.count() / MOST_DUMPED > resident.count() {
            return Err(NotLearnt::MoreThanThere {
                dumped: most,
                resident,
            });
        }
        let limit = self.limit;
        let full = |len: usize, known: bool| len >= limit && !known;
        if full(self.jobs.len(), self.jobs.contains_key(&job))
            || full(self.kinds.len(), self.kinds.contains_key(&kind))
        {
            return Err(NotLearnt::TooManyJobs { limit });
        }
        let (of_job, of_kind) = (self.jobs.entry(job), self.kinds.entry(kind));
        of_job.or_default().learn(dumped, resident);
        of_kind.or_default().learn(dumped, resident);
        Ok(())
    }

    /// Forgets a job that is over; its kind keeps the factors learnt from it.
    pub fn forget(&mut self, job: JobId) {
        self.jobs.remove(&job);
    }

    /// Predicts the size of the next dump of a task with this memory. Dirty pages, where they are counted, take
    /// precedence.
    ///
    /// # Errors
    ///
    /// [`Missing`] when neither resident memory nor, for an incremental dump, dirty pages are known.
    pub fn predict(
        &self,
        job: JobId,
        of: KindId,
        dump: DumpKind,
        memory: &Memory,
        now: Moment,
    ) -> Result<Prediction, Missing> {
        let (job, of) = (self.jobs.get(&job), self.kinds.get(&of));
        let by_dirty = dump == DumpKind::Incremental;
        if let Some(dirty) = memory.dirty.filter(|_| by_dirty) {
            let learnt = factors_of(job, of, |factors| &factors.dirty, now);
            return Ok(match learnt {
                Some((learnt, _)) => predicted(dirty, &learnt, Basis::DirtyPages),
                None => bound(dirty, Basis::DirtyPagesBound),
            });
        }
        let resident = memory
            .resident
            .ok_or(Missing::NotGiven { what: What::Memory })?;
        let learnt = factors_of(job, of, |factors| factors.parts(dump), now);
        Ok(match learnt {
            Some((learnt, basis)) => predicted(resident, &learnt, basis),
            None => bound(resident, Basis::ResidentBound),
        })
    }
}

/// Factors learnt for a measure.
struct Learnt {
    stored: Estimate<Ratio>,
    moved: Estimate<Ratio>,
}

/// Returns the job's own factors if it has enough dumps, else its kind's, else the job's few.
fn factors_of<'a>(
    job: Option<&'a Factors>,
    of: Option<&'a Factors>,
    parts: impl Fn(&'a Factors) -> &'a Parts,
    now: Moment,
) -> Option<(Learnt, Basis)> {
    let of_window = |window: &'a Window| {
        let quantiles = window.quantiles(now, HALF_LIFE, Seconds::MAX, Worse::High)?;
        Some(Estimate {
            p50: Ratio::clamped(quantiles.p50),
            p95: Ratio::clamped(quantiles.p95),
            age: now.since(quantiles.newest),
            samples: quantiles.samples,
        })
    };
    let of_factors = |factors: &'a Factors| {
        Some(Learnt {
            stored: of_window(&parts(factors).stored)?,
            moved: of_window(&parts(factors).moved)?,
        })
    };
    let samples = |learnt: &Learnt| learnt.stored.samples;
    let own = job.and_then(of_factors);
    match own {
        Some(own) if samples(&own) >= ENOUGH => Some((own, Basis::Job)),
        own => match of.and_then(of_factors) {
            // More than the job's own dumps: other jobs have contributed.
            Some(kind) if own.as_ref().is_none_or(|own| samples(&kind) > samples(own)) => {
                Some((kind, Basis::Kind))
            }
            _ => own.map(|own| (own, Basis::Job)),
        },
    }
}

fn predicted(base: Bytes, learnt: &Learnt, basis: Basis) -> Prediction {
    let times = |factor: &Estimate<Ratio>| Estimate {
        p50: base.times(factor.p50),
        p95: base.times(factor.p95),
        age: factor.age,
        samples: factor.samples,
    };
    Prediction {
        size: times(&learnt.stored),
        moved: times(&learnt.moved),
        basis,
    }
}

fn bound(base: Bytes, basis: Basis) -> Prediction {
    Prediction {
        size: Estimate::given(base),
        moved: Estimate::given(base),
        basis,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: JobId = JobId(1);
    const KIND: KindId = KindId(1);
    const NOW: Moment = Moment::from_micros(100_000_000);

    fn memory(resident_mib: u64, dirty_mib: Option<u64>) -> Memory {
        Memory {
            resident: Some(Bytes::mib(resident_mib)),
            dirty: dirty_mib.map(Bytes::mib),
        }
    }

    fn dumped(kind: DumpKind, memory: Memory, stored_mib: u64) -> Dumped {
        Dumped {
            at: NOW,
            kind,
            memory,
            moved: memory.resident.unwrap_or_default(),
            stored: Bytes::mib(stored_mib),
        }
    }

    fn predict(predictor: &SizePredictor, dump: DumpKind, memory: Memory) -> Prediction {
        predictor.predict(JOB, KIND, dump, &memory, NOW).unwrap()
    }

    #[test]
    fn without_history_the_resident_memory_is_a_bound_and_says_so() {
        let prediction = predict(&SizePredictor::new(9), DumpKind::Full, memory(1000, None));
        assert_eq!(prediction.basis, Basis::ResidentBound);
        assert_eq!(prediction.size, Estimate::given(Bytes::mib(1000)));
    }

    #[test]
    fn without_any_memory_there_is_no_prediction() {
        let none = SizePredictor::new(9).predict(
            JOB,
            KIND,
            DumpKind::Incremental,
            &Memory::default(),
            NOW,
        );
        assert_eq!(none, Err(Missing::NotGiven { what: What::Memory }));
    }

    #[test]
    fn a_job_that_changes_a_tenth_is_predicted_to_change_a_tenth() {
        let mut predictor = SizePredictor::new(9);
        for stored in [99, 100, 101] {
            let dump = dumped(DumpKind::Incremental, memory(1000, None), stored);
            predictor.dumped(JOB, KIND, &dump).unwrap();
        }
        let prediction = predict(&predictor, DumpKind::Incremental, memory(5000, None));
        assert_eq!(prediction.basis, Basis::Job);
        let mib = prediction.size.p50.count() >> 20;
        assert!((499..=501).contains(&mib), "{prediction:?}");
        assert!(prediction.size.p95 > prediction.size.p50);
        // All of the memory was moved to be compared.
        let moved = prediction.moved.p50.count() >> 20;
        assert!((4999..=5001).contains(&moved), "{prediction:?}");
        // Nothing was learnt of full dumps.
        assert_eq!(
            predict(&predictor, DumpKind::Full, memory(1, None)).basis,
            Basis::ResidentBound
        );
    }

    #[test]
    fn a_new_job_goes_by_its_kind() {
        let mut predictor = SizePredictor::new(9);
        for other in 2..7 {
            let dump = dumped(DumpKind::Full, memory(1000, None), 500);
            predictor.dumped(JobId(other), KIND, &dump).unwrap();
        }
        predictor
            .dumped(JOB, KIND, &dumped(DumpKind::Full, memory(1000, None), 900))
            .unwrap();
        let prediction = predict(&predictor, DumpKind::Full, memory(1000, None));
        assert_eq!(prediction.basis, Basis::Kind);
        assert_eq!(prediction.size.p50.count() >> 20, 500);
    }

    #[test]
    fn counted_dirty_pages_go_before_the_past() {
        let mut predictor = SizePredictor::new(9);
        // Half of the pages turned out to be as they were.
        let dump = dumped(DumpKind::Incremental, memory(1000, Some(100)), 50);
        for _ in 0..3 {
            predictor.dumped(JOB, KIND, &dump).unwrap();
        }
        let prediction = predict(&predictor, DumpKind::Incremental, memory(1000, Some(1000)));
        assert_eq!(prediction.basis, Basis::DirtyPages);
        assert_eq!(prediction.size.p50.count() >> 20, 500);
        let other = predictor.predict(
            JobId(5),
            KindId(5),
            DumpKind::Incremental,
            &memory(1000, Some(1)),
            NOW,
        );
        assert_eq!(other.unwrap(), bound(Bytes::mib(1), Basis::DirtyPagesBound));
    }

    #[test]
    fn reports_that_cannot_be_true_teach_nothing() {
        let mut predictor = SizePredictor::new(1);
        let empty = dumped(DumpKind::Full, memory(0, None), 5);
        assert_eq!(
            predictor.dumped(JOB, KIND, &empty),
            Err(NotLearnt::NoMemory)
        );
        let huge = dumped(DumpKind::Full, memory(1, None), 1 << 30);
        assert!(matches!(
            predictor.dumped(JOB, KIND, &huge),
            Err(NotLearnt::MoreThanThere { .. })
        ));
        let good = dumped(DumpKind::Full, memory(10, None), 5);
        predictor.dumped(JOB, KIND, &good).unwrap();
        assert_eq!(
            predictor.dumped(JobId(2), KIND, &good),
            Err(NotLearnt::TooManyJobs { limit: 1 })
        );
        predictor.forget(JOB);
        assert!(predictor.dumped(JobId(2), KIND, &good).is_ok());
    }
}
