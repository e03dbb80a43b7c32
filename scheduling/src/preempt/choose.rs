//! Choice of the cheapest mechanism for one victim: Algorithm 1 with all available mechanisms, and with the bytes
//! that the dump really writes.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::TaskId;
use crate::cost::{
    self, Copies, Dump, DumpWait, Dumps, NoCost, NodeFigures, PreemptionMechanism, Replica, Sums,
    SwapFigures, Tally, TaskCost, TaskFigures, TaskResources,
};
use crate::quantity::{Bytes, Ratio, Seconds};

pub use permafrost_api_types::cost::By;

/// Place where a victim runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Site<'a> {
    /// The tier that would take its dump.
    pub node: &'a NodeFigures,
    /// The node that would take a copy.
    pub replica: Option<Replica<'a>>,
    /// Swap of the machine; none where nothing is to be suspended in memory.
    pub swap: Option<SwapFigures>,
}

/// Terms by which mechanisms are compared.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Terms {
    /// Place where a dump has to be stored before the task may be stopped.
    pub copies: Copies,
    /// Quantile that decides. Default: median.
    pub by: By,
    /// Weight of a second of delay for the preempting party, in seconds of the victim's. 0, the default, is the
    /// paper's: only the victim's overhead is compared.
    pub delay_weight: Ratio,
    /// Longest delay that is allowed at the 95th percentile: a grace time. Default: any.
    pub longest_delay: Option<Seconds>,
    /// True if waiting for the end of a task is an answer. Waiting costs the victim nothing, so that it always wins
    /// unless a delay counts or is limited. Default: false.
    pub may_wait: bool,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            copies: Copies::Local,
            by: By::P50,
            delay_weight: Ratio::ZERO,
            longest_delay: None,
            may_wait: false,
        }
    }
}

impl Terms {
    /// Returns the overhead plus the weighted delay.
    #[must_use]
    pub fn score(&self, cost: &TaskCost) -> Seconds {
        self.score_of(cost.sums())
    }

    fn score_of(&self, sums: &Sums) -> Seconds {
        let overhead = sums.overhead.quantile(self.by);
        let delay = sums.delay.quantile(self.by);
        overhead.plus(delay.times(self.delay_weight))
    }

    fn allows(&self, task: &TaskFigures, mechanism: PreemptionMechanism, sums: &Sums) -> bool {
        let limits = [self.longest_delay, task.grace];
        let in_time = |longest: &Seconds| sums.delay.p95 <= *longest;
        limits.iter().flatten().all(in_time)
            && (self.may_wait || mechanism != PreemptionMechanism::Wait)
    }
}

/// Mechanism chosen for a task, with its cost and its alternative.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// Mechanism that is chosen.
    pub mechanism: PreemptionMechanism,
    /// Cost of the mechanism.
    pub cost: TaskCost,
    /// Score of the mechanism by the terms.
    pub score: Seconds,
    /// The second best, and its score.
    pub next: Option<(PreemptionMechanism, Seconds)>,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.mechanism, self.cost)?;
        if let Some((mechanism, score)) = self.next {
            write!(
                f,
                "; to {mechanism} would come to {score} and not {}",
                self.score
            )?;
        }
        Ok(())
    }
}

/// Error of a choice: no mechanism can be recommended.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Error)]
#[error("task {} cannot be decided on: kill: {kill}; dump: {dump}", task.0)]
pub struct UndecidedTask {
    /// Id of the task.
    pub task: TaskId,
    /// Reason why the task is not killed.
    pub kill: Rejection,
    /// Reason why no full dump is taken.
    pub dump: Rejection,
}

/// Reason why a mechanism was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Error)]
#[serde(rename_all = "snake_case")]
pub enum Rejection {
    /// The mechanism has no cost.
    #[error(transparent)]
    NoCost(NoCost),
    /// The mechanism has a cost that the terms do not allow.
    #[error("it takes too long")]
    TooLong,
}

/// Returns all mechanisms with their costs, or the reasons why they have none. Of two equal costs the earlier one is
/// taken: as in Algorithm 1, a checkpoint must be *cheaper* than a kill.
#[must_use]
pub fn options(
    task: &TaskFigures,
    site: &Site<'_>,
    copies: Copies,
) -> Vec<(PreemptionMechanism, Result<TaskCost, NoCost>)> {
    let all = mechanisms(copies).into_iter();
    all.map(|mechanism| (mechanism, cost_of(task, site, Bytes::ZERO, mechanism)))
        .collect()
}

/// Returns the cost of one mechanism, behind `ahead` bytes of dumps that are decided on already.
///
/// # Errors
///
/// [`NoCost`] says why it has none.
pub fn cost_of(
    task: &TaskFigures,
    site: &Site<'_>,
    ahead: Bytes,
    mechanism: PreemptionMechanism,
) -> Result<TaskCost, NoCost> {
    let demand = Demand {
        wait: site.wait(ahead),
        memory: task.holds.memory,
    };
    let copies = match mechanism {
        PreemptionMechanism::Checkpoint { copies, .. } => copies,
        _ => Copies::Local,
    };
    Ways::new(task, site, &demand, copies).cost(mechanism)
}

/// Returns the mechanisms in the order in which they are preferred where they cost the same.
const fn mechanisms(copies: Copies) -> [PreemptionMechanism; 7] {
    const fn dump(dump: Dump, copies: Copies) -> PreemptionMechanism {
        PreemptionMechanism::Checkpoint { dump, copies }
    }
    [
        PreemptionMechanism::Wait,
        PreemptionMechanism::Kill,
        PreemptionMechanism::Rollback,
        PreemptionMechanism::SuspendInMemory,
        dump(Dump::Incremental, copies),
        dump(Dump::Full, copies),
        dump(Dump::PreCopied, copies),
    ]
}

/// Demands of other decisions and of the preempting party on a victim.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    /// Wait of its dump: also for dumps that the figures of the queues do not hold.
    pub(super) wait: DumpWait,
    /// Memory that is wanted of it.
    pub(super) memory: Bytes,
}

impl Demand {
    /// Demands `memory` of a task before which nothing is decided on.
    fn first(site: &Site<'_>, memory: Bytes) -> Self {
        let wait = site.wait(Bytes::ZERO);
        Self { wait, memory }
    }
}

impl Site<'_> {
    /// Returns the wait of a dump behind `ahead` bytes that the figures of the queues do not hold.
    pub(super) fn wait(&self, ahead: Bytes) -> DumpWait {
        DumpWait::behind(ahead, self.node, self.replica.as_ref())
    }
}

/// Returns what becomes free of a task that is preempted for `wanted`: a suspended one keeps the memory that nobody
/// wants of it (000, §4.1), the others keep nothing.
#[must_use]
pub fn freed(
    holds: TaskResources,
    wanted: TaskResources,
    mechanism: PreemptionMechanism,
) -> TaskResources {
    match mechanism {
        PreemptionMechanism::SuspendInMemory => TaskResources {
            memory: holds.memory.min(wanted.memory),
            ..holds
        },
        PreemptionMechanism::Wait
        | PreemptionMechanism::Kill
        | PreemptionMechanism::Rollback
        | PreemptionMechanism::Checkpoint { .. } => holds,
    }
}

/// The ways to preempt a task, with the sums of their costs that `T` keeps.
struct Ways<'a, T> {
    task: &'a TaskFigures,
    site: &'a Site<'a>,
    memory: Bytes,
    dumps: Result<Dumps<'a, T>, NoCost>,
}

impl<'a, T: Tally + Clone> Ways<'a, T> {
    fn new(task: &'a TaskFigures, site: &'a Site<'a>, demand: &Demand, copies: Copies) -> Self {
        let replica = site.replica.as_ref();
        Self {
            task,
            site,
            memory: demand.memory,
            dumps: Dumps::new(task, copies, site.node, replica, &demand.wait),
        }
    }

    fn cost(&self, mechanism: PreemptionMechanism) -> Result<T, NoCost> {
        match mechanism {
            PreemptionMechanism::Wait => cost::wait_as(self.task),
            PreemptionMechanism::Kill => cost::kill_as(self.task),
            PreemptionMechanism::Rollback => cost::rollback_as(self.task, self.site.node),
            PreemptionMechanism::SuspendInMemory => match &self.site.swap {
                Some(swap) => cost::in_memory_as(self.task, self.memory, swap),
                None => Err(NoCost::NoSwap),
            },
            PreemptionMechanism::Checkpoint { dump, .. } => match &self.dumps {
                Ok(dumps) => dumps.cost(dump),
                Err(no_cost) => Err(*no_cost),
            },
        }
    }
}

/// Least scores of a task's mechanisms: of those whose cost does not depend on other decisions for the node, and of
/// those that other victims of the node make dearer, by its queue or its swap.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Least {
    pub(super) alone: Option<Seconds>,
    pub(super) queued: Option<Seconds>,
}

pub(super) fn least(task: &TaskFigures, site: &Site<'_>, demand: &Demand, terms: &Terms) -> Least {
    let mut least = Least::default();
    let ways = Ways::<Sums>::new(task, site, demand, terms.copies);
    for mechanism in mechanisms(terms.copies) {
        let of = match mechanism {
            PreemptionMechanism::Wait
            | PreemptionMechanism::Kill
            | PreemptionMechanism::Rollback => &mut least.alone,
            PreemptionMechanism::SuspendInMemory | PreemptionMechanism::Checkpoint { .. } => {
                &mut least.queued
            }
        };
        if let Ok(sums) = ways.cost(mechanism)
            && terms.allows(task, mechanism, &sums)
        {
            let score = terms.score_of(&sums);
            *of = Some(of.map_or(score, |other| other.min(score)));
        }
    }
    least
}

/// Returns the least score of the mechanisms whose cost does not depend on other decisions for the node, and that of
/// the others, where no memory is wanted: lower bounds of any choice, and much cheaper than one. None where no
/// mechanism is possible.
#[must_use]
pub fn least_scores(
    task: &TaskFigures,
    site: &Site<'_>,
    terms: &Terms,
) -> (Option<Seconds>, Option<Seconds>) {
    let least = least(task, site, &Demand::first(site, Bytes::ZERO), terms);
    (least.alone, least.queued)
}

/// Returns the mechanism with the least score of those that have a cost and that the terms allow.
///
/// With the default terms this is Algorithm 1 with more mechanisms: killing costs the progress, so a dump is taken
/// when the progress exceeds its overhead.
///
/// # Errors
///
/// [`UndecidedTask`] if no mechanism is left, with the reasons.
pub fn choose(task: &TaskFigures, site: &Site<'_>, terms: &Terms) -> Result<Choice, UndecidedTask> {
    // The task that comes instead may need as much memory as this one holds.
    choose_under(task, site, &Demand::first(site, task.holds.memory), terms)
}

/// Chooses as [`choose`] does, and lets a suspended task keep the memory that is not `wanted`.
///
/// # Errors
///
/// [`UndecidedTask`] if no mechanism is left, with the reasons.
pub fn choose_for(
    task: &TaskFigures,
    site: &Site<'_>,
    wanted: TaskResources,
    terms: &Terms,
) -> Result<Choice, UndecidedTask> {
    let memory = task.holds.memory.min(wanted.memory);
    choose_under(task, site, &Demand::first(site, memory), terms)
}

pub(super) fn choose_under(
    task: &TaskFigures,
    site: &Site<'_>,
    demand: &Demand,
    terms: &Terms,
) -> Result<Choice, UndecidedTask> {
    let best = best(task, site, demand, terms)?;
    let cost = Ways::new(task, site, demand, terms.copies).cost(best.mechanism);
    let cost = cost.map_err(|no_cost| UndecidedTask {
        task: task.id,
        kill: Rejection::NoCost(no_cost),
        dump: Rejection::NoCost(no_cost),
    })?;
    Ok(Choice {
        mechanism: best.mechanism,
        cost,
        score: best.score,
        next: best.next,
    })
}

/// The mechanism with the least score, and the second best.
pub(super) struct Best {
    mechanism: PreemptionMechanism,
    pub(super) score: Seconds,
    next: Option<(PreemptionMechanism, Seconds)>,
}

pub(super) fn best(
    task: &TaskFigures,
    site: &Site<'_>,
    demand: &Demand,
    terms: &Terms,
) -> Result<Best, UndecidedTask> {
    let mut best: Option<Best> = None;
    let (mut kill, mut dump) = (Rejection::TooLong, Rejection::TooLong);
    let ways = Ways::<Sums>::new(task, site, demand, terms.copies);
    for mechanism in mechanisms(terms.copies) {
        let sums = match ways.cost(mechanism) {
            Ok(sums) => sums,
            Err(no_cost) => {
                match mechanism {
                    PreemptionMechanism::Kill => kill = Rejection::NoCost(no_cost),
                    PreemptionMechanism::Checkpoint {
                        dump: Dump::Full, ..
                    } => dump = Rejection::NoCost(no_cost),
                    _ => {}
                }
                continue;
            }
        };
        if !terms.allows(task, mechanism, &sums) {
            continue;
        }
        let score = terms.score_of(&sums);
        match &mut best {
            Some(least) if score >= least.score => {
                if least.next.is_none_or(|(_, other)| score < other) {
                    least.next = Some((mechanism, score));
                }
            }
            best => {
                let next = best.as_ref().map(|least| (least.mechanism, least.score));
                *best = Some(Best {
                    mechanism,
                    score,
                    next,
                });
            }
        }
    }
    best.ok_or(UndecidedTask {
        task: task.id,
        kill,
        dump,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NodeId;
    use crate::estimator::SizedRates;
    use crate::figure::Figure;
    use crate::quantity::{Bytes, BytesPerSecond};

    fn rate(bytes_per_s: f64) -> SizedRates {
        SizedRates::uniform(Figure::given(BytesPerSecond::new(bytes_per_s).unwrap()))
    }

    fn seconds(n: u64) -> Figure<Seconds> {
        Figure::given(Seconds::from_millis(n * 1000))
    }

    fn node(bytes_per_s: f64) -> NodeFigures {
        NodeFigures {
            write: rate(bytes_per_s),
            read: rate(bytes_per_s),
            write_queue: Figure::given(Bytes::ZERO),
            ..NodeFigures::unknown(NodeId(1))
        }
    }

    fn site(node: &NodeFigures) -> Site<'_> {
        Site {
            node,
            replica: None,
            swap: None,
        }
    }

    /// Makes the paper's 60 s, 5 GB job after 30 s (§3.3.3).
    fn k_means() -> TaskFigures {
        TaskFigures {
            full: Figure::given(Bytes::new(5_000_000_000)),
            progress: seconds(30),
            remaining: seconds(30),
            ..TaskFigures::unknown(TaskId(1), TaskResources::ZERO)
        }
    }

    const FULL: PreemptionMechanism = PreemptionMechanism::Checkpoint {
        dump: Dump::Full,
        copies: Copies::Local,
    };

    #[test]
    fn the_papers_job_is_killed_at_low_bandwidth_and_dumped_at_high() {
        // 10 GB altogether in 30 s: the two are even at a third of a GB a second.
        let at = |bandwidth| {
            choose(&k_means(), &site(&node(bandwidth)), &Terms::default())
                .unwrap()
                .mechanism
        };
        assert_eq!(at(0.1e9), PreemptionMechanism::Kill);
        assert_eq!(at(0.333e9), PreemptionMechanism::Kill);
        assert_eq!(at(0.334e9), FULL);
        assert_eq!(at(10e9), FULL);
    }

    #[test]
    fn an_incremental_dump_pays_where_a_full_one_does_not() {
        let task = TaskFigures {
            has_checkpoint: true,
            incremental: Figure::given(Bytes::new(500_000_000)),
            ..k_means()
        };
        // Full: 2 × 16.7 s. Incremental: 1.7 s and 16.7 s.
        let choice = choose(&task, &site(&node(0.3e9)), &Terms::default()).unwrap();
        assert!(matches!(
            choice.mechanism,
            PreemptionMechanism::Checkpoint {
                dump: Dump::Incremental,
                ..
            }
        ));
        assert_eq!(choice.next.unwrap().0, PreemptionMechanism::Kill);
    }

    #[test]
    fn a_task_checkpointed_a_moment_ago_goes_back_to_that() {
        let task = TaskFigures {
            has_checkpoint: true,
            since_checkpoint: seconds(1),
            ..k_means()
        };
        let choice = choose(&task, &site(&node(0.5e9)), &Terms::default()).unwrap();
        assert_eq!(choice.mechanism, PreemptionMechanism::Rollback);
        assert_eq!(choice.score.value(), 11.0);
    }

    #[test]
    fn memory_is_the_cheapest_where_there_is_room() {
        let node = node(1e9);
        let site = Site {
            swap: Some(SwapFigures {
                free_memory: Bytes::new(6_000_000_000),
                free_swap: Bytes::new(6_000_000_000),
                write: Figure::given(BytesPerSecond::new(1e8).unwrap()),
                read: Figure::given(BytesPerSecond::new(1e8).unwrap()),
            }),
            ..site(&node)
        };
        let task = TaskFigures {
            resident: Figure::given(Bytes::new(5_000_000_000)),
            ..k_means()
        };
        let choice = choose(&task, &site, &Terms::default()).unwrap();
        assert_eq!(choice.mechanism, PreemptionMechanism::SuspendInMemory);
        assert_eq!(choice.score, Seconds::ZERO);
    }

    #[test]
    fn only_the_memory_that_is_wanted_is_paged_out() {
        let node = node(1e9);
        let gb = |n: u64| Bytes::new(n * 1_000_000_000);
        let swap = |gb_per_s: f64| Figure::given(BytesPerSecond::new(gb_per_s * 1e9).unwrap());
        let site = Site {
            swap: Some(SwapFigures {
                free_memory: Bytes::ZERO,
                free_swap: gb(6),
                write: swap(0.1),
                read: swap(0.1),
            }),
            ..site(&node)
        };
        let task = TaskFigures {
            resident: Figure::given(gb(5)),
            holds: TaskResources {
                cpu_millis: 1000,
                memory: gb(5),
            },
            ..k_means()
        };
        // 5 GB out and in again are 100 s; the dump takes 10.
        let whole = choose(&task, &site, &Terms::default()).unwrap();
        assert_eq!((whole.mechanism, whole.score.value()), (FULL, 10.0));
        let wanting = |memory| {
            let wanted = TaskResources {
                cpu_millis: 1000,
                memory,
            };
            let choice = choose_for(&task, &site, wanted, &Terms::default()).unwrap();
            (choice.mechanism, choice.score.value())
        };
        assert_eq!(
            wanting(Bytes::ZERO),
            (PreemptionMechanism::SuspendInMemory, 0.0)
        );
        let half = wanting(Bytes::new(250_000_000));
        assert_eq!(half, (PreemptionMechanism::SuspendInMemory, 5.0));
        assert_eq!(wanting(gb(9)), (FULL, 10.0));
    }

    #[test]
    fn nearly_done_is_waited_for_when_the_delay_counts() {
        let task = TaskFigures {
            progress: seconds(58),
            remaining: seconds(2),
            ..k_means()
        };
        let terms = Terms {
            may_wait: true,
            delay_weight: Ratio::ONE,
            ..Terms::default()
        };
        let choice = choose(&task, &site(&node(1e9)), &terms).unwrap();
        assert_eq!(choice.mechanism, PreemptionMechanism::Wait);
        // Without progress the task is killed.
        let task = TaskFigures {
            progress: seconds(1),
            remaining: seconds(59),
            ..k_means()
        };
        assert_eq!(
            choose(&task, &site(&node(1e9)), &terms).unwrap().mechanism,
            PreemptionMechanism::Kill
        );
    }

    #[test]
    fn a_grace_time_rules_out_what_takes_longer() {
        let terms = |longest| Terms {
            longest_delay: Some(Seconds::from_millis(longest)),
            ..Terms::default()
        };
        let at = |longest| choose(&k_means(), &site(&node(1e9)), &terms(longest)).unwrap();
        assert_eq!(at(5000).mechanism, FULL);
        assert_eq!(at(4999).mechanism, PreemptionMechanism::Kill);
        // The task's own; the shorter one counts.
        let of = |grace, longest| {
            let task = TaskFigures {
                grace: Some(Seconds::from_millis(grace)),
                ..k_means()
            };
            let chosen = choose(&task, &site(&node(1e9)), &terms(longest));
            chosen.unwrap().mechanism
        };
        assert_eq!([of(5000, 5000), of(9000, 5000)], [FULL; 2]);
        assert_eq!(
            [of(4999, 5000), of(9000, 4999), of(0, 9000)],
            [PreemptionMechanism::Kill; 3]
        );
    }

    #[test]
    fn without_figures_nothing_is_recommended_and_the_reasons_are_given() {
        let task = TaskFigures::unknown(TaskId(7), TaskResources::ZERO);
        let undecided = choose(&task, &site(&node(1e9)), &Terms::default()).unwrap_err();
        assert_eq!(
            undecided.to_string(),
            "task 7 cannot be decided on: kill: the task's progress was not given; \
             dump: the size of a full dump was not given"
        );
    }

    #[test]
    fn a_choice_says_what_the_second_best_would_have_come_to() {
        let choice = choose(&k_means(), &site(&node(1e9)), &Terms::default()).unwrap();
        let words = choice.to_string();
        assert!(words.starts_with("full dump: 10.0 s (p95 10.0 s): write 5.0 s + read 5.0 s"));
        assert!(
            words.ends_with("to kill would come to 30.0 s and not 10.0 s"),
            "{words}"
        );
    }
}
