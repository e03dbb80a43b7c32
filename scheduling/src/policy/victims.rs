//! Choice of the tasks that make room, and of the mechanism for each.

use std::collections::BTreeMap;

use super::{Decision, DecisionReason, RunnerUp, SchedulerView, Score, TaskAction};
use crate::cost::{Copies, Dump, PreemptionMechanism, TaskResources};
use crate::figure::Missing;
use crate::preempt::{
    self, Candidate, CandidateVictim, Decision as Listed, Site, Terms, algorithm_1,
};
use crate::quantity::{Bytes, Moment, Seconds};
use crate::{NodeId, TaskId};

/// A task that makes room.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Victim {
    pub(super) task: TaskId,
    pub(super) node: NodeId,
    pub(super) mechanism: PreemptionMechanism,
    /// Time that the choice goes by.
    pub(super) score: Seconds,
    /// Score that the decision shows.
    pub(super) shown: Score,
    pub(super) runner_up: Option<RunnerUp>,
    pub(super) reason: Option<DecisionReason>,
}

impl Victim {
    pub(super) fn decision(&self, reason: DecisionReason) -> Decision {
        Decision {
            action: TaskAction::Preempt(self.mechanism),
            task: self.task,
            node: self.node,
            score: self.shown,
            runner_up: self.runner_up,
            reason: self.reason.unwrap_or(reason),
        }
    }
}

/// Tasks that make room together.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Chosen {
    pub(super) victims: Vec<Victim>,
    /// Sum of their scores.
    pub(super) total: Seconds,
    /// True if they free all that is wanted.
    pub(super) enough: bool,
    /// Highest priority of the candidates.
    pub(super) level: u8,
}

/// Rule that chooses among candidates.
#[derive(Clone, Copy, Debug)]
pub(super) enum Victims {
    /// Kills, the one first that loses least work.
    Kill,
    /// Dumps all of the memory, of the one first that has done least work.
    Basic,
    /// Algorithm 1 of paper 000 as published: in the order of size ÷ bandwidth.
    Li2015,
    /// The cheapest mechanism of each, and those that are cheapest for what they free.
    Adaptive(Terms),
    /// Stops in memory, smallest first; kills those that have just begun, and waits for those that are nearly done
    /// (paper 001, §V).
    InMemory {
        /// Work below which a task is killed.
        fresh: Seconds,
        /// Work left below which a task is waited for.
        nearly_done: Seconds,
    },
}

/// A candidate with its score, and what is done to it.
pub(super) struct Scored {
    task: TaskId,
    node: NodeId,
    holds: TaskResources,
    mechanism: PreemptionMechanism,
    pub(super) score: Seconds,
    shown: Score,
    reason: Option<DecisionReason>,
}

const FULL: PreemptionMechanism = PreemptionMechanism::Checkpoint {
    dump: Dump::Full,
    copies: Copies::Local,
};

impl Victims {
    /// Chooses among `candidates`, which run, those that free what is wanted.
    pub(super) fn choose(
        &self,
        now: Moment,
        view: &SchedulerView,
        candidates: &[TaskId],
        wanted: TaskResources,
    ) -> Chosen {
        match self {
            Self::Adaptive(terms) => planned(now, view, candidates, wanted, terms),
            _ => self.in_order(now, view, candidates, wanted),
        }
    }

    /// Takes the candidates with the least scores, and lets those go again that are not needed.
    fn in_order(
        &self,
        now: Moment,
        view: &SchedulerView,
        candidates: &[TaskId],
        wanted: TaskResources,
    ) -> Chosen {
        let mut scored: Vec<Scored> = match self {
            Self::Li2015 => listed(now, view, candidates),
            _ => candidates
                .iter()
                .filter_map(|id| self.scored(now, view, *id))
                .collect(),
        };
        scored.sort_by_key(|scored| (scored.score, scored.task));
        if matches!(self, Self::InMemory { .. }) {
            within_swap(view, &mut scored);
        }
        let mut taken: Vec<usize> = Vec::new();
        let mut freed = TaskResources::ZERO;
        for (index, candidate) in scored.iter().enumerate() {
            let left = wanted.less(freed);
            if left.is_none() {
                break;
            }
            if candidate.holds.least(left).is_none() {
                continue;
            }
            freed = freed.plus(candidate.holds);
            taken.push(index);
        }
        // Only what is wanted is freed: the dearest first are let go.
        let mut is_kept = vec![false; scored.len()];
        for index in &taken {
            if let Some(is_kept) = is_kept.get_mut(*index) {
                *is_kept = true;
            }
        }
        let mut count = taken.len();
        for index in taken.iter().rev() {
            let (Some(candidate), Some(is_kept)) = (scored.get(*index), is_kept.get_mut(*index))
            else {
                continue;
            };
            let without = freed.less(candidate.holds);
            if count > 1 && without.covers(wanted) {
                freed = without;
                count -= 1;
                *is_kept = false;
            }
        }
        let next = is_kept.iter().position(|is_kept| !is_kept);
        let runner_up = next.and_then(|next| scored.get(next)).map(|next| RunnerUp {
            task: next.task,
            action: TaskAction::Preempt(next.mechanism),
            score: next.shown,
        });
        let mut total = Seconds::ZERO;
        let kept = taken
            .iter()
            .filter(|index| is_kept.get(**index) == Some(&true));
        let victims = kept.filter_map(|index| {
            let candidate = scored.get(*index)?;
            total = total.plus(candidate.score);
            Some(Victim {
                task: candidate.task,
                node: candidate.node,
                mechanism: candidate.mechanism,
                score: candidate.score,
                shown: candidate.shown,
                runner_up,
                reason: candidate.reason,
            })
        });
        let victims = victims.collect();
        Chosen {
            victims,
            total,
            enough: freed.covers(wanted),
            level: u8::MAX,
        }
    }

    fn scored(&self, now: Moment, view: &SchedulerView, id: TaskId) -> Option<Scored> {
        let task = view.task(id)?;
        let lost = task.progress(now);
        let (mechanism, score, shown, reason) = match self {
            Self::Kill => (PreemptionMechanism::Kill, lost, Score::Lost(lost), None),
            Self::Basic => (FULL, lost, Score::Lost(lost), None),
            Self::InMemory { fresh, nearly_done } => {
                let moved = Seconds::clamped(task.memory.count() as f64);
                let nearly = task.remaining(now).filter(|left| left <= nearly_done);
                match nearly {
                    Some(left) => {
                        let wait = PreemptionMechanism::Wait;
                        (wait, Seconds::ZERO, Score::Left(left), None)
                    }
                    None if lost <= *fresh => {
                        let kill = PreemptionMechanism::Kill;
                        (
                            kill,
                            Seconds::ZERO,
                            Score::Lost(lost),
                            Some(DecisionReason::Fresh),
                        )
                    }
                    None => {
                        let suspend = PreemptionMechanism::SuspendInMemory;
                        (suspend, moved, Score::Moved(task.memory), None)
                    }
                }
            }
            Self::Li2015 | Self::Adaptive(_) => return None,
        };
        Some(Scored {
            task: id,
            node: task.node?,
            holds: task.holds,
            mechanism,
            score,
            shown,
            reason,
        })
    }
}

/// Returns a candidate as Algorithm 1 takes it, or the figure of its node that is missing; none for a task that is on
/// no node.
pub(super) fn algorithm_1_figures(
    now: Moment,
    view: &SchedulerView,
    id: TaskId,
) -> Option<Result<CandidateVictim, Missing>> {
    let task = view.task(id)?;
    let node = &view.node(task.node?)?.figures;
    let figures = || {
        Ok(CandidateVictim {
            task: id,
            size: task.memory,
            bw_write: node.write.of(task.memory).known()?.p50,
            bw_read: node.read.of(task.memory).known()?.p50,
            queue_time_dump: node.write_wait(Bytes::ZERO)?.p50,
            progress: task.progress(now),
            previous_checkpoint: task.checkpoint.is_some(),
        })
    };
    Some(figures())
}

/// Runs Algorithm 1 over the candidates whose node's figures are known; [`super::Name::undecided`] names the others.
pub(super) fn listed(now: Moment, view: &SchedulerView, candidates: &[TaskId]) -> Vec<Scored> {
    let known = candidates.iter().copied();
    let known = known.filter_map(|id| algorithm_1_figures(now, view, id)?.ok());
    let known: Vec<CandidateVictim> = known.collect();
    let order: BTreeMap<TaskId, Seconds> = (known.iter())
        .map(|victim| (victim.task, victim.size.at(victim.bw_write)))
        .collect();
    let dump = |dump| PreemptionMechanism::Checkpoint {
        dump,
        copies: Copies::Local,
    };
    let scored = |(id, decision): (TaskId, Listed)| {
        let task = view.task(id)?;
        let mechanism = match decision {
            Listed::NormalCheckpoint => FULL,
            // What it has changed since then may not be known.
            Listed::IncrementalCheckpoint if task.figures(id, now).incremental.known().is_err() => {
                FULL
            }
            Listed::IncrementalCheckpoint => dump(Dump::Incremental),
            // Algorithm 2 resumes it from the checkpoint that it has.
            Listed::Kill if task.checkpoint.is_some() => PreemptionMechanism::Rollback,
            Listed::Kill => PreemptionMechanism::Kill,
        };
        let score = *order.get(&id)?;
        Some(Scored {
            task: id,
            node: task.node?,
            holds: task.holds,
            mechanism,
            score,
            shown: Score::Lost(score),
            reason: None,
        })
    };
    algorithm_1(known).into_iter().filter_map(scored).collect()
}

/// Drops the candidates that do not fit what is left of the swap of their node.
fn within_swap(view: &SchedulerView, scored: &mut Vec<Scored>) {
    let mut used: BTreeMap<NodeId, Bytes> = BTreeMap::new();
    scored.retain(|scored| {
        if scored.mechanism != PreemptionMechanism::SuspendInMemory {
            return true;
        }
        let memory = view.task(scored.task).map(|task| task.memory);
        let swap = view.node(scored.node).and_then(|node| node.swap);
        let (Some(memory), Some(swap)) = (memory, swap) else {
            return false;
        };
        let used = used.entry(scored.node).or_default();
        let fits = used.plus(memory) <= swap.free_swap;
        if fits {
            *used = used.plus(memory);
        }
        fits
    });
}

/// Chooses by [`preempt::plan`].
fn planned(
    now: Moment,
    view: &SchedulerView,
    candidates: &[TaskId],
    wanted: TaskResources,
    terms: &Terms,
) -> Chosen {
    let known = |id: &TaskId| {
        let task = view.task(*id)?;
        Some(Candidate {
            node: task.node?,
            task: task.figures(*id, now),
        })
    };
    let candidates: Vec<Candidate> = candidates.iter().filter_map(known).collect();
    let site = |candidate: &Candidate| {
        let node = view.node(candidate.node)?;
        let site = Site {
            node: &node.figures,
            replica: None,
            swap: node.swap,
        };
        Some((candidate.node, site))
    };
    let sites: BTreeMap<NodeId, Site<'_>> = candidates.iter().filter_map(site).collect();
    let plan = preempt::plan(wanted, &candidates, &sites, terms);
    let mut total = Seconds::ZERO;
    let victims = plan.victims.iter().map(|victim| {
        total = total.plus(victim.choice.score);
        Victim {
            task: victim.task,
            node: victim.node,
            mechanism: victim.choice.mechanism,
            score: victim.choice.score,
            shown: Score::Lost(victim.choice.score),
            runner_up: victim.choice.next.map(|(mechanism, score)| RunnerUp {
                task: victim.task,
                action: TaskAction::Preempt(mechanism),
                score: Score::Lost(score),
            }),
            reason: None,
        }
    });
    let victims = victims.collect();
    Chosen {
        victims,
        total,
        enough: plan.lacking.is_none(),
        level: u8::MAX,
    }
}
