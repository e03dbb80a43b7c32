//! Order in which waiting tasks get room.

use std::collections::HashMap;

use crate::policy::{ClusterEvent, SchedulerView, TaskView};
use crate::quantity::{Moment, Seconds};
use crate::size::JobId;

/// Order of the queue. Among equals what was submitted first goes first.
#[derive(Clone, Debug)]
pub(in crate::policy) enum Order {
    /// Highest priority first.
    Priority,
    /// Earliest deadline of the job first (002, §4).
    Deadline(Jobs),
    /// Least laxity of the job first: deadline − projected completion, renewed each second (002, §4).
    Laxity(Jobs),
}

/// Figures remembered of each job.
#[derive(Clone, Debug, Default)]
pub(in crate::policy) struct Jobs {
    ranks: HashMap<JobId, i64>,
    tasks: HashMap<JobId, Vec<crate::TaskId>>,
    seen: u64,
}

impl Order {
    /// Makes an order by deadline.
    pub(in crate::policy) fn deadline() -> Self {
        Self::Deadline(Jobs::default())
    }

    /// Makes an order by laxity.
    pub(in crate::policy) fn laxity() -> Self {
        Self::Laxity(Jobs::default())
    }

    /// Returns the rank of a job, in microseconds of its deadline or laxity; 0 for an order by priority.
    pub(in crate::policy) fn of_job(&self, job: JobId) -> i64 {
        match self {
            Self::Priority => 0,
            Self::Deadline(jobs) | Self::Laxity(jobs) => jobs.rank(job),
        }
    }

    /// Returns the rank of a task; the least goes first.
    pub(in crate::policy) fn rank(&self, task: &TaskView) -> i64 {
        match self {
            Self::Priority => -i64::from(task.priority),
            Self::Deadline(jobs) | Self::Laxity(jobs) => jobs.rank(task.job),
        }
    }

    /// Renews what changes with time; returns true if the queue has to be sorted anew.
    pub(in crate::policy) fn renew(
        &mut self,
        now: Moment,
        event: ClusterEvent,
        view: &SchedulerView,
    ) -> bool {
        match self {
            Self::Priority => false,
            Self::Deadline(jobs) => {
                jobs.learn(view, |job, _| deadline(view, job));
                false
            }
            Self::Laxity(jobs) => {
                jobs.learn(view, |job, tasks| laxity(now, view, job, tasks));
                if event == ClusterEvent::Tick {
                    jobs.renew(|job, tasks| laxity(now, view, job, tasks));
                }
                event == ClusterEvent::Tick
            }
        }
    }
}

impl Jobs {
    /// Returns the rank of a job, in microseconds.
    pub(in crate::policy) fn rank(&self, job: JobId) -> i64 {
        self.ranks.get(&job).copied().unwrap_or(i64::MAX)
    }

    /// Learns of new tasks, and ranks their jobs.
    fn learn(&mut self, view: &SchedulerView, rank: impl Fn(JobId, &[crate::TaskId]) -> i64) {
        let new = self.seen..view.tasks();
        self.seen = view.tasks();
        for id in new.map(crate::TaskId) {
            if let Some(task) = view.task(id) {
                let tasks = self.tasks.entry(task.job).or_default();
                tasks.push(id);
                self.ranks.insert(task.job, rank(task.job, tasks));
            }
        }
    }

    fn renew(&mut self, rank: impl Fn(JobId, &[crate::TaskId]) -> i64) {
        for (job, tasks) in &self.tasks {
            self.ranks.insert(*job, rank(*job, tasks));
        }
    }
}

/// Returns the deadline of a job in microseconds; the largest number if it has none.
fn deadline(view: &SchedulerView, job: JobId) -> i64 {
    let deadline = view.job(job).and_then(|job| job.deadline);
    deadline.map_or(i64::MAX, |deadline| micros(deadline.micros()))
}

/// Returns deadline − projected completion in microseconds. The completion is projected from the share of the job's
/// work that is done, and the time since its first task was submitted: a job that has done nothing is taken to need
/// its work with all its tasks at once.
fn laxity(now: Moment, view: &SchedulerView, job: JobId, tasks: &[crate::TaskId]) -> i64 {
    let deadline = deadline(view, job);
    if deadline == i64::MAX {
        return i64::MAX;
    }
    let (mut done, mut all, mut longest) = (0.0, 0.0, 0.0_f64);
    let mut submitted = now;
    for task in tasks.iter().filter_map(|task| view.task(*task)) {
        let progress = task.progress(now).value();
        let work = task.work.map_or(progress, Seconds::value).max(progress);
        submitted = submitted.min(task.submitted);
        done += progress;
        all += work;
        longest = longest.max(work - progress);
    }
    let elapsed = now.since(submitted).value();
    let left = if done > 0.0 {
        (elapsed * (all - done) / done).max(longest)
    } else {
        longest
    };
    let left = Seconds::clamped(left);
    deadline.saturating_sub(micros(now.after(left).micros()))
}

fn micros(micros: u64) -> i64 {
    i64::try_from(micros).unwrap_or(i64::MAX)
}
