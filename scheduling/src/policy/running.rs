//! Running tasks by job.

use std::collections::{BTreeMap, BTreeSet};

use super::{ClusterEvent, SchedulerView, TaskState};
use crate::TaskId;
use crate::size::JobId;

/// Account of the tasks that run.
#[derive(Clone, Debug, Default)]
pub(super) struct Running {
    of: BTreeMap<JobId, BTreeSet<TaskId>>,
    knows: bool,
}

impl Running {
    /// Takes in what has happened; returns the task that runs no longer, if one does.
    pub(super) fn observe(&mut self, event: ClusterEvent, view: &SchedulerView) -> Option<TaskId> {
        if !self.knows || matches!(event, ClusterEvent::NodeLost(_)) {
            self.knows = true;
            self.of.clear();
            for id in (0..view.tasks()).map(TaskId) {
                self.count(id, view);
            }
            return None;
        }
        match event {
            ClusterEvent::Running(id) | ClusterEvent::Ended(id, _) | ClusterEvent::Left(id, _) => {
                self.count(id, view)
            }
            _ => None,
        }
    }

    fn count(&mut self, id: TaskId, view: &SchedulerView) -> Option<TaskId> {
        let task = view.task(id)?;
        if task.state == TaskState::Running {
            self.of.entry(task.job).or_default().insert(id);
            return None;
        }
        if let Some(tasks) = self.of.get_mut(&task.job) {
            tasks.remove(&id);
            if tasks.is_empty() {
                self.of.remove(&task.job);
            }
        }
        Some(id)
    }

    /// Returns the jobs with their running tasks, in the order of their numbers.
    pub(super) fn jobs(&self) -> impl Iterator<Item = (JobId, &BTreeSet<TaskId>)> {
        self.of.iter().map(|(job, tasks)| (*job, tasks))
    }

    /// Returns all running tasks.
    pub(super) fn tasks(&self) -> impl Iterator<Item = TaskId> {
        self.of.values().flatten().copied()
    }
}
