//! Estimates of the time that running tasks have left (002, §3.2).

use std::collections::HashMap;

use crate::TaskId;
use crate::policy::SchedulerView;
use crate::policy::running::Running;
use crate::quantity::{Moment, Seconds};

/// Weight of the newest second in the smoothed rate of progress. Hadoop smooths over 20 samples or more.
const NEWEST: f64 = 0.1;

#[derive(Clone, Copy, Debug)]
struct Estimate {
    at: Moment,
    progress: Seconds,
    /// Work in a second, smoothed.
    rate: f64,
    left: Seconds,
}

/// Estimates by task, renewed each second for all tasks together, and not when one is needed.
#[derive(Clone, Debug, Default)]
pub(super) struct Estimates {
    of: HashMap<TaskId, Estimate>,
}

impl Estimates {
    pub(super) fn renew(&mut self, now: Moment, running: &Running, view: &SchedulerView) {
        for id in running.tasks() {
            let Some(task) = view.task(id) else { continue };
            let progress = task.progress(now);
            let rate = match self.of.get(&id) {
                None => 1.0,
                Some(last) => {
                    let time = now.since(last.at).value();
                    if time > 0.0 {
                        let newest = progress.less(last.progress).value() / time;
                        last.rate * (1.0 - NEWEST) + newest * NEWEST
                    } else {
                        last.rate
                    }
                }
            };
            let left = match task.work {
                Some(work) => Seconds::clamped(work.less(progress).value() / rate.max(1e-3)),
                None => Seconds::MAX,
            };
            let estimate = Estimate {
                at: now,
                progress,
                rate,
                left,
            };
            self.of.insert(id, estimate);
        }
    }

    pub(super) fn forget(&mut self, task: TaskId) {
        self.of.remove(&task);
    }

    /// Returns the time that a task has left; the longest of all if nothing is known of it.
    pub(super) fn left(&self, task: TaskId) -> Seconds {
        self.of
            .get(&task)
            .map_or(Seconds::MAX, |estimate| estimate.left)
    }
}
