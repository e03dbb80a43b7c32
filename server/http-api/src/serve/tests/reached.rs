//! Tests of authentication: which callers are accepted, and under which name.

use super::*;

#[tokio::test]
async fn the_socket_is_its_owners_and_allows_everything() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    // A socket that a dead daemon left behind.
    drop(std::os::unix::net::UnixListener::bind(place.path("run/api.sock")).unwrap());
    let server = start(place.options()).await;
    assert_eq!(server.address(), None);
    let mode = std::fs::metadata(server.socket()).unwrap().permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    let said = said(&mut at_socket(&server).await, ask("/who", None)).await;
    let uid = rustix::process::geteuid();
    let name = if uid.is_root() {
        "root".to_owned()
    } else {
        format!("uid {}", uid.as_raw())
    };
    assert_eq!(said.text, format!("{name} read,reserve,operate *"));
    let socket = server.socket().to_owned();
    drop(server);
    assert!(!socket.exists());
}

#[tokio::test]
async fn a_token_says_who_asks_and_a_wrong_one_is_refused() {
    let place = Place::new();
    let options = place.with_tokens(&[("slurm", "read,reserve", "secret"), ("view", "read", "v")]);
    let server = start(options).await;
    let client = &mut at_port(&server).await;
    for (token, who) in [
        ("secret", "token slurm read,reserve *"),
        ("v", "token view read *"),
    ] {
        let said = said(client, ask("/who", Some(token))).await;
        assert_eq!((said.status, said.text.as_str()), (StatusCode::OK, who));
    }
    for token in [
        None,
        Some("secret2"),
        Some(""),
        Some("SECRET"),
        Some("secret v"),
    ] {
        let client = &mut at_port(&server).await;
        let said = said(client, ask("/who", token)).await;
        assert_eq!(said.status, StatusCode::UNAUTHORIZED, "{token:?}");
        assert!(said.header("www-authenticate").starts_with("Bearer realm="));
        assert_eq!(
            said.header("www-authenticate").contains("invalid_token"),
            token.is_some()
        );
        assert_eq!(said.problem().word(), "unauthenticated");
    }
    // The scheme is case-insensitive; other schemes are refused.
    for (shown, status) in [
        ("bearer secret", StatusCode::OK),
        ("BEARER  secret", StatusCode::OK),
        ("Basic secret", StatusCode::UNAUTHORIZED),
        ("secret", StatusCode::UNAUTHORIZED),
        ("Bearer", StatusCode::UNAUTHORIZED),
    ] {
        let request = Request::get("/who").header("authorization", shown);
        let request = request.body(Full::default()).unwrap();
        let said = said(&mut at_port(&server).await, request).await;
        assert_eq!(said.status, status, "{shown}");
    }
}

#[tokio::test]
async fn a_token_that_was_taken_away_is_refused_on_an_open_connection() {
    let place = Place::new();
    let server = start(place.with_tokens(&[("a", "read", "one")])).await;
    let client = &mut at_port(&server).await;
    assert_eq!(said(client, ask("/who", Some("one"))).await.status, 200);
    place.with_tokens(&[("b", "read", "two")]);
    assert_eq!(said(client, ask("/who", Some("two"))).await.status, 200);
    assert_eq!(said(client, ask("/who", Some("one"))).await.status, 401);
}

#[tokio::test]
async fn a_certificates_role_gives_the_scopes() {
    let place = Place::new();
    let server = start(place.with_tls()).await;
    for (name, role, who) in [
        ("c7", Role::Agent, "agent c7 read,reserve team-a"),
        ("r", Role::Reader, "reader r read team-a"),
        ("ops", Role::Operator, "operator ops read,operate team-a"),
    ] {
        let shown = place.issue(name, role, &["team-a"]);
        let stream = by_tls(&server, &place, Some(&shown)).await.unwrap();
        let said = said(&mut over(stream).await, ask("/who", None)).await;
        assert_eq!(said.text, who);
    }
    let shown = place.issue("n2", Role::Node, &[]);
    let stream = by_tls(&server, &place, Some(&shown)).await.unwrap();
    let said = said(&mut over(stream).await, ask("/who", None)).await;
    // A node's certificate lists no namespaces, and needs none.
    assert_eq!(said.text, "node n2 read,reserve *");
}

#[tokio::test]
async fn without_a_certificate_it_takes_a_token() {
    let place = Place::new();
    let options = ServeOptions {
        identity: Some(place.node()),
        ..place.with_tokens(&[("slurm", "read", "secret")])
    };
    let server = start(options).await;
    let stream = by_tls(&server, &place, None).await.unwrap();
    let client = &mut over(stream).await;
    let who = said(client, ask("/who", Some("secret"))).await;
    assert_eq!(who.text, "token slurm read *");
    assert_eq!(said(client, ask("/who", None)).await.status, 401);
    // The credentials of the request take precedence over the connection's certificate.
    let agent = place.issue("c7", Role::Agent, &["*"]);
    let stream = by_tls(&server, &place, Some(&agent)).await.unwrap();
    let client = &mut over(stream).await;
    let who = said(client, ask("/who", Some("secret"))).await;
    assert_eq!(who.text, "token slurm read *");
    assert_eq!(said(client, ask("/who", Some("wrong"))).await.status, 401);
}

#[tokio::test]
async fn a_certificate_of_another_ca_is_refused() {
    let (place, other) = (Place::new(), Place::new());
    let server = start(place.with_tls()).await;
    let foreign = other.issue("c7", Role::Agent, &["*"]);
    // The client trusts our server, and shows a certificate of its own CA.
    std::fs::copy(place.path("n1/ca.pem"), place.path("ca-of-server")).unwrap();
    let error = match by_tls_showing(&server, &place, &foreign).await {
        Err(error) => error.to_string(),
        Ok(stream) => {
            // In TLS 1.3 the refusal shows with the first read.
            let mut client = over(stream).await;
            let error = client.send_request(ask("/who", None)).await.unwrap_err();
            format!("{error:?}")
        }
    };
    assert!(
        error.contains("UnknownCA") || error.contains("Closed") || error.contains("Canceled"),
        "{error}"
    );
    // Nor does the client trust our server.
    let error = by_tls(&server, &other_with(&other), Some(&foreign)).await;
    assert!(error.unwrap_err().to_string().contains("UnknownIssuer"));
}

/// Returns a place with the other side's CA.
fn other_with(other: &Place) -> Place {
    Place {
        dir: tempfile::tempdir().unwrap(),
        authority: Authority::open(&other.path("ca")).unwrap(),
    }
}

/// Makes a TLS handshake that trusts the CA of `place` and shows the certificate in `shown`.
async fn by_tls_showing(
    server: &Server,
    place: &Place,
    shown: &Path,
) -> io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let mut roots = rustls::RootCertStore::empty();
    let ca = CertificateDer::from_pem_file(place.path("n1/ca.pem")).unwrap();
    roots.add(ca).unwrap();
    let chain = vec![CertificateDer::from_pem_file(shown.join("cert.pem")).unwrap()];
    let key = PrivateKeyDer::from_pem_file(shown.join("key.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .unwrap();
    let stream = TcpStream::connect(server.address().unwrap()).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
}

#[tokio::test]
async fn new_connections_see_a_rotated_certificate_and_old_ones_go_on() {
    let place = Place::new();
    let server = start(place.with_tls()).await;
    let agent = place.issue("c7", Role::Agent, &["*"]);
    let shown_by = |stream: &tokio_rustls::client::TlsStream<TcpStream>| {
        stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
    };
    let stream = by_tls(&server, &place, Some(&agent)).await.unwrap();
    let before = shown_by(&stream);
    let old = &mut over(stream).await;
    assert_eq!(said(old, ask("/who", None)).await.status, 200);
    place.issue("n1", Role::Node, &[]);
    let stream = by_tls(&server, &place, Some(&agent)).await.unwrap();
    assert_ne!(shown_by(&stream), before);
    assert_eq!(
        said(&mut over(stream).await, ask("/who", None))
            .await
            .status,
        200
    );
    assert_eq!(said(old, ask("/who", None)).await.status, 200);
}

#[tokio::test]
async fn plain_http_at_a_tls_port_is_told_what_it_speaks() {
    let place = Place::new();
    let server = start(place.with_tls()).await;
    let said = said(&mut at_port(&server).await, ask("/who", None)).await;
    assert_eq!(said.status, StatusCode::BAD_REQUEST);
    assert!(said.problem().detail.contains("https://"));
}

#[tokio::test]
async fn nothing_is_reached_from_elsewhere_by_strangers() {
    let place = Place::new();
    let refused = async |options: ServeOptions| serve(options, router()).await.unwrap_err();
    let listen = |address: &str| Some(address.parse().unwrap());
    // Without any way to authenticate callers.
    let error = refused(ServeOptions {
        listen: listen(LOCALHOST),
        ..place.options()
    });
    let error = error.await;
    assert!(matches!(error, ApiServeError::Unguarded { .. }));
    assert!(error.hint().contains("--api-tokens"));
    // With tokens, but in clear text over a network.
    for address in ["0.0.0.0:0", "[::]:0", "10.0.0.1:0"] {
        let options = ServeOptions {
            listen: listen(address),
            ..place.with_tokens(&[("a", "read", "t")])
        };
        let error = refused(options).await;
        assert!(matches!(error, ApiServeError::Plain { .. }), "{address}");
        assert!(error.hint().contains("--identity"));
    }
    // With a file of tokens that others can read.
    let options = place.with_tokens(&[("a", "read", "t")]);
    let path = place.path("tokens");
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    assert!(matches!(refused(options).await, ApiServeError::Tokens(_)));
}

#[tokio::test]
async fn a_connection_ends_when_its_certificate_is_denied() {
    let place = Place::new();
    let options = place.with_tls();
    let identity = options.identity.clone().unwrap();
    let server = start(options).await;
    let agent = place.issue("c7", Role::Agent, &["*"]);
    let stream = by_tls(&server, &place, Some(&agent)).await.unwrap();
    let client = &mut over(stream).await;
    assert_eq!(said(client, ask("/who", None)).await.status, 200);
    let holder = "name agent c7".parse().unwrap();
    identity.deny([&holder]).unwrap();
    let begun = std::time::Instant::now();
    // Requests on their way fail when the connection ends.
    while client.send_request(ask("/who", None)).await.is_ok() {
        assert!(begun.elapsed() < std::time::Duration::from_secs(60));
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let again = by_tls(&server, &place, Some(&agent)).await;
    if let Ok(stream) = again {
        // In TLS 1.3 the refusal shows with the first read.
        let answer = over(stream).await.send_request(ask("/who", None)).await;
        assert!(answer.is_err());
    }
}
