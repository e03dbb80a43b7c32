//! Routes `GET /v1/jobs` and `GET /v1/checkpoints`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::Uri;
use axum::{Extension, Json};

use permafrost_api_types::jobs::{CheckpointsAnswer, JobsAnswer, ListQuery};
use permafrost_api_types::problem::{Problem, ProblemKind};
use permafrost_protocol::control::Checkpoint;
use permafrost_protocol::manifest::CheckpointRef;
use permafrost_scheduling::figure::{Figure, Missing, What};
use permafrost_scheduling::quantity::Bytes;
use permafrost_scheduling::size::{DumpKind, Memory};

use super::paging;
use crate::body::no_world;
use crate::caller::Caller;
use crate::problem::RequestProblem;
use crate::responses::Unasked;
use crate::world::{Job, Jobs, World};
use crate::{Api, say};

/// Lists jobs: the age, size and holders of the last checkpoint of each, and the expected size of the next.
#[utoipa::path(
    get,
    path = "/v1/jobs",
    tag = "jobs",
    operation_id = "jobs",
    params(ListQuery),
    responses(
        (status = 200, description = "Jobs, by name.", body = JobsAnswer),
        (status = 404, description = "There is no job of that name.", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "A parameter is wrong.", body = Problem, content_type = "application/problem+json"),
        Unasked
    )
)]
pub(crate) async fn jobs(
    State(api): State<Arc<Api>>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
) -> Result<Json<JobsAnswer>, RequestProblem> {
    let query: ListQuery = paging::query(&uri)?;
    let limit = paging::limit(query.limit)?;
    let world = seen(&api, &caller, query.job.as_deref()).await?;
    let listed = listed(&world)?;
    let (page, next) = match &query.job {
        Some(name) => (vec![one(listed, &caller, name)?], None),
        None => {
            let seen = listed
                .after(query.after.as_deref())
                .filter(|(name, _)| caller.sees(name));
            paging::page(seen, limit, |(name, _)| (*name).to_owned())
        }
    };
    let jobs = page
        .into_iter()
        .map(|(name, job)| told(&api, &world, listed, name, job));
    Ok(Json(JobsAnswer {
        answered_by: world.own_name().to_owned(),
        age_s: say::rounded(listed.age().as_secs_f64()),
        jobs: jobs.collect(),
        next,
    }))
}

/// Lists checkpoints, by job and generation.
#[utoipa::path(
    get,
    path = "/v1/checkpoints",
    tag = "jobs",
    operation_id = "checkpoints",
    params(ListQuery),
    responses(
        (status = 200, description = "Checkpoints.", body = CheckpointsAnswer),
        (status = 404, description = "There is no job of that name.", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "A parameter is wrong.", body = Problem, content_type = "application/problem+json"),
        Unasked
    )
)]
pub(crate) async fn checkpoints(
    State(api): State<Arc<Api>>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
) -> Result<Json<CheckpointsAnswer>, RequestProblem> {
    let query: ListQuery = paging::query(&uri)?;
    let limit = paging::limit(query.limit)?;
    let world = seen(&api, &caller, query.job.as_deref()).await?;
    let listed = listed(&world)?;
    let after = match &query.after {
        Some(after) => Some(reference(after)?),
        None => None,
    };
    let is_after = |checkpoint: &Checkpoint| match &after {
        Some((job, generation)) => {
            (checkpoint.job.as_str(), checkpoint.generation) > (job.as_str(), *generation)
        }
        None => true,
    };
    let name = |checkpoint: &&Checkpoint| name(checkpoint);
    let (page, next) = match &query.job {
        Some(job) => {
            let (_, job) = one(listed, &caller, job)?;
            let of_job = job
                .checkpoints
                .iter()
                .filter(|checkpoint| is_after(checkpoint));
            paging::page(of_job, limit, name)
        }
        None => {
            let from = after.as_ref().map_or("", |(job, _)| job.as_str());
            let seen = listed.from(from).filter(|(name, _)| caller.sees(name));
            let all = seen.flat_map(|(_, job)| &job.checkpoints);
            paging::page(all.filter(|checkpoint| is_after(checkpoint)), limit, name)
        }
    };
    let own = world.own_name();
    let checkpoints = page
        .into_iter()
        .map(|checkpoint| line(&world, listed, checkpoint));
    Ok(Json(CheckpointsAnswer {
        answered_by: own.to_owned(),
        age_s: say::rounded(listed.age().as_secs_f64()),
        checkpoints: checkpoints.collect(),
        next,
    }))
}

/// Returns the snapshot. If the requested `job` is missing from it, waits for a new listing, so that it is
/// missing only if it does not exist.
pub(super) async fn seen(
    api: &Api,
    caller: &Caller,
    job: Option<&str>,
) -> Result<Arc<World>, RequestProblem> {
    let since = Instant::now();
    let world = api.world().ok_or_else(no_world)?;
    match job {
        Some(job) if one(listed(&world)?, caller, job).is_err() => api.listed_since(since).await,
        _ => Ok(world),
    }
}

pub(super) fn listed(world: &World) -> Result<&Jobs, RequestProblem> {
    let not_yet = || RequestProblem::for_now("the store has not listed its checkpoints yet", 1);
    world.jobs().ok_or_else(not_yet)
}

pub(super) fn one<'a>(
    jobs: &'a Jobs,
    caller: &Caller,
    name: &'a str,
) -> Result<(&'a str, &'a Job), RequestProblem> {
    let job = jobs.get(name).filter(|_| caller.sees(name));
    let missing =
        || RequestProblem::new(ProblemKind::NotFound, format!("there is no job {name:?}"));
    Ok((name, job.ok_or_else(missing)?))
}

fn reference(after: &str) -> Result<(String, u64), RequestProblem> {
    let wrong = |detail: String| RequestProblem::at(ProblemKind::Invalid, "query:after", detail);
    let reference: CheckpointRef = after.parse().map_err(|error| wrong(format!("{error}")))?;
    let generation = reference.generation;
    let no_generation = || wrong("JOB@GENERATION is what `next` answers".to_owned());
    Ok((reference.job.into(), generation.ok_or_else(no_generation)?))
}

fn name(checkpoint: &Checkpoint) -> String {
    format!("{}@{}", checkpoint.job, checkpoint.generation)
}

fn told(
    api: &Api,
    world: &World,
    jobs: &Jobs,
    name: &str,
    job: &Job,
) -> permafrost_api_types::jobs::Job {
    let last = job.last();
    let next = |dump| {
        let predicted = match last {
            None => Err(Missing::NotGiven { what: What::Memory }),
            Some(last) => {
                let memory = Memory {
                    resident: Some(Bytes::new(last.memory_bytes)),
                    dirty: None,
                };
                api.source.predict(name, "", dump, &memory)
            }
        };
        let figure = match predicted {
            Ok(prediction) => Figure::Known(prediction.size),
            Err(why) => Figure::Unknown { why },
        };
        say::bytes(&figure, 0.0)
    };
    permafrost_api_types::jobs::Job {
        job: name.to_owned(),
        checkpoints: job.checkpoints.len() as u64,
        last: last.map(|last| line(world, jobs, last)),
        next_full_bytes: next(DumpKind::Full),
        next_incremental_bytes: next(DumpKind::Incremental),
    }
}

fn line(
    world: &World,
    jobs: &Jobs,
    of: &Checkpoint,
) -> permafrost_api_types::jobs::ListedCheckpoint {
    let own = world.own_name();
    let is_away = |name: &&String| !world.is_live(name);
    permafrost_api_types::jobs::ListedCheckpoint {
        checkpoint: name(of),
        job: of.job.clone(),
        generation: of.generation,
        id: of.id.clone(),
        kind: of.kind.clone(),
        created_unix_ms: of.created_unix_ms,
        age_s: say::rounded(jobs.age_of(of).as_secs_f64()),
        memory_bytes: of.memory_bytes,
        zero_bytes: of.zero_bytes,
        stored_bytes: of.added_bytes,
        parent_generation: (of.parent_generation > 0).then_some(of.parent_generation),
        pinned: of.pinned,
        processes: of.processes,
        // A store without a cluster names no holders: it holds all checkpoints itself.
        holders: if of.nodes.is_empty() {
            vec![own.to_owned()]
        } else {
            of.nodes.clone()
        },
        copies_wanted: of.copies_wanted.max(1),
        worked_s: of
            .work
            .as_ref()
            .map(|work| say::rounded(Duration::from_micros(work.worked_us).as_secs_f64())),
        damaged: (!of.damaged.is_empty()).then(|| of.damaged.clone()),
        damaged_holders: of.damaged_nodes.clone(),
        away_holders: of.nodes.iter().filter(is_away).cloned().collect(),
        cold_holders: (of.cold.iter())
            .map(|copy| match copy.node.as_str() {
                "" => own.to_owned(),
                node => node.to_owned(),
            })
            .collect(),
    }
}
