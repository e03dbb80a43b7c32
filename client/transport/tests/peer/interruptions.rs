//! Tests of connections that are lost in the middle of a dump.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use permafrost_protocol::wire::message::request;
use permafrost_transport::peer::{DumpSender, FetchReader, PeerError, PeerOptions};

use super::site::{Site, content, deadline, dump_request, finish, ping, send, send_all};

/// Returns options by which a dead peer is noticed soon; on a busy machine, a connection may at worst be lost
/// once too often.
fn quick() -> PeerOptions {
    PeerOptions {
        idle_timeout: Duration::from_millis(1500),
        keep_alive: Duration::from_millis(300),
        reconnect: Duration::from_secs(60),
        ..PeerOptions::default()
    }
}

#[test]
fn a_dump_goes_on_after_its_connection_was_closed() {
    let site = Arc::new(Site::new(PeerOptions::default()));
    let at = Arc::downgrade(&site);
    *site.recorder.before_frame.lock() = Some(Box::new(move |number| {
        if (number == 40 || number == 90)
            && let Some(site) = at.upgrade()
        {
            site.endpoint.disconnect();
        }
    }));
    let network = site.network();
    let events = content(41, 300);
    let dump = send_all(&network, 1, &events);
    assert!(
        site.recorder.wait(&[1; 16]).events == events,
        "each frame once, in order"
    );
    let conversations = dump.progress().conversations;
    assert!(conversations >= 2, "{conversations} conversations");
}

#[test]
fn a_commit_whose_answer_was_lost_is_answered_on_the_next_connection() {
    let site = Arc::new(Site::new(PeerOptions::default()));
    let at = Arc::downgrade(&site);
    *site.recorder.before_committed.lock() = Some(Box::new(move |_| {
        if let Some(site) = at.upgrade() {
            site.endpoint.disconnect();
        }
        // Makes the reply find no connection.
        std::thread::sleep(Duration::from_millis(300));
    }));
    let network = site.network();
    let events = content(42, 20);
    let dump = send_all(&network, 2, &events);
    assert!(dump.progress().conversations >= 2);
    assert_eq!(site.recorder.wait(&[2; 16]).end, Some(Ok(())));
}

#[test]
fn a_dump_goes_on_after_the_network_dropped_everything_for_a_while() {
    let site = Site::new(quick());
    let proxy = Proxy::start(site.address());
    let network = site.network_to("here", proxy.address);
    let events = content(43, 400);
    let mut dump = DumpSender::open(&network, "there", dump_request(3), deadline()).unwrap();
    let (first, rest) = events.split_at(events.len() / 4);
    send(&mut dump, first).unwrap();
    proxy.dropping.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_secs(4));
            proxy.dropping.store(false, Ordering::SeqCst);
        });
        send(&mut dump, rest).unwrap();
    });
    finish(&mut dump);
    assert!(proxy.dropped.load(Ordering::SeqCst) > 0);
    assert!(dump.progress().conversations >= 2, "{:?}", dump.progress());
    assert!(site.recorder.wait(&[3; 16]).events == events);
}

#[test]
fn a_sender_gives_up_when_the_connection_does_not_come_back_and_so_does_the_receiver() {
    let site = Site::new(PeerOptions {
        reconnect: Duration::from_secs(1),
        grace: Duration::from_secs(1),
        handshake_timeout: Duration::from_secs(1),
        ..quick()
    });
    let proxy = Proxy::start(site.address());
    let network = site.network_to("here", proxy.address);
    let events = content(44, 40);
    let mut dump = DumpSender::open(&network, "there", dump_request(4), deadline()).unwrap();
    send(&mut dump, &events[..20]).unwrap();
    proxy.dropping.store(true, Ordering::SeqCst);
    let start = Instant::now();
    let error = dump.close(deadline()).unwrap_err();
    let is_loss = matches!(
        error,
        PeerError::Lost { .. } | PeerError::Unreachable { .. }
    );
    assert!(is_loss, "{error}");
    assert!(
        start.elapsed() < Duration::from_secs(30),
        "{:?}",
        start.elapsed()
    );
    let end = site.recorder.wait(&[4; 16]).end;
    assert!(
        matches!(&end, Some(Err(why)) if why.contains("grace")),
        "{end:?}"
    );
}

/// With other nodes to turn to, a fetch must not wait until its node is back.
#[test]
fn a_fetch_that_others_can_serve_ends_with_its_connection() {
    let site = Site::new(quick());
    let proxy = Proxy::start(site.address());
    let network = site.network_to("here", proxy.address);
    assert!(!network.has_answered("there", Duration::MAX));
    network.call("there", ping(), deadline()).unwrap();
    assert!(network.has_answered("there", Duration::MAX));
    assert!(!network.has_answered("there", Duration::ZERO));
    proxy.dropping.store(true, Ordering::SeqCst);
    let fetch = request::Fetch {
        checkpoint: "f".repeat(32),
        ..request::Fetch::default()
    };
    let fetched = FetchReader::open_once(&network, "there", fetch, deadline());
    let error = fetched.map(drop).unwrap_err();
    assert!(matches!(error, PeerError::Lost { .. }), "{error}");
    assert!(!network.has_answered("there", Duration::MAX));
    // Nor is a new connection waited for as long as the reply.
    let fetch = request::Fetch::default();
    let fetched = FetchReader::open_once(&network, "there", fetch, deadline());
    let error = fetched.map(drop).unwrap_err();
    assert!(matches!(error, PeerError::Unreachable { .. }), "{error}");
}

#[test]
fn an_aborted_dump_ends_at_the_receiver_at_once() {
    let site = Site::new(PeerOptions::default());
    let network = site.network();
    let events = content(45, 40);
    let mut dump = DumpSender::open(&network, "there", dump_request(6), deadline()).unwrap();
    send(&mut dump, &events[..20]).unwrap();
    let start = Instant::now();
    dump.abort();
    let end = site.recorder.wait(&[6; 16]).end;
    assert!(matches!(end, Some(Err(_))), "{end:?}");
    // Well within the grace of 30 s, which is for lost connections.
    assert!(start.elapsed() < Duration::from_secs(15));
}

/// A proxy that passes datagrams between clients and a server, or drops them.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    back: UdpSocket,
    pub(crate) dropping: Arc<AtomicBool>,
    dropped: Arc<AtomicU64>,
    /// Datagrams that clients have sent.
    pub(crate) sent: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
}

impl Proxy {
    /// Sends what comes from now on to another server; nothing comes from the one before.
    pub(crate) fn switch(&self, server: SocketAddr) {
        self.back.connect(server).unwrap();
    }

    pub(crate) fn start(server: SocketAddr) -> Self {
        let front = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let back = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        back.connect(server).unwrap();
        let proxy = Self {
            address: front.local_addr().unwrap(),
            back: back.try_clone().unwrap(),
            dropping: Arc::default(),
            dropped: Arc::default(),
            sent: Arc::default(),
            over: Arc::default(),
        };
        for socket in [&front, &back] {
            let timeout = Some(Duration::from_millis(100));
            socket.set_read_timeout(timeout).unwrap();
        }
        let client = Arc::new(parking_lot::Mutex::new(None));
        for to_server in [true, false] {
            let (front, back) = (front.try_clone().unwrap(), back.try_clone().unwrap());
            let (dropping, dropped) = (Arc::clone(&proxy.dropping), Arc::clone(&proxy.dropped));
            let (over, client) = (Arc::clone(&proxy.over), Arc::clone(&client));
            let sent = Arc::clone(&proxy.sent);
            std::thread::spawn(move || {
                let mut datagram = vec![0; 65_536];
                while !over.load(Ordering::SeqCst) {
                    let received = if to_server {
                        front.recv_from(&mut datagram).map(|(length, from)| {
                            *client.lock() = Some(from);
                            sent.fetch_add(1, Ordering::SeqCst);
                            length
                        })
                    } else {
                        back.recv(&mut datagram)
                    };
                    let Ok(length) = received else { continue };
                    if dropping.load(Ordering::SeqCst) {
                        dropped.fetch_add(1, Ordering::SeqCst);
                        continue;
                    }
                    let _ = if to_server {
                        back.send(&datagram[..length])
                    } else {
                        let client = client.lock();
                        client.map_or(Ok(0), |client| front.send_to(&datagram[..length], client))
                    };
                }
            });
        }
        proxy
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
    }
}
