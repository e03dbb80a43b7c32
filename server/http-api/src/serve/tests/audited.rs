//! Tests of the requests that are recorded in the audit log.

use axum::middleware::{Next, from_fn};
use axum::routing::delete;
use permafrost_audit::AuditFile;
use permafrost_identity::Scope;

use super::*;
use crate::router::checked;

async fn may_reserve(request: axum::extract::Request, next: Next) -> axum::response::Response {
    checked(Scope::Reserve, request, next).await
}

#[tokio::test]
async fn changes_and_refusals_are_recorded_and_neither_questions_nor_tokens() {
    let place = Place::new();
    let reserve = Router::new()
        .route("/v1/reserve", post(async || "taken"))
        .route(
            "/v1/reserve/{token}",
            delete(async || StatusCode::NOT_FOUND),
        )
        .route_layer(from_fn(may_reserve));
    let audit = Audit::open(&AuditFile::InDataDir, place.dir.path(), "n1").unwrap();
    let audit = Arc::new(audit);
    let options = ServeOptions {
        audit: Some(Arc::clone(&audit)),
        ..place.with_tokens(&[("slurm", "read,reserve", "s"), ("eyes", "read", "e")])
    };
    let server = serve_looking(options, router().merge(reserve), Duration::ZERO)
        .await
        .unwrap();
    let client = &mut at_port(&server).await;
    said(client, ask("/who", Some("s"))).await;
    said(client, send("/v1/reserve", "s", "")).await;
    said(client, send("/v1/reserve", "e", "")).await;
    let give_back = Request::delete("/v1/reserve/a-secret")
        .header("host", "localhost")
        .header("authorization", "Bearer s")
        .body(Full::default())
        .unwrap();
    said(client, give_back).await;
    said(client, ask("/who", Some("another"))).await;
    server.stop().await;
    // The connections' tasks may outlive the server for a moment.
    let path = place.path("audit.log");
    let mut text = String::new();
    for _ in 0..6000 {
        text = std::fs::read_to_string(&path).unwrap();
        if text.lines().count() >= 4 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(!text.contains("a-secret"), "{text}");
    let lines: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let told: Vec<_> = lines
        .iter()
        .map(|line| {
            ["via", "who", "action", "on", "outcome"].map(|field| line[field].as_str().unwrap())
        })
        .collect();
    assert_eq!(
        told,
        [
            ["api", "token slurm", "reserve", "/v1/reserve", "done"],
            ["api", "token eyes", "reserve", "/v1/reserve", "denied"],
            [
                "api",
                "token slurm",
                "cancel-reservation",
                "/v1/reserve",
                "not-found"
            ],
            ["api", "nobody", "ask", "/who", "denied"],
        ]
    );
}
