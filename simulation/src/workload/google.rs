//! A day calibrated on Google's aggregates of 2011, as paper 000 took from the trace (§3.3.2). It is synthetic: the
//! trace itself is not read.
//!
//! **Given.** 15,000 jobs with 600,000 tasks that ask for 22,000 cores in all; the shares of three priority bands
//! (Table 1); the machines' shapes (counted from the trace's machine events). "Core" is the trace's unit, the
//! processors of its largest machine: a task asks for 0.037 of them, as in the trace.
//!
//! **Taken.** The paper says that killing wastes 3,400 core-hours, "about 35 % of the total capacity". 35 % of 22,000
//! cores × 24 h would be 184,800. So the capacity is that of 9,700 core-hours a day: 404 cores, busy all day, with
//! 6,300 core-hours of useful work; a task takes 1,031 s on the average.
//!
//! **Not fitted.** [`Google::machines`], the capacity, is the parameter by which the waste of `kill` could be fitted to
//! 35 %. It cannot: the deployed `kill` takes the victims that lose least, and wastes a few per cent with any capacity
//! (docs/simulation.md). So the capacity is the paper's.
//!
//! **Assumed.** Log-normal sizes of jobs, times, processors and memory; the memory of the largest machine (64 GB); the
//! rate at which tasks dirty memory.

use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};

use super::{JobSpec, NodeSpec, TaskSpec, Workload, resources};
use crate::random::Random;

/// Parameters of the day.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Google {
    /// Seed of all that is drawn.
    pub seed: u64,
    /// Number of jobs.
    pub jobs: usize,
    /// Number of tasks.
    pub tasks: usize,
    /// Cores that all tasks ask for together.
    pub cores: f64,
    /// Useful work of all tasks, hours of a core.
    pub work_core_h: f64,
    /// Number of machines: the capacity.
    pub machines: usize,
}

/// Machines whose processors are 404 cores: the paper's 9,700 core-hours in a day.
const MACHINES: usize = 763;

impl Default for Google {
    fn default() -> Self {
        Self {
            seed: 1,
            jobs: 15_000,
            tasks: 600_000,
            cores: 22_000.0,
            work_core_h: 6_300.0,
            machines: MACHINES,
        }
    }
}

impl Google {
    /// Returns a part of the day: as many jobs, tasks and machines less.
    #[must_use]
    pub fn part(self, of: usize) -> Self {
        let of = of.max(1);
        Self {
            jobs: (self.jobs / of).max(1),
            tasks: (self.tasks / of).max(1),
            cores: self.cores / of as f64,
            work_core_h: self.work_core_h / of as f64,
            machines: (self.machines / of).max(1),
            ..self
        }
    }
}

/// Memory of the largest machine, bytes.
const LARGEST_BYTES: f64 = 64e9;

/// Processors and memory of machines, relative to the largest, and their number among 12,583.
const SHAPES: [(f64, f64, f64); 6] = [
    (0.5, 0.5, 53.5),
    (0.5, 0.25, 30.7),
    (0.5, 0.75, 7.96),
    (1.0, 1.0, 6.32),
    (0.25, 0.25, 1.0),
    (0.5, 0.125, 0.41),
];

/// Tasks by priority band, millions: paper 000, Table 1.
const BANDS: [f64; 3] = [28.4, 17.3, 1.7];

/// Priorities of the bands: the one with the most tasks of each.
const PRIORITIES: [u8; 3] = [0, 4, 9];

/// Longest time of a task relative to the mean.
const LONGEST: f64 = 40.0;

fn whole(value: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a cast of a float saturates, and NaN becomes 0"
    )]
    let whole = value as u64;
    whole
}

/// Makes the day.
#[must_use]
pub fn make(google: &Google) -> Workload {
    let mut random = Random::new(google.seed);
    let mut workload = Workload::on("google", machines(google.machines));
    workload.synthetic = true;
    workload.heartbeat = Seconds::clamped(10.0);
    workload.jobs = jobs(google, &mut random);
    calibrate(&mut workload, google);
    workload.jobs.sort_by_key(|job| job.submitted);
    workload.remarks = vec![
        format!(
            "{} jobs with {} tasks that ask for {:.0} cores in all and work for {:.0} core-hours, on {} machines with \
             {:.0} cores.",
            google.jobs,
            google.tasks,
            google.cores,
            google.work_core_h,
            google.machines,
            workload.cores()
        ),
        "The paper's capacity is taken as 9,700 core-hours a day. Nothing is fitted.".to_owned(),
    ];
    workload
}

/// Makes machines of the trace's shapes, by their shares, largest remainder first.
fn machines(count: usize) -> Vec<NodeSpec> {
    let total: f64 = SHAPES.iter().map(|shape| shape.2).sum();
    let mut nodes = Vec::with_capacity(count);
    let mut made = [0.0; SHAPES.len()];
    for index in 0..count {
        let owed = SHAPES
            .iter()
            .zip(made)
            .map(|(shape, made)| shape.2 / total * (index + 1) as f64 - made);
        let next = owed.enumerate().max_by(|a, b| a.1.total_cmp(&b.1));
        let at = next.map_or(0, |(at, _)| at);
        let (Some(shape), Some(made)) = (SHAPES.get(at), made.get_mut(at)) else {
            break;
        };
        *made += 1.0;
        let memory = Bytes::new(whole(shape.1 * LARGEST_BYTES));
        nodes.push(NodeSpec::new(resources(whole(shape.0 * 1000.0), memory)));
    }
    nodes
}

/// Draws jobs with tasks whose sizes and times are relative to their means.
fn jobs(google: &Google, random: &mut Random) -> Vec<JobSpec> {
    // Most jobs have one task, some have thousands.
    let sizes: Vec<f64> = (0..google.jobs)
        .map(|_| random.log_normal(1.0, 2.0))
        .collect();
    let scale = google.tasks as f64 / sizes.iter().sum::<f64>();
    let mut due = 0.0;
    let mut given = 0;
    let mut jobs = Vec::with_capacity(google.jobs);
    for (index, size) in sizes.iter().enumerate() {
        due += size * scale;
        let left = google.jobs - index - 1;
        let most = google.tasks.saturating_sub(given + left).max(1);
        let wanted = usize::try_from(whole(due.round())).unwrap_or(0);
        let count = match left {
            0 => most,
            _ => wanted.saturating_sub(given).clamp(1, most),
        };
        given += count;
        let band = random.weighted(&BANDS);
        let median = random.log_normal(1.0, 1.0);
        let asks = random.log_normal(1.0, 0.7);
        let memory = random.log_normal(1e9, 0.8).clamp(50e6, 7e9);
        let tasks = (0..count).map(|_| {
            let memory = Bytes::new(whole(memory));
            TaskSpec {
                work: Seconds::clamped(random.log_normal(median, 0.5).min(LONGEST)),
                asks: resources(whole(asks * 1000.0), memory),
                memory,
                // A tenth of the memory in ten minutes.
                dirty_rate: Some(BytesPerSecond::clamped(memory.count() as f64 / 6000.0)),
            }
        });
        let tasks = tasks.collect();
        jobs.push(JobSpec {
            submitted: Moment::default().after(arrival(random)),
            priority: PRIORITIES.get(band).copied().unwrap_or(0),
            deadline: None,
            flow: None,
            stages: vec![tasks],
        });
    }
    jobs
}

/// Draws a time of the day: twice as many jobs come in its middle as at its ends.
fn arrival(random: &mut Random) -> Seconds {
    loop {
        let part = random.uniform();
        let density = 1.0 - (std::f64::consts::TAU * part).cos() / 3.0;
        if random.uniform() * (4.0 / 3.0) < density {
            return Seconds::ONE_DAY.times(permafrost_scheduling::quantity::Ratio::clamped(part));
        }
    }
}

/// Scales the processors and the times so that all tasks together ask for the cores and have the work that they should.
fn calibrate(workload: &mut Workload, google: &Google) {
    let asked: f64 = workload
        .tasks()
        .map(|task| task.asks.cpu_millis as f64)
        .sum();
    let scale = google.cores * 1e3 / asked.max(1.0);
    let tasks = |workload: &mut Workload, change: &dyn Fn(&mut TaskSpec)| {
        let jobs = workload.jobs.iter_mut();
        jobs.flat_map(|job| job.stages.iter_mut().flatten())
            .for_each(change);
    };
    tasks(workload, &|task| {
        // No task asks for more than the smallest machine has.
        let millis = (task.asks.cpu_millis as f64 * scale)
            .round()
            .clamp(1.0, 250.0);
        task.asks.cpu_millis = whole(millis);
    });
    let scale = google.work_core_h * 3600.0 / workload.core_seconds().max(1e-9);
    tasks(workload, &|task| {
        task.work = Seconds::clamped(task.work.value() * scale);
    });
}
