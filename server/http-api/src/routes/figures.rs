//! Route `PUT /v1/figures`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use permafrost_api_types::figures::StartFigures;

use super::asking::ask;
use crate::Api;
use crate::body::{parse, read};
use crate::problem::RequestProblem;
use crate::responses::Unread;

/// Sets the figures that the node which answers starts from, until it has measured its own.
#[utoipa::path(
    put,
    path = "/v1/figures",
    tag = "nodes",
    operation_id = "figures",
    request_body(content = StartFigures, example = json!({
        "write": [{"size_bytes": 1_073_741_824, "p50_bytes_per_s": 1.6e9, "p95_bytes_per_s": 1.2e9}],
        "read": [{"size_bytes": 1_073_741_824, "p50_bytes_per_s": 2.4e9}],
        "dump_start": {"p50_s": 0.05, "p95_s": 0.09}
    })),
    responses(
        (status = 204, description = "They are what it starts from."),
        Unread
    ),
    security((), ("bearer" = ["operate"]), ("mtls" = ["operate"]))
)]
pub(crate) async fn install(
    State(api): State<Arc<Api>>,
    request: Request,
) -> Result<StatusCode, RequestProblem> {
    let body = read(request).await?;
    let figures: StartFigures = parse(&body)?;
    ask(&api, move |source| source.install(&figures)).await?;
    Ok(StatusCode::NO_CONTENT)
}
