//! Runs two real jobs under one policy.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use permafrost_scheduling::preempt::Decision;
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Seconds};
use permafrost_scheduling::sensitivity::{Policy, Storage};
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::interrupt::Interrupts;
use serde::{Deserialize, Serialize};

use super::plan::{Plan, Sensitivity};
use super::power::Meter;
use super::site::Site;
use crate::cycle::{self, How, Target};
use crate::machine;
use crate::task::{Task, Work};
use crate::workload::Report;

/// Measurements of the two jobs. A line of sensitivity.csv.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct JobRun {
    pub(super) policy: Policy,
    /// Emulated bandwidth of the checkpoints; `None` where no checkpoint is made.
    pub(super) bandwidth_bytes_per_s: Option<u64>,
    /// Guarantee of the medium as the node reports it; empty where there is no node.
    pub(super) medium: String,
    pub(super) emulated: bool,
    /// Decision of Algorithm 1.
    pub(super) decision: Option<Decision>,
    /// Time from the arrival of the job of high priority to its end.
    pub(super) high_response_s: f64,
    /// Time from the start of the job of low priority to its end.
    pub(super) low_response_s: f64,
    /// Time until both jobs had ended.
    pub(super) makespan_s: f64,
    /// Processor time of the jobs, CRIU and the node.
    pub(super) busy_s: f64,
    /// Energy by the processors' power meter, if there is one.
    pub(super) energy_j: Option<f64>,
    /// Duration of the checkpoint's dump, if one was made.
    pub(super) suspend_s: Option<f64>,
    pub(super) resume_s: Option<f64>,
    /// Result of the jobs' computation, which is the same under every policy.
    pub(super) result: u64,
}

/// Inputs of a run.
#[derive(Clone, Copy)]
pub(super) struct Stage<'a> {
    pub(super) plan: &'a Plan,
    pub(super) jobs: &'a Sensitivity,
    /// Steps of computation of each job.
    pub(super) steps: u64,
    /// Directory for the reports of the jobs.
    pub(super) directory: &'a Path,
    /// Nodes that keep the checkpoints; no checkpoints are made without.
    pub(super) site: Option<&'a Site>,
    pub(super) bandwidth: Option<u64>,
    pub(super) interrupts: &'a Interrupts,
}

/// Durations of a dump and a restore of a process of the same size on the same medium.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    pub(super) suspend_s: f64,
    pub(super) resume_s: f64,
}

impl Figures {
    /// Converts the durations into bandwidths.
    fn storage(&self, size: Bytes) -> Result<Storage, Failure> {
        let rate = |seconds: f64| {
            Seconds::new(seconds)
                .and_then(|elapsed| BytesPerSecond::measured(size, elapsed))
                .map_err(|error| Failure::new(Code::Internal, error.to_string()))
        };
        Ok(Storage {
            write: rate(self.suspend_s)?,
            read: rate(self.resume_s)?,
            dump_start: Seconds::ZERO,
            restore_start: Seconds::ZERO,
        })
    }
}

/// The job of low priority after its preemption, and the durations if it was dumped.
struct Preempted {
    low: Task,
    taken: Option<Figures>,
}

impl Stage<'_> {
    fn start(&self, name: &str, seed: u64) -> Result<Task, Failure> {
        let work = Work {
            steps: Some(self.steps),
            ..Work::idle(self.jobs.job_bytes, self.plan.contents, seed)
        };
        Task::start(&self.directory.join(name), &work)
    }

    /// Runs both jobs under `policy`. `Adaptive` decides by `figures`.
    pub(super) fn run(&self, policy: Policy, figures: Option<Figures>) -> Result<JobRun, Failure> {
        let cpu_before = self.cpu_time();
        let mut meter = Meter::start();
        let start = Instant::now();
        let low = self.start("low", 1)?;
        self.sleep_until(
            start + Duration::from_secs(self.jobs.job_seconds) / 2,
            &mut meter,
        )?;
        let arrival = Instant::now();
        let (decision, policy_now) = self.decide(policy, figures, arrival - start)?;

        let (high_end, low_end, high, low, taken) = match policy_now {
            Policy::Wait => {
                let mut low = low;
                let low_report = self.end_of(&mut low)?;
                let low_end = Instant::now();
                let high_report = self.run_high()?;
                (Instant::now(), low_end, high_report, low_report, None)
            }
            other => {
                let Preempted { mut low, mut taken } = self.preempt(low, other)?;
                let high_report = self.run_high()?;
                let high_end = Instant::now();
                if let Some(figures) = &mut taken {
                    figures.resume_s =
                        cycle::resume(&self.target()?, self.interrupts)?.as_secs_f64();
                } else {
                    low = self.start("low", 1)?;
                }
                let low_report = self.end_of(&mut low)?;
                (high_end, Instant::now(), high_report, low_report, taken)
            }
        };
        let end = high_end.max(low_end);
        let job = JobRun {
            policy,
            bandwidth_bytes_per_s: self.bandwidth,
            medium: self.site.map_or("", Site::guarantee).to_owned(),
            emulated: self.site.is_some(),
            decision,
            high_response_s: (high_end - arrival).as_secs_f64(),
            low_response_s: (low_end - start).as_secs_f64(),
            makespan_s: (end - start).as_secs_f64(),
            busy_s: self.cpu_time().saturating_sub(cpu_before).as_secs_f64(),
            energy_j: meter.as_mut().map(Meter::joules),
            suspend_s: taken.map(|figures| figures.suspend_s),
            resume_s: taken.map(|figures| figures.resume_s),
            result: low.result.rotate_left(1) ^ high.result,
        };
        if taken.is_some() {
            cycle::remove(&self.target()?, self.interrupts)?;
        }
        Ok(job)
    }

    /// Returns the decision of Algorithm 1, and the policy to apply now.
    fn decide(
        &self,
        policy: Policy,
        figures: Option<Figures>,
        progress: Duration,
    ) -> Result<(Option<Decision>, Policy), Failure> {
        let (Policy::Adaptive, Some(figures)) = (policy, figures) else {
            return Ok((None, policy));
        };
        let size = Bytes::new(self.jobs.job_bytes);
        let progress = Seconds::new(progress.as_secs_f64())
            .map_err(|error| Failure::new(Code::Internal, error.to_string()))?;
        let decision = figures.storage(size)?.decide(size, progress);
        let now = match decision {
            Decision::Kill => Policy::Kill,
            Decision::NormalCheckpoint | Decision::IncrementalCheckpoint => Policy::Checkpoint,
        };
        Ok((Some(decision), now))
    }

    /// Takes the machine from the job of low priority.
    fn preempt(&self, mut low: Task, policy: Policy) -> Result<Preempted, Failure> {
        if policy == Policy::Kill {
            low.kill();
            return Ok(Preempted { low, taken: None });
        }
        let suspended =
            cycle::suspend(&self.target()?, low.pid(), How::default(), self.interrupts)?;
        low.await_gone()?;
        let taken = Some(Figures {
            suspend_s: suspended.total.as_secs_f64(),
            resume_s: 0.0,
        });
        Ok(Preempted { low, taken })
    }

    fn run_high(&self) -> Result<Report, Failure> {
        let mut high = self.start("high", 2)?;
        self.end_of(&mut high)
    }

    /// Waits until a job has ended and is reaped, so that its processor time is counted.
    fn end_of(&self, task: &mut Task) -> Result<Report, Failure> {
        let report = task
            .await_end(self.interrupts)?
            .ok_or_else(|| Failure::new(Code::Internal, format!("job {} went away", task.pid())))?;
        task.await_gone()?;
        Ok(report)
    }

    fn target(&self) -> Result<Target<'_>, Failure> {
        let site = self
            .site
            .ok_or_else(|| Failure::new(Code::Internal, "there is no node to dump to"))?;
        Ok(Target {
            socket: site.control(),
            job: "bench-low",
            criu: self.plan.criu.as_deref(),
        })
    }

    fn cpu_time(&self) -> Duration {
        machine::ended_children_cpu_time() + self.site.map_or(Duration::ZERO, Site::cpu_time)
    }

    fn sleep_until(&self, moment: Instant, meter: &mut Option<Meter>) -> Result<(), Failure> {
        loop {
            self.interrupts.check()?;
            let left = moment.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            if let Some(meter) = meter {
                meter.look();
            }
            thread::sleep(left.min(Duration::from_millis(50)));
        }
    }
}
