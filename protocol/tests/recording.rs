//! A conversation with the real CRIU, recorded: the core understands it, and recordings survive encoding.

mod common;

use common::drive;
use permafrost_protocol::manifest::SpaceType;
use permafrost_protocol::pageserver::recording::{
    Content, Conversation, Keep, RecordingError, Step,
};
use permafrost_protocol::pageserver::{
    Dialect, Event, PE_LAZY, PE_PRESENT, ProtocolError, SpaceId,
};
use proptest::prelude::*;

const RECORDED: &[u8] = include_bytes!("fixtures/criu-4.2.1.conversation");
const SYNTHESISED: &[u8] = include_bytes!("fixtures/criu-4.1-synthesised.conversation");

#[test]
fn the_core_understands_criu_in_either_dialect() {
    let [reference, older] = [RECORDED, SYNTHESISED].map(|recording| {
        let conversation = Conversation::decode(recording).unwrap();
        let client = conversation.client_bytes();
        // Three OPEN2 and a CLOSE, all answered with 0: there was no parent.
        assert_eq!(conversation.server_bytes(), [0; 7]);
        drive(&client, 64)
    });
    assert_eq!(
        reference, older,
        "but for the frames' length they say the same"
    );
    assert_eq!(reference.end, Ok(()));
    let events: Vec<_> = reference
        .events
        .iter()
        .map(|event| event.clone().unwrap())
        .collect();
    let opened: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            Event::Open {
                space,
                wants_reply: true,
            } => Some(*space),
            _ => None,
        })
        .collect();
    let shared = SpaceId {
        space_type: SpaceType::SharedMemory,
        id: 1141,
    };
    assert_eq!(
        opened,
        [shared, SpaceId::process(15_992), SpaceId::process(15_994)]
    );
    let frames = events
        .iter()
        .filter(|event| matches!(event, Event::Pages { .. }))
        .count();
    assert_eq!((events.len(), frames), (310, 306));
    assert_eq!(events.last(), Some(&Event::Close { force: false }));
    let lazy = events.iter().filter(
        |event| matches!(event, Event::Pages { flags, .. } if *flags == PE_PRESENT | PE_LAZY),
    );
    assert_eq!(
        lazy.count(),
        279,
        "an ordinary dump marks what may be restored lazily"
    );
    // As long as the pages files that CRIU's own server wrote.
    assert_eq!(
        reference.pages.len() * 4096,
        172_032 + 7_925_760 + 7_929_856
    );
    assert!(
        reference
            .pages
            .iter()
            .filter(|(_, bytes)| bytes.iter().all(|byte| *byte == 0))
            .count()
            > 200
    );
}

#[test]
fn criu_leaves_its_stack_in_the_padding() {
    let conversation = Conversation::decode(RECORDED).unwrap();
    let padding = |step: &Step| match step {
        Step::Frame(frame) => frame.as_ref()[4..8] != [0; 4],
        _ => false,
    };
    assert!(
        conversation.steps().iter().any(padding),
        "the fixture should show that it is never looked at"
    );
}

#[test]
fn the_older_dialect_is_the_same_conversation() {
    let recorded = Conversation::decode(RECORDED).unwrap();
    let older = Conversation::decode(SYNTHESISED).unwrap();
    assert_eq!(recorded.in_dialect(Dialect::V24), Some(older.clone()));
    assert_eq!(older.dialect(), Dialect::V24);
}

#[test]
fn capturing_a_replay_gives_the_recording_again() {
    let recorded = Conversation::decode(RECORDED).unwrap();
    let (client, server) = (recorded.client_bytes(), recorded.server_bytes());
    let captured = Conversation::capture(&client, &server, Keep::Pages).unwrap();
    assert_eq!(captured.client_bytes(), client);
    assert_eq!(captured.server_bytes(), server);
    let encoded = captured.encode();
    assert_eq!(Conversation::decode(&encoded).as_ref(), Ok(&captured));
    assert!(matches!(
        captured.steps()[3],
        Step::Pages {
            count: 2,
            content: Content::Kept(_)
        }
    ));

    assert_eq!(
        Conversation::capture(&client[..client.len() - 32], &server, Keep::Pages),
        Err(RecordingError::Protocol(ProtocolError::EndedWithoutClose))
    );
    assert_eq!(
        Conversation::capture(&client, &server[..6], Keep::Pages),
        Err(RecordingError::RepliesMissing)
    );
}

#[test]
fn a_close_alone_is_a_conversation() {
    let mut client = vec![0; 24];
    client[..4].copy_from_slice(&0x1023_u32.to_ne_bytes());
    let conversation = Conversation::capture(&client, &[0; 4], Keep::Pages).unwrap();
    assert_eq!(conversation.steps().len(), 2);
    assert_eq!(
        Conversation::decode(&conversation.encode()),
        Ok(conversation)
    );
}

#[test]
fn recordings_survive_encoding_and_cuts_are_noticed() {
    let recorded = Conversation::decode(RECORDED).unwrap();
    assert_eq!(recorded.encode(), RECORDED);
    for cut in 0..RECORDED.len().min(2000) {
        match Conversation::decode(&RECORDED[..cut]) {
            Ok(shorter) => assert_eq!(shorter.steps(), &recorded.steps()[..shorter.steps().len()]),
            Err(RecordingError::NotARecording) => assert!(cut < 9),
            Err(RecordingError::Truncated { offset }) => assert!(offset < cut),
            Err(other) => panic!("cut at {cut}: {other}"),
        }
    }
    let unknown = [&RECORDED[..9], &[9]].concat();
    assert_eq!(
        Conversation::decode(&unknown),
        Err(RecordingError::UnknownStep { offset: 9, kind: 9 })
    );
}

#[test]
fn made_up_pages_differ_and_are_never_zero() {
    let mut pages = std::collections::BTreeSet::new();
    let mut page = [0; 4096];
    for index in 0..1000 {
        Content::Seeded(u64::MAX - 500).fill(index, &mut page);
        assert!(page.iter().any(|byte| *byte != 0));
        assert!(pages.insert(page), "page {index} repeats");
    }
}

proptest! {
    #[test]
    fn arbitrary_recordings_never_panic(tail: Vec<u8>, dialect in prop_oneof![Just(24_u8), Just(32)]) {
        let bytes = [&b"PFCONV1\n"[..], &[dialect], &tail].concat();
        if let Ok(conversation) = Conversation::decode(&bytes) {
            prop_assert_eq!(conversation.encode(), bytes);
        }
    }
}
