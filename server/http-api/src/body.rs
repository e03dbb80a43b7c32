//! Reads a request's body up to a limit, parses it with the place of each error, and has it answered on a
//! suitable thread.

use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use axum::body::{Bytes, to_bytes};
use axum::extract::Request;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use permafrost_api_types::batch::TOO_MANY;
use permafrost_api_types::problem::ProblemKind;
use serde::{Deserialize, Serialize};
use serde_path_to_error::Segment;

use super::caller::Caller;
use super::problem::RequestProblem;
use super::world::{Jobs, World};
use super::{Api, limits};

/// Request context from which an answer is made.
pub(super) struct Asked<'a> {
    pub(super) api: &'a Api,
    pub(super) world: &'a World,
    pub(super) caller: &'a Caller,
    /// True on a thread that may take long, which is not one of the runtime's.
    pub(super) has_time: bool,
    /// Time at which the request came.
    pub(super) since: Instant,
}

/// Reason why there is no answer.
pub(super) enum Stop {
    Failed(RequestProblem),
    /// The answer takes too long for this thread.
    Long,
    /// A checkpoint that is not in the snapshot may have come since the checkpoints were listed.
    Unlisted,
}

impl From<RequestProblem> for Stop {
    fn from(failure: RequestProblem) -> Self {
        Self::Failed(failure)
    }
}

impl Asked<'_> {
    /// Checks the number of answers that the request leads to.
    pub(super) fn answers(&self, pointer: &str, count: usize) -> Result<(), Stop> {
        if count > limits::ANSWERS {
            let most = limits::ANSWERS;
            let detail = format!("{count} answers would follow from it; there are {most} at most");
            return Err(RequestProblem::at(ProblemKind::TooMany, pointer, detail).into());
        }
        if count > limits::SHORT_ANSWERS && !self.has_time {
            return Err(Stop::Long);
        }
        Ok(())
    }

    /// Returns the checkpoints, listed after the request came.
    pub(super) fn jobs(&self) -> Result<&Jobs, Stop> {
        let jobs = self.world.jobs();
        let jobs = jobs.filter(|jobs| self.api.shows(jobs, self.since));
        jobs.ok_or(Stop::Unlisted)
    }
}

/// Function that makes an answer from a body.
pub(super) type Answer = fn(&Asked<'_>, &[u8]) -> Result<Vec<u8>, Stop>;

/// Reads the body and makes the answer: here if the body is short, else on another thread.
pub(super) async fn answered(
    api: Arc<Api>,
    caller: Caller,
    request: Request,
    answer: Answer,
) -> Result<Response, RequestProblem> {
    let since = Instant::now();
    let body = read(request).await?;
    let turn = match api.source.is_moving() {
        true => Some(api.pace.turn().await),
        false => None,
    };
    let begun = Instant::now();
    let world = api.world().ok_or_else(no_world)?;
    let mut question = Question {
        api,
        world,
        caller,
        since,
        body,
        answer,
    };
    let mut made = question.answered().await;
    if let Some(turn) = turn {
        turn.over(Instant::now(), begun.elapsed());
    }
    if matches!(made, Err(Stop::Unlisted)) {
        question.world = question.api.listed_since(since).await?;
        made = question.answered().await;
    }
    match made {
        Ok(json) => Ok(json_response(json)),
        Err(Stop::Failed(failure)) => Err(failure),
        Err(Stop::Long | Stop::Unlisted) => Err(not_made()),
    }
}

/// A request that was read.
#[derive(Clone)]
struct Question {
    api: Arc<Api>,
    world: Arc<World>,
    caller: Caller,
    since: Instant,
    body: Bytes,
    answer: Answer,
}

impl Question {
    async fn answered(&self) -> Result<Vec<u8>, Stop> {
        if self.body.len() <= limits::SHORT_BODY_BYTES {
            match self.make(false) {
                Err(Stop::Long) => {}
                made => return made,
            }
        }
        let long = Arc::clone(&self.api.long);
        let turn = tokio::time::timeout(limits::LONG_PATIENCE, long.acquire_owned()).await;
        let Ok(Ok(permit)) = turn else {
            return Err(RequestProblem::for_now("other long batches are being answered", 5).into());
        };
        let question = self.clone();
        let made = tokio::task::spawn_blocking(move || {
            let made = question.make(true);
            drop(permit);
            made
        });
        made.await.unwrap_or_else(|_| Err(not_made().into()))
    }

    fn make(&self, has_time: bool) -> Result<Vec<u8>, Stop> {
        let asked = Asked {
            api: &self.api,
            world: &self.world,
            caller: &self.caller,
            has_time,
            since: self.since,
        };
        // The panic hook has logged the place.
        catch_unwind(AssertUnwindSafe(|| (self.answer)(&asked, &self.body)))
            .unwrap_or_else(|_| Err(not_made().into()))
    }
}

fn not_made() -> RequestProblem {
    RequestProblem::new(ProblemKind::Internal, "the answer could not be made")
}

/// Returns the failure for requests before the first snapshot.
pub(super) fn no_world() -> RequestProblem {
    RequestProblem::for_now(
        "the node has just started, and has not looked around yet",
        1,
    )
}

/// Returns a JSON response.
pub(super) fn json_response(json: Vec<u8>) -> Response {
    let json_type = HeaderValue::from_static("application/json");
    ([(CONTENT_TYPE, json_type)], json).into_response()
}

/// Serializes an answer to JSON, into a buffer of `expected_bytes`. Structs of strings and numbers always
/// serialize.
pub(super) fn to_json(
    answer: &impl Serialize,
    expected_bytes: usize,
) -> Result<Vec<u8>, RequestProblem> {
    let mut json = Vec::with_capacity(expected_bytes);
    match serde_json::to_writer(&mut json, answer) {
        Ok(()) => Ok(json),
        Err(error) => Err(RequestProblem::new(
            ProblemKind::Internal,
            error.to_string(),
        )),
    }
}

/// Reads a body whose content type is JSON.
pub(super) async fn read(request: Request) -> Result<Bytes, RequestProblem> {
    check_media_type(request.headers())?;
    let too_large = || {
        let most = limits::BODY_BYTES;
        RequestProblem::new(
            ProblemKind::TooLarge,
            format!("a body has at most {most} bytes; ask in several batches"),
        )
    };
    let length = request.headers().get(CONTENT_LENGTH);
    let declared = length.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|declared| declared > limits::BODY_BYTES as u64) {
        return Err(too_large());
    }
    let body = request.into_body();
    match tokio::time::timeout(limits::BODY_TIME, to_bytes(body, limits::BODY_BYTES)).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(error)) if is_length_limit(&error) => Err(too_large()),
        Ok(Err(error)) => Err(RequestProblem::new(
            ProblemKind::NotJson,
            format!("the body did not come: {error}"),
        )),
        Err(_) => Err(RequestProblem::new(
            ProblemKind::NotJson,
            format!("the body did not come within {:?}", limits::BODY_TIME),
        )),
    }
}

fn is_length_limit(error: &axum::Error) -> bool {
    use std::error::Error;
    let limit = error
        .source()
        .map(|source| source.is::<http_body_util::LengthLimitError>());
    limit.unwrap_or(false)
}

fn check_media_type(headers: &HeaderMap) -> Result<(), RequestProblem> {
    let given = headers
        .get(CONTENT_TYPE)
        .and_then(|given| given.to_str().ok());
    let essence = given
        .and_then(|given| given.split(';').next())
        .map(str::trim);
    if essence.is_some_and(|essence| essence.eq_ignore_ascii_case("application/json")) {
        return Ok(());
    }
    let given = given.unwrap_or("nothing");
    Err(RequestProblem::new(
        ProblemKind::MediaType,
        format!("the body has to be said to be application/json, not {given}"),
    ))
}

/// Parses a body. Only if that fails, it is parsed once more with the places of all fields, to report the place
/// of the error: to keep track of them takes longer than the parsing.
pub(super) fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, RequestProblem> {
    // One UTF-8 check of the whole body is quicker than one for each name.
    let read = match std::str::from_utf8(body) {
        Ok(text) => serde_json::from_str(text),
        Err(_) => serde_json::from_slice(body),
    };
    read.map_err(|error| {
        let mut json = serde_json::Deserializer::from_slice(body);
        match serde_path_to_error::deserialize::<_, T>(&mut json) {
            Err(located) => wrong(body, located.path(), located.inner()),
            // There are bytes after the value.
            Ok(_) => not_json(&error),
        }
    })
}

fn not_json(error: &serde_json::Error) -> RequestProblem {
    RequestProblem::new(ProblemKind::NotJson, error.to_string())
}

fn wrong(
    body: &[u8],
    path: &serde_path_to_error::Path,
    error: &serde_json::Error,
) -> RequestProblem {
    let text = error.to_string();
    // serde's "… at line 1 column 17" is left out: the pointer is more precise.
    let detail = text
        .rfind(" at line ")
        .map_or(text.as_str(), |at| &text[..at]);
    if error.is_data() {
        if detail.starts_with(TOO_MANY) {
            return RequestProblem::at(ProblemKind::TooMany, pointer(path), detail);
        }
        return RequestProblem::at(ProblemKind::Invalid, pointer(path), detail);
    }
    if detail == "number out of range" {
        return RequestProblem::at(
            ProblemKind::Invalid,
            pointer(path),
            "a number that is far too large",
        );
    }
    match no_number(body, error) {
        Some(word) => {
            let detail = format!("{word} is no number in JSON, and none here");
            RequestProblem::at(ProblemKind::Invalid, pointer(path), detail)
        }
        None => not_json(error),
    }
}

/// Returns the word that some languages write for floats that are no numbers, if it stands where the parser
/// stopped.
fn no_number<'a>(body: &'a [u8], error: &serde_json::Error) -> Option<&'a str> {
    let line = body
        .split(|&byte| byte == b'\n')
        .nth(error.line().checked_sub(1)?)?;
    let at = error.column().saturating_sub(1);
    for start in [at, at.saturating_sub(1)] {
        let rest = line.get(start..)?;
        for word in [
            "NaN",
            "nan",
            "-NaN",
            "-nan",
            "Infinity",
            "-Infinity",
            "inf",
            "-inf",
        ] {
            if rest.starts_with(word.as_bytes()) {
                return std::str::from_utf8(rest.get(..word.len())?).ok();
            }
        }
    }
    None
}

/// Formats a path as a JSON pointer (RFC 6901).
fn pointer(path: &serde_path_to_error::Path) -> String {
    let mut pointer = String::new();
    for segment in path {
        match segment {
            Segment::Seq { index } => {
                // Writing to a string does not fail.
                let _ = write!(pointer, "/{index}");
            }
            Segment::Map { key } => push(&mut pointer, key),
            Segment::Enum { variant } => push(&mut pointer, variant),
            Segment::Unknown => {}
        }
    }
    pointer
}

fn push(pointer: &mut String, key: &str) {
    pointer.push('/');
    pointer.push_str(&key.replace('~', "~0").replace('/', "~1"));
}
