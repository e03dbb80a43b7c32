//! The page-server core: what a good peer says in either dialect, and each way of breaking the protocol.

mod common;

use common::drive;
use permafrost_protocol::manifest::SpaceType;
use permafrost_protocol::pageserver::client::Encoder;
use permafrost_protocol::pageserver::{
    Dialect, Event, Frame, MAX_ADDRESS, PE_LAZY, PE_PARENT, PE_PRESENT, PageServer, ProtocolError,
    SpaceId, UnknownSpaceType, Want, command,
};
use proptest::prelude::*;

const DIALECTS: [Dialect; 2] = [Dialect::V24, Dialect::V32];

fn page(fill: u8) -> Vec<u8> {
    vec![fill; 4096]
}

/// Frames and pages, one after another.
struct Stream(Encoder, Vec<u8>);

impl Stream {
    fn new(dialect: Dialect) -> Self {
        Self(Encoder::new(dialect), Vec::new())
    }

    fn frame(
        mut self,
        frame: impl FnOnce(&Encoder) -> permafrost_protocol::pageserver::FrameBytes,
    ) -> Self {
        self.1.extend_from_slice(frame(&self.0).as_ref());
        self
    }

    fn raw(mut self, frame: Frame) -> Self {
        self.1
            .extend_from_slice(frame.encode(self.0.dialect()).unwrap().as_ref());
        self
    }

    fn pages(mut self, count: u8) -> Self {
        for fill in 1..=count {
            self.1.extend(page(fill));
        }
        self
    }
}

/// A dump of a shared-memory segment and two processes, with every kind of frame of a current client.
fn whole_dump(dialect: Dialect) -> Vec<u8> {
    let (shared, first, second) = (
        SpaceId::shared_memory(70_000).unwrap(),
        SpaceId::process(1),
        SpaceId::process(42),
    );
    Stream::new(dialect)
        .frame(|e| e.query_parent(first))
        .frame(|e| e.open(shared))
        .frame(|e| e.pages(shared, 0, 1, PE_PRESENT))
        .pages(1)
        .frame(|e| e.open(first))
        .frame(|e| e.pages(first, 0x1_0000, 2, PE_PRESENT | PE_LAZY))
        .pages(2)
        .frame(|e| e.hole(first, 0x1_2000, 3))
        .frame(|e| e.pages(first, 0x7fff_0000_0000, 1, PE_PRESENT))
        .pages(1)
        .frame(|e| e.open(second))
        .frame(|e| e.pages(second, 0x1_0000, 3, PE_PRESENT))
        .pages(3)
        .frame(Encoder::force_close)
        .1
}

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
            // What was understood before the cut is what the whole said.
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

/// Opens process 1 and sends `frame`; the error that ends it.
fn refused(dialect: Dialect, frame: Frame) -> ProtocolError {
    let input = Stream::new(dialect)
        .frame(|e| e.open(SpaceId::process(1)))
        .raw(frame)
        .pages(1)
        .1;
    let transcript = drive(&input, 1);
    assert_eq!(transcript.events.len(), 1, "{frame:?} must be refused");
    assert!(transcript.pages.is_empty());
    transcript.end.unwrap_err()
}

#[test]
fn each_fatal_mistake_has_its_own_error() {
    let good = Frame {
        command: command::ADD_F,
        flags: 4,
        nr_pages: 1,
        vaddr: 0x1000,
        dst_id: 1 << 8 | 1,
    };
    for dialect in DIALECTS {
        for number in [0, 9, 0x1022, 0x1025, 0xffff] {
            let frame = Frame {
                command: number,
                ..good
            };
            let word = 4 << 16 | u32::from(number);
            assert_eq!(
                refused(dialect, frame),
                ProtocolError::UnknownCommand { word }
            );
        }
        assert_eq!(
            refused(
                dialect,
                Frame {
                    command: command::ADD_F_COMPRESSED,
                    ..good
                }
            ),
            ProtocolError::Compressed
        );
        for flags in [0, 5, 7, 8, 12, 0x8004] {
            let expected = ProtocolError::BadFlags {
                command: command::ADD_F,
                flags,
            };
            assert_eq!(refused(dialect, Frame { flags, ..good }), expected);
        }
        for number in [
            command::OPEN2,
            command::PARENT,
            command::GET,
            command::CLOSE,
            command::ADD,
            command::HOLE,
        ] {
            let expected = ProtocolError::BadFlags {
                command: number,
                flags: 4,
            };
            assert_eq!(
                refused(
                    dialect,
                    Frame {
                        command: number,
                        ..good
                    }
                ),
                expected
            );
        }
        for number in [command::OPEN, command::OPEN2, command::PARENT] {
            let expected = UnknownSpaceType {
                dst_id: 5 << 8 | 3,
                space_type: 3,
            };
            let frame = Frame {
                command: number,
                flags: 0,
                dst_id: 5 << 8 | 3,
                ..good
            };
            assert_eq!(refused(dialect, frame), expected.into());
        }
        assert_eq!(
            refused(
                dialect,
                Frame {
                    dst_id: 2 << 8 | 1,
                    ..good
                }
            ),
            ProtocolError::NotTheOpenSpace {
                open: SpaceId::process(1),
                found: SpaceId::process(2)
            }
        );
        assert_eq!(
            refused(
                dialect,
                Frame {
                    command: command::OPEN2,
                    flags: 0,
                    ..good
                }
            ),
            ProtocolError::OpenedTwice {
                space: SpaceId::process(1)
            }
        );
        assert_eq!(
            refused(
                dialect,
                Frame {
                    vaddr: 0x1001,
                    ..good
                }
            ),
            ProtocolError::Misaligned { vaddr: 0x1001 }
        );
        assert_eq!(
            refused(
                dialect,
                Frame {
                    nr_pages: 0,
                    ..good
                }
            ),
            ProtocolError::NoPages { vaddr: 0x1000 }
        );
        for (vaddr, nr_pages) in [
            (MAX_ADDRESS, 1),
            (MAX_ADDRESS - 4096, 2),
            (u64::MAX - 4095, 1),
            (u64::MAX - 4095, u64::from(u32::MAX)),
        ] {
            let frame = Frame {
                vaddr,
                nr_pages,
                ..good
            };
            assert_eq!(
                refused(dialect, frame),
                ProtocolError::BeyondAddressSpace { vaddr, nr_pages }
            );
        }
        for dst_id in [0, 1 << 32] {
            let frame = Frame {
                command: command::GET,
                flags: 0,
                dst_id,
                ..good
            };
            assert_eq!(refused(dialect, frame), ProtocolError::BadPid { dst_id });
        }
    }
    for nr_pages in [1 << 45, 1 << 52, u64::MAX] {
        let frame = Frame { nr_pages, ..good };
        assert_eq!(
            refused(Dialect::V32, frame),
            ProtocolError::BeyondAddressSpace {
                vaddr: 0x1000,
                nr_pages
            }
        );
    }
}

#[test]
fn pages_before_open_are_refused_first_thing_and_later() {
    for dialect in DIALECTS {
        let add = Frame {
            command: command::ADD_F,
            flags: 4,
            nr_pages: 1,
            vaddr: 0x1000,
            dst_id: 1 << 8 | 1,
        };
        assert_eq!(
            drive(&Stream::new(dialect).raw(add).1, 1).end,
            Err(ProtocolError::PagesBeforeOpen)
        );
        let input = Stream::new(dialect)
            .frame(|e| e.query_parent(SpaceId::process(1)))
            .raw(add)
            .1;
        assert_eq!(drive(&input, 1).end, Err(ProtocolError::PagesBeforeOpen));
    }
}

#[test]
fn overlaps_and_descents_are_reported_and_the_conversation_goes_on() {
    let space = SpaceId::process(1);
    for dialect in DIALECTS {
        let input = Stream::new(dialect)
            .frame(|e| e.open(space))
            .frame(|e| e.pages(space, 0x2000, 2, PE_PRESENT))
            .pages(2)
            .frame(|e| e.pages(space, 0x3000, 2, PE_PRESENT))
            .pages(2)
            .frame(|e| e.hole(space, 0x1000, 1))
            .frame(|e| e.pages(space, 0x5000, 1, PE_LAZY))
            .frame(|e| e.pages(space, 0x6000, 1, PE_PRESENT))
            .pages(1)
            .frame(Encoder::close)
            .1;
        let transcript = drive(&input, 1);
        let expected = 0x4000;
        assert_eq!(
            transcript.events[1..],
            [
                Ok(Event::Pages {
                    space,
                    vaddr: 0x2000,
                    nr_pages: 2,
                    flags: 4
                }),
                Err(ProtocolError::NotAscending {
                    space,
                    vaddr: 0x3000,
                    expected
                }),
                Err(ProtocolError::NotAscending {
                    space,
                    vaddr: 0x1000,
                    expected
                }),
                Err(ProtocolError::PagesWithheld {
                    space,
                    vaddr: 0x5000,
                    nr_pages: 1
                }),
                Ok(Event::Pages {
                    space,
                    vaddr: 0x6000,
                    nr_pages: 1,
                    flags: 4
                }),
                Ok(Event::Close { force: false }),
            ]
        );
        assert_eq!(
            transcript.pages.len(),
            5,
            "the payload of a refused frame is still accounted for"
        );
        assert_eq!(
            transcript.replies,
            [1, 22, 0, 0, 0],
            "CLOSE is answered with a refusal"
        );
        assert_eq!(transcript.end, Ok(()));
    }
}

#[test]
fn each_space_has_addresses_of_its_own() {
    let (one, two) = (SpaceId::process(1), SpaceId::process(2));
    let input = Stream::new(Dialect::V32)
        .frame(|e| e.open(one))
        .frame(|e| e.hole(one, 0x9000, 1))
        .frame(|e| e.open(two))
        .frame(|e| e.hole(two, 0x1000, 1))
        .frame(Encoder::close)
        .1;
    assert!(drive(&input, 1).events.iter().all(Result::is_ok));
}

#[test]
fn the_first_frame_fits_a_dialect_or_is_refused() {
    assert!(matches!(
        drive(&[0x16; 64], 1).end,
        Err(ProtocolError::UnknownCommand { word: 0x1616_1616 })
    ));
    let mut first = [0; 24];
    first[..4].copy_from_slice(&u32::from(command::OPEN2).to_ne_bytes());
    first[8] = 1;
    assert_eq!(
        drive(&first, 1).end,
        Err(ProtocolError::UnknownDialect { first })
    );
}

#[test]
fn the_caller_is_held_to_what_was_wanted() {
    let mut core = PageServer::new();
    assert_eq!(core.want(), Want::Frame { bytes: 24 });
    assert_eq!(
        core.frame(&[0; 23]),
        Err(ProtocolError::WrongLength {
            expected: 24,
            found: 23
        })
    );
    assert_eq!(core.want(), Want::Eof);
    assert_eq!(
        core.frame(&[0; 24]),
        Err(ProtocolError::WrongLength {
            expected: 0,
            found: 24
        })
    );
    assert_eq!(
        core.frame(&[]),
        Err(ProtocolError::WrongLength {
            expected: 0,
            found: 0
        })
    );
}

#[test]
fn the_address_space_can_be_used_to_its_end() {
    let space = SpaceId::process(1);
    let input = Stream::new(Dialect::V32)
        .frame(|e| e.open(space))
        .frame(|e| e.hole(space, MAX_ADDRESS - 4096, 1))
        .frame(|e| e.hole(space, MAX_ADDRESS - 4096, 1))
        .1;
    let transcript = drive(&input, 1);
    assert!(transcript.events[1].is_ok());
    assert!(matches!(
        transcript.events[2],
        Err(ProtocolError::NotAscending {
            expected: MAX_ADDRESS,
            ..
        })
    ));
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(
        tail in proptest::collection::vec(any::<u8>(), 0..9000), dialect in 0_usize..2, at_once in 1_usize..4,
    ) {
        let mut input = Stream::new(DIALECTS[dialect]).frame(|e| e.open(SpaceId::process(1))).1;
        input.extend(tail);
        drive(&input, at_once);
    }

    #[test]
    fn a_flipped_bit_in_a_dump_is_taken_or_refused_but_never_panics(bit in 0_usize..8 * 600, dialect in 0_usize..2) {
        let mut input = whole_dump(DIALECTS[dialect]);
        let bit = bit % (input.len() * 8);
        input[bit / 8] ^= 1 << (bit % 8);
        drive(&input, 1);
    }
}
