//! Algorithm 2 of paper 000 (Li et al., Middleware '15, §4.1).

use serde::{Deserialize, Serialize};

pub use permafrost_api_types::resume::Preference;

use crate::TaskId;
use crate::quantity::{Bytes, BytesPerSecond, Seconds};

/// `t.previous_checkpoint`, with the figures for resuming from it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PreviousCheckpoint {
    /// Size of the checkpoint.
    pub size: Bytes,
    /// Bandwidth for reading it.
    pub bw_read: BytesPerSecond,
    /// Bandwidth for reading it on the other node; the paper takes that of the local one.
    pub bw_read_remote: BytesPerSecond,
    /// Bandwidth to another node.
    pub bw_net: BytesPerSecond,
    /// Time until the local node is ready for it.
    pub queue_time_local: Seconds,
    /// Time until another node is ready for it.
    pub queue_time_remote: Seconds,
}

/// `TaskFigures t` of Algorithm 2.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PreemptedTask {
    /// Id of the task.
    pub task: TaskId,
    /// Last checkpoint of the task.
    pub previous_checkpoint: Option<PreviousCheckpoint>,
}

/// Decision of Algorithm 2 for a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResumeDecision {
    /// `restart_task(t)` of the listing.
    Restart,
    /// `do_local_resume(t)` of the listing.
    Local,
    /// `do_remote_resume(t)` of the listing.
    Remote,
}

/// Returns overhead_local = size/bw_read + queue_time_local.
#[must_use]
pub fn overhead_local(checkpoint: &PreviousCheckpoint) -> Seconds {
    let read = checkpoint.size.at(checkpoint.bw_read);
    read.plus(checkpoint.queue_time_local)
}

/// Returns overhead_remote = size/bw_net + size/bw_read + queue_time_remote.
#[must_use]
pub fn overhead_remote(checkpoint: &PreviousCheckpoint) -> Seconds {
    let sent = checkpoint.size.at(checkpoint.bw_net);
    let read = checkpoint.size.at(checkpoint.bw_read_remote);
    sent.plus(read).plus(checkpoint.queue_time_remote)
}

/// Runs Algorithm 2, line by line:
///
/// ```text
/// overhead_local = size/bw_read + queue_time_local
/// overhead_remote = size/bw_net + size/bw_read + queue_time_remote
/// preempted_tasks = get_preempted_tasks();
/// for Task t in preempted_tasks do
///   if t.previous_checkpoint == null then restart_task(t);
///   else
///     if t.local_resume_overhead <= t.remote_resume_overhead then do_local_resume(t);
///     else do_remote_resume(t); end
///   end
/// end
/// ```
#[must_use]
pub fn algorithm_2(preempted_tasks: &[PreemptedTask]) -> Vec<(TaskId, ResumeDecision)> {
    let decide = |t: &PreemptedTask| {
        let resumption = match &t.previous_checkpoint {
            None => ResumeDecision::Restart,
            Some(checkpoint) if overhead_local(checkpoint) <= overhead_remote(checkpoint) => {
                ResumeDecision::Local
            }
            Some(_) => ResumeDecision::Remote,
        };
        (t.task, resumption)
    };
    preempted_tasks.iter().map(decide).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a checkpoint of 5 GB as in the paper, on its NVM (Table 3), over its 10 Gbit/s: 2.92 s to read, 4 s to
    /// send.
    fn checkpoint(queue_time_local: f64, queue_time_remote: f64) -> PreviousCheckpoint {
        PreviousCheckpoint {
            size: Bytes::new(5_000_000_000),
            bw_read: BytesPerSecond::new(5e9 / 2.92).unwrap(),
            bw_read_remote: BytesPerSecond::new(5e9 / 2.92).unwrap(),
            bw_net: BytesPerSecond::new(1.25e9).unwrap(),
            queue_time_local: Seconds::new(queue_time_local).unwrap(),
            queue_time_remote: Seconds::new(queue_time_remote).unwrap(),
        }
    }

    fn resumption(previous_checkpoint: Option<PreviousCheckpoint>) -> ResumeDecision {
        let task = PreemptedTask {
            task: TaskId(1),
            previous_checkpoint,
        };
        algorithm_2(&[task])[0].1
    }

    #[test]
    fn a_task_without_a_checkpoint_begins_anew() {
        assert_eq!(resumption(None), ResumeDecision::Restart);
    }

    #[test]
    fn overheads_are_the_papers_sums() {
        let checkpoint = checkpoint(1.0, 2.0);
        assert!((overhead_local(&checkpoint).value() - 3.92).abs() < 1e-9);
        assert!((overhead_remote(&checkpoint).value() - 8.92).abs() < 1e-9);
    }

    #[test]
    fn a_queue_longer_than_the_transfer_sends_it_elsewhere() {
        assert_eq!(
            resumption(Some(checkpoint(0.0, 0.0))),
            ResumeDecision::Local
        );
        assert_eq!(
            resumption(Some(checkpoint(3.9, 0.0))),
            ResumeDecision::Local
        );
        assert_eq!(
            resumption(Some(checkpoint(4.1, 0.0))),
            ResumeDecision::Remote
        );
        assert_eq!(
            resumption(Some(checkpoint(4.1, 1.0))),
            ResumeDecision::Local
        );
    }

    #[test]
    fn equal_overheads_stay_local() {
        let even = PreviousCheckpoint {
            size: Bytes::new(4),
            bw_read: BytesPerSecond::new(1.0).unwrap(),
            bw_read_remote: BytesPerSecond::new(1.0).unwrap(),
            bw_net: BytesPerSecond::new(1.0).unwrap(),
            queue_time_local: Seconds::from_millis(4000),
            queue_time_remote: Seconds::ZERO,
        };
        assert_eq!(overhead_local(&even), overhead_remote(&even));
        assert_eq!(resumption(Some(even)), ResumeDecision::Local);
    }
}
