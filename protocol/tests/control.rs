//! Control messages: framing, and that every request and reply survives it.

use permafrost_protocol::control::framing::{LENGTH_BYTES, MessageError, decode, encode, length};
use permafrost_protocol::control::{
    Checkpoint, Checkpoints, ClusterStatus, Detail, Done, Error, Exported, MAX_MESSAGE_BYTES,
    Progress, QueueStatus, Reply, Request, Reserved, ServerStatus, SessionOpened, Verified,
    Waiting, reply, request,
};
use proptest::prelude::*;

fn requests() -> Vec<Request> {
    use request::Body;
    let text = || "x".to_owned();
    let bodies = [
        Body::Open(request::Open {
            job: text(),
            seal_follows: true,
            durability: text(),
            expected_bytes: 1 << 30,
            priority: 11,
            deadline_ms: Some(0),
            reservation: text(),
            ..Default::default()
        }),
        Body::Seal(request::Seal { session: text() }),
        Body::Abort(request::Abort {
            session: text(),
            freeze_limit_reached: true,
        }),
        Body::Adopt(request::Adopt {
            session: text(),
            job: text(),
            origin: None,
            images_age_us: Some(7),
            ignore_times: true,
        }),
        Body::List(request::List {
            job: text(),
            namespace: text(),
            parked: true,
            limit: 7,
            after: text(),
        }),
        Body::Show(request::Show { checkpoint: text() }),
        Body::Remove(request::Remove {
            checkpoint: text(),
            all_generations: true,
            force: true,
            last: true,
        }),
        Body::Pin(request::Pin {
            checkpoint: text(),
            pinned: true,
        }),
        Body::Verify(request::Verify {
            checkpoint: text(),
            cold: true,
        }),
        Body::Export(request::Export {
            checkpoint: text(),
            small_images_only: true,
            deadline_ms: Some(5),
            ..Default::default()
        }),
        Body::Reserve(request::Reserve {
            node: text(),
            direction: text(),
            bytes: 1,
            deadline_ms: Some(7),
            ..Default::default()
        }),
        Body::CancelReservation(request::CancelReservation {
            token: text(),
            node: text(),
        }),
        Body::Took(request::Took {
            checkpoint: text(),
            restored: true,
            elapsed_us: 9,
            lazy: true,
        }),
        Body::Import(request::Import {
            job: text(),
            no_parent: true,
            durability: text(),
        }),
        Body::Status(request::Status {}),
    ];
    bodies
        .into_iter()
        .map(|body| Request {
            version: 1,
            body: Some(body),
        })
        .collect()
}

fn replies() -> Vec<Reply> {
    use reply::Body;
    let checkpoint = Checkpoint {
        job: "x".into(),
        generation: 1,
        ..Default::default()
    };
    let bodies = [
        Body::Error(Error {
            code: 6,
            message: "full".into(),
            hint: "rm".into(),
        }),
        Body::Progress(Progress {
            done_bytes: 1,
            total_bytes: 2,
            waiting: Some(Waiting {
                before: 3,
                bytes_before: 1 << 30,
                starts_in_ms: Some(0),
                token: "t".into(),
            }),
            is_log: true,
            daemon_ended: true,
        }),
        Body::Reserved(Reserved {
            token: "t".into(),
            starts_in_ms: Some(4),
            ..Default::default()
        }),
        Body::SessionOpened(SessionOpened {
            session: "x".into(),
            ..Default::default()
        }),
        Body::Checkpoint(checkpoint.clone()),
        Body::Checkpoints(Checkpoints {
            next: "train@3".to_owned(),
            checkpoints: vec![checkpoint.clone(); 3],
        }),
        Body::Detail(Detail {
            checkpoint: Some(checkpoint.clone()),
            segments: 4,
            ..Default::default()
        }),
        Body::Done(Done { count: 5 }),
        Body::Verified(Verified {
            checkpoints: 1,
            pages: 2,
            damage: vec!["x".into()],
            unverified_pages: 3,
            away: "y".into(),
        }),
        Body::Exported(Exported {
            checkpoint: Some(checkpoint),
            files: 1,
            ..Default::default()
        }),
        Body::Status(ServerStatus {
            version: "0".into(),
            peers: "127.0.0.1:7118".into(),
            cluster: Some(ClusterStatus {
                registry: "etcd".to_owned(),
                copies_count: true,
                node: "n1".into(),
                copies_wanted: 2,
                ..Default::default()
            }),
            queues: vec![QueueStatus {
                direction: "read".into(),
                bytes_per_s: Some(1e9),
                ..Default::default()
            }],
            ..Default::default()
        }),
    ];
    bodies
        .into_iter()
        .map(|body| Reply { body: Some(body) })
        .collect()
}

#[test]
fn every_message_round_trips_and_is_whole_only_with_its_last_byte() {
    fn check<M: prost::Message + Default + Clone + PartialEq + std::fmt::Debug>(messages: Vec<M>) {
        let mut stream = Vec::new();
        for message in &messages {
            let bytes = encode(message).unwrap();
            for cut in 0..bytes.len() {
                assert_eq!(decode::<M>(&bytes[..cut]), Ok(None));
            }
            stream.extend(bytes);
        }
        let mut rest = &stream[..];
        for message in messages {
            let (read, len) = decode::<M>(rest).unwrap().unwrap();
            assert_eq!(read, message);
            rest = &rest[len..];
        }
        assert!(rest.is_empty());
    }
    check(requests());
    check(replies());
}

#[test]
fn too_long_a_message_is_refused_by_either_side() {
    let longest = usize::try_from(MAX_MESSAGE_BYTES).unwrap();
    assert_eq!(length(MAX_MESSAGE_BYTES.to_le_bytes()), Ok(longest));
    let len_bytes = u64::from(MAX_MESSAGE_BYTES) + 1;
    let too_long = MessageError::TooLong { len_bytes };
    let prefix = (MAX_MESSAGE_BYTES + 1).to_le_bytes();
    assert_eq!(length(prefix), Err(too_long.clone()));
    assert_eq!(
        decode::<Reply>(&prefix),
        Err(too_long),
        "before any of it has come"
    );
    let error = Error {
        code: 1,
        message: "x".repeat(longest),
        hint: String::new(),
    };
    assert!(
        matches!(encode(&error), Err(MessageError::TooLong { len_bytes }) if len_bytes > longest as u64)
    );
}

#[test]
fn a_flipped_bit_in_a_request_is_refused_or_seen() {
    for request in requests() {
        let mut bytes = encode(&request).unwrap();
        for bit in LENGTH_BYTES * 8..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            let same = decode(&bytes) == Ok(Some((request.clone(), bytes.len())));
            // Protobuf reads any number but 0 as true.
            let in_a_bool = bytes[bit / 8] ^ 1 << (bit % 8) == 1;
            assert!(!same || in_a_bool, "bit {bit} of {request:?}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
        let _ = decode::<Request>(&bytes);
        let _ = decode::<Reply>(&bytes);
    }
}
