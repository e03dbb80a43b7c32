//! Tests of the page's files: who gets them, and with which headers.

use super::*;

#[tokio::test]
async fn whoever_reaches_the_port_gets_the_page_and_no_data() {
    let place = Place::new();
    let server = start(place.with_tokens(&[("view", "read", "v")])).await;
    let client = &mut at_port(&server).await;
    for (path, media_type) in [
        ("/ui", "text/html; charset=utf-8"),
        ("/ui/main.js", "text/javascript; charset=utf-8"),
        ("/ui/style.css", "text/css; charset=utf-8"),
    ] {
        // A token that is no longer good does not keep anyone from the page that asks for another one.
        for token in [None, Some("v"), Some("expired")] {
            let said = said(client, ask(path, token)).await;
            assert_eq!(said.status, StatusCode::OK, "{path}");
            assert_eq!(said.header("content-type"), media_type);
            let policy = said.header("content-security-policy");
            assert!(policy.starts_with("default-src 'none'; script-src 'self';"));
            assert_eq!(said.header("x-content-type-options"), "nosniff");
            assert!(!said.header("x-request-id").is_empty());
        }
    }
    let who = said(client, ask("/who", None)).await;
    assert_eq!(who.status, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn other_paths_and_methods_are_refused() {
    let place = Place::new();
    let server = start(place.with_tokens(&[("view", "read", "v")])).await;
    for path in [
        "/ui/none",
        "/ui//main.js",
        "/ui/../who",
        "/ui/%2e%2e/who",
        "/ui/main.js/",
    ] {
        let said = said(&mut at_port(&server).await, ask(path, Some("v"))).await;
        assert_eq!(said.status, StatusCode::NOT_FOUND, "{path}");
    }
    // `/uiwho` is no path of the page.
    let said_of_other = said(&mut at_port(&server).await, ask("/uiwho", None)).await;
    assert_eq!(said_of_other.status, StatusCode::UNAUTHORIZED);
    let mut request = ask("/ui", Some("v"));
    *request.method_mut() = hyper::Method::POST;
    let refused = said(&mut at_port(&server).await, request).await;
    assert_eq!(refused.status, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(refused.header("allow"), "GET, HEAD");
}
