//! What this node is doing, for the HTTP API.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use permafrost_api_types::activity::{
    ActivityAnswer, EndedTransfer, ListedStep, PredictionError, RepairActivity, RunningCopy,
    RunningTransfer,
};
use permafrost_api_types::reserve::Direction;
use permafrost_metering::costs::{Costs, TransferOutcome};
use permafrost_metering::queues::Queues;
use permafrost_protocol::control::QueueStatus;
use permafrost_scheduling::estimator;
use permafrost_scheduling::size::Accuracy;

use super::source::Copying;

/// Most transfers of a direction, copies and steps that are told.
const MOST: usize = 100;

pub(super) fn of(
    own: &str,
    queues: &Queues,
    costs: &Costs,
    copying: Option<&Copying>,
) -> ActivityAnswer {
    let comparisons = costs.accuracy();
    let copies = copying.map(|copying| copying.puller.pulls().look());
    let copies = copies.unwrap_or_default().into_iter().take(MOST);
    ActivityAnswer {
        answered_by: own.to_owned(),
        transfers: queues.status().iter().flat_map(transfers).collect(),
        copies: copies
            .map(|copy| RunningCopy {
                checkpoint: name(&copy.job, copy.generation),
                from: copy.from,
                done_bytes: copy.told_bytes.min(copy.memory_bytes),
                moved_bytes: copy.moved_bytes,
                memory_bytes: copy.memory_bytes,
                age_s: copy.age.as_secs_f64(),
                background: copy.background,
            })
            .collect(),
        repair: copying.filter(|copying| (copying.leads)()).map(repair),
        ended: comparisons.recent.iter().rev().map(ended).collect(),
        dump_time_error: error(&comparisons.dump_time),
        restore_time_error: error(&comparisons.restore_time),
    }
}

fn transfers(queue: &QueueStatus) -> impl Iterator<Item = RunningTransfer> + '_ {
    let direction = match queue.direction.as_str() {
        "write" => Direction::Write,
        _ => Direction::Read,
    };
    let transfers = queue.transfers.iter().take(MOST);
    transfers.map(move |transfer| RunningTransfer {
        direction,
        age_s: Duration::from_millis(transfer.age_ms).as_secs_f64(),
        moved_bytes: transfer.moved_bytes,
        expected_bytes: transfer.expected_bytes,
        idle: transfer.idle,
    })
}

fn repair(copying: &Copying) -> RepairActivity {
    let number = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let progress = &copying.progress;
    let (steps, waiting) = copying.board.look(MOST);
    RepairActivity {
        under_replicated: number(&progress.under_replicated),
        stranded: number(&progress.stranded),
        damaged: number(&progress.damaged),
        copies_made: number(&progress.copies_made),
        copies_failed: number(&progress.copies_failed),
        copied_bytes: number(&progress.bytes_copied),
        waiting: waiting as u64,
        steps: steps
            .into_iter()
            .map(|step| ListedStep {
                checkpoint: name(&step.job, step.generation),
                node: step.node,
                is_copy: step.is_copy,
                is_running: step.is_running,
                memory_bytes: step.memory_bytes,
            })
            .collect(),
    }
}

fn ended(outcome: &TransferOutcome) -> EndedTransfer {
    EndedTransfer {
        direction: match outcome.direction {
            estimator::Direction::Write => Direction::Write,
            estimator::Direction::Read => Direction::Read,
        },
        checkpoint: name(&outcome.job, outcome.generation),
        bytes: outcome.bytes,
        predicted_s: outcome.predicted_s,
        measured_s: outcome.took.as_secs_f64(),
        age_s: outcome.ended.elapsed().as_secs_f64(),
    }
}

/// Returns the name of a checkpoint; `None` for a parked one.
fn name(job: &str, generation: u64) -> Option<String> {
    (generation > 0).then(|| format!("{job}@{generation}"))
}

fn error(accuracy: &Accuracy) -> Option<PredictionError> {
    let errors = accuracy.errors().ok()?;
    Some(PredictionError {
        p50: errors.p50,
        p95: errors.p95,
        bias: errors.bias,
        samples: errors.samples as u64,
    })
}
