//! Responses that are made before the router is called: problems of RFC 9457.

use std::time::Duration;

use axum::body::Body;
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use hyper::{Response, StatusCode};
use permafrost_api_types::problem::{MEDIA_TYPE, Problem, ProblemKind, URN};

/// Reason why a request is refused before the router.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The request has no credentials.
    Nameless,
    /// The token is unknown, or malformed.
    BadToken,
    /// The caller makes too many requests.
    TooOften { again_in: Duration },
    /// The body is over the limit.
    TooLarge { limit_bytes: usize },
    /// The body did not come in time.
    SlowBody { limit: Duration },
    /// Other bodies take all the room.
    NoRoom,
    /// The body broke off, or is malformed.
    BrokenBody,
    /// The answer did not begin in time.
    SlowAnswer { limit: Duration },
    /// There are too many connections.
    Crowded { limit: usize },
}

impl Refusal {
    fn problem(&self) -> Problem {
        match self {
            Self::Nameless => Problem::new(
                ProblemKind::Unauthenticated,
                "send \"Authorization: Bearer TOKEN\" with a token of --api-tokens, or show a certificate of the cluster's CA",
            ),
            Self::BadToken => Problem::new(
                ProblemKind::Unauthenticated,
                "the Authorization header holds no token of --api-tokens",
            ),
            Self::TooOften { again_in } => Problem {
                retry_after_s: Some(whole_s(*again_in)),
                ..Problem::new(
                    ProblemKind::TooOften,
                    format!(
                        "this caller's next request is taken in {} ms; ask about many tasks in one request",
                        again_in.as_millis().max(1)
                    ),
                )
            },
            Self::TooLarge { limit_bytes } => Problem::new(
                ProblemKind::TooLarge,
                format!("a body has at most {limit_bytes} bytes"),
            ),
            // A problem type that no route has.
            Self::SlowBody { limit } => Problem {
                kind: format!("{URN}slow"),
                title: "The body did not come".to_owned(),
                status: StatusCode::REQUEST_TIMEOUT.as_u16(),
                ..Problem::new(
                    ProblemKind::Invalid,
                    format!("a body has to come within {} s", limit.as_secs_f64()),
                )
            },
            Self::NoRoom => Problem {
                retry_after_s: Some(1),
                ..Problem::new(
                    ProblemKind::Unavailable,
                    "the bodies of other requests take all the room there is",
                )
            },
            Self::BrokenBody => Problem::new(
                ProblemKind::NotJson,
                "the body ended early, or is not framed as HTTP/1.1 says",
            ),
            Self::SlowAnswer { limit } => Problem {
                retry_after_s: Some(1),
                ..Problem::new(
                    ProblemKind::Unavailable,
                    format!("nothing was answered within {} s", limit.as_secs_f64()),
                )
            },
            Self::Crowded { limit } => Problem {
                retry_after_s: Some(1),
                ..Problem::new(
                    ProblemKind::Unavailable,
                    format!("{limit} connections are open, which is the limit"),
                )
            },
        }
    }

    /// Returns true if the connection cannot be used any further: its body was not read to the end, or its caller
    /// is not authenticated.
    const fn ends_connection(&self) -> bool {
        !matches!(self, Self::TooOften { .. } | Self::SlowAnswer { .. })
    }

    /// Returns the response for the refusal.
    pub(super) fn response(&self) -> Response<Body> {
        let problem = self.problem();
        // Texts and numbers always have a JSON form.
        let body = serde_json::to_vec(&problem).unwrap_or_default();
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = StatusCode::from_u16(problem.status).unwrap_or_default();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        if let Some(after_s) = problem.retry_after_s {
            headers.insert(RETRY_AFTER, HeaderValue::from(after_s));
        }
        match self {
            Self::Nameless => {
                let challenge = HeaderValue::from_static("Bearer realm=\"permafrost\"");
                headers.insert(WWW_AUTHENTICATE, challenge);
            }
            Self::BadToken => {
                // RFC 6750, section 3.1.
                let challenge = "Bearer realm=\"permafrost\", error=\"invalid_token\"";
                headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
            }
            _ => {}
        }
        if self.ends_connection() {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// Rounds up to whole seconds, as the header has them (RFC 9110, section 10.2.3): never too early.
fn whole_s(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}
