//! An extender for kube-scheduler: nodes near a pod's checkpoint first, and victims that lose little.
//!
//! ```text
//!  kube-scheduler ── filter, prioritize, preempt ──▶ here ── /v1/nodes, /v1/jobs, /v1/resume, /v1/preempt ──▶ the API
//! ```
//!
//! A pod names its job in the annotation `permafrost.io/job`. Pods without a job, unknown jobs, and nodes that keep no
//! images are left to the scheduler: an extender that guessed would be worse than none. docs/kubernetes.md says how it
//! is set up. A policy stands in the path (`/v1/kubernetes/policies/basic+local/preempt`): so it is chosen where the
//! scheduler is configured, and all nodes answer alike without options of their own.

mod filter;
mod inner;
mod policy;
mod preempt;
mod prioritize;
mod read;
mod sites;
#[cfg(test)]
mod tests;
mod types;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Path, Request, State};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Router};
use hyper::header::CONTENT_TYPE;
use hyper_util::service::TowerToHyperService;
use permafrost_api_types::problem::ProblemKind;
use permafrost_scheduling::policy::Name;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::caller::{Caller, Scope};
use super::limits::BODY_BYTES;
use super::router::checked;
use inner::{Inner, Refused};

type Service = TowerToHyperService<Router>;

/// Adds the routes of the extender, which call `api`, beside those of `api`. They require the scope `read`.
pub fn beside(api: Router) -> Router {
    let extender = Router::new()
        .route("/v1/kubernetes/filter", post(filter))
        .route("/v1/kubernetes/policies/{policy}/filter", post(filter))
        .route("/v1/kubernetes/prioritize", post(prioritize))
        .route(
            "/v1/kubernetes/policies/{policy}/prioritize",
            post(prioritize),
        )
        .route("/v1/kubernetes/preempt", post(preempt))
        .route("/v1/kubernetes/policies/{policy}/preempt", post(preempt))
        .route_layer(from_fn(may_read))
        .with_state(TowerToHyperService::new(api.clone()));
    api.merge(extender)
}

async fn may_read(request: Request, next: Next) -> Response {
    checked(Scope::Read, request, next).await
}

async fn filter(
    State(api): State<Service>,
    Extension(caller): Extension<Caller>,
    policy: Option<Path<String>>,
    request: Request,
) -> Response {
    let asked = async {
        // Any policy restores what can be restored, so that none changes which nodes pass.
        named(policy)?;
        let arguments = body(request).await?;
        filter::filter(&Inner::new(api, caller), arguments).await
    };
    answer(asked.await)
}

async fn prioritize(
    State(api): State<Service>,
    Extension(caller): Extension<Caller>,
    policy: Option<Path<String>>,
    request: Request,
) -> Response {
    let asked = async {
        let policy = named(policy)?;
        let arguments = body(request).await?;
        prioritize::prioritize(&Inner::new(api, caller), policy, &arguments).await
    };
    answer(asked.await)
}

async fn preempt(
    State(api): State<Service>,
    Extension(caller): Extension<Caller>,
    policy: Option<Path<String>>,
    request: Request,
) -> Response {
    let asked = async {
        let policy = named(policy)?;
        let arguments = body(request).await?;
        preempt::preempt(&Inner::new(api, caller), policy, &arguments).await
    };
    answer(asked.await)
}

/// Returns the policy of the path, if it has one.
fn named(policy: Option<Path<String>>) -> Result<Option<Name>, Refused> {
    policy.map(|Path(name)| policy::named(&name)).transpose()
}

async fn body<T: DeserializeOwned>(request: Request) -> Result<T, Refused> {
    let body: Bytes = to_bytes(request.into_body(), BODY_BYTES)
        .await
        .map_err(|_| {
            let detail = format!(
                "the body did not come, or has more than {BODY_BYTES} bytes: nodeCacheCapable makes filter and prioritize send names alone"
            );
            Refused::new(ProblemKind::TooLarge, detail)
        })?;
    serde_json::from_slice(&body).map_err(|error| {
        let kind = if error.is_data() {
            ProblemKind::Invalid
        } else {
            ProblemKind::NotJson
        };
        Refused::new(
            kind,
            format!("not as k8s.io/kube-scheduler/extender/v1: {error}"),
        )
    })
}

fn answer<T: Serialize>(answer: Result<T, Refused>) -> Response {
    match answer {
        Ok(answer) => {
            // Structs of texts and numbers always serialize.
            let json = serde_json::to_vec(&answer).unwrap_or_default();
            ([(CONTENT_TYPE, "application/json")], Body::from(json)).into_response()
        }
        Err(refused) => refused.into(),
    }
}
