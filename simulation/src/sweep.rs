//! Runs many simulations at once, on all processors of this machine.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use permafrost_scheduling::policy::{Name, PolicySettings};

use crate::engine::{EngineConfig, Run, SimulationError, run};
use crate::workload::Workload;

/// A simulation to run.
#[derive(Clone, Debug)]
pub struct Case<'a> {
    /// Workload that is replayed.
    pub workload: &'a Workload,
    /// Policy that decides.
    pub policy: Name,
    /// Configuration of the run.
    pub config: EngineConfig,
    /// Parameters of the policy.
    pub settings: PolicySettings,
}

/// Progress of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SweepProgress {
    /// Simulations that are done.
    pub done: usize,
    /// Number of all simulations.
    pub cases: usize,
    /// Tasks that have ended in all of them.
    pub ended: u64,
    /// Tasks of all of them.
    pub tasks: u64,
}

/// Time between two reports of progress.
const REPORT_EVERY: Duration = Duration::from_millis(200);

/// Runs all cases, and returns their results in the same order, whatever the number of processors. `watch` is called
/// several times a second.
pub fn sweep(
    cases: &[Case<'_>],
    watch: impl FnMut(SweepProgress),
) -> Vec<Result<Run, SimulationError>> {
    let tasks = |case: &Case<'_>| case.workload.tasks().count() as u64;
    let run_one = |case: &Case<'_>, ended: &AtomicU64| {
        let mut policy = case.policy.build(&case.settings);
        run(case.workload, &mut *policy, &case.config, Some(ended))
    };
    each(cases, tasks, run_one, watch)
}

/// Runs something for each case on all processors, and returns the results in the same order. `tasks` is the number of
/// tasks of a case, and `run` counts those that have ended.
pub(crate) fn each<C: Sync, R: Send>(
    cases: &[C],
    tasks: impl Fn(&C) -> u64,
    run: impl Fn(&C, &AtomicU64) -> R + Sync,
    mut watch: impl FnMut(SweepProgress),
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let ended: Vec<AtomicU64> = cases.iter().map(|_| AtomicU64::new(0)).collect();
    let tasks = cases.iter().map(tasks).sum();
    let workers = thread::available_parallelism().map_or(1, usize::from);
    let mut results: Vec<Option<R>> = cases.iter().map(|_| None).collect();
    thread::scope(|scope| {
        let (sender, receiver) = channel();
        for _ in 0..workers.min(cases.len()) {
            let sender = sender.clone();
            let (next, ended, run) = (&next, &ended, &run);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let (Some(case), Some(ended)) = (cases.get(index), ended.get(index)) else {
                        break;
                    };
                    if sender.send((index, run(case, ended))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let mut done = 0;
        loop {
            match receiver.recv_timeout(REPORT_EVERY) {
                Ok((index, result)) => {
                    done += 1;
                    if let Some(place) = results.get_mut(index) {
                        *place = Some(result);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            watch(SweepProgress {
                done,
                cases: cases.len(),
                ended: ended
                    .iter()
                    .map(|ended| ended.load(Ordering::Relaxed))
                    .sum(),
                tasks,
            });
        }
    });
    results.into_iter().flatten().collect()
}
