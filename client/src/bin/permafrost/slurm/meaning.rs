//! Meaning of a signal. Slurm uses the same signals to report that a job is preempted, requeued, cancelled or
//! over its limit, so the job's state decides.
//!
//! Seen with Slurm 22.05 (and read in its `preempt.c`, `job_mgr.c`): at the beginning of a grace time the
//! signal of `--signal=B:…` comes to the batch script's process alone, and the job is RUNNING, or SIGNALING, with a
//! `PreemptTime`. The end of a job (`scancel`, `scontrol requeue`, the end of a grace time, a time limit) sends
//! SIGCONT and SIGTERM to every process of it, including the task's, and the job is COMPLETING by then; a
//! requeue has already increased its restarts.

use std::time::Duration;

use signal_hook::consts::{SIGTERM, SIGUSR1};

use super::job::State;

/// Action that a signal requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// Leave the node and be resumed later.
    Leave {
        /// True if another job waits for the node; that job may be better off if the task is ended.
        preempted: bool,
        /// Time until Slurm ends the job; `None` if unknown.
        within: Option<Duration>,
    },
    /// Pass the signal on to the task.
    HandOn,
    /// Slurm ends the job, and has signalled the task. No checkpoint is taken then: a task that is shutting
    /// down would go on shutting down when it is resumed.
    Over,
}

/// Returns true if the meaning of a signal depends on the job's state.
pub(super) fn depends(signal: i32) -> bool {
    matches!(signal, SIGUSR1 | SIGTERM)
}

/// Returns the meaning of `signal` for a job in `state`, which is `None` if slurmctld does not answer.
pub(super) fn meaning(signal: i32, state: Option<&State>) -> Meaning {
    let Some(state) = state else {
        // No other sender uses SIGUSR1, so the job is to be saved. A SIGTERM may have reached the task
        // already.
        return match signal {
            SIGUSR1 => Meaning::Leave {
                preempted: false,
                within: None,
            },
            _ => Meaning::HandOn,
        };
    };
    match signal {
        SIGUSR1 | SIGTERM if !state.is_running => Meaning::Over,
        SIGUSR1 => Meaning::Leave {
            preempted: state.preempted,
            within: state.left(),
        },
        // --signal=B:TERM: without it the batch script gets none at the beginning of a grace time.
        SIGTERM if state.preempted => Meaning::Leave {
            preempted: true,
            within: state.left(),
        },
        _ => Meaning::HandOn,
    }
}

#[cfg(test)]
mod tests {
    use signal_hook::consts::SIGUSR2;

    use super::*;

    fn state(is_running: bool, preempted: bool) -> State {
        State {
            is_running,
            restarts: 0,
            preempted,
            ends_unix_s: None,
            deadline_unix_s: None,
            timed_out: false,
        }
    }

    fn leave(preempted: bool) -> Meaning {
        Meaning::Leave {
            preempted,
            within: None,
        }
    }

    #[test]
    fn preemption_is_told_from_cancelling() {
        let running = state(true, false);
        let preempted = state(true, true);
        let cancelled = state(false, false);
        let at_the_end_of_its_grace_time = state(false, true);
        for (signal, state, expected) in [
            (SIGUSR1, Some(&running), leave(false)),
            (SIGUSR1, Some(&preempted), leave(true)),
            (SIGUSR1, Some(&cancelled), Meaning::Over),
            (SIGUSR1, None, leave(false)),
            (SIGTERM, Some(&running), Meaning::HandOn),
            (SIGTERM, Some(&preempted), leave(true)),
            (SIGTERM, Some(&cancelled), Meaning::Over),
            (SIGTERM, Some(&at_the_end_of_its_grace_time), Meaning::Over),
            (SIGTERM, None, Meaning::HandOn),
            (SIGUSR2, Some(&running), Meaning::HandOn),
        ] {
            assert_eq!(meaning(signal, state), expected, "{signal} in {state:?}");
        }
        assert!(depends(SIGTERM) && depends(SIGUSR1) && !depends(SIGUSR2));
    }
}
