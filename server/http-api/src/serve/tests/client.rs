//! Tests of the `permafrost` client against the real server.

use permafrost_transport::api::{ApiClient, ApiError, ApiOptions};

use super::*;

/// Sends a request with the credentials in `options`; the client's calls block.
async fn asks(options: ApiOptions, path: &'static str) -> Result<String, ApiError> {
    let asking = tokio::task::spawn_blocking(move || {
        let answer = ApiClient::new(&options)?.get(path, &[])?;
        Ok(String::from_utf8(answer.bytes().to_vec()).unwrap())
    });
    asking.await.unwrap()
}

fn options(server: &Server) -> ApiOptions {
    ApiOptions::beside(&server.socket().with_file_name("control.sock"))
}

fn at(server: &Server, scheme: &str) -> ApiOptions {
    ApiOptions {
        url: Some(format!("{scheme}://{}", server.address().unwrap())),
        ..options(server)
    }
}

#[tokio::test]
async fn it_finds_the_socket_beside_the_control_socket() {
    let place = Place::new();
    let server = start(place.options()).await;
    let who = asks(options(&server), "/who").await.unwrap();
    assert!(who.ends_with("read,reserve,operate *"), "{who}");
}

#[tokio::test]
async fn it_shows_a_token_or_a_certificate_and_verifies_the_node() {
    let (place, other) = (Place::new(), Place::new());
    let server = start(ServeOptions {
        identity: Some(place.node()),
        ..place.with_tokens(&[("slurm", "read", "secret")])
    })
    .await;
    let (agent, foreign) = (
        place.issue("c7", Role::Agent, &["*"]),
        other.issue("c7", Role::Agent, &["*"]),
    );
    let by_token = ApiOptions {
        token: Some("secret\n".to_owned()),
        ca: Some(agent.join("ca.pem")),
        ..at(&server, "https")
    };
    let who = asks(by_token.clone(), "/who").await.unwrap();
    assert_eq!(who, "token slurm read *");
    let by_certificate = ApiOptions {
        identity: Some(agent),
        ..at(&server, "https")
    };
    let who = asks(by_certificate.clone(), "/who").await.unwrap();
    assert_eq!(who, "agent c7 read,reserve *");
    // By the name of the node instead of its address.
    let named = |node: &str| ApiOptions {
        node: Some(node.to_owned()),
        ..by_certificate.clone()
    };
    assert!(asks(named("n1"), "/who").await.is_ok());
    let error = asks(named("n2"), "/who").await.unwrap_err();
    assert!(matches!(error, ApiError::Tls { .. }), "{error:?}");
    // A different CA on either side.
    let foreign_ca = ApiOptions {
        ca: Some(foreign.join("ca.pem")),
        ..by_token.clone()
    };
    let error = asks(foreign_ca, "/who").await.unwrap_err();
    assert!(matches!(error, ApiError::Tls { .. }), "{error:?}");
    let nobody = ApiOptions {
        token: None,
        ..by_token
    };
    match asks(nobody, "/who").await {
        Err(ApiError::Refused(problem)) => assert_eq!(problem.status, 401),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_wrong_scheme_is_told_in_words() {
    let place = Place::new();
    let server = start(place.with_tls()).await;
    match asks(at(&server, "http"), "/who").await {
        Err(ApiError::Refused(problem)) => assert!(problem.detail.contains("https://")),
        other => panic!("{other:?}"),
    }
    let plain = start(ServeOptions {
        run_dir: place.dir.path().to_owned(),
        ..place.with_tokens(&[("a", "read", "t")])
    })
    .await;
    let wrong = ApiOptions {
        ca: Some(place.path("n1/ca.pem")),
        ..at(&plain, "https")
    };
    let error = asks(wrong, "/who").await.unwrap_err();
    assert!(matches!(error, ApiError::Tls { .. }), "{error:?}");
}

#[tokio::test]
async fn a_body_that_is_refused_half_way_is_told_why() {
    let place = Place::new();
    let mut small = place.options();
    small.limits.body_bytes = 1 << 20;
    let server = start(small).await;
    let options = options(&server);
    let asking = tokio::task::spawn_blocking(move || {
        let client = ApiClient::new(&options).unwrap();
        client.post("/length", &"x".repeat(3 << 20)).unwrap_err()
    });
    match asking.await.unwrap() {
        ApiError::Refused(problem) => assert_eq!(problem.status, 413),
        other => panic!("{other:?}"),
    }
}
