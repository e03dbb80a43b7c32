//! Route `GET /v1/events`.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::sse::{Event as Line, KeepAlive, Sse};
use futures_util::stream::{self, Stream};
use permafrost_api_types::events::ApiEvent;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use crate::caller::Caller;
use crate::problem::RequestProblem;
use crate::responses::Unasked;
use crate::shares::Share;
use crate::{Api, limits};

/// Streams changes as they happen. Only those after the connection; a reader that is too slow gets the number
/// of missed events.
#[utoipa::path(
    get,
    path = "/v1/events",
    tag = "jobs",
    operation_id = "events",
    responses(
        (status = 200, description = "Server-sent events: `event` is the kind, `data` one of these as JSON.", body = ApiEvent, content_type = "text/event-stream"),
        Unasked
    )
)]
pub(crate) async fn events(
    State(api): State<Arc<Api>>,
    Extension(caller): Extension<Caller>,
) -> Result<Sse<impl Stream<Item = Result<Line, Infallible>>>, RequestProblem> {
    let turn = api.readers.take(&caller.name).ok_or_else(|| {
        let (own, most) = (limits::CALLER_EVENT_READERS, limits::EVENT_READERS);
        let detail = format!("{most} streams of events are open, or {own} of this caller");
        RequestProblem::for_now(detail, 10)
    })?;
    let reader = Reader {
        events: api.events.subscribe(),
        caller,
        _turn: turn,
    };
    // The API itself lives as long as the daemon: a stream ends when the reader goes, or the daemon.
    let lines = stream::unfold(reader, |mut reader| async move {
        let event = reader.next().await?;
        // An event is strings and numbers, which serialize.
        let data = serde_json::to_string(&event).unwrap_or_default();
        let line = Line::default().event(event.name()).data(data);
        Some((Ok(line), reader))
    });
    let alive = KeepAlive::new().interval(limits::KEEP_ALIVE);
    Ok(Sse::new(lines).keep_alive(alive))
}

struct Reader {
    events: Receiver<ApiEvent>,
    caller: Caller,
    _turn: Share,
}

impl Reader {
    async fn next(&mut self) -> Option<ApiEvent> {
        loop {
            let event = match self.events.recv().await {
                Ok(event) => event,
                Err(RecvError::Lagged(missed)) => ApiEvent::Missed { missed },
                Err(RecvError::Closed) => return None,
            };
            if self.may_see(&event) {
                return Some(event);
            }
        }
    }

    fn may_see(&self, event: &ApiEvent) -> bool {
        match event {
            ApiEvent::Checkpoint { job, .. } | ApiEvent::Removed { job, .. } => {
                self.caller.sees(job)
            }
            ApiEvent::Node { .. } | ApiEvent::Queue { .. } | ApiEvent::Missed { .. } => true,
        }
    }
}
