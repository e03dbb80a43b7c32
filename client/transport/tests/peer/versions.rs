//! Tests of ends that speak different versions, and of requests on a connection that has died.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use permafrost_protocol::control;
use permafrost_protocol::versions::VersionRange;
use permafrost_protocol::wire::message::request;
use permafrost_transport::peer::{DumpSender, FetchReader, Network, PeerError, PeerOptions};

use super::interruptions::Proxy;
use super::site::{Site, content, deadline, dump_request, ping, send_all};

fn speaking(oldest: u32, newest: u32) -> PeerOptions {
    PeerOptions {
        wire: VersionRange { oldest, newest },
        ..PeerOptions::default()
    }
}

/// Returns a request that must not be made twice.
fn open() -> request::Body {
    request::Body::Control(control::Request {
        version: 1,
        body: Some(control::request::Body::Open(control::request::Open {
            job: "job".to_owned(),
            ..control::request::Open::default()
        })),
    })
}

fn fetch() -> request::Fetch {
    request::Fetch {
        checkpoint: "c".repeat(32),
        ..request::Fetch::default()
    }
}

#[test]
fn neighbours_of_either_side_dump_fetch_and_ask() {
    for (server, newest) in [(1, 2), (2, 1)] {
        let site = Site::new(speaking(1, server));
        let network = site.network_with("here", site.address(), speaking(1, newest));
        network.call("there", ping(), deadline()).unwrap();
        let events = content(61, 40);
        send_all(&network, 1, &events);
        assert!(site.recorder.wait(&[1; 16]).events == events);
        let fetched = FetchReader::open(&network, "there", fetch(), deadline()).unwrap();
        assert!(fetched.opened().content_digest == vec![9; 32] && fetched.count() == 0);
        let refused = network.call("there", open(), deadline()).unwrap_err();
        assert!(matches!(refused, PeerError::Refused { .. }), "{refused}");
    }
}

#[test]
fn ends_without_a_common_version_say_who_must_be_upgraded() {
    for (server, client, older) in [((2, 2), (1, 1), "here"), ((1, 1), (2, 2), "there")] {
        let site = Site::new(speaking(server.0, server.1));
        let network = site.network_with("here", site.address(), speaking(client.0, client.1));
        let begun = Instant::now();
        let refused = network.call("there", ping(), deadline()).unwrap_err();
        let said = refused.to_string();
        assert!(matches!(refused, PeerError::Versions { .. }), "{said}");
        for part in [
            format!(
                "there (release {}) speaks {}",
                env!("CARGO_PKG_VERSION"),
                server.0
            ),
            format!(
                "here (release {}) speaks {}",
                env!("CARGO_PKG_VERSION"),
                client.0
            ),
            format!("upgrade {older}, one release at a time"),
        ] {
            assert!(said.contains(&part), "{part:?} is not in {said:?}");
        }
        let dump = DumpSender::open(&network, "there", dump_request(1), deadline());
        assert!(matches!(dump.err(), Some(PeerError::Versions { .. })));
        let fetched = FetchReader::open(&network, "there", fetch(), deadline());
        assert!(matches!(fetched.err(), Some(PeerError::Versions { .. })));
        assert!(begun.elapsed() < Duration::from_secs(20), "not tried again");
        assert_eq!(site.recorder.calls.load(Ordering::SeqCst), 0);
    }
}

/// A node that is killed and started again, and the answers to the first request after that.
fn restarted(options: PeerOptions, body: request::Body) -> (Result<(), PeerError>, u64, u64) {
    let site = Site::new(PeerOptions {
        // Nobody notices before the request does.
        keep_alive: Duration::from_secs(60),
        idle_timeout: Duration::from_secs(60),
        ..options.clone()
    });
    let proxy = Proxy::start(site.address());
    let network: Network = site.network_to("here", proxy.address);
    network.call("there", ping(), deadline()).unwrap();
    // What the connection sends by itself must not reach the successor, which would end the connection before.
    proxy.dropping.store(true, Ordering::SeqCst);
    let (successor, recorder) = site.successor();
    proxy.switch(successor.local_address().unwrap());
    proxy.dropping.store(false, Ordering::SeqCst);
    let answered = network.call("there", body, deadline()).map(drop);
    let calls = |recorder: &super::site::Recorder| recorder.calls.load(Ordering::SeqCst);
    (answered, calls(&site.recorder), calls(&recorder))
}

#[test]
fn the_first_request_after_a_restart_is_sent_once_more_unless_it_may_have_arrived() {
    let (answered, ..) = restarted(speaking(1, 2), ping());
    answered.unwrap();
    let (answered, ..) = restarted(speaking(1, 1), ping());
    answered.unwrap();
    // The node had not answered the Hello: the request was not sent.
    let (answered, before, after) = restarted(speaking(1, 2), open());
    let refused = answered.unwrap_err();
    assert!(refused.to_string().contains("not here"), "{refused}");
    assert_eq!((before, after), (0, 1));
    // In version 1 nobody knows.
    let (answered, before, after) = restarted(speaking(1, 1), open());
    let lost = answered.unwrap_err();
    assert!(matches!(lost, PeerError::Lost { .. }), "{lost}");
    assert_eq!((before, after), (0, 0));
}

#[test]
fn a_node_without_a_common_version_is_not_asked_again_at_once() {
    let site = Site::new(speaking(2, 2));
    let proxy = Proxy::start(site.address());
    let network = site.network_with("here", proxy.address, speaking(1, 1));
    for _ in 0..300 {
        let refused = network.call("there", ping(), deadline()).unwrap_err();
        assert!(matches!(refused, PeerError::Versions { .. }), "{refused}");
    }
    // Each handshake takes some.
    let sent = proxy.sent.load(Ordering::SeqCst);
    assert!((1..300).contains(&sent), "{sent} datagrams");
}

#[test]
fn a_request_that_is_refused_before_its_end_brings_the_reason() {
    let site = Site::new(PeerOptions::default());
    let network = site.network();
    let long = request::Body::Control(control::Request {
        version: 1,
        body: Some(control::request::Body::Show(control::request::Show {
            checkpoint: "c".repeat(15 << 20),
        })),
    });
    let refused = network.call("there", long, deadline()).unwrap_err();
    let PeerError::Refused { error, .. } = refused else {
        panic!("{refused}");
    };
    assert!(error.message.contains("longer than"), "{}", error.message);
    network.call("there", ping(), deadline()).unwrap();
}
