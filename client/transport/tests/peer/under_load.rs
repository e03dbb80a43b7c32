//! Tests of handshakes under load: a client has to prove that it receives at its address (QUIC Retry).

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use permafrost_identity::Role;
use permafrost_transport::peer::PeerOptions;

use super::site::{LONG, Site, deadline, ping};

/// A relay of UDP datagrams between one client and a node, which inspects the node's datagrams.
struct Relay {
    address: SocketAddr,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    /// Number of datagrams of the node.
    datagrams: AtomicU64,
    /// Number of Retry packets of the node.
    retries: AtomicU64,
    over: AtomicBool,
}

impl Relay {
    /// Starts a relay. `deaf`: no datagram of the node reaches the client, so that its handshake stays under
    /// way.
    fn start(node: SocketAddr, deaf: bool) -> Self {
        let front = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let back = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        back.connect(node).unwrap();
        let address = front.local_addr().unwrap();
        let seen = Arc::new(Seen::default());
        let tick = Some(Duration::from_millis(50));
        front.set_read_timeout(tick).unwrap();
        back.set_read_timeout(tick).unwrap();
        let (to_node, watched) = (back.try_clone().unwrap(), Arc::clone(&seen));
        let client = Arc::new(parking_lot::Mutex::new(None));
        let (from, to_client) = (Arc::clone(&client), front.try_clone().unwrap());
        std::thread::spawn(move || {
            let mut buffer = vec![0; 65_536];
            while !watched.over.load(Ordering::SeqCst) {
                if let Ok((bytes, sender)) = front.recv_from(&mut buffer) {
                    *from.lock() = Some(sender);
                    let _ = to_node.send(&buffer[..bytes]);
                }
            }
        });
        let watched = Arc::clone(&seen);
        std::thread::spawn(move || {
            let mut buffer = vec![0; 65_536];
            while !watched.over.load(Ordering::SeqCst) {
                let Ok(bytes) = back.recv(&mut buffer) else {
                    continue;
                };
                let datagram = &buffer[..bytes];
                watched.datagrams.fetch_add(1, Ordering::SeqCst);
                watched
                    .retries
                    .fetch_add(is_retry(datagram).into(), Ordering::SeqCst);
                if let (false, Some(client)) = (deaf, *client.lock()) {
                    let _ = to_client.send_to(datagram, client);
                }
            }
        });
        Self { address, seen }
    }

    fn retries(&self) -> u64 {
        self.seen.retries.load(Ordering::SeqCst)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.seen.over.store(true, Ordering::SeqCst);
    }
}

/// Returns true for a Retry packet: long header, fixed bit, type 3, version 1 (RFC 9000, section 17.2.5).
fn is_retry(datagram: &[u8]) -> bool {
    matches!(datagram, [first, 0, 0, 0, 1, ..] if first & 0xF0 == 0xF0)
}

#[test]
fn with_many_handshakes_under_way_an_address_has_to_be_proved() {
    let site = Site::new(PeerOptions {
        // From one under way on.
        handshakes: 4,
        handshake_timeout: LONG,
        idle_timeout: LONG,
        ..PeerOptions::default()
    });
    let calm = Relay::start(site.address(), false);
    let network = site.network_to("calm", calm.address);
    network.call("there", ping(), deadline()).unwrap();
    assert_eq!(calm.retries(), 0);

    let deaf = Relay::start(site.address(), true);
    let identity = site.identity("deaf", Role::Agent);
    let stalled = site.runtime.block_on(async {
        let endpoint = quinn::Endpoint::client((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let connecting = identity.connect(&endpoint, deaf.address, "there").unwrap();
        (endpoint, connecting)
    });
    let until = Instant::now() + LONG;
    while deaf.seen.datagrams.load(Ordering::SeqCst) == 0 {
        assert!(Instant::now() < until, "the node does not answer");
        std::thread::sleep(Duration::from_millis(5));
    }

    let busy = Relay::start(site.address(), false);
    let network = site.network_to("busy", busy.address);
    network.call("there", ping(), deadline()).unwrap();
    assert!(busy.retries() > 0, "connected without a Retry");
    // The first connection was not told to retry.
    assert_eq!(deaf.retries(), 0);
    drop(stalled);
}
