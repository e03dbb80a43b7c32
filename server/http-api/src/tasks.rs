//! Completes the tasks of a request with the store's knowledge of their jobs.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use permafrost_api_types::problem::ProblemKind;
use permafrost_api_types::task::{Resources, Swap, Task};
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control::Checkpoint;
use permafrost_scheduling::cost::{self, Copies};
use permafrost_scheduling::figure::{Estimate, Figure, What};
use permafrost_scheduling::preempt::Site;
use permafrost_scheduling::quantity::{Bytes, Seconds};
use permafrost_scheduling::size::{DumpKind, Memory};
use permafrost_scheduling::{NodeId, TaskId};

use super::body::Asked;
use super::problem::RequestProblem;
use super::world::seconds;

pub(super) const fn resources(of: Resources) -> cost::TaskResources {
    cost::TaskResources {
        cpu_millis: of.cpu_millis.value(),
        memory: of.memory_bytes,
    }
}

fn given<T: Copy>(value: Option<T>, what: What) -> Figure<T> {
    match value {
        Some(value) => Figure::given(value),
        None => Figure::not_given(what),
    }
}

/// Returns the known facts of `task`, which is number `index` of the request.
///
/// Its job tells if there is a checkpoint to build on; the job's past and memory give the expected size of its
/// dumps. A caller that names no job and gives the size of an incremental dump, or the work since the last,
/// states that there is a checkpoint. Omitted parts of its memory are taken from the last checkpoint.
pub(super) fn known(asked: &Asked<'_>, index: usize, task: &Task<'_>) -> cost::TaskFigures {
    let job = task.job.as_deref().filter(|job| asked.caller.sees(job));
    let last = last_checkpoint(asked, job);
    let says_so = task.incremental_bytes.is_some() || task.since_checkpoint_s.is_some();
    let has_checkpoint = last.is_some() || (task.job.is_none() && says_so);
    let resident = match (task.resident_bytes, last) {
        (Some(resident), _) => Figure::given(resident),
        (None, Some((checkpoint, age))) => Figure::Known(Estimate {
            age,
            samples: 1,
            ..Estimate::given(Bytes::new(checkpoint.memory_bytes))
        }),
        (None, None) => Figure::not_given(What::Memory),
    };
    let memory = Memory {
        resident: resident.known().ok().map(|resident| resident.p50),
        dirty: task
            .dirty_pages
            .map(|pages| Bytes::new(pages.value().saturating_mul(PAGE_BYTES))),
    };
    let predicted = |dump, size: Option<Bytes>| match size {
        Some(size) => Figure::given(size),
        None => {
            let (job, program) = (job.unwrap_or_default(), task.program.as_deref());
            let source = &asked.api.source;
            match source.predict(job, program.unwrap_or_default(), dump, &memory) {
                Ok(prediction) => Figure::Known(prediction.moved),
                Err(why) => Figure::Unknown { why },
            }
        }
    };
    let this_run = task.progress_s;
    let progress = match this_run {
        Some(this_run) => Figure::given(this_run.plus(carried(task, this_run, last))),
        None => Figure::not_given(What::Progress),
    };
    let since_checkpoint = match (task.since_checkpoint_s, last, this_run) {
        (Some(since), _, _) => Figure::given(since),
        // A task cannot have worked longer than since its start.
        (None, Some((_, age)), Some(this_run)) => Figure::given(age.min(this_run)),
        (None, Some((_, age)), None) => Figure::given(age),
        (None, None, _) => Figure::not_given(What::WorkSinceCheckpoint),
    };
    cost::TaskFigures {
        id: TaskId(index as u64),
        holds: resources(task.holds),
        full: predicted(DumpKind::Full, task.full_bytes),
        has_checkpoint,
        incremental: if has_checkpoint {
            predicted(DumpKind::Incremental, task.incremental_bytes)
        } else {
            Figure::not_given(What::IncrementalSize)
        },
        resident,
        dirty_rate: given(task.dirty_bytes_per_s, What::DirtyRate),
        progress,
        since_checkpoint,
        remaining: given(task.remaining_s, What::RemainingTime),
        start: given(task.start_s, What::StartTime),
        grace: task.grace_s,
    }
}

/// Returns the work that a task did before this run of it, which has done `this_run`: the work in the
/// checkpoint that it was restored from.
fn carried(task: &Task<'_>, this_run: Seconds, last: Option<(&Checkpoint, Seconds)>) -> Seconds {
    let work = last.and_then(|(checkpoint, age)| Some((checkpoint.work.as_ref()?, age)));
    let (true, Some((work, age))) = (task.progress_of_this_run, work) else {
        return Seconds::ZERO;
    };
    let carried_us = match &task.process {
        Some(process) => work.before(process),
        None if this_run > age => work.carried_us,
        None => work.worked_us,
    };
    Seconds::new(Duration::from_micros(carried_us).as_secs_f64()).unwrap_or(Seconds::MAX)
}

/// Returns a job's newest checkpoint that can be resumed, and its age.
fn last_checkpoint<'a>(asked: &Asked<'a>, job: Option<&str>) -> Option<(&'a Checkpoint, Seconds)> {
    let jobs = asked.world.jobs()?;
    let last = jobs.get(job?)?.last()?;
    Some((last, seconds(jobs.age_of(last))))
}

/// Returns the node of a task: the one that it names, or the only one there is.
pub(super) fn node_of(asked: &Asked<'_>, task: &Task<'_>) -> Option<NodeId> {
    match &task.node {
        Some(name) => asked.world.names().id(name),
        None => asked.world.only_node(),
    }
}

/// Returns a node that the request names.
///
/// # Errors
/// A problem about the field.
pub(super) fn named(
    asked: &Asked<'_>,
    pointer: &str,
    name: &str,
) -> Result<NodeId, RequestProblem> {
    asked.world.names().id(name).ok_or_else(|| {
        RequestProblem::at(
            ProblemKind::UnknownNode,
            pointer,
            format!("there is no node {name:?}"),
        )
    })
}

/// Swaps of machines, by the nodes that their tasks name.
pub(super) type Swaps = HashMap<NodeId, cost::SwapFigures>;

pub(super) fn swaps(asked: &Asked<'_>, given_swaps: &[Swap<'_>]) -> Result<Swaps, RequestProblem> {
    let mut swaps = Swaps::with_capacity(given_swaps.len());
    for (index, swap) in given_swaps.iter().enumerate() {
        let node = named(asked, &format!("/swaps/{index}/node"), &swap.node)?;
        let known = cost::SwapFigures {
            free_memory: swap.free_memory_bytes,
            free_swap: swap.free_swap_bytes,
            write: given(swap.write_bytes_per_s, What::SwapBandwidth),
            read: given(swap.read_bytes_per_s, What::SwapBandwidth),
        };
        if swaps.insert(node, known).is_some() {
            let pointer = format!("/swaps/{index}/node");
            return Err(RequestProblem::at(
                ProblemKind::Invalid,
                pointer,
                "this node has one already",
            ));
        }
    }
    Ok(swaps)
}

/// Returns a node as a site: with the node that would take its copies, and the swap of the machine.
pub(super) fn site<'a>(
    asked: &Asked<'a>,
    node: NodeId,
    copies: Copies,
    swaps: &Swaps,
) -> Option<Site<'a>> {
    let world = asked.world;
    let replica = match copies {
        Copies::Local => None,
        Copies::Replicated => world.replica(node),
    };
    Some(Site {
        node: world.figures(node)?,
        replica,
        swap: swaps.get(&node).copied(),
    })
}

/// Returns the sites of the named nodes, and of no others.
pub(super) fn sites<'a>(
    asked: &Asked<'a>,
    nodes: impl Iterator<Item = NodeId>,
    copies: Copies,
    swaps: &Swaps,
) -> BTreeMap<NodeId, Site<'a>> {
    let mut sites = BTreeMap::new();
    for node in nodes {
        if let std::collections::btree_map::Entry::Vacant(vacant) = sites.entry(node)
            && let Some(site) = site(asked, node, copies, swaps)
        {
            vacant.insert(site);
        }
    }
    sites
}
