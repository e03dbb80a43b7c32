//! An agent that requests as much work as its frames can name: no other client waits for it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_identity::ReloadingIdentity;
use permafrost_protocol::control;
use permafrost_protocol::wire::message::{reply, request};
use permafrost_transport::peer::{self, DumpSender, Network, PeerError};

use super::Site;

/// Time limit that allows for a busy machine. Hashing the pages named below one by one takes far longer.
const LONG: Duration = Duration::from_secs(60);

/// Frames of 2^32 - 1 zero pages each.
const FRAMES: u64 = 64;

/// An agent's bare connections to one node.
struct Wire {
    network: Network,
    _runtime: tokio::runtime::Runtime,
}

impl Wire {
    fn new(site: &Site, name: &str) -> Self {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let identity = ReloadingIdentity::load(site.issue(name, "agent", Some("*"))).unwrap();
        let address = site.nodes[0].as_ref().unwrap().peers().parse().unwrap();
        let addresses: HashMap<String, SocketAddr> = [(super::name(0), address)].into();
        let network = Network::new(
            runtime.handle().clone(),
            "127.0.0.1:0".parse().unwrap(),
            Arc::new(identity),
            "",
            Arc::new(move |node: &str| addresses.get(node).copied()),
            peer::PeerOptions::default(),
        );
        Self {
            network: network.unwrap(),
            _runtime: runtime,
        }
    }

    fn ask(&self, body: control::request::Body) -> control::reply::Body {
        let asked = request::Body::Control(control::Request {
            version: 1,
            body: Some(body),
        });
        let answer = self.network.call(&super::name(0), asked, soon());
        match answer.unwrap() {
            reply::Body::Control(answer) => answer.body.unwrap(),
            other => panic!("{other:?}"),
        }
    }

    /// A dump whose first address space is open, and its session.
    fn begin(&self, job: &str) -> (DumpSender, String) {
        let open = control::request::Open {
            job: job.to_owned(),
            seal_follows: true,
            ..control::request::Open::default()
        };
        let control::reply::Body::SessionOpened(opened) =
            self.ask(control::request::Body::Open(open))
        else {
            panic!("not opened")
        };
        let dump = request::Dump {
            session: hex(&opened.session),
            job: job.to_owned(),
            ..request::Dump::default()
        };
        let mut sender = DumpSender::open(&self.network, &super::name(0), dump, soon()).unwrap();
        sender.space(0, 1, 1).unwrap();
        (sender, opened.session)
    }
}

fn soon() -> Instant {
    Instant::now() + LONG
}

fn hex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2);
    let bytes = digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16));
    bytes.collect::<Result<_, _>>().unwrap()
}

fn name_zeros(sender: &mut DumpSender) {
    for frame in 0..FRAMES {
        let index = frame * u64::from(u32::MAX);
        sender.zero(index, 1, u32::MAX).unwrap();
    }
}

#[test]
fn zeros_cost_nothing_and_work_ends_with_its_session_and_with_the_daemon() {
    let mut site = Site::new(1);
    let wire = Wire::new(&site, "hostile");

    let (mut sender, session) = wire.begin("zeros");
    name_zeros(&mut sender);
    // All of it is in, and the session waits for its images.
    sender.close(soon()).unwrap();
    let node = site.nodes[0].as_ref().unwrap();
    node.run(&["abort", &session]).unwrap();
    // The conversation ends with the session, though this side still holds it open.
    let refused = match sender.prepare(soon()) {
        Err(PeerError::Refused { error, .. }) => error.message,
        other => panic!("{other:?}: {}", site.log(0)),
    };
    assert!(refused.contains("discarded"), "{refused}");

    let (mut sender, _) = wire.begin("zeros");
    name_zeros(&mut sender);
    let daemon = site.nodes[0].take().unwrap();
    let status = daemon.stop().unwrap();
    assert!(status.success(), "{status}: {}", site.log(0));
}
