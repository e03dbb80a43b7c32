//! Tests of bulk streams over TLS: when they are used, what cuts them, and who may bring one.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use permafrost_identity::{
    Authority, CertificateOrder, Denial, Identity, Role, https_client_trusting, server_name,
};
use permafrost_protocol::wire::BULK_ALPN;
use permafrost_transport::peer::{DumpSender, PeerError, PeerOptions};

use super::interruptions::Proxy;
use super::site::{Site, content, deadline, dump_request, finish, send, send_all};

fn over_quic_only() -> PeerOptions {
    PeerOptions {
        tls_bulk: false,
        ..PeerOptions::default()
    }
}

/// A TCP proxy on the port of a UDP proxy, which counts connections, and cuts each after so many bytes.
struct TcpProxy {
    connections: Arc<AtomicUsize>,
    passed: Arc<AtomicU64>,
}

impl TcpProxy {
    fn start(front: SocketAddr, server: SocketAddr, limit: u64) -> Self {
        let listener = TcpListener::bind(front).unwrap();
        let (connections, passed) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicU64::new(0)));
        let proxy = Self {
            connections: Arc::clone(&connections),
            passed: Arc::clone(&passed),
        };
        thread::spawn(move || {
            for client in listener.incoming() {
                let client = client.unwrap();
                connections.fetch_add(1, Ordering::SeqCst);
                let server = TcpStream::connect(server).unwrap();
                let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
                thread::spawn(move || io::copy(&mut &back.0, &mut &back.1));
                let passed = Arc::clone(&passed);
                thread::spawn(move || {
                    let mut buffer = vec![0; 16 << 10];
                    while passed.load(Ordering::SeqCst) < limit {
                        let read = (&client).read(&mut buffer).unwrap_or(0);
                        if read == 0 || (&server).write_all(&buffer[..read]).is_err() {
                            break;
                        }
                        passed.fetch_add(read as u64, Ordering::SeqCst);
                    }
                    for socket in [&client, &server] {
                        let _ = socket.shutdown(Shutdown::Both);
                    }
                });
            }
        });
        proxy
    }
}

#[test]
fn a_dump_goes_over_tls_if_both_ends_take_part_and_else_over_quic() {
    let both = Site::new(PeerOptions::default());
    let neither = Site::new(over_quic_only());
    for (session, site, options, over_tls) in [
        (1, &both, PeerOptions::default(), true),
        (2, &both, over_quic_only(), false),
        (3, &neither, PeerOptions::default(), false),
    ] {
        let network = site.network_with(&format!("n{session}"), site.address(), options);
        let events = content(50 + u64::from(session), 100);
        let dump = send_all(&network, session, &events);
        assert_eq!(dump.progress().over_tls, over_tls, "session {session}");
        assert!(site.recorder.wait(&[session; 16]).events == events);
    }
}

#[test]
fn a_node_whose_tcp_port_is_taken_or_not_reached_gets_dumps_over_quic() {
    // The name of another program's port.
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let site = Site::at(taken.local_addr().unwrap(), PeerOptions::default());
    let dump = send_all(&site.network(), 1, &content(61, 20));
    assert!(!dump.progress().over_tls);

    // A firewall between the two that lets UDP through.
    let site = Site::new(PeerOptions::default());
    let proxy = Proxy::start(site.address());
    let network = site.network_to("here", proxy.address);
    let dump = send_all(&network, 1, &content(62, 20));
    assert!(!dump.progress().over_tls);
    // For a while it is not tried again.
    let tcp = TcpProxy::start(proxy.address, site.address(), u64::MAX);
    let dump = send_all(&network, 2, &content(63, 20));
    assert!(!dump.progress().over_tls);
    assert_eq!(tcp.connections.load(Ordering::SeqCst), 0);
    // Another sender tries it.
    let network = site.network_to("other", proxy.address);
    let dump = send_all(&network, 3, &content(64, 20));
    assert!(dump.progress().over_tls);
    assert_eq!(tcp.connections.load(Ordering::SeqCst), 1);
}

#[test]
fn a_dump_goes_on_over_quic_after_its_tcp_connection_was_cut() {
    for (session, limit) in [(1, 3_000), (2, 200_000), (3, 1_500_000)] {
        let site = Site::new(PeerOptions::default());
        let proxy = Proxy::start(site.address());
        let tcp = TcpProxy::start(proxy.address, site.address(), limit);
        let network = site.network_to("here", proxy.address);
        let events = content(70 + u64::from(session), 60);
        let dump = send_all(&network, session, &events);
        let progress = dump.progress();
        assert!(tcp.passed.load(Ordering::SeqCst) >= limit);
        assert_eq!(tcp.connections.load(Ordering::SeqCst), 1);
        assert!(!progress.over_tls);
        assert_eq!(progress.conversations, 2);
        assert!(
            site.recorder.wait(&[session; 16]).events == events,
            "each frame once, in order"
        );
    }
}

/// Connects, and names a session. Returns false if the node closes the connection.
fn is_kept(site: &Site, config: rustls::ClientConfig, session: u8) -> bool {
    let name = server_name("there").try_into().unwrap();
    let connection = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let socket = TcpStream::connect(site.address()).unwrap();
    let limit = Some(Duration::from_secs(1));
    socket.set_read_timeout(limit).unwrap();
    let mut stream = rustls::StreamOwned::new(connection, socket);
    if stream.write_all(&[session; 16]).is_err() {
        return false;
    }
    match stream.read(&mut [0]) {
        Ok(0) => false,
        Ok(_) => panic!("bytes from the node"),
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

/// Returns the configuration of a client with the certificate in a directory.
fn client_of(directory: impl AsRef<Path>) -> rustls::ClientConfig {
    let identity = Identity::load(directory).unwrap();
    identity.bulk_client_config().unwrap()
}

#[test]
fn only_the_peer_that_has_begun_a_dump_brings_its_pages() {
    let site = Site::new(PeerOptions::default());
    let network = site.network();
    let events = content(81, 40);
    let mut dump = DumpSender::open(&network, "there", dump_request(1), deadline()).unwrap();
    send(&mut dump, &events[..10]).unwrap();
    let directory = site.directory.path();
    let another = site.identity("another", Role::Node).current();
    let another = another.bulk_client_config().unwrap();
    assert!(!is_kept(&site, another.clone(), 1), "another peer's dump");
    assert!(!is_kept(&site, another, 2), "a dump that nobody has begun");
    // The same name, but an agent's.
    let order = CertificateOrder::new("here", Role::Agent);
    let namesake = directory.join("namesake");
    site.authority.issue(&order, &namesake, false).unwrap();
    assert!(!is_kept(&site, client_of(&namesake), 1), "an agent");
    // The dump has its stream already.
    let here = directory.join("here");
    assert!(!is_kept(&site, client_of(&here), 1), "a second stream");

    // The node of another cluster, which trusts this one.
    let elsewhere = tempfile::tempdir().unwrap();
    let foreign = Authority::create(&elsewhere.path().join("ca"), "other", false).unwrap();
    let place = elsewhere.path().join("here");
    let order = CertificateOrder::new("here", Role::Node);
    foreign.issue(&order, &place, false).unwrap();
    let mut trusted = fs::read(place.join("ca.pem")).unwrap();
    trusted.extend(fs::read(here.join("ca.pem")).unwrap());
    fs::write(place.join("ca.pem"), trusted).unwrap();
    assert!(!is_kept(&site, client_of(&place), 1), "another cluster");
    let mut anonymous = https_client_trusting(&here.join("ca.pem")).unwrap();
    anonymous.alpn_protocols = vec![BULK_ALPN.to_vec()];
    assert!(!is_kept(&site, anonymous, 1), "no certificate");
    let https = Identity::load(&here).unwrap().https_client_config();
    assert!(!is_kept(&site, https.unwrap(), 1), "another protocol");

    send(&mut dump, &events[10..]).unwrap();
    finish(&mut dump);
    assert!(dump.progress().over_tls);
    assert_eq!(dump.progress().conversations, 1);
    assert!(site.recorder.wait(&[1; 16]).events == events);
}

#[test]
fn a_sender_that_is_denied_in_the_middle_brings_no_more_pages() {
    let site = Site::new(PeerOptions {
        reconnect: Duration::from_millis(500),
        ..PeerOptions::default()
    });
    let network = site.network();
    let events = content(91, 200);
    let mut dump = DumpSender::open(&network, "there", dump_request(1), deadline()).unwrap();
    send(&mut dump, &events[..10]).unwrap();
    let holder = Denial::holder(Role::Node, "here").unwrap();
    site.endpoint.identity().deny([&holder]).unwrap();
    let sent = send(&mut dump, &events[10..]).and_then(|()| dump.prepare(deadline()).map(drop));
    assert!(sent.is_err());
    let here = client_of(site.directory.path().join("here"));
    assert!(!is_kept(&site, here, 1));
}

#[test]
fn connections_that_say_nothing_leave_room_for_those_that_do() {
    let site = Site::new(PeerOptions {
        handshakes: 8,
        handshake_timeout: Duration::from_secs(1),
        ..PeerOptions::default()
    });
    let silent: Vec<_> = (0..100)
        .map(|_| TcpStream::connect(site.address()).unwrap())
        .collect();
    for socket in &silent {
        let limit = Some(Duration::from_secs(30));
        socket.set_read_timeout(limit).unwrap();
        let read = (&mut &*socket).read(&mut [0]);
        let is_closed = match &read {
            Ok(read) => *read == 0,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        };
        assert!(is_closed, "{read:?}");
    }
    let dump = send_all(&site.network(), 1, &content(95, 20));
    assert!(dump.progress().over_tls);
}

#[test]
fn a_refusal_in_the_middle_is_heard_over_either_stream() {
    for options in [PeerOptions::default(), over_quic_only()] {
        let site = Site::new(options);
        let network = site.network();
        let mut request = dump_request(1);
        request.job = "full".to_owned();
        let mut dump = DumpSender::open(&network, "there", request, deadline()).unwrap();
        let events = content(97, 400);
        let refused = loop {
            if let Err(error) = send(&mut dump, &events[..events.len() / 2]) {
                break error;
            }
        };
        match refused {
            PeerError::Refused { error, .. } => assert_eq!(error.message, "the region is full"),
            other => panic!("{other}"),
        }
    }
}
