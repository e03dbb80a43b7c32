//! Numbers for the names of jobs and programs, and the last observation of each job.

use std::collections::HashMap;

use permafrost_scheduling::quantity::{Bytes, Moment};
use permafrost_scheduling::size::{JobId, KindId, SizePredictor};

/// Last observation of a job.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) id: JobId,
    /// Time of its last dump.
    dumped: Moment,
    /// Its memory at its last dump: used when a caller does not give the current memory.
    pub(super) resident: Option<Bytes>,
}

/// Jobs and programs that were dumped, up to a maximum number of each.
#[derive(Debug)]
pub(super) struct Jobs {
    jobs: HashMap<String, Job>,
    programs: HashMap<String, KindId>,
    next: u64,
    limit: usize,
}

/// Numbers of a job and a program that were never dumped.
const NOBODY: (JobId, KindId) = (JobId(u64::MAX), KindId(u32::MAX));

impl Jobs {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            jobs: HashMap::new(),
            programs: HashMap::new(),
            next: 0,
            limit: limit.max(1),
        }
    }

    /// Returns the numbers of a job and a program; [`NOBODY`]'s where they were never dumped.
    pub(super) fn known(&self, job: &str, program: &str) -> (Option<Job>, JobId, KindId) {
        let known = self.jobs.get(job).copied();
        let kind = self.programs.get(program).copied().unwrap_or(NOBODY.1);
        (known, known.map_or(NOBODY.0, |job| job.id), kind)
    }

    /// Returns the numbers of a job that was dumped at `at` with this memory. Where there are too many jobs, the
    /// one with the oldest dump is forgotten, by `sizes`, too.
    pub(super) fn dumped(
        &mut self,
        job: &str,
        program: &str,
        at: Moment,
        resident: Bytes,
        sizes: &mut SizePredictor,
    ) -> (JobId, KindId) {
        if self.jobs.len() >= self.limit && !self.jobs.contains_key(job) {
            let oldest = self.jobs.iter().min_by_key(|(_, job)| job.dumped);
            if let Some(name) = oldest.map(|(name, _)| name.clone())
                && let Some(job) = self.jobs.remove(&name)
            {
                sizes.forget(job.id);
            }
        }
        let next = &mut self.next;
        let known = self.jobs.entry(job.to_owned()).or_insert_with(|| {
            *next += 1;
            Job {
                id: JobId(*next),
                dumped: at,
                resident: None,
            }
        });
        if at >= known.dumped {
            known.dumped = at;
            known.resident = Some(resident);
        }
        let id = known.id;
        (id, self.kind(program))
    }

    fn kind(&mut self, program: &str) -> KindId {
        if let Some(kind) = self.programs.get(program) {
            return *kind;
        }
        if self.programs.len() >= self.limit {
            // Too many programs: the rest share the number of programs without a name.
            return KindId(0);
        }
        let number = u32::try_from(self.programs.len()).unwrap_or(u32::MAX - 1);
        let kind = if program.is_empty() {
            KindId(0)
        } else {
            KindId(number.saturating_add(1).min(u32::MAX - 1))
        };
        self.programs.insert(program.to_owned(), kind);
        kind
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: Bytes = Bytes::mib(1);

    #[test]
    fn the_job_that_was_not_dumped_for_longest_is_forgotten() {
        let mut sizes = SizePredictor::new(2);
        let mut jobs = Jobs::new(2);
        let mut dump = |job: &str, at| {
            jobs.dumped(job, "p", Moment::from_micros(at), MIB, &mut sizes)
                .0
        };
        let (one, two) = (dump("one", 1), dump("two", 2));
        assert_ne!(one, two);
        assert_eq!(dump("one", 3), one);
        let three = dump("three", 4);
        assert!(![one, two].contains(&three));
        assert_eq!(jobs.known("two", "").1, NOBODY.0);
        assert_eq!(jobs.known("one", "p").1, one);
        assert_eq!(jobs.known("one", "p").0.unwrap().resident, Some(MIB));
    }

    #[test]
    fn programs_beyond_the_limit_are_of_one_kind() {
        let mut jobs = Jobs::new(2);
        let kinds = ["a", "b", "c", "d", "a"].map(|program| jobs.kind(program));
        assert_ne!(kinds[0], kinds[1]);
        assert_eq!((kinds[2], kinds[4]), (kinds[3], kinds[0]));
        assert_eq!(jobs.known("none", "e").2, NOBODY.1);
    }
}
