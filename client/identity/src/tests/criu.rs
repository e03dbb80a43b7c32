//! Tests of CRIU's side of TLS, played by rustls: an immediate handshake, commands, and a close_notify whose
//! reply is awaited.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, StreamOwned, SupportedProtocolVersion};

use super::*;

const LIMIT: Duration = Duration::from_secs(30);

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    ours.set_read_timeout(Some(LIMIT)).unwrap();
    (ours, listener.accept().unwrap().0)
}

/// Connects like `criu --tls --tls-cacert TRUSTS/ca.pem --tls-cert SHOWS/cert.pem --tls-key SHOWS/key.pem`.
fn criu(
    stream: TcpStream,
    version: &'static SupportedProtocolVersion,
    trusts: &Path,
    shows: Option<&Path>,
) -> StreamOwned<ClientConnection, TcpStream> {
    let builder = ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(tls::root_store(&trusts.join("ca.pem")).unwrap());
    let config = match shows {
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
    // CRIU compares its --address.
    let name = ServerName::try_from("127.0.0.1").unwrap();
    StreamOwned::new(
        ClientConnection::new(Arc::new(config), name).unwrap(),
        stream,
    )
}

fn node(cluster: &Cluster) -> CriuTls {
    let order = CertificateOrder {
        hosts: vec!["127.0.0.1".to_owned(), "node-1.example.org".to_owned()],
        ..CertificateOrder::new("n1", Role::Node)
    };
    let place = cluster.place("n1");
    cluster.authority.issue(&order, &place, false).unwrap();
    CriuTls::new(&Identity::load(&place).unwrap()).unwrap()
}

#[test]
fn commands_and_replies_pass_and_the_end_is_answered() {
    let cluster = Cluster::new();
    let server = node(&cluster);
    let agent = cluster.issue("a1", Role::Agent);
    for version in [&rustls::version::TLS13, &rustls::version::TLS12] {
        let (ours, theirs) = pair();
        let client = thread::spawn({
            let agent = agent.clone();
            move || {
                let mut stream = criu(ours, version, &agent, Some(&agent));
                // More than a record and more than rustls buffers.
                let pages = vec![7; 300_000];
                stream.write_all(&pages).unwrap();
                stream.flush().unwrap();
                // A reply has to come in one read, and with nothing before it.
                let mut reply = [0; 8];
                assert_eq!(stream.read(&mut reply).unwrap(), 4);
                stream.conn.send_close_notify();
                stream.flush().unwrap();
                // The close_notify of the other side; an end without one would be an error.
                assert_eq!(stream.read(&mut reply).unwrap(), 0);
            }
        });
        assert!(begins_with_tls(&theirs, LIMIT).unwrap());
        let mut stream = server.accept(theirs, LIMIT).unwrap();
        assert_eq!(
            (stream.peer().name(), stream.peer().role()),
            ("a1", Role::Agent)
        );
        let mut pages = vec![0; 300_000];
        stream.read_exact(&mut pages).unwrap();
        assert!(pages.iter().all(|&byte| byte == 7));
        stream.write_all(&0_u32.to_le_bytes()).unwrap();
        assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
        assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0, "and stays at its end");
        client.join().unwrap();
    }
}

#[test]
fn what_was_read_along_is_announced() {
    let cluster = Cluster::new();
    let server = node(&cluster);
    let agent = cluster.issue("a1", Role::Agent);
    let (ours, theirs) = pair();
    let client = thread::spawn(move || {
        let mut stream = criu(ours, &rustls::version::TLS13, &agent, Some(&agent));
        stream.write_all(b"abcdefgh").unwrap();
        stream.flush().unwrap();
        stream
    });
    let mut stream = server.accept(theirs, LIMIT).unwrap();
    let mut first = [0; 4];
    stream.read_exact(&mut first).unwrap();
    stream.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"efgh");
    drop(client.join().unwrap());
    // No close_notify: the stream was cut, which must not look like CRIU's end.
    let error = stream.read(&mut first).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
}

#[test]
fn clients_without_a_certificate_of_ours_are_refused() {
    let cluster = Cluster::new();
    let others = Cluster::new();
    let server = node(&cluster);
    let stranger = others.issue("a1", Role::Agent);
    let expired = cluster.issue_between("old", Role::Agent, -7200, -3600);
    for version in [&rustls::version::TLS13, &rustls::version::TLS12] {
        for (shows, expected) in [
            (None, "peer sent no certificates"),
            (Some(&stranger), "UnknownIssuer"),
            (Some(&expired), "certificate expired"),
        ] {
            let (ours, theirs) = pair();
            let trusts = cluster.place("n1");
            let shows = shows.cloned();
            let client = thread::spawn(move || {
                let mut stream = criu(ours, version, &trusts, shows.as_deref());
                // In TLS 1.3 the refusal comes behind the handshake.
                let _ = stream.write_all(b"x");
                let _ = stream.flush();
                stream.read(&mut [0; 1]).unwrap_err().to_string()
            });
            let refusal = server.accept(theirs, LIMIT).unwrap_err();
            assert!(matches!(refusal, TlsError::Refused(_)), "{refusal}");
            assert!(refusal.to_string().contains(expected), "{refusal}");
            let alert = client.join().unwrap();
            assert!(alert.contains("alert"), "the client is told: {alert}");
        }
    }
}

#[test]
fn a_quic_endpoint_speaks_no_tls_1_2() {
    let cluster = Cluster::new();
    let node = Identity::load(cluster.issue("n1", Role::Node)).unwrap();
    let config = tls::server_config(node.source(), &[&rustls::version::TLS13]).unwrap();
    let (ours, mut theirs) = pair();
    let place = cluster.place("n1");
    let client = thread::spawn(move || {
        let mut stream = criu(ours, &rustls::version::TLS12, &place, Some(&place));
        stream
            .write_all(b"x")
            .and_then(|()| stream.flush())
            .unwrap_err()
    });
    let mut connection = rustls::ServerConnection::new(Arc::new(config)).unwrap();
    let refusal = connection.complete_io(&mut theirs).unwrap_err();
    assert!(
        refusal.to_string().contains("Tls12NotOfferedOrEnabled"),
        "{refusal}"
    );
    client.join().unwrap();
}

#[test]
fn silence_slowness_and_garbage_end_in_time() {
    let cluster = Cluster::new();
    let server = node(&cluster);
    let short = Duration::from_millis(300);

    let (_ours, theirs) = pair();
    let silent = begins_with_tls(&theirs, short).unwrap_err();
    assert_eq!(silent.kind(), std::io::ErrorKind::TimedOut);
    let refusal = server.accept(theirs, short).unwrap_err();
    assert!(
        matches!(&refusal, TlsError::Io(error) if error.kind() == std::io::ErrorKind::TimedOut)
    );

    // A byte now and then: no read takes long, all of them would.
    let (mut ours, theirs) = pair();
    let drip = thread::spawn(move || {
        let hello = [0x16, 0x03, 0x01, 0x40, 0x00];
        for byte in hello.into_iter().chain(std::iter::repeat(0)) {
            if ours.write_all(&[byte]).is_err() {
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
    });
    let started = std::time::Instant::now();
    assert!(server.accept(theirs, short).is_err());
    assert!(started.elapsed() < Duration::from_secs(20));
    drip.join().unwrap();

    let (mut ours, theirs) = pair();
    ours.write_all(b"\x16\x03garbage that is no record")
        .unwrap();
    assert!(begins_with_tls(&theirs, LIMIT).unwrap());
    assert!(matches!(
        server.accept(theirs, LIMIT),
        Err(TlsError::Refused(_))
    ));

    let (ours, theirs) = pair();
    drop(ours);
    assert!(!begins_with_tls(&theirs, LIMIT).unwrap());
    assert!(matches!(server.accept(theirs, LIMIT), Err(TlsError::Io(_))));
}

#[test]
fn a_page_server_command_is_no_handshake() {
    for first in [
        &[][..],
        &[0x16],
        &[0x03, 0x00],
        &[0x16, 0x04],
        &[0x17, 0x03],
    ] {
        assert!(!looks_like_tls(first));
    }
    let (mut ours, theirs) = pair();
    ours.write_all(&[3, 0, 0, 0]).unwrap();
    assert!(!begins_with_tls(&theirs, LIMIT).unwrap());
    // The second byte late.
    let (mut ours, theirs) = pair();
    ours.write_all(&[0x16]).unwrap();
    let late = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        ours.write_all(&[0x03]).unwrap();
        ours
    });
    assert!(begins_with_tls(&theirs, LIMIT).unwrap());
    let mut taken = [0; 2];
    (&theirs).read_exact(&mut taken).unwrap();
    assert_eq!(taken, [0x16, 0x03], "looking takes nothing");
    drop(late.join().unwrap());
}

#[test]
fn a_stream_ends_when_its_certificate_is_denied() {
    let cluster = Cluster::new();
    drop(node(&cluster));
    let identity = ReloadingIdentity::load(cluster.place("n1")).unwrap();
    let server = CriuTls::reloading(&identity).unwrap();
    let agent = cluster.issue("a1", Role::Agent);
    let serial = Subject::in_directory(&agent).unwrap().serial;
    let (ours, theirs) = pair();
    let client = thread::spawn(move || {
        let mut stream = criu(ours, &rustls::version::TLS13, &agent, Some(&agent));
        stream.write_all(b"x").unwrap();
        stream.flush().unwrap();
        // The connection ends, in whichever way.
        let _ = stream.read(&mut [0; 8]);
    });
    let mut stream = server.accept(theirs, LIMIT).unwrap();
    stream.read_exact(&mut [0; 1]).unwrap();
    identity.deny([&Denial::serial(&serial).unwrap()]).unwrap();
    let ended = stream.read(&mut [0; 8]);
    assert!(!matches!(ended, Ok(1..)), "{ended:?}");
    client.join().unwrap();
    drop(stream);

    let (ours, theirs) = pair();
    let agent = cluster.place("a1");
    let client = thread::spawn(move || {
        let mut stream = criu(ours, &rustls::version::TLS12, &agent, Some(&agent));
        let _ = stream.write_all(b"x").and_then(|()| stream.flush());
    });
    let refused = server.accept(theirs, LIMIT).unwrap_err();
    assert!(refused.to_string().contains("Revoked"), "{refused}");
    client.join().unwrap();
}
