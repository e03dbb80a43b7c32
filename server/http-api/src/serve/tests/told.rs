//! Tests of the headers of an answer.

use super::*;

#[tokio::test]
async fn every_answer_names_its_request() {
    let place = Place::new();
    let server = start(place.with_tokens(&[("a", "read", "t")])).await;
    let client = &mut at_port(&server).await;
    let mut seen = Vec::new();
    for _ in 0..3 {
        let id = said(client, ask("/who", Some("t"))).await;
        seen.push(id.header("x-request-id").to_owned());
    }
    seen.dedup();
    assert!(
        seen.len() == 3 && seen.iter().all(|id| id.len() > 8),
        "{seen:?}"
    );
    // The caller's own id is kept, unless it does not fit the log.
    for (given, kept) in [
        ("job-7/42", true),
        ("a b", false),
        (&"x".repeat(129), false),
    ] {
        let mut request = ask("/who", Some("t"));
        let value = given.try_into().unwrap();
        request.headers_mut().insert("x-request-id", value);
        let answer = said(client, request).await;
        assert_eq!(answer.header("x-request-id") == given, kept, "{given}");
    }
    // A refusal has an id, too.
    let refused = said(client, ask("/who", None)).await;
    assert!(!refused.header("x-request-id").is_empty());
}
