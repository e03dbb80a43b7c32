//! Order of frames, and the times of acknowledgements.

use permafrost_protocol::pageserver::SpaceId;
use permafrost_protocol::wire::frame::{Coding, Header, Kind};
use permafrost_protocol::wire::receiver::{
    ACKNOWLEDGE_FRAMES, MAX_IMAGES, Receiver, ReceiverError,
};

use crate::frame::header;

/// Announces and takes a frame with the next sequence; an image is named after its sequence.
fn take(receiver: &mut Receiver, frame: Header) -> Result<(), ReceiverError> {
    let sequence = receiver.next_sequence();
    let frame = Header { sequence, ..frame };
    assert_eq!(receiver.header(&frame.encode())?, frame);
    let taken = receiver.taken(format!("{sequence}.img").as_bytes())?;
    assert_eq!(taken, frame);
    Ok(())
}

fn space(id: u64) -> Header {
    header(Kind::Space, 1, id, 0)
}
fn pages(index: u64) -> Header {
    header(Kind::Pages, 2, index, 8192)
}
fn close() -> Header {
    header(Kind::Close, 0, 0, 0)
}
fn image(len: u64) -> Header {
    header(Kind::Image, 0, len, 5)
}
fn data(len: u32) -> Header {
    header(Kind::ImageData, 0, len.into(), len)
}
fn prepare() -> Header {
    header(Kind::Prepare, 0, 0, 0)
}

fn after(frames: &[Header]) -> Receiver {
    let mut receiver = Receiver::new();
    for frame in frames {
        take(&mut receiver, *frame).unwrap();
    }
    receiver
}

#[test]
fn a_whole_dump_is_taken() {
    let compressed = Header {
        coding: Coding::Zstd,
        payload_bytes: 3,
        ..data(100)
    };
    let receiver = after(&[
        space(5),
        pages(16),
        header(Kind::Zero, u32::MAX, 18, 0),
        header(Kind::Parent, 1, 18 + u64::from(u32::MAX), 0),
        space(6),
        pages(0),
        close(),
        image(0),
        image(110),
        compressed,
        data(10),
        prepare(),
    ]);
    assert!(receiver.is_over());
    // A dump without anything is one too.
    assert!(after(&[close(), prepare()]).is_over());
}

#[test]
fn each_mistake_has_its_own_error() {
    use ReceiverError as E;
    let pid = SpaceId::process(5);
    let too_much = |decoded_bytes, left_bytes| E::TooMuchData {
        decoded_bytes,
        left_bytes,
    };
    #[rustfmt::skip]
    let mistakes = [
        (vec![], pages(0), E::BeforeSpace { kind: Kind::Pages }),
        (vec![], image(1), E::BeforeClose { kind: Kind::Image }),
        (vec![space(5)], prepare(), E::BeforeClose { kind: Kind::Prepare }),
        (vec![space(5), pages(3)], pages(4), E::NotAscending { index: 4, expected: 5 }),
        (vec![space(5), pages(3)], pages(0), E::NotAscending { index: 0, expected: 5 }),
        (vec![space(5), space(6)], space(5), E::OpenedTwice { space: pid }),
        (vec![close()], space(5), E::AfterClose { kind: Kind::Space }),
        (vec![space(5), close()], pages(0), E::AfterClose { kind: Kind::Pages }),
        (vec![close()], close(), E::AfterClose { kind: Kind::Close }),
        (vec![close()], data(1), too_much(1, 0)),
        (vec![close(), image(9), data(4)], data(6), too_much(6, 5)),
        (vec![close(), image(9), data(4)], image(1), E::Unfinished { left_bytes: 5 }),
        (vec![close(), image(9)], prepare(), E::Unfinished { left_bytes: 9 }),
        (vec![close(), prepare()], prepare(), E::AfterPrepare { kind: Kind::Prepare }),
    ];
    for (before, frame, expected) in mistakes {
        let mut receiver = after(&before);
        let next = receiver.next_sequence();
        assert_eq!(take(&mut receiver, frame), Err(expected));
        assert_eq!(
            receiver.next_sequence(),
            next,
            "a refused frame is not taken"
        );
    }
}

#[test]
fn names_are_plain_and_come_once() {
    for bad in [&b"."[..], b"..", b"a/b", b"a\n", b"\xff", b""] {
        let mut receiver = after(&[close()]);
        receiver
            .header(
                &Header {
                    sequence: 1,
                    ..image(0)
                }
                .encode(),
            )
            .unwrap();
        assert!(
            matches!(receiver.taken(bad), Err(ReceiverError::BadName { .. })),
            "{bad:?}"
        );
        assert_eq!(receiver.next_sequence(), 1);
    }
    let mut receiver = after(&[close(), image(0)]);
    receiver
        .header(
            &Header {
                sequence: 2,
                ..image(0)
            }
            .encode(),
        )
        .unwrap();
    let twice = ReceiverError::ImageTwice {
        name: "1.img".into(),
    };
    assert_eq!(receiver.taken(b"1.img"), Err(twice));
    assert!(receiver.taken(b"2.img").is_ok());
}

#[test]
fn sequences_have_no_gaps_and_no_repetitions() {
    let mut receiver = after(&[space(5), pages(0)]);
    for found in [0, 1, 3] {
        let other = Header {
            sequence: found,
            ..pages(2)
        };
        let expected = ReceiverError::OutOfOrder { expected: 2, found };
        assert_eq!(receiver.header(&other.encode()), Err(expected));
        assert_eq!(receiver.taken(b""), Err(ReceiverError::NothingPending));
    }

    let next = Header {
        sequence: 2,
        ..pages(2)
    };
    assert_eq!(receiver.header(&next.encode()), Ok(next));
    assert_eq!(
        receiver.header(&next.encode()),
        Err(ReceiverError::NotTaken { sequence: 2 })
    );
    receiver.connection_lost();
    assert_eq!(
        receiver.next_sequence(),
        2,
        "what was not taken comes again"
    );
    assert_eq!(receiver.header(&next.encode()), Ok(next));
}

#[test]
fn acknowledgements_are_few_but_prompt() {
    let mut receiver = after(&[space(5)]);
    // The reply to a resume acknowledges what came before.
    receiver.connection_lost();
    for index in 1..=ACKNOWLEDGE_FRAMES {
        assert_eq!(receiver.poll_acknowledge(), None);
        take(&mut receiver, header(Kind::Zero, 1, index, 0)).unwrap();
    }
    assert_eq!(receiver.poll_acknowledge(), Some(ACKNOWLEDGE_FRAMES + 1));
    let mut bytes = 0;
    let mut index = 1000;
    while receiver.poll_acknowledge().is_none() {
        take(&mut receiver, pages(index)).unwrap();
        (bytes, index) = (bytes + 8192, index + 2);
    }
    assert_eq!(bytes, 1 << 20);
    for frame in [close(), prepare()] {
        take(&mut receiver, frame).unwrap();
        assert_eq!(receiver.poll_acknowledge(), Some(receiver.next_sequence()));
    }
}

#[test]
fn spaces_and_images_are_bounded() {
    let mut receiver = Receiver::new();
    for id in 0..1 << 16 {
        take(&mut receiver, space(id)).unwrap();
    }
    assert_eq!(
        take(&mut receiver, space(1 << 16)),
        Err(ReceiverError::TooManySpaces)
    );
    take(&mut receiver, close()).unwrap();
    for _ in 0..MAX_IMAGES {
        take(&mut receiver, image(0)).unwrap();
    }
    assert_eq!(
        take(&mut receiver, image(0)),
        Err(ReceiverError::TooManyImages)
    );
}
