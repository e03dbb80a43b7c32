//! Lower bounds of what victims cost, by which a search leaves most of them out without their costs.

use super::victims::{Victims, listed};
use super::{SchedulerView, TaskView};
use crate::cost::{Copies, NodeFigures, SwapFigures};
use crate::estimator::SizedRates;
use crate::figure::Figure;
use crate::preempt::{self, By, Site, Terms};
use crate::quantity::{Bytes, BytesPerSecond, Moment, Seconds};
use crate::{NodeId, TaskId};

/// Lower bound of a victim's score from now on, until an event names its node: the lesser of `fixed` and what grows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Bound {
    pub(super) fixed: Seconds,
    /// Work that is lost by a kill: so much at a time, and a second more each second from then on.
    pub(super) grows: Option<(Seconds, Moment)>,
    /// Part of `fixed` that can be kept.
    unqueued: Option<Unqueued>,
}

impl Bound {
    const NEVER: Self = Self::fixed(Seconds::MAX);

    const fn fixed(fixed: Seconds) -> Self {
        Self {
            fixed,
            grows: None,
            unqueued: None,
        }
    }

    /// Returns the bound at a time.
    pub(super) fn at(&self, now: Moment) -> Seconds {
        // As the progress of a task is calculated: a bound that is exact ends searches sooner.
        let grown = self
            .grows
            .map_or(Seconds::MAX, |(done, since)| done.plus(now.since(since)));
        self.fixed.min(grown)
    }
}

/// Cost of the cheapest dump of a task without a checkpoint on a node whose queue is empty: it holds as long as the task
/// has as much memory and dirties it as fast, and the node's rates are the same.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Unqueued {
    memory: Bytes,
    dirty_rate: Option<BytesPerSecond>,
    cost: Option<Seconds>,
}

/// Rates of a node that dumps and restores depend on, bit by bit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rates(Vec<[u64; 2]>);

impl Rates {
    fn of(figures: &NodeFigures) -> impl Iterator<Item = [u64; 2]> + '_ {
        let known = |p50: f64, p95: f64| [p50.to_bits(), p95.to_bits()];
        let rate = move |(_, figure): (_, Figure<BytesPerSecond>)| {
            let known = figure
                .known()
                .map(|of| known(of.p50.value(), of.p95.value()));
            known.unwrap_or([u64::MAX; 2])
        };
        let time = move |figure: &Figure<Seconds>| {
            let known = figure
                .known()
                .map(|of| known(of.p50.value(), of.p95.value()));
            known.unwrap_or([u64::MAX; 2])
        };
        let rates = [&figures.write, &figures.compare, &figures.read];
        let times = [&figures.dump_start, &figures.restore_start];
        (rates.into_iter().flat_map(SizedRates::by_class).map(rate)).chain(times.map(time))
    }

    /// Takes in the rates of a node; returns false if they have changed.
    fn renew(&mut self, figures: &NodeFigures) -> bool {
        if self.0.iter().copied().eq(Self::of(figures)) {
            return true;
        }
        self.0.clear();
        self.0.extend(Self::of(figures));
        false
    }
}

/// Maker of the bounds of a node's tasks.
pub(super) struct Bounds<'a> {
    victims: &'a Victims,
    now: Moment,
    view: &'a SchedulerView,
    /// Node without its queue of dumps, and the score of waiting for that; none where bounds are not put together of
    /// both.
    unqueued: Option<(NodeFigures, Option<f64>)>,
    /// True if the rates are those of the last time.
    is_kept: bool,
}

/// Returns a little less, as sums of rounded times in another order may be a little less.
fn slightly_less(score: Seconds) -> Seconds {
    Seconds::clamped(score.value() * (1.0 - 1e-9) - 1e-6)
}

impl Victims {
    /// Prepares the bounds of the tasks of a node; `rates` are those of the last time there.
    pub(super) fn bounds<'a>(
        &'a self,
        now: Moment,
        view: &'a SchedulerView,
        node: NodeId,
        rates: &mut Rates,
    ) -> Bounds<'a> {
        let mut bounds = Bounds {
            victims: self,
            now,
            view,
            unqueued: None,
            is_kept: false,
        };
        if let Self::Adaptive(terms) = self
            && terms.copies == Copies::Local
            && !terms.may_wait
            && let Some(node) = view.node(node)
            && node.swap.is_none()
        {
            bounds.is_kept = rates.renew(&node.figures);
            // A wait is a part of the overhead and of the delay.
            let wait = node.figures.write_wait(Bytes::ZERO).ok();
            let wait = wait.map(|wait| match terms.by {
                By::P50 => wait.p50,
                By::P95 => wait.p95.max(wait.p50),
            });
            let wait = wait.map(|wait| wait.value() * (1.0 + terms.delay_weight.value()));
            let figures = NodeFigures {
                write_queue: Figure::given(Bytes::ZERO),
                ..node.figures
            };
            bounds.unqueued = Some((figures, wait));
        }
        bounds
    }
}

impl Bounds<'_> {
    /// Returns a lower bound of the score that a candidate adds to a choice, from now on until an event names its node;
    /// `before` is the one of the last time.
    pub(super) fn of(&self, id: TaskId, before: Option<&Bound>) -> Bound {
        let Some(task) = self.view.task(id) else {
            return Bound::NEVER;
        };
        let grows = task.running_since.map(|since| (task.done, since));
        // What runs slower loses less in a second.
        let slow = task.holds.cpu_millis < task.asks.cpu_millis;
        match self.victims {
            Victims::Kill | Victims::Basic if slow => Bound::fixed(task.progress(self.now)),
            Victims::Kill | Victims::Basic => Bound {
                grows,
                ..Bound::NEVER
            },
            Victims::InMemory { .. } => Bound::fixed(Seconds::ZERO),
            Victims::Li2015 => {
                let score = listed(self.now, self.view, &[id]);
                Bound::fixed(score.first().map_or(Seconds::MAX, |scored| scored.score))
            }
            Victims::Adaptive(terms) => match &self.unqueued {
                Some((figures, wait))
                    if task.given.is_none() && task.checkpoint.is_none() && !slow =>
                {
                    let kept = before.and_then(|before| before.unqueued).filter(|kept| {
                        self.is_kept
                            && kept.memory == task.memory
                            && kept.dirty_rate == task.dirty_rate
                    });
                    let unqueued = kept.unwrap_or_else(|| Unqueued {
                        memory: task.memory,
                        dirty_rate: task.dirty_rate,
                        cost: self.least(id, figures, None, terms).1,
                    });
                    let dumped = wait.zip(unqueued.cost);
                    let dumped = dumped.map(|(wait, cost)| Seconds::clamped(wait + cost.value()));
                    Bound {
                        fixed: dumped.map_or(Seconds::MAX, slightly_less),
                        grows,
                        unqueued: Some(unqueued),
                    }
                }
                _ => self.adaptive(id, task, slow, terms),
            },
        }
    }

    fn least(
        &self,
        id: TaskId,
        node: &NodeFigures,
        swap: Option<SwapFigures>,
        terms: &Terms,
    ) -> (Option<Seconds>, Option<Seconds>) {
        let site = Site {
            node,
            replica: None,
            swap,
        };
        let task = self.view.task(id);
        task.map_or((None, None), |task| {
            preempt::least_scores(&task.figures(id, self.now), &site, terms)
        })
    }

    /// Returns the bound of a task by all of its costs.
    fn adaptive(&self, id: TaskId, task: &TaskView, slow: bool, terms: &Terms) -> Bound {
        let Some(node) = task.node.and_then(|node| self.view.node(node)) else {
            return Bound::NEVER;
        };
        let (alone, queued) = self.least(id, &node.figures, node.swap, terms);
        let fixed = queued.unwrap_or(Seconds::MAX);
        // What has changed since a checkpoint becomes more, and may come into a class of sizes with more bandwidth.
        let figures = &node.figures;
        let by_size = !(figures.write.is_uniform() && figures.compare.is_uniform());
        let dump_grows = task.given.is_none() && task.checkpoint.is_some();
        let bound = match alone {
            _ if dump_grows && task.dirty_rate.is_some() && by_size => Bound::fixed(Seconds::ZERO),
            None => Bound::fixed(fixed),
            // A wait becomes shorter.
            Some(_) if terms.may_wait => Bound::fixed(Seconds::ZERO),
            // Given figures stand still.
            Some(alone) if task.given.is_some() || slow => Bound::fixed(fixed.min(alone)),
            Some(alone) => Bound {
                grows: Some((slightly_less(alone), self.now)),
                ..Bound::fixed(fixed)
            },
        };
        Bound {
            fixed: slightly_less(bound.fixed),
            ..bound
        }
    }
}
