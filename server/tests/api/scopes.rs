//! Access rights of the API's callers, and the data that each of them sees.

use axum::body::Body;
use axum::http::{Request, StatusCode};
use permafrost_http_api::caller::{Caller, Scope, Scopes};
use permafrost_identity::Namespaces;
use serde_json::json;

use crate::fixture::{Asked, DOCUMENT, asked, three_nodes};

/// Returns all routes, with the scope that each needs according to the document.
fn routes() -> Vec<(String, String, Option<String>)> {
    let mut routes = Vec::new();
    for (path, item) in DOCUMENT["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let security = operation.get("security").unwrap_or(&DOCUMENT["security"]);
            let scope = security
                .as_array()
                .unwrap()
                .iter()
                .find_map(|one| one["bearer"][0].as_str());
            let path = path.replace("{token}", "t1");
            routes.push((method.to_uppercase(), path, scope.map(str::to_owned)));
        }
    }
    routes
}

async fn status(asked: &Asked, method: &str, path: &str) -> (StatusCode, bool) {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .body(Body::empty())
        .unwrap();
    let response = asked.send(request).await;
    let says_how = response.headers().contains_key("www-authenticate");
    (response.status(), says_how)
}

#[tokio::test]
async fn each_route_takes_the_scope_that_the_document_says() {
    let mut asked = asked(three_nodes());
    for (method, path, scope) in routes() {
        asked.caller = None;
        let nobody = status(&asked, &method, &path).await;
        let Some(scope) = scope else {
            assert_eq!(nobody.0, StatusCode::OK, "{method} {path}");
            continue;
        };
        assert_eq!(nobody, (StatusCode::UNAUTHORIZED, true), "{method} {path}");
        let scope: Scope = scope.parse().unwrap();
        let with = |scopes: Scopes| {
            Some(Caller {
                scopes,
                ..Caller::local("somebody")
            })
        };
        asked.caller = with(
            Scope::ALL
                .into_iter()
                .filter(|other| *other != scope)
                .collect(),
        );
        let others = status(&asked, &method, &path).await;
        assert_eq!(others, (StatusCode::FORBIDDEN, true), "{method} {path}");
        asked.caller = with([scope].into_iter().collect());
        let (allowed, _) = status(&asked, &method, &path).await;
        assert!(
            allowed != StatusCode::FORBIDDEN && allowed != StatusCode::UNAUTHORIZED,
            "{method} {path}: {allowed}"
        );
    }
}

#[tokio::test]
async fn jobs_of_other_namespaces_are_not_there() {
    let mut asked = asked(three_nodes());
    asked.caller = Some(Caller {
        namespaces: Namespaces::new(["team"]).unwrap(),
        ..Caller::local("token of a team")
    });
    let (_, answer) = asked.get("/v1/jobs").await;
    assert_eq!(answer["jobs"].as_array().unwrap().len(), 1);
    assert_eq!(answer["jobs"][0]["job"], "team/k-means");
    let (_, answer) = asked.get("/v1/checkpoints").await;
    assert_eq!(answer["checkpoints"].as_array().unwrap().len(), 3);
    assert_eq!(
        asked.get("/v1/jobs?job=sort").await.0,
        StatusCode::NOT_FOUND
    );
    for of in ["sort@7", "sort", "sort@1"] {
        let path = format!("/v1/contents?checkpoint={of}");
        let (status, problem) = asked.get(&path).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
        assert_eq!(problem["detail"], "there is no job \"sort\"", "{of}");
    }
    let (_, answer) = asked.get("/v1/activity").await;
    for list in [
        &answer["copies"],
        &answer["ended"],
        &answer["repair"]["steps"],
    ] {
        assert!(list[0].get("checkpoint").is_none(), "{list:#}");
        assert_eq!(list[1]["checkpoint"], "team/k-means@2");
    }
    let (status, _) = asked.get("/v1/contents?checkpoint=team/k-means").await;
    assert_eq!(status, StatusCode::OK);
    let answer = asked
        .ok(
            "/v1/resume",
            &json!({"checkpoints": ["sort", "team/k-means"]}),
        )
        .await;
    assert_eq!(answer["answers"][0]["restart"], true);
    assert_eq!(answer["answers"][1]["generation"], 2);
    let answer = asked
        .ok("/v1/estimate", &json!({"tasks": [{"id": "s", "node": "a", "job": "sort"}], "mechanisms": ["rollback"]}))
        .await;
    assert_eq!(
        answer["answers"][0]["unknown"],
        "the task has no checkpoint"
    );
}
