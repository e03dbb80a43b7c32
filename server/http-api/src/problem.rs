//! Problems (RFC 9457) as responses.

use axum::extract::Request;
use axum::http::header::{ALLOW, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use permafrost_api_types::problem::{MEDIA_TYPE, Problem, ProblemKind};
use permafrost_audit::AuditedRequest;

use super::source::Refusal;

/// A problem that a request ends with.
#[derive(Clone, Debug)]
pub struct RequestProblem(Box<Problem>);

impl RequestProblem {
    /// Returns a problem of a kind.
    pub(super) fn new(kind: ProblemKind, detail: impl Into<String>) -> Self {
        Self(Box::new(Problem::new(kind, detail)))
    }

    /// Returns a problem of a kind, about one field.
    pub(super) fn at(
        kind: ProblemKind,
        pointer: impl Into<String>,
        detail: impl Into<String>,
    ) -> Self {
        let (pointer, detail) = (pointer.into(), detail.into());
        let about = if pointer.is_empty() {
            detail.clone()
        } else {
            format!("{pointer}: {detail}")
        };
        Self(Box::new(Problem::new(kind, about).at(pointer, detail)))
    }

    /// Returns a problem that may be gone after `retry_after_s`.
    pub(super) fn for_now(detail: impl Into<String>, retry_after_s: u64) -> Self {
        let mut problem = Problem::new(ProblemKind::Unavailable, detail);
        problem.retry_after_s = Some(retry_after_s);
        Self(Box::new(problem))
    }
}

impl From<Problem> for RequestProblem {
    fn from(problem: Problem) -> Self {
        Self(Box::new(problem))
    }
}

impl From<Refusal> for RequestProblem {
    fn from(refusal: Refusal) -> Self {
        let detail = refusal.to_string();
        match refusal {
            Refusal::Invalid { pointer, .. } => Self::at(ProblemKind::Invalid, pointer, detail),
            Refusal::NoReservation => Self::new(ProblemKind::NotFound, detail),
            Refusal::Conflict { .. } => Self::new(ProblemKind::Conflict, detail),
            Refusal::Unavailable { .. } => Self::for_now(detail, 5),
            Refusal::Store(error) => {
                use permafrost_protocol::control::{ErrorCode, ReportedError};
                let kind = match error.code() {
                    ErrorCode::Invalid => ProblemKind::Invalid,
                    ErrorCode::NotFound => ProblemKind::NotFound,
                    ErrorCode::Conflict | ErrorCode::NoSpace => ProblemKind::Conflict,
                    ErrorCode::Unavailable => return Self::for_now(detail, 5),
                    ErrorCode::Denied => ProblemKind::Forbidden,
                    ErrorCode::Internal | ErrorCode::Corrupt | ErrorCode::SessionFailed => {
                        ProblemKind::Internal
                    }
                };
                if kind == ProblemKind::Internal {
                    tracing::error!(event = "api-request-failed", %error, "a request of the API failed");
                }
                Self::new(kind, detail)
            }
        }
    }
}

impl IntoResponse for RequestProblem {
    fn into_response(self) -> Response {
        respond(&self.0)
    }
}

/// Returns the response for a problem, with its headers. [`named`] adds the path of the request.
pub fn respond(problem: &Problem) -> Response {
    // Strings and numbers always serialize.
    let body = serde_json::to_vec(problem).unwrap_or_default();
    let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (status, body).into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
    if status == StatusCode::UNAUTHORIZED {
        let how = HeaderValue::from_static("Bearer realm=\"permafrost\"");
        headers.insert(WWW_AUTHENTICATE, how);
    }
    if status == StatusCode::FORBIDDEN {
        let how =
            HeaderValue::from_static("Bearer realm=\"permafrost\", error=\"insufficient_scope\"");
        headers.insert(WWW_AUTHENTICATE, how);
    }
    if let Some(seconds) = problem.retry_after_s {
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    response.extensions_mut().insert(Said(problem.clone()));
    response
}

/// Event of the audit log that a response tells of, where the scope of its route does not say it.
#[derive(Clone, Debug)]
pub(super) struct Audited(pub(super) AuditedRequest);

/// The problem that a response contains.
#[derive(Clone, Debug)]
struct Said(Problem);

/// Adds the path of the request to a problem, and makes problems of the router's own refusals.
pub(super) async fn named(request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let response = next.run(request).await;
    let status = response.status();
    let mut problem = match response.extensions().get::<Said>() {
        Some(Said(problem)) => problem.clone(),
        None if status == StatusCode::NOT_FOUND => {
            Problem::new(ProblemKind::NotFound, format!("there is no {path}"))
        }
        None if status == StatusCode::METHOD_NOT_ALLOWED => {
            Problem::new(ProblemKind::Method, format!("{path} has no such method"))
        }
        None => return response,
    };
    problem.instance = Some(path);
    let mut named = respond(&problem);
    if let Some(audited) = response.extensions().get::<Audited>() {
        named.extensions_mut().insert(audited.clone());
    }
    if let Some(allowed) = response.headers().get(ALLOW) {
        named.headers_mut().insert(ALLOW, allowed.clone());
    }
    named
}
