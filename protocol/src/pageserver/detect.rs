//! Telling the two dialects apart by the first 24 bytes of a conversation.

use super::frame::{command, u32_at, u64_at};
use super::{Dialect, MAX_ADDRESS, MIN_FRAME_BYTES, ProtocolError, SpaceId};
use crate::PAGE_BYTES;

/// Lowest address that a page of a process can have (the default `vm.mmap_min_addr`), and more pages than any GET
/// requests: CRIU's requests 1,024 at most (`MAX_XFER_LEN` in `criu/uffd.c`).
const LEAST_ADDRESS: u64 = 65_536;

/// Maximum number of pids of a Linux system (`PID_MAX_LIMIT`).
const PID_LIMIT: u64 = 1 << 22;

/// Meaning of the first 24 bytes of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Detected {
    /// The bytes are a frame, or its first 24 bytes.
    Dialect(Dialect),
    /// The bytes are a CLOSE before anything else: all fields are 0 in either dialect, and no further bytes are
    /// needed.
    Close,
}

/// Detects the dialect by the first 24 bytes.
///
/// A client that sent the longer frame has its last 8 bytes on the way before it waits for a reply, and a client that
/// sent the shorter frame is never asked for more: so neither decision can dead-lock.
pub(super) fn detect(first: &[u8; MIN_FRAME_BYTES]) -> Result<Detected, ProtocolError> {
    let (Some(word), Some(at_8), Some(at_16)) =
        (u32_at(first, 0), u64_at(first, 8), u64_at(first, 16))
    else {
        return Err(ProtocolError::UnknownDialect { first: *first });
    };
    let unknown = ProtocolError::UnknownDialect { first: *first };
    let number = u16::try_from(word & 0xffff).unwrap_or(u16::MAX);
    let dialect = match number {
        // Byte 16 is dst_id, never 0, or vaddr, always 0 in these. Byte 8 is vaddr or nr_pages: 0 in both.
        command::OPEN2 | command::PARENT => match (at_8, at_16) {
            (0, 0) => Dialect::V32,
            (0, dst_id) => {
                SpaceId::from_dst_id(dst_id)?;
                Dialect::V24
            }
            _ => return Err(unknown),
        },
        // Releases that begin with these are far older than the 32-byte dialect.
        command::ADD | command::HOLE | command::OPEN => Dialect::V24,
        command::GET => {
            let is_address = |value: u64| {
                value.is_multiple_of(PAGE_BYTES) && (LEAST_ADDRESS..MAX_ADDRESS).contains(&value)
            };
            if is_address(at_8) && (1..=PID_LIMIT).contains(&at_16) {
                Dialect::V24
            } else if (1..LEAST_ADDRESS).contains(&at_8) && is_address(at_16) {
                Dialect::V32
            } else {
                return Err(unknown);
            }
        }
        command::CLOSE | command::FORCE_CLOSE if (at_8, at_16) == (0, 0) => {
            return Ok(Detected::Close);
        }
        command::CLOSE | command::FORCE_CLOSE => return Err(unknown),
        command::ADD_F => return Err(ProtocolError::PagesBeforeOpen),
        command::ADD_F_COMPRESSED => return Err(ProtocolError::Compressed),
        _ => return Err(ProtocolError::UnknownCommand { word }),
    };
    Ok(Detected::Dialect(dialect))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pageserver::Frame;

    fn first(frame: Frame, dialect: Dialect) -> [u8; 24] {
        frame.encode(dialect).unwrap().as_ref()[..24]
            .try_into()
            .unwrap()
    }

    #[test]
    fn opens_and_queries_tell_by_the_word_at_16() {
        for number in [command::OPEN2, command::PARENT] {
            for space in [
                SpaceId::process(1),
                SpaceId::process(4_194_303),
                SpaceId::shared_memory(0).unwrap(),
            ] {
                for dialect in [Dialect::V24, Dialect::V32] {
                    let frame = Frame::about(number, space);
                    assert_eq!(
                        detect(&first(frame, dialect)),
                        Ok(Detected::Dialect(dialect))
                    );
                }
            }
        }
    }

    #[test]
    fn gets_tell_by_which_word_is_an_address_and_the_padding_is_never_looked_at() {
        for (nr_pages, vaddr, pid) in [
            (1, 0x7fff_ffff_e000, 1),
            (1024, 0x40_0000, 4_194_304),
            (16, LEAST_ADDRESS, 65_536),
            (4096 / 4, 0x5555_5555_4000, 4096),
        ] {
            let frame = Frame {
                command: command::GET,
                flags: 0,
                nr_pages,
                vaddr,
                dst_id: pid,
            };
            assert_eq!(
                detect(&first(frame, Dialect::V24)),
                Ok(Detected::Dialect(Dialect::V24))
            );
            let mut bytes = first(frame, Dialect::V32);
            assert_eq!(detect(&bytes), Ok(Detected::Dialect(Dialect::V32)));
            bytes[4..8].copy_from_slice(&0x5555_u32.to_ne_bytes());
            assert_eq!(detect(&bytes), Ok(Detected::Dialect(Dialect::V32)));
        }
    }

    #[test]
    fn a_close_is_a_close_in_either() {
        for number in [command::CLOSE, command::FORCE_CLOSE] {
            let frame = Frame {
                command: number,
                flags: 0,
                nr_pages: 0,
                vaddr: 0,
                dst_id: 0,
            };
            for dialect in [Dialect::V24, Dialect::V32] {
                assert_eq!(detect(&first(frame, dialect)), Ok(Detected::Close));
            }
        }
    }

    #[test]
    fn what_is_neither_is_refused() {
        let open = Frame {
            vaddr: 4096,
            ..Frame::about(command::OPEN2, SpaceId::process(1))
        };
        assert!(matches!(
            detect(&first(open, Dialect::V24)),
            Err(ProtocolError::UnknownDialect { .. })
        ));
        let get = Frame {
            command: command::GET,
            flags: 0,
            nr_pages: 1,
            vaddr: 0x1234,
            dst_id: 1,
        };
        for dialect in [Dialect::V24, Dialect::V32] {
            assert!(matches!(
                detect(&first(get, dialect)),
                Err(ProtocolError::UnknownDialect { .. })
            ));
        }
        assert!(matches!(
            detect(b"GET / HTTP/1.1\r\nHost: x\r\n"[..24].try_into().unwrap()),
            Err(ProtocolError::UnknownCommand { .. })
        ));
    }
}
