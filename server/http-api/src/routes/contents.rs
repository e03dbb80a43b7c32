//! Route `GET /v1/contents`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::Uri;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use permafrost_api_types::contents::{
    ContentsAnswer, ContentsPages, ContentsQuery, StoredImage, StoredMapping, StoredProcess,
    StoredShared,
};
use permafrost_api_types::problem::{Problem, ProblemKind};
use permafrost_audit::AuditedRequest;
use permafrost_protocol::control::{
    Checkpoint, CheckpointContents, MappingContents, PageCounts, ProcessContents, request,
};
use permafrost_protocol::manifest::CheckpointRef;

use super::asking::ask;
use super::{jobs, paging};
use crate::caller::Caller;
use crate::problem::{Audited, RequestProblem};
use crate::responses::Unasked;
use crate::{Api, limits};

/// Describes a checkpoint: its processes and their mappings with what of them is stored, shared or zero, and its small
/// images. Decodes images and compares checksums; reads no page of memory. May wait for another node.
#[utoipa::path(
    get,
    path = "/v1/contents",
    tag = "jobs",
    operation_id = "contents",
    params(ContentsQuery),
    responses(
        (status = 200, description = "Processes in the order of their tree, mappings by address.", body = ContentsAnswer),
        (status = 404, description = "There is no such checkpoint or process.", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "A parameter is wrong, or there is more than is described at a time: ask for one process.", body = Problem, content_type = "application/problem+json"),
        (status = 500, description = "An image is damaged, or is not what its name says.", body = Problem, content_type = "application/problem+json"),
        Unasked
    )
)]
pub(crate) async fn contents(
    State(api): State<Arc<Api>>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
) -> Response {
    let query: ContentsQuery = match paging::query(&uri) {
        Ok(query) => query,
        Err(problem) => return problem.into_response(),
    };
    let of = request::Describe {
        checkpoint: query.checkpoint.clone(),
        with_parent: true,
        pid: query.pid.unwrap_or(0),
        ..request::Describe::default()
    };
    let event = AuditedRequest::of_control(&request::Body::Describe(of.clone()));
    let mut response = match answer(&api, &caller, &query, of).await {
        Ok(answer) => Json(answer).into_response(),
        Err(problem) => problem.into_response(),
    };
    response.extensions_mut().insert(Audited(event));
    response
}

async fn answer(
    api: &Api,
    caller: &Caller,
    query: &ContentsQuery,
    of: request::Describe,
) -> Result<ContentsAnswer, RequestProblem> {
    let wrong = |field: &str, detail: String| {
        RequestProblem::at(ProblemKind::Invalid, format!("query:{field}"), detail)
    };
    let limit = paging::limit(query.limit)?;
    if query.pid == Some(0) {
        return Err(wrong("pid", "0 is no process".to_owned()));
    }
    let after = match &query.after {
        Some(after) => Some(Cursor::read(after).ok_or_else(|| {
            let detail = "PID or PID:ADDRESS is what `next` answers";
            wrong("after", detail.to_owned())
        })?),
        None => None,
    };
    let reference: CheckpointRef =
        (query.checkpoint.parse()).map_err(|error| wrong("checkpoint", format!("{error}")))?;
    let world = jobs::seen(api, caller, Some(reference.job.as_str())).await?;
    let listed = jobs::listed(&world)?;
    jobs::one(listed, caller, reference.job.as_str())?;
    let checkpoint = listed.find(&reference).map(name);
    // A generation that was sealed since the listing is there, too: the daemon knows it.
    let of = request::Describe {
        checkpoint: checkpoint.unwrap_or_else(|| query.checkpoint.clone()),
        ..of
    };
    let turn = api.describing.take(&caller.name).ok_or_else(|| {
        let (own, most) = (limits::CALLER_CONTENTS, limits::CONTENTS_AT_ONCE);
        let detail = format!("{most} checkpoints are being described, or {own} for this caller");
        RequestProblem::for_now(detail, 1)
    })?;
    let own_name = world.own_name().to_owned();
    ask(api, move |source| {
        let contents = source.contents(&of)?;
        let answer = told(contents, own_name, after, limit);
        drop(turn);
        Ok(answer)
    })
    .await
}

fn name(of: &Checkpoint) -> String {
    format!("{}@{}", of.job, of.generation)
}

/// Place behind which a page of the reply begins: a mapping, or all mappings of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cursor {
    pid: u32,
    /// First address of the last mapping that was told; `None`: all were.
    start: Option<u64>,
}

impl Cursor {
    fn read(text: &str) -> Option<Self> {
        let (pid, start) = match text.split_once(':') {
            Some((pid, start)) => (pid, Some(u64::from_str_radix(start, 16).ok()?)),
            None => (text, None),
        };
        Some(Self {
            pid: pid.parse().ok()?,
            start,
        })
    }

    fn write(self) -> String {
        match self.start {
            Some(start) => format!("{}:{start:x}", self.pid),
            None => self.pid.to_string(),
        }
    }

    /// Returns the mappings of its process that come behind; `None` if all were told.
    fn rest(self, process: &ProcessContents) -> Option<&[MappingContents]> {
        let start = self.start?;
        let mappings = process.mappings.as_slice();
        let told = mappings.partition_point(|mapping| mapping.start <= start);
        mappings.get(told..).filter(|rest| !rest.is_empty())
    }
}

fn told(
    contents: CheckpointContents,
    answered_by: String,
    after: Option<Cursor>,
    limit: usize,
) -> ContentsAnswer {
    let record = contents.checkpoint.clone().unwrap_or_default();
    let mut processes = Vec::new();
    let mut next = None;
    let mut left = limit;
    let mut last = None;
    let begun = after.map(|after| {
        let of = |process: &ProcessContents| process.pid == after.pid;
        let place = contents.processes.iter().position(of);
        (place.unwrap_or(contents.processes.len()), after)
    });
    for (place, process) in contents.processes.iter().enumerate() {
        let rest = match begun {
            Some((begun, _)) if place < begun => None,
            Some((begun, after)) if place == begun => after.rest(process),
            _ => Some(process.mappings.as_slice()),
        };
        let Some(rest) = rest else { continue };
        if left == 0 {
            next = last;
            break;
        }
        let page = rest.get(..left.min(rest.len())).unwrap_or_default();
        processes.push(one_process(process, page));
        left = left.saturating_sub(page.len().max(1));
        last = Some(Cursor {
            pid: process.pid,
            start: None,
        });
        if page.len() < rest.len() {
            next = page.last().map(|mapping| Cursor {
                pid: process.pid,
                start: Some(mapping.start),
            });
            break;
        }
    }
    let is_first = after.is_none();
    let shown = |count: usize| if is_first { count.min(limit) } else { 0 };
    let shared = contents.shared_memory.iter();
    let images = contents.images.iter();
    ContentsAnswer {
        answered_by,
        checkpoint: name(&record),
        parent_generation: (record.parent_generation > 0).then_some(record.parent_generation),
        compared_with: contents.compared_with.as_ref().map(name),
        process_count: contents.processes.len() as u64,
        processes,
        shared_memory_count: contents.shared_memory.len() as u64,
        shared_memory: shared
            .take(shown(contents.shared_memory.len()))
            .map(|shared| StoredShared {
                id: format!("{:x}", shared.id),
                pages: pages(shared.pages),
            })
            .collect(),
        image_count: contents.images.len() as u64,
        images: images
            .take(shown(contents.images.len()))
            .map(|image| StoredImage {
                name: image.name.clone(),
                size_bytes: image.len_bytes,
            })
            .collect(),
        next: next.map(Cursor::write),
    }
}

fn one_process(process: &ProcessContents, page: &[MappingContents]) -> StoredProcess {
    StoredProcess {
        pid: process.pid,
        parent_pid: process.parent,
        program: process.program.clone(),
        executable: process.executable.clone(),
        threads: process.threads,
        open_files: process.files.len() as u64,
        pages: pages(process.pages),
        mapping_count: process.mappings.len() as u64,
        mappings: page
            .iter()
            .map(|mapping| StoredMapping {
                start: format!("{:x}", mapping.start),
                end: format!("{:x}", mapping.end),
                permissions: mapping.permissions.clone(),
                kind: mapping.kind.clone(),
                path: mapping.path.clone(),
                shared_memory: (mapping.shared_memory > 0)
                    .then(|| format!("{:x}", mapping.shared_memory)),
                pages: pages(mapping.pages),
            })
            .collect(),
    }
}

fn pages(counts: Option<PageCounts>) -> ContentsPages {
    let counts = counts.unwrap_or_default();
    ContentsPages {
        pages: counts.pages,
        stored_pages: counts.stored(),
        zero_pages: counts.zero,
        equal_pages: counts.equal,
        changed_pages: counts.changed,
        new_pages: counts.only_here,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, mappings: u64) -> ProcessContents {
        ProcessContents {
            pid,
            mappings: (0..mappings)
                .map(|n| MappingContents {
                    start: (n + 1) << 12,
                    end: (n + 2) << 12,
                    ..MappingContents::default()
                })
                .collect(),
            ..ProcessContents::default()
        }
    }

    #[test]
    fn pages_of_any_size_tell_each_mapping_once() {
        let contents = CheckpointContents {
            // In the order of a tree.
            processes: vec![process(9, 3), process(2, 5), process(4, 0), process(5, 1)],
            ..CheckpointContents::default()
        };
        for limit in 1..12 {
            let (mut after, mut seen, mut alone) = (None, Vec::new(), Vec::new());
            loop {
                let answer = told(contents.clone(), String::new(), after, limit);
                let rows: usize = (answer.processes.iter())
                    .map(|process| process.mappings.len().max(1))
                    .sum();
                assert!((1..=limit).contains(&rows), "{limit}: {rows}");
                for process in &answer.processes {
                    if process.mapping_count == 0 {
                        alone.push(process.pid);
                    }
                    let mappings = process.mappings.iter();
                    seen.extend(mappings.map(|mapping| (process.pid, mapping.start.clone())));
                }
                match answer.next {
                    Some(next) => after = Cursor::read(&next),
                    None => break,
                }
            }
            let all = [(9, 3), (2, 5), (5, 1)]
                .into_iter()
                .flat_map(|(pid, count)| {
                    (1..=count).map(move |n: u64| (pid, format!("{:x}", n << 12)))
                });
            assert_eq!(seen, all.collect::<Vec<_>>(), "{limit}");
            assert_eq!(alone, [4], "{limit}");
        }
        for bad in ["", "x", "1:", "1:g", ":1", "-1"] {
            assert_eq!(Cursor::read(bad), None, "{bad}");
        }
    }
}
