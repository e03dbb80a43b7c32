//! Algorithm 1 of paper 000 (Li et al., Middleware '15, §4.1).

use serde::{Deserialize, Serialize};

use crate::TaskId;
use crate::quantity::{Bytes, BytesPerSecond, Seconds};

/// `TaskFigures t` of Algorithm 1: plain numbers, all of them known.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CandidateVictim {
    /// Id of the task.
    pub task: TaskId,
    /// Size of its checkpoint.
    pub size: Bytes,
    /// Bandwidth of its node for dumps.
    pub bw_write: BytesPerSecond,
    /// Bandwidth of its node for restores.
    pub bw_read: BytesPerSecond,
    /// Time until the dumps before it have ended.
    pub queue_time_dump: Seconds,
    /// Time that the task has run.
    pub progress: Seconds,
    /// True if the task was checkpointed before.
    pub previous_checkpoint: bool,
}

/// Decision of Algorithm 1 for a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// `do_incremental_checkpoint(t)` of the listing.
    IncrementalCheckpoint,
    /// `do_normal_checkpoint(t)` of the listing.
    NormalCheckpoint,
    /// `kill(t)` of the listing.
    Kill,
}

/// Returns overhead_chkpt = size/bw_write + size/bw_read + queue_time_dump.
#[must_use]
pub fn overhead_chkpt(
    size: Bytes,
    bw_write: BytesPerSecond,
    bw_read: BytesPerSecond,
    queue_time_dump: Seconds,
) -> Seconds {
    size.at(bw_write)
        .plus(size.at(bw_read))
        .plus(queue_time_dump)
}

/// Runs Algorithm 1, line by line:
///
/// ```text
/// overhead_chkpt = size/bw_write + size/bw_read + queue_time_dump
/// candidate_victims = get_candidate_victims();
/// sort(candidate_victims);
/// for Task t in candidate_victims do
///   if t.progress > t.checkpoint_overhead then
///     if t.previous_checkpoint != null then do_incremental_checkpoint(t);
///     else do_normal_checkpoint(t); end
///   else kill(t); end
/// end
/// ```
///
/// The order of `sort` is given in §5.2.2, cost-aware eviction: the lowest size ÷ checkpointing bandwidth first;
/// equal ones by their number. `size` is equal for both kinds of checkpoint, as in the paper: the decision ignores
/// that an incremental one is smaller.
#[must_use]
pub fn algorithm_1(mut candidate_victims: Vec<CandidateVictim>) -> Vec<(TaskId, Decision)> {
    candidate_victims.sort_by_key(|t| (t.size.at(t.bw_write), t.task));
    let decide = |t: CandidateVictim| {
        let overhead = overhead_chkpt(t.size, t.bw_write, t.bw_read, t.queue_time_dump);
        let decision = if t.progress > overhead {
            if t.previous_checkpoint {
                Decision::IncrementalCheckpoint
            } else {
                Decision::NormalCheckpoint
            }
        } else {
            Decision::Kill
        };
        (t.task, decision)
    };
    candidate_victims.into_iter().map(decide).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    /// Makes the victim of the paper's experiment (§3.3.3 and Figure 6): a k-means job of 5 GB, preempted after 30 s.
    /// The bandwidths are those of Table 3's first dump: 5 GB in `dump_seconds`; reading is as fast.
    fn k_means(task: u64, dump_seconds: f64) -> CandidateVictim {
        let rate = BytesPerSecond::new(5.0 * GB as f64 / dump_seconds).unwrap();
        CandidateVictim {
            task: TaskId(task),
            size: Bytes::new(5 * GB),
            bw_write: rate,
            bw_read: rate,
            queue_time_dump: Seconds::ZERO,
            progress: Seconds::from_millis(30_000),
            previous_checkpoint: false,
        }
    }

    const HDD: f64 = 169.18;
    const SSD: f64 = 43.73;
    const NVM: f64 = 2.92;

    #[test]
    fn the_papers_job_is_killed_on_hdd_and_ssd_and_checkpointed_on_nvm() {
        // Overheads of 338.36, 87.46 and 5.84 s against 30 s of progress.
        let decisions = algorithm_1(vec![k_means(1, HDD), k_means(2, SSD), k_means(3, NVM)]);
        assert_eq!(
            decisions,
            [
                (TaskId(3), Decision::NormalCheckpoint),
                (TaskId(2), Decision::Kill),
                (TaskId(1), Decision::Kill),
            ]
        );
    }

    #[test]
    fn the_overhead_is_the_papers_sum() {
        let t = k_means(1, NVM);
        let queue = Seconds::from_millis(1500);
        let overhead = overhead_chkpt(t.size, t.bw_write, t.bw_read, queue);
        assert!((overhead.value() - 7.34).abs() < 1e-9);
    }

    #[test]
    fn a_task_with_a_checkpoint_is_checkpointed_incrementally() {
        let t = CandidateVictim {
            previous_checkpoint: true,
            ..k_means(1, NVM)
        };
        assert_eq!(
            algorithm_1(vec![t]),
            [(TaskId(1), Decision::IncrementalCheckpoint)]
        );
    }

    #[test]
    fn a_queue_makes_a_checkpoint_dearer_than_a_kill() {
        let queued = |seconds: f64| CandidateVictim {
            queue_time_dump: Seconds::new(seconds).unwrap(),
            ..k_means(1, NVM)
        };
        let decision = |t| algorithm_1(vec![t])[0].1;
        assert_eq!(decision(queued(24.0)), Decision::NormalCheckpoint);
        assert_eq!(decision(queued(25.0)), Decision::Kill);
    }

    #[test]
    fn progress_that_only_equals_the_overhead_is_killed() {
        let t = CandidateVictim {
            size: Bytes::new(10),
            bw_write: BytesPerSecond::new(1.0).unwrap(),
            bw_read: BytesPerSecond::new(1.0).unwrap(),
            progress: Seconds::from_millis(20_000),
            ..k_means(1, NVM)
        };
        assert_eq!(algorithm_1(vec![t])[0].1, Decision::Kill);
        let a_little_more = CandidateVictim {
            progress: Seconds::from_millis(20_001),
            ..t
        };
        assert_eq!(
            algorithm_1(vec![a_little_more])[0].1,
            Decision::NormalCheckpoint
        );
    }
}
