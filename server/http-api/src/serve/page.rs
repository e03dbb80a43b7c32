//! Answers requests for the files of the page at `/ui`. Whoever reaches the port gets them: a browser asks for a page
//! before it can send a token, and the files contain no data. Such a connection stays one of a stranger, with the
//! limits of strangers, until a request on it names a caller.

use axum::body::Body;
use hyper::header::{ALLOW, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};

/// Headers of every answer.
const HEADERS: [(&str, &str); 5] = [
    (
        "content-security-policy",
        permafrost_ui::CONTENT_SECURITY_POLICY,
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    // Another version of the daemon has other files.
    ("cache-control", "no-cache"),
];

pub(super) fn answer<B>(request: &Request<B>) -> Response<Body> {
    let file = permafrost_ui::file(request.uri().path());
    let (status, media_type, content) = match (request.method(), file) {
        (&Method::GET | &Method::HEAD, Some(file)) => {
            (StatusCode::OK, file.media_type, file.content)
        }
        (&Method::GET | &Method::HEAD, None) => (
            StatusCode::NOT_FOUND,
            "text/plain",
            "The page has no such file; it begins at /ui.\n",
        ),
        _ => (
            StatusCode::METHOD_NOT_ALLOWED,
            "text/plain",
            "The files of the page are for GET.\n",
        ),
    };
    let mut response = Response::new(Body::from(content));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    for (name, value) in HEADERS.into_iter().chain([("content-type", media_type)]) {
        headers.insert(
            HeaderName::from_static(name),
            HeaderValue::from_static(value),
        );
    }
    if status == StatusCode::METHOD_NOT_ALLOWED {
        headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    }
    response
}
