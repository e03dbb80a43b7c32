//! Route `GET /v1/activity`.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use permafrost_api_types::activity::ActivityAnswer;

use super::asking::ask;
use crate::Api;
use crate::caller::Caller;
use crate::problem::RequestProblem;
use crate::responses::Unasked;
use crate::source::Activity;

/// Tells what the node that answers is doing: dumps, restores, copies from other nodes, repair where it leads it; and
/// what it predicted of the last dumps and restores.
#[utoipa::path(
    get,
    path = "/v1/activity",
    tag = "nodes",
    operation_id = "activity",
    responses(
        (status = 200, description = "Activity of this node.", body = ActivityAnswer),
        Unasked
    )
)]
pub(crate) async fn activity(
    State(api): State<Arc<Api>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<ActivityAnswer>, RequestProblem> {
    let activity: Activity = ask(&api, |source| Ok(source.activity())).await?;
    Ok(Json(activity.told_to(&caller)))
}
