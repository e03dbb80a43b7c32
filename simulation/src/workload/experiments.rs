//! The papers' small experiments.

use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};
use permafrost_scheduling::sensitivity::Jobs;

use super::{JobSpec, NodeSpec, TaskSpec, Workload, resources};
use crate::random::Random;

const GB: u64 = 1_000_000_000;

fn at(seconds: f64) -> Moment {
    Moment::default().after(Seconds::clamped(seconds))
}

/// Makes the experiment of paper 000, Figures 4 and 6 (§3.3.3): one machine that has room for one job, a job of low
/// priority, and one of high priority that arrives while the first runs.
#[must_use]
pub fn two_jobs(jobs: &Jobs) -> Workload {
    let asks = resources(1000, jobs.size);
    let job = |submitted: Moment, priority: u8| JobSpec {
        submitted,
        priority,
        deadline: None,
        flow: None,
        stages: vec![vec![TaskSpec {
            work: jobs.work,
            asks,
            memory: jobs.size,
            dirty_rate: None,
        }]],
    };
    let mut workload = Workload::on("two-jobs", vec![NodeSpec::new(asks)]);
    workload.jobs = vec![
        job(Moment::default(), 0),
        job(Moment::default().after(jobs.arrival), 9),
    ];
    workload.remarks = vec!["Paper 000, §3.3.3: two k-means jobs of a minute and 5 GB.".to_owned()];
    workload
}

/// Parameters of [`yarn`].
const YARN_JOBS: usize = 40;
const YARN_TASKS: usize = 7_000;
const YARN_NODES: usize = 8;
const YARN_SLOTS: u64 = 24;

/// Makes the experiment of paper 000, Figures 8 to 12 (§5.3): eight nodes with 24 containers of one core and 2 GB, 40
/// jobs with 7,000 tasks of 1.8 GB in all, of low or high priority.
///
/// The paper gives neither sizes nor times. Assumed here: half of the jobs have high priority, and two of them
/// are larger than the cluster, as the paper says of one (§5.3.3); the others have sizes of a log-normal
/// distribution; a task takes `task` at the median; jobs arrive over an hour.
#[must_use]
pub fn yarn(seed: u64, task: Seconds) -> Workload {
    let mut random = Random::new(seed);
    let slot = resources(1000, Bytes::new(2 * GB));
    let node = NodeSpec::new(resources(
        1000 * YARN_SLOTS,
        Bytes::new(2 * GB * YARN_SLOTS),
    ));
    let mut workload = Workload::on("yarn", vec![node; YARN_NODES]);
    workload.synthetic = true;
    let mut sizes: Vec<f64> = (0..YARN_JOBS)
        .map(|_| random.log_normal(1.0, 1.0))
        .collect();
    // Production jobs larger than the cluster, as in §5.3.3.
    let sum: f64 = sizes.iter().sum();
    let larger = 1.25 * YARN_SLOTS as f64 * YARN_NODES as f64 / YARN_TASKS as f64 * sum;
    for index in [13, 29] {
        if let Some(size) = sizes.get_mut(index) {
            *size = larger;
        }
    }
    let sum: f64 = sizes.iter().sum();
    let mut left = YARN_TASKS;
    for (index, size) in sizes.iter().enumerate() {
        let last = index + 1 == YARN_JOBS;
        let share = (size / sum * YARN_TASKS as f64).round().max(1.0);
        let count = if last { left } else { whole(share).min(left) };
        left -= count;
        let stage = (0..count).map(|_| TaskSpec {
            work: Seconds::clamped(random.log_normal(task.value(), 0.4)),
            asks: slot,
            memory: Bytes::new(1_800_000_000),
            // 10 % in the time between two dumps, as in Table 3, if that is a minute.
            dirty_rate: Some(BytesPerSecond::clamped(3e6)),
        });
        let stage = stage.collect();
        workload.jobs.push(JobSpec {
            submitted: at(random.uniform() * 3600.0),
            priority: if index % 2 == 1 { 9 } else { 0 },
            deadline: None,
            flow: None,
            stages: vec![stage],
        });
    }
    workload.jobs.sort_by_key(|job| job.submitted);
    workload.remarks = vec![
        "Paper 000, §5.3: 8 nodes of 24 containers, 40 jobs, 7,000 tasks of 1.8 GB.".to_owned(),
        "Assumed: half of the jobs have high priority, two of them are larger than the cluster, jobs arrive over an \
         hour, a task dirties 3 MB/s."
            .to_owned(),
    ];
    workload
}

pub(super) fn whole(value: f64) -> usize {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a cast of a float saturates, and NaN becomes 0"
    )]
    let whole = value as usize;
    whole
}

/// Research jobs of paper 002, Figures 5 and 6, by their size; a production job that takes a fourth of the cluster
/// (Production-S) comes 50 s later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Research {
    /// One job that fills the cluster: Figure 5.
    ExtraLarge,
    /// Two that fill half of the cluster each: Figure 6, upper half.
    TwoMedium,
    /// One that fills three fourths, and then one that fills a fourth: Figure 6, lower half.
    LargeAndSmall,
}

/// Makes the experiment of paper 002, Figures 5 and 6 (§5): six workers of eight containers of 1 GB.
///
/// The longest task of a research job takes 192.3 s, which is the job's ideal time (197.0 − 4.7 s, §5); the lengths of
/// the others are uniform from half of that on ("uniformly from the interval (0.5, 1.0]"). Tasks of the production
/// job take 70.2 s at most (75.6 − 5.4 s).
#[must_use]
pub fn natjam_victims(research: Research, seed: u64) -> Workload {
    const LONGEST_RESEARCH_S: f64 = 192.3;
    const LONGEST_PRODUCTION_S: f64 = 70.2;
    let mut random = Random::new(seed);
    let slot = resources(1000, Bytes::new(GB));
    let node = NodeSpec::new(resources(8000, Bytes::new(8 * GB)));
    let mut workload = Workload::on("natjam", vec![node; 6]);
    workload.synthetic = true;
    let mut job = |submitted: f64, priority: u8, count: usize, longest: f64| {
        let tasks = (0..count).map(|index| TaskSpec {
            // The first is the longest one, so that the job takes its ideal time when alone.
            work: Seconds::clamped(match index {
                0 => longest,
                _ => longest * (1.0 - random.uniform() / 2.0),
            }),
            asks: slot,
            memory: Bytes::new(GB),
            dirty_rate: None,
        });
        JobSpec {
            submitted: at(submitted),
            priority,
            deadline: None,
            flow: None,
            stages: vec![tasks.collect()],
        }
    };
    let counts: &[usize] = match research {
        Research::ExtraLarge => &[48],
        Research::TwoMedium => &[24, 24],
        Research::LargeAndSmall => &[36, 12],
    };
    let jobs = counts
        .iter()
        .map(|count| job(0.0, 0, *count, LONGEST_RESEARCH_S));
    workload.jobs = jobs.collect();
    workload.jobs.push(job(50.0, 9, 12, LONGEST_PRODUCTION_S));
    workload.remarks = vec![
        "Paper 002, §5: 6 workers of 8 containers; lengths of tasks are drawn as the paper says."
            .to_owned(),
    ];
    workload
}

/// Jobs of paper 002, Figure 4 (§5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Natjam4 {
    /// Research-XL, and Production-S after 50 s, on all containers.
    Both,
    /// One of the two on so many containers of each worker.
    Alone {
        /// Index of the job.
        job: usize,
        /// Containers of a worker.
        containers: u64,
    },
}

/// Makes the experiment of paper 002, Figure 4 (§5), with the jobs of [`natjam_victims`].
#[must_use]
pub fn natjam_techniques(which: Natjam4, seed: u64) -> Workload {
    let mut workload = natjam_victims(Research::ExtraLarge, seed);
    if let Natjam4::Alone { job, containers } = which {
        workload.jobs = workload.jobs.drain(..).skip(job).take(1).collect();
        let node = NodeSpec::new(resources(1000 * containers, Bytes::new(GB * containers)));
        workload.nodes.fill(node);
    }
    workload
}

/// Makes the experiment of paper 002, Figure 10 (§7): 21 containers of 1 GB, three equal jobs of 8 maps and 50 reduces
/// 5 s apart, with deadlines of 200, 190 and 180 s.
///
/// A job takes 87 s on the empty cluster: 9 s for its one wave of maps, and 26 s for each of the three waves of
/// reduces.
#[must_use]
pub fn natjam_deadlines() -> Workload {
    deadlines(&[(0.0, 200.0), (5.0, 190.0), (10.0, 180.0)])
}

/// Time that a job of [`natjam_deadlines`] takes on the empty cluster, seconds (002, §7).
pub const NATJAM_CLEAN_S: f64 = 87.0;

/// Makes the experiment of paper 002, Figure 11 (§7): a job with the deadline 87 s × (1 + `epsilon`) after its
/// submission, and 5 s later an equal one whose deadline is a second earlier.
#[must_use]
pub fn natjam_margins(epsilon: f64) -> Workload {
    let deadline = NATJAM_CLEAN_S * (1.0 + epsilon);
    deadlines(&[(0.0, deadline), (5.0, deadline - 1.0)])
}

/// Makes equal jobs, by their times of submission and deadlines in seconds.
fn deadlines(jobs: &[(f64, f64)]) -> Workload {
    let slot = resources(1000, Bytes::new(GB));
    let node = NodeSpec::new(resources(3000, Bytes::new(3 * GB)));
    let mut workload = Workload::on("natjam-deadlines", vec![node; 7]);
    workload.synthetic = true;
    let tasks = |count: usize, work: f64| {
        let task = TaskSpec {
            work: Seconds::clamped(work),
            asks: slot,
            memory: Bytes::new(GB / 2),
            dirty_rate: None,
        };
        vec![task; count]
    };
    let jobs = jobs.iter().map(|(submitted, deadline)| JobSpec {
        submitted: at(*submitted),
        priority: 0,
        deadline: Some(at(*deadline)),
        flow: None,
        stages: vec![tasks(8, 9.0), tasks(50, 26.0)],
    });
    workload.jobs = jobs.collect();
    workload.remarks = vec![
        "Paper 002, §7: 7 nodes of 3 containers, jobs of 8 maps and 50 reduces, 87 s each when alone."
            .to_owned(),
    ];
    workload
}

/// Time of a task of [`suspended`], seconds. Assumed: paper 001 has curves over it, and no number.
pub const SUSPENDED_TASK_S: f64 = 80.0;

/// Makes the experiment of paper 001, Figures 2 to 4 (§IV): a machine of 4 GB with swap that runs one task at a time, a
/// task of low priority with `low` bytes, and one of high priority with `high` bytes that comes when the first one has
/// done the share `done` of its work.
#[must_use]
pub fn suspended(low: Bytes, high: Bytes, done: f64) -> Workload {
    let node = NodeSpec {
        swap: Bytes::new(4 * GB),
        ..NodeSpec::new(resources(1000, Bytes::new(4 * GB)))
    };
    let job = |submitted: f64, priority: u8, memory: Bytes| JobSpec {
        submitted: at(submitted),
        priority,
        deadline: None,
        flow: None,
        stages: vec![vec![TaskSpec {
            work: Seconds::clamped(SUSPENDED_TASK_S),
            asks: resources(1000, memory),
            memory,
            dirty_rate: None,
        }]],
    };
    let mut workload = Workload::on("suspended", vec![node]);
    workload.synthetic = true;
    workload.jobs = vec![job(0.0, 0, low), job(SUSPENDED_TASK_S * done, 9, high)];
    workload.remarks = vec![
        "Paper 001, §IV: a machine of 4 GB with swap, two tasks, one at a time. Assumed: 80 s a task, and all of the \
         4 GB are the tasks'."
            .to_owned(),
    ];
    workload
}
