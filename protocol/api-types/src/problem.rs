//! Replies to requests that fail: RFC 9457, `application/problem+json`.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Media type of a [`Problem`].
pub const MEDIA_TYPE: &str = "application/problem+json";

/// Prefix of every [`Problem::kind`].
pub const URN: &str = "urn:permafrost:problem:";

/// Description of a failed request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Type of the problem: [`URN`] and a word; see [`ProblemKind`].
    #[serde(rename = "type")]
    pub kind: String,
    /// Title of the kind, in words.
    pub title: String,
    /// HTTP status code.
    pub status: u16,
    /// Explanation of this occurrence of the problem.
    pub detail: String,
    /// Path of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// Fields of the request that are wrong.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<FieldError>,
    /// Time after which the request may succeed, seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_s: Option<u64>,
}

/// Error in a field of the request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FieldError {
    /// Position of the field in the body: a JSON pointer (RFC 6901), empty for all of it. For a parameter `query` or
    /// `path`, a colon, and its name.
    pub pointer: String,
    /// Explanation of the error.
    pub detail: String,
}

/// The kinds of problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProblemKind {
    /// The body is not JSON.
    ///
    /// Cure: send JSON; `detail` says at which byte it ends to be any.
    NotJson,
    /// The body is not declared to be JSON.
    ///
    /// Cure: send `Content-Type: application/json`.
    MediaType,
    /// The body is too large.
    ///
    /// Cure: send at most 8 MiB: ask in several requests.
    TooLarge,
    /// A field is wrong.
    ///
    /// Cure: correct the fields that `errors` points to; `/openapi.json` describes each.
    Invalid,
    /// A batch, or its answer, is too large.
    ///
    /// Cure: ask for fewer at a time, or without `detail`.
    TooMany,
    /// The request names an unknown node.
    ///
    /// Cure: `GET /v1/nodes` lists the nodes.
    UnknownNode,
    /// The thing that the request names does not exist.
    ///
    /// Cure: check the path; a reservation may have lapsed.
    NotFound,
    /// The path exists, but not for this method.
    ///
    /// Cure: use the method that `/openapi.json` names.
    Method,
    /// The caller is not authenticated.
    ///
    /// Cure: show a token of the node's `--api-tokens`, or a certificate of the cluster's CA.
    Unauthenticated,
    /// The caller does not have the permission.
    ///
    /// Cure: use a token or a certificate with that scope and namespace.
    Forbidden,
    /// The caller sends requests too often.
    ///
    /// Cure: wait for `Retry-After`, ask about many tasks in one request, or raise `--api-rate`.
    TooOften,
    /// Something is in the way.
    ///
    /// Cure: read `detail`, change what is in the way, and ask again.
    Conflict,
    /// The request cannot be served at present.
    ///
    /// Cure: ask again after `Retry-After`, or ask another node.
    Unavailable,
    /// A defect or a failure of the node that answers.
    ///
    /// Cure: read the node's log by the answer's `X-Request-Id`; ask another node meanwhile.
    Internal,
}

impl ProblemKind {
    /// Returns the kind's word, title and status.
    const fn parts(self) -> (&'static str, &'static str, u16) {
        match self {
            Self::NotJson => ("not-json", "The body is not JSON", 400),
            Self::MediaType => ("media-type", "The body is not said to be JSON", 415),
            Self::TooLarge => ("too-large", "The body is too large", 413),
            Self::Invalid => ("invalid", "A field is wrong", 422),
            Self::TooMany => ("too-many", "The batch is too large", 422),
            Self::UnknownNode => ("unknown-node", "There is no such node", 422),
            Self::NotFound => ("not-found", "There is no such thing", 404),
            Self::Method => ("method", "The path has no such method", 405),
            Self::Unauthenticated => ("unauthenticated", "Nobody knows who asks", 401),
            Self::Forbidden => ("forbidden", "Who asks may not", 403),
            Self::TooOften => ("too-often", "Too many requests", 429),
            Self::Conflict => ("conflict", "Something is in the way", 409),
            Self::Unavailable => ("unavailable", "It cannot be done just now", 503),
            Self::Internal => ("internal", "The node has failed", 500),
        }
    }

    /// Returns the word after [`URN`].
    #[must_use]
    pub const fn word(self) -> &'static str {
        self.parts().0
    }

    /// Returns the HTTP status code.
    #[must_use]
    pub const fn status(self) -> u16 {
        self.parts().2
    }
}

impl Problem {
    /// Makes a problem of a kind.
    #[must_use]
    pub fn new(kind: ProblemKind, detail: impl Into<String>) -> Self {
        let (word, title, status) = kind.parts();
        Self {
            kind: format!("{URN}{word}"),
            title: title.to_owned(),
            status,
            detail: detail.into(),
            instance: None,
            errors: Vec::new(),
            retry_after_s: None,
        }
    }

    /// Adds a field that is wrong.
    #[must_use]
    pub fn at(mut self, pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        self.errors.push(FieldError {
            pointer: pointer.into(),
            detail: detail.into(),
        });
        self
    }

    /// Returns the word after [`URN`]; the whole type if it does not begin with [`URN`].
    #[must_use]
    pub fn word(&self) -> &str {
        self.kind.strip_prefix(URN).unwrap_or(&self.kind)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.title, self.detail)?;
        for error in &self.errors {
            write!(f, "; {:?}: {}", error.pointer, error.detail)?;
        }
        Ok(())
    }
}

impl std::error::Error for Problem {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_names_its_kind_and_its_fields() {
        let problem = Problem::new(ProblemKind::Invalid, "one field is wrong")
            .at("/candidates/3/progress_s", "not a time");
        let json = serde_json::to_value(&problem).unwrap();
        assert_eq!(json["type"], "urn:permafrost:problem:invalid");
        assert_eq!(json["status"], 422);
        assert_eq!(json["errors"][0]["pointer"], "/candidates/3/progress_s");
        assert!(json.get("instance").is_none());
        assert_eq!(serde_json::from_value::<Problem>(json).unwrap(), problem);
        assert_eq!(problem.word(), ProblemKind::Invalid.word());
    }
}
