//! Route `POST /v1/place`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use permafrost_api_types::figure::{Figure, Known};
use permafrost_api_types::place::{PlaceAnswer, PlaceRequest, Placed, PlacedOn, Placement};
use permafrost_api_types::problem::ProblemKind;
use permafrost_api_types::text::Text;
use permafrost_scheduling::NodeId;
use permafrost_scheduling::figure::{self, Missing, What};
use permafrost_scheduling::place::PlacementRequest;
use permafrost_scheduling::quantity::Bytes;
use permafrost_scheduling::size::{DumpKind, Memory};

use crate::body::{Asked, Stop, answered, parse, to_json};
use crate::caller::Caller;
use crate::problem::RequestProblem;
use crate::responses::Unread;
use crate::{Api, limits, say, tasks};

/// Chooses the nodes for dumps of a size, or of jobs, and for their copies.
#[utoipa::path(
    post,
    path = "/v1/place",
    tag = "costs",
    operation_id = "place",
    request_body(content = PlaceRequest, example = json!({
        "placements": [{"size_bytes": 5_000_000_000_i64, "copies": 2, "local": "a"}]
    })),
    responses(
        (status = 200, description = "Nodes for each, the best first.", body = PlaceAnswer),
        Unread
    )
)]
pub(crate) async fn place(
    State(api): State<Arc<Api>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, RequestProblem> {
    answered(api, caller, request, answer).await
}

fn answer(asked: &Asked<'_>, body: &[u8]) -> Result<Vec<u8>, Stop> {
    let request: PlaceRequest<'_> = parse(body)?;
    for (index, placement) in request.placements.iter().enumerate() {
        check(index, placement)?;
    }
    let copies = request
        .placements
        .iter()
        .map(|placement| placement.copies as usize);
    let count: usize = copies.sum();
    asked.answers("/placements", count)?;
    let placements = request.placements.iter().enumerate();
    let answers = placements
        .map(|(index, placement)| placed(asked, index, placement))
        .collect::<Result<Vec<_>, _>>()?;
    let answer = PlaceAnswer {
        answered_by: asked.world.own_name().into(),
        age_s: asked.world.age_s(),
        answers,
    };
    Ok(to_json(
        &answer,
        256 + request.placements.len() * 120 + count * 80,
    )?)
}

fn check(index: usize, placement: &Placement<'_>) -> Result<(), RequestProblem> {
    if !(1..=limits::COPIES).contains(&placement.copies) {
        let (copies, most) = (placement.copies, limits::COPIES);
        let detail = format!("{copies} is no number of copies: 1 to {most} is");
        let pointer = format!("/placements/{index}/copies");
        return Err(RequestProblem::at(ProblemKind::Invalid, pointer, detail));
    }
    if placement.size_bytes.is_none()
        && placement.job.is_none()
        && placement.resident_bytes.is_none()
    {
        let detail =
            "give size_bytes, or job, or resident_bytes: there is nothing to tell its size by";
        return Err(RequestProblem::at(
            ProblemKind::Invalid,
            format!("/placements/{index}"),
            detail,
        ));
    }
    Ok(())
}

fn placed<'a>(
    asked: &Asked<'a>,
    index: usize,
    placement: &Placement<'_>,
) -> Result<Placed<'a>, RequestProblem> {
    let world = asked.world;
    let local = match &placement.local {
        Some(name) => {
            let pointer = format!("/placements/{index}/local");
            Some(tasks::named(asked, &pointer, name)?)
        }
        None => None,
    };
    let all = |field: &str, names: &[Text<'_>]| {
        let ids = names.iter().enumerate().map(|(at, name)| {
            tasks::named(asked, &format!("/placements/{index}/{field}/{at}"), name)
        });
        ids.collect::<Result<Vec<NodeId>, RequestProblem>>()
    };
    let mut holders = all("holders", &placement.holders)?;
    // A holder that is named twice has one copy.
    holders.sort_unstable();
    holders.dedup();
    let without = all("without", &placement.without)?;
    let size = size(asked, placement);
    let figure::Figure::Known(estimate) = size else {
        return Ok(Placed {
            size_bytes: say::bytes(&size, world.age_s()),
            nodes: Vec::new(),
            missing: placement.copies,
            unranked: 0,
        });
    };
    let chosen = world.places().place(&PlacementRequest {
        // Enough room for the p95 of the size.
        size: estimate.p95.max(estimate.p50),
        copies: placement.copies as usize,
        local,
        holders: &holders,
        without: &without,
    });
    let nodes = chosen.nodes.iter().map(|placed| PlacedOn {
        node: world.name(placed.node).into(),
        arrives_in_s: say::rounded(placed.arrives_in.value()),
        durable: placed.durable,
    });
    Ok(Placed {
        size_bytes: if placement.size_bytes.is_some() {
            // A figure of the request has no age.
            Figure::Known(Known {
                p50: estimate.p50.count(),
                p95: estimate.p95.count(),
                age_s: 0.0,
                samples: 0,
            })
        } else {
            say::bytes(&size, world.age_s())
        },
        nodes: nodes.collect(),
        missing: u32::try_from(chosen.missing).unwrap_or(u32::MAX),
        unranked: u32::try_from(chosen.unranked).unwrap_or(u32::MAX),
    })
}

/// Returns the bytes that the dump is expected to store.
fn size(asked: &Asked<'_>, placement: &Placement<'_>) -> figure::Figure<Bytes> {
    if let Some(size) = placement.size_bytes {
        return figure::Figure::given(size);
    }
    let job = placement
        .job
        .as_deref()
        .filter(|job| asked.caller.sees(job));
    let last = job.and_then(|job| asked.world.jobs()?.get(job)?.last());
    let then = last.map(|checkpoint| Bytes::new(checkpoint.memory_bytes));
    let memory = Memory {
        resident: placement.resident_bytes.or(then),
        dirty: None,
    };
    if memory.resident.is_none() {
        return Missing::NotGiven { what: What::Memory }.into();
    }
    let program = placement.program.as_deref().unwrap_or_default();
    let source = &asked.api.source;
    match source.predict(job.unwrap_or_default(), program, DumpKind::Full, &memory) {
        Ok(prediction) => prediction.size.into(),
        Err(why) => why.into(),
    }
}
