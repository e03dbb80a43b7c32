//! Preempting without a dump: killing, going back to an older checkpoint, waiting.

use super::node::{NodeFigures, moved};
use super::{NoCost, Part, Tally, TaskCost, TaskFigures};

/// Returns the cost of killing: all the work is lost, and the task starts up again.
///
/// # Errors
///
/// [`NoCost`] if the task's progress is not known.
pub fn kill(task: &TaskFigures) -> Result<TaskCost, NoCost> {
    kill_as(task)
}

pub(crate) fn kill_as<T: Tally>(task: &TaskFigures) -> Result<T, NoCost> {
    Ok(T::nothing()
        .with(Part::LostWork, task.progress.known()?)
        .with_fixed(Part::Start, task.start.known()))
}

/// Returns the cost of killing a task that has a checkpoint: the work since then is lost, and the task is restored
/// from there on `node`.
///
/// # Errors
///
/// [`NoCost`] without a checkpoint, or if the work since it, its size or the bandwidth is not known.
pub fn rollback(task: &TaskFigures, node: &NodeFigures) -> Result<TaskCost, NoCost> {
    rollback_as(task, node)
}

pub(crate) fn rollback_as<T: Tally>(task: &TaskFigures, node: &NodeFigures) -> Result<T, NoCost> {
    if !task.has_checkpoint {
        return Err(NoCost::NoCheckpoint);
    }
    Ok(T::nothing()
        .with(Part::LostWork, task.since_checkpoint.known()?)
        .with_fixed(Part::RestoreStart, node.restore_start.known())
        .with(Part::Read, moved(&task.full.known()?, &node.read)?))
}

/// Returns the cost of waiting for the end: nothing for the task, and the whole rest as delay for the preempting
/// party.
///
/// # Errors
///
/// [`NoCost`] if the remaining time is not known.
pub fn wait(task: &TaskFigures) -> Result<TaskCost, NoCost> {
    wait_as(task)
}

pub(crate) fn wait_as<T: Tally>(task: &TaskFigures) -> Result<T, NoCost> {
    Ok(T::nothing().with(Part::Wait, task.remaining.known()?))
}
