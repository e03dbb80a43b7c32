//! Errors of requests to the HTTP API.

use std::io;
use std::time::Duration;

use permafrost_api_types::problem::Problem;
use permafrost_identity::IdentityError;

/// A request to the API that got no usable reply.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The URL cannot be that of an API.
    #[error("{url:?} is no URL of an API: {what}")]
    Url {
        /// URL that was given.
        url: String,
        /// Description of the error.
        what: &'static str,
    },
    /// A URL with https, and no CA to verify the node with.
    #[error("https needs the CA that the node's certificate is of")]
    NoAuthority,
    /// A token for an unencrypted connection over a network.
    #[error("a token would go to {host} in clear text")]
    ClearText {
        /// Host of the URL.
        host: String,
    },
    /// A token with characters that a header cannot hold.
    #[error("the token holds characters that no token has")]
    BadToken,
    /// The certificates cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The tokio runtime could not be started.
    #[error("start a runtime")]
    Runtime(#[source] io::Error),
    /// No process listens at the address, or the connection broke.
    #[error("cannot reach the API at {place}: {source}")]
    Unreachable {
        /// Path of the socket, or the URL.
        place: String,
        /// Error of the connection attempt.
        source: io::Error,
    },
    /// One side does not trust the other's certificate.
    #[error("no TLS with {place}: {source}")]
    Tls {
        /// URL of the API.
        place: String,
        /// Error of TLS.
        source: rustls::Error,
    },
    /// The connection broke during the exchange.
    #[error("the API at {place} broke off: {source}")]
    Broken {
        /// Path of the socket, or the URL.
        place: String,
        /// Error of the connection.
        source: hyper::Error,
    },
    /// The reply is incomplete or too long.
    #[error("the answer of the API at {place} did not come whole: {source}")]
    Body {
        /// Path of the socket, or the URL.
        place: String,
        /// Error while the reply was read.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// No reply in time.
    #[error("the API at {place} did not answer within {} s", limit.as_secs())]
    Late {
        /// Path of the socket, or the URL.
        place: String,
        /// Time limit of the request.
        limit: Duration,
    },
    /// An invalid path of a request.
    #[error("{path:?} is no path")]
    Path {
        /// Path that was given.
        path: String,
    },
    /// The request cannot be written as JSON.
    #[error("write JSON: {0}")]
    Json(#[source] serde_json::Error),
    /// The node refused the request.
    #[error("{}", said(.0))]
    Refused(Box<Problem>),
    /// Another program replied: a proxy, or another server.
    #[error("status {status} from something that is no API of Permafrost: {excerpt}")]
    Foreign {
        /// HTTP status of the reply.
        status: u16,
        /// Beginning of the reply.
        excerpt: String,
    },
    /// The reply does not have the expected type.
    #[error("unexpected answer of the API: {0}")]
    Unexpected(#[source] serde_json::Error),
}

/// Most fields that are named in a message; a batch may have thousands that are wrong.
const FIELDS: usize = 5;

/// Formats a problem in one line: the error, and the fields with errors.
fn said(problem: &Problem) -> String {
    let mut text = problem.detail.clone();
    if text.is_empty() {
        text.clone_from(&problem.title);
    }
    for error in problem.errors.iter().take(FIELDS) {
        let place = match error.pointer.as_str() {
            "" => "the body",
            pointer => pointer,
        };
        // A single field is often named in the detail already.
        if !problem.detail.contains(&error.detail) {
            text.push_str(&format!("; {place}: {}", error.detail));
        }
    }
    if let Some(more) = problem
        .errors
        .len()
        .checked_sub(FIELDS)
        .filter(|more| *more > 0)
    {
        text.push_str(&format!("; and {more} more"));
    }
    text
}

#[cfg(test)]
mod tests {
    use permafrost_api_types::problem::ProblemKind;

    use super::*;

    #[test]
    fn a_problem_names_the_fields_and_not_thousands_of_them() {
        let mut problem = Problem::new(ProblemKind::Invalid, "fields are wrong");
        for task in 0..9 {
            problem = problem.at(format!("/tasks/{task}/progress_s"), "no time");
        }
        let text = ApiError::Refused(Box::new(problem)).to_string();
        assert!(text.starts_with("fields are wrong; /tasks/0/progress_s: no time;"));
        assert!(
            text.ends_with("/tasks/4/progress_s: no time; and 4 more"),
            "{text}"
        );
        let whole = Problem::new(ProblemKind::NotJson, "no JSON").at("", "ends early");
        let text = ApiError::Refused(Box::new(whole)).to_string();
        assert_eq!(text, "no JSON; the body: ends early");
        let one = Problem::new(
            ProblemKind::UnknownNode,
            "/nodes/0: there is no node \"n7\"",
        )
        .at("/nodes/0", "there is no node \"n7\"");
        let text = ApiError::Refused(Box::new(one)).to_string();
        assert_eq!(text, "/nodes/0: there is no node \"n7\"");
    }
}
