//! Order in which jobs, and then their tasks, are taken as victims.
//!
//! What jobs are ranked by does not change during a search, so jobs are sorted once, and the tasks of a job when the
//! first of them is taken: n log n for n tasks, however many of them are taken.

use std::cmp::Reverse;

use super::TaskRule;
use crate::TaskId;
use crate::policy::random::SplitMix64;
use crate::size::JobId;

/// A job with its candidates.
#[derive(Debug)]
struct Line {
    job: JobId,
    /// The next one to be taken is last, if they are sorted.
    tasks: Vec<TaskId>,
    is_sorted: bool,
}

/// Jobs with candidates.
#[derive(Debug)]
enum Jobs {
    /// Places of the lines, the next one last.
    Sorted(Vec<usize>),
    /// Weights of the lines.
    Drawn(PrefixSums),
}

/// Candidates of a search, by job.
#[derive(Debug)]
pub(super) struct VictimOrder {
    lines: Vec<Line>,
    jobs: Jobs,
}

/// A candidate that is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NextVictim {
    pub(super) job: JobId,
    pub(super) task: TaskId,
    /// The one of its job that would be next.
    pub(super) runner_up: Option<TaskId>,
}

impl VictimOrder {
    /// Takes the jobs with the least keys first; of equal ones the first in the list.
    pub(super) fn by_key<K: Ord>(
        jobs: Vec<(JobId, Vec<TaskId>)>,
        key: impl Fn(JobId) -> K,
    ) -> Self {
        let lines = lines(jobs);
        let mut places: Vec<usize> = (0..lines.len()).collect();
        places.sort_by_cached_key(|place| (lines.get(*place).map(|line| key(line.job)), *place));
        places.reverse();
        Self {
            lines,
            jobs: Jobs::Sorted(places),
        }
    }

    /// Draws jobs with a probability proportional to their weights.
    pub(super) fn by_weight(
        jobs: Vec<(JobId, Vec<TaskId>)>,
        weight: impl Fn(JobId) -> u64,
    ) -> Self {
        let lines = lines(jobs);
        let weights = lines.iter().map(|line| weight(line.job));
        let jobs = Jobs::Drawn(PrefixSums::new(weights));
        Self { lines, jobs }
    }

    /// Takes the next candidate. `left` is the time that a task has left.
    pub(super) fn next<K: Ord>(
        &mut self,
        rule: TaskRule,
        random: &mut SplitMix64,
        left: impl Fn(TaskId) -> K,
    ) -> Option<NextVictim> {
        let place = self.place(random)?;
        let line = self.lines.get_mut(place)?;
        if !line.is_sorted {
            match rule {
                TaskRule::Shortest => {
                    (line.tasks).sort_by_cached_key(|task| Reverse((left(*task), *task)));
                }
                TaskRule::Longest => line.tasks.sort_by_cached_key(|task| (left(*task), *task)),
                TaskRule::Random => {}
            }
            line.is_sorted = true;
        }
        let task = match rule {
            TaskRule::Random => {
                let drawn = random.below(line.tasks.len() as u64);
                let drawn = usize::try_from(drawn).unwrap_or(0);
                line.tasks
                    .swap_remove(drawn.min(line.tasks.len().checked_sub(1)?))
            }
            TaskRule::Shortest | TaskRule::Longest => line.tasks.pop()?,
        };
        let next = NextVictim {
            job: line.job,
            task,
            runner_up: line.tasks.last().copied(),
        };
        if line.tasks.is_empty() {
            self.drop(place);
        }
        Some(next)
    }

    /// Drops the candidates that are not `kept`.
    pub(super) fn keep(&mut self, kept: impl Fn(TaskId) -> bool) {
        for place in 0..self.lines.len() {
            if let Some(line) = self.lines.get_mut(place)
                && !line.tasks.is_empty()
            {
                line.tasks.retain(|task| kept(*task));
                if line.tasks.is_empty() {
                    self.drop(place);
                }
            }
        }
    }

    /// Returns the place of the job whose task is taken next; it has one.
    fn place(&mut self, random: &mut SplitMix64) -> Option<usize> {
        match &mut self.jobs {
            Jobs::Drawn(weights) => {
                let all = weights.total();
                (all > 0).then(|| weights.find(random.below(all)))
            }
            Jobs::Sorted(places) => loop {
                let place = *places.last()?;
                if self
                    .lines
                    .get(place)
                    .is_some_and(|line| !line.tasks.is_empty())
                {
                    return Some(place);
                }
                places.pop();
            },
        }
    }

    /// Drops a job that has no candidates any more.
    fn drop(&mut self, place: usize) {
        if let Jobs::Drawn(weights) = &mut self.jobs {
            weights.clear(place);
        }
    }
}

fn lines(jobs: Vec<(JobId, Vec<TaskId>)>) -> Vec<Line> {
    let some = jobs.into_iter().filter(|(_, tasks)| !tasks.is_empty());
    let line = |(job, tasks)| Line {
        job,
        tasks,
        is_sorted: false,
    };
    some.map(line).collect()
}

/// Weights whose prefix sums are found and changed in O(log n) (Fenwick: A New Data Structure for Cumulative Frequency
/// Tables, 1994).
#[derive(Debug)]
struct PrefixSums {
    weights: Vec<u64>,
    /// Sums of ranges; the place n, counted from 1, has that of the last n & −n weights up to it.
    sums: Vec<u64>,
}

impl PrefixSums {
    fn new(weights: impl Iterator<Item = u64>) -> Self {
        let weights: Vec<u64> = weights.collect();
        let mut sums = vec![0; weights.len() + 1];
        for (place, weight) in weights.iter().enumerate() {
            let mut at = place + 1;
            while let Some(sum) = sums.get_mut(at) {
                *sum += weight;
                at += at & at.wrapping_neg();
            }
        }
        Self { weights, sums }
    }

    fn total(&self) -> u64 {
        let mut at = self.weights.len();
        let mut total = 0;
        while let Some(sum) = self.sums.get(at).filter(|_| at > 0) {
            total += sum;
            at &= at - 1;
        }
        total
    }

    /// Returns the first place up to which the weights are more than `drawn`, which is less than their total.
    fn find(&self, mut drawn: u64) -> usize {
        let mut at = 0;
        let mut step = self.weights.len().next_power_of_two();
        while step > 0 {
            if let Some(sum) = self.sums.get(at + step)
                && *sum <= drawn
            {
                at += step;
                drawn -= sum;
            }
            step /= 2;
        }
        at
    }

    fn clear(&mut self, place: usize) {
        let Some(weight) = self.weights.get_mut(place).map(std::mem::take) else {
            return;
        };
        let mut at = place + 1;
        while let Some(sum) = self.sums.get_mut(at) {
            *sum -= weight;
            at += at & at.wrapping_neg();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::cmp::Ordering;

    use super::*;

    thread_local! {
        static COMPARISONS: Cell<u64> = const { Cell::new(0) };
    }

    #[derive(Clone, Copy, PartialEq, Eq)]
    struct Counted(u64);

    impl PartialOrd for Counted {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            Some(self.cmp(other))
        }
    }

    impl Ord for Counted {
        fn cmp(&self, other: &Self) -> Ordering {
            COMPARISONS.set(COMPARISONS.get() + 1);
            self.0.cmp(&other.0)
        }
    }

    const TASKS: u64 = 10_000;

    /// Numbers that look random.
    fn left(task: TaskId) -> Counted {
        Counted(task.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32)
    }

    fn all(order: &mut VictimOrder, rule: TaskRule) -> Vec<NextVictim> {
        let mut random = SplitMix64::new(7);
        std::iter::from_fn(|| order.next(rule, &mut random, left)).collect()
    }

    #[test]
    fn all_tasks_of_a_large_job_are_taken_in_order_with_n_log_n_comparisons() {
        for rule in [TaskRule::Shortest, TaskRule::Longest, TaskRule::Random] {
            let tasks = (0..TASKS).map(TaskId).collect();
            let mut order = VictimOrder::by_key(vec![(JobId(0), tasks)], |job| job.0);
            COMPARISONS.set(0);
            let taken = all(&mut order, rule);
            // n log2 n is 132,877; sorting anew for each victim makes some hundred millions.
            let comparisons = COMPARISONS.get();
            assert!(comparisons < 3 * 132_877, "{rule:?}: {comparisons}");
            assert_eq!(taken.len() as u64, TASKS);
            for pair in taken.windows(2) {
                let (one, next) = (left(pair[0].task), left(pair[1].task));
                match rule {
                    TaskRule::Shortest => assert!(one <= next),
                    TaskRule::Longest => assert!(one >= next),
                    TaskRule::Random => continue,
                }
                assert_eq!(pair[0].runner_up, Some(pair[1].task));
            }
            let mut distinct: Vec<TaskId> = taken.iter().map(|next| next.task).collect();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(distinct.len() as u64, TASKS);
        }
    }

    fn three() -> Vec<(JobId, Vec<TaskId>)> {
        let tasks = |from: u64, to: u64| (from..to).map(TaskId).collect();
        vec![
            (JobId(0), tasks(0, 2)),
            (JobId(1), Vec::new()),
            (JobId(2), tasks(2, 5)),
            (JobId(3), tasks(5, 8)),
        ]
    }

    #[test]
    fn jobs_are_taken_one_after_the_other_and_equal_ones_in_their_order() {
        let mut order = VictimOrder::by_key(three(), |job| Reverse(job.0.min(2)));
        let taken = all(&mut order, TaskRule::Shortest);
        let jobs: Vec<u64> = taken.iter().map(|next| next.job.0).collect();
        assert_eq!(jobs, [2, 2, 2, 3, 3, 3, 0, 0]);
        // What is dropped is not taken.
        let mut order = VictimOrder::by_key(three(), |job| job.0);
        order.keep(|task| task.0 >= 4);
        let taken = all(&mut order, TaskRule::Shortest);
        let mut tasks: Vec<u64> = taken.iter().map(|next| next.task.0).collect();
        assert_eq!(tasks.first(), Some(&4));
        tasks.sort_unstable();
        assert_eq!(tasks, [4, 5, 6, 7]);
    }

    #[test]
    fn jobs_are_drawn_in_proportion_to_their_weights_until_all_are_taken() {
        let place = |job: JobId| usize::try_from(job.0).unwrap();
        let mut first = [0_u64; 4];
        for seed in 0..6000 {
            let mut order = VictimOrder::by_weight(three(), |job| [3, 9, 1, 2][place(job)]);
            let mut random = SplitMix64::new(seed);
            let next = order.next(TaskRule::Random, &mut random, left).unwrap();
            first[place(next.job)] += 1;
        }
        // 3, 1 and 2 sixths; the job without candidates has no weight.
        for (count, expected) in first.into_iter().zip([3000, 0, 1000, 2000]) {
            assert!(count.abs_diff(expected) < 150, "{first:?}");
        }
        let mut order = VictimOrder::by_weight(three(), |_| 1);
        assert_eq!(all(&mut order, TaskRule::Random).len(), 8);
        let mut order = VictimOrder::by_weight(three(), |_| 1);
        order.keep(|task| task.0 < 2);
        let taken = all(&mut order, TaskRule::Shortest);
        assert!(taken.len() == 2 && taken.iter().all(|next| next.job == JobId(0)));
    }
}
