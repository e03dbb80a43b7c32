//! Requests that the daemon itself has to answer: each on a thread that may block, and for a bounded time.

use std::sync::Arc;

use crate::problem::RequestProblem;
use crate::source::{Refusal, Source};
use crate::{Api, limits};

/// Passes a request to the daemon. A thread that does not return keeps its slot: the number of slots is
/// limited.
pub(super) async fn ask<T: Send + 'static>(
    api: &Api,
    question: impl FnOnce(&dyn Source) -> Result<T, Refusal> + Send + 'static,
) -> Result<T, RequestProblem> {
    let source = Arc::clone(&api.source);
    let asked = async {
        let turn = Arc::clone(&api.asking).acquire_owned().await.ok()?;
        let answer = tokio::task::spawn_blocking(move || {
            let answer = question(source.as_ref());
            drop(turn);
            answer
        });
        Some(answer.await)
    };
    match tokio::time::timeout(limits::ASKING_PATIENCE, asked).await {
        Ok(Some(Ok(answer))) => Ok(answer?),
        Ok(Some(Err(error))) => {
            tracing::error!(event = "api-request-panicked", %error, "a request to the daemon has panicked");
            Err(RequestProblem::for_now("the daemon could not answer", 5))
        }
        Ok(None) | Err(_) => Err(RequestProblem::for_now(
            "the daemon has not answered in time; it may still do what was asked",
            10,
        )),
    }
}
