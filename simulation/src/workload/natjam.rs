//! Stand-in for the traces of paper 002 (§6 to §8), which are confidential: jobs of FB-2009, scaled to a cluster.

use permafrost_scheduling::quantity::{Bytes, Moment, Seconds};

use super::{Band, JobSpec, NodeSpec, TaskSpec, Workload, resources};
use crate::random::Random;

const GB: u64 = 1_000_000_000;

/// Number of jobs, and time over which they come, seconds (002, §6).
const JOBS: usize = 400;
const HOUR_S: f64 = 3600.0;

/// Work of a class of jobs, as a share of what the containers do in the hour.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClusterShare {
    /// Of production jobs: high priority.
    pub production: f64,
    /// Of research jobs: low priority.
    pub research: f64,
}

impl ClusterShare {
    /// Production jobs do not overload the cluster, and research jobs do (002, §6).
    pub const BOTH: Self = Self {
        production: 0.5,
        research: 0.75,
    };

    /// Production jobs alone overload it (002, §7).
    pub const OVERLOADED: Self = Self {
        production: 1.25,
        research: 0.0,
    };
}

/// A cluster of paper 002.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NatjamCluster {
    /// Six workers of 12 containers (§6).
    Small,
    /// 250 workers of eight containers (§8).
    Large,
}

impl NatjamCluster {
    const fn size(self) -> (usize, u64) {
        match self {
            Self::Small => (6, 12),
            Self::Large => (250, 8),
        }
    }

    fn containers(self) -> f64 {
        let (workers, each) = self.size();
        workers as f64 * each as f64
    }

    /// Makes a workload of the first jobs of a trace, which come within an hour, with as many tasks as give each class
    /// its share of the cluster. A job is of production with probability one half, by `seed`; a class without a share is left out.
    #[must_use]
    pub fn jobs(self, trace: &Workload, share: ClusterShare, seed: u64) -> Workload {
        let mut random = Random::new(seed);
        let (workers, each) = self.size();
        let node = NodeSpec::new(resources(1000 * each, Bytes::new(GB * each)));
        let mut workload = Workload::on("natjam-trace", vec![node; workers]);
        workload.synthetic = true;
        let jobs: Vec<(&JobSpec, u8)> = (trace.jobs.iter().take(JOBS))
            .map(|job| (job, if random.uniform() < 0.5 { 9 } else { 0 }))
            .collect();
        let seconds = |job: &JobSpec| job.submitted.since(Moment::default()).value();
        let span = jobs.last().map_or(1.0, |(job, _)| seconds(job));
        let work_of = |wanted: u8| -> f64 {
            let of = jobs.iter().filter(|(_, priority)| *priority == wanted);
            let tasks = of.flat_map(|(job, _)| job.stages.iter().flatten());
            tasks.map(|task| task.work.value()).sum()
        };
        let hour = self.containers() * HOUR_S;
        let (production, research) = (work_of(9), work_of(0));
        for (job, priority) in jobs {
            let (share, all) = match Band::of(priority) {
                Band::High => (share.production, production),
                _ => (share.research, research),
            };
            if share <= 0.0 {
                continue;
            }
            let scale = share * hour / all.max(1.0);
            let submitted = Seconds::clamped(seconds(job) / span.max(1.0) * HOUR_S);
            workload.jobs.push(JobSpec {
                submitted: Moment::default().after(submitted),
                priority,
                deadline: None,
                flow: None,
                stages: job
                    .stages
                    .iter()
                    .map(|stage| scaled(stage, scale))
                    .collect(),
            });
        }
        workload.remarks = vec![
            "Paper 002, §6 to §8, used traces of Yahoo that are confidential: here are the first 400 jobs of FB-2009, \
             so only directions compare."
                .to_owned(),
            format!(
                "{workers} workers of {each} containers. Assumed: half of the jobs are of production; production has \
                 {} % of the containers of the hour to do, research {} %.",
                share.production * 100.0,
                share.research * 100.0
            ),
        ];
        workload
    }
}

/// Returns a stage with the number of its tasks scaled: at least one, if it has any.
fn scaled(stage: &[TaskSpec], scale: f64) -> Vec<TaskSpec> {
    let count = super::experiments::whole((stage.len() as f64 * scale).round().max(1.0));
    let task = |task: &TaskSpec| TaskSpec {
        asks: resources(1000, Bytes::new(GB)),
        memory: Bytes::new(GB),
        dirty_rate: None,
        ..*task
    };
    stage.iter().map(task).cycle().take(count).collect()
}

/// Gives each job the deadline of its time alone on the cluster × (1 + ε), ε uniform from 0 to 2 (002, §7).
///
/// That time is estimated: of each stage its longest task, or its work on all containers if that is more.
pub fn with_deadlines(workload: &mut Workload, seed: u64) {
    let mut random = Random::new(seed);
    let containers = (workload.cores()).max(1.0);
    for job in &mut workload.jobs {
        let alone: f64 = (job.stages.iter())
            .map(|stage| {
                let work = stage.iter().map(|task| task.work.value());
                let sum: f64 = work.clone().sum();
                work.fold(0.0, f64::max).max(sum / containers)
            })
            .sum();
        let given = Seconds::clamped(alone * (1.0 + 2.0 * random.uniform()));
        job.deadline = Some(job.submitted.after(given));
    }
    let remark = "Assumed: a job alone takes the longest task of each stage, or the stage's work on all containers.";
    workload.remarks.push(remark.to_owned());
}
