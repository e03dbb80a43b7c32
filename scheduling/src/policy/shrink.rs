//! BIG-C (paper 004): long jobs give resources to short ones and run on with less.
//!
//! Tasks of priority 0 are those of long jobs, all others those of short ones (§5.1 has two queues). Every 3 s (§4.2)
//! Algorithm 1 says how much the waiting short tasks may take, and Algorithm 2 of which containers. A container that
//! swaps is frozen at 1 % of a processor. Each gets back what was taken when there is room on its node and it has
//! asked for it often enough (§4.3, delayed resumption).

use std::collections::BTreeMap;

use super::base::Base;
use super::running::Running;
use super::{ClusterEvent, Decision, DecisionReason, Preempt, SchedulerView, Score, TaskAction};
use crate::bigc::{
    Container, DelayedResumption, LongJob, MINIMAL_FOOTPRINT, Reclaimed, container_preemption,
    to_be_preempted,
};
use crate::cost::TaskResources;
use crate::quantity::{Moment, Ratio, Seconds};
use crate::{NodeId, TaskId};

/// Time between two runs (004, §4.2), milliseconds.
const PERIOD_MS: u64 = 3000;

/// Share of the cluster that is the long jobs' own (004, §5.1: 95 % are the short jobs').
const LONG_SHARE: f64 = 0.05;

/// Share of the cluster that long jobs may use under `reserve` (004, §5.1).
pub(super) const NOT_RESERVED: f64 = 0.4;

/// Immediate preemption takes all at once of one container, graceful preemption a step of each.
pub(super) struct Shrink {
    /// A step; none for all at once.
    step: Option<TaskResources>,
    /// Times that a container asks in vain for what was taken.
    in_vain: u32,
    running: Running,
    asking: BTreeMap<TaskId, DelayedResumption>,
}

impl Shrink {
    pub(super) fn new(step: Option<TaskResources>, in_vain: u32) -> Self {
        Self {
            step,
            in_vain,
            running: Running::default(),
            asking: BTreeMap::new(),
        }
    }

    /// Returns the long jobs with their containers, of one node or of all.
    fn long_jobs(&self, now: Moment, node: Option<NodeId>, view: &SchedulerView) -> Vec<LongJob> {
        let job = |(job, tasks): (_, &std::collections::BTreeSet<TaskId>)| {
            let of = |id: &TaskId| Some((*id, view.task(*id)?));
            let long = tasks.iter().filter_map(of);
            let long = long.filter(|(_, task)| task.priority == 0);
            let here = long.filter(|(_, task)| node.is_none() || task.node == node);
            let here: Vec<_> = here.collect();
            let left = here
                .iter()
                .map(|(_, task)| task.remaining(now).unwrap_or(Seconds::MAX));
            let remaining = left.max()?;
            let container = |(id, task): &(TaskId, &super::TaskView)| Container {
                task: *id,
                holds: task.holds,
                swapping: task.swaps(),
            };
            let containers = here.iter().map(container).collect();
            Some(LongJob {
                job,
                remaining,
                containers,
            })
        };
        self.running.jobs().filter_map(job).collect()
    }

    /// Takes resources of long jobs by Algorithms 1 and 2.
    fn reclaim(
        &mut self,
        now: Moment,
        request: TaskResources,
        node: Option<NodeId>,
        reason: DecisionReason,
        view: &SchedulerView,
        out: &mut Vec<Decision>,
    ) {
        let all = view.nodes().map(|(_, node)| node.capacity);
        let all = all.fold(TaskResources::ZERO, TaskResources::plus);
        let own = Ratio::clamped(LONG_SHARE);
        let fair = TaskResources {
            cpu_millis: crate::quantity::Bytes::new(all.cpu_millis)
                .times(own)
                .count(),
            memory: all.memory.times(own),
        };
        let allocated = view.held_by_priority_0();
        let preempted = to_be_preempted(allocated, fair, request);
        let jobs = self.long_jobs(now, node, view);
        let containers = jobs.iter().flat_map(|job| &job.containers);
        let largest = containers.fold(TaskResources::ZERO, |most, container| TaskResources {
            cpu_millis: most.cpu_millis.max(container.holds.cpu_millis),
            memory: most.memory.max(container.holds.memory),
        });
        let step = self.step.unwrap_or(largest);
        let over = allocated.less(fair);
        let Reclaimed { containers, .. } =
            container_preemption(&jobs, request, over, preempted, step);
        for shrunk in containers {
            let Some((holds, node)) = view
                .task(shrunk.task)
                .and_then(|t| Some((t.holds, t.node?)))
            else {
                continue;
            };
            let asking = DelayedResumption::new(self.in_vain);
            self.asking.insert(shrunk.task, asking);
            let left = jobs.iter().find(|job| job.job == shrunk.job);
            out.push(Decision {
                action: TaskAction::Resize(holds.less(shrunk.taken)),
                task: shrunk.task,
                node,
                score: Score::Left(left.map_or(Seconds::MAX, |job| job.remaining)),
                runner_up: None,
                reason,
            });
        }
    }

    /// Freezes what swaps, and gives back what was taken.
    fn tend(&mut self, base: &Base, view: &SchedulerView, out: &mut Vec<Decision>) {
        let mut rooms: BTreeMap<NodeId, TaskResources> = BTreeMap::new();
        let decided: Vec<TaskId> = out.iter().map(|decision| decision.task).collect();
        let shrunk: Vec<TaskId> = self.running.tasks().collect();
        for id in shrunk {
            let Some(task) = view.task(id) else { continue };
            let Some(node) = task.node else { continue };
            let lacks = task.asks.less(task.holds);
            if lacks.is_none() {
                self.asking.remove(&id);
                continue;
            }
            if decided.contains(&id) {
                continue;
            }
            let room = rooms
                .entry(node)
                .or_insert_with(|| base.room(node).unwrap_or(TaskResources::ZERO));
            let back = lacks.least(*room);
            // What swaps needs its memory first.
            let helps = back == lacks || (!back.is_none() && !task.swaps());
            let mut decide = |to, reason| {
                out.push(Decision {
                    action: TaskAction::Resize(to),
                    task: id,
                    node,
                    score: Score::Order(task.submitted.micros()),
                    runner_up: None,
                    reason,
                });
            };
            let asking = self.asking.entry(id);
            let asking = asking.or_insert_with(|| DelayedResumption::new(self.in_vain));
            if helps && asking.ask() {
                *room = room.less(back);
                decide(task.holds.plus(back), DecisionReason::GivenBack);
            } else if task.swaps() && task.holds.cpu_millis > MINIMAL_FOOTPRINT.cpu_millis {
                let frozen = TaskResources {
                    cpu_millis: MINIMAL_FOOTPRINT.cpu_millis,
                    ..task.holds
                };
                decide(frozen, DecisionReason::Swaps);
            }
        }
    }
}

impl Preempt for Shrink {
    fn period(&self) -> Option<Seconds> {
        Some(Seconds::from_millis(PERIOD_MS))
    }

    fn preempt(
        &mut self,
        now: Moment,
        event: ClusterEvent,
        base: &mut Base,
        view: &SchedulerView,
        out: &mut Vec<Decision>,
    ) {
        if let Some(gone) = self.running.observe(event, view) {
            self.asking.remove(&gone);
        }
        match event {
            ClusterEvent::Wanted(wanted, node) => {
                self.reclaim(now, wanted, node, DecisionReason::Wanted, view, out);
            }
            ClusterEvent::Tick => {
                let short = base.waiting().filter_map(|id| Some((id, view.task(id)?)));
                // The queue is by priority: all short ones come first.
                let short = short.take_while(|(_, task)| task.priority > 0);
                let (mut request, mut first) = (TaskResources::ZERO, None);
                for (id, task) in short {
                    request = request.plus(task.asks);
                    first = first.or(Some(id));
                }
                if let Some(first) = first {
                    self.reclaim(
                        now,
                        request,
                        None,
                        DecisionReason::MakesRoomFor(first),
                        view,
                        out,
                    );
                }
                self.tend(base, view, out);
            }
            _ => {}
        }
    }
}
