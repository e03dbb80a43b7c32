//! The experiment of Figures 4 and 6 with real processes: each policy against the bandwidth of checkpoints.

use std::time::Duration;

use permafrost_scheduling::sensitivity::Policy;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;

use super::arguments::Copies;
use super::jobs::{Figures, JobRun, Stage};
use super::journal::Journal;
use super::plan::{self, Plan, Sensitivity, Tier};
use super::site::Site;
use crate::task::{Task, Work};

/// Time for which the speed of a job is measured: the length of the shortest kind of job.
const CALIBRATION: Duration = Duration::from_secs(2);

/// Measures the runs that the journal lacks.
pub(super) fn run(
    context: &Context,
    plan: &Plan,
    journal: &mut Journal,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    let (Some(jobs), Some(tier)) = (&plan.sensitivity, plan.tiers.first()) else {
        return Ok(());
    };
    let region_bytes = plan.region_bytes(jobs.job_bytes);
    // The one of low priority may still be there when the other comes.
    if let Err(reason) = plan::room(&tier.directory, jobs.job_bytes * 2, region_bytes) {
        context.remark(&format!("skipped: the two jobs: {reason}"));
        return Ok(());
    }
    let scratch = tempfile::Builder::new()
        .prefix("permafrost-bench-jobs-")
        .tempdir()
        .map_err(|error| Failure::io("create", &std::env::temp_dir(), &error))?;
    let steps = match journal.steps() {
        Some(steps) => steps,
        None => {
            context.remark("two jobs: measuring how fast they compute");
            let steps = calibrate(plan, jobs, scratch.path(), interrupts)?;
            journal.calibrated(steps)?;
            steps
        }
    };
    let stage = Stage {
        plan,
        jobs,
        steps,
        directory: scratch.path(),
        site: None,
        bandwidth: None,
        interrupts,
    };
    // Neither makes a checkpoint: they are the same at every bandwidth.
    for policy in [Policy::Wait, Policy::Kill] {
        if find(journal, policy, None).is_none() {
            add(context, journal, stage.run(policy, None)?)?;
        }
    }
    for &bandwidth in &jobs.bandwidths {
        let done = |policy| find(journal, policy, Some(bandwidth)).is_some();
        if done(Policy::Checkpoint) && done(Policy::Adaptive) {
            continue;
        }
        let slow = Tier {
            emulate: Some(format!("{bandwidth}:{bandwidth}:0")),
            ..tier.clone()
        };
        let site = Site::on(plan, &slow, region_bytes, Copies::Local, interrupts)?;
        let stage = Stage {
            site: Some(&site),
            bandwidth: Some(bandwidth),
            ..stage
        };
        at_bandwidth(context, journal, &stage, bandwidth)?;
        site.end()?;
    }
    Ok(())
}

/// Runs the two policies that make checkpoints. The second decides by the measurements of the first.
fn at_bandwidth(
    context: &Context,
    journal: &mut Journal,
    stage: &Stage<'_>,
    bandwidth: u64,
) -> Result<(), Failure> {
    if find(journal, Policy::Checkpoint, Some(bandwidth)).is_none() {
        add(context, journal, stage.run(Policy::Checkpoint, None)?)?;
    }
    if find(journal, Policy::Adaptive, Some(bandwidth)).is_none() {
        let measured = find(journal, Policy::Checkpoint, Some(bandwidth));
        let figures = measured.and_then(|job| job.suspend_s.zip(job.resume_s));
        let (suspend_s, resume_s) = figures.ok_or_else(|| {
            Failure::new(Code::Internal, "the journal has a checkpoint without times")
        })?;
        let figures = Some(Figures {
            suspend_s,
            resume_s,
        });
        add(context, journal, stage.run(Policy::Adaptive, figures)?)?;
    }
    Ok(())
}

/// Returns the number of steps that take as long as a job should take.
fn calibrate(
    plan: &Plan,
    jobs: &Sensitivity,
    directory: &std::path::Path,
    interrupts: &Interrupts,
) -> Result<u64, Failure> {
    let work = Work {
        calibrate: Some(CALIBRATION),
        ..Work::idle(jobs.job_bytes, plan.contents, 1)
    };
    let mut task = Task::start(&directory.join("calibration"), &work)?;
    let report = task
        .await_end(interrupts)?
        .filter(|report| report.used_ns > 0)
        .ok_or_else(|| Failure::new(Code::Internal, "the calibration went away"))?;
    let steps = u128::from(report.steps) * u128::from(jobs.job_seconds) * 1_000_000_000
        / u128::from(report.used_ns);
    Ok(u64::try_from(steps).unwrap_or(u64::MAX).max(1))
}

fn find(journal: &Journal, policy: Policy, bandwidth: Option<u64>) -> Option<&JobRun> {
    let mut jobs = journal.jobs().iter();
    jobs.find(|job| job.policy == policy && job.bandwidth_bytes_per_s == bandwidth)
}

/// Adds a run to the journal, if its computation has the same result as the others'.
fn add(context: &Context, journal: &mut Journal, job: JobRun) -> Result<(), Failure> {
    if journal
        .jobs()
        .iter()
        .any(|other| other.result != job.result)
    {
        return Err(Failure::new(
            Code::Corrupt,
            format!("under {}, the jobs computed something else", job.policy),
        )
        .hint("this is an error of Permafrost's or of CRIU's: keep the log and report it"));
    }
    let at = job.bandwidth_bytes_per_s.map_or_else(String::new, |rate| {
        format!(" at {:.0} MB/s (emulated)", rate as f64 / 1e6)
    });
    let seconds = |seconds: f64| human::duration(Duration::from_secs_f64(seconds));
    context.remark(&format!(
        "two jobs, {}{at}: high priority {}, low priority {}",
        job.policy,
        seconds(job.high_response_s),
        seconds(job.low_response_s)
    ));
    journal.add_job(job)
}
