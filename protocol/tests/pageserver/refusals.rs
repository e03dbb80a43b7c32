//! Each way of breaking the protocol that ends the conversation, and a caller that does.

use permafrost_protocol::pageserver::{
    Dialect, Frame, MAX_ADDRESS, PageServer, ProtocolError, SpaceId, UnknownSpaceType, Want,
    command,
};

use crate::common::drive;
use crate::stream::{DIALECTS, Stream};

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
        let get = |vaddr, nr_pages| Frame {
            command: command::GET,
            flags: 0,
            dst_id: 1,
            vaddr,
            nr_pages,
        };
        assert_eq!(
            refused(dialect, get(0x1000, 65_536)),
            ProtocolError::TooManyPages {
                vaddr: 0x1000,
                nr_pages: 65_536
            }
        );
        let none = ProtocolError::NoPages { vaddr: 0x1000 };
        assert_eq!(refused(dialect, get(0x1000, 0)), none);
        let misaligned = ProtocolError::Misaligned { vaddr: 0x1001 };
        assert_eq!(refused(dialect, get(0x1001, 1)), misaligned);
    }
    let vaddr = 0x1000;
    let nr_pages = 1 << 40;
    let get = Frame {
        command: command::GET,
        flags: 0,
        nr_pages,
        ..good
    };
    assert_eq!(
        refused(Dialect::V32, get),
        ProtocolError::TooManyPages { vaddr, nr_pages }
    );
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
