//! Responses that several requests have, as the API's document describes them.

use permafrost_api_types::problem::Problem;

/// Responses of any request that needs a scope.
#[derive(utoipa::IntoResponses)]
#[expect(dead_code, reason = "it describes what is answered, and is never made")]
pub(super) enum Unasked {
    /// The caller is not authenticated.
    #[response(status = 401, content_type = "application/problem+json")]
    Unauthenticated(Problem),
    /// The caller lacks the permission.
    #[response(status = 403, content_type = "application/problem+json")]
    Forbidden(Problem),
    /// The caller makes too many requests; `Retry-After` says when to come again.
    #[response(status = 429, content_type = "application/problem+json")]
    TooOften(Problem),
    /// The node has just started, or has too much to do; `Retry-After` says when to come again.
    #[response(status = 503, content_type = "application/problem+json")]
    Unavailable(Problem),
}

/// Responses of any request with a body.
#[derive(utoipa::IntoResponses)]
#[expect(dead_code, reason = "it describes what is answered, and is never made")]
pub(super) enum Unread {
    /// The body is not JSON.
    #[response(status = 400, content_type = "application/problem+json")]
    NotJson(Problem),
    /// The caller is not authenticated.
    #[response(status = 401, content_type = "application/problem+json")]
    Unauthenticated(Problem),
    /// The caller lacks the permission.
    #[response(status = 403, content_type = "application/problem+json")]
    Forbidden(Problem),
    /// The body is larger than 8 MiB.
    #[response(status = 413, content_type = "application/problem+json")]
    TooLarge(Problem),
    /// The content type of the body is not JSON.
    #[response(status = 415, content_type = "application/problem+json")]
    MediaType(Problem),
    /// A field is wrong: `errors` says which. Or the batch is too large, or names an unknown node.
    #[response(status = 422, content_type = "application/problem+json")]
    Invalid(Problem),
    /// The caller makes too many requests; `Retry-After` says when to come again.
    #[response(status = 429, content_type = "application/problem+json")]
    TooOften(Problem),
    /// The node has just started, or has too much to do; `Retry-After` says when to come again.
    #[response(status = 503, content_type = "application/problem+json")]
    Unavailable(Problem),
}
