//! Wire protocol between nodes, over any bytes: nothing panics, sequences advance one by one, headers that are read
//! are equal when written, and messages are refused or taken. The ends of a dump are those that nodes and agents run.

use std::task::Poll;
use std::time::{Duration, Instant};

use permafrost_protocol::control::framing::decode;
use permafrost_protocol::versions::{self, Interface, SpokenVersions};
use permafrost_protocol::wire::conversation::{
    ConversationOutcome, DumpClient, DumpServer, QUEUED_FRAMES, ReceiverLimits, check_hello,
    check_request,
};
use permafrost_protocol::wire::frame::{Coding, HEADER_BYTES, Kind, MAX_PAYLOAD_BYTES};
use permafrost_protocol::wire::message::{Commit, Hello, Reply, Request, reply, request};

/// Checks all properties of the wire.
pub fn check(input: &[u8]) {
    if let Ok(Some((hello, len))) = decode::<Hello>(input) {
        for version in [1, 2, hello.version] {
            let _ = check_hello(&hello, version);
        }
        // What a peer says of itself agrees with what a node says, or is refused with words.
        if let Some(versions) = &hello.versions
            && versions.check().is_ok()
        {
            let (own, theirs) = (("own", versions::own()), ("theirs", versions));
            for interface in Interface::ALL {
                match SpokenVersions::common(interface, own, theirs) {
                    Ok(version) => assert!(
                        own.1.of(interface).contains(version)
                            && theirs.1.of(interface).contains(version)
                    ),
                    Err(refused) => assert!(!refused.to_string().is_empty()),
                }
            }
        }
        if let Ok(Some((request, _))) = decode::<Request>(&input[len..]) {
            let _ = check_request(&request);
        }
    }
    check_receiver(input);
    check_sender(input);
}

fn dump() -> request::Dump {
    request::Dump {
        session: vec![7; 16],
        ..request::Dump::default()
    }
}

/// A sender that has pushed both ends of a dump takes any replies.
fn check_sender(mut replies: &[u8]) {
    let now = Instant::now();
    let time = Duration::from_secs(1);
    let client = DumpClient::<&[u8]>::new(dump(), 0, now + time, time);
    let mut client = client.expect("a good request");
    for kind in [Kind::Close, Kind::Prepare] {
        let pushed = client.push(kind, Coding::Raw, 0, 0, 0, &[]);
        pushed.expect("the window is empty");
    }
    while let Ok(Some((reply, len))) = decode::<Reply>(replies) {
        if client.reply(reply).is_err() {
            break;
        }
        while client.poll_transmit().is_some() {}
        if let Some(prepared) = client.prepared() {
            let commit = Commit {
                content_digest: prepared.content_digest.clone(),
                ..Commit::default()
            };
            client.commit(&commit).expect("of what is prepared");
            let _ = client.poll_commit();
        }
        replies = &replies[len..];
    }
    client.ended(now, ConversationOutcome::Violated);
    assert!(client.is_over() && !client.may_push(0));
}

/// A receiver takes headers with a checksum and a sequence that fit, which the fuzzer would otherwise have to find,
/// and commits.
fn check_receiver(input: &[u8]) {
    let patience = ReceiverLimits {
        grace: Duration::from_secs(1),
        idle: Duration::from_secs(1),
        wait: Duration::from_secs(1),
    };
    let server = DumpServer::<&[u8]>::new(dump(), patience);
    let mut server = server.expect("a good request");
    server.opened(false);
    let mut conversation = server.converse();
    if let Ok(Some((commit, _))) = decode::<Commit>(input) {
        assert!(server.commit(conversation, commit).is_err(), "too early");
    }
    let (mut expected, mut queued) = (0_u64, 0);
    let mut rest = input;
    while let Some((bytes, after)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let mut bytes = *bytes;
        bytes[8..16].copy_from_slice(&expected.to_le_bytes());
        let crc32 = crc32fast::hash(&bytes[..28]);
        bytes[28..].copy_from_slice(&crc32.to_le_bytes());
        rest = after;
        let Ok(header) = server.header(conversation, &bytes) else {
            continue;
        };
        assert_eq!(header.encode(), bytes);
        assert!(header.payload_bytes <= MAX_PAYLOAD_BYTES);
        assert!(header.decoded_bytes() <= MAX_PAYLOAD_BYTES.into());
        let len = rest.len().min(header.payload_bytes as usize);
        let (payload, after) = rest.split_at(len);
        rest = after;
        if !server.may_take() {
            assert_eq!(queued, QUEUED_FRAMES);
            while let Some((header, _)) = server.poll_frame() {
                match header.kind {
                    Kind::Close => server.answer(reply::Body::Closed(Default::default())),
                    Kind::Prepare => server.answer(reply::Body::Prepared(Default::default())),
                    _ => {}
                }
            }
            queued = 0;
            assert!(server.poll_room());
        }
        match server.taken(conversation, payload) {
            Ok(_) => (expected, queued) = (expected + 1, queued + 1),
            // A name that may not come: the frame comes again.
            Err(_) => conversation = server.converse(),
        }
    }
    if let Ok(Some((commit, _))) = decode::<Commit>(rest) {
        let _ = server.commit(conversation, commit);
    }
    let again = server.converse();
    let Poll::Ready(Some(first)) = server.poll_reply(again) else {
        panic!("the dump is open");
    };
    let Some(reply::Body::DumpOpened(opened)) = first.body else {
        panic!("not the first reply: {first:?}");
    };
    assert_eq!(opened.next_sequence, expected);
}
