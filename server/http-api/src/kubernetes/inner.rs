//! Calls the API's own routes from within: the extender uses nothing that the API does not return.

use axum::Router;
use axum::body::{Body, Bytes};
use http_body_util::BodyExt as _;
use hyper::header::CONTENT_TYPE;
use hyper::service::Service as _;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::service::TowerToHyperService;
use permafrost_api_types::jobs::{CheckpointsAnswer, JobsAnswer};
use permafrost_api_types::nodes::{ListedNode, NodesAnswer};
use permafrost_api_types::problem::{Problem, ProblemKind};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::caller::Caller;
use crate::problem::respond;

/// Nodes per page: the maximum.
const PAGE: &str = "10000";

/// The router that is called, and the caller whose permissions apply.
pub(super) struct Inner {
    service: TowerToHyperService<Router>,
    caller: Caller,
}

/// A refusal of the API, to be returned to the scheduler.
pub(super) struct Refused(Box<Response<Body>>);

impl From<Refused> for Response<Body> {
    fn from(refused: Refused) -> Self {
        *refused.0
    }
}

impl Refused {
    pub(super) fn new(kind: ProblemKind, detail: impl Into<String>) -> Self {
        Self(Box::new(respond(&Problem::new(kind, detail))))
    }

    /// Returns true if the request was understood, and a field of it refused.
    pub(super) fn is_invalid(&self) -> bool {
        self.0.status() == StatusCode::UNPROCESSABLE_ENTITY
    }

    fn is_not_found(&self) -> bool {
        self.0.status() == StatusCode::NOT_FOUND
    }
}

impl Inner {
    pub(super) fn new(service: TowerToHyperService<Router>, caller: Caller) -> Self {
        Self { service, caller }
    }

    /// Returns all nodes, and the name of the one that answers.
    pub(super) async fn nodes(&self) -> Result<(Vec<ListedNode>, String), Refused> {
        let mut nodes = Vec::new();
        let mut path = format!("/v1/nodes?limit={PAGE}");
        loop {
            let page: NodesAnswer = self.get(&path).await?;
            nodes.extend(page.nodes);
            let Some(next) = page.next else {
                return Ok((nodes, page.answered_by));
            };
            let after = permafrost_transport::api::encoded(&next);
            path = format!("/v1/nodes?limit={PAGE}&after={after}");
        }
    }

    /// Returns a job, if there is one that the caller sees.
    pub(super) async fn job(&self, job: &str) -> Result<Option<JobsAnswer>, Refused> {
        let job = permafrost_transport::api::encoded(job);
        unless_missing(self.get(&format!("/v1/jobs?job={job}")).await)
    }

    /// Returns a job's checkpoints, if there is such a job that the caller sees.
    pub(super) async fn checkpoints(
        &self,
        job: &str,
    ) -> Result<Option<CheckpointsAnswer>, Refused> {
        let job = permafrost_transport::api::encoded(job);
        unless_missing(
            self.get(&format!("/v1/checkpoints?limit={PAGE}&job={job}"))
                .await,
        )
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Refused> {
        let answer = self.ask(Method::GET, path, Bytes::new()).await?;
        read(&answer)
    }

    /// Posts a request and returns the body of the answer; the answer's texts may be borrowed from it.
    pub(super) async fn post<T: Serialize>(&self, path: &str, body: &T) -> Result<Bytes, Refused> {
        // Structs of texts and numbers always serialize.
        let body = serde_json::to_vec(body).unwrap_or_default();
        self.ask(Method::POST, path, Bytes::from(body)).await
    }

    async fn ask(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, Refused> {
        let mut request = Request::new(Body::from(body));
        *request.method_mut() = method;
        *request.uri_mut() = path
            .parse()
            .map_err(|_| Refused::new(ProblemKind::Invalid, format!("{path:?} is no path")))?;
        let json = hyper::header::HeaderValue::from_static("application/json");
        request.headers_mut().insert(CONTENT_TYPE, json);
        request.extensions_mut().insert(self.caller.clone());
        let response = match self.service.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        if !response.status().is_success() {
            return Err(Refused(Box::new(response)));
        }
        let body = response.into_body().collect().await;
        let body = body.map_err(|error| Refused::new(ProblemKind::Internal, error.to_string()))?;
        Ok(body.to_bytes())
    }
}

fn unless_missing<T>(answer: Result<T, Refused>) -> Result<Option<T>, Refused> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(refused) if refused.is_not_found() => Ok(None),
        Err(refused) => Err(refused),
    }
}

/// Parses an answer of the API's own routes.
pub(super) fn read<'a, T: serde::Deserialize<'a>>(answer: &'a [u8]) -> Result<T, Refused> {
    serde_json::from_slice(answer)
        .map_err(|error| Refused::new(ProblemKind::Internal, format!("read an answer: {error}")))
}
