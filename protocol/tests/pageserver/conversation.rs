//! Conversations of a correct peer in either dialect, and the replies to it.

use permafrost_protocol::manifest::SpaceType;
use permafrost_protocol::pageserver::client::Encoder;
use permafrost_protocol::pageserver::{
    Dialect, Event, Frame, PE_PARENT, PE_PRESENT, ProtocolError, SpaceId, command,
};

use crate::common::drive;
use crate::stream::{DIALECTS, Stream, whole_dump};

#[test]
fn a_whole_dump_is_understood_in_either_dialect() {
    let (shared, first, second) = (
        SpaceId::shared_memory(70_000).unwrap(),
        SpaceId::process(1),
        SpaceId::process(42),
    );
    for dialect in DIALECTS {
        let transcript = drive(&whole_dump(dialect), 2);
        let events: Vec<_> = transcript.events.into_iter().map(Result::unwrap).collect();
        assert_eq!(
            events,
            [
                Event::QueryParent { space: first },
                Event::Open {
                    space: shared,
                    wants_reply: true
                },
                Event::Pages {
                    space: shared,
                    vaddr: 0,
                    nr_pages: 1,
                    flags: 4
                },
                Event::Open {
                    space: first,
                    wants_reply: true
                },
                Event::Pages {
                    space: first,
                    vaddr: 0x1_0000,
                    nr_pages: 2,
                    flags: 6
                },
                Event::Hole {
                    space: first,
                    vaddr: 0x1_2000,
                    nr_pages: 3,
                    flags: 1
                },
                Event::Pages {
                    space: first,
                    vaddr: 0x7fff_0000_0000,
                    nr_pages: 1,
                    flags: 4
                },
                Event::Open {
                    space: second,
                    wants_reply: true
                },
                Event::Pages {
                    space: second,
                    vaddr: 0x1_0000,
                    nr_pages: 3,
                    flags: 4
                },
                Event::Close { force: true },
            ]
        );
        // PARENT answers an int32, OPEN2 a byte, CLOSE an int32.
        assert_eq!(transcript.replies, [1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]);
        let at: Vec<_> = transcript
            .pages
            .iter()
            .map(|(vaddr, bytes)| (*vaddr, bytes[0]))
            .collect();
        assert_eq!(
            at,
            [
                (0, 1),
                (0x1_0000, 1),
                (0x1_1000, 2),
                (0x7fff_0000_0000, 1),
                (0x1_0000, 1),
                (0x1_1000, 2),
                (0x1_2000, 3)
            ]
        );
        assert_eq!(transcript.end, Ok(()));
    }
}

#[test]
fn how_the_payload_is_cut_changes_nothing() {
    for dialect in DIALECTS {
        let input = whole_dump(dialect);
        let reference = drive(&input, 1);
        for pages_at_once in 2..5 {
            assert_eq!(drive(&input, pages_at_once), reference);
        }
    }
}

#[test]
fn an_end_at_any_byte_but_the_first_and_the_last_is_an_error() {
    for dialect in DIALECTS {
        let input = whole_dump(dialect);
        let whole = drive(&input, 2);
        for cut in 0..=input.len() {
            let transcript = drive(&input[..cut], 2);
            if cut == 0 || cut == input.len() {
                assert_eq!(transcript.end, Ok(()));
                continue;
            }
            match transcript.end {
                Err(ProtocolError::EndedWithoutClose) => {}
                Err(ProtocolError::Truncated { missing_bytes }) => {
                    assert!(
                        missing_bytes > 0 && missing_bytes <= (input.len() - cut) as u64,
                        "cut at {cut}"
                    );
                }
                other => panic!("{dialect:?} cut at {cut}: {other:?}"),
            }
            // The events before the cut are those of the whole conversation.
            assert_eq!(transcript.events, whole.events[..transcript.events.len()]);
            assert_eq!(transcript.pages, whole.pages[..transcript.pages.len()]);
        }
    }
}

#[test]
fn legacy_commands_open_their_space_by_themselves() {
    let space = SpaceId::process(7);
    let input = Stream::new(Dialect::V24)
        .frame(|e| e.pages_legacy(space, 0x1000, 2))
        .pages(2)
        .frame(|e| e.hole_legacy(space, 0x4000, 1))
        // The type number of CRIU 1.0, for another space.
        .raw(Frame {
            command: command::HOLE,
            flags: 0,
            nr_pages: 1,
            vaddr: 0x1000,
            dst_id: 9 << 8 | 33,
        })
        .frame(Encoder::close)
        .1;
    let transcript = drive(&input, 8);
    let other = SpaceId {
        space_type: SpaceType::SharedMemory,
        id: 9,
    };
    let events: Vec<_> = transcript.events.into_iter().map(Result::unwrap).collect();
    assert_eq!(
        events,
        [
            Event::Open {
                space,
                wants_reply: false
            },
            Event::Pages {
                space,
                vaddr: 0x1000,
                nr_pages: 2,
                flags: PE_PRESENT
            },
            Event::Hole {
                space,
                vaddr: 0x4000,
                nr_pages: 1,
                flags: PE_PARENT
            },
            Event::Open {
                space: other,
                wants_reply: false
            },
            Event::Hole {
                space: other,
                vaddr: 0x1000,
                nr_pages: 1,
                flags: PE_PARENT
            },
            Event::Close { force: false },
        ]
    );
    assert_eq!(transcript.pages.len(), 2);
    assert_eq!(transcript.replies, [0; 4]);
    assert_eq!(transcript.end, Ok(()));
}

#[test]
fn a_legacy_open_is_not_answered() {
    let space = SpaceId::process(7);
    let input = Stream::new(Dialect::V24)
        .frame(|e| e.open_legacy(space))
        .frame(Encoder::close)
        .1;
    let transcript = drive(&input, 1);
    assert_eq!(
        transcript.events[0],
        Ok(Event::Open {
            space,
            wants_reply: false
        })
    );
    assert_eq!(transcript.replies, [0; 4]);
}

#[test]
fn a_close_before_anything_else_is_answered_without_knowing_the_dialect() {
    for dialect in DIALECTS {
        let transcript = drive(&Stream::new(dialect).frame(Encoder::close).1, 1);
        assert_eq!(transcript.events, [Ok(Event::Close { force: false })]);
        assert_eq!(transcript.replies, [0; 4]);
        assert_eq!(transcript.end, Ok(()));
    }
}

#[test]
fn gets_name_a_bare_pid_and_need_no_answer_before_the_next() {
    for dialect in DIALECTS {
        let input = Stream::new(dialect)
            .frame(|e| e.get(77, 0x7f00_0000_0000, 1))
            .frame(|e| e.get(77, 0x7f00_0010_0000, 1024))
            .frame(Encoder::close)
            .1;
        let transcript = drive(&input, 1);
        let events: Vec<_> = transcript.events.into_iter().map(Result::unwrap).collect();
        assert_eq!(
            events,
            [
                Event::Get {
                    pid: 77,
                    vaddr: 0x7f00_0000_0000,
                    nr_pages: 1
                },
                Event::Get {
                    pid: 77,
                    vaddr: 0x7f00_0010_0000,
                    nr_pages: 1024
                },
                Event::Close { force: false },
            ]
        );
    }
}
