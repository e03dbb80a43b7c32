//! Tests of peers with a valid certificate that violate the protocol, next to one that does not.

use std::net::Ipv4Addr;
use std::time::Duration;

use permafrost_identity::Role;
use permafrost_protocol::control::framing;
use permafrost_protocol::versions::{Interface, SpokenVersions, VersionRange};
use permafrost_protocol::wire::frame::HEADER_BYTES;
use permafrost_protocol::wire::message::{Hello, Reply, Request, reply, request};
use permafrost_transport::peer::{DumpSender, PeerOptions};
use quinn::{Connection, RecvStream};

use super::site::{
    Event, LONG, Random, Site, commit, content, deadline, dump_request, finish, ping, send,
};

/// Opens a connection by hand.
fn stranger(site: &Site, name: &str) -> (quinn::Endpoint, Connection) {
    let identity = site.identity(name, Role::Agent);
    site.runtime.block_on(async {
        let endpoint = quinn::Endpoint::client((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let connecting = identity
            .connect(&endpoint, site.address(), "there")
            .unwrap();
        (endpoint, connecting.await.unwrap())
    })
}

fn newest() -> u32 {
    Interface::Wire.built().newest
}

fn hello(name: &str, version: u32) -> Vec<u8> {
    framing::encode(&Hello {
        version,
        name: name.to_owned(),
        region: String::new(),
        versions: Some(SpokenVersions::built()),
        tls_bulk: false,
    })
    .unwrap()
}

fn asks(name: &str, body: request::Body) -> Vec<u8> {
    let mut bytes = hello(name, newest());
    bytes.extend(framing::encode(&Request { body: Some(body) }).unwrap());
    bytes
}

/// Returns the next reply that is not the node's Hello.
async fn answer(receive: &mut RecvStream) -> Option<reply::Body> {
    loop {
        let mut prefix = [0; framing::LENGTH_BYTES];
        receive.read_exact(&mut prefix).await.ok()?;
        let mut body = vec![0; framing::length(prefix).unwrap()];
        receive.read_exact(&mut body).await.ok()?;
        let reply: Reply = prost::Message::decode(body.as_slice()).unwrap();
        if !matches!(reply.body, Some(reply::Body::Hello(_))) {
            return reply.body;
        }
    }
}

/// Sends `bytes` on a new stream, which stays open, and returns the reply.
fn answered(site: &Site, connection: &Connection, bytes: &[u8]) -> Option<reply::Body> {
    site.runtime.block_on(async {
        let (mut send, mut receive) = connection.open_bi().await.unwrap();
        let _ = send.write_all(bytes).await;
        let answer = tokio::time::timeout(LONG, answer(&mut receive)).await;
        answer.expect("neither an answer nor an end")
    })
}

fn message(body: Option<reply::Body>) -> String {
    match body {
        Some(reply::Body::Error(error)) => error.message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_speaks_nonsense_is_refused_and_others_do_not_notice() {
    let site = Site::new(PeerOptions {
        request_timeout: Duration::from_millis(700),
        frame_timeout: Duration::from_millis(700),
        grace: Duration::from_millis(700),
        ..PeerOptions::default()
    });
    let network = site.network();
    let events = content(51, 60);
    let mut dump = DumpSender::open(&network, "there", dump_request(1), deadline()).unwrap();
    let (first, rest) = events.split_at(20);
    send(&mut dump, first).unwrap();

    let (_endpoint, connection) = stranger(&site, "stranger");
    let old = answered(&site, &connection, &{
        let mut bytes = hello("stranger", newest() + 1);
        bytes.extend(framing::encode(&Request { body: Some(ping()) }).unwrap());
        bytes
    });
    assert!(message(old).contains("version"));
    for version in [0, 1, 65_535, u32::MAX] {
        let said = hello("stranger", version);
        let refused = message(answered(&site, &connection, &said));
        assert!(refused.contains("version"), "{refused}");
    }
    // Ranges that cannot be, or do not have what is spoken.
    for (oldest, newest) in [(0, 2), (2, 1), (1, 65_536), (3, 9), (u32::MAX, 0)] {
        let said = framing::encode(&Hello {
            version: self::newest(),
            name: "stranger".to_owned(),
            region: String::new(),
            versions: Some(SpokenVersions {
                wire: Some(VersionRange { oldest, newest }),
                ..SpokenVersions::built()
            }),
            tls_bulk: false,
        });
        let refused = message(answered(&site, &connection, &said.unwrap()));
        assert!(refused.contains("version"), "{refused}");
    }
    let liar = answered(&site, &connection, &asks("here", ping()));
    assert!(message(liar).contains("certificate"));
    let unknown = answered(&site, &connection, &{
        let mut bytes = hello("stranger", newest());
        bytes.extend(framing::encode(&Request { body: None }).unwrap());
        bytes
    });
    assert!(message(unknown).contains("does not know"));
    // Another's session is not there for this peer.
    let mut request = dump_request(1);
    request.resume = true;
    let thief = answered(
        &site,
        &connection,
        &asks("stranger", request::Body::Dump(request)),
    );
    assert!(message(thief).contains("no such session"));

    println!("seed 52");
    let mut random = Random(52);
    for length in [1, 5, 100, 5000] {
        let garbage = random.bytes(length);
        assert!(
            answered(&site, &connection, &garbage).is_none(),
            "{length} bytes"
        );
    }
    // A length of 16 MiB and nothing behind it.
    assert!(answered(&site, &connection, &(16u32 << 20).to_le_bytes()).is_none());

    // Sends one byte every now and then: the deadline is for the whole request.
    let slow = site.runtime.block_on(async {
        let (mut send, mut receive) = connection.open_bi().await.unwrap();
        let bytes = asks("stranger", ping());
        let dripping = async {
            for byte in &bytes {
                send.write_all(&[*byte]).await?;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Ok::<_, quinn::WriteError>(())
        };
        tokio::select! {
            answer = answer(&mut receive) => answer,
            _ = dripping => panic!("all of it was taken"),
        }
    });
    assert!(slow.is_none());

    // A dump whose frames are noise, and one with a frame that is never whole.
    for (session, bytes) in [(8u8, random.bytes(4096)), (9, vec![0; HEADER_BYTES - 1])] {
        site.runtime.block_on(async {
            let (mut send, mut receive) = connection.open_bi().await.unwrap();
            let dump = asks("stranger", request::Body::Dump(dump_request(session)));
            send.write_all(&dump).await.unwrap();
            let opened = answer(&mut receive).await;
            assert!(
                matches!(opened, Some(reply::Body::DumpOpened(_))),
                "{opened:?}"
            );
            let mut bulk = connection.open_uni().await.unwrap();
            bulk.write_all(&[session; 16]).await.unwrap();
            let _ = bulk.write_all(&bytes).await;
            assert!(!matches!(
                answer(&mut receive).await,
                Some(reply::Body::Closed(_))
            ));
        });
        let end = site.recorder.wait(&[session; 16]).end;
        assert!(matches!(end, Some(Err(_))), "{end:?}");
    }

    network.call("there", ping(), deadline()).unwrap();
    send(&mut dump, rest).unwrap();
    finish(&mut dump);
    assert!(site.recorder.wait(&[1; 16]).events == events);
    assert_eq!(dump.progress().conversations, 1);
}

#[test]
fn ten_thousand_streams_are_not_opened() {
    let options = PeerOptions::default();
    let allowed = options.streams;
    let site = Site::new(options);
    let network = site.network();
    let (_endpoint, connection) = stranger(&site, "stranger");
    let opened = site.runtime.block_on(async {
        let mut kept = Vec::new();
        for _ in 0..10_000 {
            let open = tokio::time::timeout(Duration::from_millis(500), async {
                (connection.open_bi().await, connection.open_uni().await)
            });
            let Ok((Ok((mut send, receive)), Ok(mut bulk))) = open.await else {
                break;
            };
            let _ = send.write_all(&[1]).await;
            let _ = bulk.write_all(&[1]).await;
            kept.push((send, receive, bulk));
        }
        kept.len()
    });
    assert_eq!(opened, usize::try_from(allowed).unwrap());
    network.call("there", ping(), deadline()).unwrap();
}

#[test]
fn a_peer_gets_its_share_of_the_connections_and_no_more() {
    let site = Site::new(PeerOptions {
        connections: 8,
        ..PeerOptions::default()
    });
    let identity = site.identity("greedy", Role::Agent);
    let endpoint = site
        .runtime
        .block_on(async { quinn::Endpoint::client((Ipv4Addr::LOCALHOST, 0).into()).unwrap() });
    let served = site.runtime.block_on(async {
        let mut kept = Vec::new();
        let mut served = 0;
        for _ in 0..6 {
            let connecting = identity
                .connect(&endpoint, site.address(), "there")
                .unwrap();
            let Ok(connection) = connecting.await else {
                continue;
            };
            let Ok((mut send, mut receive)) = connection.open_bi().await else {
                continue;
            };
            let _ = send.write_all(&asks("greedy", ping())).await;
            served += usize::from(answer(&mut receive).await.is_some());
            kept.push(connection);
        }
        served
    });
    assert_eq!(served, 2);
    site.network().call("there", ping(), deadline()).unwrap();
}

#[test]
fn a_peer_gets_its_share_of_the_dumps_and_others_theirs() {
    let site = Site::new(PeerOptions {
        conversations: 4,
        ..PeerOptions::default()
    });
    let (_greedy, greedy) = stranger(&site, "greedy");
    let (_modest, modest) = stranger(&site, "modest");
    let begin = |connection: &Connection, name: &str, session: u8| {
        let dump = request::Body::Dump(dump_request(session));
        answered(&site, connection, &asks(name, dump))
    };
    for session in [11, 12] {
        let opened = begin(&greedy, "greedy", session);
        assert!(
            matches!(opened, Some(reply::Body::DumpOpened(_))),
            "{opened:?}"
        );
    }
    let refused = message(begin(&greedy, "greedy", 13));
    assert!(refused.contains("too many"), "{refused}");
    let opened = begin(&modest, "modest", 14);
    assert!(
        matches!(opened, Some(reply::Body::DumpOpened(_))),
        "{opened:?}"
    );
}

#[test]
fn a_dump_begins_again_if_its_first_reply_was_lost_and_ends_with_a_commit_that_may_not_come() {
    let site = Site::new(PeerOptions::default());
    let (_endpoint, connection) = stranger(&site, "stranger");
    let mut dump = dump_request(21);
    for _ in 0..2 {
        let begun = asks("stranger", request::Body::Dump(dump.clone()));
        let opened = answered(&site, &connection, &begun);
        assert!(
            matches!(opened, Some(reply::Body::DumpOpened(_))),
            "{opened:?}"
        );
    }
    dump.resume = true;
    let mut early = asks("stranger", request::Body::Dump(dump));
    early.extend(framing::encode(&commit()).unwrap());
    // The conversation ends, perhaps before its first reply was read.
    answered(&site, &connection, &early);
    let end = site.recorder.wait(&[21; 16]).end.unwrap().unwrap_err();
    assert!(end.contains("a commit before Prepared"), "{end}");
}

#[test]
fn a_sender_that_falls_silent_loses_its_dump_and_its_place() {
    let site = Site::new(PeerOptions {
        // Allows one dump of a peer at a time.
        conversations: 2,
        dump_idle: Duration::from_millis(500),
        ..PeerOptions::default()
    });
    // The sender keeps its connection alive, and restores it when it is lost: neither is a frame.
    let network = site.network();
    let events = content(53, 20);
    let close = events.iter().position(|event| *event == Event::Close);
    let silent_after = [3, events.len()];
    assert!(close.is_some_and(|close| close > 3));
    for (session, count) in (1..).zip(silent_after) {
        let request = dump_request(session);
        let mut dump = loop {
            // The place of the one before is free once its handler has returned.
            match DumpSender::open(&network, "there", request.clone(), deadline()) {
                Ok(dump) => break dump,
                Err(error) => assert!(error.to_string().contains("too many"), "{error}"),
            }
        };
        send(&mut dump, &events[..count]).unwrap();
        if count == events.len() {
            dump.prepare(deadline()).unwrap();
        }
        site.endpoint.disconnect();
        let taken = site.recorder.wait(&[session; 16]);
        let end = taken.end.unwrap().unwrap_err();
        assert!(end.contains("in time"), "{end}");
        assert!(taken.commit.is_none());
    }
    // A dump that is not begun, or not sealed yet, may wait longer.
    let _dump = DumpSender::open(&network, "there", dump_request(9), deadline()).unwrap();
    std::thread::sleep(Duration::from_millis(800));
    let taken = site.recorder.dumps.lock()[&vec![9; 16]].clone();
    assert!(taken.end.is_none(), "{:?}", taken.end);
}
