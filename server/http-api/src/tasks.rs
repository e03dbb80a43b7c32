//! Completes the tasks of a request with the store's knowledge of their jobs.

use std::time::Duration;

use permafrost_api_types::problem::ProblemKind;
use permafrost_api_types::task::{Resources, Task};
use permafrost_protocol::PAGE_BYTES;
use permafrost_scheduling::cost;
use permafrost_scheduling::figure::{Estimate, Figure, What};
use permafrost_scheduling::quantity::{Bytes, Seconds};
use permafrost_scheduling::size::{DumpKind, Memory};
use permafrost_scheduling::{NodeId, TaskId};

use super::body::Asked;
use super::limits;
use super::problem::RequestProblem;
use super::world::{Jobs, LastCheckpoint, seconds};

pub(super) const fn resources(of: Resources) -> cost::TaskResources {
    cost::TaskResources {
        cpu_millis: of.cpu_millis.value(),
        memory: of.memory_bytes,
    }
}

pub(super) fn given<T: Copy>(value: Option<T>, what: What) -> Figure<T> {
    match value {
        Some(value) => Figure::given(value),
        None => Figure::not_given(what),
    }
}

/// Completes the tasks of a request with the knowledge of the store.
pub(super) struct Known<'a> {
    asked: &'a Asked<'a>,
    /// The checkpoints, and the time since they were listed: all tasks of a request see them at the same time.
    jobs: Option<(&'a Jobs, Duration)>,
}

impl<'a> Known<'a> {
    pub(super) fn new(asked: &'a Asked<'a>) -> Self {
        let jobs = asked.world.jobs();
        Self {
            asked,
            jobs: jobs.map(|jobs| (jobs, jobs.age())),
        }
    }

    /// Returns the known facts of `task`, which is number `index` of the request.
    ///
    /// Its job tells if there is a checkpoint to build on; the job's past and memory give the expected size of its
    /// dumps. A caller that names no job and gives the size of an incremental dump, or the work since the last,
    /// states that there is a checkpoint. Omitted parts of its memory are taken from the last checkpoint.
    pub(super) fn known(&self, index: usize, task: &Task<'_>) -> cost::TaskFigures {
        let asked = self.asked;
        let job = task.job.as_deref().filter(|job| asked.caller.sees(job));
        let last = job.and_then(|job| self.last_checkpoint(job));
        let says_so = task.incremental_bytes.is_some() || task.since_checkpoint_s.is_some();
        let has_checkpoint = last.is_some() || (task.job.is_none() && says_so);
        let resident = match (task.resident_bytes, last) {
            (Some(resident), _) => Figure::given(resident),
            (None, Some((checkpoint, age))) => Figure::Known(Estimate {
                age,
                samples: 1,
                ..Estimate::given(checkpoint.memory)
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

    /// Returns a job's newest checkpoint that can be resumed, and its age.
    fn last_checkpoint(&self, job: &str) -> Option<(LastCheckpoint<'a>, Seconds)> {
        let (jobs, age) = self.jobs?;
        let last = jobs.last_of(job, age)?;
        Some((last, seconds(last.age)))
    }
}

/// Returns the work that a task did before this run of it, which has done `this_run`: the work in the
/// checkpoint that it was restored from.
fn carried(
    task: &Task<'_>,
    this_run: Seconds,
    last: Option<(LastCheckpoint<'_>, Seconds)>,
) -> Seconds {
    let last = last.filter(|_| task.progress_of_this_run);
    let work = last.and_then(|(checkpoint, age)| Some((checkpoint.whole()?.work.as_ref()?, age)));
    let Some((work, age)) = work else {
        return Seconds::ZERO;
    };
    let carried_us = match &task.process {
        Some(process) => work.before(process),
        None if this_run > age => work.carried_us,
        None => work.worked_us,
    };
    Seconds::new(Duration::from_micros(carried_us).as_secs_f64()).unwrap_or(Seconds::MAX)
}

/// Checks that no id is too long: answers repeat them.
pub(super) fn check_ids(pointer: &str, tasks: &[Task<'_>]) -> Result<(), RequestProblem> {
    let most = limits::ID_BYTES;
    let Some(at) = tasks.iter().position(|task| task.id.len() > most) else {
        return Ok(());
    };
    let detail = format!("an id has at most {most} bytes");
    let pointer = format!("{pointer}/{at}/id");
    Err(RequestProblem::at(ProblemKind::Invalid, &pointer, detail))
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
    let id = asked.world.names().id(name);
    id.ok_or_else(|| no_node(pointer, name))
}

pub(super) fn no_node(pointer: &str, name: &str) -> RequestProblem {
    let detail = format!("there is no node {name:?}");
    RequestProblem::at(ProblemKind::UnknownNode, pointer, detail)
}
