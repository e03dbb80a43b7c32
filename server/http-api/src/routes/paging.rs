//! Pages of long lists, and the parameters of a query.

use axum::extract::Query;
use axum::http::Uri;
use permafrost_api_types::problem::ProblemKind;
use serde::de::DeserializeOwned;

use crate::limits;
use crate::problem::RequestProblem;

/// Parses the parameters of a query.
///
/// # Errors
/// A problem that names the wrong parameter.
pub(super) fn query<T: DeserializeOwned>(uri: &Uri) -> Result<T, RequestProblem> {
    let parsed = Query::<T>::try_from_uri(uri);
    parsed.map(|Query(query)| query).map_err(|refused| {
        let text = refused.body_text();
        let detail = text
            .strip_prefix("Failed to deserialize query string: ")
            .unwrap_or(&text);
        // "limit: invalid digit found in string", or "unknown field `x`, expected …".
        let unknown = detail
            .split('`')
            .nth(1)
            .filter(|_| detail.starts_with("unknown field"));
        let name = unknown.or_else(|| Some(detail.split_once(": ")?.0));
        let pointer = match name {
            Some(name) => format!("query:{name}"),
            None => "query:".to_owned(),
        };
        RequestProblem::at(ProblemKind::Invalid, pointer, detail)
    })
}

/// Returns the number of entries per page.
pub(super) fn limit(limit: Option<u32>) -> Result<usize, RequestProblem> {
    let limit = limit.unwrap_or(limits::PAGE);
    if !(1..=limits::LONGEST_PAGE).contains(&limit) {
        let most = limits::LONGEST_PAGE;
        let detail = format!("{limit} is no limit: 1 to {most} is");
        return Err(RequestProblem::at(
            ProblemKind::Invalid,
            "query:limit",
            detail,
        ));
    }
    Ok(limit as usize)
}

/// Returns the first entries, and the name of the last one if there are more.
pub(super) fn page<T>(
    all: impl Iterator<Item = T>,
    limit: usize,
    name: impl Fn(&T) -> String,
) -> (Vec<T>, Option<String>) {
    let mut page: Vec<T> = all.take(limit + 1).collect();
    if page.len() <= limit {
        return (page, None);
    }
    page.truncate(limit);
    let next = page.last().map(name);
    (page, next)
}
