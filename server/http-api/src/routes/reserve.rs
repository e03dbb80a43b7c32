//! Routes `POST /v1/reserve` and `DELETE /v1/reserve/{token}`.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::{Extension, Json};
use permafrost_api_types::problem::{Problem, ProblemKind};
use permafrost_api_types::reserve::{Reservation, ReserveRequest};

use super::asking::ask;
use crate::body::{no_world, parse, read};
use crate::caller::Caller;
use crate::problem::RequestProblem;
use crate::responses::{Unasked, Unread};
use crate::{Api, limits};

/// Longest token that is passed on, bytes.
const TOKEN_BYTES: usize = 200;

/// Reserves a place in a node's queue, for a dump or a restore that will come and present the token.
#[utoipa::path(
    post,
    path = "/v1/reserve",
    tag = "queues",
    operation_id = "reserve",
    request_body(content = ReserveRequest, example = json!({
        "node": "a", "direction": "write", "bytes": 5_000_000_000_i64, "priority": 9, "deadline_s": 60
    })),
    responses(
        (status = 200, description = "The place, and the token that takes it.", body = Reservation),
        (status = 409, description = "The queue is full.", body = Problem, content_type = "application/problem+json"),
        Unread
    ),
    security((), ("bearer" = ["reserve"]), ("mtls" = ["reserve"]))
)]
pub(crate) async fn reserve(
    State(api): State<Arc<Api>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<Reservation>, RequestProblem> {
    if api.booked.count(&caller.name) >= limits::CALLER_RESERVATIONS {
        let most = limits::CALLER_RESERVATIONS;
        let detail = format!("this caller has {most} reservations, which is the limit");
        return Err(RequestProblem::for_now(detail, 10));
    }
    let body = read(request).await?;
    let mut wanted: ReserveRequest = parse(&body)?;
    wanted.namespace = charged(&caller, wanted.namespace)?;
    if let Some(name) = &wanted.node {
        let world = api.world().ok_or_else(no_world)?;
        let node = world.names().id(name).and_then(|id| world.node(id));
        let refused = |detail| {
            Err(RequestProblem::at(
                ProblemKind::UnknownNode,
                "/node",
                detail,
            ))
        };
        match node {
            None => return refused(format!("there is no node {name:?}")),
            Some(node) if !node.restores() => {
                return Err(RequestProblem::for_now(
                    format!("the node {name:?} is not there"),
                    10,
                ));
            }
            Some(_) => {}
        }
    }
    let owner = caller.clone();
    let kept = ask(&api, move |source| source.reserve(&owner, &wanted)).await?;
    let lapses_in = Duration::try_from_secs_f64(kept.lapses_in_s).unwrap_or_default();
    api.booked.add(&caller.name, &kept.token, lapses_in);
    Ok(Json(kept))
}

/// Returns the namespace whose quota a reservation counts in: one of the caller's.
fn charged(caller: &Caller, named: Option<String>) -> Result<Option<String>, RequestProblem> {
    let wrong = |detail: String| RequestProblem::at(ProblemKind::Invalid, "/namespace", detail);
    match named {
        Some(named) if caller.sees(&format!("{named}/any")) && !named.contains('/') => {
            Ok(Some(named))
        }
        Some(named) => Err(wrong(format!("{named:?} is no namespace of the caller"))),
        None if caller.namespaces.is_all() => Ok(None),
        None => match caller.namespaces.only() {
            Some(only) => Ok(Some(only.to_owned())),
            None => Err(wrong(
                "the caller has several namespaces: say which".to_owned(),
            )),
        },
    }
}

/// Cancels a reservation.
#[utoipa::path(
    delete,
    path = "/v1/reserve/{token}",
    tag = "queues",
    operation_id = "cancel",
    params(("token" = String, Path, description = "What `reserve` answered.")),
    responses(
        (status = 204, description = "It is free again."),
        (status = 404, description = "It was taken, has lapsed, or never was.", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "It cannot be a token.", body = Problem, content_type = "application/problem+json"),
        Unasked
    ),
    security((), ("bearer" = ["reserve"]), ("mtls" = ["reserve"]))
)]
pub(crate) async fn cancel(
    State(api): State<Arc<Api>>,
    token: Result<Path<String>, axum::extract::rejection::PathRejection>,
) -> Result<StatusCode, RequestProblem> {
    let Ok(Path(token)) = token else {
        return Err(RequestProblem::at(
            ProblemKind::Invalid,
            "path:token",
            "not UTF-8",
        ));
    };
    if token.len() > TOKEN_BYTES {
        let detail = format!("longer than {TOKEN_BYTES} bytes");
        return Err(RequestProblem::at(
            ProblemKind::Invalid,
            "path:token",
            detail,
        ));
    }
    let given = token.clone();
    ask(&api, move |source| source.cancel(&token)).await?;
    api.booked.remove(&given);
    Ok(StatusCode::NO_CONTENT)
}
