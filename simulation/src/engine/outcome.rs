//! Results of a run.

use std::time::Duration;

use permafrost_scheduling::quantity::{Moment, Seconds};
use serde::Serialize;

use super::{Counts, Simulation, SimulationError};
use crate::workload::Band;

/// Response times of the jobs of a band: the time from the submission of a job to the end of its last task.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BandOutcome {
    /// Band of the jobs.
    pub band: Band,
    /// Number of jobs.
    pub jobs: u64,
    /// Mean response time, seconds.
    pub mean_s: f64,
    /// Median response time, seconds.
    pub p50_s: f64,
    /// 90th percentile, seconds.
    pub p90_s: f64,
    /// 95th percentile, seconds.
    pub p95_s: f64,
}

/// Results of a run: the same for the same workload, policy and configuration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Name of the workload.
    pub workload: String,
    /// True if no trace of a real cluster has the workload.
    pub synthetic: bool,
    /// Name of the policy.
    pub policy: String,
    /// Name of the medium.
    pub medium: String,
    /// Number of nodes at the beginning.
    pub nodes: u64,
    /// Processors of these nodes.
    pub cores: f64,
    /// Jobs that ended.
    pub jobs: u64,
    /// Jobs of which some task fits no node; they are left out.
    pub misfits: u64,
    /// Tasks that ended.
    pub tasks: u64,
    /// Time of the last end, seconds.
    pub makespan_s: f64,
    /// Processor time that tasks held, hours of a processor.
    pub held_core_h: f64,
    /// Part of it that is work that counts.
    pub done_core_h: f64,
    /// Part of it that is work that was undone.
    pub lost_core_h: f64,
    /// Part of it in which tasks were being started or restored, or waited for it.
    pub starting_core_h: f64,
    /// Part of it in which tasks were dumped or paged out, or waited for it.
    pub leaving_core_h: f64,
    /// Processor time of work that dumps kept, hours of a processor. Killing the same tasks at the same times would have
    /// undone it.
    pub kept_core_h: f64,
    /// All but the work that counts, as a share of the processor time that was held.
    pub waste: f64,
    /// The same as a share of the processors of all nodes until the last end.
    pub waste_of_capacity: f64,
    /// Energy of all nodes until the last end, kWh.
    pub energy_kwh: f64,
    /// Share of the processor time that was held in which the task's own dump or restore ran.
    pub cpu_overhead: f64,
    /// Share of the time for which the media were busy with dumps and restores.
    pub io_overhead: f64,
    /// Average of the bytes of checkpoints, as a share of the room on all media.
    pub storage: f64,
    /// Most bytes of checkpoints at one time, as a share of the room on all media.
    pub storage_peak: f64,
    /// Preemptions by mechanism, and what came back.
    pub counts: Counts,
    /// Decisions of the policy.
    pub decisions: u64,
    /// Decisions that could not be carried out.
    pub refused: u64,
    /// Response times by band; bands without jobs are left out.
    pub bands: Vec<BandOutcome>,
}

impl Outcome {
    /// Returns the response times of a band.
    #[must_use]
    pub fn band(&self, band: Band) -> Option<&BandOutcome> {
        self.bands.iter().find(|of| of.band == band)
    }
}

/// Time that decisions took on this machine, which differs between runs.
#[derive(Clone, Debug)]
pub struct Decided {
    count: u64,
    total: Duration,
    /// Number of calls that took less than 2^index nanoseconds, and not less than half of that.
    powers: [u64; 64],
}

impl Default for Decided {
    fn default() -> Self {
        Self {
            count: 0,
            total: Duration::ZERO,
            powers: [0; 64],
        }
    }
}

impl Decided {
    pub(super) fn record(&mut self, took: Duration) {
        self.count += 1;
        self.total += took;
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let power = (64 - nanos.leading_zeros()).min(63) as usize;
        if let Some(count) = self.powers.get_mut(power) {
            *count += 1;
        }
    }

    /// Returns the number of events that the policy was told.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Returns the time of all decisions.
    #[must_use]
    pub const fn total(&self) -> Duration {
        self.total
    }

    /// Returns an upper bound for this share of the decisions, within a factor of two.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Duration {
        let wanted = share * self.count as f64;
        let mut seen = 0;
        for (power, count) in (0_u32..).zip(&self.powers) {
            seen += count;
            if seen as f64 >= wanted {
                return Duration::from_nanos(1 << power.min(62));
            }
        }
        Duration::ZERO
    }
}

/// Everything that a run gives.
#[derive(Clone, Debug)]
pub struct Run {
    /// Results, the same for every run.
    pub outcome: Outcome,
    /// Time of the decisions on this machine.
    pub decided: Decided,
    /// End of each job; none for one that fits no node.
    pub ends: Vec<Option<Moment>>,
    /// Time at which the first task of each job ran; none for one that fits no node or has no task.
    pub starts: Vec<Option<Moment>>,
    /// Number of the tasks of each job that were killed without a checkpoint left.
    pub kills: Vec<u64>,
    /// Tasks that were started from the beginning, each time counted.
    pub started: u64,
}

/// Returns the mean, the median and two percentiles of some times; the percentiles are by nearest rank.
fn summary(band: Band, mut times: Vec<f64>) -> Option<BandOutcome> {
    times.sort_by(f64::total_cmp);
    let count = times.len();
    let rank = |percent: usize| {
        let rank = (count * percent).div_ceil(100).max(1);
        times.get(rank - 1).copied()
    };
    Some(BandOutcome {
        band,
        jobs: count as u64,
        p50_s: rank(50)?,
        p90_s: rank(90)?,
        p95_s: rank(95)?,
        mean_s: times.iter().sum::<f64>() / count as f64,
    })
}

impl Simulation<'_> {
    pub(super) fn outcome(self) -> Result<Run, SimulationError> {
        let broken = |what: String| SimulationError::Broken {
            at_s: self.seconds(),
            what,
        };
        let accounts = &self.accounts;
        let sums = accounts.done.plus(accounts.lost);
        let sums = sums.plus(accounts.starting).plus(accounts.leaving);
        if sums != accounts.held {
            return Err(broken(format!(
                "{} s of a processor were held, and {} s were done or lost",
                accounts.held.core_seconds(),
                sums.core_seconds()
            )));
        }
        if self.ended + self.dropped != self.view.tasks() {
            return Err(broken(format!(
                "{} of {} tasks have ended",
                self.ended,
                self.view.tasks()
            )));
        }
        let workload = self.workload;
        let mut times: [Vec<f64>; 3] = [const { Vec::new() }; 3];
        for (job, spec) in self.jobs.iter().zip(&workload.jobs) {
            let of_band = times.get_mut(Band::of(spec.priority) as usize);
            if let (Some(ended), Some(of_band)) = (job.ended, of_band) {
                of_band.push(ended.since(spec.submitted).value());
            }
        }
        let bands = Band::ALL.into_iter().zip(times);
        let bands = bands
            .filter_map(|(band, times)| summary(band, times))
            .collect();
        let makespan = self.last_end.since(Moment::default());
        let nodes = workload.nodes.len() as f64;
        let power = &self.config.power;
        let busy = accounts.computing_s + accounts.transferring_s * power.checkpointing.value();
        let joules =
            power.idle_w * nodes * makespan.value() + (power.busy_w - power.idle_w).max(0.0) * busy;
        let hours = |time: super::ProcessorTime| time.core_seconds() / 3600.0;
        let held = accounts.held.core_seconds();
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        let wasted = held - accounts.done.core_seconds();
        let room = self.config.medium.capacity.count() as f64 * nodes;
        let outcome = Outcome {
            workload: workload.name.clone(),
            synthetic: workload.synthetic,
            policy: self.policy.name().to_owned(),
            medium: self.config.medium.name.clone(),
            nodes: workload.nodes.len() as u64,
            cores: workload.cores(),
            jobs: self.jobs.iter().filter(|job| job.ended.is_some()).count() as u64,
            misfits: self.jobs.iter().filter(|job| job.misfit).count() as u64,
            tasks: self.ended,
            makespan_s: makespan.value(),
            held_core_h: hours(accounts.held),
            done_core_h: hours(accounts.done),
            lost_core_h: hours(accounts.lost),
            starting_core_h: hours(accounts.starting),
            leaving_core_h: hours(accounts.leaving),
            kept_core_h: hours(accounts.kept),
            waste: share(wasted, held),
            waste_of_capacity: share(wasted, workload.cores() * makespan.value()),
            energy_kwh: joules / 3.6e6,
            cpu_overhead: share(accounts.transferring.core_seconds(), held),
            io_overhead: share(accounts.medium_busy_s, nodes * makespan.value()),
            storage: share(
                accounts
                    .stored
                    .average(makespan.max(Seconds::clamped(1e-6))),
                room,
            ),
            storage_peak: share(accounts.stored.peak().count() as f64, room),
            counts: accounts.counts,
            decisions: accounts.decisions,
            refused: accounts.refused,
            bands,
        };
        let ends = self.jobs.iter().map(|job| job.ended).collect();
        Ok(Run {
            outcome,
            decided: self.decided,
            ends,
            starts: self.jobs.iter().map(|job| job.started).collect(),
            kills: self.jobs.iter().map(|job| job.kills).collect(),
            started: self.started,
        })
    }
}
