//! Decides whether a preempted task is worth a dump. `permafrostd`, which knows its media and queues, is asked
//! first; if it cannot tell, this run's own measurements decide.

use std::fmt;
use std::time::Duration;

use permafrost_scheduling::TaskId;
use permafrost_scheduling::policy::{Name, VictimFate};
use permafrost_scheduling::preempt::{CandidateVictim, Decision, algorithm_1};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Seconds};
use permafrost_terminal::context::Context;

use super::asked;

/// State of the task when it is preempted.
#[derive(Clone, Debug)]
pub(super) struct Situation {
    /// Root of the task.
    pub(super) pid: u32,
    /// Job of its checkpoints.
    pub(super) job: String,
    /// Memory of the task, bytes.
    pub(super) resident_bytes: u64,
    /// Duration of this run.
    pub(super) progress: Duration,
    /// Work that a kill loses: the time since the last checkpoint, or since the task was started.
    pub(super) since_checkpoint: Duration,
    /// True if there is a checkpoint to build on.
    pub(super) has_checkpoint: bool,
    /// Time until Slurm ends the job.
    pub(super) within: Option<Duration>,
    /// Shortest work that is worth a dump, as set by the user.
    pub(super) min_progress: Duration,
    /// Transfers that this run has measured.
    pub(super) measured: Measured,
    /// Policy that decides; none for the default.
    pub(super) policy: Option<Name>,
    /// Work that the task has left, if that is known.
    pub(super) remaining: Option<Duration>,
    /// Time to the deadline of the job.
    pub(super) deadline: Option<Duration>,
}

/// Bytes and time of the last transfers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Measured {
    pub(super) dump: Option<(u64, Duration)>,
    pub(super) restore: Option<(u64, Duration)>,
}

/// Advice on a preempted task, with the reason as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Advice {
    /// Take a checkpoint.
    Checkpoint(String),
    /// End the task; it starts again from its last checkpoint, or from the beginning.
    End(String),
    /// Let the task run on until Slurm ends it.
    RunOn(String),
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Checkpoint(why) => write!(f, "a checkpoint: {why}"),
            Self::End(why) => write!(f, "no checkpoint: {why}"),
            Self::RunOn(why) => write!(f, "it runs on until its grace time is over: {why}"),
        }
    }
}

/// Returns the best action for the task within the grace time. If the costs are unknown, that is the
/// checkpoint: an unneeded checkpoint costs less than the lost work.
pub(super) fn advise(context: &Context, situation: &Situation) -> Advice {
    if let Some(policy) = situation.policy.filter(untouched) {
        return Advice::RunOn(format!("the policy {policy} preempts no task"));
    }
    if let Some(end) = not_worth_it(situation) {
        return end;
    }
    match asked::ask(context, situation) {
        Ok(advice) => advice,
        Err(failure) => match without_daemon(situation) {
            Advice::Checkpoint(why) => {
                Advice::Checkpoint(format!("{why}; permafrostd: {}", failure.message))
            }
            end => end,
        },
    }
}

fn untouched(policy: &Name) -> bool {
    policy.victims() == VictimFate::Untouched
}

/// Returns what the policy does where `permafrostd` cannot say it: `li2015` and the default go by the measurements of
/// this run, `kill` kills, and the others always checkpoint.
fn without_daemon(situation: &Situation) -> Advice {
    let Some(policy) = situation.policy else {
        return measured(situation);
    };
    match policy.as_str().split('+').next() {
        Some("kill") => Advice::End(format!("the policy {policy} kills")),
        Some("li2015" | "adaptive") => measured(situation),
        _ => too_long(situation)
            .unwrap_or_else(|| Advice::Checkpoint(format!("the policy {policy} checkpoints"))),
    }
}

/// Advises to end a task whose dump would not end within the grace time, by the measurements of this run.
fn too_long(situation: &Situation) -> Option<Advice> {
    let (write, within) = (rate(situation.measured.dump)?, situation.within?);
    let takes = Bytes::new(situation.resident_bytes).at(write);
    (takes.value() > within.as_secs_f64()).then(|| {
        Advice::End(format!(
            "it would take {takes}, and {} are left",
            seconds(within)
        ))
    })
}

/// Advises to end the task if its work is below the user's minimum.
fn not_worth_it(situation: &Situation) -> Option<Advice> {
    let lost = situation.since_checkpoint;
    (lost < situation.min_progress).then(|| {
        Advice::End(format!(
            "it has worked {} since it was last safe, less than --min-progress",
            seconds(lost)
        ))
    })
}

/// Applies Algorithm 1 (paper 000, §4.1) to the measurements of this run.
fn measured(situation: &Situation) -> Advice {
    let lost = situation.since_checkpoint;
    let Some(write) = rate(situation.measured.dump) else {
        return Advice::Checkpoint("no dump was measured yet".to_owned());
    };
    let size = Bytes::new(situation.resident_bytes);
    let takes = size.at(write);
    if let Some(ends) = too_long(situation) {
        return ends;
    }
    let (Some(read), Ok(progress)) = (
        rate(situation.measured.restore),
        Seconds::new(lost.as_secs_f64()),
    ) else {
        return Advice::Checkpoint(format!("it takes {takes}"));
    };
    let candidate = CandidateVictim {
        task: TaskId(0),
        size,
        bw_write: write,
        bw_read: read,
        queue_time_dump: Seconds::ZERO,
        progress,
        previous_checkpoint: situation.has_checkpoint,
    };
    let overhead = takes.plus(size.at(read));
    match algorithm_1(vec![candidate]).first() {
        Some((_, Decision::Kill)) => Advice::End(format!(
            "dump and restore take {overhead}, the work since it was last safe took {progress}"
        )),
        _ => Advice::Checkpoint(format!(
            "dump and restore take {overhead}, the work since it was last safe took {progress}"
        )),
    }
}

/// Returns bytes over time; `None` if nothing was measured.
fn rate(measured: Option<(u64, Duration)>) -> Option<BytesPerSecond> {
    let (bytes, elapsed) = measured?;
    let elapsed = Seconds::new(elapsed.as_secs_f64()).ok()?;
    BytesPerSecond::measured(Bytes::new(bytes), elapsed).ok()
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// Returns a task of 4 GiB that has worked for `worked_s`, where a dump and a restore of 1 GiB took 2 s
    /// each.
    fn situation(worked_s: u64) -> Situation {
        let measured = Some((GIB, Duration::from_secs(2)));
        Situation {
            pid: 1000,
            job: "slurm/north/17".to_owned(),
            resident_bytes: 4 * GIB,
            progress: Duration::from_secs(worked_s),
            since_checkpoint: Duration::from_secs(worked_s),
            has_checkpoint: false,
            within: Some(Duration::from_secs(60)),
            min_progress: Duration::ZERO,
            measured: Measured {
                dump: measured,
                restore: measured,
            },
            policy: None,
            remaining: None,
            deadline: None,
        }
    }

    #[test]
    fn without_a_daemon_a_policy_does_what_it_is_named_for() {
        let of = |policy: &str, worked_s| {
            without_daemon(&Situation {
                policy: Some(policy.parse().unwrap()),
                ..situation(worked_s)
            })
        };
        assert!(matches!(of("kill", 3600), Advice::End(_)));
        assert!(matches!(of("basic", 1), Advice::Checkpoint(_)));
        assert!(matches!(of("mr+srt", 1), Advice::Checkpoint(_)));
        assert!(matches!(of("li2015", 1), Advice::End(_)));
        assert!(matches!(of("li2015", 17), Advice::Checkpoint(_)));
        assert!(untouched(&"wait".parse().unwrap()) && !untouched(&"kill".parse().unwrap()));
    }

    fn is_checkpoint(situation: &Situation) -> bool {
        matches!(measured(situation), Advice::Checkpoint(_))
    }

    #[test]
    fn a_dump_must_be_cheaper_than_the_work() {
        // 8 s to dump, 8 s to restore.
        assert!(is_checkpoint(&situation(17)));
        assert!(!is_checkpoint(&situation(15)));
    }

    #[test]
    fn a_dump_must_fit_the_grace_time() {
        let within = |seconds| Situation {
            within: Some(Duration::from_secs(seconds)),
            ..situation(3600)
        };
        assert!(is_checkpoint(&within(9)));
        assert_eq!(
            measured(&within(7)),
            Advice::End("it would take 8.0 s, and 7.0 s are left".to_owned())
        );
        let unlimited = Situation {
            within: None,
            ..situation(3600)
        };
        assert!(is_checkpoint(&unlimited));
    }

    #[test]
    fn what_is_not_known_speaks_for_the_checkpoint() {
        let unknown = Situation {
            measured: Measured::default(),
            ..situation(1)
        };
        assert!(is_checkpoint(&unknown));
    }

    #[test]
    fn the_user_may_set_a_floor() {
        let floor = |min_progress| Situation {
            min_progress: Duration::from_secs(min_progress),
            ..situation(60)
        };
        assert_eq!(not_worth_it(&floor(0)), None);
        assert_eq!(not_worth_it(&floor(60)), None);
        assert!(matches!(not_worth_it(&floor(61)), Some(Advice::End(_))));
    }
}
