//! Connections between roles: the permitted ones, and the side that reports each refusal.

use std::net::SocketAddr;
use std::sync::Arc;

use permafrost_protocol::versions::{self, Interface};
use permafrost_protocol::wire;
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, Connection, ConnectionError, Endpoint, ServerConfig};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::*;

fn localhost() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

/// Returns the server's and the client's result of a connection. The client's result counts only once the
/// server has answered on it.
async fn meet(
    server: &Endpoint,
    client: ClientConfig,
    name: &str,
) -> (
    Result<Connection, ConnectionError>,
    Result<Connection, ConnectionError>,
) {
    let address = server.local_addr().unwrap();
    let accepting = async {
        let connection = server.accept().await.unwrap().await?;
        let mut stream = connection.open_uni().await?;
        stream.write_all(b"x").await.ok();
        stream.finish().ok();
        // The client opens a stream in reply, which shows that it has read the server's.
        connection.accept_uni().await?;
        Ok(connection)
    };
    let connecting = async {
        let endpoint = Endpoint::client(localhost()).unwrap();
        let connection = endpoint
            .connect_with(client, address, name)
            .unwrap()
            .await?;
        let mut stream = connection.accept_uni().await?;
        stream.read_to_end(1).await.ok();
        let mut stream = connection.open_uni().await?;
        stream.write_all(b"x").await.ok();
        stream.finish().ok();
        Ok(connection)
    };
    let both = async { tokio::join!(accepting, connecting) };
    tokio::time::timeout(Duration::from_secs(60), both)
        .await
        .expect("a side hangs")
}

fn listen(config: ServerConfig) -> Endpoint {
    Endpoint::server(config, localhost()).unwrap()
}

fn said(result: Result<Connection, ConnectionError>) -> String {
    match result {
        Ok(connection) => format!("connected to {:?}", Peer::of(&connection)),
        Err(error) => error.to_string(),
    }
}

/// Returns a client's configuration from a directory that [`Identity::load`] would refuse.
fn unchecked(trusts: &Path, shows: Option<&Path>) -> ClientConfig {
    let roots = tls::root_store(&trusts.join("ca.pem")).unwrap();
    let builder = rustls::ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match shows {
        Some(shows) => builder
            .with_client_auth_cert(
                CertificateDer::pem_file_iter(shows.join("cert.pem"))
                    .unwrap()
                    .map(Result::unwrap)
                    .collect(),
                PrivateKeyDer::from_pem_file(shows.join("key.pem")).unwrap(),
            )
            .unwrap(),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = wire::offered(Interface::Wire.built());
    ClientConfig::new(Arc::new(QuicClientConfig::try_from(config).unwrap()))
}

#[test]
fn each_side_learns_who_the_other_is() {
    let cluster = Cluster::new();
    let node = cluster.identity("n1", Role::Node);
    let order = CertificateOrder {
        namespaces: Namespaces::new(["team-b", "team-a"]).unwrap(),
        ..CertificateOrder::new("a1", Role::Agent)
    };
    let place = cluster.place("a1");
    cluster.authority.issue(&order, &place, false).unwrap();
    let agent = Identity::load(&place).unwrap();

    runtime().block_on(async {
        let server = listen(node.quic_server_config().unwrap());
        let (accepted, connected) =
            meet(&server, agent.quic_client_config(), &server_name("n1")).await;
        let client = Peer::of(&accepted.unwrap()).unwrap();
        let server = Peer::of(&connected.unwrap()).unwrap();
        assert_eq!((server.name(), server.role()), ("n1", Role::Node));
        assert!(server.namespaces().is_empty());
        assert_eq!((client.name(), client.role()), ("a1", Role::Agent));
        assert_eq!(
            client.namespaces().iter().collect::<Vec<_>>(),
            ["team-a", "team-b"]
        );
        let (own, other) = ("team-a/x".parse().unwrap(), "x".parse().unwrap());
        assert!(client.may(Action::DumpInto(&own)));
        assert!(!client.may(Action::DumpInto(&other)));
        let left = client
            .not_after()
            .duration_since(SystemTime::now())
            .unwrap();
        assert!(left > DAY * 89 && left <= DAY * 90, "{left:?}");
    });
}

#[test]
fn a_server_refuses_clients_that_show_nothing_or_the_wrong_thing() {
    let cluster = Cluster::new();
    let node = cluster.identity("n1", Role::Node);
    let ca = cluster.place("n1");
    let others = Cluster::new();
    let stranger = others.issue("a1", Role::Agent);
    let expired = cluster.issue_between("old", Role::Agent, -7200, -3600);
    let early = cluster.issue_between("early", Role::Agent, 3600, 7200);
    runtime().block_on(async {
        let server = listen(node.quic_server_config().unwrap());
        for (shows, expected) in [
            (None, "peer sent no certificates"),
            (Some(&stranger), "UnknownIssuer"),
            (Some(&expired), "certificate expired"),
            (Some(&early), "not valid yet"),
        ] {
            let client = unchecked(&ca, shows.map(PathBuf::as_path));
            let (accepted, connected) = meet(&server, client, &server_name("n1")).await;
            let refusal = said(accepted);
            assert!(refusal.contains(expected), "{expected}: {refusal}");
            assert!(connected.is_err());
        }
    });
}

#[test]
fn a_client_refuses_servers_of_another_ca_name_or_role() {
    let cluster = Cluster::new();
    let others = Cluster::new();
    let agent = cluster.identity("a1", Role::Agent);
    // An agent's certificate, shown by a server, even under the name that it holds.
    let posing = cluster.identity("n3", Role::Agent);
    runtime().block_on(async {
        for (server, name, expected) in [
            (
                cluster.identity("n1", Role::Node),
                server_name("n2"),
                "not valid for name",
            ),
            (
                others.identity("n1", Role::Node),
                server_name("n1"),
                "UnknownIssuer",
            ),
            (posing.clone(), server_name("n3"), "certificate"),
            (
                posing.clone(),
                "n3.agent.permafrost".to_owned(),
                "certificate",
            ),
        ] {
            let server = listen(server.quic_server_config().unwrap());
            let (accepted, connected) = meet(&server, agent.quic_client_config(), &name).await;
            let refusal = said(connected);
            assert!(refusal.contains("invalid peer certificate"), "{refusal}");
            assert!(refusal.contains(expected), "{expected}: {refusal}");
            assert!(accepted.is_err());
        }
    });
}

#[test]
fn another_protocol_is_refused() {
    let cluster = Cluster::new();
    let node = cluster.identity("n1", Role::Node);
    let place = cluster.place("n1");
    runtime().block_on(async {
        let server = listen(node.quic_server_config().unwrap());
        let mut config = rustls::ClientConfig::builder_with_provider(tls::provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(tls::root_store(&place.join("ca.pem")).unwrap())
            .with_no_client_auth();
        config.alpn_protocols = vec![b"h3".to_vec()];
        let client = ClientConfig::new(Arc::new(QuicClientConfig::try_from(config).unwrap()));
        let (accepted, connected) = meet(&server, client, &server_name("n1")).await;
        assert!(accepted.is_err() && connected.is_err());
    });
}

#[test]
fn an_open_endpoint_follows_a_rotation() {
    let cluster = Cluster::new();
    let place = cluster.issue("n1", Role::Node);
    let node = ReloadingIdentity::load_every(&place, Duration::ZERO).unwrap();
    let agent = cluster.identity("a1", Role::Agent);
    let shown = |connection: &Connection| {
        let identity = connection.peer_identity().unwrap();
        identity.downcast::<Vec<CertificateDer<'static>>>().unwrap()[0].clone()
    };
    runtime().block_on(async {
        let spoken = versions::own().of(Interface::Wire);
        let server = listen(node.quic_server_config(spoken).unwrap());
        let name = server_name("n1");
        let (held, first) = meet(&server, agent.quic_client_config(), &name).await;
        let (held, first) = (held.unwrap(), first.unwrap());

        cluster.authority.reissue(&place, None).unwrap();
        let (_, second) = meet(&server, agent.quic_client_config(), &name).await;
        let second = second.unwrap();
        assert_ne!(shown(&first), shown(&second));

        // A new CA: an agent of the old one and an agent of the new one both get in, before and after the
        // node's own certificate is of the new one.
        let next = cluster.authority.succeed("test").unwrap();
        let late = cluster.place("a2");
        next.issue(&CertificateOrder::new("a2", Role::Agent), &late, false)
            .unwrap();
        let late = Identity::load(&late).unwrap();
        for _ in 0..2 {
            for client in [&agent, &late] {
                let (accepted, connected) = meet(&server, client.quic_client_config(), &name).await;
                assert_eq!(Peer::of(&accepted.unwrap()).unwrap().name(), client.name());
                connected.unwrap();
            }
            next.reissue(&place, None).unwrap();
        }

        // The old CA retired: its agent is out, and the new one's is in.
        next.retire().unwrap();
        Authority::open(&cluster.place("ca"))
            .unwrap()
            .reissue(&place, None)
            .unwrap();
        let (accepted, _) = meet(
            &server,
            unchecked(&place, Some(&cluster.place("a1"))),
            &name,
        )
        .await;
        let refusal = said(accepted);
        assert!(refusal.contains("UnknownIssuer"), "{refusal}");
        let (accepted, _) = meet(&server, late.quic_client_config(), &name).await;
        accepted.unwrap();

        // Established connections stay open.
        assert!(held.close_reason().is_none() && first.close_reason().is_none());
    });
}

#[test]
fn broken_files_leave_the_identity_before() {
    let cluster = Cluster::new();
    let place = cluster.issue("n1", Role::Node);
    let node = ReloadingIdentity::load_every(&place, Duration::from_secs(3600)).unwrap();
    assert!(!node.reload().unwrap());
    let key = files::resolve(&place).unwrap().join("key.pem");
    let sound = std::fs::read(&key).unwrap();
    write(&key, b"garbage, and of another length");
    assert!(matches!(node.reload(), Err(IdentityError::Pem { .. })));
    assert_eq!(node.current().name(), "n1");
    // Reported once: the same files are not tried again.
    assert!(!node.reload().unwrap());
    write(&key, &sound);
    assert!(node.reload().unwrap());
}
