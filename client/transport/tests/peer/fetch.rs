//! Tests of fetches: checkpoints that a node sends to a peer.

use permafrost_protocol::wire::frame::Kind;
use permafrost_protocol::wire::message::request;
use permafrost_transport::peer::{Compression, FetchReader, PeerError, PeerOptions};

use super::site::{Event, Site, content, deadline, ping};

fn request() -> request::Fetch {
    request::Fetch {
        checkpoint: "f".repeat(32),
        ..request::Fetch::default()
    }
}

#[test]
fn a_fetch_brings_what_is_stored_and_may_be_left_half_way() {
    let site = Site::new(PeerOptions {
        compression: Compression::Always,
        ..PeerOptions::default()
    });
    let stored: Vec<_> = content(31, 300)
        .into_iter()
        .filter(|event| !matches!(event, Event::Close | Event::Image(..)))
        .collect();
    site.recorder.stored.lock().clone_from(&stored);
    let network = site.network();

    let reader = FetchReader::open(&network, "there", request(), deadline()).unwrap();
    assert_eq!(reader.opened().content_digest, vec![9; 32]);
    let came: Vec<_> = reader
        .map(|frame| {
            let frame = frame.unwrap();
            let header = frame.header;
            match header.kind {
                Kind::Space => Event::Space(header.flags, header.index, header.pages),
                Kind::Pages => Event::Pages(header.index, header.flags, frame.payload.to_vec()),
                Kind::Zero => Event::Zero(header.index, header.flags, header.pages),
                Kind::Parent => Event::Parent(header.index, header.flags, header.pages),
                other => panic!("{other:?}"),
            }
        })
        .collect();
    assert!(came == stored);

    let mut left = FetchReader::open(&network, "there", request(), deadline()).unwrap();
    assert!(left.next().is_some());
    drop(left);
    network.call("there", ping(), deadline()).unwrap();
}

#[test]
fn a_refused_or_broken_fetch_says_why() {
    let site = Site::new(PeerOptions::default());
    let network = site.network();
    let refused = FetchReader::open(&network, "there", request::Fetch::default(), deadline());
    assert!(matches!(refused, Err(PeerError::Refused { .. })));

    // The stored one ends with what makes the handler give up.
    *site.recorder.stored.lock() = vec![Event::Space(1, 1, 1), Event::Zero(1, 0, 1), Event::Close];
    let reader = FetchReader::open(&network, "there", request(), deadline()).unwrap();
    let last = reader.last().unwrap();
    assert!(
        matches!(&last, Err(PeerError::Refused { error, .. }) if error.message == "given up half-way"),
        "{last:?}"
    );
}
