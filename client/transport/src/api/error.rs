//! Why a question got no answer.

use std::io;
use std::time::Duration;

use permafrost_api_types::problem::Problem;
use permafrost_identity::IdentityError;

/// Why a question got no answer.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// Not where an API can be.
    #[error("{url:?} is no URL of an API: {what}")]
    Url {
        /// What was given.
        url: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// TLS with nothing to verify the node by.
    #[error("https needs the CA that the node's certificate is of")]
    NoAuthority,
    /// A token on a network where anybody can read it.
    #[error("a token would go to {host} in clear text")]
    ClearText {
        /// The host of the URL.
        host: String,
    },
    /// A token with characters that no header takes.
    #[error("the token holds characters that no token has")]
    BadToken,
    /// The certificates cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// No runtime.
    #[error("start a runtime")]
    Runtime(#[source] io::Error),
    /// Nobody listens there, or the connection broke.
    #[error("cannot reach the API at {place}: {source}")]
    Unreachable {
        /// Socket or URL.
        place: String,
        /// Why.
        source: io::Error,
    },
    /// One side does not trust the other's certificate.
    #[error("no TLS with {place}: {source}")]
    Tls {
        /// URL.
        place: String,
        /// Why.
        source: rustls::Error,
    },
    /// The connection broke in the middle.
    #[error("the API at {place} broke off: {source}")]
    Broken {
        /// Socket or URL.
        place: String,
        /// Why.
        source: hyper::Error,
    },
    /// The answer did not come whole, or is too long.
    #[error("the answer of the API at {place} did not come whole: {source}")]
    Body {
        /// Socket or URL.
        place: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// No answer in time.
    #[error("the API at {place} did not answer within {} s", limit.as_secs())]
    Late {
        /// Socket or URL.
        place: String,
        /// How long it had.
        limit: Duration,
    },
    /// Not a path.
    #[error("{path:?} is no path")]
    Path {
        /// What was given.
        path: String,
    },
    /// The question has no JSON form.
    #[error("write JSON: {0}")]
    Json(#[source] serde_json::Error),
    /// The node refused, and says why.
    #[error("{}", said(.0))]
    Refused(Box<Problem>),
    /// Somebody else answered: a proxy, another server.
    #[error("status {status} from something that is no API of Permafrost: {excerpt}")]
    Foreign {
        /// HTTP status.
        status: u16,
        /// How the answer begins.
        excerpt: String,
    },
    /// The answer is not what was asked for.
    #[error("unexpected answer of the API: {0}")]
    Unexpected(#[source] serde_json::Error),
}

/// Fields that are named in a message; a batch may have thousands that are wrong.
const FIELDS: usize = 5;

/// A problem in one line: what is wrong, and in which fields.
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
    use permafrost_api_types::problem::Kind;

    use super::*;

    #[test]
    fn a_problem_names_the_fields_and_not_thousands_of_them() {
        let mut problem = Problem::new(Kind::Invalid, "fields are wrong");
        for task in 0..9 {
            problem = problem.at(format!("/tasks/{task}/progress_s"), "no time");
        }
        let text = ApiError::Refused(Box::new(problem)).to_string();
        assert!(text.starts_with("fields are wrong; /tasks/0/progress_s: no time;"));
        assert!(
            text.ends_with("/tasks/4/progress_s: no time; and 4 more"),
            "{text}"
        );
        let whole = Problem::new(Kind::NotJson, "no JSON").at("", "ends early");
        let text = ApiError::Refused(Box::new(whole)).to_string();
        assert_eq!(text, "no JSON; the body: ends early");
        let one = Problem::new(Kind::UnknownNode, "/nodes/0: there is no node \"n7\"")
            .at("/nodes/0", "there is no node \"n7\"");
        let text = ApiError::Refused(Box::new(one)).to_string();
        assert_eq!(text, "/nodes/0: there is no node \"n7\"");
    }
}
