//! The OpenAPI document of the API.

use serde_json::Value;

use crate::fixture::{DOCUMENT, asked, errors, three_nodes};

/// All routes of the API.
const ROUTES: [(&str, &str); 16] = [
    ("get", "/v1/nodes"),
    ("post", "/v1/estimate"),
    ("post", "/v1/preempt"),
    ("post", "/v1/resume"),
    ("post", "/v1/place"),
    ("post", "/v1/reserve"),
    ("delete", "/v1/reserve/{token}"),
    ("get", "/v1/jobs"),
    ("get", "/v1/checkpoints"),
    ("get", "/v1/activity"),
    ("get", "/v1/contents"),
    ("get", "/v1/events"),
    ("put", "/v1/figures"),
    ("get", "/openapi.json"),
    ("get", "/healthz"),
    ("get", "/readyz"),
];

#[tokio::test]
async fn it_is_served_and_has_all_routes_and_no_others() {
    let asked = asked(three_nodes());
    let (status, document) = asked.get("/openapi.json").await;
    assert_eq!(status, 200);
    assert_eq!(document, *DOCUMENT);
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1"));
    let mut documented: Vec<(String, String)> = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        documented.extend(
            item.as_object()
                .unwrap()
                .keys()
                .map(|method| (method.clone(), path.clone())),
        );
    }
    let mut routes: Vec<(String, String)> = ROUTES
        .iter()
        .map(|(method, path)| ((*method).to_owned(), (*path).to_owned()))
        .collect();
    documented.sort_unstable();
    routes.sort_unstable();
    assert_eq!(documented, routes);
}

fn each_reference(value: &Value, see: &mut impl FnMut(&str)) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                match (name.as_str(), field) {
                    ("$ref", Value::String(reference)) => see(reference),
                    _ => each_reference(field, see),
                }
            }
        }
        Value::Array(all) => all.iter().for_each(|one| each_reference(one, see)),
        _ => {}
    }
}

#[test]
fn every_reference_leads_somewhere() {
    let mut seen = 0;
    each_reference(&DOCUMENT, &mut |reference| {
        let pointer = reference.strip_prefix('#').unwrap();
        assert!(
            DOCUMENT.pointer(pointer).is_some(),
            "{reference} is not there"
        );
        seen += 1;
    });
    assert!(seen > 50, "{seen}");
}

#[test]
fn examples_are_as_the_schemas_say() {
    let mut seen = 0;
    for item in DOCUMENT["paths"].as_object().unwrap().values() {
        for operation in item.as_object().unwrap().values() {
            let Some(body) = operation.get("requestBody") else {
                continue;
            };
            let json = &body["content"]["application/json"];
            let example = json
                .get("example")
                .unwrap_or_else(|| panic!("{operation} has no example"));
            assert_eq!(errors(&json["schema"], example), Vec::<String>::new());
            seen += 1;
        }
    }
    assert_eq!(seen, 6);
}

#[test]
fn everything_is_described() {
    for (name, schema) in DOCUMENT["components"]["schemas"].as_object().unwrap() {
        let is_described = schema.get("description").is_some()
            || schema.get("oneOf").is_some()
            || schema.get("items").is_some();
        assert!(is_described, "{name} is not described");
        for (field, of) in schema["properties"].as_object().into_iter().flatten() {
            // utoipa drops the words on fields of a type parameter: those of the whole say it.
            if name.starts_with("Known_") && ["p50", "p95"].contains(&field.as_str()) {
                continue;
            }
            // What may be null is one of two.
            let others = of["oneOf"].as_array().into_iter().flatten();
            let said = others.chain([of]).any(|of| of.get("description").is_some());
            assert!(said, "{name}.{field} is not described: {of}");
        }
    }
}
