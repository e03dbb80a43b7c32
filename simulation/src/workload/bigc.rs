//! Experiments of paper 004: long jobs that fill a cluster, and short ones that come in bursts.
//!
//! **Given.** 26 machines of 2 × 8 cores with hyper-threading and 132 GB, 10 Gbit/s (§5.1); containers of 4 processors
//! and 4 GB for short tasks, of 8 processors and 16 GB for long ones; 1 GB is reclaimed in 3 s (§5.4). For Figure 5 the
//! demands as shares of the cluster, and when they come (§5.2). For Figure 8 2,020 short and 182 long jobs over 3.8 h that
//! use 17 % and 75 % of the cluster, and a peak at 8,000 s of 95 % (§5.5).
//!
//! **Assumed.** Sizes and times of the jobs, and that a task uses all of its memory; a short task takes 45 s at the
//! median: half of the jobs of Figure 8 take less than 56 s under FIFO, a sixth of 335 s.

use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};

use super::{JobSpec, NodeSpec, TaskSpec, Workload, resources};
use crate::random::Random;

const GB: u64 = 1_000_000_000;
const MACHINES: usize = 26;
/// Processors of a machine, by hyper-threads.
const PROCESSORS: u64 = 32;
const SHORT_PROCESSORS: u64 = 4;
const LONG_PROCESSORS: u64 = 8;
/// Executors of a long job, and tasks of a short one, of Figure 5.
const LONG_TASKS: usize = 8;
const SHORT_TASKS: usize = 5;
/// Median time of a short task, seconds.
const SHORT_S: f64 = 45.0;
/// Median time of a long task, seconds.
const LONG_S: f64 = 300.0;

/// Demand of short jobs in Figure 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bursts {
    /// 40 % of the cluster between 300 and 700 s.
    Low,
    /// 90 % of the cluster between 300 and 700 s.
    High,
    /// Two peaks of 80 % of the cluster between 300 and 700 s.
    Multiple,
}

/// Times and demands as shares of the cluster: from when, until when, how much.
pub type Phases = Vec<(f64, f64, f64)>;

impl Bursts {
    /// Returns the demand of the short jobs over the 900 s. Two peaks: their times are assumed.
    #[must_use]
    pub fn phases(self) -> Phases {
        let burst = match self {
            Self::Low => vec![(300.0, 700.0, 0.4)],
            Self::High => vec![(300.0, 700.0, 0.9)],
            Self::Multiple => vec![
                (300.0, 400.0, 0.8),
                (400.0, 600.0, 0.2),
                (600.0, 700.0, 0.8),
            ],
        };
        let before = vec![(0.0, 300.0, 0.2)];
        [before, burst, vec![(700.0, 900.0, 0.2)]].concat()
    }
}

fn at(seconds: f64) -> Moment {
    Moment::default().after(Seconds::clamped(seconds))
}

fn cluster(name: &str) -> Workload {
    let node = NodeSpec {
        swap: Bytes::new(132 * GB),
        ..NodeSpec::new(resources(1000 * PROCESSORS, Bytes::new(132 * GB)))
    };
    let mut workload = Workload::on(name, vec![node; MACHINES]);
    workload.synthetic = true;
    workload
}

/// Returns the rate at which memory is reclaimed: 1 GB in 3 s (004, §5.4).
#[must_use]
pub fn reclaiming() -> BytesPerSecond {
    BytesPerSecond::clamped(1e9 / 3.0)
}

fn job(random: &mut Random, submitted: f64, is_long: bool, count: usize, median: f64) -> JobSpec {
    let (processors, gb) = match is_long {
        true => (LONG_PROCESSORS, 16),
        false => (SHORT_PROCESSORS, 4),
    };
    let stage = (0..count).map(|_| TaskSpec {
        work: Seconds::clamped(random.log_normal(median, 0.3)),
        asks: resources(1000 * processors, Bytes::new(gb * GB)),
        memory: Bytes::new(gb * GB),
        dirty_rate: None,
    });
    JobSpec {
        submitted: at(submitted),
        priority: if is_long { 0 } else { 9 },
        deadline: None,
        flow: None,
        stages: vec![stage.collect()],
    }
}

/// Adds jobs at random times of a phase until they demand a share of the cluster for its length.
fn demand(
    workload: &mut Workload,
    random: &mut Random,
    (from, until, share): (f64, f64, f64),
    make: impl Fn(&mut Random, f64) -> JobSpec,
) {
    let mut left = workload.cores() * share * (until - from);
    while left > 0.0 {
        let when = from + random.uniform() * (until - from);
        let job = make(random, when);
        let work = job.stages.iter().flatten();
        let work = work.map(|task| task.work.value() * task.asks.cpu_millis as f64 / 1e3);
        left -= work.sum::<f64>();
        workload.jobs.push(job);
    }
}

/// Makes the experiment of Figure 5: 900 s in which long jobs demand 80 % of the cluster, and short ones the phases.
/// The first long jobs are there at the beginning.
#[must_use]
pub fn short_bursts(seed: u64, bursts: Bursts) -> Workload {
    let mut random = Random::new(seed);
    let mut workload = cluster("short-bursts");
    let long = |random: &mut Random, when: f64| job(random, when, true, LONG_TASKS, LONG_S);
    let mut first = workload.cores() * 0.8;
    while first > 0.0 {
        first -= LONG_TASKS as f64 * LONG_PROCESSORS as f64;
        let first = long(&mut random, 0.0);
        workload.jobs.push(first);
    }
    demand(&mut workload, &mut random, (0.0, 900.0 - LONG_S, 0.8), long);
    for phase in bursts.phases() {
        demand(&mut workload, &mut random, phase, |random, when| {
            job(random, when, false, SHORT_TASKS, SHORT_S)
        });
    }
    workload.jobs.sort_by_key(|job| job.submitted);
    workload.remarks = vec![
        "Paper 004, §5.2: 26 machines of 32 processors and 132 GB, long jobs demand 80 %, short ones by phases."
            .to_owned(),
        "Assumed: 8 long tasks of 300 s or 5 short ones of 45 s a job, at the median; all memory of a task is in use."
            .to_owned(),
    ];
    workload
}

/// Makes the experiment of Figure 8: 3.8 hours of Google's trace by the paper's aggregates.
#[must_use]
pub fn google_hours(seed: u64) -> Workload {
    const HOURS_S: f64 = 3.8 * 3600.0;
    const PEAK_S: f64 = 8000.0;
    let mut random = Random::new(seed);
    let mut workload = cluster("google-hours");
    let cores = workload.cores();
    // Tasks that fill 95 % of the cluster come at once; they are among the 2,020 short jobs.
    let peak = cores * 0.95 / (SHORT_PROCESSORS as f64 * SHORT_TASKS as f64);
    for (count, is_long, share, median) in
        [(2020_u32, false, 0.17, SHORT_S), (182, true, 0.75, LONG_S)]
    {
        let mut jobs: Vec<JobSpec> = (0..count)
            .map(|index| {
                let when = match !is_long && f64::from(index) < peak {
                    true => PEAK_S,
                    // The last jobs end within the hours, or nearly so.
                    false => random.uniform() * (HOURS_S - median),
                };
                let tasks = if is_long { LONG_TASKS } else { SHORT_TASKS };
                job(&mut random, when, is_long, tasks, median)
            })
            .collect();
        let of = |task: &TaskSpec| task.work.value() * task.asks.cpu_millis as f64 / 1e3;
        let tasks = || jobs.iter().flat_map(|job| job.stages.iter().flatten());
        let scale = cores * share * HOURS_S / tasks().map(of).sum::<f64>();
        for job in &mut jobs {
            for task in job.stages.iter_mut().flatten() {
                task.work = Seconds::clamped(task.work.value() * scale);
            }
        }
        workload.jobs.extend(jobs);
    }
    workload.jobs.sort_by_key(|job| job.submitted);
    workload.remarks = vec![
        "Paper 004, §5.5: 2,020 short and 182 long jobs over 3.8 h, 17 % and 75 % of the cluster, a peak of 95 % at \
         8,000 s."
            .to_owned(),
        "Assumed: 5 tasks a short job, 8 a long one, their times scaled to these shares; all memory of a task is in \
         use."
            .to_owned(),
    ];
    workload
}
