//! Routes `GET /healthz` and `GET /readyz`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use permafrost_api_types::problem::Problem;

use crate::Api;
use crate::body::no_world;
use crate::problem::RequestProblem;

/// The process answers.
#[utoipa::path(
    get,
    path = "/healthz",
    tag = "health",
    operation_id = "healthz",
    responses((status = 200, description = "It answers.", body = str, content_type = "text/plain")),
    security(())
)]
pub(crate) async fn healthz() -> &'static str {
    "ok\n"
}

/// The node takes dumps, and has made its first snapshot.
#[utoipa::path(
    get,
    path = "/readyz",
    tag = "health",
    operation_id = "readyz",
    responses(
        (status = 200, description = "It does.", body = str, content_type = "text/plain"),
        (status = 503, description = "Not now.", body = Problem, content_type = "application/problem+json"),
    ),
    security(())
)]
pub(crate) async fn readyz(State(api): State<Arc<Api>>) -> Response {
    if api.world().is_none() {
        return no_world().into_response();
    }
    match api.source.ready() {
        Ok(()) => "ready\n".into_response(),
        Err(why) => RequestProblem::for_now(why, 5).into_response(),
    }
}
