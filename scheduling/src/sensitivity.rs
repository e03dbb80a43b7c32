//! Model of the experiment of paper 000, Figures 4 and 6 (§3.3.3 and §4.2.2): two jobs on one machine, the second of
//! high priority and arriving while the first runs; the outcome of each policy, against the bandwidth of checkpoints.
//!
//! The model has only time and sizes, no contention: a job runs at full speed or not at all. The cost model gives the
//! duration of a checkpoint ([`checkpoint`](crate::cost::checkpoint)); `Adaptive` decides by Algorithm 1.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::cost::{
    Copies, Dump, NoCost, NodeFigures, TaskCost, TaskFigures, TaskResources, checkpoint,
};
use crate::estimator::SizedRates;
use crate::figure::Figure;
use crate::preempt::{CandidateVictim, Decision, algorithm_1};
use crate::quantity::{Bytes, BytesPerSecond, Ratio, Seconds};
use crate::{NodeId, TaskId};

/// Policy of the machine when the job of high priority arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// The new job waits for the end of the running one.
    Wait,
    /// The running job is killed, and restarts from the beginning afterwards.
    Kill,
    /// The other is checkpointed, and restored afterwards.
    Checkpoint,
    /// The running job is killed or checkpointed, by Algorithm 1.
    Adaptive,
}

impl Policy {
    /// All policies, in the order of Figure 6.
    pub const ALL: [Self; 4] = [Self::Wait, Self::Kill, Self::Checkpoint, Self::Adaptive];
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Wait => "wait",
            Self::Kill => "kill",
            Self::Checkpoint => "checkpoint",
            Self::Adaptive => "adaptive",
        })
    }
}

/// The two jobs, which are alike.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Jobs {
    /// Time that each takes when it has the machine for itself.
    pub work: Seconds,
    /// Time at which the second job arrives, after the start of the first.
    pub arrival: Seconds,
    /// Memory of each job, all of which a checkpoint takes.
    pub size: Bytes,
}

impl Jobs {
    /// The paper's: k-means, a minute, 5 GB (as 5 × 10^9 bytes), the second after 30 s.
    pub const PAPER: Self = Self {
        work: Seconds::MINUTE,
        arrival: Seconds::HALF_A_MINUTE,
        size: Bytes::new(5_000_000_000),
    };
}

/// Speed at which checkpoints are written and read.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Storage {
    /// Bandwidth of dumps.
    pub write: BytesPerSecond,
    /// Bandwidth of restores.
    pub read: BytesPerSecond,
    /// Fixed time of a dump, independent of its size.
    pub dump_start: Seconds,
    /// Fixed time of a restore, independent of its size.
    pub restore_start: Seconds,
}

impl Storage {
    /// Makes a storage that is as fast to read as to write and has no fixed times: the paper's overhead.
    #[must_use]
    pub const fn plain(rate: BytesPerSecond) -> Self {
        Self {
            write: rate,
            read: rate,
            dump_start: Seconds::ZERO,
            restore_start: Seconds::ZERO,
        }
    }

    /// Returns the cost of dumping a task of `size` and restoring it.
    fn cost(&self, size: Bytes) -> Result<TaskCost, NoCost> {
        let node = NodeFigures {
            write: SizedRates::uniform(Figure::given(self.write)),
            read: SizedRates::uniform(Figure::given(self.read)),
            write_queue: Figure::given(Bytes::ZERO),
            read_queue: Figure::given(Bytes::ZERO),
            dump_start: Figure::given(self.dump_start),
            restore_start: Figure::given(self.restore_start),
            ..NodeFigures::unknown(NodeId(0))
        };
        let task = TaskFigures {
            full: Figure::given(size),
            ..TaskFigures::unknown(TaskId(0), TaskResources::ZERO)
        };
        checkpoint(&task, Dump::Full, Copies::Local, &node, None)
    }

    /// Returns the decision of Algorithm 1 for a task of `size` after `progress`. Fixed times count as its queue
    /// time: in them nothing is written yet.
    #[must_use]
    pub fn decide(&self, size: Bytes, progress: Seconds) -> Decision {
        let victim = CandidateVictim {
            task: TaskId(0),
            size,
            bw_write: self.write,
            bw_read: self.read,
            queue_time_dump: self.dump_start.plus(self.restore_start),
            progress,
            previous_checkpoint: false,
        };
        let decided = algorithm_1(vec![victim]);
        decided
            .first()
            .map_or(Decision::Kill, |&(_, decision)| decision)
    }
}

/// Response times of both jobs under a policy, and the use of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SimulatedOutcome {
    /// Time from the high-priority job's arrival to its end.
    pub high_response: Seconds,
    /// Time from the low-priority job's start to its end.
    pub low_response: Seconds,
    /// Until both have ended.
    pub makespan: Seconds,
    /// Part of the makespan in which jobs compute, lost work counted.
    pub computing: Seconds,
    /// Part of the makespan in which a checkpoint is written or read.
    pub checkpointing: Seconds,
}

impl SimulatedOutcome {
    /// Returns the energy that the machine uses, joules.
    #[must_use]
    pub fn energy_j(&self, power: &Power) -> f64 {
        let busy =
            self.computing.value() + self.checkpointing.value() * power.checkpointing.value();
        power.idle_w * self.makespan.value() + (power.busy_w - power.idle_w).max(0.0) * busy
    }
}

/// Power that the machine draws, linear in its utilisation: paper 000, §3.3.2, takes the wattage at the average
/// utilisation times the time of the experiment, and names no wattage.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Power {
    /// Power of the idle machine, watts.
    pub idle_w: f64,
    /// Power of the machine with a job on it, watts.
    pub busy_w: f64,
    /// Utilisation while the machine writes or reads a checkpoint: 1 as with a job, 0 idle.
    pub checkpointing: Ratio,
}

impl Power {
    /// Power of one watt whatever the machine does: energy is then the time until both jobs have ended, on which the
    /// paper's Figures 4c and 6c rest ("based on the total response time of both jobs").
    pub const TIME: Self = Self {
        idle_w: 1.0,
        busy_w: 1.0,
        checkpointing: Ratio::ONE,
    };
}

/// Simulates `jobs` under `policy`, with checkpoints on `storage`.
///
/// A second job that arrives after the end of the first has no effect on it.
///
/// # Errors
///
/// [`NoCost`] never: every figure is given. The error type is the cost model's.
pub fn simulate(
    policy: Policy,
    jobs: &Jobs,
    storage: &Storage,
) -> Result<SimulatedOutcome, NoCost> {
    let Jobs {
        work,
        arrival,
        size,
    } = *jobs;
    let twice = work.plus(work);
    if arrival >= work {
        return Ok(SimulatedOutcome {
            high_response: work,
            low_response: work,
            makespan: arrival.plus(work),
            computing: twice,
            checkpointing: Seconds::ZERO,
        });
    }
    Ok(match policy {
        Policy::Wait => SimulatedOutcome {
            high_response: twice.less(arrival),
            low_response: work,
            makespan: twice,
            computing: twice,
            checkpointing: Seconds::ZERO,
        },
        Policy::Kill => {
            let end = arrival.plus(twice);
            SimulatedOutcome {
                high_response: work,
                low_response: end,
                makespan: end,
                computing: end,
                checkpointing: Seconds::ZERO,
            }
        }
        Policy::Checkpoint => {
            let cost = storage.cost(size)?;
            let (dump, restore) = (cost.delay().p50, cost.until_running().p50);
            let checkpointing = dump.plus(restore);
            let end = twice.plus(checkpointing);
            SimulatedOutcome {
                high_response: dump.plus(work),
                low_response: end,
                makespan: end,
                computing: twice,
                checkpointing,
            }
        }
        Policy::Adaptive => {
            let chosen = match storage.decide(size, arrival) {
                Decision::Kill => Policy::Kill,
                Decision::NormalCheckpoint | Decision::IncrementalCheckpoint => Policy::Checkpoint,
            };
            return simulate(chosen, jobs, storage);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a storage that moves 5 GB in `seconds`, either way.
    fn taking(seconds: f64) -> Storage {
        Storage::plain(BytesPerSecond::new(5e9 / seconds).unwrap())
    }

    fn outcome(policy: Policy, dump_seconds: f64) -> [f64; 3] {
        let outcome = simulate(policy, &Jobs::PAPER, &taking(dump_seconds)).unwrap();
        [
            outcome.high_response,
            outcome.low_response,
            outcome.makespan,
        ]
        .map(|time| (time.value() * 1e3).round() / 1e3)
    }

    const HDD: f64 = 169.18;
    const SSD: f64 = 43.73;
    const NVM: f64 = 2.92;

    #[test]
    fn waiting_and_killing_do_not_depend_on_the_storage() {
        for seconds in [HDD, SSD, NVM] {
            // The first until 60 s; the second from 60 to 120, and here since 30.
            assert_eq!(outcome(Policy::Wait, seconds), [90.0, 60.0, 120.0]);
            // The second job runs from 30 to 90, the first restarts and runs from 90 to 150.
            assert_eq!(outcome(Policy::Kill, seconds), [60.0, 150.0, 150.0]);
        }
    }

    #[test]
    fn a_checkpoint_delays_the_one_by_a_dump_and_the_other_by_a_restore_as_well() {
        // By hand: 60 + 169.18; 120 + 2 × 169.18.
        assert_eq!(outcome(Policy::Checkpoint, HDD), [229.18, 458.36, 458.36]);
        assert_eq!(outcome(Policy::Checkpoint, SSD), [103.73, 207.46, 207.46]);
        assert_eq!(outcome(Policy::Checkpoint, NVM), [62.92, 125.84, 125.84]);
    }

    #[test]
    fn adaptive_kills_on_the_papers_disks_and_checkpoints_on_its_nvm() {
        assert_eq!(outcome(Policy::Adaptive, HDD), outcome(Policy::Kill, HDD));
        assert_eq!(outcome(Policy::Adaptive, SSD), outcome(Policy::Kill, SSD));
        assert_eq!(
            outcome(Policy::Adaptive, NVM),
            outcome(Policy::Checkpoint, NVM)
        );
        // After 30 s of progress the decision changes where a dump takes 15 s, at 333 MB/s.
        assert_eq!(
            outcome(Policy::Adaptive, 15.001),
            outcome(Policy::Kill, 15.001)
        );
        assert_eq!(
            outcome(Policy::Adaptive, 14.999),
            outcome(Policy::Checkpoint, 14.999)
        );
    }

    #[test]
    fn fixed_times_delay_and_decide_too() {
        let storage = Storage {
            dump_start: Seconds::from_millis(1000),
            restore_start: Seconds::from_millis(500),
            ..taking(14.999)
        };
        let jobs = Jobs::PAPER;
        let outcome = simulate(Policy::Checkpoint, &jobs, &storage).unwrap();
        assert!((outcome.high_response.value() - 75.999).abs() < 1e-6);
        assert!((outcome.low_response.value() - 151.498).abs() < 1e-6);
        // Without them it would be checkpointed.
        assert_eq!(storage.decide(jobs.size, jobs.arrival), Decision::Kill);
    }

    #[test]
    fn energy_is_the_time_or_what_the_watts_say() {
        let outcome = simulate(Policy::Checkpoint, &Jobs::PAPER, &taking(NVM)).unwrap();
        assert!((outcome.energy_j(&Power::TIME) - 125.84).abs() < 1e-6);
        // 125.84 s at 100 W, and 100 W more while it computes, half of that while it checkpoints.
        let power = Power {
            idle_w: 100.0,
            busy_w: 200.0,
            checkpointing: Ratio::new(0.5).unwrap(),
        };
        let by_hand = 125.84 * 100.0 + 120.0 * 100.0 + 5.84 * 50.0;
        assert!((outcome.energy_j(&power) - by_hand).abs() < 1e-6);
    }

    #[test]
    fn who_arrives_after_the_end_disturbs_nobody() {
        let jobs = Jobs {
            arrival: Seconds::from_millis(60_000),
            ..Jobs::PAPER
        };
        for policy in Policy::ALL {
            let outcome = simulate(policy, &jobs, &taking(HDD)).unwrap();
            assert_eq!(outcome.high_response, jobs.work);
            assert_eq!(outcome.makespan.value(), 120.0);
        }
    }
}
