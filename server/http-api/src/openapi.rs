//! The document that describes the API: OpenAPI 3.1, at `/openapi.json`.

use std::sync::OnceLock;

use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::{Modify, OpenApi};

use super::responses::Unasked;
use super::routes;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Permafrost",
        description = "What suspending, resuming, killing and waiting cost now, who is best preempted, and where \
                       checkpoints are best kept and resumed.\n\nUnits stand last in a name: `_bytes`, `_bytes_per_s`, \
                       `_s` (seconds), `_unix_ms`. Every answer says how old the snapshot is that it was made from. \
                       What is not known is said in words, and never made up. Problems are those of RFC 9457.\n\nOn \
                       the node's own AF_UNIX socket nobody has to say who they are: root and the daemon's user may \
                       do everything.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    servers((url = "/", description = "The node that is asked.")),
    paths(
        routes::nodes::nodes,
        routes::estimate::estimate,
        routes::preempt::preempt,
        routes::resume::resume,
        routes::place::place,
        routes::reserve::reserve,
        routes::reserve::cancel,
        routes::jobs::jobs,
        routes::jobs::checkpoints,
        routes::activity::activity,
        routes::contents::contents,
        routes::events::events,
        routes::figures::install,
        routes::health::healthz,
        routes::health::readyz,
        document,
    ),
    tags(
        (name = "costs", description = "Costs and decisions; ask for as many as you like at a time."),
        (name = "nodes", description = "Nodes and their figures."),
        (name = "queues", description = "Places in the queues of dumps and restores."),
        (name = "jobs", description = "What is stored, and what happens to it."),
        (name = "health", description = "For probes."),
    ),
    security((), ("bearer" = ["read"]), ("mtls" = ["read"])),
    modifiers(&Securities),
)]
struct Document;

struct Securities;

impl Modify for Securities {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let components = document.components.get_or_insert_default();
        let mut bearer = Http::new(HttpAuthScheme::Bearer);
        bearer.description = Some("A token of the node's file of tokens.".into());
        components.add_security_scheme("bearer", SecurityScheme::Http(bearer));
        let mtls = SecurityScheme::MutualTls {
            description: Some("A certificate of the cluster; its role says what it may.".into()),
            extensions: None,
        };
        components.add_security_scheme("mtls", mtls);
    }
}

/// Returns the document that describes the API of this server.
#[must_use]
pub fn openapi() -> utoipa::openapi::OpenApi {
    Document::openapi()
}

/// The OpenAPI document of this API.
#[utoipa::path(
    get,
    path = "/openapi.json",
    tag = "health",
    operation_id = "openapi",
    responses(
        (status = 200, description = "OpenAPI 3.1.", body = Object),
        Unasked
    )
)]
pub(super) async fn document() -> Response {
    static JSON: OnceLock<Vec<u8>> = OnceLock::new();
    // It is made of strings and numbers, which serialize.
    let json = JSON.get_or_init(|| serde_json::to_vec(&openapi()).unwrap_or_default());
    let json_type = HeaderValue::from_static("application/json");
    ([(CONTENT_TYPE, json_type)], json.as_slice()).into_response()
}
