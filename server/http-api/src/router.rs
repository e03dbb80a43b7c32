//! The router of the API: its routes, and the permission that each needs.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use permafrost_api_types::problem::ProblemKind;

use crate::caller::{Caller, Scope};
use crate::problem::{self, RequestProblem};
use crate::routes::{
    activity, contents, estimate, events, figures, health, jobs, nodes, place, preempt, reserve,
    resume,
};
use crate::{Api, openapi};

/// Returns the router with all routes. Each request must have its caller in the extensions, as a [`Caller`];
/// only the health routes require no scope.
pub fn router(api: Arc<Api>) -> Router {
    let read = Router::new()
        .route("/v1/nodes", get(nodes::nodes))
        .route("/v1/estimate", post(estimate::estimate))
        .route("/v1/preempt", post(preempt::preempt))
        .route("/v1/resume", post(resume::resume))
        .route("/v1/place", post(place::place))
        .route("/v1/jobs", get(jobs::jobs))
        .route("/v1/checkpoints", get(jobs::checkpoints))
        .route("/v1/activity", get(activity::activity))
        .route("/v1/contents", get(contents::contents))
        .route("/v1/events", get(events::events))
        .route("/openapi.json", get(openapi::document))
        .route_layer(from_fn(may_read));
    let reserve = Router::new()
        .route("/v1/reserve", post(reserve::reserve))
        .route("/v1/reserve/{token}", delete(reserve::cancel))
        .route_layer(from_fn(may_reserve));
    let operate = Router::new()
        .route("/v1/figures", put(figures::install))
        .route_layer(from_fn(may_operate));
    let health = Router::new()
        .route("/healthz", get(health::healthz))
        .route("/readyz", get(health::readyz));
    read.merge(reserve)
        .merge(operate)
        .merge(health)
        .layer(from_fn(problem::named))
        .with_state(api)
}

async fn may_read(request: Request, next: Next) -> Response {
    checked(Scope::Read, request, next).await
}

async fn may_reserve(request: Request, next: Next) -> Response {
    checked(Scope::Reserve, request, next).await
}

async fn may_operate(request: Request, next: Next) -> Response {
    checked(Scope::Operate, request, next).await
}

/// Lets permitted requests pass, and marks the answer with the scope for the audit log. Public for the routes
/// beside these.
pub async fn checked(scope: Scope, request: Request, next: Next) -> Response {
    let mut response = match request.extensions().get::<Caller>() {
        Some(caller) if caller.may(scope) => next.run(request).await,
        Some(caller) => {
            let detail = format!(
                "{} may {}; this takes the scope {scope}",
                caller.name, caller.scopes
            );
            RequestProblem::new(ProblemKind::Forbidden, detail).into_response()
        }
        None => RequestProblem::new(
            ProblemKind::Unauthenticated,
            "show a token, or a certificate of the cluster",
        )
        .into_response(),
    };
    response.extensions_mut().insert(scope);
    response
}
